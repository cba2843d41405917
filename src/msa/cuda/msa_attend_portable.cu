#include <algorithm>
#include <limits>

#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_kernels.cuh"

namespace fovea::internal {
namespace {

using msa::AttendParams;

constexpr int64_t kMaxTopk = 1024;
constexpr int64_t kMaxParts = 16;

// What follows from problem and device: which kernel, and how many parts a row has.
struct Shape {
  bool by_rows = false;
  bool has_offsets = true;  // of requests, made by a launch of its own
  int64_t parts = 1;

  Shape(const MsaAttendProblem& problem, const Device& device) {
    has_offsets = problem.max_requests > msa::kMaxSoughtRequests;
    // Fixed chains, whatever the number of rows is.
    if (problem.batch_invariant) return;
    const int64_t warps = cuda::device_facts(device.ordinal).num_sms * int64_t{msa::kRowWarps};
    const int64_t pairs = std::max<int64_t>(1, problem.max_rows * problem.num_kv_heads);
    by_rows = pairs >= warps;
    if (by_rows) {
      has_offsets = true;
      return;
    }
    // Two steps a chain at least.
    const int64_t steps =
        std::min(problem.topk, problem.max_pages) * msa::steps_per_block(problem.block_size);
    const int64_t most = std::clamp<int64_t>(steps / (2 * msa::kPartWarps), 1, kMaxParts);
    parts = std::clamp<int64_t>(warps / (msa::kPartWarps * pairs), 1, most);
  }
};

struct Memory {
  int32_t* offsets;
  float* part_values;
  float* part_state;

  Memory(const MsaAttendProblem& problem, const Shape& shape, WorkspaceCutter& cutter)
      : offsets(shape.has_offsets ? cutter.take<int32_t>(problem.max_requests + 1) : nullptr) {
    const int64_t heads = shape.parts > 1 ? problem.max_rows * problem.num_heads * shape.parts : 0;
    part_values = cutter.take<float>(heads * problem.head_dim);
    part_state = cutter.take<float>(heads * 2);
  }
};

}  // namespace

Refusal msa_attend_cuda_supports(const MsaAttendProblem& problem) {
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group > msa::kMaxGroup) {
    return "needs at most " + std::to_string(msa::kMaxGroup) + " query heads per KV head, got " +
           std::to_string(group);
  }
  if (problem.topk > kMaxTopk) {
    return "takes lists of at most " + std::to_string(kMaxTopk) +
           " blocks, got topk = " + std::to_string(problem.topk);
  }
  const int64_t pairs = problem.max_rows * problem.num_kv_heads;
  if (pairs > std::numeric_limits<int32_t>::max()) {
    return "takes at most 2^31 - 1 rows times KV heads, got bounds of " + std::to_string(pairs);
  }
  return {};
}

size_t msa_attend_cuda_workspace(const MsaAttendProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  const Memory memory(problem, Shape(problem, device), cutter);
  return cutter.used_bytes();
}

void msa_attend_cuda_portable(const MsaAttendProblem& problem, const Device& device,
                              const MsaAttendTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const Shape shape(problem, device);
  WorkspaceCutter cutter(workspace);
  const Memory memory(problem, shape, cutter);
  if (tensors.q.shape[0] == 0) return;
  AttendParams params = msa::attend_params(problem, tensors, memory.offsets, stream);
  params.num_parts = static_cast<int>(shape.parts);
  params.part_values = memory.part_values;
  params.part_state = memory.part_state;
  switch (problem.kv_mode) {
    case MsaKvMode::kBf16:
      msa::launch_attend_bf16(params, shape.by_rows, stream);
      break;
    case MsaKvMode::kKv8:
    case MsaKvMode::kQ8Kv8:
      msa::launch_attend_e4m3(params, shape.by_rows, stream);
      break;
    case MsaKvMode::kQ8Kv4:
      msa::launch_attend_e2m1(params, shape.by_rows, stream);
      break;
  }
  if (shape.parts == 1) return;
  const auto pairs = static_cast<unsigned>(params.num_rows * problem.num_kv_heads);
  cuda::launch(msa::kAttendOp, msa::fold_parts<msa::kFoldThreads>,
               {dim3(pairs), dim3(msa::kFoldThreads)}, stream, params);
}

}  // namespace fovea::internal
