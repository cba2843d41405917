#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/mla/mha_varlen_cpu.cc"
#include "src/core/simd.h"
// This needs the helpers of simd.h.
#include "src/core/simd_math.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/mla/mha_varlen_impl.h"
#include "src/mla/mha_varlen_scratch.h"

// A block of query rows of one request and head walks over tiles of keys with a running maximum.
// Rows stand beside each other in the lanes of vectors, so that decoded keys, broadcast element by
// element, give the logits of a vector of rows, and the softmax needs no sum across lanes. No lane
// influences another: the bits of a row do not depend on the rows beside it. The order of all sums
// is fixed: channels in order, keys in order within a tile, tiles in order.

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// Register tiles (accumulators; operands take the rest of the registers):
//            vector registers   logits (keys x vectors of rows)   values (rows x vectors)
//   AVX2     16 of 8 lanes      6 x 2, 12 x 1                     4 x 3
//   AVX-512  32 of 16 lanes     12 x 2, 12 x 1                    4 x 4
using Rows = hn::CappedTag<float, 16>;
constexpr int64_t kRowLanes = HWY_LANES(float) < 16 ? HWY_LANES(float) : 16;
constexpr int kPairKeys = HWY_TARGET == HWY_AVX3 ? 12 : 6;
constexpr int kSingleKeys = 12;
constexpr int kValueRows = 4;
// Rows that every step takes together; blocks are padded to whole groups.
constexpr int64_t kRowGroup = std::max<int64_t>(kRowLanes, kValueRows);
constexpr int kValueVectors = HWY_TARGET == HWY_AVX3 ? 4 : 3;

// Where a block stands in its walk over the keys.
struct Tile {
  const float* keys;
  const float* values;
  int64_t first_key;    // within the request
  int64_t num_keys;     // the register tiles take up to 11 more, which are zero
  int64_t padded_rows;  // whole vectors
  bool first;           // nothing has been summed yet
  bool masked;          // some row does not see all of its keys
};

// Keys of the tile that row i sees.
inline int64_t seen_keys(const Tile& tile, const MhaScratch& scratch, int64_t i) {
  return std::clamp<int64_t>(scratch.visible[i] - tile.first_key, 0, tile.num_keys);
}

// Keys that some row of row i's group sees. No row before sees more: keys beyond are not computed.
inline int64_t group_keys(const Tile& tile, const MhaScratch& scratch, int64_t i) {
  return seen_keys(tile, scratch, i / kRowGroup * kRowGroup + kRowGroup - 1);
}

// Decodes `count` bf16 values and fills up with zeros to `padded`.
void decode(const bf16_t* from, int64_t count, int64_t padded, float* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load_bf16(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = bf16_to_float(from[i]);
  std::fill(to + i, to + padded, 0.0f);
}

bool all_finite(const bf16_t* from, int64_t count) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found |= (from[i].bits & 0x7F80u) == 0x7F80u ? 1u : 0u;
  return found == 0;
}

// Rows of the panel of queries that starts at row i: two vectors, or what is left.
inline int64_t panel_rows(int64_t i, int64_t padded_rows) {
  return std::min(2 * kRowLanes, padded_rows - i);
}

// Transposes the query rows into panels [Dqk][rows of the panel], 16 channels at a time: the lines
// written stay in the L1 cache. Rows past the last one are zero.
void load_query(const Accessor<const bf16_t, 3>& q, int64_t first_row, int64_t num_rows,
                int64_t padded_rows, int64_t head, float* query) {
  const int64_t channels = q.shape[2];
  for (int64_t i0 = 0; i0 < padded_rows; i0 += panel_rows(i0, padded_rows)) {
    const int64_t width = panel_rows(i0, padded_rows);
    float* panel = query + i0 * channels;
    for (int64_t c0 = 0; c0 < channels; c0 += 16) {
      const int64_t c1 = std::min(channels, c0 + 16);
      for (int64_t i = 0; i < width; ++i) {
        const bool real = i0 + i < num_rows;
        const bf16_t* from = real ? q.row(first_row + i0 + i, head) : nullptr;
        for (int64_t c = c0; c < c1; ++c)
          panel[c * width + i] = real ? bf16_to_float(from[c]) : 0.0f;
      }
    }
  }
}

// weights[key][row] = dot(query row, key) for kKeys keys and kVectors vectors of rows.
template <int kKeys, int kVectors>
HWY_INLINE void dot_tile(const float* HWY_RESTRICT query, const float* HWY_RESTRICT keys,
                         int64_t key_stride, int64_t channels, float* HWY_RESTRICT logits) {
  const Rows d;
  using V = hn::Vec<Rows>;
  V sum[kKeys][kVectors];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[k][v] = hn::Zero(d);
  }
  for (int64_t c = 0; c < channels; ++c) {
    V q[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) q[v] = hn::Load(d, query + (c * kVectors + v) * kRowLanes);
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const V key = hn::Set(d, keys[k * key_stride + c]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[k][v] = hn::MulAdd(key, q[v], sum[k][v]);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      hn::Store(sum[k][v], d, logits + k * kMhaWeightStride + v * kRowLanes);
  }
}

