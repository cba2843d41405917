#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "bench/cases.h"
#include "bench/check.h"
#include "bench/operator_case.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_prefill.h"
#include "fovea/numeric.h"

namespace fovea::bench {
namespace {

// bf16 results that carry one rounding on either side, and fp32 states (docs/kda.md).
constexpr Tolerance kKdaOutput{1e-2, 2.0 / 128, 1e-3};
constexpr Tolerance kKdaState{1e-3, 1e-4, 1e-5};
constexpr Tolerance kKdaBf16State{1e-2, 2.0 / 128, 1e-3};

double as_double(int64_t value) { return static_cast<double>(value); }

KdaLayer layer_of(int64_t heads, DType state_dtype) {
  KdaLayer layer;
  layer.num_heads = layer.num_value_heads = heads;
  layer.beta_kind = BetaKind::kLogit;
  layer.normalise = true;
  layer.state_dtype = state_dtype;
  return layer;
}

// Rows of a layer: keys are normalised by the operator, gates are those of trained models: most
// channels decay slowly, some at once.
struct Rows {
  OwnedTensor q, k, v, g, beta, a_log, dt_bias;

  Rows(const KdaLayer& layer, int64_t rows, uint64_t seed) {
    Generator seeded(seed);
    Generator* generator = &seeded;
    const int64_t heads = layer.num_value_heads;
    q = normal_bf16(generator, {rows, layer.num_heads, layer.head_dim_k});
    k = normal_bf16(generator, {rows, layer.num_heads, layer.head_dim_k});
    v = normal_bf16(generator, {rows, heads, layer.head_dim_v});
    g = normal_bf16(generator, {rows, heads, layer.head_dim_k}, 2.0f);
    beta = normal_f32(generator, {rows, heads});
    a_log = normal_f32(generator, {heads});
    dt_bias = normal_f32(generator, {heads, layer.head_dim_k});
    float* bias = dt_bias.data<float>();
    std::transform(bias, bias + dt_bias.num_elements(), bias, [](float b) { return b - 3.0f; });
  }

  int64_t bytes() const {
    return q.bytes() + k.bytes() + v.bytes() + g.bytes() + beta.bytes() + a_log.bytes() +
           dt_bias.bytes();
  }
  template <class Tensors>
  void bind(Tensors* tensors) const {
    tensors->q = q;
    tensors->k = k;
    tensors->v = v;
    tensors->g = g;
    tensors->beta = beta;
    tensors->a_log = a_log;
    tensors->dt_bias = dt_bias;
  }
};

OwnedTensor random_states(const KdaLayer& layer, int64_t entries) {
  Generator generator(22);
  const std::initializer_list<int64_t> shape{entries, layer.num_value_heads, layer.head_dim_v,
                                             layer.head_dim_k};
  return layer.state_dtype == DType::kF32 ? normal_f32(&generator, shape, 0.1f)
                                          : normal_bf16(&generator, shape, 0.1f);
}

struct OutState {
  OwnedTensor out, state;
};

template <class Tensors>
std::string out_state_difference(const Tensors& actual, const Tensors& reference) {
  const std::string wrong = difference_text("out", actual.out, reference.out, kKdaOutput);
  if (!wrong.empty()) return wrong;
  return difference_text("state", actual.state, reference.state,
                         reference.state.dtype == DType::kF32 ? kKdaState : kKdaBf16State);
}

// ---- kda_prefill: equal sequences, each from one state of a pool to another.

class KdaPrefillCase : public OperatorCase<KdaPrefill, OutState> {
 public:
  explicit KdaPrefillCase(const KdaPrefillProblem& problem)
      : OperatorCase(problem), rows_(problem.layer, problem.max_rows, 21) {
    const KdaLayer& layer = problem.layer;
    const int64_t sequences = problem.max_sequences;
    std::vector<int32_t> offsets, in, out;
    for (int64_t n = 0; n <= sequences; ++n)
      offsets.push_back(static_cast<int32_t>(n * (problem.max_rows / sequences)));
    for (int64_t n = 0; n < sequences; ++n) {
      in.push_back(static_cast<int32_t>(n));
      out.push_back(static_cast<int32_t>(sequences + n));
    }
    q_indptr_ = from_i32(offsets, {sequences + 1});
    in_slot_ = from_i32(in, {sequences});
    out_slot_ = from_i32(out, {sequences});
    // The least that chunks of 16 rows take: 6 K V a row for the three products with the state, 4 C
    // (K + V) inside a chunk.
    const int64_t k = layer.head_dim_k, v = layer.head_dim_v;
    work_.flops = as_double(problem.max_rows * layer.num_value_heads) *
                  as_double(6 * k * v + 4 * 16 * (k + v));
    const int64_t state_bytes = make_outputs().state.bytes() / 2;
    work_.bytes_read = as_double(rows_.bytes() + state_bytes);
    work_.bytes_written = as_double(make_outputs().out.bytes() + state_bytes);
  }

