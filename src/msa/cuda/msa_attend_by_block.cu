#include <algorithm>
#include <limits>

#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/f16.cuh"
#include "src/core/workspace.h"
#include "src/msa/cuda/msa_attend_kernels.cuh"

// Block by block: where many rows list the same blocks, a block of the cache is read once for the
// rows that list it, not once for each of them.
//
//   count_places    a warp per row and KV head reads its list; every block of it is a place, and
//                   gets a number among the places of its cell
//   cut_items       one thread block: where the places of each cell begin; cells are cut into items
//   sort_places     the places of a cell side by side
//   attend_items    a thread block per item: one block of the cache in shared memory, a warp per
//                   place; the output over this block alone goes to memory as a partial result
//   fold_places     a warp per row and query head: its partial results become the output
//
// A cell is a block of a request, for a KV head and a slab of rows. The partial results of a slab
// are in memory at a time. The order of the places in a cell is that of atomics; a partial result
// has the address and the bits that belong to its row and block, whatever that order is.
namespace fovea::internal::msa {
namespace {

constexpr int kItemWarps = 4;
constexpr int kItemThreads = kItemWarps * kWarpThreads;
constexpr int kItemPlaces = 32;
constexpr int kMaxBlockKeys = 128;
constexpr int kKeyTiles = kMaxBlockKeys / 8;
constexpr int kMaxDim = 128;
constexpr int kPassChannels = 64;  // of the values, whose sums a warp has at a time
constexpr int kFoldWarps = 4;
constexpr int kCutThreads = 1024;
constexpr int kListThreads = 256;
constexpr int64_t kMaxSlabBytes = int64_t{512} << 20;

// A block in the list of a row.
struct Place {
  int32_t from;  // (row of the slab) * topk + index in the sorted list
  int32_t seen;  // tokens of the block that the row sees
};
// Where a place goes: its cell, and its number there.
struct Target {
  int32_t cell;
  int32_t number;
};
struct Item {
  int32_t page;
  int32_t kv_head;
  int32_t first;  // place
  int32_t count;
};
// Of a partial result: logit and sum as in ChainState, and what the stored values of each pass are
// multiplied with.
struct alignas(16) PartState {
  float largest;
  float sum;
  float unit[kMaxDim / kPassChannels];
};

struct ByBlockParams {
  AttendParams attend;
  int64_t slab_rows;
  int32_t num_slabs;
  int32_t cells_per_slab;  // KV heads * requests * pages
  int32_t items_per_slab;  // at most
  int32_t* num_places;     // [rows][KV heads]
  int32_t* row_end;        // [rows]: tokens that the row sees
  Target* targets;         // [rows][KV heads][topk]
  int32_t* counts;         // [slabs][cells]
  int32_t* firsts;         // [slabs][cells]
  Place* places;           // as many as targets
  Item* items;             // [slabs * items_per_slab]
  int32_t* first_items;    // [slabs + 1]
  uint16_t* part_values;   // [rows of a slab][KV heads][topk][group][head_dim]
  PartState* part_state;   // [rows of a slab][KV heads][topk][group]
};

__global__ void __launch_bounds__(kListThreads) zero_counts(int32_t* counts, int64_t number) {
  const int64_t i = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (i < number) counts[i] = 0;
}

__global__ void __launch_bounds__(kRowWarps* kWarpThreads)
    count_places(const __grid_constant__ ByBlockParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  const AttendParams& attend = params.attend;
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t kv_head = blockIdx.x / static_cast<uint32_t>(attend.num_tiles);
  const int64_t tile = blockIdx.x % static_cast<uint32_t>(attend.num_tiles);
  const int64_t t = tile * kRowWarps + warp;
  if (t >= attend.num_rows) return;
  const ListMemory list(reinterpret_cast<int32_t*>(memory) + warp * 3 * attend.topk, attend.topk);
  const MsaRow row = find_msa_row(attend.rows, t);
  const int count = read_list(attend, row, t, kv_head, list);
  const int64_t pair = t * attend.num_kv_heads + kv_head;
  if (lane == 0) {
    params.num_places[pair] = count;
    if (kv_head == 0) {
      const bool to_end = !attend.causal || row.position >= row.kv_len;
      params.row_end[t] = to_end ? row.kv_len : static_cast<int32_t>(row.position) + 1;
    }
  }
  const auto pages = static_cast<int32_t>(attend.inputs.page_table.shape[1]);
  const auto slab = static_cast<int32_t>(t / params.slab_rows);
  const int32_t first_cell =
      slab * params.cells_per_slab +
      (static_cast<int32_t>(kv_head) * static_cast<int32_t>(attend.rows.batch.num_requests()) +
       row.request) *
          pages;
  for (int i = lane; i < count; i += kWarpThreads) {
    const int32_t cell = first_cell + list.blocks[i];
    params.targets[pair * attend.topk + i] = {cell, atomicAdd(&params.counts[cell], 1)};
  }
}

__global__ void __launch_bounds__(kCutThreads)
    cut_items(const __grid_constant__ ByBlockParams params) {
  __shared__ int64_t sums[cuda::kWarpThreads + 1];
  constexpr int64_t kOneItem = int64_t{1} << 32;  // items in the upper half, places in the lower
  const AttendParams& attend = params.attend;
  const int64_t cells = int64_t{params.num_slabs} * params.cells_per_slab;
  const auto value = [&](int64_t cell) {
    const int32_t count = params.counts[cell];
    return count + (count + kItemPlaces - 1) / kItemPlaces * kOneItem;
  };
  const auto done = [&](int64_t cell, int64_t before, int64_t) {
    const int32_t count = params.counts[cell];
    const auto first = static_cast<int32_t>(before);
    auto item = static_cast<int32_t>(before >> 32);
    const auto index = static_cast<uint32_t>(cell);
    const auto per_slab = static_cast<uint32_t>(params.cells_per_slab);
    if (index % per_slab == 0) params.first_items[index / per_slab] = item;
    params.firsts[cell] = first;
    if (count == 0) return;
    const auto pages = static_cast<uint32_t>(attend.inputs.page_table.shape[1]);
    const auto requests = static_cast<uint32_t>(attend.rows.batch.num_requests());
    const uint32_t block = index % pages;
    const uint32_t request = index / pages % requests;
    const auto kv_head =
        static_cast<int32_t>(index / pages / requests % static_cast<uint32_t>(attend.num_kv_heads));
    const int32_t page = attend.inputs.page_table(request, block);
    for (int32_t i = 0; i < count; i += kItemPlaces) {
      params.items[item++] = {page, kv_head, first + i, min(count - i, kItemPlaces)};
    }
  };
  const int64_t total = cuda::block_scan<int64_t>(cells, sums, value, done);
  if (threadIdx.x != 0) return;
  params.first_items[params.num_slabs] = static_cast<int32_t>(total >> 32);
  for (int slab = 0; cells == 0 && slab < params.num_slabs; ++slab) params.first_items[slab] = 0;
}

__global__ void __launch_bounds__(kListThreads)
    sort_places(const __grid_constant__ ByBlockParams params) {
  const AttendParams& attend = params.attend;
  const auto topk = static_cast<uint32_t>(attend.topk);
  const auto i = static_cast<uint32_t>(blockIdx.x) * kListThreads + threadIdx.x;
  const uint32_t pair = i / topk;
  const auto index = static_cast<int32_t>(i % topk);
  if (pair >= attend.num_rows * attend.num_kv_heads) return;
  if (index >= params.num_places[pair]) return;
  const Target target = params.targets[i];
  const uint32_t t = pair / static_cast<uint32_t>(attend.num_kv_heads);
  const auto block = static_cast<int32_t>(static_cast<uint32_t>(target.cell) %
                                          static_cast<uint32_t>(attend.inputs.page_table.shape[1]));
  const auto local = static_cast<int32_t>(t % static_cast<uint32_t>(params.slab_rows));
  params.places[params.firsts[target.cell] + target.number] = {
      local * attend.topk + index,
      min(params.row_end[t] - block * attend.block_size, attend.block_size)};
}

// Rows of 2 * kDim bytes in units of 16; lanes that read together find their units in different
// banks.
template <int kDim>
struct BlockMemory {
  static constexpr int kRowBytes = 2 * kDim;
  alignas(256) uint8_t keys[kMaxBlockKeys * kRowBytes];
  alignas(256) uint8_t values[kMaxBlockKeys * kRowBytes];

