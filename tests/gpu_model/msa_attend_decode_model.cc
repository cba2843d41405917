// The kernel of msa_attend for few rows, as the model runs it. Its entry points get names of their
// own beside those of the library.
#include "tests/gpu_model/cuda_words.h"

#define msa_attend_cuda_sm90_decode_supports msa_attend_decode_model_supports
#define msa_attend_cuda_sm90_decode_preferred msa_attend_decode_model_preferred
#define msa_attend_cuda_sm90_decode_workspace msa_attend_decode_model_workspace
#define msa_attend_cuda_sm90_decode msa_attend_decode_model_run
#include "src/msa/cuda/msa_attend_decode_sm90/launch.cu"

namespace fovea::internal::msa::decode {

alignas(1024) thread_local uint8_t memory[256 << 10];  // shared memory of the block that runs

}  // namespace fovea::internal::msa::decode

#include "tests/gpu_model/msa_attend_model.h"

namespace fovea::test::gpu {

int64_t run_msa_attend_decode(const MsaAttendProblem& problem, const MsaAttendTensors& tensors) {
  const Device device{DeviceKind::kCuda, 0};
  const int64_t parts = internal::msa::decode::parts_of(problem, device);
  Settings& now = settings();
  now.cluster_blocks = static_cast<unsigned>(parts);
  now.shared_memory = internal::msa::decode::memory;
  now.shared_memory_bytes = sizeof(internal::msa::decode::memory);
  // Nothing is zero by itself.
  std::memset(internal::msa::decode::memory, 0xFF, sizeof(internal::msa::decode::memory));
  HostBuffer scratch(internal::msa_attend_decode_model_workspace(problem, device));
  if (scratch.bytes() > 0) std::memset(scratch.data(), 0xFF, scratch.bytes());
  internal::msa_attend_decode_model_run(problem, device, tensors, scratch.workspace(), Stream{});
  return parts;
}

}  // namespace fovea::test::gpu