 private:
  OutState make_outputs() const override {
    const KdaLayer& layer = problem_.layer;
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, layer.num_value_heads, layer.head_dim_v}),
            random_states(layer, 2 * problem_.max_sequences)};
  }
  KdaPrefillTensors tensors(OutState* outputs) override {
    KdaPrefillTensors t;
    rows_.bind(&t);
    t.q_indptr = q_indptr_;
    t.in_slot = in_slot_;
    t.out_slot = out_slot_;
    t.state = outputs->state;
    t.out = outputs->out;
    return t;
  }
  std::string difference(const KdaPrefillTensors& actual,
                         const KdaPrefillTensors& reference) override {
    return out_state_difference(actual, reference);
  }

  Rows rows_;
  OwnedTensor q_indptr_, in_slot_, out_slot_;
};

// ---- kda_decode: states are updated in place, run after run.

class KdaDecodeCase : public OperatorCase<KdaDecode, OutState> {
 public:
  explicit KdaDecodeCase(const KdaDecodeProblem& problem)
      : OperatorCase(problem), rows_(problem.layer, problem.max_rows, 21) {
    const KdaLayer& layer = problem.layer;
    work_.flops = 8.0 * as_double(problem.max_rows * layer.num_value_heads * layer.head_dim_k *
                                  layer.head_dim_v);
    const OutState outputs = make_outputs();
    work_.bytes_read = as_double(rows_.bytes() + outputs.state.bytes());
    work_.bytes_written = as_double(outputs.out.bytes() + outputs.state.bytes());
    work_.traffic = Traffic::kCopy;
  }

 private:
  OutState make_outputs() const override {
    const KdaLayer& layer = problem_.layer;
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, layer.num_value_heads, layer.head_dim_v}),
            random_states(layer, problem_.max_rows)};
  }
  KdaDecodeTensors tensors(OutState* outputs) override {
    KdaDecodeTensors t;
    rows_.bind(&t);
    t.state = outputs->state;
    t.out = outputs->out;
    return t;
  }
  std::string difference(const KdaDecodeTensors& actual,
                         const KdaDecodeTensors& reference) override {
    return out_state_difference(actual, reference);
  }

  Rows rows_;
};

}  // namespace

std::vector<BenchCase> kda_prefill_cases() {
  struct Shape {
    int64_t heads, sequences, rows, chunk;
  };
  std::vector<BenchCase> cases;
  for (const Shape& shape : {Shape{32, 1, 2048, 0},
                             {32, 1, 2048, 32},
                             {32, 1, 2048, 64},
                             {32, 8, 256, 0},
                             {4, 1, 2048, 0}}) {
    KdaPrefillProblem problem;
    problem.layer = layer_of(shape.heads, DType::kF32);
    problem.max_sequences = shape.sequences;
    problem.max_rows = shape.sequences * shape.rows;
    problem.chunk = shape.chunk;
    BenchCase entry;
    entry.op = "kda_prefill";
    entry.name = fmt::format("h{}_{}x{}", shape.heads, shape.sequences, shape.rows);
    entry.description =
        fmt::format("{} sequence{} of {} rows, {} heads, fp32 states", shape.sequences,
                    shape.sequences == 1 ? "" : "s", shape.rows, shape.heads);
    if (shape.chunk != 0) {
      entry.name += fmt::format("_chunk{}", shape.chunk);
      entry.description += fmt::format(", chunk {}", shape.chunk);
    }
    // The published time is one of fp32 products, whatever else the CPU has.
    if (shape.heads == 32 && shape.rows == 2048 && shape.chunk == 0)
      entry.target = PublishedTarget{30, 30};
    entry.make = [problem] { return std::make_unique<KdaPrefillCase>(problem); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

std::vector<BenchCase> kda_decode_cases() {
  std::vector<BenchCase> cases;
  for (const DType state_dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t batch : {1, 8, 64}) {
      KdaDecodeProblem problem;
      problem.layer = layer_of(32, state_dtype);
      problem.max_rows = batch;
      BenchCase entry;
      entry.op = "kda_decode";
      entry.name = fmt::format("h32_batch{}_{}", batch, to_string(state_dtype));
      entry.description = fmt::format("{} row{}, 32 heads, {} states", batch, batch == 1 ? "" : "s",
                                      to_string(state_dtype));
      if (state_dtype == DType::kF32 && batch == 1) entry.target = PublishedTarget{0.028};
      if (state_dtype == DType::kF32 && batch == 8) entry.target = PublishedTarget{0.250};
      entry.make = [problem] { return std::make_unique<KdaDecodeCase>(problem); };
      cases.push_back(std::move(entry));
    }
  }
  return cases;
}

}  // namespace fovea::bench
