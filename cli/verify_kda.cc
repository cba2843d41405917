// fovea verify: problems of the room kda.

#include <cmath>

#include "cli/verify_cases.h"
#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

// Implementations may multiply in bf16: 3e-3 of the output besides its rounding, 1e-3 of a fp32
// state. An element may be off by several times the rms of the whole.
constexpr Tolerance kOutTolerance{2e-2, 2.01 / 128, 5e-3};
constexpr Tolerance kStateTolerance{1e-2, 2.01 / 128, 1e-3};

struct Sizes {
  int64_t rows, heads, value_heads, dim_k, dim_v;
};

void add_gate(CaseBuilder& builder, const std::string& gate, DType dtype, const Sizes& sizes) {
  builder.param("gate", gate).normals("g", dtype, {sizes.rows, sizes.value_heads, sizes.dim_k}, 2);
  if (gate == "given") {
    for (int64_t i = 0; i < sizes.rows * sizes.value_heads * sizes.dim_k; ++i) {
      const double x = builder.random().chance(0.05) ? 1000 : builder.random().normal();
      const auto value = static_cast<float>(-0.3 * x * x);
      if (dtype == DType::kF32) {
        builder.at<float>("g", i) = value;
      } else {
        builder.at<bf16_t>("g", i) = bf16_from_float(value);
      }
    }
    return;
  }
  builder.normals("a_log", DType::kF32, {sizes.value_heads}, 1);
  builder.normals("dt_bias", DType::kF32, {sizes.value_heads, sizes.dim_k}, 1);
}

void add_rows(CaseBuilder& builder, const std::string& gate, DType dtype, const Sizes& sizes) {
  const double key_scale = 1 / std::sqrt(static_cast<double>(sizes.dim_k));
  builder.normals("q", DType::kBf16, {sizes.rows, sizes.heads, sizes.dim_k}, 3 * key_scale)
      .normals("k", DType::kBf16, {sizes.rows, sizes.heads, sizes.dim_k}, key_scale)
      .normals("v", DType::kBf16, {sizes.rows, sizes.value_heads, sizes.dim_v})
      .normals("beta", dtype, {sizes.rows, sizes.value_heads})
      .param("beta_kind", "logit");
  add_gate(builder, gate, dtype, sizes);
}

std::vector<VerifyCase> make_gate_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* gate : {"softplus", "lower_bound", "given"}) {
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      CaseBuilder builder(std::string(gate) + "_" + std::string(to_string(dtype)), seed);
      add_gate(builder, gate, dtype, {19, 1, 3, 100, 1});
      if (gate == std::string("lower_bound")) builder.param("lower_bound", -2.5);
      cases.push_back(builder.take());
    }
  }
  return cases;
}

VerifyCase make_prefill_case(const std::string& name, const std::string& gate, DType dtype,
                             const Sizes& sizes, const std::vector<int32_t>& q_indptr,
                             uint64_t seed) {
  CaseBuilder builder(name, seed);
  add_rows(builder, gate, dtype, sizes);
  builder.list("q_indptr", q_indptr);
  const auto sequences = static_cast<int64_t>(q_indptr.size()) - 1;
  builder.normals("state", DType::kF32, {sequences, sizes.value_heads, sizes.dim_v, sizes.dim_k},
                  0.5);
  builder.param("normalise", true);
  return builder.take();
}

// Forks, padding, a fresh slot and snapshots in a pool.
VerifyCase make_pool_case(const std::string& name, DType dtype, const char* commit, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const Sizes sizes{150, 2, 4, 64, 32};
  add_rows(builder, "lower_bound", DType::kBf16, sizes);
  builder.list("q_indptr", {0, 70, 70, 139, 150})
      .normals("state", dtype, {10, sizes.value_heads, sizes.dim_v, sizes.dim_k}, 0.5)
      .list("in_slot", {0, 0, 2, -1})
      .list("out_slot", {9, 1, 100, 3})
      .list("snapshot_seq", {0, 2, 2, 3, 7})
      .list("snapshot_pos", {64, 69, 63, 0, 0})
      .list("snapshot_slot", {4, 5, 6, 7, 8})
      .param("commit", commit);
  return builder.take();
}

