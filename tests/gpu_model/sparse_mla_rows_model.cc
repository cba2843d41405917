// The kernel of sparse_mla over bf16 rows for compute capability 9.0 as the model runs it.
#include "tests/gpu_model/cuda_words.h"

#define sparse_mla_cuda_sm90_rows_workspace sparse_mla_model_rows_workspace
#define sparse_mla_cuda_sm90_rows sparse_mla_model_rows_run
#include "src/mla/cuda/sparse_mla_rows_sm90/launch.cu"

namespace fovea::internal::sparse_rows_sm90 {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::sparse_rows_sm90

#include <algorithm>

#include "tests/gpu_model/gpu_model.h"
#include "tests/gpu_model/sparse_mla_model.h"

namespace fovea::test::gpu {

void run_sparse_mla_rows(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  auto& memory = internal::sparse_rows_sm90::memory;
  // Nothing is zero by itself.
  std::memset(memory, 0xFF, sizeof(memory));
  // A plan for many rows orders lists.
  problem.max_rows = std::max<int64_t>(problem.max_rows, 1024);
  run_with_workspace(internal::sparse_mla_model_rows_workspace, internal::sparse_mla_model_rows_run,
                     problem, tensors);
}

}  // namespace fovea::test::gpu