  // Lanes (g, c) read unit 4 d + c of keys 8 j + g: two keys at a time.
  static __device__ int key_unit(int token, int unit) { return unit ^ ((token & 1) * 4); }
  // ldmatrix reads one unit of eight tokens at a time.
  static __device__ int value_unit(int token, int unit) { return unit ^ (token & 7); }
};

template <int kDim>
__device__ void fetch_block(const AttendParams& params, const Item& item,
                            BlockMemory<kDim>& shared) {
  constexpr int kUnits = kDim / 8;
  const MsaPool& k = params.inputs.k;
  const MsaPool& v = params.inputs.v;
  const int64_t base = k.offset(item.page, item.kv_head, 0);  // the strides of v are the same
  for (int i = threadIdx.x; i < kMaxBlockKeys * kUnits; i += kItemThreads) {
    const int token = i / kUnits;
    const int unit = i % kUnits;
    const bool present = token < params.block_size && unit * 8 < params.head_dim;
    const int64_t at = present ? base + token * k.token_stride + unit * 8 : base;
    uint8_t* const row_of_keys = shared.keys + token * 2 * kDim;
    uint8_t* const row_of_values = shared.values + token * 2 * kDim;
    cuda::copy_async<16>(row_of_keys + 16 * BlockMemory<kDim>::key_unit(token, unit),
                         static_cast<const bf16_t*>(k.data) + at, present);
    cuda::copy_async<16>(row_of_values + 16 * BlockMemory<kDim>::value_unit(token, unit),
                         static_cast<const bf16_t*>(v.data) + at, present);
  }
}

// Keeps of the two bf16 of tokens `token` and `token` + 1 those below `seen`: what a row does not
// see may be NaN.
__device__ inline uint32_t seen_pair(uint32_t pair, int token, int seen) {
  return token + 1 < seen ? pair : token < seen ? pair & 0xFFFF : 0;
}

// One place: a warp, the heads of its row as the rows of A.
template <int kDim>
class PlaceWork {
 public:
  static constexpr int kDeep = kDim / kDeepChannels;
  static constexpr int kProducts = kPassChannels / 8;

