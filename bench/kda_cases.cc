#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
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

// bf16 results that carry one rounding on either side, and fp32 states of which some
// implementations multiply parts in tf32 or bf16: relative rms as specified, 3e-3 and 1e-3.
constexpr Tolerance kKdaOutput{1e-2, 2.0 / 128, 3e-3};
constexpr Tolerance kKdaState{.absolute = 5e-3, .relative = 1e-3, .relative_rms = 1e-3};
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
    beta = layer.beta_dtype == DType::kF32 ? normal_f32(generator, {rows, heads})
                                           : normal_bf16(generator, {rows, heads});
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
  constexpr int64_t kDistinctEntries = 16;  // those behind are copies
  Generator generator(22);
  const int64_t heads = layer.num_value_heads, dim_v = layer.head_dim_v, dim_k = layer.head_dim_k;
  const std::initializer_list<int64_t> shape{std::min(entries, kDistinctEntries), heads, dim_v,
                                             dim_k};
  OwnedTensor states = layer.state_dtype == DType::kF32 ? normal_f32(&generator, shape, 0.1f)
                                                        : normal_bf16(&generator, shape, 0.1f);
  return entries > kDistinctEntries ? repeated(states, {entries, heads, dim_v, dim_k})
                                    : std::move(states);
}

int64_t state_bytes_of(const KdaLayer& layer, int64_t entries) {
  return entries * layer.num_value_heads * layer.head_dim_v * layer.head_dim_k *
         static_cast<int64_t>(size_of(layer.state_dtype));
}

int64_t out_bytes_of(const KdaLayer& layer, int64_t rows) {
  return rows * layer.num_value_heads * layer.head_dim_v *
         static_cast<int64_t>(size_of(DType::kBf16));
}

struct OutState {
  OwnedTensor out, state;
};

template <class Tensors>
std::string out_state_difference(const Tensors& actual, const Tensors& reference) {
  std::string wrong = difference_text("out", actual.out, reference.out, kKdaOutput);
  if (!wrong.empty()) return wrong;
  return difference_text("state", actual.state, reference.state,
                         reference.state.dtype == DType::kF32 ? kKdaState : kKdaBf16State);
}

// `view` narrowed to entry `index` of an axis.
template <class View>
View one_of(View view, size_t axis, int64_t index) {
  const int64_t bytes = index * view.stride[axis] * static_cast<int64_t>(size_of(view.dtype));
  if constexpr (std::is_same_v<View, ConstTensorView>)
    view.data = static_cast<const char*>(view.data) + bytes;
  else
    view.data = static_cast<char*>(view.data) + bytes;
  view.shape[axis] = 1;
  return view;
}

// ---- kda_prefill: packed sequences; sequence n goes from entry 2 n of a pool to entry 2 n + 1.
// What the reference would take seconds for is checked by (sequence, head) pairs, numbered
// sequence * heads + head.

class KdaPrefillCase : public OperatorCase<KdaPrefill, OutState> {
 public:
  KdaPrefillCase(const KdaPrefillProblem& problem, const std::vector<int64_t>& lengths)
      : OperatorCase(problem), rows_(problem.layer, problem.max_rows, 21) {
    const KdaLayer& layer = problem.layer;
    const int64_t sequences = problem.max_sequences;
    std::vector<int32_t> in, out;
    for (int64_t n = 0; n < sequences; ++n) {
      offsets_.push_back(offsets_.back() + static_cast<int32_t>(lengths[static_cast<size_t>(n)]));
      in.push_back(static_cast<int32_t>(2 * n));
      out.push_back(static_cast<int32_t>(2 * n + 1));
    }
    q_indptr_ = from_i32(offsets_, {sequences + 1});
    in_slot_ = from_i32(in, {sequences});
    out_slot_ = from_i32(out, {sequences});
    // The least that chunks of 16 rows take: 6 K V a row for the three products with the state, 4 C
    // (K + V) inside a chunk.
    const int64_t k = layer.head_dim_k, v = layer.head_dim_v;
    work_.flops = as_double(problem.max_rows * layer.num_value_heads) *
                  as_double(6 * k * v + 4 * 16 * (k + v));
    const int64_t state_bytes = state_bytes_of(layer, sequences);
    work_.bytes_read = as_double(rows_.bytes() + state_bytes);
    work_.bytes_written = as_double(out_bytes_of(layer, problem.max_rows) + state_bytes);
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
  std::vector<int64_t> sampled_rows() const override {
    const int64_t heads = problem_.layer.num_value_heads;
    // The reference takes about 50 us a row and head.
    if (problem_.max_rows * heads <= 65536) return {};
    const int64_t mean_length = std::max<int64_t>(1, problem_.max_rows / problem_.max_sequences);
    return spread_rows(problem_.max_sequences * heads,
                       std::clamp<int64_t>(32768 / mean_length, 4, 32));
  }
  KdaPrefillProblem reference_problem() const override {
    KdaPrefillProblem problem = problem_;
    if (!sampled_rows().empty()) {
      problem.layer.num_heads = problem.layer.num_value_heads = 1;
      problem.max_sequences = 1;
    }
    return problem;
  }
  KdaPrefillTensors row_of(const KdaPrefillTensors& full, int64_t pair) override {
    const auto n = static_cast<size_t>(pair / problem_.layer.num_value_heads);
    const int64_t head = pair % problem_.layer.num_value_heads;
    const auto part_of = [&](const auto& view) {
      return one_of(slice_rows(view, offsets_[n], offsets_[n + 1]), 1, head);
    };
    pair_indptr_ = from_i32({0, offsets_[n + 1] - offsets_[n]}, {2});
    KdaPrefillTensors part = full;
    part.q = part_of(full.q);
    part.k = part_of(full.k);
    part.v = part_of(full.v);
    part.g = part_of(full.g);
    part.beta = part_of(full.beta);
    part.out = part_of(full.out);
    part.a_log = one_of(full.a_log, 0, head);
    part.dt_bias = one_of(full.dt_bias, 0, head);
    const auto first = static_cast<int64_t>(2 * n);
    part.state = one_of(slice_rows(full.state, first, first + 2), 1, head);
    part.q_indptr = pair_indptr_;
    part.in_slot = slice_rows(full.in_slot, 0, 1);  // entries 0 and 1 of the part
    part.out_slot = slice_rows(full.out_slot, 0, 1);
    return part;
  }
  std::string difference(const KdaPrefillTensors& actual,
                         const KdaPrefillTensors& reference) override {
    return out_state_difference(actual, reference);
  }

  Rows rows_;
  std::vector<int32_t> offsets_{0};
  OwnedTensor q_indptr_, in_slot_, out_slot_, pair_indptr_;
};

// ---- kda_decode: states are updated in place, run after run. With normalised keys, beta below 1
// and decays below 1 a step shrinks the old state, so that it stays as large as v.

class KdaDecodeCase : public OperatorCase<KdaDecode, OutState> {
 public:
  explicit KdaDecodeCase(const KdaDecodeProblem& problem)
      : OperatorCase(problem), rows_(problem.layer, problem.max_rows, 21) {
    const KdaLayer& layer = problem.layer;
    work_.flops = 8.0 * as_double(problem.max_rows * layer.num_value_heads * layer.head_dim_k *
                                  layer.head_dim_v);
    const int64_t state_bytes = state_bytes_of(layer, problem.max_rows);
    work_.bytes_read = as_double(rows_.bytes() + state_bytes);
    work_.bytes_written = as_double(out_bytes_of(layer, problem.max_rows) + state_bytes);
    work_.traffic = Traffic::kCopy;
    work_.bytes_in_place = as_double(state_bytes);
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
    std::string wrong = difference_text("out", actual.out, reference.out, kKdaOutput);
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
    std::string wrong = difference_text("out", actual.out, reference.out, kBf16Output);
    if (!wrong.empty()) return wrong;
    return difference_text("window_state", actual.window_state, reference.window_state, {});
  }

