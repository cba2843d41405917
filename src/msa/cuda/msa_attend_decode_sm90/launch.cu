#include <algorithm>
#include <limits>

#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_decode_sm90/kernel.cuh"

namespace fovea::internal::msa::decode {
namespace {

// Blocks of a row, a cluster: as many as leave a tile to each of their groups and all run at the
// same time. A multiprocessor takes two blocks, or one of the largest clusters; those of more than
// two blocks leave room, as they do not span the groups of multiprocessors that a GPU is made of.
// A plan whose rows may not depend on their number has one part.
int parts_of(const MsaAttendProblem& problem, const Device& device) {
  if (problem.batch_invariant) return 1;
  constexpr int64_t kMostLargest = 7;
  const int64_t sms = cuda::device_facts(device.ordinal).num_sms;
  const int64_t pairs = std::max<int64_t>(1, problem.max_rows * problem.num_kv_heads);
  const int64_t tiles =
      std::min(problem.topk, problem.max_pages) * steps_per_block(problem.block_size) / kGroupWarps;
  const auto fit = [&](int64_t parts) {
    if (parts == kMaxParts && pairs > kMostLargest) return false;
    return kGroups * parts <= tiles && parts * pairs <= (parts > 2 ? sms : kBlocksOfSm * sms);
  };
  int parts = 1;
  while (parts < kMaxParts && fit(2 * parts)) parts *= 2;
  return parts;
}

template <int kDim, int kParts>
void launch_parts(const AttendParams& params, Stream stream) {
  void (*kernel)(AttendParams);
  if constexpr (kParts == 1) {
    kernel = attend_alone<kDim>;
  } else {
    kernel = attend_cluster<kDim, kParts>;
    if (kParts > 8) cuda::allow_large_clusters(kernel);
  }
  cuda::launch(kAttendOp, kernel,
               {dim3(static_cast<unsigned>(params.num_rows * kParts),
                     static_cast<unsigned>(params.num_kv_heads)),
                dim3(kThreads), sizeof(BlockMemory<kDim, kParts>) + ListMemory::bytes(params.topk)},
               stream, params);
}

template <int kDim>
void launch_decode(const AttendParams& params, Stream stream) {
  switch (params.num_parts) {
    case 1:
      return launch_parts<kDim, 1>(params, stream);
    case 2:
      return launch_parts<kDim, 2>(params, stream);
    case 4:
      return launch_parts<kDim, 4>(params, stream);
    case 8:
      return launch_parts<kDim, 8>(params, stream);
    default:
      return launch_parts<kDim, kMaxParts>(params, stream);
  }
}

int32_t* cut_offsets(const MsaAttendProblem& problem, WorkspaceCutter& cutter) {
  const bool sought = problem.max_requests <= kMaxSoughtRequests;
  return sought ? nullptr : cutter.take<int32_t>(problem.max_requests + 1);
}

}  // namespace
}  // namespace fovea::internal::msa::decode

namespace fovea::internal {

Refusal msa_attend_cuda_sm90_decode_supports(const MsaAttendProblem& problem) {
  constexpr int64_t kMaxTopk = 1024;
  if (problem.kv_mode != MsaKvMode::kBf16) return "takes kv_mode bf16 only";
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group > msa::kMaxGroup) {
    return "needs at most " + std::to_string(msa::kMaxGroup) + " query heads per KV head, got " +
           std::to_string(group);
  }
  if (problem.head_dim > msa::decode::kMaxDim) {
    return "takes head_dim up to " + std::to_string(msa::decode::kMaxDim) + ", got " +
           std::to_string(problem.head_dim);
  }
  if (problem.topk > kMaxTopk) {
    return "takes lists of at most " + std::to_string(kMaxTopk) +
           " blocks, got topk = " + std::to_string(problem.topk);
  }
  constexpr int64_t kMaxKvHeads = 65535;
  if (problem.num_kv_heads > kMaxKvHeads) {
    return "takes at most " + std::to_string(kMaxKvHeads) + " KV heads, got " +
           std::to_string(problem.num_kv_heads);
  }
  const int64_t pairs = problem.max_rows * problem.num_kv_heads;
  if (pairs > std::numeric_limits<int32_t>::max()) {
    return "takes at most 2^31 - 1 rows times KV heads, got bounds of " + std::to_string(pairs);
  }
  return {};
}

Refusal msa_attend_cuda_sm90_decode_preferred(const MsaAttendProblem& problem) {
  constexpr int64_t kMaxPairs = 1024;  // rows times KV heads
  // Whatever the bounds are: the bits must not depend on them.
  if (problem.batch_invariant) return {};
  if (problem.max_rows * problem.num_kv_heads > kMaxPairs) {
    return "reads a block once for every row that lists it: pays up to " +
           std::to_string(kMaxPairs) + " rows times KV heads";
  }
  return {};
}

size_t msa_attend_cuda_sm90_decode_workspace(const MsaAttendProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  msa::decode::cut_offsets(problem, cutter);
  return cutter.used_bytes();
}

void msa_attend_cuda_sm90_decode(const MsaAttendProblem& problem, const Device& device,
                                 const MsaAttendTensors& tensors, Workspace workspace,
                                 Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  WorkspaceCutter cutter(workspace);
  int32_t* const offsets = msa::decode::cut_offsets(problem, cutter);
  if (tensors.q.shape[0] == 0) return;
  msa::AttendParams params = msa::attend_params(problem, tensors, offsets, stream);
  params.num_parts = msa::decode::parts_of(problem, device);
  if (problem.head_dim <= 64) {
    msa::decode::launch_decode<64>(params, stream);
  } else {
    msa::decode::launch_decode<128>(params, stream);
  }
}

}  // namespace fovea::internal
