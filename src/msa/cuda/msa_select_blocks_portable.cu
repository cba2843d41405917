#include <algorithm>
#include <limits>

#include "src/core/workspace.h"
#include "src/msa/cuda/msa_index.cuh"

// A block per row and list. The blocks that are not forced are one range of ids, of which the best
// F = K - forced are wanted: four passes over 8 bits each of their ranks find the F-th largest, a
// walk in order the last id of that rank that is still taken. What is chosen follows from those two
// numbers, and a last walk writes it in order; no order of atomics reaches the result.
namespace fovea::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kDigits = 256;
static_assert(kThreads == kDigits);  // a thread per digit

struct Params {
  MsaSelectWork work;
  int lists_per_row;   // that differ: Hkv, or 1
  int heads_per_list;  // whose choices are merged
};

// The chosen ones of a head: rank above `rank`, or equal to it and id up to `last`.
struct Threshold {
  uint32_t rank;
  int32_t last;

  __device__ bool takes(uint32_t other, int64_t n) const {
    return other > rank || (other == rank && n <= last);
  }
};

// The scores that one choice goes by.
struct Ranks {
  const float* scores;
  int64_t head_stride;
  int num_heads;  // of which the largest counts

  __device__ uint32_t operator()(int64_t n) const {
    uint32_t rank = msa_score_rank(scores[n]);
    for (int h = 1; h < num_heads; ++h) {
      rank = max(rank, msa_score_rank(scores[h * head_stride + n]));
    }
    return rank;
  }
};

struct SharedMemory {
  int32_t histogram[kDigits];
  int32_t scan[cuda::kWarpThreads + 1];
  uint32_t digit;
  int32_t above;  // candidates of a larger digit
  int32_t last;
};

// The `wanted` best of the blocks [begin, end), which has more. Every thread of the block calls it.
__device__ Threshold find_threshold(const Ranks& ranks, int64_t begin, int64_t end, int32_t wanted,
                                    SharedMemory& shared) {
  constexpr int32_t kAll = std::numeric_limits<int32_t>::max();
  if (wanted == 0) return {~uint32_t{0}, -1};
  uint32_t prefix = 0, mask = 0;
  int32_t ties = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    shared.histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t n = begin + threadIdx.x; n < end; n += kThreads) {
      const uint32_t rank = ranks(n);
      if ((rank & mask) == prefix) atomicAdd(&shared.histogram[rank >> shift & 0xFF], 1);
    }
    __syncthreads();
    // Thread i has digit 255 - i, so that sums in thread order are sums from the top.
    const uint32_t digit = kDigits - 1 - threadIdx.x;
    const int32_t count = shared.histogram[digit];
    int32_t total;
    const int32_t upto = cuda::block_inclusive_sum(count, shared.scan, &total);
    if (upto - count < wanted && wanted <= upto) {
      shared.digit = digit;
      shared.above = upto - count;
    }
    __syncthreads();
    ties = shared.histogram[shared.digit];
    wanted -= shared.above;
    prefix |= shared.digit << shift;
    mask |= uint32_t{0xFF} << shift;
    __syncthreads();
  }
  if (wanted == ties) return {prefix, kAll};
  int32_t before = 0;
  for (int64_t base = begin; before < wanted; base += kThreads) {
    const int64_t n = base + threadIdx.x;
    const int32_t tie = n < end && ranks(n) == prefix ? 1 : 0;
    int32_t total;
    const int32_t upto = before + cuda::block_inclusive_sum(tie, shared.scan, &total);
    if (tie == 1 && upto == wanted) shared.last = static_cast<int32_t>(n);
    before += total;
  }
  __syncthreads();
  return {prefix, shared.last};
}

