#include <algorithm>
#include <limits>

#include "src/core/cuda/mma.cuh"
#include "src/core/workspace.h"
#include "src/msa/cuda/msa_index.cuh"

// Pairs (row, index head) of a request are the rows of A, keys the columns of B. Each warp works by
// itself: its queries stay in registers, keys go there straight from memory, eight channels a load,
// and the warps of a block that walk over the same keys share them in the first-level cache.
//
// Lane (g, c) = (lane / 4, lane % 4) loads channels 32 d + 8 c .. + 7 of key g and of pairs g and
// g + 8. Words 2 s and 2 s + 1 of the eight are the operands of step s: both operands name the
// channels in the same order, which is all that a product needs.
//
// A product adds its channels in one order, and a lane its keys of a block in one order, whatever
// warp, block or chunk they are in: the bits of a score depend on the row and its keys alone.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;
using cuda::MmaA;
using cuda::MmaB;
using cuda::MmaC;

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int64_t kMaxHeadDim = 256;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct Params {
  MsaScoreWork work;
  int unit_shift;       // log2 of the pairs of a block
  int warps_per_block;  // that share the keys; the others take other blocks of keys
  int64_t num_blocks;   // of keys: columns of the scores
  int64_t chunk_blocks;
};

// The larger one; NaN when one is NaN.
__device__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The score of a pair as far as the lane has seen keys: `sum` of exp(s - largest). No default
// values: of an array [2][2] of them nvcc 13.0 gives them to the first two elements only.
struct Score {
  float largest;
  float sum;
};
constexpr Score kNoKeys{kNegInf, 0};

// What exponents are taken relative to: not -inf, as -inf minus -inf would be NaN. Where `largest`
// is not finite, the sum is not used.
__device__ float base_of(float largest) { return largest == kNegInf ? 0.0f : largest; }

template <bool kLse>
__device__ void add_products(float x0, float x1, Score& score) {
  const float largest = max_or_nan(score.largest, max_or_nan(x0, x1));
  if constexpr (kLse) {
    const float base = base_of(largest);
    const float added = expf(x0 - base) + expf(x1 - base);
    score.sum = fmaf(score.sum, expf(score.largest - base), added);
  }
  score.largest = largest;
}

// Over the four lanes that share a pair; every one of them gets the result.
template <bool kLse>
__device__ float finish(Score score) {
  float largest = max_or_nan(score.largest, __shfl_xor_sync(0xFFFFFFFF, score.largest, 1));
  largest = max_or_nan(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
  if constexpr (!kLse) return largest;
  float sum = score.sum * expf(score.largest - base_of(largest));
  sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
  return isfinite(largest) ? largest + logf(sum) : largest;
}

// Where the rows of a window split: segment 0 has those before the first request, segment r + 1
// those of request r, the last one those past all requests.
struct Segments {
  const Params& params;

  __device__ int64_t count() const { return params.work.rows.batch.num_requests() + 2; }
  // First row of a segment, relative to the window.
  __device__ int64_t start(int64_t segment) const {
    if (segment == 0) return 0;
    if (segment == count()) return params.work.window.count;
    const int64_t row = params.work.rows.offsets[segment - 1] - params.work.window.first;
    return row < 0 ? 0 : row > params.work.window.count ? params.work.window.count : row;
  }
  // A segment has the tiles from here on, one more than its rows can need: no sums over requests
  // are involved.
  __device__ int64_t first_tile(int64_t segment) const {
    return (start(segment) * params.work.iq.shape[1] >> params.unit_shift) + segment;
  }
};

// The pairs of a lane: tile i, half j is pair 16 i + 8 j + lane / 4 of the warp.
template <int kTiles>
struct Pairs {
  const bf16_t* query[kTiles][2];  // null: no such pair
  float* scores[kTiles][2];        // null: not written
  int32_t end[kTiles][2];          // tokens that it sees
  int32_t num_blocks;              // candidates of the lane's pairs at most
};

template <int kTiles>
__device__ void find_pairs(const Params& params, int64_t segment, int64_t first_row, uint32_t pair,
                           uint32_t num_pairs, Pairs<kTiles>& pairs) {
  const MsaScoreWork& work = params.work;
  const auto heads = static_cast<uint32_t>(work.iq.shape[1]);
  const int64_t request = segment - 1;
  pairs.num_blocks = 0;
  const bool owned = request >= 0 && request < work.rows.batch.num_requests();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t own = pair + 16 * i + 8 * half + threadIdx.x % kWarpThreads / 4;
      pairs.query[i][half] = nullptr;
      pairs.scores[i][half] = nullptr;
      pairs.end[i][half] = 0;
      if (own >= num_pairs) continue;
      const uint32_t head = own % heads;
      const int64_t in_window = first_row + own / heads;
      const int64_t t = work.window.first + in_window;
      MsaRow row;
      if (owned) row = work.rows.batch.row(request, msa_rows_of(work.rows, request), t);
      const bool scored = !row.is_empty() && row.own >= work.min_own;
      if (scored || work.whole) pairs.scores[i][half] = work.scores.row(head, in_window);
      if (!scored) continue;
      pairs.query[i][half] = work.iq.row(t, head);
      pairs.num_blocks = max(pairs.num_blocks, row.own + 1);
      pairs.end[i][half] =
          row.position < row.kv_len ? static_cast<int32_t>(row.position + 1) : row.kv_len;
    }
  }
}

