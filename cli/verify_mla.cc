// fovea verify: problems of the room mla.

#include <cmath>
#include <cstring>
#include <limits>

#include "cli/verify_cases.h"
#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kV32RowBytes = 656;

// A v32 pool: codes without NaN, any positive fp32 scale near 1, normal rope values. `surplus`
// bytes end each page.
void add_v32_pool(CaseBuilder& builder, const std::string& name, int64_t pages, int64_t page_size,
                  int64_t surplus) {
  const int64_t page_bytes = page_size * kV32RowBytes + surplus;
  builder.codes(name, {pages, page_bytes});
  auto* bytes = static_cast<uint8_t*>(builder.tensor(name).data);
  for (int64_t page = 0; page < pages; ++page) {
    for (int64_t i = 0; i < page_size; ++i) {
      uint8_t* row = bytes + page * page_bytes + i * kV32RowBytes;
      for (int tile = 0; tile < 4; ++tile) {
        const auto scale = static_cast<float>(std::exp(builder.random().normal()) / 448);
        std::memcpy(row + 512 + 4 * tile, &scale, 4);
      }
      for (int d = 0; d < 64; ++d) {
        const bf16_t rope = bf16_from_float(static_cast<float>(0.3 * builder.random().normal()));
        std::memcpy(row + 528 + 2 * d, &rope, 2);
      }
    }
  }
}

// e4m3 codes of normal values.
void add_codes(CaseBuilder& builder, const std::string& name, std::initializer_list<int64_t> shape,
               double scale) {
  builder.codes(name, shape);
  const TensorView codes = builder.tensor(name);
  for (int64_t i = 0; i < codes.num_elements(); ++i) {
    builder.at<uint8_t>(name, i) =
        e4m3_from_float(static_cast<float>(scale * builder.random().normal()));
  }
}

// Sinks of every kind.
void add_sink(CaseBuilder& builder, int64_t heads) {
  builder.normals("sink", DType::kF32, {heads}, 3);
  const float special[] = {kInf, -kInf, 1e38f, -1e38f};
  for (int64_t h = 0; h < heads; h += 3) {
    builder.at<float>("sink", h) = special[h / 3 % 4];
  }
}

// Index lists with duplicates, hostile entries and one row without a valid slot.
void add_indices(CaseBuilder& builder, const std::string& name, int64_t rows, int64_t width,
                 int64_t slots) {
  builder.integers(name, {rows, width}, 0, slots - 1);
  make_hostile(builder, name, 0.2);
  if (rows == 0) return;
  for (int64_t i = 0; i < width; ++i) builder.at<int32_t>(name, i) = -1;
}

VerifyCase make_sparse_case(const std::string& name, const std::string& format, int64_t rows,
                            int64_t heads, int64_t topk, int64_t page_size, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t pages = 6;
  int64_t slots = 150;
  builder.normals("q", DType::kBf16, {rows, heads, 576}, 0.5);
  if (format == "v32") {
    add_v32_pool(builder, "kv", pages, page_size, 48);
    slots = pages * page_size;
    builder.param("row_format", "v32").param("page_size", page_size);
  } else {
    builder.normals("kv", DType::kBf16, {slots, 576}, 0.5);
  }
  add_indices(builder, "indices", rows, topk, slots);
  builder.param("softmax_scale", 0.1352338);
  return builder.take();
}

// Rows of 512 channels: v4 with scales behind the rows of a page, or r512 with a tensor of scales.
void add_rows_of_512(CaseBuilder& builder, const std::string& prefix, const std::string& format,
                     int64_t pages, int64_t page_size) {
  const std::string kv = prefix + "kv";
  if (format == "r512") {
    add_codes(builder, kv, {pages, page_size * 512 + 5}, 0.3 / 0.003);
    const std::string scales = prefix + "inv_scale";
    builder.normals(scales, DType::kF32, {pages * page_size, 1}, 0);
    for (int64_t i = 0; i < pages * page_size; ++i) {
      builder.at<float>(scales, i) =
          static_cast<float>(0.003 * std::exp(0.3 * builder.random().normal()));
    }
  } else {
    const int64_t page_bytes = page_size * 584 + 5;
    add_codes(builder, kv, {pages, page_bytes}, 0.3 / 0.003);
    for (int64_t page = 0; page < pages; ++page) {
      uint8_t* const bytes = &builder.at<uint8_t>(kv, page * page_bytes);
      for (int64_t i = 0; i < page_size; ++i) {
        for (int64_t d = 0; d < 64; ++d) {
          const auto rope = bf16_from_float(static_cast<float>(0.3 * builder.random().normal()));
          std::memcpy(bytes + i * 576 + 448 + 2 * d, &rope, 2);
        }
        for (int64_t g = 0; g < 8; ++g)
          bytes[page_size * 576 + i * 8 + g] = static_cast<uint8_t>(117 + (i + g) % 3);
      }
    }
  }
  builder.param(prefix + "row_format", format).param(prefix + "page_size", page_size);
}

