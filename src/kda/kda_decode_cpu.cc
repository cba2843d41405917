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

// From the sums of kRows rows with key and query: values[r] becomes the output, u[r] what the row
// takes of the key. Returns 0 when every u is finite.
HWY_INLINE float finish_sums(const Token& token, const hn::Vec<F32> (&sum)[2 * kRows],
                             float* values, hn::Vec<F32> (&u)[kRows]) {
  HWY_ALIGN float sums[2 * kRows];
  sums_of_8(sum, sums);
  float probe = 0;
  for (int r = 0; r < kRows; ++r) {
    const float correction = token.beta * (values[r] - sums[r]);
    values[r] = sums[kRows + r] + token.query_key * correction;
    u[r] = hn::Set(F32(), correction);
    probe += 0 * correction;
  }
  return probe;
}

using RowSums = hn::Vec<F32>[2 * kRows];  // with the key, then with the query

HWY_INLINE void add_column(const float* key, const float* query, int64_t c, float* const* rows,
                           RowSums& sum) {
  const F32 d;
  const auto k = hn::Load(d, key + c), q = hn::Load(d, query + c);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const auto x = hn::LoadU(d, rows[r] + c);
    sum[r] = hn::MulAdd(x, k, sum[r]);
    sum[kRows + r] = hn::MulAdd(x, q, sum[kRows + r]);
  }
}

HWY_INLINE void update_column(const float* key, const float* decay, int64_t c,
                              const hn::Vec<F32> (&u)[kRows], float* const* rows) {
  const F32 d;
  const auto k = hn::Load(d, key + c), keep = hn::Load(d, decay + c);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const auto x = hn::Mul(hn::LoadU(d, rows[r] + c), keep);
    hn::StoreU(hn::MulAdd(k, u[r], x), d, rows[r] + c);
  }
}

// Advances kRows state rows of `channels` channels, whole vectors; values[r] becomes the output.
HWY_INLINE void advance_rows(const Scratch& s, const Token& token, float* const* rows,
                             int64_t channels, float* values) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  RowSums sum;
  for (int n = 0; n < 2 * kRows; ++n) sum[n] = hn::Zero(d);
  for (int64_t c = 0; c < channels; c += lanes)
    add_column(s.decayed_key, s.decayed_query, c, rows, sum);
  hn::Vec<F32> u[kRows];
  finish_sums(token, sum, values, u);
  for (int64_t c = 0; c < channels; c += lanes) update_column(s.key, s.decay, c, u, rows);
}

// The same for `count` rows `stride` apart, a multiple of kRows: four are updated beside the sums
// of the next four, whose chains of additions alone would leave half of the units idle. Asks for
// the rows that stand `ahead` bytes behind, in order of address: four rows read side by side are no
// stream that the hardware's prefetchers follow.
HWY_INLINE void advance_stored(const Scratch& s, const Token& token, float* state, int64_t stride,
                               int64_t count, int64_t channels, int64_t ahead, float* values) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  float* rows[kRows];
  float* next[kRows];
  // Copies, which no store can change.
  const float *const decayed_key = s.decayed_key, *const decayed_query = s.decayed_query;
  const float *const key = s.key, *const decay = s.decay;
  for (int r = 0; r < kRows; ++r) next[r] = state + r * stride;
  hn::Vec<F32> u[kRows];
  RowSums sum;
  for (int n = 0; n < 2 * kRows; ++n) sum[n] = hn::Zero(d);
  for (int64_t c = 0; c < channels; c += lanes)
    add_column(decayed_key, decayed_query, c, next, sum);
  finish_sums(token, sum, values, u);
  for (int64_t v = kRows; v < count; v += kRows) {
    for (int r = 0; r < kRows; ++r) {
      rows[r] = next[r];
      next[r] += kRows * stride;
    }
    for (int n = 0; n < 2 * kRows; ++n) sum[n] = hn::Zero(d);
    for (int64_t c = 0; c < channels; c += lanes) {
      const char* line = reinterpret_cast<const char*>(next[0] + c * kRows) + ahead;
      for (int64_t byte = 0; byte < lanes * kRows * 4; byte += 64) __builtin_prefetch(line + byte);
      add_column(decayed_key, decayed_query, c, next, sum);
      update_column(key, decay, c, u, rows);
    }
    finish_sums(token, sum, values + v, u);
  }
  for (int64_t c = 0; c < channels; c += lanes) update_column(key, decay, c, u, next);
}

#if HWY_TARGET != HWY_SCALAR

// Of every two vectors of channels the first becomes the lower halves of their blocks of eight, the
// second the upper ones: what interleaving with zeros makes of stored bf16, and packing undoes.
void split_channels(int64_t channels, float* row) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN float pair[2 * hn::MaxLanes(F32())];
  for (int64_t c = 0; c < channels; c += 2 * lanes) {
    std::copy_n(row + c, 2 * lanes, pair);
    for (int64_t i = 0; i < lanes; i += 4) {
      std::copy_n(pair + 2 * i, 4, row + c + i);
      std::copy_n(pair + 2 * i + 4, 4, row + c + lanes + i);
    }
  }
}

