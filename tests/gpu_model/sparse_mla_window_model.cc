// The kernel of sparse_mla over short lists for compute capability 9.0 as the model runs it.
#include "tests/gpu_model/cuda_words.h"

#define sparse_mla_cuda_sm90_window sparse_mla_model_window_run
#include "src/mla/cuda/sparse_mla_window_sm90/launch.cu"

namespace fovea::internal::sparse_window_sm90 {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::sparse_window_sm90

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/sparse_mla_model.h"

namespace fovea::test::gpu {

void run_sparse_mla_window(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  auto& memory = internal::sparse_window_sm90::memory;
  // Nothing is zero by itself.
  std::memset(memory, 0xFF, sizeof(memory));
  const auto no_workspace = [](const SparseMlaProblem&, const Device&) { return size_t{0}; };
  run_with_workspace(no_workspace, internal::sparse_mla_model_window_run, problem, tensors);
}

}  // namespace fovea::test::gpu
