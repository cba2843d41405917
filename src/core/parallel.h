#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

/// Threads of the CPU implementations.
namespace fovea::internal {

/// Non-owning reference to a callable, so that starting a loop allocates nothing.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>>>
  FunctionRef(F&& f)  // NOLINT: implicit by design
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

/// One piece of a loop: indices [begin, end). `worker` is in [0, num_threads of the scope) and no
/// two pieces run at the same time under one worker number: it selects scratch memory, and must not
/// influence results.
using LoopBody = FunctionRef<void(int64_t begin, int64_t end, int worker)>;

/// Runs body over [0, count) in pieces of `grain` (the last may be shorter). The partition depends
/// on count and grain alone. Runs inside the innermost ThreadScope of the calling thread; without
/// one, or with one thread, in the calling thread. An exception of the body is rethrown after the
/// loop. Must not be nested.
void ParallelFor(int64_t count, int64_t grain, LoopBody body);

/// Sets the number of threads of the ParallelFor calls of this thread while it lives. Arenas are
/// made once per thread count and kept, so a scope allocates only on its first use.
class ThreadScope {
 public:
  explicit ThreadScope(int num_threads);
  ~ThreadScope();
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int previous_;
};

}  // namespace fovea::internal
