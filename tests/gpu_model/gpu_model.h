#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

/// A model of a GPU on the host, for kernels that no GPU is at hand for: a block's threads are
/// fibers of one thread that change at barriers, in an order that the seed shuffles; copies arrive
/// as late as they may; tensor cores work lane by lane with the layout of fragments that PTX
/// describes. The headers below src/core/cuda beside this file stand for those of the library.
///
/// It finds wrong addresses, masks, lane maps, barriers that some threads miss, copies that nobody
/// waits for and alignment that a GPU needs. It knows nothing of time, and races only as far as
/// shuffling the threads shows them.
namespace fovea::test::gpu {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
  Dim(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: as dim3
  Dim() = default;
};

/// What a thread that runs is.
struct Lane {
  Dim thread, block, threads;  ///< `threads`: of a block
};
const Lane& lane();

/// Waits until `threads` threads have come to barrier 0..15 of the block; 0: all of the block.
void wait_block(int barrier, int threads);
/// Counts the thread in at such a barrier without waiting.
void arrive_block(int barrier, int threads);
/// The same for the lanes of a warp.
void wait_warp();
/// Lets the other threads go on until `is_true`.
void wait_until(const std::function<bool()>& is_true);

/// What a lane shows to its warp.
inline constexpr int kExchangeBytes = 64;
unsigned char (*exchange_slots())[kExchangeBytes];  // those of the next exchange, [32]
/// Shows `value` to the warp; from() reads that of a lane until the next exchange.
template <class T>
class Exchange {
 public:
  static_assert(sizeof(T) <= kExchangeBytes);
  explicit Exchange(const T& value) : slots_(exchange_slots()) {
    std::memcpy(slots_[lane().thread.x % 32], &value, sizeof(T));
    wait_warp();
  }
  T from(unsigned other) const {
    T value;
    std::memcpy(&value, slots_[other], sizeof(T));
    return value;
  }

 private:
  unsigned char (*slots_)[kExchangeBytes];
};

/// A copy into shared memory that the thread has started.
void start_copy(void* to, const void* from, int bytes, bool present);
/// Ends a group of copies.
void end_copy_group();
/// Finishes all copies except those of the `pending` latest groups.
void finish_copies(size_t pending);
/// Finishes all copies, groups or not.
void finish_copies();

/// Work that the thread has begun, in series, each done when the thread waits for it.
void start_work(std::function<void()> work);
void close_work();               ///< Ends a series.
void finish_work(int num_left);  ///< All series but the last ones.

/// The barrier of a cluster, in two halves.
void arrive_cluster();
void wait_cluster();
/// Where block `rank` of the cluster has what this one has at `own` in settings().shared_memory.
void* of_cluster(const void* own, unsigned rank);
unsigned cluster_rank();

/// Runs every block of a grid, threads x blocks; throws std::logic_error when its threads wait for
/// ever or leave copies or work behind. The blocks of a cluster run by turns, each until its
/// threads wait.
void run_grid(const Dim& grid, const Dim& block, const std::function<void()>& kernel);

/// What the modelled device has, and the order of its threads; tests change them.
struct Settings {
  int num_sms = 132;
  int64_t max_shared_bytes = 232448;
  unsigned seed = 1;
  unsigned cluster_blocks = 1;    ///< Of grids that they divide
  void* shared_memory = nullptr;  ///< Of the block that runs, for clusters
  size_t shared_memory_bytes = 0;
};
Settings& settings();

/// Throws std::logic_error unless `bytes` divide the address.
void need_alignment(const void* address, uintptr_t bytes);

}  // namespace fovea::test::gpu
