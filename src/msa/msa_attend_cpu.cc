#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/msa/msa_attend_cpu.cc"
#include "src/core/simd.h"
// This needs the helpers of simd.h.
#include "src/core/simd_math.h"

#include <algorithm>
#include <limits>

#include "src/msa/msa_attend_driver.h"

// Query heads stand in the lanes; decoded keys, broadcast element by element,
// give the logits of a panel, and the softmax needs no sum across lanes. No
// lane influences another. The order of all sums is fixed: channels in order,
// keys in order within a tile, tiles in order.

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// Register tiles (accumulators; operands take the rest of the registers):
//            vector registers   logits (keys x vectors of lanes)   values
//            (lanes x vectors)
//   SSE2     16 of 4 lanes      3 x 4                              4 x 3
//   AVX2     16 of 8 lanes      6 x 2                              4 x 3
//   AVX-512  32 of 16 lanes     12 x 1                             4 x 4
using Lanes = hn::CappedTag<float, 16>;
constexpr int64_t kVectorLanes = HWY_LANES(float) < 16 ? HWY_LANES(float) : 16;
constexpr int kPanelVectors = static_cast<int>(kMsaPanelLanes / kVectorLanes);
constexpr int kTileKeys = HWY_TARGET <= HWY_AVX3 ? 12 : HWY_LANES(float) >= 8 ? 6 : 3;
// Channels of a logits loop between two steps of the prefetch; every channel
// count is a multiple.
constexpr int64_t kStepChannels = 16;
constexpr int kValueVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 3;

void decode_bf16(const bf16_t* from, int64_t count, float* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(load_bf16(d, from + i), d, to + i);
}

void decode_e4m3(const uint8_t* from, int64_t count, float* to) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(load_e4m3(d, from + i), d, to + i);
}

void decode_kv4(const uint8_t* from, const uint8_t* scales, int64_t count, float* to) {
  for (int64_t d = 0; d < count; d += 2) {
    const uint8_t scale = scales[d / kMsaKv4Group];
    to[d] = msa_kv4_value(from[d / 2] & 15, scale);
    to[d + 1] = msa_kv4_value(from[d / 2] >> 4, scale);
  }
}

void decode_rows(const MsaStoredRows& stored, int64_t head_dim, int64_t count, float* out) {
  const int64_t stride = msa_key_stride(head_dim);
  for (int64_t k = 0; k < count; ++k) {
    const char* const row = stored.rows + k * stored.stride_bytes;
    float* const to = out + k * stride;
    if (stored.mode == MsaKvMode::kBf16) {
      decode_bf16(reinterpret_cast<const bf16_t*>(row), head_dim, to);
    } else if (stored.mode == MsaKvMode::kQ8Kv4) {
      decode_kv4(reinterpret_cast<const uint8_t*>(row),
                 stored.group_scales + k * stored.scale_stride, head_dim, to);
    } else {
      decode_e4m3(reinterpret_cast<const uint8_t*>(row), head_dim, to);
    }
  }
}

