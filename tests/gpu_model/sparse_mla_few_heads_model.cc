// The kernel of sparse_mla for few heads and compute capability 9.0 as the model runs it; the fold
// of parts is in sparse_mla_model.cc.
#include "tests/gpu_model/cuda_words.h"

#define launch_fold launch_fold_on_model
#define sparse_mla_cuda_sm90_few_heads_workspace sparse_mla_model_few_heads_workspace
#define sparse_mla_cuda_sm90_few_heads sparse_mla_model_few_heads_run
#include "src/mla/cuda/sparse_mla_few_heads_sm90/launch.cu"

namespace fovea::internal::sparse_few_heads_sm90 {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::sparse_few_heads_sm90

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/sparse_mla_model.h"

namespace fovea::test::gpu {

void run_sparse_mla_few_heads(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  auto& memory = internal::sparse_few_heads_sm90::memory;
  // Nothing is zero by itself.
  std::memset(memory, 0xFF, sizeof(memory));
  run_with_workspace(internal::sparse_mla_model_few_heads_workspace,
                     internal::sparse_mla_model_few_heads_run, problem, tensors);
}

}  // namespace fovea::test::gpu