  OwnedTensor x_, weight_, bias_, q_indptr_;
};

}  // namespace

BenchCase kda_prefill_case(KdaPrefillProblem problem, const std::vector<int64_t>& lengths) {
  problem.max_sequences = static_cast<int64_t>(lengths.size());
  problem.max_rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const bool is_equal = std::all_of(lengths.begin(), lengths.end(),
                                    [&](int64_t length) { return length == lengths.front(); });
  const std::string rows = is_equal ? fmt::format("{}x{}", lengths.size(), lengths.front())
                                    : fmt::format("{}mixed{}", lengths.size(), problem.max_rows);
  BenchCase entry;
  entry.op = "kda_prefill";
  entry.name = fmt::format("h{}_{}", problem.layer.num_heads, rows);
  entry.description =
      fmt::format("{} sequence{} of {} rows{}, {} heads, {} states", lengths.size(),
                  lengths.size() == 1 ? "" : "s", is_equal ? lengths.front() : problem.max_rows,
                  is_equal ? "" : " together", problem.layer.num_heads,
                  problem.layer.state_dtype == DType::kF32 ? "fp32" : "bf16");
  if (problem.chunk != 0) {
    entry.name += fmt::format("_chunk{}", problem.chunk);
    entry.description += fmt::format(", chunk {}", problem.chunk);
  }
  entry.make = [problem, lengths] { return std::make_unique<KdaPrefillCase>(problem, lengths); };
  return entry;
}

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
    problem.chunk = shape.chunk;
    BenchCase entry = kda_prefill_case(
        problem, std::vector<int64_t>(static_cast<size_t>(shape.sequences), shape.rows));
    // The published time is one of fp32 products, whatever else the CPU has.
    if (shape.heads == 32 && shape.rows == 2048 && shape.chunk == 0)
      entry.target = PublishedTarget{30, 30};
    cases.push_back(std::move(entry));
  }
  return cases;
}

BenchCase kda_decode_case(const KdaDecodeProblem& problem) {
  const int64_t batch = problem.max_rows, heads = problem.layer.num_heads;
  const std::string_view dtype = to_string(problem.layer.state_dtype);
  BenchCase entry;
  entry.op = "kda_decode";
  entry.name = fmt::format("h{}_batch{}_{}", heads, batch, dtype);
  entry.description =
      fmt::format("{} row{}, {} heads, {} states", batch, batch == 1 ? "" : "s", heads, dtype);
  entry.make = [problem] { return std::make_unique<KdaDecodeCase>(problem); };
  return entry;
}

std::vector<BenchCase> kda_decode_cases() {
  std::vector<BenchCase> cases;
  for (const DType state_dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t batch : {1, 8, 64}) {
      KdaDecodeProblem problem;
      problem.layer = layer_of(32, state_dtype);
      problem.max_rows = batch;
      BenchCase entry = kda_decode_case(problem);
      if (state_dtype == DType::kF32 && batch == 1) entry.target = PublishedTarget{0.028};
      if (state_dtype == DType::kF32 && batch == 8) entry.target = PublishedTarget{0.250};
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