  __device__ PlaceWork(const AttendParams& params, const BlockMemory<kDim>& shared)
      : params_(params),
        lane_(threadIdx.x % kWarpThreads),
        g_(lane_ / 4),
        c_(lane_ % 4),
        shared_(shared),
        key_at_(g_ * 2 * kDim + 16 * BlockMemory<kDim>::key_unit(g_, c_)),
        value_at_(lane_ % 16 * 2 * kDim +
                  16 * BlockMemory<kDim>::value_unit(lane_ % 16, lane_ / 16)) {}

  // To `to` [group][head_dim] and `state_to` [group].
  __device__ void run(int64_t t, int64_t kv_head, int seen, uint16_t* to,
                      PartState* state_to) const {
    MmaC weights[kKeyTiles];
    float sum[2];
    const bool whole = seen == kMaxBlockKeys;
    if (whole) {
      weigh<true>(t, kv_head, seen, state_to, sum, weights);
    } else {
      weigh<false>(t, kv_head, seen, state_to, sum, weights);
    }
#pragma unroll 1
    for (int first = 0; first < kDim; first += kPassChannels) {
      MmaC out[kProducts];
      bool done = whole;
      if (whole) {
        multiply<true>(weights, seen, first, out);
        done = __any_sync(0xFFFFFFFF, has_nan(out)) == 0;
      }
      if (!done) multiply<false>(weights, seen, first, out);
      store(sum, first, out, to, state_to);
    }
  }