// A window and compressed entries, listed or by page table, with sink and inverse rotation.
VerifyCase make_v4_case(const std::string& name, const std::string& window,
                        const std::string& compressed, bool by_table, int64_t heads,
                        uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t rows = 5;
  builder.normals("q", DType::kBf16, {rows, heads, 512}, 0.5);
  add_rows_of_512(builder, "", window, 4, 64);
  add_indices(builder, "indices", rows, 128, 256);
  builder.integers("topk_length", {rows}, -3, 140);
  add_rows_of_512(builder, "extra_", compressed, 30, 2);
  if (by_table) {
    builder.integers("extra_page_table", {3, 40}, 0, 29)
        .integers("extra_len", {rows}, -2, 90)
        .integers("row_to_request", {rows}, 0, 2);
    for (const char* list : {"extra_page_table", "row_to_request"})
      make_hostile(builder, list, 0.2);
  } else {
    add_indices(builder, "extra_indices", rows, 70, 60);
  }
  add_sink(builder, heads);
  builder.normals("inverse_rope", DType::kF32, {20, 64}, 0.7).integers("positions", {rows}, -2, 25);
  builder.param("softmax_scale", 0.044194174);
  return builder.take();
}

std::vector<VerifyCase> make_swa_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* format : {"r512", "v4"}) {
    for (const int64_t heads : {1, 20, 64}) {
      CaseBuilder builder(std::string(format) + "_heads" + std::to_string(heads), seed);
      builder.normals("q", DType::kBf16, {4, heads, 512}, 0.5);
      add_rows_of_512(builder, "", format, 4, 61);
      add_indices(builder, "swa_indices", 6, 133, 4 * 61);
      builder.integers("swa_lens", {6}, -3, 150).param("window", 128);
      if (heads > 1) add_sink(builder, heads);
      builder.param("softmax_scale", 0.044194174);
      cases.push_back(builder.take());
    }
  }
  return cases;
}

// Queries of bf16 or, with q_scale > 0, of codes; the second cache is of the same format.
VerifyCase make_f576_case(const std::string& name, int64_t heads, double q_scale, double k_scale,
                          uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t rows = 5, pages = 6, page_size = 13, topk = 150;
  if (q_scale > 0) {
    add_codes(builder, "q", {rows, heads, 576}, 0.5 / q_scale);
    builder.param("q_scale", q_scale);
  } else {
    builder.normals("q", DType::kBf16, {rows, heads, 576}, 0.5);
  }
  add_codes(builder, "kv", {pages, page_size * 576 + 5}, 0.5 / k_scale);
  add_indices(builder, "indices", rows, topk, pages * page_size);
  builder.integers("topk_length", {rows}, -3, topk + 10);
  add_codes(builder, "extra_kv", {4, 3 * 576}, 0.5 / k_scale);
  add_indices(builder, "extra_indices", rows, 20, 12);
  add_sink(builder, heads);
  builder.param("row_format", "f576").param("page_size", page_size).param("extra_page_size", 3);
  builder.param("softmax_scale", 0.1352338).param("k_scale", k_scale);
  return builder.take();
}

