// The kernels of sparse_mla for compute capability 9.0 as the model runs them; the fold of parts is
// in sparse_mla_model.cc.
#include "tests/gpu_model/cuda_words.h"

#define launch_fold launch_fold_on_model
#define sparse_mla_cuda_sm90_workspace sparse_mla_model_sm90_workspace
#define sparse_mla_cuda_sm90 sparse_mla_model_sm90_run
#include "src/mla/cuda/sparse_mla_sm90/launch.cu"

namespace fovea::internal::sparse_sm90 {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::sparse_sm90

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/sparse_mla_model.h"

namespace fovea::test::gpu {

void run_sparse_mla_sm90(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  Settings& now = settings();
  now.cluster_blocks = internal::blocks_together(problem);
  now.shared_memory = internal::sparse_sm90::memory;
  now.shared_memory_bytes = sizeof(internal::sparse_sm90::memory);
  // Nothing is zero by itself.
  std::memset(internal::sparse_sm90::memory, 0xFF, sizeof(internal::sparse_sm90::memory));
  run_with_workspace(internal::sparse_mla_model_sm90_workspace, internal::sparse_mla_model_sm90_run,
                     problem, tensors);
}

}  // namespace fovea::test::gpu
