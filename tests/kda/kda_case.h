#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fovea/kda.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_gate.h"
#include "fovea/kda_prefill.h"
#include "src/core/access.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

/// Random problems of the KDA operators.
namespace fovea::test {

/// How far results may be from the fp64 reference.
struct KdaLimits {
  double out;         // relative rms of a bf16 output, its rounding included
  double state_fp32;  // of a stored state
  double state_bf16;
};

/// The implementation "cpu" computes in fp32; others may multiply in bf16. A bf16 result carries
/// its rounding (2^-9 at most, about 0.0017 rms) in the reference and in the implementation; where
/// both stand within 1e-5 of one another only few elements round differently.
inline KdaLimits kda_limits(const std::string& implementation) {
  if (implementation == "cpu" || implementation == "ref") return {1e-3, 1e-5, 1e-3};
  return {5e-3, 1e-3, 1e-2};
}

inline double rms(const ConstTensorView& view) {
  double sum = 0;
  const std::vector<double> values = to_doubles(view);
  for (const double value : values) {
    if (std::isfinite(value)) sum += value * value;
  }
  return std::sqrt(sum / std::max<double>(1, static_cast<double>(values.size())));
}

/// The whole tensor within `limit` relative rms, no element further than 40 times that.
inline testing::AssertionResult within(const ConstTensorView& actual,
                                       const ConstTensorView& reference, double limit) {
  const Tolerance tolerance{.absolute = 40 * limit * rms(reference),
                            .relative = reference.dtype == DType::kBf16 ? 2.01 / 128 : limit,
                            .relative_rms = limit};
  const Comparison result = compare(actual, reference, tolerance);
  if (result.close) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << result.detail << " (relative rms " << result.relative_rms << ")";
}

/// A float tensor of either type.
inline Tensor float_tensor(DType dtype, std::initializer_list<int64_t> shape,
                           const std::vector<float>& values) {
  if (dtype == DType::kF32) return Tensor::f32(shape, values);
  std::vector<bf16_t> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), bf16_from_float);
  return Tensor::bf16(shape, rounded);
}

/// Sets elements [begin, end) of a float tensor, in memory order.
inline void fill_elements(Tensor& tensor, int64_t begin, int64_t end, float value) {
  if (tensor.view().dtype == DType::kBf16) {
    std::fill(tensor.data<bf16_t>() + begin, tensor.data<bf16_t>() + end, bf16_from_float(value));
  } else {
    std::fill(tensor.data<float>() + begin, tensor.data<float>() + end, value);
  }
}
inline void fill(Tensor& tensor, float value) {
  fill_elements(tensor, 0, tensor.view().num_elements(), value);
}

/// A copy of a packed tensor whose entries of axis 0 stand `extra` elements further apart, with
/// `extra_entries` behind the last; memory that belongs to no element is NaN.
class Spread {
 public:
  Spread(const Tensor& packed, int64_t extra, int64_t extra_entries = 0) {
    const ConstTensorView source = packed.view();
    const int64_t entries = source.shape[0];
    const int64_t block = entries > 0 ? source.num_elements() / entries : 0;
    const auto size = static_cast<int64_t>(size_of(source.dtype));
    storage_ = Tensor(source.dtype, {entries + extra_entries, block + extra});
    storage_.fill_bytes(0xFF);
    view_ = storage_.view();
    view_.rank = source.rank;
    view_.shape = source.shape;
    view_.stride = source.stride;
    view_.stride[0] = block + extra;
    for (int64_t i = 0; i < entries; ++i) {
      std::copy_n(packed.bytes().begin() + i * block * size, block * size,
                  storage_.data<uint8_t>() + i * (block + extra) * size);
    }
  }

  TensorView view() const { return view_; }
  const Tensor& storage() const { return storage_; }

 private:
  Tensor storage_;
  TensorView view_;
};

inline KdaLayer kda_layer(int64_t heads, int64_t value_heads, int64_t dim_k, int64_t dim_v) {
  KdaLayer layer;
  layer.num_heads = heads;
  layer.num_value_heads = value_heads;
  layer.head_dim_k = dim_k;
  layer.head_dim_v = dim_v;
  return layer;
}

/// The row tensors of a layer: keys of about unit length, gates that close at different speeds, as
/// in trained models.
struct KdaInputs {
  KdaLayer layer;
  int64_t rows = 0;
  Tensor q, k, v, g, beta, a_log, dt_bias;