VerifyCase with_extras(VerifyCase original, const std::string& name, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t rows = original.inputs.find("q").shape[0];
  const int64_t heads = original.inputs.find("q").shape[1];
  add_sink(builder, heads);
  builder.integers("topk_length", {rows}, -3, 80);
  make_hostile(builder, "topk_length", 0.2);
  add_v32_pool(builder, "extra_kv", 5, 2, 0);
  add_indices(builder, "extra_indices", rows, 37, 10);
  builder.integers("extra_topk_length", {rows}, 0, 40);
  VerifyCase extras = builder.take();
  for (const std::string& tensor : extras.inputs.names()) {
    original.inputs.add_copy(tensor, extras.inputs.find(tensor));
  }
  original.name = name;
  original.params.set("extra_row_format", "v32").set("extra_page_size", 2);
  return original;
}

VerifyCase with_param(VerifyCase original, const std::string& param, Json value) {
  original.name += "_" + param;
  original.params.set(param, std::move(value));
  return original;
}

std::vector<VerifyCase> make_sparse_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const int64_t heads : {1, 3, 16, 40}) {
    cases.push_back(
        make_sparse_case("bf16_heads" + std::to_string(heads), "bf16", 5, heads, 133, 0, seed));
  }
  for (const int64_t page_size : {1, 61, 64}) {
    cases.push_back(make_sparse_case("v32_page" + std::to_string(page_size), "v32", 4, 16, 192,
                                     page_size, seed));
  }
  cases.push_back(make_f576_case("f576", 16, 0, 1, seed));
  cases.push_back(make_f576_case("f576_scales", 9, 0.5, 2, seed));
  cases.push_back(make_f576_case("f576_odd_scales", 40, 0.07, 0.3, seed));
  cases.push_back(make_v4_case("v4_v4", "v4", "v4", false, 20, seed));
  cases.push_back(make_v4_case("v4_table_r512", "v4", "r512", true, 64, seed));
  cases.push_back(make_v4_case("r512_table_v4", "r512", "v4", true, 3, seed));
  cases.push_back(make_sparse_case("width_0", "bf16", 3, 8, 0, 0, seed));
  cases.push_back(make_sparse_case("no_rows", "bf16", 0, 8, 64, 0, seed));
  cases.push_back(
      with_extras(make_sparse_case("", "v32", 7, 8, 65, 53, seed), "two_segments_v32", seed));
  cases.push_back(
      with_extras(make_sparse_case("", "bf16", 7, 20, 130, 0, seed), "two_segments_bf16", seed));
  cases.push_back(
      with_param(make_sparse_case("bf16", "bf16", 3, 16, 100, 0, seed), "logit_cap", 2));
  cases.push_back(
      with_param(make_sparse_case("bf16", "bf16", 3, 16, 300, 0, seed), "fixed_splits", 3));
  cases.push_back(
      with_param(make_sparse_case("v32", "v32", 3, 16, 64, 64, seed), "empty_lse", "pos_inf"));
  return cases;
}

// A paged cache of 7 pages, of which the tables name some twice, some not and some that are not
// there; 3 requests.
VerifyCase make_dense_case(const std::string& name, const std::string& format, int64_t heads,
                           int64_t heads_kv, int64_t page_size,
                           const std::vector<int32_t>& q_indptr, const std::vector<int32_t>& kv_len,
                           uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t pages = 7, columns = 4, rows = 12;
  builder.normals("q", DType::kBf16, {rows, heads, 576}, 0.5);
  if (format == "v32") {
    add_v32_pool(builder, "kv", pages, page_size, 48);
  } else if (format == "f576") {
    add_codes(builder, "kv", {pages, page_size * 576 + 5}, 0.5);
  } else {
    builder.normals("kv", DType::kBf16, {pages, page_size, heads_kv, 576}, 0.5);
  }
  if (format != "bf16") builder.param("page_size", page_size);
  builder.integers("page_table", {3, columns}, 0, pages - 1);
  make_hostile(builder, "page_table", 0.2);
  builder.list("kv_len", kv_len)
      .list("q_indptr", q_indptr)
      .param("row_format", format)
      .param("softmax_scale", 0.1352338);
  return builder.take();
}

