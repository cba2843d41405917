#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "bench/cases.h"
#include "bench/check.h"
#include "bench/operator_case.h"
#include "fovea/index_logits.h"
#include "fovea/index_quantize.h"
#include "fovea/index_select.h"
#include "fovea/numeric.h"
#include "fovea/topk_select.h"

namespace fovea::bench {
namespace {

constexpr int64_t kIndexHeads = 64;
constexpr int64_t kIndexDim = 128;
constexpr int64_t kIndexRowBytes = kIndexDim + 4;
constexpr int64_t kPageSize = 64;
constexpr int64_t kTopk = 2048;
// A pool of more pages repeats them: enough that no two keys of a request are equal.
constexpr int64_t kDistinctPages = 4096;

double as_double(int64_t value) { return static_cast<double>(value); }

// ---- index_logits and index_select: rows of up to `keys` keys each, of one contiguous key array
// for all (ragged) or of pages in random order that belong to the row's request (paged).

struct ScoringInputs {
  IndexLayout layout;
  int64_t rows, keys, requests;
  OwnedTensor q_fp8, head_weight, k_fp8, k_scale, k_start, k_end;
  OwnedTensor pool, page_table, row_to_request, row_len;

  explicit ScoringInputs(const ScoringShape& shape)
      : layout(shape.layout),
        rows(shape.rows),
        keys(shape.keys),
        requests(shape.rows / shape.rows_per_request) {
    Generator generator(21);
    q_fp8 = random_e4m3(&generator, {rows, kIndexHeads, kIndexDim}, 60.0f);
    head_weight = normal_f32(&generator, {rows, kIndexHeads}, 1e-4f);
    if (layout == IndexLayout::kPaged) {
      make_pool(&generator);
      return;
    }
    k_fp8 = random_e4m3(&generator, {keys, kIndexDim}, 60.0f);
    k_scale = filled_f32({keys}, 0.01f);
    k_start = filled_i32({rows}, 0);
    k_end = filled_i32({rows}, static_cast<int32_t>(keys));
    if (!shape.causal) return;
    for (int64_t t = 0; t < rows; ++t) {
      k_end.data<int32_t>()[t] = static_cast<int32_t>(keys - rows + t + 1);
    }
  }

  int64_t row_keys(int64_t row) const {
    return layout == IndexLayout::kRagged ? k_end.data<int32_t>()[row] : keys;
  }
  /// (row, key) pairs that are scored.
  int64_t pairs() const {
    int64_t sum = 0;
    for (int64_t t = 0; t < rows; ++t) sum += row_keys(t);
    return sum;
  }
  double flops() const { return 2.0 * as_double(pairs()) * as_double(kIndexHeads * kIndexDim); }
  double bytes() const {
    const int64_t distinct_keys = layout == IndexLayout::kPaged ? requests * keys : keys;
    return as_double(distinct_keys * kIndexRowBytes + q_fp8.bytes() + head_weight.bytes());
  }

  /// Sets the inputs of a run.
  template <class Tensors>
  void give(Tensors* tensors) const {
    tensors->q_fp8 = q_fp8;
    tensors->head_weight = head_weight;
    if (layout == IndexLayout::kRagged) {
      tensors->k_fp8 = k_fp8;
      tensors->k_scale = k_scale;
      tensors->k_start = k_start;
      tensors->k_end = k_end;
    } else {
      tensors->index_pool = pool;
      tensors->page_table = page_table;
      tensors->row_to_request = row_to_request;
      tensors->row_len = row_len;
    }
  }

  /// Cuts the inputs of a run down to one row.
  template <class Tensors>
  void cut(Tensors* tensors, int64_t row) const {
    const auto cut_one = [row](ConstTensorView* view) { *view = slice_rows(*view, row, row + 1); };
    cut_one(&tensors->q_fp8);
    cut_one(&tensors->head_weight);
    if (layout == IndexLayout::kRagged) {
      cut_one(&tensors->k_start);
      cut_one(&tensors->k_end);
    } else {
      cut_one(&tensors->row_to_request);
      cut_one(&tensors->row_len);
    }
  }