// The lanes rounded to bf16, as integers. `kFinite`: there is no NaN, whose payload an addition
// could carry into the sign.
template <bool kFinite>
HWY_INLINE hn::Vec<hn::RebindToSigned<F32>> bf16_bits(F32 d, hn::Vec<F32> x) {
  const hn::RebindToSigned<F32> d32;
  if constexpr (!kFinite) return hn::ShiftRight<16>(hn::BitCast(d32, round_to_bf16(d, x)));
  const hn::RebindToUnsigned<F32> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd);
  return hn::ShiftRight<16>(hn::BitCast(d32, rounded));
}

template <bool kFinite>
HWY_INLINE void update_bf16_rows(const Scratch& s, const hn::Vec<F32> (&u)[kRows],
                                 bf16_t* const* rows, int64_t channels) {
  const F32 d;
  const hn::Repartition<int16_t, F32> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d16);
  for (int64_t c = 0; c < channels; c += 2 * lanes) {
    const auto k0 = hn::Load(d, s.key + c), k1 = hn::Load(d, s.key + c + lanes);
    const auto keep0 = hn::Load(d, s.decay + c), keep1 = hn::Load(d, s.decay + c + lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      auto* const at = reinterpret_cast<int16_t*>(rows[r] + c);
      const auto stored = hn::LoadU(d16, at);
      const auto x0 = hn::Mul(hn::BitCast(d, hn::InterleaveLower(d16, zero, stored)), keep0);
      const auto x1 = hn::Mul(hn::BitCast(d, hn::InterleaveUpper(d16, zero, stored)), keep1);
      // A saturating pack keeps what fits 16 bits.
      hn::StoreU(hn::ReorderDemote2To(d16, bf16_bits<kFinite>(d, hn::MulAdd(k0, u[r], x0)),
                                      bf16_bits<kFinite>(d, hn::MulAdd(k1, u[r], x1))),
                 d16, at);
    }
  }
}

// advance_stored() for bf16: one four after the other, because to unpack, round and pack keeps the
// units busy. Splits the scratch rows.
HWY_INLINE void advance_stored(const Scratch& s, const Token& token, bf16_t* state, int64_t stride,
                               int64_t count, int64_t channels, int64_t ahead, float* values) {
  const F32 d;
  const hn::Repartition<int16_t, F32> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d16);
  for (float* row : {s.key, s.decay, s.decayed_key, s.decayed_query}) split_channels(channels, row);
  for (int64_t v = 0; v < count; v += kRows) {
    bf16_t* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = state + (v + r) * stride;
    RowSums sum;
    for (int n = 0; n < 2 * kRows; ++n) sum[n] = hn::Zero(d);
    for (int64_t c = 0; c < channels; c += 2 * lanes) {
      const char* line = reinterpret_cast<const char*>(rows[0] + c * kRows) + ahead;
      for (int64_t byte = 0; byte < lanes * kRows * 4; byte += 64) __builtin_prefetch(line + byte);
      const auto k0 = hn::Load(d, s.decayed_key + c), k1 = hn::Load(d, s.decayed_key + c + lanes);
      const auto q0 = hn::Load(d, s.decayed_query + c);
      const auto q1 = hn::Load(d, s.decayed_query + c + lanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto stored = hn::LoadU(d16, reinterpret_cast<const int16_t*>(rows[r] + c));
        const auto x0 = hn::BitCast(d, hn::InterleaveLower(d16, zero, stored));
        const auto x1 = hn::BitCast(d, hn::InterleaveUpper(d16, zero, stored));
        sum[r] = hn::MulAdd(x1, k1, hn::MulAdd(x0, k0, sum[r]));
        sum[kRows + r] = hn::MulAdd(x1, q1, hn::MulAdd(x0, q0, sum[kRows + r]));
      }
    }
    hn::Vec<F32> u[kRows];
    // What is not finite in a key, a decay or a row reaches its sums, hence u: when every u is
    // finite nothing becomes NaN.
    if (finish_sums(token, sum, values + v, u) == 0)
      update_bf16_rows<true>(s, u, rows, channels);
    else
      update_bf16_rows<false>(s, u, rows, channels);
  }
}

#else

HWY_INLINE void advance_stored(const Scratch&, const Token&, bf16_t*, int64_t, int64_t, int64_t,
                               int64_t, float*) {}  // never called

#endif

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
  advance_rows(s, token, copies, s.padded_k, inputs);
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
  State* const state =
      static_cast<State*>(call.states.data) + call.states.offset(slot, head, first, 0);
  const int64_t stride = call.states.v_stride;
  // What all pieces of a head share decides, so that bits do not depend on the cut.
  const bool whole = layer.head_dim_k % (2 * static_cast<int64_t>(hn::Lanes(F32()))) == 0;
  if (whole && !fresh && layer.head_dim_v % kRows == 0 && HWY_TARGET != HWY_SCALAR) {
    // Eight kilobytes at K = 128 in fp32: longer than a line takes from memory.
    const int64_t ahead = 4 * kRows * stride * int64_t{sizeof(State)};
    advance_stored(s, token, state, stride, count, layer.head_dim_k, ahead, s.values);
  } else {
    for (int64_t v = 0; v < count; v += kRows) {
      State* rows[kRows];
      for (int r = 0; r < kRows; ++r) rows[r] = state + (v + r) * stride;
      advance_copied(s, token, rows, static_cast<int>(std::min<int64_t>(kRows, count - v)), fresh,
                     layer.head_dim_k, s.values + v);
    }
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
