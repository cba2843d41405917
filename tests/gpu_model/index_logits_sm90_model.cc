// The kernels of index_logits for compute capability 9.0 as the model runs them.
#include "tests/gpu_model/cuda_words.h"

#define index_logits_cuda_sm90 index_logits_model_sm90_run
#include "src/index/cuda/index_logits_sm90/launch.cu"

namespace fovea::internal::index_sm90 {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::index_sm90

#include "tests/gpu_model/index_logits_model.h"

namespace fovea::test::gpu {

void run_index_logits_sm90(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors) {
  // Nothing is zero by itself.
  std::memset(internal::index_sm90::memory, 0xFF, sizeof(internal::index_sm90::memory));
  internal::index_logits_model_sm90_run(problem, Device{DeviceKind::kCuda, 0}, tensors, {}, {});
}

}  // namespace fovea::test::gpu