// The unscaled logits of a tile.
void tile_logits(const MhaVarlenProblem& problem, const Tile& tile, const MhaScratch& scratch) {
  const int64_t channels = problem.head_dim_qk;
  const int64_t stride = mha_row_stride(channels);
  for (int64_t i = 0; i < tile.padded_rows; i += panel_rows(i, tile.padded_rows)) {
    const int64_t rows = panel_rows(i, tile.padded_rows);
    const int64_t num_keys = group_keys(tile, scratch, i + rows - 1);
    const float* query = scratch.query + i * channels;
    const int64_t step = rows == 2 * kRowLanes ? kPairKeys : kSingleKeys;
    for (int64_t k = 0; k < num_keys; k += step) {
      const float* keys = tile.keys + k * stride;
      float* logits = scratch.weights + k * kMhaWeightStride + i;
      if (rows == 2 * kRowLanes)
        dot_tile<kPairKeys, 2>(query, keys, stride, channels, logits);
      else
        dot_tile<kSingleKeys, 1>(query, keys, stride, channels, logits);
    }
  }
}

// Logits in, weights out, for one vector of rows; updates their running maximum and sum. A key that
// a row does not see has weight 0, whatever its logit.
template <bool kMasked>
void softmax_vector(const Tile& tile, float softmax_scale, int64_t i, const MhaScratch& scratch) {
  const Rows d;
  const hn::RebindToSigned<Rows> d32;
  float* logits = scratch.weights + i;
  const int64_t num_keys = group_keys(tile, scratch, i);
  const auto neg_inf = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto scale = hn::Set(d, softmax_scale);
  const auto visible = hn::Sub(hn::Load(d32, scratch.visible + i),
                               hn::Set(d32, static_cast<int32_t>(tile.first_key)));
  const auto old_max = tile.first ? neg_inf : hn::Load(d, scratch.max + i);
  auto max = old_max;
  for (int64_t k = 0; k < num_keys; ++k) {
    auto logit = hn::Mul(scale, hn::Load(d, logits + k * kMhaWeightStride));
    if constexpr (kMasked) {
      const auto sees = hn::Gt(visible, hn::Set(d32, static_cast<int32_t>(k)));
      logit = hn::IfThenElse(hn::RebindMask(d, sees), logit, neg_inf);
    }
    hn::Store(logit, d, logits + k * kMhaWeightStride);
    max = hn::Max(max, logit);
  }
  // While all logits are -inf, subtract 0: -inf minus -inf would be NaN. A NaN logit needs no care:
  // its weight is NaN, whatever became of the maximum.
  const auto base = hn::IfThenElse(hn::Eq(max, neg_inf), hn::Zero(d), max);
  const auto keep = exp_f32(d, hn::Sub(old_max, base));
  auto sum = tile.first ? hn::Zero(d) : hn::Mul(hn::Load(d, scratch.sum + i), keep);
  for (int64_t k = 0; k < num_keys; ++k) {
    const auto weight = exp_f32(d, hn::Sub(hn::Load(d, logits + k * kMhaWeightStride), base));
    sum = hn::Add(sum, weight);
    hn::Store(weight, d, logits + k * kMhaWeightStride);
  }
  hn::Store(max, d, scratch.max + i);
  hn::Store(sum, d, scratch.sum + i);
  hn::Store(keep, d, scratch.keep + i);
}

