// fovea verify: problems of the room msa.

#include <cmath>
#include <limits>
#include <utility>

#include "cli/verify_cases.h"
#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A batch of requests with hostile entries: lengths of zero and beyond the table, requests without
// rows, pages outside the cache, rows of nobody.
struct Batch {
  int64_t rows = 24;
  int64_t requests = 6;
  int64_t block_size = 16;
  int64_t max_pages = 9;
  int64_t pages = 40;

  void add(CaseBuilder& builder, bool with_offset) const {
    builder.list("kv_len", {130, 0, 37, 100000, -3, 75})
        .list("q_indptr", {0, 3, 5, 5, 18, 19, 22})
        .param("block_size", block_size);
    if (with_offset) builder.list("q_offset", {100, 0, -1, 20, 0, 1000});
  }
  void add_table(CaseBuilder& builder) const {
    builder.integers("page_table", {requests, max_pages}, 0, pages - 1);
    make_hostile(builder, "page_table", 0.1);
  }
};

VerifyCase make_table_case(const std::string& name, int64_t delta, uint64_t seed) {
  CaseBuilder builder(name, seed);
  builder.integers("req_to_token", {5, 70}, -40, 5000)
      .list("pool_row", {4, 0, -1, 5, 2, 1})
      .list("kv_len", {70, 0, 20, 20, 33, 2147483647})
      .param("page_size", 16)
      .param("delta", delta);
  return builder.take();
}

std::vector<VerifyCase> make_table_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_table_case("plain", 0, seed));
  cases.push_back(make_table_case("slack", 5, seed));
  cases.push_back(make_table_case("narrow", 0, seed));
  cases.back().params.set("max_pages", 2);
  return cases;
}

void add_index_inputs(CaseBuilder& builder, const Batch& batch, int64_t heads) {
  builder.normals("iq", DType::kBf16, {batch.rows, heads, 64})
      .normals("index_k", DType::kBf16, {batch.pages * batch.block_size, 1, 64});
  batch.add_table(builder);
}

std::vector<VerifyCase> make_score_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* score : {"max", "lse"}) {
    for (const int64_t heads : {1, 4}) {
      CaseBuilder builder(std::string(score) + "_heads" + std::to_string(heads), seed);
      const Batch batch;
      batch.add(builder, heads == 4);
      add_index_inputs(builder, batch, heads);
      builder.param("score", score).param("index_scale", 0.125);
      cases.push_back(builder.take());
    }
  }
  return cases;
}

// Scores of a few values, NaN and infinities among them.
void add_scores(CaseBuilder& builder, const Batch& batch, int64_t heads) {
  builder.normals("scores", DType::kF32, {heads, batch.rows, batch.max_pages});
  const float special[] = {kInf, -kInf, std::nanf(""), 0.0f, -0.0f, 1.0f};
  for (int64_t i = 0; i < heads * batch.rows * batch.max_pages; ++i) {
    if (builder.random().chance(0.4))
      builder.at<float>("scores", i) = special[builder.random().integer(0, 5)];
  }
}

std::vector<VerifyCase> make_select_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const auto& [reduce, kv_heads] :
       {std::pair<const char*, int64_t>{"per_group", 4}, {"max_all", 3}, {"union", 2}}) {
    for (const char* layout : {"head_major", "row_major"}) {
      CaseBuilder builder(std::string(reduce) + "_" + layout, seed);
      const Batch batch;
      batch.add(builder, false);
      add_scores(builder, batch, 4);
      builder.param("topk", 4)
          .param("init_blocks", 1)
          .param("num_kv_heads", kv_heads)
          .param("index_reduce", reduce)
          .param("blocks_layout", layout);
      cases.push_back(builder.take());
    }
  }
  return cases;
}

std::vector<VerifyCase> make_score_select_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* reduce : {"per_group", "max_all", "union"}) {
    CaseBuilder builder(reduce, seed);
    const Batch batch;
    batch.add(builder, false);
    add_index_inputs(builder, batch, 4);
    // Small integers: products are exact, selections equal.
    for (const char* name : {"iq", "index_k"}) {
      for (int64_t i = 0; i < builder.tensor(name).num_elements(); ++i)
        builder.at<bf16_t>(name, i) =
            bf16_from_float(static_cast<float>(builder.random().integer(-4, 4)));
    }
    builder.param("topk", 3).param("index_reduce", reduce);
    if (std::string(reduce) != "per_group") builder.param("num_kv_heads", 2);
    cases.push_back(builder.take());
  }
  return cases;
}

