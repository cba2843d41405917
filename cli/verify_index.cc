// fovea verify: problems of the room index.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cli/verify_cases.h"
#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

VerifyCase make_topk_case(const std::string& name, int64_t rows, int64_t width, int64_t topk,
                          const std::string& transform, uint64_t seed) {
  CaseBuilder builder(name, seed);
  builder.normals("logits", DType::kF32, {rows, width})
      .integers("row_len", {rows}, 0, width)
      .param("topk", topk)
      .param("transform", transform);
  if (rows > 1) builder.at<int32_t>("row_len", 0) = static_cast<int32_t>(width);
  const int64_t requests = 3;
  if (transform == "paged") {
    builder.integers("page_table", {requests, width / 16 + 1}, -1, 1000)
        .integers("row_to_request", {rows}, -1, requests)
        .param("page_size", 16);
  } else if (transform == "ragged") {
    builder.integers("row_offset", {rows}, 0, 1000000);
  }
  return builder.take();
}

// Ties at the boundary: few winners above a plateau of zeros of both signs.
VerifyCase make_plateau_case(uint64_t seed) {
  VerifyCase plateau = make_topk_case("plateau", 3, 8320, 2048, "local", seed);
  auto* logits = static_cast<float*>(plateau.inputs.find("logits").data);
  for (int64_t i = 0; i < 3 * 8320; ++i) {
    const int64_t column = i % 8320;
    logits[i] = column % 83 == 0 ? static_cast<float>(1 + column) : (i % 2 == 0 ? 0.0f : -0.0f);
  }
  return plateau;
}

// Every special value, and a window inside the row.
VerifyCase make_special_case(uint64_t seed) {
  CaseBuilder builder("special_values", seed);
  builder.normals("logits", DType::kF32, {6, 999}, 1e5)
      .integers("row_len", {6}, -2, 1200)
      .integers("row_start", {6}, -5, 100)
      .param("topk", 77);
  const float special[] = {kInf, -kInf, std::nanf(""), -std::nanf(""), 0.0f, -0.0f, 3.4e38f};
  for (int64_t i = 0; i < 6 * 999; ++i) {
    if (builder.random().chance(0.4)) {
      builder.at<float>("logits", i) = special[builder.random().integer(0, 6)];
    }
  }
  make_hostile(builder, "row_len", 0.3);
  make_hostile(builder, "row_start", 0.3);
  return builder.take();
}

std::vector<VerifyCase> make_topk_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* transform : {"local", "paged", "ragged"}) {
    cases.push_back(make_topk_case(transform, 9, 1500, 64, transform, seed));
  }
  cases.push_back(make_topk_case("short_rows", 12, 65, 63, "local", seed));
  cases.push_back(make_topk_case("long_row", 2, 40000, 2048, "local", seed));
  cases.push_back(make_topk_case("no_rows", 0, 10, 4, "local", seed));
  cases.push_back(make_plateau_case(seed));
  cases.push_back(make_special_case(seed));
  return cases;
}

VerifyCase make_quantize_case(const std::string& name, int64_t heads, int64_t dim, int64_t rope,
                              const char* rope_style, const char* scale_mode, bool hadamard,
                              uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t rows = 7, max_pos = 50;
  builder.normals("q", DType::kBf16, {rows, heads, dim}, 3)
      .normals("k", DType::kBf16, {rows, dim}, 2)
      .normals("norm_weight", DType::kF32, {dim})
      .normals("norm_bias", DType::kF32, {dim}, 0.2)
      .normals("head_gate", DType::kF32, {rows, heads})
      .integers("positions", {rows}, 0, max_pos - 1)
      .normals("cos_sin", DType::kF32, {max_pos, rope}, 0)
      .param("rope_style", rope_style)
      .param("scale_mode", scale_mode)
      .param("hadamard", hadamard);
  for (int64_t pos = 0; pos < max_pos; ++pos) {
    for (int64_t i = 0; i < rope / 2; ++i) {
      const double angle =
          static_cast<double>(pos) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rope));
      builder.at<float>("cos_sin", pos * rope + i) = static_cast<float>(std::cos(angle));
      builder.at<float>("cos_sin", pos * rope + rope / 2 + i) = static_cast<float>(std::sin(angle));
    }
  }
  make_hostile(builder, "positions", 0.2);
  for (int64_t d = 0; d < dim; ++d) builder.at<bf16_t>("q", d) = bf16_t{0};  // a zero row
  return builder.take();
}

