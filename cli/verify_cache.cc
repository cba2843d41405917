// fovea verify: problems of the room cache.

#include <cmath>
#include <limits>
#include <string_view>

#include "cli/verify_cases.h"
#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

struct CodecShape {
  const char* row_format;
  int64_t width;
  int64_t row_bytes;
};

constexpr CodecShape kShapes[] = {{"bf16", 576, 1152}, {"v32", 576, 656}, {"i132", 128, 132},
                                  {"bf16", 77, 154},   {"v4", 512, 584},  {"f576", 576, 576},
                                  {"r512", 512, 512}};

// The scales of r512 rows, in either type; other formats have none.
void add_row_scales(CaseBuilder& builder, const CodecShape& shape, int64_t slots) {
  if (std::string_view(shape.row_format) != "r512") return;
  builder.normals("inv_scale", slots % 2 == 0 ? DType::kBf16 : DType::kF32, {slots, 1});
}

// Slots without repeats among the valid ones; the rest is hostile.
void add_slots(CaseBuilder& builder, const char* name, int64_t rows, int64_t slots) {
  builder.integers(name, {rows}, 0, 0);
  for (int64_t i = 0; i < rows; ++i) {
    const bool is_hostile = i >= slots || builder.random().chance(0.2);
    builder.at<int32_t>(name, i) =
        is_hostile ? hostile_index(builder.random()) : static_cast<int32_t>(slots - 1 - i);
  }
}

// Rows with tiles of every size: normal, zero, tiny, huge, NaN and infinite elements.
void add_source(CaseBuilder& builder, int64_t rows, int64_t width) {
  builder.normals("src", DType::kBf16, {rows, width});
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < rows; ++i) {
    const double scale = std::exp2(static_cast<double>(builder.random().integer(-100, 100)));
    for (int64_t d = 0; d < width; ++d) {
      bf16_t& element = builder.at<bf16_t>("src", i * width + d);
      const auto value = static_cast<float>(bf16_to_float(element) * scale);
      element = bf16_from_float(i % 4 == 3 ? 0.0f : value);
      if (i % 4 == 1 && d % 50 == 7) element = bf16_from_float(d % 100 < 50 ? std::nanf("") : kInf);
    }
  }
}

// Of f576: with and without an exact reciprocal. The other formats ignore it.
double k_scale_of(std::string_view scale_mode) { return scale_mode == "pow2" ? 0.5 : 0.37; }

// With rope_dim > 0 the last channels are a tensor of their own.
VerifyCase make_pack_case(const CodecShape& shape, int64_t page_size, const char* scale_mode,
                          uint64_t seed, int64_t rope_dim = 0) {
  CaseBuilder builder(std::string(shape.row_format) + std::to_string(shape.width) + "_page" +
                          std::to_string(page_size) + "_" + scale_mode +
                          (rope_dim > 0 ? "_rope" : ""),
                      seed);
  const int64_t rows = 40, pages = 5;
  add_source(builder, rows, shape.width - rope_dim);
  if (rope_dim > 0) builder.normals("rope", DType::kBf16, {rows, rope_dim});
  add_slots(builder, "slots", rows, pages * page_size);
  add_row_scales(builder, shape, pages * page_size);
  builder.codes("pool", {pages, page_size * shape.row_bytes + 16})
      .param("row_format", shape.row_format)
      .param("page_size", page_size)
      .param("scale_mode", scale_mode)
      .param("k_scale", k_scale_of(scale_mode));
  return builder.take();
}

std::vector<VerifyCase> make_pack_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const CodecShape& shape : kShapes) {
    for (const int64_t page_size : {1, 3, 64}) {
      for (const char* scale_mode : {"fp32", "pow2"}) {
        cases.push_back(make_pack_case(shape, page_size, scale_mode, seed));
      }
    }
  }
  for (const CodecShape& shape : kShapes) {
    if (shape.width == 576) cases.push_back(make_pack_case(shape, 3, "fp32", seed + 1, 64));
  }
  CaseBuilder rows_pool("bf16_rows", seed);
  add_source(rows_pool, 9, 64);
  add_slots(rows_pool, "slots", 9, 20);
  rows_pool.normals("pool", DType::kBf16, {20, 64}).param("row_format", "bf16");
  cases.push_back(rows_pool.take());
  return cases;
}

// Any bytes are a pool: NaN codes, NaN and infinite scales too.
std::vector<VerifyCase> make_unpack_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const CodecShape& shape : kShapes) {
    for (const int64_t page_size : {1, 61, 64}) {
      CaseBuilder builder(std::string(shape.row_format) + std::to_string(shape.width) + "_page" +
                              std::to_string(page_size),
                          seed);
      builder.bytes("pool", {3, page_size * shape.row_bytes + 8})
          .integers("slots", {33}, 0, 3 * page_size - 1)
          .param("row_format", shape.row_format)
          .param("page_size", page_size)
          .param("width", shape.width)
          .param("k_scale", page_size == 1 ? 2.0 : 0.37);
      make_hostile(builder, "slots", 0.2);
      add_row_scales(builder, shape, 3 * page_size);
      cases.push_back(builder.take());
    }
  }
  return cases;
}

// Destinations fall, sources come from anywhere: chains in every direction.
std::vector<VerifyCase> make_move_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const CodecShape& shape : kShapes) {
    if (std::string_view(shape.row_format) == "r512") continue;  // not one that move_rows takes
    for (const int64_t page_size : {1, 3, 64}) {
      CaseBuilder builder(std::string(shape.row_format) + std::to_string(shape.width) + "_page" +
                              std::to_string(page_size),
                          seed);
      const int64_t rows = 40, pages = 5;
      builder.bytes("pool", {pages, page_size * shape.row_bytes + 16})
          .integers("src_slots", {rows}, 0, pages * page_size - 1)
          .param("row_format", shape.row_format)
          .param("page_size", page_size)
          .param("width", shape.width);
      make_hostile(builder, "src_slots", 0.2);
      add_slots(builder, "dst_slots", rows, pages * page_size);
      cases.push_back(builder.take());
    }
  }
  CaseBuilder rows_pool("bf16_rows", seed);
  rows_pool.normals("pool", DType::kBf16, {20, 64})
      .integers("src_slots", {15}, 0, 19)
      .param("row_format", "bf16");
  add_slots(rows_pool, "dst_slots", 15, 20);
  cases.push_back(rows_pool.take());
  return cases;
}

}  // namespace

void add_verify_cache(std::vector<VerifyOperator>& list) {
  list.push_back({"pack_rows", make_pack_cases, {}, nullptr});
  list.push_back({"unpack_rows", make_unpack_cases, {}, nullptr});
  list.push_back({"move_rows", make_move_cases, {}, nullptr});
}

}  // namespace fovea::cli
