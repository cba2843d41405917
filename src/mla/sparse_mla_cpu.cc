#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/mla/sparse_mla_cpu.cc"
#include "src/core/simd.h"
// These need the helpers of simd.h.
#include "src/core/fp8_tile_simd.h"
#include "src/core/simd_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/core/sink.h"
#include "src/mla/sparse_mla_driver.h"
#include "src/mla/sparse_mla_impl.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// Queries are kept as [panel][Dqk][width]: the heads of a panel sit beside each other, so that one
// key element, broadcast, meets them in `kVectors` vectors. Accumulators of a register tile:
// keys * vectors for the logits (one vector: twice the keys), heads * vectors for the values;
// operands take the rest.
//            vector registers   logits   values
//   AVX2     16 of 8 lanes      6 x 2    4 x 3
//   AVX-512  32 of 16 lanes     8 x 2    4 x 4
// Floats from key to key of a tile: 37 cache lines, an odd number, meet all sets of the cache. A
// constant, so that the keys of a register tile are reached by displacements from one register.
constexpr int64_t kKeyStride = 576 + 16;
constexpr int64_t kValueHeads = 4;
// Channels of a logits loop between two steps of the prefetcher, some 200 cycles.
constexpr int64_t kStepChannels = 32;

using Full = hn::CappedTag<float, 16>;
using Half = hn::CappedTag<float, 8>;  // for the last 8 heads

constexpr int64_t lanes_of(int64_t cap) {
  return cap < static_cast<int64_t>(HWY_LANES(float)) ? cap
                                                      : static_cast<int64_t>(HWY_LANES(float));
}
constexpr int64_t kFullPanel = 2 * lanes_of(16);

// Width of the panel that starts at `head`.
inline int64_t panel_width(int64_t head, int64_t padded) {
  const int64_t rest = padded - head;
  if (rest >= kFullPanel) return kFullPanel;
  return rest >= lanes_of(16) && lanes_of(16) > 8 ? lanes_of(16) : std::min<int64_t>(rest, 8);
}

size_t query_bytes(int64_t head_dim_qk, int64_t padded) {
  return static_cast<size_t>(head_dim_qk * padded) * sizeof(float);
}

size_t tile_bytes() { return static_cast<size_t>(kTileKeys * kKeyStride) * sizeof(float); }

void load_query(const GroupShape& shape, const bf16_t* const* heads, void* query) {
  for (int64_t first = 0; first < shape.padded_heads;) {
    const int64_t width = panel_width(first, shape.padded_heads);
    float* panel = static_cast<float*>(query) + first * shape.head_dim_qk;
    // 32 channels at a time: the lines written stay in the first-level cache.
    for (int64_t d0 = 0; d0 < shape.head_dim_qk; d0 += 32) {
      for (int64_t h = 0; h < width; ++h) {
        const bf16_t* from = heads[first + h];
        for (int64_t d = d0; d < d0 + 32; ++d)
          panel[d * width + h] = from != nullptr ? bf16_to_float(from[d]) : 0.0f;
      }
    }
    first += width;
  }
}

// Decodes `count` bf16 values, a multiple of 16.
HWY_INLINE void decode_bf16(const uint8_t* from, int64_t count, float* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes)
    hn::Store(load_bf16(d, reinterpret_cast<const bf16_t*>(from) + i), d, to + i);
}

HWY_INLINE void decode_row(RowFormat format, const LatentKey& key, int64_t head_dim_qk, float* to) {
  const uint8_t* const row = key.row;
  switch (format) {
    case RowFormat::kF576:
      dequantize_tile_to_floats(row, kF576Width, 1.0f, to);
      return;
    case RowFormat::kR512:
      dequantize_tile_to_floats(row, kR512Width, r512_scale(key.scales), to);
      return;
    case RowFormat::kV4:
      for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
        dequantize_tile_to_floats(row + tile * kV4TileDim, kV4TileDim, v4_scale(key.scales, tile),
                                  to + tile * kV4TileDim);
      }
      decode_bf16(row + kV4LatentDim, kV4RopeDim, to + kV4LatentDim);
      return;
    case RowFormat::kV32:
      for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
        float scale;
        std::memcpy(&scale, row + kV32ScaleOffset + tile * 4, sizeof(scale));
        dequantize_tile_to_floats(row + tile * kV32TileDim, kV32TileDim, scale,
                                  to + tile * kV32TileDim);
      }
      decode_bf16(row + kV32RopeOffset, kV32RopeDim, to + kLatentDim);
      return;
    default:
      decode_bf16(row, head_dim_qk, to);
  }
}