std::vector<VerifyCase> make_dense_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  const std::vector<int32_t> rows = {0, 1, 8, 12}, lengths = {61, 70, 2};
  for (const int64_t heads : {1, 16, 40})
    cases.push_back(make_dense_case("bf16_heads" + std::to_string(heads), "bf16", heads, 1, 19,
                                    rows, lengths, seed));
  cases.push_back(make_dense_case("kv_heads", "bf16", 6, 3, 32, rows, {127, 0, 100}, seed));
  cases.push_back(make_dense_case("v32", "v32", 8, 1, 64, rows, {256, 99, 64}, seed));
  cases.push_back(make_dense_case("f576", "f576", 9, 1, 31, rows, lengths, seed));
  cases.push_back(make_dense_case("one_token_pages", "v32", 4, 1, 1, rows, {4, 3, 1}, seed));
  cases.push_back(
      with_param(make_dense_case("bf16", "bf16", 5, 1, 16, rows, lengths, seed), "causal", false));
  cases.push_back(with_param(make_dense_case("bf16", "bf16", 5, 1, 64, rows, {250, 130, 64}, seed),
                             "split_keys", 64));
  cases.push_back(make_dense_case("hostile_lengths", "bf16", 3, 1, 8, {2, -7, 2000000000, 5},
                                  {2147483647, -1, 9}, seed));
  return cases;
}

VerifyCase make_mha_case(const std::string& name, int64_t heads,
                         const std::vector<int32_t>& q_indptr,
                         const std::vector<int32_t>& kv_indptr, int64_t rows, int64_t keys,
                         bool causal, uint64_t seed) {
  CaseBuilder builder(name, seed);
  builder.normals("q", DType::kBf16, {rows, heads, 192})
      .normals("k", DType::kBf16, {keys, heads, 192})
      .normals("v", DType::kBf16, {keys, heads, 128})
      .list("q_indptr", q_indptr)
      .list("kv_indptr", kv_indptr)
      .param("softmax_scale", 0.0721687836)
      .param("causal", causal);
  return builder.take();
}

std::vector<VerifyCase> make_mha_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_mha_case("causal", 2, {0, 5, 5, 70}, {0, 3, 40, 170}, 70, 170, true, seed));
  cases.push_back(make_mha_case("dense", 3, {0, 1, 20}, {0, 65, 100}, 20, 100, false, seed));
  cases.push_back(make_mha_case("rows_of_nobody", 1, {2, 4, 9}, {1, 9, 30}, 12, 33, true, seed));
  cases.push_back(make_mha_case("hostile_offsets", 2, {-5, 3, 1, 2000000000},
                                {7, -1, 2000000000, 3}, 9, 21, true, seed));
  cases.push_back(make_mha_case("no_requests", 2, {0}, {0}, 3, 4, true, seed));
  return cases;
}

std::vector<VerifyCase> make_merge_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const int64_t width : {1, 77, 512}) {
      CaseBuilder builder(std::string(to_string(dtype)) + "_" + std::to_string(width), seed);
      const int64_t parts = 5, rows = 4, heads = 7;
      builder.normals("out_parts", dtype, {parts, rows, heads, width})
          .normals("lse_parts", DType::kF32, {parts, rows, heads}, 15);
      add_sink(builder, heads);
      const float empty[] = {-kInf, kInf, std::nanf("")};
      for (int64_t i = 0; i < parts * rows * heads; ++i) {
        // The last row has no part at all.
        const bool is_last_row = i / heads % rows == rows - 1;
        if (!is_last_row && !builder.random().chance(0.3)) continue;
        builder.at<float>("lse_parts", i) = empty[builder.random().integer(0, 2)];
        for (int64_t d = 0; d < width; ++d) {
          if (dtype == DType::kF32) {
            builder.at<float>("out_parts", i * width + d) = std::nanf("");
          } else {
            builder.at<bf16_t>("out_parts", i * width + d) = bf16_t{0x7FFF};
          }
        }
      }
      cases.push_back(builder.take());
    }
  }
  return cases;
}

std::vector<VerifyCase> make_concat_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const int64_t rows : {0, 1, 9}) {
    CaseBuilder builder("rows" + std::to_string(rows), seed);
    builder.normals("q_nope", DType::kBf16, {rows, 5, 512})
        .normals("q_rope", DType::kBf16, {rows, 5, 64});
    cases.push_back(builder.take());
  }
  return cases;
}

