#include "src/core/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if !defined(FOVEA_STD_THREADS)
#include <tbb/global_control.h>
#include <tbb/task_arena.h>
#endif

// A loop takes a crew: the calling thread, and tasks of oneTBB that look for its next loop for a
// while before they end. To start a thread that sleeps takes tens of microseconds, on an idle
// virtual machine hundreds, as long as many loops; one that is looking starts in less than one.
namespace fovea::internal {
namespace {

thread_local int scope_threads = 1;

// How long a helper looks for the next loop, and a caller for the end of its own: longer than what
// a step of a model does between two operators.
constexpr std::chrono::microseconds kLookTime(100);
// Looks between two looks at the clock, which take a microsecond or two.
constexpr int kLooks = 64;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Looks at a value for a while; returns whether it came to hold.
template <class T, class Holds>
bool look(const std::atomic<T>& value, Holds holds) {
  const auto end = std::chrono::steady_clock::now() + kLookTime;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (holds(value.load())) return true;
      relax();
    }
    // Where threads outnumber cores, one that only looks must not keep one from working.
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

#if defined(FOVEA_STD_THREADS)

// Plain threads, for the thread sanitizer, which does not understand the scheduler of oneTBB.
class Helpers {
 public:
  explicit Helpers(int) {}
  template <class Body>
  void start(Body body) {
    std::thread(body).detach();
  }
};

#else

class Helpers {
 public:
  explicit Helpers(int num_threads) : arena_(num_threads) {
    // More threads than cores are legal (tests ask for them), but oneTBB grants them only on
    // request. Crews are made one at a time.
    static tbb::global_control* oversubscription = nullptr;
    constexpr size_t kMostThreads = 1024;
    if (oversubscription == nullptr &&
        num_threads > static_cast<int>(std::thread::hardware_concurrency())) {
      oversubscription =
          new tbb::global_control(tbb::global_control::max_allowed_parallelism, kMostThreads);
    }
  }
  template <class Body>
  void start(Body body) {
    arena_.enqueue(body);
  }

 private:
  tbb::task_arena arena_;
};

#endif

// Neighbouring pieces of a loop, first offered to one worker. Others take from them when they have
// none left.
struct alignas(64) Span {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
  std::atomic<bool> has_worker{false};  // a helper goes by this number
};

// The calling thread is worker 0 of the loops that it runs. Never destroyed: helpers end when they
// like.
class Crew {
 public:
  explicit Crew(int num_threads)
      : spans_(static_cast<size_t>(num_threads)),
        may_look_(num_threads <= static_cast<int>(std::thread::hardware_concurrency())),
        helpers_(num_threads) {}

  void run(int64_t pieces, FunctionRef<void(int64_t, int)> piece) {
    const int64_t num_spans = num_threads();
    for (int64_t i = 0; i < num_spans; ++i) {
      Span& span = spans_[static_cast<size_t>(i)];
      span.next = pieces * i / num_spans;
      span.end = pieces * (i + 1) / num_spans;
    }
    piece_ = &piece;
    ++loop_;
    const int wanted = static_cast<int>(std::min(pieces, num_spans)) - 1;
    while (num_helpers_ < wanted) {
      ++num_helpers_;
      helpers_.start([this] { help(); });
    }
    take_pieces(0);
    ++loop_;
    // Who enters from now on finds the loop closed; those inside end their pieces.
    const auto is_none = [](int count) { return count == 0; };
    if (!may_look_ || !look(num_inside_, is_none))
      for (int count = num_inside_; count != 0; count = num_inside_) num_inside_.wait(count);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static bool is_open(uint32_t loop) { return loop % 2 == 1; }
  int num_threads() const { return static_cast<int>(spans_.size()); }

  // A number that no other helper has; -1: all are taken.
  int take_number() {
    for (int worker = 1; worker < num_threads(); ++worker) {
      if (!spans_[static_cast<size_t>(worker)].has_worker.exchange(true)) return worker;
    }
    return -1;
  }

  void help() {
    uint32_t seen = 0;
    while (true) {
      if (const int worker = take_number(); worker > 0) {
        follow(worker, &seen);
        spans_[static_cast<size_t>(worker)].has_worker = false;
      } else {
        seen = loop_;  // one too many
      }
      --num_helpers_;
      // A caller that opened a loop before may count on this helper.
      if (const uint32_t loop = loop_; loop == seen || !is_open(loop)) return;
      ++num_helpers_;
    }
  }

  // Takes part in loops until there has been no new one for a while.
  void follow(int worker, uint32_t* seen) {
    const auto is_new = [seen](uint32_t loop) { return loop != *seen && is_open(loop); };
    while (is_new(loop_) || (may_look_ && look(loop_, is_new))) {
      // Whether it is still open counts after entering: then the caller waits.
      ++num_inside_;
      *seen = loop_;
      if (is_open(*seen)) take_pieces(worker);
      if (--num_inside_ == 0) num_inside_.notify_one();
    }
  }

  void take_pieces(int worker) {
    try {
      for (int i = 0; i < num_threads(); ++i) {
        Span& span = spans_[static_cast<size_t>((worker + i) % num_threads())];
        while (span.next < span.end) {
          const int64_t taken = span.next++;
          if (taken < span.end) (*piece_)(taken, worker);
        }
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex_);
      failure_ = std::current_exception();
      for (Span& span : spans_) span.next = span.end;
    }
  }

  // Of the loop in hand.
  std::vector<Span> spans_;
  const FunctionRef<void(int64_t, int)>* piece_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;

  const bool may_look_;  // more threads than cores take each other's time
  Helpers helpers_;
  alignas(64) std::atomic<uint32_t> loop_{0};   // odd: open
  alignas(64) std::atomic<int> num_inside_{0};  // helpers that may take pieces
  std::atomic<int> num_helpers_{0};             // started and not ended
};

// Crews by their number of threads: one for each caller at a time.
class Crews {
 public:
  Crew* take(int num_threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Kind& kind = kinds_[num_threads];
    if (kind.idle.empty()) {
      kind.idle.reserve(++kind.made);  // to give one back allocates nothing
      return new Crew(num_threads);
    }
    Crew* const crew = kind.idle.back();
    kind.idle.pop_back();
    return crew;
  }

  void give_back(int num_threads, Crew* crew) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kinds_[num_threads].idle.push_back(crew);
  }

 private:
  struct Kind {
    std::vector<Crew*> idle;
    size_t made = 0;
  };
  std::mutex mutex_;
  std::map<int, Kind> kinds_;
};

Crews& crews() {
  static auto* const all = new Crews;  // its crews outlive everything
  return *all;
}

// A crew as long as a loop runs.
class HiredCrew {
 public:
  explicit HiredCrew(int num_threads)
      : num_threads_(num_threads), crew_(crews().take(num_threads)) {}
  ~HiredCrew() { crews().give_back(num_threads_, crew_); }
  HiredCrew(const HiredCrew&) = delete;
  HiredCrew& operator=(const HiredCrew&) = delete;
  Crew* operator->() const { return crew_; }

 private:
  int num_threads_;
  Crew* crew_;
};

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
  HiredCrew(scope_threads)->run(pieces, piece);
}

}  // namespace fovea::internal