 private:
  // In a page all codes come first, then the scales.
  void make_pool(Generator* generator) {
    const int64_t pages_each = keys / kPageSize, page_bytes = kPageSize * kIndexRowBytes;
    const int64_t pages = requests * pages_each;
    pool = random_e4m3(generator, {std::min(pages, kDistinctPages), page_bytes}, 60.0f);
    for (int64_t page = 0; page < pool.view().shape[0]; ++page) {
      uint8_t* scales = pool.data<uint8_t>() + page * page_bytes + kPageSize * kIndexDim;
      std::fill_n(reinterpret_cast<float*>(scales), kPageSize, 0.01f);
    }
    if (pages > kDistinctPages) pool = repeated(pool, {pages, page_bytes});
    page_table = from_i32(permutation(generator, pages), {requests, pages_each});
    row_to_request = filled_i32({rows}, 0);
    for (int64_t t = 0; t < rows; ++t) {
      row_to_request.data<int32_t>()[t] = static_cast<int32_t>(t * requests / rows);
    }
    row_len = filled_i32({rows}, static_cast<int32_t>(keys));
  }
};

struct Logits {
  OwnedTensor logits;
};

// Sums of e4m3 tensor cores.
bool sums_have_fewer_bits(const std::string& implementation) {
  return implementation == "cuda_sm90";
}

class IndexLogitsCase : public OperatorCase<IndexLogits, Logits> {
 public:
  IndexLogitsCase(const IndexLogitsProblem& problem, const ScoringShape& shape)
      : OperatorCase(problem), inputs_(shape) {
    work_.flops = inputs_.flops();
    work_.bytes_read = inputs_.bytes();
    work_.bytes_written = 4.0 * as_double(inputs_.pairs());
  }

 private:
  Logits make_outputs() const override {
    return {OwnedTensor(DType::kF32, {problem_.max_rows, inputs_.keys})};
  }
  IndexLogitsTensors tensors(Logits* outputs) override {
    IndexLogitsTensors result;
    inputs_.give(&result);
    result.logits = outputs->logits;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  IndexLogitsTensors row_of(const IndexLogitsTensors& full, int64_t row) override {
    IndexLogitsTensors part = full;
    inputs_.cut(&part, row);
    part.logits = slice_rows(full.logits, row, row + 1);
    part.logits.shape[1] = inputs_.row_keys(row);  // columns past the row are unspecified
    return part;
  }
  // Heads of both signs cancel, so that the error is measured against the largest logit of the row.
  std::string difference(const IndexLogitsTensors& actual,
                         const IndexLogitsTensors& reference) override {
    float largest = 0;
    const auto* logits = static_cast<const float*>(reference.logits.data);
    for (int64_t j = 0; j < reference.logits.shape[1]; ++j)
      largest = std::max(largest, std::fabs(logits[j]));
    const bool few_bits = sums_have_fewer_bits(implementation_);
    return difference_text("logits", actual.logits, reference.logits,
                           {largest * (few_bits ? 0x1p-10 : 0x1p-16), 0, few_bits ? 2e-3 : 1e-5});
  }

  ScoringInputs inputs_;
};

struct Indices {
  OwnedTensor indices;
};

class IndexSelectCase : public OperatorCase<IndexSelect, Indices> {
 public:
  IndexSelectCase(const IndexSelectProblem& problem, const ScoringShape& shape)
      : OperatorCase(problem), inputs_(shape) {
    work_.flops = inputs_.flops();
    work_.bytes_read = inputs_.bytes();
    work_.bytes_written = as_double(make_outputs().indices.bytes());
  }