 private:
  __device__ static bool has_nan(const MmaC (&out)[kProducts]) {
    bool nan = false;
#pragma unroll
    for (const MmaC& value : out) {
#pragma unroll
      for (int i = 0; i < 4; ++i) nan = nan || isnan(value.x[i]);
    }
    return nan;
  }

  // Channels from `first` on.
  __device__ void store(const float (&sum)[2], int first, MmaC (&out)[kProducts], uint16_t* to,
                        PartState* state_to) const {
    float unit[2];
    scale(sum, unit, out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = g_ + 8 * half;
      const bool present = head < params_.group;
      if (present && c_ == 0) state_to[head].unit[first / kPassChannels] = unit[half];
      // Lanes c and c ^ 1 exchange, so that the even one has four channels on end of product n, the
      // odd one of product n + 1, and four lanes store 32 bytes.
      const int odd = c_ % 2;
#pragma unroll
      for (int n = 0; n < kProducts; n += 2) {
        const uint32_t even_pair = cuda::f16_pair(out[n].x[2 * half], out[n].x[2 * half + 1]);
        const uint32_t odd_pair =
            cuda::f16_pair(out[n + 1].x[2 * half], out[n + 1].x[2 * half + 1]);
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, odd ? even_pair : odd_pair, 1);
        const int channel = first + 8 * (n + odd) + c_ / 2 * 4;
        if (!present || channel >= params_.head_dim) continue;
        *reinterpret_cast<uint2*>(to + head * params_.head_dim + channel) =
            odd ? make_uint2(other, odd_pair) : make_uint2(even_pair, other);
      }
    }
  }

  // Weights of rows g and g + 8, zero where not seen, and their sums. kWhole: the row sees all of
  // kMaxBlockKeys tokens.
  template <bool kWhole>
  __device__ void weigh(int64_t t, int64_t kv_head, int seen, PartState* state_to, float (&all)[2],
                        MmaC (&weights)[kKeyTiles]) const {
    MmaA queries[kDeep][2];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int channel = kDeepChannels * d + 8 * c_;
      const uint4 low = load_query(params_, t, kv_head, g_, channel);
      const uint4 high = load_query(params_, t, kv_head, g_ + 8, channel);
      queries[d][0] = {{low.x, high.x, low.y, high.y}};
      queries[d][1] = {{low.z, high.z, low.w, high.w}};
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      weights[j] = {};
      weights[j + 1] = {};
      if (!kWhole && 8 * j >= seen) continue;
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          // Unit 4 d + c, where 4 * (token & 1) is in the lane's address already.
          const auto at = reinterpret_cast<const uint4*>(shared_.keys + (key_at_ ^ (64 * d)) +
                                                         (j + u) * 8 * 2 * kDim);
          const uint4 key = *at;
          cuda::mma(weights[j + u], queries[d][0], MmaB{{key.x, key.y}});
          cuda::mma(weights[j + u], queries[d][1], MmaB{{key.z, key.w}});
        }
      }
    }
    const float scale = params_.softmax_scale * 1.44269504f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kNegInf;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& logit = weights[j].x[2 * half + e];
          logit = kWhole || 8 * j + 2 * c_ + e < seen ? logit * scale : kNegInf;
          largest = fmaxf(largest, logit);
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      const float base = largest == kNegInf ? 0.0f : largest;
      float sum = 0;