std::vector<VerifyCase> make_quantize_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(
      make_quantize_case("half_split_fp32", 64, 128, 64, "half_split", "fp32", false, seed));
  cases.push_back(
      make_quantize_case("half_split_pow2", 16, 128, 64, "half_split", "pow2", true, seed));
  cases.push_back(
      make_quantize_case("interleaved_pow2", 5, 128, 64, "interleaved", "pow2", false, seed));
  cases.push_back(
      make_quantize_case("interleaved_fp32", 3, 64, 32, "interleaved", "fp32", true, seed));
  cases.push_back(make_quantize_case("odd_width", 2, 75, 6, "half_split", "fp32", false, seed));
  return cases;
}

// Codes become code * scale: two implementations may round a bf16 value before quantisation
// differently, which moves its code by one step.
void decode(TensorMap& outputs, const std::string& codes, const std::string& scales) {
  const ConstTensorView code = outputs.find(codes), scale = outputs.find(scales);
  if (!code.defined() || !scale.defined() || code.dtype != DType::kU8) return;
  TensorMap decoded;
  const TensorView values = decoded.add(
      "values", DType::kF32, std::span(code.shape.data(), static_cast<size_t>(code.rank)));
  const int64_t count = code.num_elements();
  const int64_t width = code.shape[static_cast<size_t>(code.rank - 1)];
  for (int64_t i = 0; i < count; ++i) {
    static_cast<float*>(values.data)[i] = e4m3_to_float(static_cast<const uint8_t*>(code.data)[i]) *
                                          static_cast<const float*>(scale.data)[i / width];
  }
  outputs.remove(codes);
  outputs.add_copy(codes, values);
}

void normalise_quantize(const TensorMap&, const Json&, TensorMap& outputs) {
  decode(outputs, "q_fp8", "q_scale");
  decode(outputs, "k_fp8", "k_scale");
}

// e4m3 codes of small integers and scales, weights that are powers of two: every product and sum is
// exact in fp32, so that all implementations must agree bit for bit, ties included.
struct IndexerShape {
  int64_t rows;
  int64_t heads;
  int64_t dim;
};

void add_exact_codes(CaseBuilder& builder, const std::string& name, CaseBuilder::Shape shape) {
  builder.bytes(name, shape);
  for (int64_t i = 0; i < builder.tensor(name).num_elements(); ++i) {
    builder.at<uint8_t>(name, i) =
        e4m3_from_float(static_cast<float>(builder.random().integer(-2, 2)));
  }
}

float exact_scale(CaseRandom& random) {
  return std::exp2(static_cast<float>(random.integer(-2, 2)));
}

void add_exact_scales(CaseBuilder& builder, const std::string& name, CaseBuilder::Shape shape,
                      bool both_signs) {
  builder.normals(name, DType::kF32, shape);
  for (int64_t i = 0; i < builder.tensor(name).num_elements(); ++i) {
    const float sign = both_signs && builder.random().chance(0.3) ? -1.0f : 1.0f;
    builder.at<float>(name, i) = sign * exact_scale(builder.random());
  }
}

void add_queries(CaseBuilder& builder, const IndexerShape& shape, bool is_exact) {
  if (is_exact) {
    add_exact_codes(builder, "q_fp8", {shape.rows, shape.heads, shape.dim});
    add_exact_scales(builder, "head_weight", {shape.rows, shape.heads}, true);
  } else {
    builder.codes("q_fp8", {shape.rows, shape.heads, shape.dim})
        .normals("head_weight", DType::kF32, {shape.rows, shape.heads}, 1e-5);
  }
}

VerifyCase make_ragged_case(const std::string& name, const IndexerShape& shape, bool is_exact,
                            uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t keys = 600;
  add_queries(builder, shape, is_exact);
  if (is_exact) {
    add_exact_codes(builder, "k_fp8", {keys, shape.dim});
    add_exact_scales(builder, "k_scale", {keys}, false);
  } else {
    builder.codes("k_fp8", {keys, shape.dim}).normals("k_scale", DType::kF32, {keys}, 0.01);
  }
  builder.integers("k_start", {shape.rows}, 0, 300)
      .integers("k_end", {shape.rows}, 200, keys)
      .param("layout", "ragged");
  make_hostile(builder, "k_start", 0.2);
  make_hostile(builder, "k_end", 0.2);
  return builder.take();
}