 private:
  Indices make_outputs() const override {
    return {filled_i32({problem_.max_rows, problem_.topk}, -7)};
  }
  IndexSelectTensors tensors(Indices* outputs) override {
    IndexSelectTensors result;
    inputs_.give(&result);
    result.indices = outputs->indices;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  IndexSelectTensors row_of(const IndexSelectTensors& full, int64_t row) override {
    IndexSelectTensors part = full;
    inputs_.cut(&part, row);
    part.indices = slice_rows(full.indices, row, row + 1);
    return part;
  }
  // Logits that differ in their last bits may change places at the boundary of the selection: one
  // entry in 512, or in 128 where those bits are few, may be another one.
  std::string difference(const IndexSelectTensors& actual,
                         const IndexSelectTensors& reference) override {
    const auto sorted = [](const TensorView& view) {
      const auto* begin = static_cast<const int32_t*>(view.data);
      std::vector<int32_t> values(begin, begin + view.num_elements());
      std::sort(values.begin(), values.end());
      return values;
    };
    const std::vector<int32_t> a = sorted(actual.indices), r = sorted(reference.indices);
    std::vector<int32_t> missing;
    std::set_difference(r.begin(), r.end(), a.begin(), a.end(), std::back_inserter(missing));
    if (missing.size() <= r.size() / (sums_have_fewer_bits(implementation_) ? 128 : 512)) return {};
    return fmt::format("indices: {} of {} selected keys are missing", missing.size(), r.size());
  }

  ScoringInputs inputs_;
};

// ---- topk_select

const char* name_of(Values values) {
  switch (values) {
    case Values::kNormal:
      return "normal";
    case Values::kEqual:
      return "equal";
    case Values::kFewValues:
      return "few_values";
    case Values::kAscending:
      return "ascending";
    case Values::kDescending:
      return "descending";
    case Values::kCloseTogether:
      return "close_together";
  }
  return "?";
}

float value_at(Values values, Generator* generator, int64_t column) {
  switch (values) {
    case Values::kNormal:
      return generator->normal();
    case Values::kEqual:
      return 1.5f;
    case Values::kFewValues:
      return static_cast<float>(generator->below(8));
    case Values::kAscending:
      return static_cast<float>(column);
    case Values::kDescending:
      return static_cast<float>(-column);
    case Values::kCloseTogether:  // one exponent and the same leading mantissa bits
      return 1.0f + static_cast<float>(generator->below(1 << 12)) * 0x1p-23f;
  }
  return 0;
}

class TopkSelectCase : public OperatorCase<TopkSelect, Indices> {
 public:
  TopkSelectCase(const TopkSelectProblem& problem, Values values) : OperatorCase(problem) {
    Generator generator(22);
    logits_ = OwnedTensor(DType::kF32, {problem.max_rows, problem.max_width});
    for (int64_t i = 0; i < logits_.num_elements(); ++i)
      logits_.data<float>()[i] = value_at(values, &generator, i % problem.max_width);
    row_len_ = filled_i32({problem.max_rows}, static_cast<int32_t>(problem.max_width));
    work_.bytes_read = as_double(logits_.bytes() + row_len_.bytes());
    work_.bytes_written = as_double(make_outputs().indices.bytes());
  }

 private:
  Indices make_outputs() const override {
    return {filled_i32({problem_.max_rows, problem_.topk}, -7)};
  }
  TopkSelectTensors tensors(Indices* outputs) override {
    TopkSelectTensors result;
    result.logits = logits_;
    result.row_len = row_len_;
    result.indices = outputs->indices;
    return result;
  }
  // A row at a time where all of them would take the reference long.
  std::vector<int64_t> sampled_rows() const override {
    return problem_.max_rows > 32 ? spread_rows(problem_.max_rows) : std::vector<int64_t>();
  }
  TopkSelectTensors row_of(const TopkSelectTensors& full, int64_t row) override {
    return {.logits = slice_rows(full.logits, row, row + 1),
            .row_len = slice_rows(full.row_len, row, row + 1),
            .indices = slice_rows(full.indices, row, row + 1)};
  }
  std::string difference(const TopkSelectTensors& actual,
                         const TopkSelectTensors& reference) override {
    return difference_text("indices", actual.indices, reference.indices, kExact);
  }