std::vector<VerifyCase> make_prefill_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  const DType bf16 = DType::kBf16;
  cases.push_back(
      make_prefill_case("softplus", "softplus", bf16, {97, 2, 4, 128, 128}, {0, 15, 97}, seed));
  cases.push_back(make_prefill_case("lower_bound", "lower_bound", DType::kF32, {130, 1, 1, 64, 64},
                                    {0, 130}, seed));
  cases.push_back(make_prefill_case("given", "given", DType::kF32, {100, 1, 2, 60, 100},
                                    {0, 33, 33, 100}, seed));
  cases.push_back(
      make_prefill_case("rows_of_nobody", "softplus", bf16, {40, 1, 2, 16, 16}, {3, 20, 31}, seed));
  cases.push_back(make_prefill_case("hostile_offsets", "softplus", bf16, {40, 1, 2, 16, 16},
                                    {-5, 20, 10, 2000000000}, seed));
  cases.push_back(
      make_prefill_case("no_sequences", "softplus", bf16, {4, 1, 2, 16, 16}, {0}, seed));
  cases.push_back(make_pool_case("pool_f32", DType::kF32, "direct", seed));
  cases.push_back(make_pool_case("pool_f32_staged", DType::kF32, "staged", seed));
  return cases;
}

std::vector<VerifyCase> make_decode_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* gate : {"softplus", "lower_bound", "given"}) {
    CaseBuilder builder(gate, seed);
    const Sizes sizes{5, 2, 4, 128, 128};
    add_rows(builder, gate, DType::kF32, sizes);
    builder.normals("state", DType::kF32, {8, 4, 128, 128}, 0.5)
        .list("slot", {7, -1, 0, 8, 3})
        .param("normalise", true);
    cases.push_back(builder.take());
  }
  CaseBuilder builder("packed_row", seed);
  const Sizes sizes{3, 2, 6, 60, 20};
  add_gate(builder, "softplus", DType::kBf16, sizes);
  builder.normals("qkv", DType::kBf16, {3, 2 * 2 * 60 + 6 * 20})
      .normals("beta", DType::kF32, {3, 6})
      .normals("state", DType::kF32, {3, 6, 20, 60}, 0.5)
      .param("beta_kind", "logit")
      .param("allow_neg_eigval", true)
      .param("normalise", true);
  cases.push_back(builder.take());
  return cases;
}

// A verify of 4 requests, one of them padding and one fresh.
CaseBuilder verify_builder(const std::string& name, const char* mode, const char* gate, DType dtype,
                           const Sizes& sizes, uint64_t seed) {
  CaseBuilder builder(name, seed);
  add_rows(builder, gate, dtype, sizes);
  builder.normals("state", dtype, {7, sizes.value_heads, sizes.dim_v, sizes.dim_k}, 0.5)
      .list("slot", {6, -1, 2, 0})
      .param("mode", mode)
      .param("rows_per_request", sizes.rows / 4)
      .param("normalise", true);
  return builder;
}

std::vector<VerifyCase> make_verify_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* mode : {"states", "records"}) {
    const std::string name = mode;
    cases.push_back(
        verify_builder(name + "_128", mode, "softplus", DType::kBf16, {12, 2, 4, 128, 128}, seed)
            .take());
    CaseBuilder tree =
        verify_builder(name + "_tree", mode, "given", DType::kF32, {24, 1, 2, 60, 20}, seed);
    cases.push_back(tree.list("parent", {-1, 0, 0, 7, 1, -9}).take());
  }
  return cases;
}

VerifyCase make_commit_case(const std::string& name, const char* mode, DType dtype,
                            const char* layout, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t requests = 5, rows = 4, heads = 2, dim_k = 60, dim_v = 20, channels = 37;
  const bool keeps_states = mode == std::string("states");
  if (keeps_states) {
    builder.normals("scratch", DType::kF32, {requests, rows, heads, dim_v, dim_k}, 0.5);
  } else {
    builder.normals("scratch", DType::kF32, {requests, rows, heads, 2 * dim_k + dim_v}, 0.3);
    // Channels [K, 2K) are log decays.
    const int64_t width = 2 * dim_k + dim_v;
    for (int64_t i = 0; i < requests * rows * heads * width; ++i) {
      if (i % width < dim_k || i % width >= 2 * dim_k) continue;
      float& value = builder.at<float>("scratch", i);
      value = builder.random().chance(0.05) ? -1000.0f : -std::abs(value);
    }
  }
  builder.normals("state", dtype, {9, heads, dim_v, dim_k}, 0.5)
      .list("accepted", {4, 2, 0, 5, 1})
      .list("slot", {8, 2, 3, 4, 9})
      .list("track_slot", {1, 5, 6, -1, 7})
      .list("track_accepted", {2, 4, 1, 1, -3})
      .list("parent", {-1, 0, 0, 2})
      .normals("window_scratch", DType::kBf16, {requests, rows, 3, channels})
      .param("mode", mode)
      .param("window_layout", layout);
  if (layout == std::string("wd")) {
    builder.normals("window_state", DType::kBf16, {9, 3, channels});
  } else {
    builder.normals("window_state", DType::kBf16, {9, channels, 3});
  }
  return builder.take();
}