void normal_codes(CaseBuilder& builder, const std::string& name,
                  std::initializer_list<int64_t> shape) {
  builder.codes(name, shape);
  for (int64_t i = 0; i < builder.tensor(name).num_elements(); ++i)
    builder.at<uint8_t>(name, i) = e4m3_from_float(static_cast<float>(builder.random().normal()));
}

// Lists with repeats and hostile ids.
void add_lists(CaseBuilder& builder, const Batch& batch, int64_t kv_heads) {
  builder.integers("blocks", {kv_heads, batch.rows, 5}, 0, batch.max_pages - 1);
  make_hostile(builder, "blocks", 0.2);
}

VerifyCase make_attend_case(const std::string& name, const std::string& mode, int64_t group,
                            int64_t kv_heads, bool with_extras, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const Batch batch;
  const int64_t heads = group * kv_heads, slots = batch.pages * batch.block_size;
  if (mode == "bf16" || mode == "kv8")
    builder.normals("q", DType::kBf16, {batch.rows, heads, 64});
  else
    normal_codes(builder, "q", {batch.rows, heads, 64});
  for (const char* pool : {"k_pool", "v_pool"}) {
    if (mode == "bf16")
      builder.normals(pool, DType::kBf16, {slots, kv_heads, 64});
    else if (mode == "q8kv4")
      builder.bytes(pool, {batch.pages, kv_heads, batch.block_size, 32});
    else
      normal_codes(builder, pool, {slots, kv_heads, 64});
  }
  if (mode == "q8kv4") {
    for (const char* scale : {"k_scale", "v_scale"}) {
      builder.codes(scale, {batch.pages, kv_heads, batch.block_size, 4});
      for (int64_t i = 0; i < builder.tensor(scale).num_elements(); ++i)
        builder.at<uint8_t>(scale, i) =
            e4m3_from_float(static_cast<float>(0.2 + 0.8 * builder.random().uniform()));
    }
  } else if (mode == "q8kv8") {
    builder.normals("q_scale", DType::kF32, {batch.rows, kv_heads})
        .normals("k_scale", DType::kF32, {slots, kv_heads}, 0.5)
        .normals("v_scale", DType::kF32, {kv_heads});
  } else if (mode == "kv8") {
    builder.floats("k_scale", {1}, {0.5f}).floats("v_scale", {1}, {1.5f});
  }
  batch.add(builder, with_extras);
  batch.add_table(builder);
  add_lists(builder, batch, kv_heads);
  builder.param("kv_mode", mode);
  if (with_extras) {
    builder.normals("sink", DType::kF32, {heads}, 2).param("causal", false);
    builder.at<float>("sink", 0) = kInf;
  }
  return builder.take();
}

std::vector<VerifyCase> make_attend_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const int64_t group : {1, 2, 4, 8, 16}) {
    cases.push_back(
        make_attend_case("bf16_group" + std::to_string(group), "bf16", group, 3, false, seed));
  }
  cases.push_back(make_attend_case("bf16_group20", "bf16", 20, 1, false, seed));
  for (const char* mode : {"bf16", "kv8", "q8kv8", "q8kv4"}) {
    cases.push_back(make_attend_case(std::string(mode), mode, 4, 2, false, seed));
    cases.push_back(make_attend_case(std::string(mode) + "_sink_dense", mode, 8, 1, true, seed));
  }
  return cases;
}

}  // namespace

void add_verify_msa(std::vector<VerifyOperator>& list) {
  list.push_back({"build_page_table", make_table_cases, {}, nullptr});
  list.push_back({"msa_block_scores", make_score_cases, {{"scores", kFp32Tolerance}}, nullptr});
  list.push_back({"msa_select_blocks", make_select_cases, {}, nullptr});
  list.push_back({"msa_score_select", make_score_select_cases, {}, nullptr});
  list.push_back({"msa_attend",
                  make_attend_cases,
                  {{"out", kBf16NormalProductTolerance, "cuda_sm90"},
                   {"out", kBf16NormalProductTolerance, "cuda_sm90_decode"},
                   {"out", kBf16NormalProductTolerance, "cuda_portable"},
                   {"out", kBf16ProductTolerance},
                   {"lse", kFp32Tolerance}},
                  nullptr});
}

}  // namespace fovea::cli