  OwnedTensor logits_, row_len_;
};

// ---- index_quantize

struct Quantized {
  OwnedTensor q_fp8, q_scale, k_fp8, k_scale, head_weight;
  int64_t bytes() const {
    return q_fp8.bytes() + q_scale.bytes() + k_fp8.bytes() + k_scale.bytes() + head_weight.bytes();
  }
};

// code * scale of rows of kIndexDim codes.
OwnedTensor decoded(const ConstTensorView& codes, const ConstTensorView& scales) {
  OwnedTensor values(DType::kF32, {codes.num_elements()});
  for (int64_t i = 0; i < codes.num_elements(); ++i) {
    values.data<float>()[i] = e4m3_to_float(static_cast<const uint8_t*>(codes.data)[i]) *
                              static_cast<const float*>(scales.data)[i / kIndexDim];
  }
  return values;
}

class IndexQuantizeCase : public OperatorCase<IndexQuantize, Quantized> {
 public:
  explicit IndexQuantizeCase(const IndexQuantizeProblem& problem) : OperatorCase(problem) {
    Generator generator(23);
    const int64_t rows = problem.max_rows;
    q_ = normal_bf16(&generator, {rows, kIndexHeads, kIndexDim});
    k_ = normal_bf16(&generator, {rows, kIndexDim});
    norm_weight_ = normal_f32(&generator, {kIndexDim});
    norm_bias_ = normal_f32(&generator, {kIndexDim});
    head_gate_ = normal_f32(&generator, {rows, kIndexHeads});
    cos_sin_ = rope_table(kMaxPosition, problem.rope_dim);
    positions_ = from_i32(distinct(&generator, rows, kMaxPosition), {rows});
    // Rope takes 3 operations a channel, the rotation log2(128) additions, scale and division 3.
    work_.flops = 13.0 * as_double(q_.num_elements() + k_.num_elements());
    work_.bytes_read = as_double(q_.bytes() + k_.bytes() + head_gate_.bytes()) +
                       as_double(rows * problem.rope_dim * 4);
    work_.bytes_written = as_double(make_outputs().bytes());
  }

 private:
  static constexpr int64_t kMaxPosition = 4096;

  Quantized make_outputs() const override {
    const int64_t rows = problem_.max_rows;
    return {OwnedTensor(DType::kU8, {rows, kIndexHeads, kIndexDim}),
            OwnedTensor(DType::kF32, {rows, kIndexHeads}),
            OwnedTensor(DType::kU8, {rows, kIndexDim}), OwnedTensor(DType::kF32, {rows}),
            OwnedTensor(DType::kF32, {rows, kIndexHeads})};
  }
  IndexQuantizeTensors tensors(Quantized* outputs) override {
    return {q_,
            k_,
            norm_weight_,
            norm_bias_,
            head_gate_,
            positions_,
            cos_sin_,
            outputs->q_fp8,
            outputs->q_scale,
            outputs->k_fp8,
            outputs->k_scale,
            outputs->head_weight};
  }
  // The last bf16 bit before quantisation may differ, and that may move a code by one step, 1/8.
  std::string difference(const IndexQuantizeTensors& actual,
                         const IndexQuantizeTensors& reference) override {
    constexpr Tolerance kOneCode{0.02, 1.01 / 8, 1e-2};
    constexpr Tolerance kOneBf16{1e-6, 1.01 / 128, 2e-3};
    std::string wrong = difference_text("q", decoded(actual.q_fp8, actual.q_scale),
                                        decoded(reference.q_fp8, reference.q_scale), kOneCode);
    if (wrong.empty()) {
      wrong = difference_text("k", decoded(actual.k_fp8, actual.k_scale),
                              decoded(reference.k_fp8, reference.k_scale), kOneCode);
    }
    if (wrong.empty())
      wrong = difference_text("q_scale", actual.q_scale, reference.q_scale, kOneBf16);
    if (wrong.empty())
      wrong = difference_text("k_scale", actual.k_scale, reference.k_scale, kOneBf16);
    if (wrong.empty())
      wrong = difference_text("head_weight", actual.head_weight, reference.head_weight, kOneBf16);
    return wrong;
  }

