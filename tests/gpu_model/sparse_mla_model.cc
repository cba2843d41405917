// The kernels of sparse_mla as the model runs them. Its entry points get names of their own beside
// those of the library.
#include "tests/gpu_model/cuda_words.h"

#define launch_fold launch_fold_on_model
#define sparse_mla_cuda_supports sparse_mla_model_supports
#define sparse_mla_cuda_workspace sparse_mla_model_workspace
#define sparse_mla_cuda_portable sparse_mla_model_run
#include "src/mla/cuda/sparse_mla_fold.cu"
#include "src/mla/cuda/sparse_mla_portable.cu"

namespace fovea::internal {
namespace {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace
}  // namespace fovea::internal

#include "tests/gpu_model/sparse_mla_model.h"

namespace fovea::test::gpu {

bool& sparse_mla_has_clusters() { return internal::cuda::model_has_clusters; }

void run_sparse_mla(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  settings().shared_memory = internal::memory;
  settings().shared_memory_bytes = sizeof(internal::memory);
  // Nothing is zero by itself.
  std::memset(internal::memory, 0xFF, sizeof(internal::memory));
  run_with_workspace(internal::sparse_mla_model_workspace, internal::sparse_mla_model_run, problem,
                     tensors);
}

}  // namespace fovea::test::gpu
