#include "src/replay/dsa_index_codes.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "fovea/numeric.h"
#include "src/core/tensor_generator.h"

namespace fovea::internal {
namespace {

constexpr int64_t kKeyTile = 512;  // keys quantised at once

IndexQuantize plan_quantize(const DsaShape& shape, int64_t max_rows,
                            const std::string& implementation) {
  IndexQuantizeProblem problem;
  problem.max_rows = max_rows;
  problem.num_heads = shape.index_heads;
  problem.head_dim = shape.index_dim;
  problem.rope_dim = shape.rope_dim;
  problem.rope_style = shape.index_rope_style;
  problem.hadamard = shape.hadamard;
  problem.scale_mode = shape.index_scale_mode;
  return IndexQuantize::plan(problem, Device::cpu(1), {implementation});
}

const std::array<double, 256>& e4m3_values() {
  static const std::array<double, 256> values = [] {
    std::array<double, 256> table;
    for (int code = 0; code < 256; ++code) {
      table[static_cast<size_t>(code)] = e4m3_to_float(static_cast<uint8_t>(code));
    }
    return table;
  }();
  return values;
}

// Exact: a product of two codes is a multiple of 2^-18 below 2^18, and a sum of 128 of them fits
// the 53 bits of a double. Four sums, so that the compiler may use vectors.
double exact_dot(const double* a, const double* b, int64_t count) {
  double sums[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < count; i += 4) {
    for (int64_t lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

IndexCodec::IndexCodec(const DsaInputs& inputs, const std::string& implementation)
    : inputs_(inputs),
      quantize_keys_(plan_quantize(inputs.shape(), kKeyTile, implementation)),
      quantize_query_(plan_quantize(inputs.shape(), 1, implementation)) {
  const int64_t positions = inputs.workload().max_rows();
  cos_sin_.resize(static_cast<size_t>(positions * inputs.shape().rope_dim));
  generate_cos_sin(positions, inputs.shape().rope_dim, cos_sin_.data());
}

IndexKeys IndexCodec::keys(int64_t layer, int64_t request, int64_t count) const {
  const DsaShape& shape = inputs_.shape();
  const int64_t width = shape.index_dim;
  const auto row_size = static_cast<size_t>(width);
  IndexKeys keys;
  keys.codes.resize(static_cast<size_t>(count) * row_size);
  keys.scales.resize(static_cast<size_t>(count));
  std::vector<float> weight(row_size), bias(row_size);
  inputs_.norm(layer, weight, bias);
  std::vector<bf16_t> raw(kKeyTile * row_size);
  std::vector<int32_t> positions(kKeyTile);
  HostBuffer workspace(quantize_keys_.workspace_bytes());
  const auto max_positions = static_cast<int64_t>(cos_sin_.size()) / shape.rope_dim;
  for (int64_t first = 0; first < count; first += kKeyTile) {
    const int64_t rows = std::min(kKeyTile, count - first);
    for (int64_t i = 0; i < rows; ++i) {
      const uint64_t token = inputs_.workload().token_id(request, first + i);
      inputs_.index_key(layer, token,
                        std::span(raw).subspan(static_cast<size_t>(i) * row_size, row_size));
      positions[static_cast<size_t>(i)] = static_cast<int32_t>(first + i);
    }
    IndexQuantizeTensors tensors;
    tensors.k = make_tensor(raw.data(), DType::kBf16, {rows, width});
    tensors.norm_weight = make_tensor(weight.data(), DType::kF32, {width});
    tensors.norm_bias = make_tensor(bias.data(), DType::kF32, {width});
    tensors.positions = make_tensor(positions.data(), DType::kI32, {rows});
    tensors.cos_sin = make_tensor(cos_sin_.data(), DType::kF32, {max_positions, shape.rope_dim});
    tensors.k_fp8 = make_tensor(keys.codes.data() + first * width, DType::kU8, {rows, width});
    tensors.k_scale = make_tensor(keys.scales.data() + first, DType::kF32, {rows});
    quantize_keys_.run(tensors, workspace.workspace());
  }
  return keys;
}

IndexQuery IndexCodec::query(int64_t layer, int64_t request, int64_t position) const {
  const DsaShape& shape = inputs_.shape();
  const int64_t heads = shape.index_heads;
  const int64_t width = shape.index_dim;
  IndexQuery query;
  query.codes.resize(static_cast<size_t>(heads * width));
  query.scales.resize(static_cast<size_t>(heads));
  query.head_weight.resize(query.scales.size());
  std::vector<bf16_t> raw(query.codes.size());
  std::vector<float> gate(query.scales.size());
  inputs_.index_query(layer, request, position, raw);
  inputs_.head_gate(layer, inputs_.workload().token_id(request, position), gate);
  const auto row = static_cast<int32_t>(position);
  const auto max_positions = static_cast<int64_t>(cos_sin_.size()) / shape.rope_dim;
  IndexQuantizeTensors tensors;
  tensors.q = make_tensor(raw.data(), DType::kBf16, {1, heads, width});
  tensors.head_gate = make_tensor(gate.data(), DType::kF32, {1, heads});
  tensors.positions = make_tensor(&row, DType::kI32, {1});
  tensors.cos_sin = make_tensor(cos_sin_.data(), DType::kF32, {max_positions, shape.rope_dim});
  tensors.q_fp8 = make_tensor(query.codes.data(), DType::kU8, {1, heads, width});
  tensors.q_scale = make_tensor(query.scales.data(), DType::kF32, {1, heads});
  tensors.head_weight = make_tensor(query.head_weight.data(), DType::kF32, {1, heads});
  HostBuffer workspace(quantize_query_.workspace_bytes());
  quantize_query_.run(tensors, workspace.workspace());
  return query;
}

std::vector<double> fp64_logits(const IndexQuery& query, const IndexKeys& keys, int64_t count) {
  const std::array<double, 256>& e4m3 = e4m3_values();
  const auto value_of = [&](uint8_t code) { return e4m3[code]; };
  const auto heads = static_cast<int64_t>(query.scales.size());
  const int64_t width = static_cast<int64_t>(query.codes.size()) / heads;
  std::vector<double> query_values(query.codes.size()), key_values(static_cast<size_t>(width));
  std::transform(query.codes.begin(), query.codes.end(), query_values.begin(), value_of);
  std::vector<double> logits(static_cast<size_t>(count));
  for (int64_t j = 0; j < count; ++j) {
    const uint8_t* const codes = keys.codes.data() + j * width;
    std::transform(codes, codes + width, key_values.begin(), value_of);
    double sum = 0;
    for (int64_t h = 0; h < heads; ++h) {
      const double dot = exact_dot(query_values.data() + h * width, key_values.data(), width);
      sum += query.head_weight[static_cast<size_t>(h)] * std::max(0.0, dot);
    }
    logits[static_cast<size_t>(j)] = keys.scales[static_cast<size_t>(j)] * sum;
  }
  return logits;
}

bool same_up_to_rounding(std::span<const uint8_t> a, float scale_a, std::span<const uint8_t> b,
                         float scale_b) {
  const std::array<double, 256>& e4m3 = e4m3_values();
  // Allowed in every channel: a step of e4m3 (2^-3 of a normal value), and for small channels the
  // share of another channel's bf16 rounding that the rotation spreads over all of them. Scales
  // that follow such a rounding shift every value by up to 2^-8, which counts as no step.
  const double spread = std::max(scale_a, scale_b);
  size_t steps = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double value_a = e4m3[a[i]] * scale_a;
    const double value_b = e4m3[b[i]] * scale_b;
    const double larger = std::max(std::fabs(value_a), std::fabs(value_b));
    const double difference = std::fabs(value_a - value_b);
    if (!(difference <= 0x1.1p-3 * larger + spread)) return false;
    if (difference > 0x1p-7 * larger) ++steps;
  }
  return 8 * steps <= a.size();
}

}  // namespace fovea::internal
