// fovea verify: problems of the room index.

#include <cmath>
#include <limits>

#include "cli/verify_cases.h"

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

}  // namespace

void add_verify_index(std::vector<VerifyOperator>& list) {
  list.push_back({"topk_select", make_topk_cases, {}, nullptr});
}

}  // namespace fovea::cli