  KdaInputs() = default;
  KdaInputs(const KdaLayer& problem_layer, int64_t num_rows, uint64_t seed)
      : layer(problem_layer), rows(num_rows) {
    Rng rng(seed);
    const int64_t heads = layer.num_heads, value_heads = layer.num_value_heads;
    const int64_t dim_k = layer.head_dim_k, dim_v = layer.head_dim_v;
    const float key_scale = layer.normalise ? 2.0f : 1.0f / std::sqrt(static_cast<float>(dim_k));
    q = Tensor::bf16({rows, heads, dim_k}, rng.bf16_normals(rows * heads * dim_k, key_scale * 3));
    k = Tensor::bf16({rows, heads, dim_k}, rng.bf16_normals(rows * heads * dim_k, key_scale));
    v = Tensor::bf16({rows, value_heads, dim_v}, rng.bf16_normals(rows * value_heads * dim_v));
    g = float_tensor(layer.gate.dtype, {rows, value_heads, dim_k}, gates(rng));
    std::vector<float> strengths(static_cast<size_t>(rows * value_heads));
    for (float& strength : strengths) {
      strength = layer.beta_kind == BetaKind::kProb ? rng.uniform(0.0f, 1.0f) : 2 * rng.normal();
    }
    beta = float_tensor(layer.beta_dtype, {rows, value_heads}, strengths);
    if (layer.gate.kind == GateKind::kGiven) return;
    std::vector<float> rates(static_cast<size_t>(value_heads));
    for (float& rate : rates) rate = rng.uniform(-3.0f, 1.0f);
    a_log = Tensor::f32({value_heads}, rates);
    dt_bias = Tensor::f32({value_heads, dim_k}, rng.normals(value_heads * dim_k));
  }

  /// Every row tensor of an operator's tensors struct that names them so.
  template <class Tensors>
  void bind(Tensors* tensors) {
    tensors->q = q;
    tensors->k = k;
    tensors->v = v;
    tensors->g = g;
    tensors->beta = beta;
    if (layer.gate.kind == GateKind::kGiven) return;
    tensors->a_log = a_log;
    tensors->dt_bias = dt_bias;
  }

 private:
  std::vector<float> gates(Rng& rng) const {
    std::vector<float> values(static_cast<size_t>(rows * layer.num_value_heads * layer.head_dim_k));
    for (float& value : values) {
      const float x = rng.normal();
      value = layer.gate.kind == GateKind::kGiven ? -0.5f * x * x * x * x : 2 * x - 2;
    }
    return values;
  }
};