std::vector<VerifyCase> make_commit_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_commit_case("states_f32", "states", DType::kF32, "wd", seed));
  cases.push_back(make_commit_case("states_bf16", "states", DType::kBf16, "dw", seed));
  cases.push_back(make_commit_case("records_f32", "records", DType::kF32, "dw", seed));
  return cases;
}

VerifyCase make_conv_case(const std::string& mode, const std::string& layout, int64_t channels,
                          DType weight_dtype, uint64_t seed) {
  CaseBuilder builder(mode + "_" + layout + "_" + std::to_string(channels), seed);
  const int64_t rows = mode == "prefill" ? 140 : 6;
  builder.normals("x", DType::kBf16, {rows, channels})
      .normals("weight", weight_dtype, {channels, 4}, 0.5)
      .normals("bias", DType::kF32, {channels}, 0.3)
      .param("mode", mode)
      .param("window_layout", layout);
  if (layout == "wd") {
    builder.normals("window_state", DType::kBf16, {9, 3, channels});
  } else {
    builder.normals("window_state", DType::kBf16, {9, channels, 3});
  }
  if (mode == "prefill") {
    builder.list("q_indptr", {0, 2, 2, 72, 73, 140})
        .list("in_slot", {3, 0, -1, 0, 20})
        .list("out_slot", {3, 4, 5, -1, 6})
        .list("snapshot_seq", {0, 2, 2, 3, 9})
        .list("snapshot_pos", {1, 70, 71, 0, 0})
        .list("snapshot_slot", {7, 8, 1, 2, 2});
  } else if (mode == "update") {
    builder.list("slot", {8, -1, 0, 9, 2, 5});
  } else {
    builder.list("slot", {8, -1}).list("parent", {-1, 0, 0}).param("rows_per_request", 3);
  }
  return builder.take();
}

std::vector<VerifyCase> make_conv_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* mode : {"prefill", "update", "verify"}) {
    for (const char* layout : {"wd", "dw"}) {
      cases.push_back(make_conv_case(mode, layout, 600, DType::kBf16, seed));
      cases.push_back(make_conv_case(mode, layout, 13, DType::kF32, seed));
    }
  }
  return cases;
}

struct StageCase {
  std::string name;
  DType dtype;
  int64_t chunk;
  Sizes sizes;
  std::vector<int32_t> q_indptr;
};

std::vector<StageCase> stage_cases() {
  return {
      {"f32_64", DType::kF32, 64, {150, 2, 4, 64, 32}, {0, 70, 70, 139, 150}},
      {"bf16_16", DType::kBf16, 16, {97, 1, 3, 60, 20}, {3, 18, 90}},
      {"hostile_offsets", DType::kF32, 32, {40, 1, 2, 16, 16}, {-5, 20, 10, 2000000000}},
  };
}

CaseBuilder stage_builder(const StageCase& stage, uint64_t seed) {
  CaseBuilder builder(stage.name, seed);
  builder.list("q_indptr", stage.q_indptr);
  return builder;
}

// Sums of decays: they fall along the rows.
void add_decay_sums(CaseBuilder& builder, const Sizes& sizes) {
  builder.normals("g_sum", DType::kF32, {sizes.rows, sizes.value_heads, sizes.dim_k}, 0.2);
  const int64_t row = sizes.value_heads * sizes.dim_k;
  for (int64_t i = 0; i < sizes.rows * row; ++i) {
    float& sum = builder.at<float>("g_sum", i);
    sum = (i < row ? 0 : builder.at<float>("g_sum", i - row)) - std::abs(sum);
  }
}

std::vector<VerifyCase> make_stage_gate_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const StageCase& stage : stage_cases()) {
    CaseBuilder builder = stage_builder(stage, seed);
    const Sizes& sizes = stage.sizes;
    builder.normals("q", DType::kBf16, {sizes.rows, sizes.heads, sizes.dim_k})
        .normals("k", DType::kBf16, {sizes.rows, sizes.heads, sizes.dim_k})
        .param("normalise", true)
        .param("chunk", stage.chunk)
        .param("stage_dtype", std::string(to_string(stage.dtype)));
    add_gate(builder, "softplus", stage.dtype, sizes);
    cases.push_back(builder.take());
  }
  return cases;
}