#pragma unroll
      for (MmaC& weight : weights) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = weight.x[2 * half + e];
          x = cuda::exp2_fast(x - base);
          sum += x;
        }
      }
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
      all[half] = sum;
      if (g_ + 8 * half < params_.group && c_ == 0) {
        state_to[g_ + 8 * half].largest = largest;
        state_to[g_ + 8 * half].sum = sum;
      }
    }
  }

  // Channels from `first` on. A weight is the sum of two bf16: one alone would cost the output its
  // last bit where few keys carry the weight. kWhole: for finite values, all of whose tokens are
  // seen; otherwise the second product leaves out what is not finite, as in a chain.
  template <bool kWhole>
  __device__ void multiply(const MmaC (&weights)[kKeyTiles], int seen, int first,
                           MmaC (&out)[kProducts]) const {
#pragma unroll
    for (MmaC& value : out) value = {};
#pragma unroll
    for (int s = 0; s < kMaxBlockKeys / 16; ++s) {
      if (!kWhole && 16 * s >= seen) break;
      MmaA rounded, rest;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const MmaC& from = weights[2 * s + i / 2];
        const cuda::SplitPair pair(from.x[i % 2 * 2], from.x[i % 2 * 2 + 1]);
        rounded.x[i] = pair.rounded;
        rest.x[i] = pair.rest;
      }
#pragma unroll
      for (int n = 0; n < kProducts; n += 2) {
        MmaB b[2];
        // Unit first / 8 + n of the lane: only bits above those of the lane's own unit differ.
        cuda::load_b_units(shared_.values + (value_at_ ^ (2 * first + 16 * n)) + s * 16 * 2 * kDim,
                           b[0], b[1]);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if (!kWhole && 16 * s + 16 > seen) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              b[u].x[i] = seen_pair(b[u].x[i], 16 * s + 8 * i + 2 * c_, seen);
            }
          }
          cuda::mma(out[n + u], rounded, b[u]);
          if constexpr (!kWhole) b[u] = {{finite_pair(b[u].x[0]), finite_pair(b[u].x[1])}};
          cuda::mma(out[n + u], rest, b[u]);
        }
      }
    }
  }

  // Sums become means, and those multiples of `unit`, a power of two, with the largest finite one
  // in [1, 4): halves keep 11 bits of them.
  __device__ void scale(const float (&sum)[2], float (&unit)[2], MmaC (&out)[kProducts]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = sum[half] == 0 ? 0.0f : 1.0f / sum[half];
      float largest = 0;
#pragma unroll
      for (MmaC& value : out) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = value.x[2 * half + e];
          x *= inverse;
          const float size = fabsf(x);
          largest = fmaxf(largest, size < std::numeric_limits<float>::infinity() ? size : 0.0f);
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 1u), 253u);
      const float factor = __uint_as_float((254 - exponent) << 23);
      unit[half] = __uint_as_float(exponent << 23);
#pragma unroll
      for (MmaC& value : out) {
        value.x[2 * half] *= factor;
        value.x[2 * half + 1] *= factor;
      }
    }
  }

  const AttendParams& params_;
  const int lane_, g_, c_;
  const BlockMemory<kDim>& shared_;
  // In bytes, of key 8 j + g at unit c and of value lane % 16 at unit lane / 16: rows are 128 or
  // 256 bytes, so that the bits of other units can be turned over.
  const int key_at_, value_at_;
};

template <int kDim>
__global__ void __launch_bounds__(kItemThreads, kDim == kMaxDim ? 3 : 2)
    attend_items(const __grid_constant__ ByBlockParams params, int slab) {
  extern __shared__ __align__(256) uint8_t block_memory[];
  const AttendParams& attend = params.attend;
  const int64_t index = int64_t{params.first_items[slab]} + blockIdx.x;
  if (index >= params.first_items[slab + 1]) return;
  const Item item = params.items[index];
  auto& shared = *reinterpret_cast<BlockMemory<kDim>*>(block_memory);
  fetch_block(attend, item, shared);
  cuda::wait_for_copies();
  __syncthreads();
  const PlaceWork<kDim> work(attend, shared);
  const int64_t first_row = slab * params.slab_rows;
#pragma unroll 1
  for (int i = threadIdx.x / kWarpThreads; i < item.count; i += kItemWarps) {
    const Place place = params.places[item.first + i];
    const auto row = static_cast<uint32_t>(place.from) / static_cast<uint32_t>(attend.topk);
    const auto in_list = static_cast<uint32_t>(place.from) % static_cast<uint32_t>(attend.topk);
    const int64_t part =
        ((int64_t{row} * attend.num_kv_heads + item.kv_head) * attend.topk + in_list) *
        attend.group;
    work.run(first_row + row, item.kv_head, place.seen, params.part_values + part * attend.head_dim,
             params.part_state + part);
  }
}