inline std::vector<int32_t> offsets_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> offsets{0};
  for (const int32_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

/// Stored states [entries, HV, V, K] or [entries, HV, K, V], random; entries of zero bytes with
/// `scale` 0.
inline Tensor random_states(const KdaLayer& layer, int64_t entries, uint64_t seed,
                            StateLayout layout = StateLayout::kVk, float scale = 0.5f) {
  Rng rng(seed);
  const bool vk = layout == StateLayout::kVk;
  const int64_t heads = layer.num_value_heads;
  const int64_t rows = vk ? layer.head_dim_v : layer.head_dim_k;
  const int64_t columns = vk ? layer.head_dim_k : layer.head_dim_v;
  return float_tensor(layer.state_dtype, {entries, heads, rows, columns},
                      rng.normals(entries * heads * rows * columns, scale));
}

/// The bytes of entry `index` of axis 0.
inline std::vector<uint8_t> entry_bytes(const Tensor& tensor, int64_t index) {
  const int64_t entries = tensor.view().shape[0];
  const auto size = static_cast<int64_t>(tensor.bytes().size()) / entries;
  return {tensor.bytes().begin() + index * size, tensor.bytes().begin() + (index + 1) * size};
}

/// The bytes of entries [begin, end) of axis 0.
inline std::vector<uint8_t> entries_bytes(const Tensor& tensor, int64_t begin, int64_t end) {
  const int64_t entries = tensor.view().shape[0];
  const auto size = static_cast<int64_t>(tensor.bytes().size()) / std::max<int64_t>(entries, 1);
  return {tensor.bytes().begin() + begin * size, tensor.bytes().begin() + end * size};
}

/// A kda_prefill call. Members are free to change between construction and run(); an undefined
/// tensor is left out.
struct PrefillCase {
  KdaPrefillProblem problem;
  KdaInputs inputs;
  Tensor q_indptr, state, in_slot, out_slot, has_initial_state;
  Tensor snapshot_seq, snapshot_pos, snapshot_slot;
  Tensor chunk_states, out, report;

  PrefillCase(const KdaLayer& layer, const std::vector<int32_t>& lengths, uint64_t seed = 1,
              int64_t spare_rows = 0) {
    const std::vector<int32_t> offsets = offsets_of(lengths);
    const auto sequences = static_cast<int64_t>(lengths.size());
    const int64_t rows = offsets.back() + spare_rows;
    inputs = KdaInputs(layer, rows, seed);
    problem.layer = layer;
    problem.max_rows = rows;
    problem.max_sequences = sequences;
    q_indptr = Tensor::i32({sequences + 1}, offsets);
    out = Tensor(DType::kBf16, {rows, layer.num_value_heads, layer.head_dim_v});
    out.fill_bytes(0x55);
  }

  int64_t sequences() const { return q_indptr.view().shape[0] - 1; }
  int64_t rows() const { return inputs.rows; }

  /// Contiguous random states, one per sequence.
  PrefillCase& with_states(uint64_t seed = 7) {
    state = random_states(problem.layer, sequences(), seed, problem.state_layout);
    return *this;
  }
  /// A random pool and slot lists.
  PrefillCase& with_pool(int64_t slots, const std::vector<int32_t>& in,
                         const std::vector<int32_t>& out_slots, uint64_t seed = 7) {
    state = random_states(problem.layer, slots, seed);
    in_slot = Tensor::i32({static_cast<int64_t>(in.size())}, in);
    out_slot = Tensor::i32({static_cast<int64_t>(out_slots.size())}, out_slots);
    return *this;
  }
  PrefillCase& with_snapshots(const std::vector<int32_t>& sequence,
                              const std::vector<int32_t>& position,
                              const std::vector<int32_t>& slot) {
    const auto count = static_cast<int64_t>(sequence.size());
    problem.max_snapshots = count;
    snapshot_seq = Tensor::i32({count}, sequence);
    snapshot_pos = Tensor::i32({count}, position);
    snapshot_slot = Tensor::i32({count}, slot);
    return *this;
  }

  KdaPrefillTensors tensors() {
    KdaPrefillTensors t;
    inputs.bind(&t);
    t.q_indptr = q_indptr;
    t.state = state;
    t.in_slot = in_slot;
    t.out_slot = out_slot;
    t.has_initial_state = has_initial_state;
    t.snapshot_seq = snapshot_seq;
    t.snapshot_pos = snapshot_pos;
    t.snapshot_slot = snapshot_slot;
    t.chunk_states = chunk_states;
    t.out = out;
    t.report = report;
    return t;
  }

  void run(const Options& options, int threads = 1) { run(options, tensors(), threads); }
  void run(const Options& options, const KdaPrefillTensors& t, int threads = 1) {
    test::run(KdaPrefill::plan(problem, device_of(options, threads), options), t);
  }
};

/// A kda_decode call.
struct DecodeCase {
  KdaDecodeProblem problem;
  KdaInputs inputs;
  Tensor qkv, state, slot, has_initial_state, out, report;

  DecodeCase(const KdaLayer& layer, int64_t rows, uint64_t seed = 1) : inputs(layer, rows, seed) {
    problem.layer = layer;
    problem.max_rows = rows;
    state = random_states(layer, rows, seed + 1);
    out = Tensor(DType::kBf16, {rows, layer.num_value_heads, layer.head_dim_v});
    out.fill_bytes(0x55);
  }

  DecodeCase& with_pool(int64_t slots, const std::vector<int32_t>& slot_of_row, uint64_t seed = 7) {
    state = random_states(problem.layer, slots, seed);
    slot = Tensor::i32({static_cast<int64_t>(slot_of_row.size())}, slot_of_row);
    return *this;
  }
  /// q, k and v as one packed row.
  DecodeCase& packed() {
    const KdaLayer& layer = problem.layer;
    const int64_t keys = layer.num_heads * layer.head_dim_k;
    const int64_t columns = 2 * keys + layer.num_value_heads * layer.head_dim_v;
    qkv = Tensor(DType::kBf16, {inputs.rows, columns});
    for (int64_t t = 0; t < inputs.rows; ++t) {
      bf16_t* row = qkv.data<bf16_t>() + t * columns;
      row = std::copy_n(inputs.q.data<bf16_t>() + t * keys, keys, row);
      row = std::copy_n(inputs.k.data<bf16_t>() + t * keys, keys, row);
      std::copy_n(inputs.v.data<bf16_t>() + t * (columns - 2 * keys), columns - 2 * keys, row);
    }
    return *this;
  }

  KdaDecodeTensors tensors() {
    KdaDecodeTensors t;
    inputs.bind(&t);
    if (qkv.view().defined()) {
      t.q = t.k = t.v = {};
      t.qkv = qkv;
    }
    t.state = state;
    t.slot = slot;
    t.has_initial_state = has_initial_state;
    t.out = out;
    t.report = report;
    return t;
  }

  void run(const Options& options, int threads = 1) { run(options, tensors(), threads); }
  void run(const Options& options, const KdaDecodeTensors& t, int threads = 1) {
    test::run(KdaDecode::plan(problem, device_of(options, threads), options), t);
  }
};

/// One token has no products of chunks: every implementation keeps the state in fp32 arithmetic.
inline double state_limit(const KdaLimits& limits, const DecodeCase& call) {
  return call.problem.layer.state_dtype == DType::kF32 ? 1e-5 : limits.state_bf16;
}
inline double state_limit(const KdaLimits& limits, const PrefillCase& call) {
  return call.problem.layer.state_dtype == DType::kF32 ? limits.state_fp32 : limits.state_bf16;
}

/// Runs `options` and the reference on copies of `call`; every output must agree.
template <class Case>
void expect_kda_reference(const Case& call, const Options& options, int threads = 1) {
  Case expected = call;
  expected.run({"ref"});
  Case actual = call;
  actual.run(options, threads);
  const KdaLimits limits = kda_limits(options.implementation);
  EXPECT_TRUE(within(actual.out.view(), expected.out.view(), limits.out)) << "out";
  if (call.state.view().defined()) {
    EXPECT_TRUE(within(actual.state.view(), expected.state.view(), state_limit(limits, call)))
        << "state";
  }
}

}  // namespace fovea::test
