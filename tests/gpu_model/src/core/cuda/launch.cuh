#pragma once

#include "fovea/device.h"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/launch.cuh.
namespace fovea::internal::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  bool starts_early = false;
};

// One launch runs after the other.
inline void let_next_launch_start() {}
inline void wait_for_last_launch() {}

inline unsigned grid_blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

struct DeviceScope {
  explicit DeviceScope(int) {}
};

// Not the function of the library, which asks a driver.
static const test::gpu::Settings& device_facts(int) { return test::gpu::settings(); }

template <class... Params, class... Args>
void launch(const char*, void (*kernel)(Params...), const LaunchShape& shape, Stream,
            const Args&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0) return;
  if (static_cast<int64_t>(shape.shared_bytes) > test::gpu::settings().max_shared_bytes)
    throw std::logic_error("a launch asks for more shared memory than there is");
  test::gpu::run_grid(shape.grid, shape.block, [&] { kernel(args...); });
}

}  // namespace fovea::internal::cuda