__global__ void __launch_bounds__(kFoldWarps* kWarpThreads)
    fold_places(const __grid_constant__ ByBlockParams params, int slab) {
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t heads = int64_t{attend.num_kv_heads} * attend.group;
  const int64_t at = int64_t{blockIdx.x} * kFoldWarps + threadIdx.x / kWarpThreads;
  const auto row = static_cast<int64_t>(static_cast<uint32_t>(at) / static_cast<uint32_t>(heads));
  const auto head = static_cast<int64_t>(static_cast<uint32_t>(at) % static_cast<uint32_t>(heads));
  const int64_t t = slab * params.slab_rows + row;
  if (row >= params.slab_rows || t >= attend.num_rows) return;
  const auto group = static_cast<uint32_t>(attend.group);
  const auto kv_head = static_cast<int64_t>(static_cast<uint32_t>(head) / group);
  const auto own = static_cast<int64_t>(static_cast<uint32_t>(head) % group);
  const int count = params.num_places[t * attend.num_kv_heads + kv_head];
  const int64_t first = (row * attend.num_kv_heads + kv_head) * attend.topk * group + own;
  const PartState* const states = params.part_state + first;
  const uint16_t* const values = params.part_values + first * attend.head_dim;

  float largest = kNegInf;
  for (int i = lane; i < count; i += kWarpThreads) {
    largest = fmaxf(largest, states[int64_t{i} * group].largest);
  }
  largest = cuda::warp_max(largest);
  const float base = largest == kNegInf ? 0.0f : largest;
  constexpr int kOwn = 4;  // channels of a lane
  const int channel = kOwn * lane;
  const bool present = channel < attend.head_dim;
  float sum = 0;
  float total[kOwn] = {};
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const PartState state = states[int64_t{i} * group];
    const float weight = state.sum * cuda::exp2_fast(state.largest - base);
    sum += weight;
    if (!present) continue;
    const uint2 stored =
        *reinterpret_cast<const uint2*>(values + int64_t{i} * group * attend.head_dim + channel);
    const float2 low = cuda::f16_values(stored.x);
    const float2 high = cuda::f16_values(stored.y);
    // A block without weight counts for nothing, whatever its values are.
    const float four[kOwn] = {low.x, low.y, high.x, high.y};
    const float unit = channel < kPassChannels ? state.unit[0] : state.unit[1];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      if (weight != 0) total[e] = fmaf(weight, four[e] * unit, total[e]);
    }
  }
  const HeadResult result = finish_head(attend, kv_head, head, largest, sum);
  if (attend.inputs.lse && lane == 0) attend.inputs.lse(t, head) = result.lse;
  if (!present) return;
  float out[kOwn];
#pragma unroll
  for (int e = 0; e < kOwn; ++e) out[e] = result.empty ? 0.0f : total[e] * result.factor + 0.0f;
  *reinterpret_cast<uint2*>(attend.inputs.out.row(t, head) + channel) =
      make_uint2(cuda::bf16_pair(out[0], out[1]), cuda::bf16_pair(out[2], out[3]));
}

// What follows from the problem.
struct Slabs {
  int64_t rows;
  int64_t number;

  explicit Slabs(const MsaAttendProblem& problem) {
    const int64_t heads = problem.num_heads * problem.topk;
    const int64_t row_bytes =
        heads * (problem.head_dim * static_cast<int64_t>(sizeof(uint16_t)) + sizeof(PartState));
    const int64_t bound = std::max<int64_t>(1, problem.max_rows);
    const int64_t most = std::clamp<int64_t>(kMaxSlabBytes / row_bytes, 1, bound);
    number = (bound + most - 1) / most;
    rows = (bound + number - 1) / number;
  }
};

