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
  size_t group;  // of the thread's
};

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Lane lane;
  std::vector<Copy> copies;
  size_t groups = 0;
  std::vector<std::vector<std::function<void()>>> series;  // of work, the last one open
  const std::function<bool()>* needs = nullptr;
  const Barrier* waits_for = nullptr;
  uint64_t until = 0;
  uint64_t cluster_rounds = 0;  // before the thread arrived
  unsigned exchanges = 0;
  bool done = false;
};

struct Block {
  std::vector<Fiber> fibers;
  Barrier barriers[16];
  Barrier warps[32];
  unsigned char slots[32][2][32][kExchangeBytes];
  std::vector<unsigned char> memory;  // while another block of the cluster runs
  size_t left = 0;                    // threads that have not ended
};

// The blocks that run at the same time: one, or a cluster.
struct Cluster {
  std::vector<Block> blocks;
  Barrier barrier;
  Block* block = nullptr;  // that runs
  Fiber* current = nullptr;
  ucontext_t scheduler{};
  const std::function<void()>* kernel = nullptr;
  std::string failure;
};
Cluster cluster;

void stop_until(const Barrier& barrier, uint64_t rounds) {
  Fiber& fiber = *cluster.current;
  fiber.waits_for = &barrier;
  fiber.until = rounds;
  swapcontext(&fiber.context, &cluster.scheduler);
}

void arrive(Barrier& barrier, int threads) {
  if (++barrier.count < threads) return;
  barrier.count = 0;
  ++barrier.rounds;
}

void wait(Barrier& barrier, int threads) {
  const uint64_t rounds = barrier.rounds;
  arrive(barrier, threads);
  if (barrier.rounds == rounds) stop_until(barrier, rounds + 1);
}

// No exception may leave a fiber.
void run_fiber() {
  Fiber& fiber = *cluster.current;
  try {
    (*cluster.kernel)();
    if (!fiber.copies.empty()) cluster.failure = "a thread ended with copies under way";
    if (fiber.series.size() > 1 || !fiber.series.back().empty())
      cluster.failure = "a thread ended with work under way";
  } catch (const std::exception& error) {
    cluster.failure = error.what();
  }
  fiber.done = true;
  swapcontext(&fiber.context, &cluster.scheduler);
}

bool may_run(const Fiber& fiber) {
  if (fiber.needs != nullptr && !(*fiber.needs)()) return false;
  return !fiber.done && (fiber.waits_for == nullptr || fiber.waits_for->rounds >= fiber.until);
}

// Until every thread waits or has ended; whether one moved.
bool run_block(Block& block, const std::vector<size_t>& order) {
  bool moved_at_all = false;
  for (bool moved = true; moved && cluster.failure.empty();) {
    moved = false;
    for (const size_t i : order) {
      Fiber& fiber = block.fibers[i];
      if (!may_run(fiber)) continue;
      moved = moved_at_all = true;
      fiber.waits_for = nullptr;
      cluster.current = &fiber;
      swapcontext(&cluster.scheduler, &fiber.context);
      if (fiber.done) --block.left;
      if (!cluster.failure.empty()) break;
    }
  }
  return moved_at_all;
}

void run_cluster(const std::vector<size_t>& order) {
  const Settings& now = settings();
  const auto any_left = [] {
    for (const Block& block : cluster.blocks) {
      if (block.left > 0) return true;
    }
    return false;
  };
  while (any_left() && cluster.failure.empty()) {
    bool moved = false;
    for (Block& block : cluster.blocks) {
      cluster.block = &block;
      auto* const memory = static_cast<unsigned char*>(now.shared_memory);
      if (cluster.blocks.size() > 1) std::copy(block.memory.begin(), block.memory.end(), memory);
      moved = run_block(block, order) || moved;
      if (cluster.blocks.size() > 1) block.memory.assign(memory, memory + now.shared_memory_bytes);
    }
    if (!moved) cluster.failure = "threads wait for a barrier that others never reach";
  }
  if (!cluster.failure.empty()) throw std::logic_error(cluster.failure);
}