// out[row, vector] = keep[row] * out + sum over keys of weight * value, for kRows rows.
template <int kRows, int kVectors>
HWY_INLINE void value_tile(const float* HWY_RESTRICT values, int64_t stride,
                           const float* HWY_RESTRICT weights, int64_t num_keys, bool first,
                           const float* HWY_RESTRICT keep, float* HWY_RESTRICT out) {
  const Rows d;
  using V = hn::Vec<Rows>;
  V sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = first
                      ? hn::Zero(d)
                      : hn::Mul(hn::Set(d, keep[i]), hn::Load(d, out + i * stride + v * kRowLanes));
    }
  }
  for (int64_t k = 0; k < num_keys; ++k) {
    V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = hn::Load(d, values + k * stride + v * kRowLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const V weight = hn::Set(d, weights[k * kMhaWeightStride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(weight, value[v], sum[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[i][v], d, out + i * stride + v * kRowLanes);
  }
}

// Rows [first_row, end_row), a multiple of kRows of them, and one panel of channels.
template <int kRows, int kVectors>
HWY_NOINLINE void value_panel(const Tile& tile, const MhaScratch& scratch, int64_t stride,
                              int64_t first_row, int64_t end_row, int64_t channel) {
  for (int64_t i = first_row; i < end_row; i += kRows) {
    const int64_t num_keys = group_keys(tile, scratch, i);
    if (num_keys == 0 && !tile.first) continue;  // the rows are done
    value_tile<kRows, kVectors>(tile.values + channel, stride, scratch.weights + i, num_keys,
                                tile.first, scratch.keep + i, scratch.out + i * stride + channel);
  }
}

template <int kRows>
void add_values(const Tile& tile, const MhaScratch& scratch, int64_t head_dim_v, int64_t first_row,
                int64_t end_row) {
  const int64_t stride = mha_row_stride(head_dim_v);
  int64_t channel = 0;
  while (channel < head_dim_v) {
    const int64_t vectors = (head_dim_v - channel + kRowLanes - 1) / kRowLanes;
    // A single vector has too few accumulators to hide the latency of the additions: a rest of four
    // goes in pairs where three are the rule.
    if (vectors >= kValueVectors && (kValueVectors == 4 || vectors != 4)) {
      value_panel<kRows, kValueVectors>(tile, scratch, stride, first_row, end_row, channel);
      channel += kValueVectors * kRowLanes;
    } else if (vectors >= 2) {
      value_panel<kRows, 2>(tile, scratch, stride, first_row, end_row, channel);
      channel += 2 * kRowLanes;
    } else {
      value_panel<kRows, 1>(tile, scratch, stride, first_row, end_row, channel);
      channel += kRowLanes;
    }
  }
}

// For a masked tile with values that are not finite, whose product with weight 0 would be NaN: row
// by row from the last, with zeros in place of the values that the row, and so every row before
// it, does not see. Same sums in the same order as above.
void add_visible_values(const Tile& tile, const MhaScratch& scratch, int64_t head_dim_v,
                        float* values) {
  const int64_t stride = mha_row_stride(head_dim_v);
  for (int64_t i = tile.padded_rows - 1; i >= 0; --i) {
    std::fill(values + seen_keys(tile, scratch, i) * stride, values + tile.num_keys * stride, 0.0f);
    add_values<1>(tile, scratch, head_dim_v, i, i + 1);
  }
}

void softmax(const MhaVarlenProblem& problem, const Tile& tile, const MhaScratch& scratch) {
  for (int64_t i = 0; i < tile.padded_rows; i += kRowLanes) {
    if (tile.masked)
      softmax_vector<true>(tile, problem.softmax_scale, i, scratch);
    else
      softmax_vector<false>(tile, problem.softmax_scale, i, scratch);
  }
}

// Divides by the sum and rounds. sum = 0: no key, or none with any weight.
void finish_row(const MhaVarlenProblem& problem, const MhaScratch& scratch, int64_t i, bf16_t* out,
                float* lse) {
  const float sum = scratch.sum[i];
  if (sum == 0) {
    std::fill_n(out, problem.head_dim_v, bf16_t{0});
    *lse = -std::numeric_limits<float>::infinity();
    return;
  }
  *lse = scratch.max[i] + std::log(sum);
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* from = scratch.out + i * mha_row_stride(problem.head_dim_v);
  const float factor = 1.0f / sum;
  int64_t c = 0;
  // Adding +0 turns -0 into +0: keys of weight 0 may or may not have done so before.
  for (; c + lanes <= problem.head_dim_v; c += lanes) {
    const auto value = hn::Mul(hn::LoadU(d, from + c), hn::Set(d, factor));
    store_bf16(d, round_to_bf16(d, hn::Add(value, hn::Zero(d))), out + c);
  }
  for (; c < problem.head_dim_v; ++c) out[c] = bf16_from_float(from[c] * factor + 0.0f);
}

struct MhaInputs {
  Accessor<const bf16_t, 3> q, k, v;
  Accessor<bf16_t, 3> out;
  Accessor<float, 2> lse;
};

// Asks for a row's lines in the L1 cache.
HWY_INLINE void prefetch_row(const bf16_t* row, int64_t count) {
  const auto* bytes = reinterpret_cast<const char*>(row);
  const int64_t end = count * int64_t{sizeof(bf16_t)};
  for (int64_t offset = 0; offset < end; offset += 64) __builtin_prefetch(bytes + offset);
  __builtin_prefetch(bytes + end - 1);
}

// Decodes the keys and values of a tile. False: some row does not see some of its keys, and there
// are values that are not finite.
bool decode_tile(const MhaVarlenProblem& problem, const MhaInputs& inputs,
                 const MhaBlocks::Block& block, const Tile& tile, const MhaScratch& scratch) {
  // Rows of one head lie far apart, where no hardware prefetcher follows. Keys this far ahead, of
  // the next tile too, are asked for: decoding 8 of them takes about as long as the L3 cache.
  constexpr int64_t kAhead = 8;
  const int64_t key_stride = mha_row_stride(problem.head_dim_qk);
  const int64_t value_stride = mha_row_stride(problem.head_dim_v);
  bool finite = true;
  for (int64_t k = 0; k < tile.num_keys; ++k) {
    const int64_t j = block.keys.begin + tile.first_key + k;
    if (j + kAhead < block.keys.end) {
      prefetch_row(inputs.k.row(j + kAhead, block.head), problem.head_dim_qk);
      prefetch_row(inputs.v.row(j + kAhead, block.head), problem.head_dim_v);
    }
    const bf16_t* value = inputs.v.row(j, block.head);
    decode(inputs.k.row(j, block.head), problem.head_dim_qk, problem.head_dim_qk,
           scratch.keys + k * key_stride);
    decode(value, problem.head_dim_v, value_stride, scratch.values + k * value_stride);
    if (tile.masked) finite = finite && all_finite(value, problem.head_dim_v);
  }
  const int64_t padded_keys = (tile.num_keys + kSingleKeys - 1) / kSingleKeys * kSingleKeys;
  std::fill(scratch.keys + tile.num_keys * key_stride, scratch.keys + padded_keys * key_stride,
            0.0f);
  return finite;
}

void attend_block(const MhaVarlenProblem& problem, const MhaInputs& inputs,
                  const MhaBlocks::Block& block, const MhaScratch& scratch) {
  const int64_t first_row = block.rows.begin + block.first_row;
  const int64_t num_rows = std::min(kMhaBlockRows, block.rows.count() - block.first_row);
  const int64_t padded_rows = (num_rows + kRowGroup - 1) / kRowGroup * kRowGroup;
  for (int64_t i = 0; i < padded_rows; ++i) {
    const int64_t row = block.first_row + std::min(i, num_rows - 1);
    scratch.visible[i] = static_cast<int32_t>(
        visible_keys(problem.causal, row, block.rows.count(), block.keys.count()));
  }
  const int64_t fewest = scratch.visible[0];
  const int64_t most = scratch.visible[num_rows - 1];
  load_query(inputs.q, first_row, num_rows, padded_rows, block.head, scratch.query);
  std::fill_n(scratch.sum, kMhaBlockRows, 0.0f);
  for (int64_t first_key = 0; first_key < most; first_key += kMhaTileKeys) {
    const int64_t num_keys = std::min(kMhaTileKeys, most - first_key);
    const Tile tile{scratch.keys,
                    scratch.values,
                    first_key,
                    num_keys,
                    padded_rows,
                    first_key == 0,
                    first_key + num_keys > fewest};
    const bool finite = decode_tile(problem, inputs, block, tile, scratch);
    tile_logits(problem, tile, scratch);
    softmax(problem, tile, scratch);
    if (finite)
      add_values<kValueRows>(tile, scratch, problem.head_dim_v, 0, padded_rows);
    else
      add_visible_values(tile, scratch, problem.head_dim_v, scratch.values);
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    finish_row(problem, scratch, i, inputs.out.row(first_row + i, block.head),
               &inputs.lse(first_row + i, block.head));
  }
}

void mha_varlen(const MhaVarlenProblem& problem, const Device& device,
                const MhaVarlenTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  MhaBlocks blocks(cutter, problem);
  blocks.fill(tensors);
  char* const worker_memory = static_cast<char*>(workspace.data) + cutter.used_bytes();
  WorkspaceCutter measure({});
  MhaScratch(measure, problem);
  const auto worker_bytes = static_cast<int64_t>(measure.used_bytes());
  const MhaInputs inputs{access<const bf16_t, 3>(tensors.q), access<const bf16_t, 3>(tensors.k),
                         access<const bf16_t, 3>(tensors.v), access<bf16_t, 3>(tensors.out),
                         access<float, 2>(tensors.lse)};
  const ThreadScope threads(device.num_threads);
  ParallelFor(blocks.count(), 1, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter mine({worker_memory + worker * worker_bytes, 0});
    const MhaScratch scratch(mine, problem);
    for (int64_t i = begin; i < end; ++i) attend_block(problem, inputs, blocks[i], scratch);
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(mha_varlen);

size_t mha_varlen_cpu_workspace(const MhaVarlenProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  MhaBlocks(cutter, problem);
  for (int worker = 0; worker < device.num_threads; ++worker) MhaScratch(cutter, problem);
  return cutter.used_bytes();
}

void mha_varlen_cpu(const MhaVarlenProblem& problem, const Device& device,
                    const MhaVarlenTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(mha_varlen)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