std::vector<VerifyCase> make_stage_intra_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const StageCase& stage : stage_cases()) {
    CaseBuilder builder = stage_builder(stage, seed);
    const Sizes& sizes = stage.sizes;
    const double key_scale = 1 / std::sqrt(static_cast<double>(sizes.dim_k));
    builder.normals("q_hat", stage.dtype, {sizes.rows, sizes.heads, sizes.dim_k}, key_scale)
        .normals("k_hat", stage.dtype, {sizes.rows, sizes.heads, sizes.dim_k}, key_scale)
        .normals("v", DType::kBf16, {sizes.rows, sizes.value_heads, sizes.dim_v})
        .normals("beta", DType::kF32, {sizes.rows, sizes.value_heads})
        .param("beta_kind", "logit")
        .param("chunk", stage.chunk);
    add_decay_sums(builder, sizes);
    cases.push_back(builder.take());
  }
  return cases;
}

std::vector<VerifyCase> make_stage_inter_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const StageCase& stage : stage_cases()) {
    CaseBuilder builder = stage_builder(stage, seed);
    const Sizes& sizes = stage.sizes;
    const double key_scale = 1 / std::sqrt(static_cast<double>(sizes.dim_k));
    const auto sequences = static_cast<int64_t>(stage.q_indptr.size()) - 1;
    builder.normals("w", stage.dtype, {sizes.rows, sizes.value_heads, sizes.dim_k}, key_scale)
        .normals("kr", stage.dtype, {sizes.rows, sizes.value_heads, sizes.dim_k}, key_scale)
        .normals("u0", stage.dtype, {sizes.rows, sizes.value_heads, sizes.dim_v})
        .normals("initial_state", DType::kF32,
                 {sequences, sizes.value_heads, sizes.dim_v, sizes.dim_k}, 0.5)
        .param("chunk", stage.chunk);
    add_decay_sums(builder, sizes);
    cases.push_back(builder.take());
  }
  return cases;
}

std::vector<VerifyCase> make_stage_output_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const StageCase& stage : stage_cases()) {
    CaseBuilder builder = stage_builder(stage, seed);
    const Sizes& sizes = stage.sizes;
    builder.normals("q_hat", stage.dtype, {sizes.rows, sizes.heads, sizes.dim_k})
        .normals("p", stage.dtype, {sizes.rows, sizes.value_heads, stage.chunk}, 0.2)
        .normals("u", stage.dtype, {sizes.rows, sizes.value_heads, sizes.dim_v})
        .normals("chunk_states", DType::kF32, {5, sizes.value_heads, sizes.dim_v, sizes.dim_k});
    add_decay_sums(builder, sizes);
    cases.push_back(builder.take());
  }
  return cases;
}

}  // namespace

void add_verify_kda(std::vector<VerifyOperator>& list) {
  list.push_back({"kda_gate", make_gate_cases, {{"log_decay", kFp32Tolerance}}, nullptr});
  list.push_back({"kda_prefill",
                  make_prefill_cases,
                  {{"out", kOutTolerance}, {"state", kStateTolerance}},
                  nullptr});
  list.push_back({"kda_decode",
                  make_decode_cases,
                  {{"out", kOutTolerance}, {"state", kFp32Tolerance}},
                  nullptr});
  list.push_back({"kda_verify",
                  make_verify_cases,
                  {{"out", kOutTolerance}, {"scratch", kStateTolerance}},
                  nullptr});
  list.push_back({"kda_commit", make_commit_cases, {{"state", kFp32Tolerance}}, nullptr});
  list.push_back({"kda_stage_gate",
                  make_stage_gate_cases,
                  {{"g_sum", kFp32Tolerance}, {"q_hat", kBf16Tolerance}, {"k_hat", kBf16Tolerance}},
                  nullptr});
  list.push_back({"kda_stage_intra",
                  make_stage_intra_cases,
                  {{"p", kOutTolerance},
                   {"x", kOutTolerance},
                   {"w", kOutTolerance},
                   {"u0", kOutTolerance},
                   {"kr", kOutTolerance}},
                  nullptr});
  list.push_back(
      {"kda_stage_inter",
       make_stage_inter_cases,
       {{"chunk_states", kStateTolerance}, {"u", kOutTolerance}, {"final_state", kStateTolerance}},
       nullptr});
  list.push_back({"kda_stage_output", make_stage_output_cases, {{"out", kOutTolerance}}, nullptr});
  list.push_back({"causal_conv1d", make_conv_cases, {{"out", kBf16Tolerance}}, nullptr});
}

}  // namespace fovea::cli
