// The kernels of msa_attend that go block by block, as the model runs them. Their entry points get
// names of their own beside those of the library.
#include "tests/gpu_model/cuda_words.h"

#define msa_attend_cuda_sm90_supports msa_attend_model_supports
#define msa_attend_cuda_sm90_preferred msa_attend_model_preferred
#define msa_attend_cuda_sm90_workspace msa_attend_model_workspace
#define msa_attend_cuda_sm90 msa_attend_model_run
#define launch_lists launch_lists_on_model
#include "src/msa/cuda/msa_attend_sm90/lists.cu"

#include "src/msa/cuda/msa_attend_sm90/launch.cu"

namespace fovea::internal::msa::by_block {

// Shared memory of the block that runs: of lists, of items.
namespace {
alignas(1024) thread_local uint8_t memory[128 << 10];
}  // namespace
alignas(1024) thread_local uint8_t item_memory[128 << 10];

}  // namespace fovea::internal::msa::by_block

#include "tests/gpu_model/msa_attend_model.h"

namespace fovea::test::gpu {

void run_msa_attend_sm90(const MsaAttendProblem& problem, const MsaAttendTensors& tensors) {
  const Device device{DeviceKind::kCuda, 0};
  // Nothing is zero by itself; of large scratch memory, the beginning.
  std::memset(internal::msa::by_block::memory, 0xFF, sizeof(internal::msa::by_block::memory));
  std::memset(internal::msa::by_block::item_memory, 0xFF,
              sizeof(internal::msa::by_block::item_memory));
  HostBuffer scratch(internal::msa_attend_model_workspace(problem, device));
  const size_t filled = std::min(scratch.bytes(), size_t{16} << 20);
  if (filled > 0) std::memset(scratch.data(), 0xFF, filled);
  internal::msa_attend_model_run(problem, device, tensors, scratch.workspace(), Stream{});
}

}  // namespace fovea::test::gpu
