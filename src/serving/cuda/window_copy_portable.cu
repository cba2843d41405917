#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/serving/window_copy.h"

namespace fovea::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 8;
constexpr int kTile = kThreads * kElementsPerThread;

struct CopyParams {
  Accessor<bf16_t, 3> window;
  Accessor<const int32_t, 1> slots;
  Accessor<const int32_t, 1> more_slots;  // may be null
  Accessor<bf16_t, 2> saved;
  int64_t tiles;  // of a window
  bool restores;
};

// One block a tile of a window, elements in the order of `saved`: its neighbours are neighbours in
// the pool too, but for the ends of rows.
__global__ void __launch_bounds__(kThreads)
    copy_windows_kernel(const __grid_constant__ CopyParams params) {
  const int64_t entry = blockIdx.x / params.tiles;
  const int64_t begin = (blockIdx.x - entry * params.tiles) * kTile;
  const int64_t own = params.slots.shape[0];
  const int64_t slot = entry < own ? params.slots(entry) : params.more_slots(entry - own);
  if (slot < 0 || slot >= params.window.shape[0]) return;
  const int64_t width = params.window.shape[2];
  const int64_t elements = params.window.shape[1] * width;
  bf16_t* const aside = params.saved.row(entry);
#pragma unroll
  for (int step = 0; step < kElementsPerThread; ++step) {
    const int64_t i = begin + step * kThreads + static_cast<int>(threadIdx.x);
    if (i >= elements) return;
    const int64_t row = i / width;
    bf16_t* const in_pool = params.window.row(slot, row) + (i - row * width);
    if (params.restores) {
      *in_pool = aside[i];
    } else {
      aside[i] = *in_pool;
    }
  }
}

}  // namespace

void copy_windows_cuda_portable(const WindowCopy& copy, bool restores, const Device& device,
                                Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  CopyParams params{};
  params.window = access<bf16_t, 3>(copy.window);
  params.slots = access<const int32_t, 1>(copy.slots);
  params.more_slots = access<const int32_t, 1>(copy.more_slots);
  params.saved = access<bf16_t, 2>(copy.saved);
  params.tiles = (params.window.shape[1] * params.window.shape[2] + kTile - 1) / kTile;
  params.restores = restores;
  cuda::launch("copy_windows", copy_windows_kernel,
               {dim3(cuda::grid_blocks(copy.num_entries() * params.tiles, 1)), dim3(kThreads)},
               stream, params);
}

}  // namespace fovea::internal
