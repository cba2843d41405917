#include "tests/gpu_model/gpu_model.h"

#include <ucontext.h>

#include <memory>
#include <random>
#include <string>

namespace fovea::test::gpu {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;

struct Barrier {
  int count = 0;
  uint64_t rounds = 0;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool present;
};

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Lane lane;
  std::vector<Copy> copies;
  std::vector<std::vector<std::function<void()>>> series;  // of work, the last one open
  const std::function<bool()>* needs = nullptr;
  const Barrier* waits_for = nullptr;
  uint64_t until = 0;
  unsigned exchanges = 0;
  bool done = false;
};

// Of the block that runs.
struct Block {
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;
  ucontext_t scheduler{};
  Barrier barriers[16];
  Barrier warps[32];
  unsigned char slots[32][2][32][kExchangeBytes];
  const std::function<void()>* kernel = nullptr;
  std::string failure;
};
Block block;

// Whether the arrival was the last one.
bool arrive(Barrier& barrier, int threads) {
  if (++barrier.count < threads) return false;
  barrier.count = 0;
  ++barrier.rounds;
  return true;
}

void wait(Barrier& barrier, int threads) {
  if (arrive(barrier, threads)) return;
  Fiber& fiber = *block.current;
  fiber.waits_for = &barrier;
  fiber.until = barrier.rounds + 1;
  swapcontext(&fiber.context, &block.scheduler);
}

// No exception may leave a fiber.
void run_fiber() {
  Fiber& fiber = *block.current;
  try {
    (*block.kernel)();
    if (!fiber.copies.empty()) block.failure = "a thread ended with copies under way";
    if (fiber.series.size() > 1 || !fiber.series.back().empty())
      block.failure = "a thread ended with work under way";
  } catch (const std::exception& error) {
    block.failure = error.what();
  }
  fiber.done = true;
  swapcontext(&fiber.context, &block.scheduler);
}

bool may_run(const Fiber& fiber) {
  if (fiber.needs != nullptr && !(*fiber.needs)()) return false;
  return !fiber.done && (fiber.waits_for == nullptr || fiber.waits_for->rounds >= fiber.until);
}

void run_block(const std::vector<size_t>& order) {
  for (size_t left = order.size(); left > 0 && block.failure.empty();) {
    bool moved = false;
    for (const size_t i : order) {
      Fiber& fiber = block.fibers[i];
      if (!may_run(fiber)) continue;
      moved = true;
      fiber.waits_for = nullptr;
      block.current = &fiber;
      swapcontext(&block.scheduler, &fiber.context);
      if (fiber.done) --left;
    }
    if (!moved) block.failure = "threads wait for a barrier that others never reach";
  }
  if (!block.failure.empty()) throw std::logic_error(block.failure);
}

void start_block(const Dim& at) {
  for (Barrier& barrier : block.barriers) barrier = {};
  for (Barrier& barrier : block.warps) barrier = {};
  block.failure.clear();
  for (size_t i = 0; i < block.fibers.size(); ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.lane = {
        {static_cast<unsigned>(i), 0, 0}, at, {static_cast<unsigned>(block.fibers.size()), 1, 1}};
    fiber.copies.clear();
    fiber.series.assign(1, {});
    fiber.needs = nullptr;
    fiber.waits_for = nullptr;
    fiber.exchanges = 0;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

}  // namespace

const Lane& lane() { return block.current->lane; }

void wait_block(int barrier, int threads) {
  wait(block.barriers[barrier], threads > 0 ? threads : static_cast<int>(block.fibers.size()));
}
void arrive_block(int barrier, int threads) { arrive(block.barriers[barrier], threads); }
void wait_warp() { wait(block.warps[lane().thread.x / 32], 32); }
void wait_until(const std::function<bool()>& is_true) {
  Fiber& fiber = *block.current;
  while (!is_true()) {
    fiber.needs = &is_true;
    swapcontext(&fiber.context, &block.scheduler);
    fiber.needs = nullptr;
  }
}

// Two sets in turn: who shows the next value may be ahead of those that still read this one.
unsigned char (*exchange_slots())[kExchangeBytes] {
  Fiber& fiber = *block.current;
  return block.slots[fiber.lane.thread.x / 32][fiber.exchanges++ % 2];
}

// Until it is waited for, neither the old bytes nor the new ones are there.
void start_copy(void* to, const void* from, int bytes, bool present) {
  need_alignment(to, static_cast<uintptr_t>(bytes));
  if (present) need_alignment(from, static_cast<uintptr_t>(bytes));
  std::memset(to, 0xFF, static_cast<size_t>(bytes));
  block.current->copies.push_back({to, from, bytes, present});
}

void finish_copies() {
  for (const Copy& copy : block.current->copies) {
    if (copy.present) {
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    } else {
      std::memset(copy.to, 0, static_cast<size_t>(copy.bytes));
    }
  }
  block.current->copies.clear();
}

void start_work(std::function<void()> work) {
  block.current->series.back().push_back(std::move(work));
}
void close_work() { block.current->series.emplace_back(); }
void finish_work(int num_left) {
  auto& series = block.current->series;
  while (static_cast<int>(series.size()) - 1 > num_left) {
    for (const auto& work : series.front()) work();
    series.erase(series.begin());
  }
}

void run_grid(const Dim& grid, const Dim& threads, const std::function<void()>& kernel) {
  if (block.fibers.size() != threads.x) block.fibers = std::vector<Fiber>(threads.x);
  block.kernel = &kernel;
  std::vector<size_t> order(threads.x);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937 random(settings().seed);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      std::shuffle(order.begin(), order.end(), random);
      start_block({x, y, 0});
      run_block(order);
    }
  }
}

Settings& settings() {
  static Settings values;
  return values;
}

void need_alignment(const void* address, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    throw std::logic_error("an access of " + std::to_string(bytes) + " bytes is not aligned");
}

}  // namespace fovea::test::gpu
