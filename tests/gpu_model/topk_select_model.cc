// The kernel of topk_select for compute capability 9.0 as the model runs it. Its entry point gets a
// name of its own beside that of the library.
#include "tests/gpu_model/cuda_words.h"

#define topk_select_cuda_sm90 topk_select_model_run
#include "src/index/cuda/topk_select_sm90/launch.cu"

namespace fovea::internal::topk_sm90 {

alignas(1024) thread_local uint8_t memory[227 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::topk_sm90

#include "tests/gpu_model/topk_select_model.h"

namespace fovea::test::gpu {

int64_t run_topk_select_sm90(const TopkSelectProblem& problem, const TopkSelectTensors& tensors) {
  Settings& now = settings();
  const int64_t blocks = internal::blocks_of(problem, tensors, now.num_sms);
  if (blocks == 0 && !internal::can_stream(problem, tensors)) return -1;
  now.cluster_blocks = static_cast<unsigned>(std::max<int64_t>(blocks, 1));
  now.shared_memory = internal::topk_sm90::memory;
  now.shared_memory_bytes = sizeof(internal::topk_sm90::memory);
  // Nothing is zero by itself.
  std::memset(internal::topk_sm90::memory, 0xFF, sizeof(internal::topk_sm90::memory));
  internal::topk_select_model_run(problem, {DeviceKind::kCuda, 0}, tensors, {}, Stream{});
  return blocks;
}

std::vector<size_t> topk_select_sm90_sample(const float* logits, int64_t length) {
  using internal::topk_sm90::StreamSample;
  const internal::topk_sm90::Row row(logits, length);
  const internal::topk_sm90::WholeGroups whole(row);
  std::vector<size_t> positions;
  for (uint32_t run = 0; run < StreamSample::kSize / 8; ++run) {
    const uint32_t group = whole.begin + StreamSample::group(run, whole.count);
    for (int i = 0; i < 8; ++i) positions.push_back(row.position(group, i));
  }
  return positions;
}

}  // namespace fovea::test::gpu