__device__ uint4 load_channels(const bf16_t* row, int channel, bool present) {
  return present ? *reinterpret_cast<const uint4*>(row + channel) : make_uint4(0, 0, 0, 0);
}

// kDeep: 32 channels each. kGroup: eight keys each, in flight at once.
template <int kTiles, int kDeep, bool kLse>
__global__ void __launch_bounds__(kThreads, kDeep >= 8 || kTiles > 1 ? 2 : 3)
    score_blocks(const __grid_constant__ Params params) {
  constexpr int kGroup = kDeep >= 8 ? 2 : 4;
  const MsaScoreWork& work = params.work;
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  const Segments segments{params};
  const int64_t tile = blockIdx.x;
  const auto tile_of = [&](int64_t s) { return segments.first_tile(s); };
  const int64_t segment = cuda::count_up_to(tile_of, segments.count(), tile) - 1;
  const int64_t first_row = segments.start(segment);
  const auto num_pairs =
      static_cast<uint32_t>((segments.start(segment + 1) - first_row) * work.iq.shape[1]);
  const uint32_t pair =
      (static_cast<uint32_t>(tile - segments.first_tile(segment)) << params.unit_shift) +
      warp % params.warps_per_block * kTiles * 16;
  if (pair >= num_pairs) return;
  Pairs<kTiles> pairs;
  find_pairs<kTiles>(params, segment, first_row, pair, num_pairs, pairs);

  int32_t most = 0;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) most = max(most, max(pairs.end[i][0], pairs.end[i][1]));
  most = cuda::warp_max(most);
  // Past the length, as far as a position reaches, candidates have -inf.
  const int64_t num_blocks =
      work.whole ? params.num_blocks : int64_t{cuda::warp_max(pairs.num_blocks)};

  const int channel = lane % 4 * 8;
  const auto head_dim = static_cast<int>(work.iq.shape[2]);
  MmaA queries[kTiles][kDeep][2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const bool present = 32 * d + channel < head_dim;
      const bf16_t* const low = pairs.query[i][0];
      const bf16_t* const high = pairs.query[i][1];
      const uint4 a = load_channels(low, 32 * d + channel, present && low != nullptr);
      const uint4 b = load_channels(high, 32 * d + channel, present && high != nullptr);
      queries[i][d][0] = {{a.x, b.x, a.y, b.y}};
      queries[i][d][1] = {{a.z, b.z, a.w, b.w}};
    }
  }

  const auto block_size = static_cast<int>(work.keys.block_size);
  const int64_t key_stride = work.keys.index_k.stride[0];
  const int64_t end_block = min(num_blocks, (blockIdx.y + int64_t{1}) * params.chunk_blocks);