// logits[key][lane] = dot(query of the lane, key) for kTileKeys keys.
HWY_INLINE void dot_tile(const float* HWY_RESTRICT query, const float* HWY_RESTRICT keys,
                         int64_t stride, int64_t head_dim, MsaPrefetch& prefetch,
                         float* HWY_RESTRICT logits) {
  const Lanes d;
  using V = hn::Vec<Lanes>;
  V sum[kTileKeys][kPanelVectors];
#pragma GCC unroll 16
  for (int k = 0; k < kTileKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sum[k][v] = hn::Zero(d);
  }
  for (int64_t begin = 0; begin < head_dim; begin += kStepChannels) {
    prefetch.step();
    for (int64_t c = begin; c < begin + kStepChannels; ++c) {
      V q[kPanelVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v)
        q[v] = hn::Load(d, query + c * kMsaPanelLanes + v * kVectorLanes);
#pragma GCC unroll 16
      for (int k = 0; k < kTileKeys; ++k) {
        const V key = hn::Set(d, keys[k * stride + c]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sum[k][v] = hn::MulAdd(key, q[v], sum[k][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < kTileKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v)
      hn::Store(sum[k][v], d, logits + k * kMsaPanelLanes + v * kVectorLanes);
  }
}

HWY_NOINLINE void panel_logits(const MsaPanelTask& task) {
  const int64_t stride = msa_key_stride(task.head_dim);
  for (int64_t k = 0; k < task.num_keys; k += kTileKeys) {
    const float* keys = task.keys + k * stride;
    if (task.stored != nullptr) {
      const int64_t count = std::min<int64_t>(kTileKeys, task.num_keys - k);
      decode_rows(task.stored[0].from(k), task.head_dim, count, task.keys);
      std::fill(task.keys + count * stride, task.keys + kTileKeys * stride, 0.0f);
      keys = task.keys;
    }
    dot_tile(task.query, keys, stride, task.head_dim, *task.prefetch,
             task.logits + k * kMsaPanelLanes);
  }
}

// Logits in, weights out, for one vector of lanes; updates their running
// maximum and sum. A key that a lane does not see has weight 0, whatever its
// logit.
HWY_NOINLINE void softmax_vector(const MsaPanelTask& task, int64_t lane) {
  const Lanes d;
  const hn::RebindToSigned<Lanes> d32;
  float* const logits = task.logits + lane;
  const auto neg_inf = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto scale = hn::LoadU(d, task.scale + lane);
  const auto visible = hn::LoadU(d32, task.visible + lane);
  const auto old_max = hn::LoadU(d, task.state.max + lane);
  auto max = old_max;
  for (int64_t k = 0; k < task.num_keys; ++k) {
    auto logit = hn::Mul(scale, hn::Load(d, logits + k * kMsaPanelLanes));
    if (task.key_scale != nullptr) logit = hn::Mul(logit, hn::Set(d, task.key_scale[k]));
    const auto sees = hn::Gt(visible, hn::Set(d32, static_cast<int32_t>(k)));
    logit = hn::IfThenElse(hn::RebindMask(d, sees), logit, neg_inf);
    hn::Store(logit, d, logits + k * kMsaPanelLanes);
    max = hn::Max(max, logit);
  }
  // While all logits are -inf, subtract 0: -inf minus -inf would be NaN. A NaN
  // logit needs no care: its weight is NaN, whatever became of the maximum.
  const auto base = hn::IfThenElse(hn::Eq(max, neg_inf), hn::Zero(d), max);
  const auto keep = exp_f32(d, hn::Sub(old_max, base));
  auto sum = hn::Mul(hn::LoadU(d, task.state.sum + lane), keep);
  for (int64_t k = 0; k < task.num_keys; ++k) {
    auto weight = exp_f32(d, hn::Sub(hn::Load(d, logits + k * kMsaPanelLanes), base));
    sum = hn::Add(sum, weight);
    if (task.value_scale != nullptr) weight = hn::Mul(weight, hn::Set(d, task.value_scale[k]));
    hn::Store(weight, d, logits + k * kMsaPanelLanes);
  }
  hn::StoreU(max, d, task.state.max + lane);
  hn::StoreU(sum, d, task.state.sum + lane);
  hn::StoreU(keep, d, task.keep + lane);
}

// Keys whose values a panel alone decodes at a time: 18 KiB at 128 channels.
constexpr int64_t kValueKeys = 32;

// Some keys of a tile, in the sums of some lanes that see them.
struct ValueKeys {
  const float* values;
  const float* weights;  // [count][kMsaPanelLanes]
  int64_t count;
  enum class Before { kNothing, kOtherTiles, kThisTile } before;  // what the sums hold
};

// out[lane, channels] = keep[lane] * out + sum over keys of weight * value.
template <int kRows, int kVectors>
HWY_INLINE void value_tile(const MsaPanelTask& task, const ValueKeys& keys, int64_t lane,
                           int64_t channel) {
  const Lanes d;
  using V = hn::Vec<Lanes>;
  task.prefetch->step();
  const int64_t stride = msa_key_stride(task.head_dim);
  const float* HWY_RESTRICT values = keys.values + channel;
  const float* HWY_RESTRICT weights = keys.weights + lane;
  float* HWY_RESTRICT out = task.state.out + lane * task.head_dim + channel;
  V sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = hn::Zero(d);
      if (keys.before == ValueKeys::Before::kNothing) continue;
      sum[i][v] = hn::LoadU(d, out + i * task.head_dim + v * kVectorLanes);
      if (keys.before == ValueKeys::Before::kOtherTiles)
        sum[i][v] = hn::Mul(hn::Set(d, task.keep[lane + i]), sum[i][v]);
    }
  }
  const int64_t num_keys = keys.count;
  for (int64_t k = 0; k < num_keys; ++k) {
    V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      value[v] = hn::LoadU(d, values + k * stride + v * kVectorLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const V weight = hn::Set(d, weights[k * kMsaPanelLanes + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(weight, value[v], sum[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      hn::StoreU(sum[i][v], d, out + i * task.head_dim + v * kVectorLanes);
  }
}

// All channels of kRows lanes, which see the same keys.
template <int kRows>
HWY_NOINLINE void add_values(const MsaPanelTask& task, const ValueKeys& keys, int64_t lane) {
  int64_t channel = 0;
  while (channel < task.head_dim) {
    const int64_t vectors = (task.head_dim - channel) / kVectorLanes;
    // A single vector has too few accumulators to hide the latency of the
    // additions: a rest of four goes in pairs where three are the rule.
    if (vectors >= kValueVectors && (kValueVectors == 4 || vectors != 4)) {
      value_tile<kRows, kValueVectors>(task, keys, lane, channel);
      channel += kValueVectors * kVectorLanes;
    } else if (vectors >= 2) {
      value_tile<kRows, 2>(task, keys, lane, channel);
      channel += 2 * kVectorLanes;
    } else {
      value_tile<kRows, 1>(task, keys, lane, channel);
      channel += kVectorLanes;
    }
  }
}

// Row by row: the keys that a row does not see may hold NaN, whose product with
// weight 0 is NaN.
void rows_values(const MsaPanelTask& task, const float* values, int64_t first, int64_t count) {
  using Before = ValueKeys::Before;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    int64_t lane = row * task.lanes_per_row;
    const int64_t end = lane + task.lanes_per_row;
    const int64_t num_keys = std::min<int64_t>(count, task.visible[lane] - first);
    if (num_keys <= 0) continue;
    const Before before = first > 0              ? Before::kThisTile
                          : task.fresh[row] != 0 ? Before::kNothing
                                                 : Before::kOtherTiles;
    const ValueKeys keys{values, task.logits + first * kMsaPanelLanes, num_keys, before};
    for (; lane + 4 <= end; lane += 4) add_values<4>(task, keys, lane);
    for (; lane + 2 <= end; lane += 2) add_values<2>(task, keys, lane);
    for (; lane < end; ++lane) add_values<1>(task, keys, lane);
  }
}

void panel_values(const MsaPanelTask& task) {
  if (task.stored == nullptr) {
    rows_values(task, task.values, 0, task.num_keys);
    return;
  }
  for (int64_t first = 0; first < task.num_keys; first += kValueKeys) {
    const int64_t count = std::min(kValueKeys, task.num_keys - first);
    decode_rows(task.stored[1].from(first), task.head_dim, count, task.values);
    rows_values(task, task.values, first, count);
  }
}

// Steps of the prefetch in the logits and, roughly, in the values of a panel.
int64_t prefetch_steps(const MsaPanelTask& task) {
  const int64_t tiles = (task.num_keys + kTileKeys - 1) / kTileKeys;
  const int64_t passes = task.stored == nullptr ? 1 : (task.num_keys + kValueKeys - 1) / kValueKeys;
  const int64_t channel_tiles =
      (task.head_dim + kValueVectors * kVectorLanes - 1) / (kValueVectors * kVectorLanes);
  return tiles * (task.head_dim / kStepChannels) + passes * (kMsaPanelLanes / 4) * channel_tiles;
}

void attend_panel(const MsaPanelTask& task) {
  task.prefetch->spread(prefetch_steps(task));
  panel_logits(task);
  for (int64_t lane = 0; lane < kMsaPanelLanes; lane += kVectorLanes) softmax_vector(task, lane);
  panel_values(task);
}

void fold(int64_t lanes, int64_t head_dim, bool first, const MsaState& part, const MsaState& run) {
  if (first) {
    std::copy_n(part.max, lanes, run.max);
    std::copy_n(part.sum, lanes, run.sum);
    std::copy_n(part.out, lanes * head_dim, run.out);
    return;
  }
  const F32 d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < lanes; ++i) {
    const float max = std::max(run.max[i], part.max[i]);
    const float base = max == kNegInf ? 0.0f : max;
    const auto keep = exp_f32(d, hn::Set(d, run.max[i] - base));
    const auto add = exp_f32(d, hn::Set(d, part.max[i] - base));
    run.sum[i] = hn::GetLane(
        hn::MulAdd(add, hn::Set(d, part.sum[i]), hn::Mul(keep, hn::Set(d, run.sum[i]))));
    run.max[i] = max;
    float* to = run.out + i * head_dim;
    const float* from = part.out + i * head_dim;
    for (int64_t c = 0; c < head_dim; c += step) {
      const auto sum = hn::MulAdd(add, hn::LoadU(d, from + c), hn::Mul(keep, hn::LoadU(d, to + c)));
      hn::StoreU(sum, d, to + c);
    }
  }
}

void write_row(const float* values, float factor, int64_t head_dim, bf16_t* out) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t c = 0; c < head_dim; c += lanes) {
    const auto value = hn::Mul(hn::LoadU(d, values + c), hn::Set(d, factor));
    store_bf16(d, round_to_bf16(d, value), out + c);
  }
}

MsaAttendKernel attend_kernel() { return {decode_rows, attend_panel, fold, write_row}; }

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(attend_kernel);

MsaAttendKernel msa_attend_kernel() {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  return HWY_DYNAMIC_DISPATCH(attend_kernel)();
}

Refusal msa_attend_cpu_supports(const MsaAttendProblem& problem) {
  const int64_t group = problem.num_heads / problem.num_kv_heads;
  if (group <= kMsaPanelLanes) return {};
  return "needs at most " + std::to_string(kMsaPanelLanes) + " query heads per KV head, got " +
         std::to_string(group);
}

size_t msa_attend_cpu_workspace(const MsaAttendProblem& problem, const Device& device) {
  return msa_attend_workspace(problem, device);
}

void msa_attend_cpu(const MsaAttendProblem& problem, const Device& device,
                    const MsaAttendTensors& tensors, Workspace workspace) {
  run_msa_attend(msa_attend_kernel(), problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
