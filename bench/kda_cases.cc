#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bench/cases.h"
#include "bench/check.h"
#include "bench/operator_case.h"
#include "fovea/causal_conv1d.h"
#include "fovea/kda_commit.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_prefill.h"
#include "fovea/kda_verify.h"
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

// ---- kda_verify: requests from states of a pool, which stay.

class KdaVerifyCase : public OperatorCase<KdaVerify, OutState> {
 public:
  explicit KdaVerifyCase(const KdaVerifyProblem& problem)
      : OperatorCase(problem),
        rows_(problem.layer, problem.max_requests * problem.rows_per_request, 21),
        pool_(random_states(problem.layer, problem.max_requests)) {
    const KdaLayer& layer = problem.layer;
    const int64_t rows = problem.max_requests * problem.rows_per_request;
    work_.flops =
        8.0 * as_double(rows * layer.num_value_heads * layer.head_dim_k * layer.head_dim_v);
    const OutState outputs = make_outputs();
    work_.bytes_read = as_double(rows_.bytes() + pool_.bytes());
    work_.bytes_written = as_double(outputs.out.bytes() + outputs.state.bytes());
    work_.traffic = Traffic::kCopy;
  }

 private:
  // What is kept for the commit stands in for the state.
  OutState make_outputs() const override {
    const KdaLayer& layer = problem_.layer;
    const int64_t requests = problem_.max_requests, rows = problem_.rows_per_request;
    const int64_t heads = layer.num_value_heads;
    OwnedTensor out(DType::kBf16, {requests * rows, heads, layer.head_dim_v});
    if (problem_.mode == VerifyMode::kRecords) {
      const int64_t width = 2 * layer.head_dim_k + layer.head_dim_v;
      return {std::move(out), OwnedTensor(DType::kF32, {requests, rows, heads, width})};
    }
    return {std::move(out),
            OwnedTensor(DType::kF32, {requests, rows, heads, layer.head_dim_v, layer.head_dim_k})};
  }
  KdaVerifyTensors tensors(OutState* outputs) override {
    KdaVerifyTensors t;
    rows_.bind(&t);
    t.state = pool_;
    t.out = outputs->out;
    t.scratch = outputs->state;
    return t;
  }
  std::string difference(const KdaVerifyTensors& actual,
                         const KdaVerifyTensors& reference) override {
    const std::string wrong = difference_text("out", actual.out, reference.out, kKdaOutput);
    if (!wrong.empty()) return wrong;
    return difference_text("scratch", actual.scratch, reference.scratch, kKdaState);
  }

  Rows rows_;
  OwnedTensor pool_;
};

// ---- kda_commit: every request accepts all of its rows; records start in one slot and end in
// another, so that runs repeat.

struct CommittedState {
  OwnedTensor state;
};

class KdaCommitCase : public OperatorCase<KdaCommit, CommittedState> {
 public:
  explicit KdaCommitCase(const KdaCommitProblem& problem) : OperatorCase(problem) {
    Generator generator(23);
    const int64_t requests = problem.max_requests, rows = problem.rows_per_request;
    const int64_t heads = problem.num_value_heads;
    const int64_t dim_k = problem.head_dim_k, dim_v = problem.head_dim_v;
    const bool copies = problem.mode == VerifyMode::kStates;
    scratch_ = copies ? normal_f32(&generator, {requests, rows, heads, dim_v, dim_k}, 0.1f)
                      : normal_f32(&generator, {requests, rows, heads, 2 * dim_k + dim_v}, 0.1f);
    if (!copies) {
      const int64_t width = 2 * dim_k + dim_v;
      float* at = scratch_.data<float>();
      for (int64_t i = 0; i < scratch_.num_elements(); ++i) {
        if (i % width >= dim_k && i % width < 2 * dim_k) at[i] = -std::abs(at[i]);
      }
    }
    std::vector<int32_t> in, to;
    for (int32_t r = 0; r < requests; ++r) {
      in.push_back(r);
      to.push_back(static_cast<int32_t>(requests) + r);
    }
    in_slot_ = from_i32(in, {requests});
    slot_ = from_i32(to, {requests});
    accepted_ = filled_i32({requests}, static_cast<int32_t>(rows));
    const double state_bytes = as_double(make_outputs().state.bytes()) / 2;
    work_.flops = copies ? 0 : 2.0 * as_double(requests * heads * dim_k * dim_v * (rows + 1));
    work_.bytes_read =
        copies ? as_double(scratch_.bytes() / rows) : as_double(scratch_.bytes()) + state_bytes;
    work_.bytes_written = state_bytes;
    work_.traffic = Traffic::kCopy;
  }

 private:
  CommittedState make_outputs() const override {
    KdaLayer layer = layer_of(problem_.num_value_heads, problem_.state_dtype);
    return {random_states(layer, 2 * problem_.max_requests)};
  }
  KdaCommitTensors tensors(CommittedState* outputs) override {
    KdaCommitTensors t;
    t.scratch = scratch_;
    t.accepted = accepted_;
    t.in_slot = in_slot_;
    t.slot = slot_;
    t.state = outputs->state;
    return t;
  }
  std::string difference(const KdaCommitTensors& actual,
                         const KdaCommitTensors& reference) override {
    return difference_text("state", actual.state, reference.state, kKdaState);
  }

  OwnedTensor scratch_, accepted_, in_slot_, slot_;
};