#pragma unroll 1
  for (int64_t n = blockIdx.y * params.chunk_blocks + warp / params.warps_per_block; n < end_block;
       n += kWarps / params.warps_per_block) {
    const int64_t first_token = n * block_size;
    const int seen =
        first_token < most ? static_cast<int>(min(most - first_token, int64_t{block_size})) : 0;
    const int64_t slot = seen > 0 ? work.keys.first_slot(segment - 1, n) : -1;
    Score scores[kTiles][2];
    int visible[kTiles][2];  // tokens of the block, counted from the lane's first one
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t tokens = min(pairs.end[i][half] - first_token, int64_t{block_size});
        visible[i][half] = static_cast<int>(max(tokens, int64_t{0})) - 2 * (lane % 4);
        scores[i][half] = kNoKeys;
      }
    }
    if (slot >= 0) {
      const bf16_t* from = work.keys.index_k.row(slot, 0) + lane / 4 * key_stride + channel;
#pragma unroll 1
      for (int key = 0; key < seen; key += 8 * kGroup) {
        uint4 words[kGroup][kDeep];
#pragma unroll
        for (int u = 0; u < kGroup; ++u) {
#pragma unroll
          for (int d = 0; d < kDeep; ++d) {
            const bool present = key + 8 * u + lane / 4 < seen && 32 * d + channel < head_dim;
            words[u][d] = load_channels(from, 32 * d, present);
          }
          from += 8 * key_stride;
        }
#pragma unroll
        for (int u = 0; u < kGroup; ++u) {
          MmaC products[kTiles] = {};
#pragma unroll
          for (int d = 0; d < kDeep; ++d) {
            const MmaB b0{{words[u][d].x, words[u][d].y}};
            const MmaB b1{{words[u][d].z, words[u][d].w}};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
              cuda::mma(products[i], queries[i][d][0], b0);
              cuda::mma(products[i], queries[i][d][1], b1);
            }
          }
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int left = visible[i][half] - (key + 8 * u);
              const float x0 = products[i].x[2 * half] * work.index_scale;
              const float x1 = products[i].x[2 * half + 1] * work.index_scale;
              add_products<kLse>(left > 0 ? x0 : kNegInf, left > 1 ? x1 : kNegInf, scores[i][half]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float result = finish<kLse>(scores[i][half]);
        if (lane % 4 == 0 && pairs.scores[i][half] != nullptr) pairs.scores[i][half][n] = result;
      }
    }
  }
}

template <int kTiles, int kDeep>
void launch_shape(const MsaLaunch& launch, Params params, int warps_per_block) {
  const MsaScoreWork& work = params.work;
  const int unit = warps_per_block * kTiles * 16;
  params.warps_per_block = warps_per_block;
  params.unit_shift = 0;
  while (1 << params.unit_shift < unit) ++params.unit_shift;
  const int64_t requests = work.rows.batch.num_requests();
  const int64_t tiles = work.window.count * work.iq.shape[1] / unit + requests + 2;
  // Enough chunks for a few rounds over the multiprocessors, and none very long: rows at the end
  // of a prefill see more than the first ones.
  constexpr int64_t kRounds = 8, kLongChunk = 128, kMaxChunks = 65535;
  const int64_t step = kWarps / warps_per_block;
  const int64_t wanted = std::max((kRounds * launch.num_sms + tiles - 1) / tiles,
                                  (params.num_blocks + kLongChunk - 1) / kLongChunk);
  const int64_t chunks =
      std::clamp<int64_t>(wanted, 1, std::min(kMaxChunks, (params.num_blocks + step - 1) / step));
  params.chunk_blocks = (params.num_blocks + chunks - 1) / chunks;
  const cuda::LaunchShape shape{
      dim3(static_cast<unsigned>(tiles), cuda::grid_blocks(params.num_blocks, params.chunk_blocks)),
      dim3(kThreads)};
  if (work.score == BlockScore::kLse) {
    cuda::launch(launch.op, score_blocks<kTiles, kDeep, true>, shape, launch.stream, params);
  } else {
    cuda::launch(launch.op, score_blocks<kTiles, kDeep, false>, shape, launch.stream, params);
  }
}

