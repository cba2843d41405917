#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kda/kda_decode_cpu.cc"
#include "src/core/simd.h"
// This needs the helpers of simd.h.
#include "src/kda/kda_row_simd.h"

#include <algorithm>
#include <type_traits>

#include "src/core/parallel.h"
#include "src/kda/kda_decode_impl.h"
#include "src/kda/kda_inputs.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_prefill_work.h"

// The state is read once and written once. Both products of a row of the
// decayed state are taken while it is read, because the output needs no second
// look at the updated state:
//
//   o = scale (q^T (D S) + (q . k) u),   u = beta (v - k^T (D S)),   S <- D S +
//   k u^T
//
// with q and k multiplied by the decays D = exp(g) beforehand. Rows of four
// value channels are taken together; the second look at them, for the update,
// finds them in the L1 cache. Order of the sums: lane by lane over the
// channels, then across lanes; a row does not depend on its neighbours.
HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

constexpr int kRows = 4;

// Memory of one worker.
struct Scratch {
  float* key;          // [K]
  float* query;        // [K] times scale
  float* decay;        // [K] exp(g)
  float* decayed_key;  // [K]
  float* decayed_query;
  float* bias;
  float* rows;    // [kRows][K]: state rows that cannot be worked on in place
  float* values;  // [V] in, then outputs
  int64_t padded_k;
  int64_t padded_v;

  Scratch(WorkspaceCutter& cutter, const KdaLayer& layer)
      : padded_k(kda_padded(layer.head_dim_k)), padded_v(kda_padded(layer.head_dim_v)) {
    for (float** row : {&key, &query, &decay, &decayed_key, &decayed_query, &bias})
      *row = cutter.take<float>(padded_k);
    rows = cutter.take<float>(kRows * padded_k);
    values = cutter.take<float>(padded_v);
  }
};

struct Call {
  const KdaLayer& layer;
  const KdaInputs inputs;
  const StateAccess states;
  const StateRoutes routes;
  const Accessor<bf16_t, 3> out;
};

// What all state rows of one token and value head share.
struct Token {
  float beta;
  float query_key;  // q . k
};

HWY_INLINE hn::Vec<F32> load_channels(F32 d, const float* from) { return hn::LoadU(d, from); }
HWY_INLINE hn::Vec<F32> load_channels(F32 d, const bf16_t* from) { return load_bf16(d, from); }
// Two vectors that follow one another.
HWY_INLINE void store_channels(F32 d, hn::Vec<F32> x0, hn::Vec<F32> x1, float* to) {
  hn::StoreU(x0, d, to);
  hn::StoreU(x1, d, to + hn::Lanes(d));
}
HWY_INLINE void store_channels(F32 d, hn::Vec<F32> x0, hn::Vec<F32> x1, bf16_t* to) {
#if HWY_TARGET == HWY_AVX2
  // The upper halves as signed integers, which a saturating pack keeps: half
  // the shuffles of two truncations. It packs by blocks of 128 bits, so these
  // are put in order before.
  const hn::RebindToSigned<F32> d32;
  const hn::Repartition<int16_t, F32> d16;
  const auto lower = hn::ShiftRight<16>(hn::BitCast(d32, round_to_bf16(d, x0)));
  const auto upper = hn::ShiftRight<16>(hn::BitCast(d32, round_to_bf16(d, x1)));
  hn::StoreU(hn::ReorderDemote2To(d16, hn::ConcatLowerLower(d32, upper, lower),
                                  hn::ConcatUpperUpper(d32, upper, lower)),
             d16, reinterpret_cast<int16_t*>(to));
#else
  store_bf16(d, round_to_bf16(d, x0), to);
  store_bf16(d, round_to_bf16(d, x1), to + hn::Lanes(d));
#endif
}