// logits[k, head] = dot over all channels, for kKeys keys and kVectors vectors of heads. Channels
// are added one by one in their order, whatever the tile.
template <int kKeys, int kVectors, class D>
HWY_INLINE void dot_tile(D d, const float* HWY_RESTRICT query, const float* HWY_RESTRICT keys,
                         int64_t head_dim_qk, Prefetcher& prefetcher, float* HWY_RESTRICT logits) {
  using V = hn::Vec<D>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = kVectors * lanes;
  V sum[kKeys][kVectors];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[k][v] = hn::Zero(d);
  }
  for (int64_t begin = 0; begin < head_dim_qk; begin += kStepChannels) {
    prefetcher.step();
#pragma GCC unroll 2
    for (int64_t i = begin; i < begin + kStepChannels; ++i) {
      V q[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) q[v] = hn::Load(d, query + i * width + v * lanes);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const V key = hn::Set(d, keys[k * kKeyStride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[k][v] = hn::MulAdd(key, q[v], sum[k][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[k][v], d, logits + k * width + v * lanes);
  }
}

// The logits (unscaled) of all keys of a tile with one panel of heads.
template <int kVectors, class D>
HWY_NOINLINE void panel_logits(D d, const float* query, const float* keys, int64_t head_dim_qk,
                               int64_t num_keys, Prefetcher& prefetcher, float* logits) {
  constexpr int kKeys = (HWY_TARGET == HWY_AVX3 ? 16 : 12) / kVectors;
  const int64_t width = kVectors * static_cast<int64_t>(hn::Lanes(d));
  int64_t k = 0;
  for (; k + kKeys <= num_keys; k += kKeys) {
    dot_tile<kKeys, kVectors>(d, query, keys + k * kKeyStride, head_dim_qk, prefetcher,
                              logits + k * width);
  }
  for (; k + 4 <= num_keys; k += 4) {
    dot_tile<4, kVectors>(d, query, keys + k * kKeyStride, head_dim_qk, prefetcher,
                          logits + k * width);
  }
  for (; k < num_keys; ++k)
    dot_tile<1, kVectors>(d, query, keys + k * kKeyStride, head_dim_qk, prefetcher,
                          logits + k * width);
}

// Stores the weights of a vector of heads for one key: groups of 4 heads are kTileKeys * 4 apart.
// (Vectors of fewer than 4 lanes lie within a group.)
template <class D>
HWY_INLINE void store_weights(D d, hn::Vec<D> weight, float* to) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    store_weights(half, hn::LowerHalf(half, weight), to);
    store_weights(half, hn::UpperHalf(half, weight),
                  to + static_cast<int64_t>(hn::Lanes(half)) / 4 * kTileKeys * 4);
    return;
  }
#endif
  hn::StoreU(weight, d, to);
}

// Softmax of one vector of heads over a tile: logits in, weights out; updates the running maximum
// and sum. The sum adds the keys in their order.
template <class D>
HWY_INLINE void softmax_vector(D d, const GroupShape& shape, float* logits, int64_t width,
                               int64_t num_keys, bool first, const HeadState& state, float* alpha,
                               float* weights) {
  const auto neg_inf = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto scale = hn::Set(d, shape.logit_scale);
  const auto old_max = first ? neg_inf : hn::LoadU(d, state.max);
  auto max = old_max;
  for (int64_t k = 0; k < num_keys; ++k) {
    auto logit = hn::Mul(scale, hn::Load(d, logits + k * width));
    if (shape.logit_cap > 0) {
      const auto cap = hn::Set(d, shape.logit_cap);
      logit = hn::Mul(cap, tanh_f32(d, hn::Div(logit, cap)));
    }
    hn::Store(logit, d, logits + k * width);
    max = hn::Max(max, logit);
  }
  // While all logits are -inf, subtract 0: -inf minus -inf would be NaN. A NaN logit needs no care:
  // its weight is NaN, whatever became of the maximum.
  const auto base = hn::IfThenElse(hn::Eq(max, neg_inf), hn::Zero(d), max);
  const auto keep = exp_f32(d, hn::Sub(old_max, base));
  auto sum = first ? hn::Zero(d) : hn::Mul(hn::LoadU(d, state.sum), keep);
  for (int64_t k = 0; k < num_keys; ++k) {
    const auto weight = exp_f32(d, hn::Sub(hn::Load(d, logits + k * width), base));
    sum = hn::Add(sum, weight);
    store_weights(d, weight, weights + k * 4);
  }
  hn::StoreU(max, d, state.max);
  hn::StoreU(sum, d, state.sum);
  hn::StoreU(keep, d, alpha);
}

template <class D>
HWY_NOINLINE void panel_softmax(D d, const GroupShape& shape, int64_t head, int64_t width,
                                int64_t num_keys, bool first, const SparseMlaScratch& scratch,
                                const HeadState& state) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < width; i += lanes) {
    softmax_vector(d, shape, scratch.logits + i, width, num_keys, first, state.from_head(head + i),
                   scratch.alpha + head + i,
                   scratch.weights + (head + i) / 4 * kTileKeys * 4 + (head + i) % 4);
  }
}