// Few pairs of a request, as in decode: the warps of a block share out the keys instead.
template <int kTiles, int kDeep>
void launch_tiles(const MsaLaunch& launch, const Params& params) {
  const MsaScoreWork& work = params.work;
  const int64_t pairs = work.window.count * work.iq.shape[1];
  const int64_t requests = std::max<int64_t>(1, work.rows.batch.num_requests());
  if (pairs <= 16 * requests) {
    launch_shape<1, kDeep>(launch, params, 1);
  } else if (pairs <= 16 * kWarps * requests) {
    launch_shape<1, kDeep>(launch, params, kWarps);
  } else {
    launch_shape<kTiles, kDeep>(launch, params, kWarps);
  }
}

}  // namespace

Refusal msa_scores_cuda_refusal(int64_t max_rows, int64_t num_heads, int64_t head_dim) {
  constexpr int64_t kMaxPairs = std::numeric_limits<int32_t>::max();
  if (head_dim > kMaxHeadDim) {
    return "takes at most " + std::to_string(kMaxHeadDim) +
           " channels, got head_dim = " + std::to_string(head_dim);
  }
  if (max_rows * num_heads > kMaxPairs) {
    return "takes at most 2^31 - 1 rows times heads, got bounds of " +
           std::to_string(max_rows * num_heads);
  }
  return {};
}

void launch_msa_scores(const MsaLaunch& launch, const MsaScoreWork& work) {
  Params params{};
  params.work = work;
  params.num_blocks = work.keys.page_table.shape[1];
  if (work.window.count == 0 || params.num_blocks == 0) return;
  const int64_t head_dim = work.iq.shape[2];
  if (head_dim <= 64) {
    launch_tiles<2, 2>(launch, params);
  } else if (head_dim <= 128) {
    launch_tiles<2, 4>(launch, params);
  } else {
    launch_tiles<1, 8>(launch, params);
  }
}

Refusal msa_block_scores_cuda_supports(const MsaBlockScoresProblem& problem) {
  return msa_scores_cuda_refusal(problem.max_rows, problem.num_heads, problem.head_dim);
}

size_t msa_block_scores_cuda_workspace(const MsaBlockScoresProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  cutter.take<int32_t>(problem.max_requests + 1);
  return cutter.used_bytes();
}

void msa_block_scores_cuda_portable(const MsaBlockScoresProblem& problem, const Device& device,
                                    const MsaBlockScoresTensors& tensors, Workspace workspace,
                                    Stream stream) {
  constexpr char kOp[] = "msa_block_scores";
  const cuda::DeviceScope scope(device.ordinal);
  auto* const offsets = WorkspaceCutter(workspace).take<int32_t>(problem.max_requests + 1);
  MsaScoreWork work{};
  work.iq = access<const bf16_t, 3>(tensors.iq);
  work.scores = access<float, 3>(tensors.scores);
  work.window = {0, work.iq.shape[0]};
  work.keys = {access<const bf16_t, 3>(tensors.index_k),
               access<const int32_t, 2>(tensors.page_table), problem.block_size};
  work.score = problem.score;
  work.index_scale = problem.index_scale;
  work.whole = true;
  if (work.window.count == 0) return;
  work.rows =
      launch_msa_rows(kOp,
                      msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset,
                                work.window.count, work.scores.shape[2], problem.block_size),
                      offsets, stream);
  const int num_sms = cuda::device_facts(device.ordinal).num_sms;
  launch_msa_scores({kOp, num_sms, stream}, work);
}

}  // namespace fovea::internal