int64_t places_of(const MsaAttendProblem& problem, int64_t rows) {
  return rows * problem.num_kv_heads * problem.topk;
}
int64_t cells_of(const MsaAttendProblem& problem) {
  return problem.num_kv_heads * problem.max_requests * problem.max_pages;
}
// Every cell with places has an item that is not full.
int64_t items_of(const MsaAttendProblem& problem, const Slabs& slabs) {
  const int64_t places = places_of(problem, slabs.rows);
  return places / kItemPlaces + std::min(places, cells_of(problem));
}

struct ByBlockMemory {
  int32_t *offsets, *num_places, *row_end, *counts, *firsts, *first_items;
  Target* targets;
  Place* places;
  Item* items;
  PartState* part_state;
  uint16_t* part_values;

  ByBlockMemory(const MsaAttendProblem& problem, const Slabs& slabs, WorkspaceCutter& cutter) {
    const int64_t places_all = places_of(problem, problem.max_rows);
    const int64_t parts = slabs.rows * problem.num_heads * problem.topk;
    offsets = cutter.take<int32_t>(problem.max_requests + 1);
    num_places = cutter.take<int32_t>(problem.max_rows * problem.num_kv_heads);
    row_end = cutter.take<int32_t>(problem.max_rows);
    counts = cutter.take<int32_t>(slabs.number * cells_of(problem));
    firsts = cutter.take<int32_t>(slabs.number * cells_of(problem));
    first_items = cutter.take<int32_t>(slabs.number + 1);
    targets = cutter.take<Target>(places_all);
    places = cutter.take<Place>(places_all);
    items = cutter.take<Item>(slabs.number * items_of(problem, slabs));
    part_state = cutter.take<PartState>(parts);
    part_values = cutter.take<uint16_t>(parts * problem.head_dim);
  }
};

template <int kDim>
void launch_items(const ByBlockParams& params, int slab, Stream stream) {
  cuda::launch(kAttendOp, attend_items<kDim>,
               {dim3(static_cast<unsigned>(params.items_per_slab)), dim3(kItemThreads),
                sizeof(BlockMemory<kDim>)},
               stream, params, slab);
}

}  // namespace
}  // namespace fovea::internal::msa

namespace fovea::internal {

Refusal msa_attend_cuda_by_block_supports(const MsaAttendProblem& problem) {
  if (problem.kv_mode != MsaKvMode::kBf16) return "takes kv_mode bf16 only";
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group > msa::kMaxGroup) {
    return "needs at most " + std::to_string(msa::kMaxGroup) + " query heads per KV head, got " +
           std::to_string(group);
  }
  if (problem.head_dim > msa::kMaxDim) {
    return "takes head_dim up to " + std::to_string(msa::kMaxDim) + ", got " +
           std::to_string(problem.head_dim);
  }
  if (problem.block_size > msa::kMaxBlockKeys) {
    return "takes blocks of at most " + std::to_string(msa::kMaxBlockKeys) + " tokens, got " +
           std::to_string(problem.block_size);
  }
  if (problem.topk < 1 || problem.topk > 1024) {
    return "takes lists of 1 to 1024 blocks, got topk = " + std::to_string(problem.topk);
  }
  constexpr int64_t kMaxEntries = int64_t{1} << 30;
  const int64_t pairs = problem.max_rows * problem.num_kv_heads;
  const int64_t columns = problem.max_requests * problem.max_pages;
  if (problem.max_rows * problem.num_heads > kMaxEntries || pairs > kMaxEntries / problem.topk) {
    return "takes at most 2^30 rows times heads and rows times list entries";
  }
  if (columns > kMaxEntries / problem.num_kv_heads ||
      msa::Slabs(problem).number >
          kMaxEntries / std::max<int64_t>(1, columns * problem.num_kv_heads)) {
    return "takes at most 2^30 blocks of requests times KV heads times slabs of rows";
  }
  return {};
}