  OwnedTensor q_, k_, norm_weight_, norm_bias_, head_gate_, positions_, cos_sin_;
};

BenchCase named_case(const char* op, const ScoringShape& shape) {
  const bool paged = shape.layout == IndexLayout::kPaged;
  BenchCase entry;
  entry.op = op;
  entry.name = fmt::format("{}_{}x{}k", paged ? "paged" : "ragged", shape.rows, shape.keys / 1024);
  entry.description =
      fmt::format("{} row{} x {}K keys, 64 heads x 128, {}{}", shape.rows,
                  shape.rows == 1 ? "" : "s", shape.keys / 1024,
                  !paged                        ? "one contiguous key array"
                  : shape.rows_per_request == 1 ? "pages of 64, a request per row"
                                                : "pages of 64, several rows per request",
                  shape.causal ? ", causal" : "");
  return entry;
}

}  // namespace

BenchCase index_logits_case(const ScoringShape& shape) {
  IndexLogitsProblem problem;
  problem.layout = shape.layout;
  problem.max_rows = shape.rows;
  problem.num_heads = kIndexHeads;
  problem.page_size = shape.layout == IndexLayout::kPaged ? kPageSize : 0;
  BenchCase entry = named_case("index_logits", shape);
  entry.make = [problem, shape] { return std::make_unique<IndexLogitsCase>(problem, shape); };
  return entry;
}

BenchCase index_select_case(const ScoringShape& shape) {
  const bool paged = shape.layout == IndexLayout::kPaged;
  IndexSelectProblem problem;
  problem.layout = shape.layout;
  problem.max_rows = shape.rows;
  problem.max_width = shape.keys;
  problem.num_heads = kIndexHeads;
  problem.topk = kTopk;
  problem.page_size = paged ? kPageSize : 0;
  problem.transform = paged ? IndexTransform::kPaged : IndexTransform::kLocal;
  BenchCase entry = named_case("index_select", shape);
  entry.description += ", 2048 selected";
  entry.make = [problem, shape] { return std::make_unique<IndexSelectCase>(problem, shape); };
  return entry;
}

BenchCase topk_select_case(int64_t rows, int64_t width, Values values) {
  TopkSelectProblem problem;
  problem.max_rows = rows;
  problem.max_width = width;
  problem.topk = kTopk;
  BenchCase entry;
  entry.op = "topk_select";
  entry.name = fmt::format("{}x{}k_{}", rows, width / 1024, name_of(values));
  entry.description = fmt::format("2048 of {}K logits, {} row{}, values: {}", width / 1024, rows,
                                  rows == 1 ? "" : "s", name_of(values));
  entry.make = [problem, values] { return std::make_unique<TopkSelectCase>(problem, values); };
  return entry;
}

std::vector<BenchCase> index_logits_cases() {
  std::vector<BenchCase> cases;
  for (const ScoringShape& shape :
       {ScoringShape{IndexLayout::kPaged, 1, 65536}, ScoringShape{IndexLayout::kRagged, 32, 8192},
        ScoringShape{IndexLayout::kPaged, 32, 8192}}) {
    cases.push_back(index_logits_case(shape));
    cases.back().target = PublishedTarget{shape.rows == 1 ? 1.5 : 5.7};
  }
  return cases;
}

std::vector<BenchCase> index_select_cases() {
  std::vector<BenchCase> cases;
  cases.push_back(index_select_case({IndexLayout::kPaged, 1, 65536}));
  cases.back().target = PublishedTarget{1.6};
  cases.push_back(index_select_case({IndexLayout::kRagged, 32, 8192}));
  return cases;
}

std::vector<BenchCase> topk_select_cases() {
  std::vector<BenchCase> cases;
  for (const int64_t width : {65536, 131072}) {
    for (const Values values : {Values::kNormal, Values::kEqual, Values::kFewValues,
                                Values::kAscending, Values::kDescending, Values::kCloseTogether}) {
      BenchCase entry = topk_select_case(1, width, values);
      entry.description += ", one thread";
      entry.num_threads = 1;
      const double usual_ms = width == 65536 ? 0.020 : 0.036;
      entry.target = PublishedTarget{values == Values::kNormal ? usual_ms : 1.5 * usual_ms};
      cases.push_back(std::move(entry));
    }
  }
  cases.push_back(topk_select_case(16, 65536, Values::kNormal));
  return cases;
}

std::vector<BenchCase> index_quantize_cases() {
  std::vector<BenchCase> cases;
  for (const int64_t rows : {1, 256}) {
    IndexQuantizeProblem problem;
    problem.max_rows = rows;
    problem.num_heads = kIndexHeads;
    problem.hadamard = true;
    BenchCase entry;
    entry.op = "index_quantize";
    entry.name = fmt::format("rows{}", rows);
    entry.description =
        fmt::format("{} row{}, 64 heads x 128, rope, rotation", rows, rows == 1 ? "" : "s");
    entry.make = [problem] { return std::make_unique<IndexQuantizeCase>(problem); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace fovea::bench