// Pages of the index cache: values first, then scales. Some table entries are outside the pool.
VerifyCase make_paged_case(const std::string& name, const IndexerShape& shape, int64_t page_size,
                           bool is_exact, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t pages = 40, requests = 3, max_pages = 12;
  const int64_t page_bytes = page_size * (shape.dim + 4) + 32;
  add_queries(builder, shape, is_exact);
  if (is_exact) {
    add_exact_codes(builder, "index_pool", {pages, page_bytes});
  } else {
    builder.codes("index_pool", {pages, page_bytes});
  }
  auto* pool = static_cast<uint8_t*>(builder.tensor("index_pool").data);
  for (int64_t page = 0; page < pages; ++page) {
    for (int64_t i = 0; i < page_size; ++i) {
      const float scale = is_exact ? exact_scale(builder.random())
                                   : static_cast<float>(0.01 * builder.random().normal());
      std::memcpy(pool + page * page_bytes + page_size * shape.dim + 4 * i, &scale, 4);
    }
  }
  builder.integers("page_table", {requests, max_pages}, 0, pages - 1)
      .integers("row_to_request", {shape.rows}, 0, requests - 1)
      .integers("row_len", {shape.rows}, 0, max_pages * page_size)
      .param("layout", "paged")
      .param("page_size", page_size);
  make_hostile(builder, "page_table", 0.1);
  make_hostile(builder, "row_to_request", 0.15);
  if (shape.rows > 1) builder.at<int32_t>("row_len", 1) = -5;
  return builder.take();
}

std::vector<VerifyCase> make_logits_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const bool is_exact : {true, false}) {
    const std::string suffix = is_exact ? "_exact" : "_random";
    cases.push_back(make_ragged_case("ragged" + suffix, {9, 64, 128}, is_exact, seed));
    cases.push_back(make_ragged_case("ragged_odd" + suffix, {4, 5, 75}, is_exact, seed));
    for (const int64_t page_size : {1, 16, 64}) {
      cases.push_back(make_paged_case("paged" + std::to_string(page_size) + suffix, {11, 32, 128},
                                      page_size, is_exact, seed));
    }
  }
  cases.push_back(make_paged_case("no_rows", {0, 4, 128}, 16, true, seed));
  return cases;
}

VerifyCase with_selection(VerifyCase original, int64_t topk, const std::string& transform,
                          uint64_t seed) {
  original.name += "_" + transform + std::to_string(topk);
  original.params.set("topk", topk).set("transform", transform);
  if (transform == "ragged") {
    CaseBuilder builder(original.name, seed);
    builder.integers("row_offset", {original.inputs.find("q_fp8").shape[0]}, 0, 100000);
    VerifyCase offsets = builder.take();
    original.inputs.add_copy("row_offset", offsets.inputs.find("row_offset"));
  }
  return original;
}

// Exact problems only: where sums round, two implementations may order near ties differently.
std::vector<VerifyCase> make_select_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  const IndexerShape shape{9, 16, 128};
  for (const int64_t topk : {1, 64, 500}) {
    for (const char* transform : {"local", "ragged"}) {
      cases.push_back(
          with_selection(make_ragged_case("ragged", shape, true, seed), topk, transform, seed));
    }
    for (const char* transform : {"local", "paged", "ragged"}) {
      cases.push_back(
          with_selection(make_paged_case("paged", shape, 16, true, seed), topk, transform, seed));
    }
  }
  cases.push_back(
      with_selection(make_paged_case("one_token_pages", shape, 1, true, seed), 5, "paged", seed));
  cases.push_back(
      with_selection(make_paged_case("no_rows", {0, 4, 128}, 16, true, seed), 5, "local", seed));
  return cases;
}

// Columns outside a row, and rows whose request does not exist, are unspecified.
void normalise_logits(const TensorMap& inputs, const Json& params, TensorMap& outputs) {
  const TensorView logits = outputs.find("logits");
  if (!logits.defined()) return;
  const auto value = [&](const char* name, int64_t t) -> int64_t {
    return static_cast<const int32_t*>(inputs.find(name).data)[t];
  };
  const bool is_ragged = params.find("layout")->as_string() == "ragged";
  for (int64_t t = 0; t < logits.shape[0]; ++t) {
    int64_t length = 0;
    if (is_ragged) {
      const int64_t keys = inputs.find("k_fp8").shape[0];
      length = std::clamp<int64_t>(value("k_end", t), 0, keys) -
               std::clamp<int64_t>(value("k_start", t), 0, keys);
    } else {
      const int64_t request = value("row_to_request", t);
      const bool exists = request >= 0 && request < inputs.find("page_table").shape[0];
      length = exists ? value("row_len", t) : 0;
    }
    float* row = static_cast<float*>(logits.data) + t * logits.shape[1];
    std::fill(row + std::clamp<int64_t>(length, 0, logits.shape[1]), row + logits.shape[1], 0.0f);
  }
}