Refusal msa_attend_cuda_by_block_preferred(const MsaAttendProblem& problem) {
  constexpr int64_t kMinPairs = 2048;  // rows times KV heads that fill a GPU
  constexpr int64_t kMinSharing = 16;  // rows that list a block, by the bounds
  if (problem.batch_invariant) return "sums in another order than decodes do";
  if (problem.max_rows * problem.num_kv_heads < kMinPairs) {
    return "pays from " + std::to_string(kMinPairs) + " rows times KV heads on";
  }
  if (problem.max_rows * problem.topk < kMinSharing * problem.max_requests * problem.max_pages) {
    return "pays where " + std::to_string(kMinSharing) + " rows list a block on average";
  }
  return {};
}

size_t msa_attend_cuda_by_block_workspace(const MsaAttendProblem& problem, const Device&) {
  WorkspaceCutter cutter({});
  const msa::ByBlockMemory memory(problem, msa::Slabs(problem), cutter);
  return cutter.used_bytes();
}

void msa_attend_cuda_by_block(const MsaAttendProblem& problem, const Device& device,
                              const MsaAttendTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const msa::Slabs slabs(problem);
  WorkspaceCutter cutter(workspace);
  const msa::ByBlockMemory memory(problem, slabs, cutter);
  if (tensors.q.shape[0] == 0) return;
  msa::ByBlockParams params{};
  msa::AttendParams& attend = params.attend;
  attend = msa::attend_params(problem, tensors, memory.offsets, stream);
  const int64_t rows = attend.num_rows;
  params.slab_rows = slabs.rows;
  params.num_slabs = static_cast<int32_t>((rows + slabs.rows - 1) / slabs.rows);
  const int64_t cells =
      problem.num_kv_heads * attend.rows.batch.num_requests() * attend.inputs.page_table.shape[1];
  params.cells_per_slab = static_cast<int32_t>(cells);
  params.items_per_slab = static_cast<int32_t>(msa::items_of(problem, slabs));
  params.num_places = memory.num_places;
  params.row_end = memory.row_end;
  params.targets = memory.targets;
  params.counts = memory.counts;
  params.firsts = memory.firsts;
  params.places = memory.places;
  params.items = memory.items;
  params.first_items = memory.first_items;
  params.part_values = memory.part_values;
  params.part_state = memory.part_state;

  const int64_t all_cells = cells * params.num_slabs;
  cuda::launch(msa::kAttendOp, msa::zero_counts,
               {dim3(cuda::grid_blocks(all_cells, msa::kListThreads)), dim3(msa::kListThreads)},
               stream, params.counts, all_cells);
  cuda::launch(msa::kAttendOp, msa::count_places,
               {dim3(static_cast<unsigned>(attend.num_tiles * problem.num_kv_heads)),
                dim3(msa::kRowWarps * msa::kWarpThreads),
                msa::kRowWarps * msa::ListMemory::bytes(problem.topk)},
               stream, params);
  cuda::launch(msa::kAttendOp, msa::cut_items, {dim3(1), dim3(msa::kCutThreads)}, stream, params);
  cuda::launch(msa::kAttendOp, msa::sort_places,
               {dim3(cuda::grid_blocks(msa::places_of(problem, rows), msa::kListThreads)),
                dim3(msa::kListThreads)},
               stream, params);
  for (int slab = 0; slab < params.num_slabs; ++slab) {
    if (problem.head_dim <= 64) {
      msa::launch_items<64>(params, slab, stream);
    } else {
      msa::launch_items<128>(params, slab, stream);
    }
    const int64_t here = std::min(slabs.rows, rows - slab * slabs.rows);
    cuda::launch(msa::kAttendOp, msa::fold_places,
                 {dim3(cuda::grid_blocks(here * problem.num_heads, msa::kFoldWarps)),
                  dim3(msa::kFoldWarps * msa::kWarpThreads)},
                 stream, params, slab);
  }
}

}  // namespace fovea::internal
