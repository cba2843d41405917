#include "src/core/parallel.h"

#include <algorithm>

#if defined(FOVEA_STD_THREADS)
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>
#else
#include <tbb/blocked_range.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#endif

namespace fovea::internal {
namespace {

thread_local int scope_threads = 1;

#if defined(FOVEA_STD_THREADS)

// Plain threads, for the thread sanitizer, which does not understand the scheduler of oneTBB.
void run_pieces(int num_threads, int64_t pieces, FunctionRef<void(int64_t, int)> piece) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int worker = 0; worker < num_threads; ++worker) {
    threads.emplace_back([&, worker] {
      try {
        for (int64_t i = next++; i < pieces; i = next++) piece(i, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

#else

tbb::task_arena& arena(int num_threads) {
  static std::mutex mutex;
  // Never destroyed: the worker threads of oneTBB end with the process.
  static auto* const arenas = new std::map<int, std::unique_ptr<tbb::task_arena>>;
  const std::lock_guard<std::mutex> lock(mutex);
  // More threads than cores are legal (tests ask for them), but oneTBB grants them only on request.
  static tbb::global_control* oversubscription = nullptr;
  constexpr int kMostThreads = 1024;
  if (oversubscription == nullptr &&
      num_threads > static_cast<int>(std::thread::hardware_concurrency())) {
    oversubscription =
        new tbb::global_control(tbb::global_control::max_allowed_parallelism, kMostThreads);
  }
  std::unique_ptr<tbb::task_arena>& entry = (*arenas)[num_threads];
  if (!entry) entry = std::make_unique<tbb::task_arena>(num_threads);
  return *entry;
}

void run_pieces(int num_threads, int64_t pieces, FunctionRef<void(int64_t, int)> piece) {
  arena(num_threads).execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<int64_t>(0, pieces, 1),
        [&](const tbb::blocked_range<int64_t>& range) {
          const int worker = tbb::this_task_arena::current_thread_index();
          for (int64_t i = range.begin(); i < range.end(); ++i) piece(i, worker);
        },
        tbb::simple_partitioner());
  });
}

#endif

}  // namespace

ThreadScope::ThreadScope(int num_threads) : previous_(scope_threads) {
  scope_threads = std::max(1, num_threads);
}

ThreadScope::~ThreadScope() { scope_threads = previous_; }

void ParallelFor(int64_t count, int64_t grain, LoopBody body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  const int64_t pieces = (count + grain - 1) / grain;
  const auto piece = [&](int64_t i, int worker) {
    body(i * grain, std::min(count, (i + 1) * grain), worker);
  };
  if (scope_threads == 1 || pieces == 1) {
    for (int64_t i = 0; i < pieces; ++i) piece(i, 0);
    return;
  }
  run_pieces(scope_threads, pieces, piece);
}

}  // namespace fovea::internal