// out[h, vector v] = alpha[h] * out + sum over keys of weight * value, for 4 heads.
template <int kVectors, class D>
HWY_INLINE void value_tile(D d, const float* HWY_RESTRICT values, const float* HWY_RESTRICT weights,
                           int64_t num_keys, bool first, const float* HWY_RESTRICT alpha,
                           float* HWY_RESTRICT out) {
  using V = hn::Vec<D>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum[kValueHeads][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kValueHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[h][v] =
          first ? hn::Zero(d)
                : hn::Mul(hn::Set(d, alpha[h]), hn::Load(d, out + h * kLatentDim + v * lanes));
    }
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < num_keys; ++k) {
    V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = hn::Load(d, values + k * kKeyStride + v * lanes);
#pragma GCC unroll 4
    for (int h = 0; h < kValueHeads; ++h) {
      const V weight = hn::Set(d, weights[k * 4 + h]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[h][v] = hn::MulAdd(weight, value[v], sum[h][v]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kValueHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[h][v], d, out + h * kLatentDim + v * lanes);
  }
}

// One panel of kVectors vectors of channels, all heads.
template <int kVectors, class D>
HWY_NOINLINE void value_panel(D d, const GroupShape& shape, const float* values, int64_t num_keys,
                              bool first, const SparseMlaScratch& scratch, Prefetcher& prefetcher,
                              float* out) {
  for (int64_t head = 0; head < shape.num_heads; head += kValueHeads) {
    prefetcher.step();
    value_tile<kVectors>(d, values, scratch.weights + head / 4 * kTileKeys * 4, num_keys, first,
                         scratch.alpha + head, out + head * kLatentDim);
  }
}

void add_values(const GroupShape& shape, int64_t num_keys, bool first,
                const SparseMlaScratch& scratch, Prefetcher& prefetcher, const HeadState& state) {
  const Full d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* values = static_cast<const float*>(scratch.tile);
  // 3 vectors at a time would leave a single one of AVX2's 64, whose 4 accumulators cannot hide the
  // latency of the additions: the last 4 go in pairs.
  constexpr int kVectors = lanes_of(16) == 8 ? 3 : 4;
  const int64_t main_end = kLatentDim - (kVectors == 3 ? 4 * lanes : 0);
  int64_t d0 = 0;
  for (; d0 < main_end; d0 += kVectors * lanes)
    value_panel<kVectors>(d, shape, values + d0, num_keys, first, scratch, prefetcher,
                          state.out + d0);
  for (; d0 < kLatentDim; d0 += 2 * lanes)
    value_panel<2>(d, shape, values + d0, num_keys, first, scratch, prefetcher, state.out + d0);
}

void softmax(const GroupShape& shape, int64_t head, int64_t width, int64_t num_keys, bool first,
             const SparseMlaScratch& scratch, const HeadState& state) {
  if (width == 8)
    panel_softmax(Half(), shape, head, width, num_keys, first, scratch, state);
  else
    panel_softmax(Full(), shape, head, width, num_keys, first, scratch, state);
}

void attend_tile(const SparseMlaKernel&, const GroupShape& shape, const KeyTile& tile,
                 const KeyTile& upcoming, bool first, const SparseMlaScratch& scratch,
                 const HeadState& state) {
  auto* keys = static_cast<float*>(scratch.tile);
  for (int k = 0; k < tile.num_keys; ++k) {
    decode_row(k < tile.num_primary ? shape.row_format : shape.extra_row_format,
               {tile.rows[k], tile.scales[k]}, shape.head_dim_qk, keys + k * kKeyStride);
  }
  // Steps of the logits (panels of 16 heads meet about 6 keys at a time), then of the values.
  const int64_t num_steps = (shape.padded_heads + 15) / 16 * (tile.num_keys / 6 + 1) *
                                (shape.head_dim_qk / kStepChannels) +
                            shape.padded_heads / kValueHeads * (kLatentDim / (4 * lanes_of(16)));
  Prefetcher prefetcher(shape, upcoming, num_steps);
  for (int64_t head = 0; head < shape.padded_heads;) {
    const int64_t width = panel_width(head, shape.padded_heads);
    const float* query = static_cast<const float*>(scratch.query) + head * shape.head_dim_qk;
    if (width == kFullPanel) {
      panel_logits<2>(Full(), query, keys, shape.head_dim_qk, tile.num_keys, prefetcher,
                      scratch.logits);
    } else if (width == lanes_of(16)) {
      panel_logits<1>(Full(), query, keys, shape.head_dim_qk, tile.num_keys, prefetcher,
                      scratch.logits);
    } else {
      panel_logits<1>(Half(), query, keys, shape.head_dim_qk, tile.num_keys, prefetcher,
                      scratch.logits);
    }
    softmax(shape, head, width, tile.num_keys, first, scratch, state);
    head += width;
  }
  add_values(shape, tile.num_keys, first, scratch, prefetcher, state);
  prefetcher.finish();
}

void unpack_row(RowFormat format, const LatentKey& key, int64_t head_dim_qk, bf16_t* out) {
  const uint8_t* const row = key.row;
  switch (format) {
    case RowFormat::kF576:
      dequantize_tile_simd(row, kF576Width, 1.0f, out);
      return;
    case RowFormat::kR512:
      dequantize_tile_simd(row, kR512Width, r512_scale(key.scales), out);
      return;
    case RowFormat::kV4:
      for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
        dequantize_tile_simd(row + tile * kV4TileDim, kV4TileDim, v4_scale(key.scales, tile),
                             out + tile * kV4TileDim);
      }
      std::memcpy(out + kV4LatentDim, row + kV4LatentDim, kV4RopeDim * sizeof(bf16_t));
      return;
    case RowFormat::kV32:
      for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
        float scale;
        std::memcpy(&scale, row + kV32ScaleOffset + tile * 4, sizeof(scale));
        dequantize_tile_simd(row + tile * kV32TileDim, kV32TileDim, scale,
                             out + tile * kV32TileDim);
      }
      std::memcpy(out + kLatentDim, row + kV32RopeOffset, kV32RopeDim * sizeof(bf16_t));
      return;
    default:
      std::memcpy(out, row, static_cast<size_t>(head_dim_qk) * sizeof(bf16_t));
  }
}

