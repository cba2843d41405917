#include "src/replay/dsa_index_codes.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "fovea/index_logits.h"
#include "fovea/numeric.h"
#include "fovea/stream.h"
#include "src/core/tensor_generator.h"
#include "src/serving/operator_options.h"

namespace fovea::internal {
namespace {

constexpr int64_t kKeyTile = 512;  // keys quantised at once

// Callers run in parallel over rows.
Device one_thread(const Device& device) {
  return device.kind == DeviceKind::kCpu ? Device::cpu(1) : device;
}

IndexQuantize plan_quantize(const DsaShape& shape, int64_t max_rows, const CodecChoice& choice) {
  IndexQuantizeProblem problem;
  problem.max_rows = max_rows;
  problem.num_heads = shape.index_heads;
  problem.head_dim = shape.index_dim;
  problem.rope_dim = shape.rope_dim;
  problem.rope_style = shape.index_rope_style;
  problem.hadamard = shape.hadamard;
  problem.scale_mode = shape.index_scale_mode;
  return IndexQuantize::plan(problem, one_thread(choice.device),
                             OperatorOptions("replay", choice.implementation)("index_quantize"));
}

// Appends what the device has written.
template <class T>
void append(StagedTensor* tensor, int64_t rows, std::vector<T>* values) {
  tensor->download(0, rows, {});
  synchronize(tensor->device());
  const TensorView view = tensor->host(rows);
  const auto* const data = static_cast<const T*>(view.data);
  values->insert(values->end(), data, data + view.num_elements());
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

double selection_tolerance(int64_t num_heads, int64_t head_dim, const CodecChoice& run) {
  const IndexLogits plan = IndexLogits::plan(
      {.layout = IndexLayout::kRagged, .max_rows = 1, .num_heads = num_heads, .head_dim = head_dim},
      run.device, OperatorOptions("replay", run.implementation)("index_logits"));
  return plan.implementation().name == "cuda_sm90" ? 0x1p-10 : 0x1p-16;
}

IndexCodec::IndexCodec(const DsaInputs& inputs, const CodecChoice& choice)
    : inputs_(inputs),
      device_(one_thread(choice.device)),
      cos_sin_(device_, DType::kF32, {inputs.workload().max_rows(), inputs.shape().rope_dim}),
      num_positions_(inputs.workload().max_rows()),
      quantize_keys_(plan_quantize(inputs.shape(), kKeyTile, choice)),
      quantize_query_(plan_quantize(inputs.shape(), 1, choice)) {
  generate_cos_sin(num_positions_, inputs.shape().rope_dim,
                   static_cast<float*>(cos_sin_.host(num_positions_).data));
  cos_sin_.upload(0, num_positions_, {});
}

void IndexCodec::run(const IndexQuantize& plan, const IndexQuantizeTensors& tensors) const {
  DeviceBuffer workspace(device_, plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
}

IndexKeys IndexCodec::keys(int64_t layer, int64_t request, int64_t count) const {
  const int64_t width = inputs_.shape().index_dim;
  IndexKeys keys;
  StagedTensor raw(device_, DType::kBf16, {kKeyTile, width});
  StagedTensor positions(device_, DType::kI32, {kKeyTile});
  StagedTensor norm(device_, DType::kF32, {2, width});  // weight, bias
  StagedTensor codes(device_, DType::kU8, {kKeyTile, width});
  StagedTensor scales(device_, DType::kF32, {kKeyTile});
  inputs_.norm(layer, norm.row<float>(0), norm.row<float>(1));
  norm.upload(0, 2, {});
  for (int64_t first = 0; first < count; first += kKeyTile) {
    const int64_t rows = std::min(kKeyTile, count - first);
    for (int64_t i = 0; i < rows; ++i) {
      const uint64_t token = inputs_.workload().token_id(request, first + i);
      inputs_.index_key(layer, token, raw.row<bf16_t>(i));
      positions.row<int32_t>(i)[0] = static_cast<int32_t>(first + i);
    }
    raw.upload(0, rows, {});
    positions.upload(0, rows, {});
    IndexQuantizeTensors tensors;
    tensors.k = raw.on_device(rows);
    tensors.norm_weight = norm.row_on_device(0);
    tensors.norm_bias = norm.row_on_device(1);
    tensors.positions = positions.on_device(rows);
    tensors.cos_sin = cos_sin_.on_device(num_positions_);
    tensors.k_fp8 = codes.on_device(rows);
    tensors.k_scale = scales.on_device(rows);
    run(quantize_keys_, tensors);
    append(&codes, rows, &keys.codes);
    append(&scales, rows, &keys.scales);
  }
  return keys;
}

IndexQuery IndexCodec::query(int64_t layer, int64_t request, int64_t position) const {
  const int64_t heads = inputs_.shape().index_heads;
  const int64_t width = inputs_.shape().index_dim;
  StagedTensor raw(device_, DType::kBf16, {1, heads, width}),
      gate(device_, DType::kF32, {1, heads});
  StagedTensor positions(device_, DType::kI32, {1});
  StagedTensor codes(device_, DType::kU8, {1, heads, width});
  StagedTensor scales(device_, DType::kF32, {1, heads}), weights(device_, DType::kF32, {1, heads});
  inputs_.index_query(layer, request, position, raw.row<bf16_t>(0));
  inputs_.head_gate(layer, inputs_.workload().token_id(request, position), gate.row<float>(0));
  positions.row<int32_t>(0)[0] = static_cast<int32_t>(position);
  for (StagedTensor* input : {&raw, &gate, &positions}) input->upload(0, 1, {});
  IndexQuantizeTensors tensors;
  tensors.q = raw.on_device(1);
  tensors.head_gate = gate.on_device(1);
  tensors.positions = positions.on_device(1);
  tensors.cos_sin = cos_sin_.on_device(num_positions_);
  tensors.q_fp8 = codes.on_device(1);
  tensors.q_scale = scales.on_device(1);
  tensors.head_weight = weights.on_device(1);
  run(quantize_query_, tensors);
  IndexQuery query;
  append(&codes, 1, &query.codes);
  append(&scales, 1, &query.scales);
  append(&weights, 1, &query.head_weight);
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