// One code step is 1/8 of the smallest value of a binade; where the largest element of a row moved
// by a bf16 step, so did the scale.
constexpr Tolerance kCodeTolerance{1e-6, 0.13, 5e-3};
constexpr Tolerance kScaleTolerance{0, 1.01 / 128, 5e-3};

// Addends of sums of the e4m3 tensor cores lose what lies below 2^-13 of the largest of 33.
constexpr Tolerance kE4m3SumTolerance{5e-4, 1e-2, 3e-3, 5e-6};

// Pages longer than their rows, slots outside the pool, of both types.
VerifyCase make_store_case(const std::string& name, int64_t page_size, int64_t head_dim,
                           uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t rows = 50, pages = 200 / page_size;
  builder.bytes("k_fp8", {rows, head_dim})
      .normals("k_scale", DType::kF32, {rows})
      .bytes("index_pool", {pages, page_size * (head_dim + 4) + 3})
      .integers("slots", {rows}, 0, 0)
      .param("page_size", page_size);
  // Distinct slots: 3 is prime to the 200 there are.
  for (int64_t i = 0; i < rows; ++i) {
    builder.at<int32_t>("slots", i) = static_cast<int32_t>(i * 3 % (pages * page_size));
  }
  for (const int64_t i : {0, 7, 30})
    builder.at<int32_t>("slots", i) = hostile_index(builder.random());
  return builder.take();
}

std::vector<VerifyCase> make_store_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_store_case("pages_of_64", 64, 128, seed));
  cases.push_back(make_store_case("records", 1, 128, seed));
  cases.push_back(make_store_case("odd", 7, 61, seed));
  return cases;
}

// Shared pages, pages outside the pool, a request past its table, offsets that fall.
VerifyCase make_gather_case(const std::string& name, int64_t page_size, int64_t head_dim,
                            const std::vector<int32_t>& kv_indptr, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const auto requests = static_cast<int64_t>(kv_indptr.size()) - 1;
  builder.bytes("index_pool", {9, page_size * (head_dim + 4) + 5})
      .integers("page_table", {requests, 3}, 0, 8)
      .list("kv_indptr", kv_indptr)
      .param("page_size", page_size)
      .param("head_dim", head_dim);
  make_hostile(builder, "page_table", 0.2);
  // The scales are numbers: NaN would not be compared.
  auto* pool = static_cast<uint8_t*>(builder.tensor("index_pool").data);
  const int64_t page_bytes = page_size * (head_dim + 4) + 5;
  for (int64_t page = 0; page < 9; ++page) {
    for (int64_t token = 0; token < page_size; ++token) {
      const auto scale = static_cast<float>(builder.random().normal());
      std::memcpy(pool + page * page_bytes + page_size * head_dim + 4 * token, &scale, 4);
    }
  }
  return builder.take();
}

std::vector<VerifyCase> make_gather_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_gather_case("pages_of_64", 64, 128, {0, 100, 100, 292, 293}, seed));
  cases.push_back(make_gather_case("past_the_table", 1, 128, {0, 2, 10}, seed));
  cases.push_back(make_gather_case("odd", 7, 61, {2, 20, 5, 40}, seed));
  cases.push_back(make_gather_case("hostile_offsets", 4, 16, {-9, 2000000000, 30}, seed));
  return cases;
}

}  // namespace

void add_verify_index(std::vector<VerifyOperator>& list) {
  list.push_back({"index_quantize",
                  make_quantize_cases,
                  {{"q_fp8", kCodeTolerance},
                   {"k_fp8", kCodeTolerance},
                   {"q_scale", kScaleTolerance},
                   {"k_scale", kScaleTolerance},
                   {"head_weight", kScaleTolerance}},
                  normalise_quantize});
  list.push_back({"index_store", make_store_cases, {}, nullptr});
  list.push_back({"index_gather", make_gather_cases, {}, nullptr});
  list.push_back({"index_logits",
                  make_logits_cases,
                  {{"logits", kE4m3SumTolerance, "cuda_sm90"}, {"logits", kFp32Tolerance}},
                  normalise_logits});
  list.push_back({"index_select", make_select_cases, {}, nullptr});
  list.push_back({"topk_select", make_topk_cases, {}, nullptr});
}

}  // namespace fovea::cli