// run = run * exp(run.max - max) + part * exp(part.max - max), with the larger maximum.
void fold(int64_t heads, bool first, const HeadState& part, const HeadState& run) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (first) {
    std::copy_n(part.max, heads, run.max);
    std::copy_n(part.sum, heads, run.sum);
    std::copy_n(part.out, heads * kLatentDim, run.out);
    return;
  }
  HWY_ALIGN float keep_run[kMaxGroupHeads];
  HWY_ALIGN float keep_part[kMaxGroupHeads];
  const hn::CappedTag<float, 8> d8;
  const auto neg_inf = hn::Set(d8, -std::numeric_limits<float>::infinity());
  for (int64_t h = 0; h < heads; h += static_cast<int64_t>(hn::Lanes(d8))) {
    const auto run_max = hn::LoadU(d8, run.max + h);
    const auto part_max = hn::LoadU(d8, part.max + h);
    const auto max = hn::Max(run_max, part_max);
    const auto base = hn::IfThenElse(hn::Eq(max, neg_inf), hn::Zero(d8), max);
    const auto of_run = exp_f32(d8, hn::Sub(run_max, base));
    const auto of_part = exp_f32(d8, hn::Sub(part_max, base));
    const auto sum = hn::MulAdd(hn::LoadU(d8, part.sum + h), of_part,
                                hn::Mul(hn::LoadU(d8, run.sum + h), of_run));
    hn::StoreU(max, d8, run.max + h);
    hn::StoreU(sum, d8, run.sum + h);
    hn::StoreU(of_run, d8, keep_run + h);
    hn::StoreU(of_part, d8, keep_part + h);
  }
  for (int64_t h = 0; h < heads; ++h) {
    const auto of_run = hn::Set(d, keep_run[h]);
    const auto of_part = hn::Set(d, keep_part[h]);
    float* to = run.out + h * kLatentDim;
    const float* from = part.out + h * kLatentDim;
    for (int64_t i = 0; i < kLatentDim; i += lanes) {
      hn::Store(hn::MulAdd(hn::Load(d, from + i), of_part, hn::Mul(hn::Load(d, to + i), of_run)), d,
                to + i);
    }
  }
}