// ---- causal_conv1d: one sequence, or one row of each of many.

struct ConvOutputs {
  OwnedTensor out, windows;
};

class CausalConv1dCase : public OperatorCase<CausalConv1d, ConvOutputs> {
 public:
  explicit CausalConv1dCase(const CausalConv1dProblem& problem) : OperatorCase(problem) {
    Generator generator(24);
    x_ = normal_bf16(&generator, {problem.max_rows, problem.num_channels});
    weight_ = normal_bf16(&generator, {problem.num_channels, kConvWidth}, 0.5f);
    bias_ = normal_bf16(&generator, {problem.num_channels}, 0.3f);
    q_indptr_ = from_i32({0, static_cast<int32_t>(problem.max_rows)}, {2});
    const ConvOutputs outputs = make_outputs();
    work_.flops = 8.0 * as_double(problem.max_rows * problem.num_channels);
    work_.bytes_read = as_double(x_.bytes() + weight_.bytes() + outputs.windows.bytes());
    work_.bytes_written = as_double(outputs.out.bytes() + outputs.windows.bytes());
    work_.traffic = Traffic::kCopy;
  }

 private:
  bool is_prefill() const { return problem_.mode == ConvMode::kPrefill; }
  ConvOutputs make_outputs() const override {
    Generator generator(25);
    const int64_t entries = is_prefill() ? 1 : problem_.max_rows, channels = problem_.num_channels;
    OwnedTensor windows = problem_.window_layout == WindowLayout::kWd
                              ? normal_bf16(&generator, {entries, kConvHistory, channels})
                              : normal_bf16(&generator, {entries, channels, kConvHistory});
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, channels}), std::move(windows)};
  }
  CausalConv1dTensors tensors(ConvOutputs* outputs) override {
    CausalConv1dTensors t;
    t.x = x_;
    t.weight = weight_;
    t.bias = bias_;
    if (is_prefill()) t.q_indptr = q_indptr_;
    t.window_state = outputs->windows;
    t.out = outputs->out;
    return t;
  }
  std::string difference(const CausalConv1dTensors& actual,
                         const CausalConv1dTensors& reference) override {
    const std::string wrong = difference_text("out", actual.out, reference.out, kBf16Output);
    if (!wrong.empty()) return wrong;
    return difference_text("window_state", actual.window_state, reference.window_state, {});
  }

  OwnedTensor x_, weight_, bias_, q_indptr_;
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

std::vector<BenchCase> kda_verify_cases() {
  std::vector<BenchCase> cases;
  for (const VerifyMode mode : {VerifyMode::kStates, VerifyMode::kRecords}) {
    for (const int64_t requests : {1, 8}) {
      KdaVerifyProblem problem;
      problem.layer = layer_of(32, DType::kF32);
      problem.mode = mode;
      problem.max_requests = requests;
      problem.rows_per_request = 4;
      BenchCase entry;
      entry.op = "kda_verify";
      entry.name = fmt::format("h32_batch{}x4_{}", requests, to_string(mode));
      entry.description = fmt::format("{} request{} of 4 draft rows, 32 heads, fp32 states, {}",
                                      requests, requests == 1 ? "" : "s", to_string(mode));
      entry.make = [problem] { return std::make_unique<KdaVerifyCase>(problem); };
      cases.push_back(std::move(entry));
    }
  }
  return cases;
}

std::vector<BenchCase> kda_commit_cases() {
  std::vector<BenchCase> cases;
  for (const VerifyMode mode : {VerifyMode::kStates, VerifyMode::kRecords}) {
    KdaCommitProblem problem;
    problem.num_value_heads = 32;
    problem.mode = mode;
    problem.max_requests = 8;
    problem.rows_per_request = 4;
    BenchCase entry;
    entry.op = "kda_commit";
    entry.name = fmt::format("h32_batch8x4_{}", to_string(mode));
    entry.description =
        fmt::format("8 requests accept 4 rows each, 32 heads, fp32 states, {}", to_string(mode));
    entry.make = [problem] { return std::make_unique<KdaCommitCase>(problem); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

std::vector<BenchCase> causal_conv1d_cases() {
  struct Shape {
    ConvMode mode;
    int64_t rows;
    WindowLayout layout;
  };
  std::vector<BenchCase> cases;
  for (const Shape& shape : {Shape{ConvMode::kPrefill, 512, WindowLayout::kWd},
                             Shape{ConvMode::kUpdate, 1, WindowLayout::kWd},
                             Shape{ConvMode::kUpdate, 64, WindowLayout::kWd},
                             Shape{ConvMode::kUpdate, 64, WindowLayout::kDw}}) {
    CausalConv1dProblem problem;
    problem.mode = shape.mode;
    problem.num_channels = 3 * 32 * 128;
    problem.max_rows = shape.rows;
    problem.max_sequences = shape.mode == ConvMode::kPrefill ? 1 : 0;
    problem.window_layout = shape.layout;
    BenchCase entry;
    entry.op = "causal_conv1d";
    entry.name =
        fmt::format("{}_rows{}_{}", to_string(shape.mode), shape.rows, to_string(shape.layout));
    entry.description =
        fmt::format("{} of {} row{}, 12288 channels, windows {}", to_string(shape.mode), shape.rows,
                    shape.rows == 1 ? "" : "s", to_string(shape.layout));
    entry.make = [problem] { return std::make_unique<CausalConv1dCase>(problem); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace fovea::bench