// Advances kRows state rows of `channels` channels, whole pairs of vectors;
// values[r] becomes the output. Asks for the kRows rows that stand `ahead`
// bytes behind the first, in order of address: four rows read side by side are
// no stream that the hardware's prefetchers follow.
template <class State>
HWY_INLINE void advance_rows(const Scratch& s, const Token& token, State* const* rows,
                             int64_t channels, int64_t ahead, float* values) {
  const F32 d;
  using V = hn::Vec<F32>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum[2 * kRows];
  for (int n = 0; n < 2 * kRows; ++n) sum[n] = hn::Zero(d);
  for (int64_t c = 0; c < channels; c += lanes) {
    const V k = hn::Load(d, s.decayed_key + c), q = hn::Load(d, s.decayed_query + c);
    if (ahead != 0) {
      const char* next = reinterpret_cast<const char*>(rows[0] + c * kRows) + ahead;
      for (int64_t line = 0; line < lanes * kRows * static_cast<int64_t>(sizeof(State)); line += 64)
        __builtin_prefetch(next + line);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V x = load_channels(d, rows[r] + c);
      sum[r] = hn::MulAdd(x, k, sum[r]);
      sum[kRows + r] = hn::MulAdd(x, q, sum[kRows + r]);
    }
  }
  HWY_ALIGN float sums[2 * kRows];
  sums_of_8(sum, sums);
  V u[kRows];
  for (int r = 0; r < kRows; ++r) {
    const float correction = token.beta * (values[r] - sums[r]);
    values[r] = sums[kRows + r] + token.query_key * correction;
    u[r] = hn::Set(d, correction);
  }
  for (int64_t c = 0; c < channels; c += 2 * lanes) {
    const V k0 = hn::Load(d, s.key + c), k1 = hn::Load(d, s.key + c + lanes);
    const V keep0 = hn::Load(d, s.decay + c), keep1 = hn::Load(d, s.decay + c + lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V x0 = hn::Mul(load_channels(d, rows[r] + c), keep0);
      const V x1 = hn::Mul(load_channels(d, rows[r] + c + lanes), keep1);
      store_channels(d, hn::MulAdd(k0, u[r], x0), hn::MulAdd(k1, u[r], x1), rows[r] + c);
    }
  }
}

// The same by way of scratch rows: for channels that are not whole vectors,
// fewer than kRows rows, and rows that start at zero.
template <class State>
void advance_copied(const Scratch& s, const Token& token, State* const* rows, int count, bool fresh,
                    int64_t channels, float* values) {
  float* copies[kRows];
  float inputs[kRows] = {};
  for (int r = 0; r < kRows; ++r) {
    copies[r] = s.rows + r * s.padded_k;
    if (fresh || r >= count)
      std::fill_n(copies[r], s.padded_k, 0.0f);
    else
      load_row(rows[r], channels, s.padded_k, copies[r]);
    if (r < count) inputs[r] = values[r];
  }
  advance_rows(s, token, copies, s.padded_k, 0, inputs);
  for (int r = 0; r < count; ++r) {
    store_row(copies[r], channels, rows[r]);
    values[r] = inputs[r];
  }
}

// Everything about the token but its values.
Token prepare(const Call& call, int64_t t, int64_t head, const Scratch& s) {
  const F32 d;
  const KdaLayer& layer = call.layer;
  const int64_t k = layer.head_dim_k, padded = s.padded_k;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t key_head = head / (layer.num_value_heads / layer.num_heads);
  load_row(call.inputs.k.row(t, key_head), k, padded, s.key);
  load_row(call.inputs.q.row(t, key_head), k, padded, s.query);
  scale_row(layer.normalise, 1.0f, padded, s.key);
  scale_row(layer.normalise, static_cast<float>(kda_scale(layer)), padded, s.query);
  if (call.inputs.g.is_bf16)
    load_row(call.inputs.g.bf16(t, head), k, padded, s.decay);
  else
    load_row(call.inputs.g.f32(t, head), k, padded, s.decay);
  const GateHead gate = gate_head(layer.gate, call.inputs.rate_of(head), call.inputs.bias_of(head));
  std::fill_n(s.bias, padded, 0.0f);
  if (gate.dt_bias != nullptr) std::copy_n(gate.dt_bias, k, s.bias);
  auto dot = hn::Zero(d);
  log_decay_row(gate, s.bias, padded, s.decay);
  for (int64_t c = 0; c < padded; c += lanes) {
    const auto decay = exp_f32(d, hn::Load(d, s.decay + c));
    const auto key = hn::Load(d, s.key + c), query = hn::Load(d, s.query + c);
    hn::Store(decay, d, s.decay + c);
    hn::Store(hn::Mul(decay, key), d, s.decayed_key + c);
    hn::Store(hn::Mul(decay, query), d, s.decayed_query + c);
    dot = hn::MulAdd(key, query, dot);
  }
  HWY_ALIGN float beta[kKdaRowGroup] = {call.inputs.beta.value(t, head)};
  activate_beta(layer, lanes, beta);
  return {beta[0], hn::GetLane(hn::SumOfLanes(d, dot))};
}