// The last channels of one head, turned by minus the angles of its row and rounded. `scale` as for
// the others.
void store_turned(const HeadOutput& output, const float* values, float scale) {
  const int64_t half = output.rope_dim / 2, first = kLatentDim - output.rope_dim;
  for (int64_t i = 0; i < half; ++i) {
    const float x = scale * values[first + 2 * i], y = scale * values[first + 2 * i + 1];
    const float cosine = output.rotation[i], sine = output.rotation[half + i];
    output.out[first + 2 * i] = bf16_from_float(x * cosine + y * sine);
    output.out[first + 2 * i + 1] = bf16_from_float(y * cosine - x * sine);
  }
}

// sum = 0: no key, or none with any weight. sum = NaN: a logit was NaN or +inf.
void finish(const float* max, const float* sum, const float* values, const HeadOutput& output) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (*sum == 0) {
    std::fill_n(output.out, kLatentDim, bf16_t{0});
    *output.lse = output.empty_lse == EmptyLse::kPosInf ? kInf : -kInf;
    if (output.max_logit != nullptr) *output.max_logit = -kInf;
    return;
  }
  const float lse = *max + std::log(*sum);
  const float factor =
      output.value_scale * (output.sink != nullptr ? sink_factor(*output.sink, lse) : 1.0f);
  const auto scale = hn::Set(d, factor / *sum);
  for (int64_t i = 0; i < kLatentDim; i += lanes) {
    store_bf16(d, round_to_bf16(d, hn::Mul(hn::Load(d, values + i), scale)), output.out + i);
  }
  if (output.rotation != nullptr) store_turned(output, values, factor / *sum);
  *output.lse = lse;
  if (output.max_logit != nullptr) *output.max_logit = std::isnan(lse) ? lse : *max;
}

SparseMlaKernel kernel() {
  return {query_bytes, tile_bytes, load_query, attend_tile, softmax, unpack_row, fold, finish};
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(kernel);

SparseMlaKernel sparse_mla_cpu_kernel() {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  return HWY_DYNAMIC_DISPATCH(kernel)();
}

size_t sparse_mla_cpu_workspace(const SparseMlaProblem& problem, const Device& device) {
  return sparse_mla_workspace(sparse_mla_cpu_kernel(), problem, device);
}

void sparse_mla_cpu(const SparseMlaProblem& problem, const Device& device,
                    const SparseMlaTensors& tensors, Workspace workspace) {
  run_sparse_mla(sparse_mla_cpu_kernel(), problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