__global__ void __launch_bounds__(kThreads) select_blocks(const __grid_constant__ Params params) {
  extern __shared__ __align__(8) uint8_t memory[];
  auto* const thresholds = reinterpret_cast<Threshold*>(memory);
  __shared__ SharedMemory shared;
  const MsaSelectWork& work = params.work;
  const auto lists_per_row = static_cast<uint32_t>(params.lists_per_row);
  const int64_t in_window = blockIdx.x / lists_per_row;
  const int64_t list = blockIdx.x % lists_per_row;
  const int64_t t = work.window.first + in_window;
  const bool merged = work.index_reduce == IndexReduce::kMaxAll;
  const int64_t end_list = merged ? work.lists.shape[0] : list + 1;
  const int64_t width = work.lists.shape[2];
  const MsaRow row = find_msa_row(work.rows, t);
  if (row.own < work.topk) {  // all candidates, or none
    for (int64_t g = list; g < end_list; ++g) {
      int32_t* const to = work.lists.row(g, t);
      for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        to[i] = i <= row.own ? static_cast<int32_t>(i) : -1;
      }
    }
    return;
  }

  const int64_t begin = work.init_blocks;
  const int64_t end = row.own + 1 - work.local_blocks;
  const auto wanted = static_cast<int32_t>(work.topk - work.init_blocks - work.local_blocks);
  const auto ranks_of = [&](int head) {
    return Ranks{work.scores.row(merged ? 0 : list * params.heads_per_list + head, in_window),
                 work.scores.stride[0], merged ? static_cast<int>(work.num_heads) : 1};
  };
  for (int head = 0; head < params.heads_per_list; ++head) {
    const Threshold found = find_threshold(ranks_of(head), begin, end, wanted, shared);
    if (threadIdx.x == 0) thresholds[head] = found;
    __syncthreads();
  }

  int64_t written = 0;
  for (int64_t base = 0; base <= row.own; base += kThreads) {
    const int64_t n = base + threadIdx.x;
    bool chosen = false;
    if (n <= row.own) {
      chosen = msa_block_is_forced(n, row.own, work.init_blocks, work.local_blocks);
      for (int head = 0; head < params.heads_per_list && !chosen; ++head) {
        chosen = thresholds[head].takes(ranks_of(head)(n), n);
      }
    }
    int32_t total;
    const int32_t upto = cuda::block_inclusive_sum(chosen ? 1 : 0, shared.scan, &total);
    for (int64_t g = list; g < end_list && chosen; ++g) {
      work.lists.row(g, t)[written + upto - 1] = static_cast<int32_t>(n);
    }
    written += total;
  }
  for (int64_t g = list; g < end_list; ++g) {
    int32_t* const to = work.lists.row(g, t);
    for (int64_t i = written + threadIdx.x; i < width; i += kThreads) to[i] = -1;
  }
}

}  // namespace

Refusal msa_select_cuda_refusal(int64_t max_rows, int64_t num_kv_heads) {
  if (max_rows * num_kv_heads <= std::numeric_limits<int32_t>::max()) return {};
  return "takes at most 2^31 - 1 rows times KV heads, got bounds of " +
         std::to_string(max_rows * num_kv_heads);
}

void launch_msa_select(const MsaLaunch& launch, const MsaSelectWork& work) {
  const int64_t kv_heads = work.lists.shape[0];
  Params params{};
  params.work = work;
  params.lists_per_row = work.index_reduce == IndexReduce::kMaxAll ? 1 : static_cast<int>(kv_heads);
  params.heads_per_list =
      work.index_reduce == IndexReduce::kUnion ? static_cast<int>(work.num_heads / kv_heads) : 1;
  const auto blocks = static_cast<unsigned>(work.window.count * params.lists_per_row);
  const size_t bytes = static_cast<size_t>(params.heads_per_list) * sizeof(Threshold);
  cuda::launch(launch.op, select_blocks, {dim3(blocks), dim3(kThreads), bytes}, launch.stream,
               params);
}

Refusal msa_select_blocks_cuda_supports(const MsaSelectBlocksProblem& problem) {
  return msa_select_cuda_refusal(problem.max_rows, problem.num_kv_heads);
}

size_t msa_select_blocks_cuda_workspace(const MsaSelectBlocksProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int32_t>(problem.max_requests + 1);
  return cutter.used_bytes();
}

void msa_select_blocks_cuda_portable(const MsaSelectBlocksProblem& problem, const Device& device,
                                     const MsaSelectBlocksTensors& tensors, Workspace workspace,
                                     Stream stream) {
  constexpr char kOp[] = "msa_select_blocks";
  const cuda::DeviceScope scope(device.ordinal);
  auto* const offsets = WorkspaceCutter(workspace).take<int32_t>(problem.max_requests + 1);
  MsaSelectWork work{};
  work.scores = access<const float, 3>(tensors.scores);
  work.lists = access_blocks<int32_t>(tensors.blocks, problem.blocks_layout);
  work.window = {0, work.scores.shape[1]};
  work.num_heads = problem.num_heads;
  work.topk = problem.topk;
  work.init_blocks = problem.init_blocks;
  work.local_blocks = problem.local_blocks;
  work.index_reduce = problem.index_reduce;
  if (work.window.count == 0) return;
  work.rows =
      launch_msa_rows(kOp,
                      msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset,
                                work.window.count, work.scores.shape[2], problem.block_size),
                      offsets, stream);
  launch_msa_select({kOp, cuda::device_facts(device.ordinal).num_sms, stream}, work);
}

}  // namespace fovea::internal