// State rows [first, first + count) of one token and value head.
template <class State>
void advance(const Call& call, int64_t t, int64_t head, int64_t first, int64_t count,
             const Scratch& s) {
  const KdaLayer& layer = call.layer;
  bf16_t* const out = call.out.row(t, head) + first;
  const int64_t slot = call.routes.finish(t);
  if (slot < 0) {
    std::fill_n(out, count, bf16_t{0});
    return;
  }
  const bool fresh = call.routes.start(t) < 0;
  const Token token = prepare(call, t, head, s);
  load_row(call.inputs.v.row(t, head) + first, count, count, s.values);
  const bool whole = layer.head_dim_k % (2 * static_cast<int64_t>(hn::Lanes(F32()))) == 0;
  State* const state =
      static_cast<State*>(call.states.data) + call.states.offset(slot, head, first, 0);
  // Eight kilobytes at K = 128: longer than a line takes from memory.
  const int64_t ahead = 4 * kRows * call.states.v_stride * int64_t{sizeof(State)};
  for (int64_t v = 0; v < count; v += kRows) {
    State* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = state + (v + r) * call.states.v_stride;
    if (whole && !fresh && v + kRows <= count)
      advance_rows(s, token, rows, layer.head_dim_k, ahead, s.values + v);
    else
      advance_copied(s, token, rows, static_cast<int>(std::min<int64_t>(kRows, count - v)), fresh,
                     layer.head_dim_k, s.values + v);
  }
  store_row(s.values, count, out);
}

void kda_decode(const KdaDecodeProblem& problem, const Device& device,
                const KdaDecodeTensors& tensors, Workspace workspace) {
  const KdaLayer& layer = problem.layer;
  WorkspaceCutter cutter(workspace);
  judge_kda_decode(problem, tensors, cutter.take<int64_t>(kda_decode_check_elements(problem)));
  const Call call{layer, KdaInputs(split_qkv(layer, tensors)),
                  StateAccess(tensors.state, StateLayout::kVk),
                  StateRoutes(tensors.state, tensors.slot, tensors.slot, tensors.has_initial_state),
                  access<bf16_t, 3>(tensors.out)};
  const int64_t heads = layer.num_value_heads;
  const int64_t heads_in_all = call.out.shape[0] * heads;
  const int64_t rows = kda_rows_per_piece(layer.head_dim_v, heads_in_all, device.num_threads);
  const int64_t cuts = (layer.head_dim_v + rows - 1) / rows;
  char* const worker_memory = static_cast<char*>(workspace.data) + cutter.used_bytes();
  WorkspaceCutter measure({});
  Scratch(measure, layer);
  const auto worker_bytes = static_cast<int64_t>(measure.used_bytes());
  // Pieces of several heads, but enough of them to even out.
  const int64_t grain = std::max<int64_t>(1, heads_in_all * cuts / (16 * device.num_threads));
  const ThreadScope threads(device.num_threads);
  ParallelFor(heads_in_all * cuts, grain, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter mine({worker_memory + worker * worker_bytes, 0});
    const Scratch scratch(mine, layer);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % cuts * rows;
      const int64_t count = std::min(rows, layer.head_dim_v - first);
      const int64_t t = i / cuts / heads, head = i / cuts % heads;
      if (call.states.is_bf16)
        advance<bf16_t>(call, t, head, first, count, scratch);
      else
        advance<float>(call, t, head, first, count, scratch);
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(kda_decode);

size_t kda_decode_cpu_workspace(const KdaDecodeProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  cutter.take<int64_t>(kda_decode_check_elements(problem));
  const int64_t padded_k = kda_padded(problem.layer.head_dim_k);
  const int64_t padded_v = kda_padded(problem.layer.head_dim_v);
  for (int worker = 0; worker < device.num_threads; ++worker) {
    // Six rows of channels, four of a state, one of values: Scratch.
    for (int row = 0; row < 6; ++row) cutter.take<float>(padded_k);
    cutter.take<float>(4 * padded_k);
    cutter.take<float>(padded_v);
  }
  return cutter.used_bytes();
}

void kda_decode_cpu(const KdaDecodeProblem& problem, const Device& device,
                    const KdaDecodeTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(kda_decode)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
