// fovea verify: problems of the room compress.

#include <cmath>
#include <cstring>
#include <limits>

#include "cli/verify_cases.h"
#include "fovea/numeric.h"

namespace fovea::cli {
namespace {

// Three requests in the middle of their prompts with padding between them. The state of a request
// that starts anew is NaN.
VerifyCase make_compress_case(const std::string& name, int64_t ratio, int64_t dim,
                              const std::string& format, const std::string& form, uint64_t seed) {
  CaseBuilder builder(name, seed);
  const int64_t channels = (ratio == 4 ? 2 : 1) * dim;
  const int64_t first[] = {0, ratio + 3, 5 * ratio - 1};
  const int64_t count[] = {2 * ratio + 1, ratio, 2};
  std::vector<int32_t> positions, requests;
  for (int32_t r = 0; r < 3; ++r) {
    for (int64_t t = 0; t < count[r]; ++t) {
      positions.push_back(static_cast<int32_t>(first[r] + t));
      requests.push_back(r);
    }
    positions.push_back(hostile_index(builder.random()));
    requests.push_back(-1);
    positions.push_back(-1 - r);
    requests.push_back(r);
  }
  const auto rows = static_cast<int64_t>(positions.size());
  builder.normals("kv_gate", DType::kF32, {rows, 2 * channels}, 2)
      .normals("ape", DType::kF32, {ratio, channels})
      .normals("norm_weight", DType::kF32, {dim})
      .list("positions", positions)
      .list("row_to_request", requests)
      .normals("cos_sin", DType::kF32, {4 * ratio, 64});
  const bool stored = form == "stored";
  const int64_t state_elements = stored ? (channels / dim) * ratio * 2 * channels : 3 * dim;
  if (stored) {
    builder.normals("state", DType::kF32, {4, channels / dim * ratio, 2, channels});
  } else {
    builder.normals("state", DType::kF32, {4, 3, dim});
    for (int64_t i = 0; i < 4 * state_elements; ++i) {
      float& value = builder.at<float>("state", i);
      if (i / dim % 3 == 1) value = 1 + std::fabs(value);  // a sum of weights
    }
  }
  for (int64_t i = 0; i < state_elements; ++i)
    builder.at<float>("state", i) = std::numeric_limits<float>::quiet_NaN();
  const int64_t page_size = 2;
  const int64_t row_bytes = format == "bf16" ? 2 * dim : format == "v4" ? 584 : dim + 4;
  builder.list("state_slot", {0, 3, 1})
      .integers("page_table", {3, 3}, 0, 8)
      .bytes("pool", {9, page_size * row_bytes + 3})
      .param("ratio", ratio)
      .param("row_format", format)
      .param("page_size", page_size)
      .param("form", form);
  // Pages of their own, one of them outside the pool.
  for (int64_t i = 0; i < 9; ++i) builder.at<int32_t>("page_table", i) = static_cast<int32_t>(i);
  builder.at<int32_t>("page_table", 1) = hostile_index(builder.random());
  if (format == "i132") builder.param("scale_mode", "pow2");
  return builder.take();
}

std::vector<VerifyCase> make_compress_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(make_compress_case("ratio4", 4, 512, "bf16", "stored", seed));
  cases.push_back(make_compress_case("ratio4_v4", 4, 512, "v4", "stored", seed));
  cases.push_back(make_compress_case("ratio128_v4", 128, 512, "v4", "online", seed));
  cases.push_back(make_compress_case("ratio4_i132", 4, 128, "i132", "stored", seed));
  cases.push_back(make_compress_case("ratio128", 128, 512, "bf16", "stored", seed));
  cases.push_back(make_compress_case("ratio128_online", 128, 512, "bf16", "online", seed));
  return cases;
}

// Where a row lies in its page, and the value of channel i.
struct PooledRow {
  uint8_t* data;
  int64_t data_bytes;
  uint8_t* scales;
  int64_t scale_bytes;

  PooledRow(const std::string& format, uint8_t* page, int64_t page_size, int64_t index,
            int64_t dim) {
    data_bytes = format == "bf16" ? 2 * dim : format == "v4" ? 576 : dim;
    scale_bytes = format == "bf16" ? 0 : format == "v4" ? 8 : 4;
    data = page + index * data_bytes;
    scales = page + page_size * data_bytes + index * scale_bytes;
  }

  float value(int64_t i) const {
    const int64_t codes = scale_bytes == 0 ? 0 : scale_bytes == 8 ? 448 : data_bytes;
    if (i < codes && scale_bytes == 8)
      return e4m3_to_float(data[i]) * ue8m0_to_float(scales[i / 64]);
    if (i < codes) {
      float scale;
      std::memcpy(&scale, scales, sizeof(scale));
      return e4m3_to_float(data[i]) * scale;
    }
    bf16_t value;
    std::memcpy(&value, data + codes + 2 * (i - codes), sizeof(value));
    return bf16_to_float(value);
  }
};

// The rows that were emitted, decoded, beside the pool without them.
void normalise_compress(const TensorMap& inputs, const Json& params, TensorMap& outputs) {
  const TensorView pool = outputs.find("pool"), emitted = outputs.find("emitted");
  if (!pool.defined() || !emitted.defined() || outputs.find("rows").defined()) return;
  const int64_t dim = inputs.find("norm_weight").shape[0];
  const auto page_size = static_cast<int64_t>(params.find("page_size")->as_number());
  const int64_t count = emitted.shape[0];
  const TensorView rows = outputs.add("rows", DType::kF32, {count, dim});
  for (int64_t t = 0; t < count; ++t) {
    const int32_t slot = static_cast<const int32_t*>(emitted.data)[t];
    if (slot < 0) continue;
    const PooledRow row(std::string(params.find("row_format")->as_string()),
                        static_cast<uint8_t*>(pool.data) + slot / page_size * pool.shape[1],
                        page_size, slot % page_size, dim);
    for (int64_t i = 0; i < dim; ++i) static_cast<float*>(rows.data)[t * dim + i] = row.value(i);
    std::memset(row.data, 0, static_cast<size_t>(row.data_bytes));
    std::memset(row.scales, 0, static_cast<size_t>(row.scale_bytes));
  }
}

}  // namespace

void add_verify_compress(std::vector<VerifyOperator>& list) {
  // A code may differ by a step, 1/8 of its value, where rounding to bf16 ends a tie.
  list.push_back({"v4_compress",
                  make_compress_cases,
                  {{"rows", {2e-3, 1.01 / 8, 5e-3}}, {"state", kFp32Tolerance}},
                  normalise_compress});
}

}  // namespace fovea::cli