// Every kind of value among the latent and the rotated channels.
VerifyCase make_rope_case(const std::string& name, int64_t heads, const char* style, double q_scale,
                          double k_scale, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t rows = 6, max_pos = 30;
  if (heads > 0) {
    builder.normals("q_nope", DType::kBf16, {rows, heads, 512}, 20)
        .normals("q_rope", DType::kBf16, {rows, heads, 64}, 20);
  }
  builder.normals("k_nope", DType::kBf16, {rows, 512}, 3)
      .normals("k_rope", DType::kBf16, {rows, 64}, 3)
      .integers("positions", {rows}, 0, max_pos - 1)
      .normals("cos_sin", DType::kF32, {max_pos, 64}, 0)
      .param("rope_style", style)
      .param("q_scale", q_scale)
      .param("k_scale", k_scale);
  for (int64_t pos = 0; pos < max_pos; ++pos) {
    for (int i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(pos) * std::pow(1e4, -i / 32.0);
      builder.at<float>("cos_sin", pos * 64 + i) = static_cast<float>(std::cos(angle));
      builder.at<float>("cos_sin", pos * 64 + 32 + i) = static_cast<float>(std::sin(angle));
    }
  }
  make_hostile(builder, "positions", 0.3);
  const float special[] = {kInf, -kInf, std::nanf(""), 1e30f, -1e30f, -0.0f, 1e-30f};
  for (int64_t i = 0; i < 7; ++i) {
    builder.at<bf16_t>("k_nope", i * 70) = bf16_from_float(special[i]);
    builder.at<bf16_t>("k_rope", i * 9) = bf16_from_float(special[i]);
  }
  return builder.take();
}

std::vector<VerifyCase> make_rope_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_rope_case("half_split", 3, "half_split", 0.5, 2, seed));
  cases.push_back(make_rope_case("interleaved", 16, "interleaved", 2, 0.5, seed));
  cases.push_back(make_rope_case("odd_scales", 5, "interleaved", 0.37, 0.011, seed));
  cases.push_back(make_rope_case("keys_alone", 0, "half_split", 1, 1, seed));
  return cases;
}

std::vector<VerifyCase> make_window_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const bool is_ring : {false, true}) {
    CaseBuilder builder(is_ring ? "ring" : "paged", seed);
    const int64_t rows = 12, page_size = 5;
    builder.list("q_indptr", {0, 3, 3, 7, 6, 11})
        .integers("kv_len", {5}, -2, 60)
        .integers("page_table", {5, is_ring ? 1 : 9}, 0, 19)
        .bytes("row_valid", {rows})
        .param("window", 8)
        .param("width", 11)
        .param("page_size", page_size)
        .param("storage", is_ring ? "ring" : "paged")
        .param("pages", 20);
    make_hostile(builder, "page_table", 0.2);
    static_cast<uint8_t*>(builder.tensor("row_valid").data)[4] = 0;
    cases.push_back(builder.take());
  }
  return cases;
}

}  // namespace

void add_verify_mla(std::vector<VerifyOperator>& list) {
  list.push_back(
      {"sparse_mla",
       make_sparse_cases,
       {{"out", kBf16ProductTolerance}, {"lse", kFp32Tolerance}, {"max_logits", kFp32Tolerance}},
       nullptr});
  list.push_back({"dense_mla",
                  make_dense_cases,
                  {{"out", kBf16ProductTolerance}, {"lse", kFp32Tolerance}},
                  nullptr});
  list.push_back({"mha_varlen",
                  make_mha_cases,
                  {{"out", kBf16NormalProductTolerance, "cuda_portable"},
                   {"out", kBf16Tolerance},
                   {"lse", kFp32Tolerance}},
                  nullptr});
  list.push_back(
      {"merge_lse", make_merge_cases, {{"out", kBf16Tolerance}, {"lse", kFp32Tolerance}}, nullptr});
  list.push_back({"concat_absorbed_q", make_concat_cases, {}, nullptr});
  list.push_back({"mla_rope_quantize", make_rope_cases, {}, nullptr});
  list.push_back({"swa_decode",
                  make_swa_cases,
                  {{"out", kBf16ProductTolerance}, {"lse", kFp32Tolerance}},
                  nullptr});
  list.push_back({"build_swa_indices", make_window_cases, {}, nullptr});
}

}  // namespace fovea::cli