void start_block(Block& block, const Dim& at) {
  for (Barrier& barrier : block.barriers) barrier = {};
  for (Barrier& barrier : block.warps) barrier = {};
  block.left = block.fibers.size();
  for (size_t i = 0; i < block.fibers.size(); ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.lane = {
        {static_cast<unsigned>(i), 0, 0}, at, {static_cast<unsigned>(block.fibers.size()), 1, 1}};
    fiber.copies.clear();
    fiber.groups = 0;
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

int cluster_threads() {
  return static_cast<int>(cluster.blocks.size() * cluster.block->fibers.size());
}

}  // namespace

const Lane& lane() { return cluster.current->lane; }

void wait_block(int barrier, int threads) {
  wait(cluster.block->barriers[barrier],
       threads > 0 ? threads : static_cast<int>(cluster.block->fibers.size()));
}
void arrive_block(int barrier, int threads) { arrive(cluster.block->barriers[barrier], threads); }
void wait_warp() { wait(cluster.block->warps[lane().thread.x / 32], 32); }
void wait_until(const std::function<bool()>& is_true) {
  Fiber& fiber = *cluster.current;
  while (!is_true()) {
    fiber.needs = &is_true;
    swapcontext(&fiber.context, &cluster.scheduler);
    fiber.needs = nullptr;
  }
}

void arrive_cluster() {
  cluster.current->cluster_rounds = cluster.barrier.rounds;
  arrive(cluster.barrier, cluster_threads());
}
void wait_cluster() {
  const uint64_t rounds = cluster.current->cluster_rounds + 1;
  if (cluster.barrier.rounds < rounds) stop_until(cluster.barrier, rounds);
}
unsigned cluster_rank() { return static_cast<unsigned>(cluster.block - cluster.blocks.data()); }
void* of_cluster(const void* own, unsigned rank) {
  const Settings& now = settings();
  const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(own) -
                                          static_cast<const unsigned char*>(now.shared_memory));
  if (offset >= now.shared_memory_bytes || rank >= cluster.blocks.size())
    throw std::logic_error("an address that no block of the cluster has");
  return rank == cluster_rank() ? const_cast<void*>(own)
                                : cluster.blocks[rank].memory.data() + offset;
}

// Two sets in turn: who shows the next value may be ahead of those that still read this one.
unsigned char (*exchange_slots())[kExchangeBytes] {
  Fiber& fiber = *cluster.current;
  return cluster.block->slots[fiber.lane.thread.x / 32][fiber.exchanges++ % 2];
}

// Until it is waited for, neither the old bytes nor the new ones are there.
void start_copy(void* to, const void* from, int bytes, bool present) {
  need_alignment(to, static_cast<uintptr_t>(bytes));
  if (present) need_alignment(from, static_cast<uintptr_t>(bytes));
  std::memset(to, 0xFF, static_cast<size_t>(bytes));
  cluster.current->copies.push_back({to, from, bytes, present, cluster.current->groups});
}

void end_copy_group() { ++cluster.current->groups; }

void finish_copies(size_t pending) {
  Fiber& fiber = *cluster.current;
  const auto is_pending = [&](const Copy& copy) { return copy.group + pending >= fiber.groups; };
  for (const Copy& copy : fiber.copies) {
    if (is_pending(copy)) continue;
    if (copy.present) {
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    } else {
      std::memset(copy.to, 0, static_cast<size_t>(copy.bytes));
    }
  }
  std::erase_if(fiber.copies, [&](const Copy& copy) { return !is_pending(copy); });
}
void finish_copies() {
  end_copy_group();
  finish_copies(0);
}

void start_work(std::function<void()> work) {
  cluster.current->series.back().push_back(std::move(work));
}
void close_work() { cluster.current->series.emplace_back(); }
void finish_work(int num_left) {
  auto& series = cluster.current->series;
  while (static_cast<int>(series.size()) - 1 > num_left) {
    for (const auto& work : series.front()) work();
    series.erase(series.begin());
  }
}

void run_grid(const Dim& grid, const Dim& threads, const std::function<void()>& kernel) {
  const unsigned wanted = settings().cluster_blocks;
  const unsigned size = grid.x % wanted == 0 ? wanted : 1;
  if (cluster.blocks.size() != size) cluster.blocks = std::vector<Block>(size);
  for (Block& block : cluster.blocks) {
    if (block.fibers.size() != threads.x) block.fibers = std::vector<Fiber>(threads.x);
  }
  cluster.kernel = &kernel;
  cluster.barrier = {};
  std::vector<size_t> order(threads.x);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937 random(settings().seed);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; x += size) {
      std::shuffle(order.begin(), order.end(), random);
      cluster.failure.clear();
      for (unsigned i = 0; i < size; ++i) {
        start_block(cluster.blocks[i], {x + i, y, 0});
        // Nothing is zero by itself.
        if (size > 1) cluster.blocks[i].memory.assign(settings().shared_memory_bytes, 0xFF);
      }
      run_cluster(order);
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
