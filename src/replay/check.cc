#include "src/replay/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "fovea/numeric.h"
#include "fovea/sparse_mla.h"
#include "src/core/fp8_tile.h"
#include "src/core/parallel.h"
#include "src/replay/tensor_generator.h"

namespace fovea::internal {
namespace {

constexpr int64_t kKeyTile = 512;  // keys quantised at once
constexpr int64_t kRowWidth = 576;
constexpr int64_t kScaleTile = 128;  // channels that share a scale in v32

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

// Exact: a product of two codes is a multiple of 2^-18 below 2^18, a sum of 128 of them fits the 53
// bits of a double. Four sums, so that the compiler may use vectors.
double exact_dot(const double* a, const double* b, int64_t count) {
  double sums[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < count; i += 4) {
    for (int64_t lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

IndexQuantize plan_quantize(const ModelSpec& model, int64_t max_rows, int64_t num_heads) {
  IndexQuantizeProblem problem;
  problem.max_rows = max_rows;
  problem.num_heads = num_heads;
  problem.head_dim = model.index_dim;
  problem.rope_dim = model.rope_dim;
  problem.rope_style = model.index_rope_style;
  problem.hadamard = model.hadamard;
  problem.scale_mode = model.index_scale_mode;
  return IndexQuantize::plan(problem, Device::cpu(1), {"ref"});
}

int64_t longest_request(const Workload& workload) {
  int64_t longest = 1;
  for (int64_t r = 0; r < workload.num_requests(); ++r) {
    longest = std::max(longest, workload.request(r).num_rows());
  }
  return longest;
}

// NaN is the worst of all.
bool is_worse(double value, double worst) { return !std::isnan(worst) && !(value <= worst); }

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

// The latent key row as the cache gives it back.
void cached_latent_key(const RowInputs& inputs, int64_t layer, uint64_t token_id, double* key) {
  std::array<bf16_t, kRowWidth> row;
  inputs.latent_key(layer, token_id, row);
  const ModelSpec& model = inputs.model();
  if (model.row_format == RowFormat::kV32) {
    std::array<uint8_t, kScaleTile> codes;
    for (int64_t c = 0; c < kLatentDim; c += kScaleTile) {
      bf16_t* const tile = row.data() + c;
      const float scale =
          quantize_tile(tile, kScaleTile, latent_tile_scale, model.kv_scale_mode, codes.data());
      dequantize_tile(codes.data(), kScaleTile, scale, tile);
    }
  }
  for (size_t c = 0; c < row.size(); ++c) key[c] = bf16_to_float(row[c]);
}

}  // namespace

struct RowChecker::IndexKeys {
  std::vector<uint8_t> codes;  // [count, Di]
  std::vector<float> scales;   // [count]
};

RowChecker::RowChecker(const RowInputs& inputs, std::vector<int64_t> layers, int64_t topk)
    : inputs_(inputs),
      layers_(std::move(layers)),
      topk_(topk),
      quantize_keys_(plan_quantize(inputs.model(), kKeyTile, 1)),
      quantize_query_(plan_quantize(inputs.model(), 1, inputs.model().index_heads)) {
  const int64_t positions = longest_request(inputs.workload());
  cos_sin_.resize(static_cast<size_t>(positions * inputs.model().rope_dim));
  generate_cos_sin(positions, inputs.model().rope_dim, cos_sin_.data());
}

void RowChecker::quantize_keys(int64_t request, int64_t layer, int64_t count,
                               IndexKeys* keys) const {
  const ModelSpec& model = inputs_.model();
  const int64_t width = model.index_dim;
  keys->codes.resize(static_cast<size_t>(count * width));
  keys->scales.resize(static_cast<size_t>(count));
  std::vector<float> weight(static_cast<size_t>(width)), bias(weight.size());
  inputs_.norm(layer, weight, bias);
  std::vector<bf16_t> raw(static_cast<size_t>(kKeyTile * width)), no_query(raw.size());
  std::vector<uint8_t> query_codes(raw.size());
  std::vector<float> gate(kKeyTile), query_scale(kKeyTile), head_weight(kKeyTile);
  std::vector<int32_t> positions(kKeyTile);
  HostBuffer workspace(quantize_keys_.workspace_bytes());
  const auto max_positions = static_cast<int64_t>(cos_sin_.size()) / model.rope_dim;
  for (int64_t first = 0; first < count; first += kKeyTile) {
    const int64_t rows = std::min(kKeyTile, count - first);
    for (int64_t i = 0; i < rows; ++i) {
      const uint64_t token = inputs_.workload().token_id(request, first + i);
      inputs_.index_key(
          layer, token,
          std::span(raw).subspan(static_cast<size_t>(i * width), static_cast<size_t>(width)));
      positions[static_cast<size_t>(i)] = static_cast<int32_t>(first + i);
    }
    // The operator quantises queries beside keys: one head of zeros.
    quantize_keys_.run({make_tensor(no_query.data(), DType::kBf16, {rows, 1, width}),
                        make_tensor(raw.data(), DType::kBf16, {rows, width}),
                        make_tensor(weight.data(), DType::kF32, {width}),
                        make_tensor(bias.data(), DType::kF32, {width}),
                        make_tensor(gate.data(), DType::kF32, {rows, 1}),
                        make_tensor(positions.data(), DType::kI32, {rows}),
                        make_tensor(cos_sin_.data(), DType::kF32, {max_positions, model.rope_dim}),
                        make_tensor(query_codes.data(), DType::kU8, {rows, 1, width}),
                        make_tensor(query_scale.data(), DType::kF32, {rows, 1}),
                        make_tensor(keys->codes.data() + first * width, DType::kU8, {rows, width}),
                        make_tensor(keys->scales.data() + first, DType::kF32, {rows}),
                        make_tensor(head_weight.data(), DType::kF32, {rows, 1})},
                       workspace.workspace());
  }
}

std::vector<double> RowChecker::logits(const CheckRow& row, const IndexKeys& keys) const {
  const ModelSpec& model = inputs_.model();
  const int64_t layer = layers_[static_cast<size_t>(row.layer)];
  const int64_t heads = model.index_heads;
  const int64_t width = model.index_dim;
  const uint64_t token = inputs_.workload().token_id(row.request, row.position);
  std::vector<bf16_t> raw(static_cast<size_t>(heads * width)), raw_key(static_cast<size_t>(width));
  std::vector<float> norm_weight(raw_key.size()), norm_bias(raw_key.size());
  std::vector<float> gate(static_cast<size_t>(heads)), scale(gate.size()), head_weight(gate.size());
  std::vector<uint8_t> codes(raw.size()), key_codes(raw_key.size());
  float key_scale = 0;
  inputs_.index_query(layer, row.request, row.position, raw);
  inputs_.index_key(layer, token, raw_key);
  inputs_.head_gate(layer, token, gate);
  inputs_.norm(layer, norm_weight, norm_bias);
  auto position = static_cast<int32_t>(row.position);
  HostBuffer workspace(quantize_query_.workspace_bytes());
  const auto max_positions = static_cast<int64_t>(cos_sin_.size()) / model.rope_dim;
  quantize_query_.run(
      {make_tensor(raw.data(), DType::kBf16, {1, heads, width}),
       make_tensor(raw_key.data(), DType::kBf16, {1, width}),
       make_tensor(norm_weight.data(), DType::kF32, {width}),
       make_tensor(norm_bias.data(), DType::kF32, {width}),
       make_tensor(gate.data(), DType::kF32, {1, heads}), make_tensor(&position, DType::kI32, {1}),
       make_tensor(cos_sin_.data(), DType::kF32, {max_positions, model.rope_dim}),
       make_tensor(codes.data(), DType::kU8, {1, heads, width}),
       make_tensor(scale.data(), DType::kF32, {1, heads}),
       make_tensor(key_codes.data(), DType::kU8, {1, width}),
       make_tensor(&key_scale, DType::kF32, {1}),
       make_tensor(head_weight.data(), DType::kF32, {1, heads})},
      workspace.workspace());
  const std::array<double, 256>& e4m3 = e4m3_values();
  std::vector<double> query(raw.size()), key(raw_key.size());
  std::transform(codes.begin(), codes.end(), query.begin(), [&](uint8_t c) { return e4m3[c]; });
  std::vector<double> result(static_cast<size_t>(row.position + 1));
  for (int64_t j = 0; j <= row.position; ++j) {
    const uint8_t* const code = keys.codes.data() + j * width;
    std::transform(code, code + width, key.begin(), [&](uint8_t c) { return e4m3[c]; });
    double sum = 0;
    for (int64_t h = 0; h < heads; ++h) {
      const double dot = exact_dot(query.data() + h * width, key.data(), width);
      sum += head_weight[static_cast<size_t>(h)] * std::max(0.0, dot);
    }
    result[static_cast<size_t>(j)] = keys.scales[static_cast<size_t>(j)] * sum;
  }
  return result;
}

void RowChecker::fail(const CheckSample& sample, const char* op, const char* kind,
                      std::string detail, CheckVerdict* verdict) const {
  CheckFailure failure;
  failure.request = inputs_.workload().request(sample.row.request).trace_row;
  failure.position = sample.row.position;
  failure.layer = layers_[static_cast<size_t>(sample.row.layer)];
  failure.layer_kind = inputs_.model().layer_kinds[static_cast<size_t>(failure.layer)];
  failure.op = op;
  failure.kind = kind;
  failure.detail = std::move(detail);
  verdict->failures.push_back(std::move(failure));
}

void RowChecker::check_selection(const CheckSample& sample, const IndexKeys& keys,
                                 CheckVerdict* verdict) const {
  const int64_t length = sample.row.position + 1;
  const auto wanted = static_cast<size_t>(std::min(length, topk_));
  verdict->selecting = length > topk_;
  const auto selection_fails = [&](std::string detail) {
    fail(sample, "index_select", "selection", std::move(detail), verdict);
  };
  std::vector<bool> selected(static_cast<size_t>(length), false);
  for (const int32_t position : sample.positions) {
    if (position < 0 || position >= length) {
      selection_fails("a selected slot holds no visible token of the request");
      return;
    }
    if (selected[static_cast<size_t>(position)]) {
      selection_fails("position " + std::to_string(position) + " is selected twice");
      return;
    }
    selected[static_cast<size_t>(position)] = true;
  }
  if (sample.positions.size() != wanted) {
    selection_fails(std::to_string(sample.positions.size()) + " keys are selected, expected " +
                    std::to_string(wanted));
    return;
  }
  if (!verdict->selecting) return;  // the right number of distinct positions: all of them
  const std::vector<double> row_logits = logits(sample.row, keys);
  std::vector<double> sorted = row_logits;
  std::nth_element(sorted.begin(), sorted.begin() + (topk_ - 1), sorted.end(), std::greater<>());
  const double boundary = sorted[static_cast<size_t>(topk_ - 1)];
  double largest = 0, misplaced = 0;
  int64_t worst = 0;
  for (int64_t j = 0; j < length; ++j) {
    const double logit = row_logits[static_cast<size_t>(j)];
    largest = std::max(largest, std::fabs(logit));
    const double distance = selected[static_cast<size_t>(j)] ? boundary - logit : logit - boundary;
    if (distance > misplaced) {
      misplaced = distance;
      worst = j;
    }
  }
  verdict->selection_slack = largest > 0 ? misplaced / largest : 0;
  if (misplaced > kSelectionTolerance * largest) {
    selection_fails("position " + std::to_string(worst) + " with logit " +
                    number(row_logits[static_cast<size_t>(worst)]) + " is " +
                    (selected[static_cast<size_t>(worst)] ? "selected" : "left out") +
                    ", the boundary is " + number(boundary));
  }
}

RowChecker::HeadError RowChecker::check_head(std::span<const bf16_t> raw_query,
                                             std::span<const double> keys,
                                             const CheckSample& sample, int64_t head) const {
  const auto count = static_cast<int64_t>(sample.positions.size());
  std::vector<double> query(kRowWidth), weights(static_cast<size_t>(count)), output(kLatentDim);
  std::transform(raw_query.begin(), raw_query.end(), query.begin(), bf16_to_float);
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    const double score = static_cast<double>(inputs_.model().softmax_scale) *
                         exact_dot(query.data(), keys.data() + i * kRowWidth, kRowWidth);
    weights[static_cast<size_t>(i)] = score;
    largest = std::max(largest, score);
  }
  double sum = 0;
  for (double& weight : weights) sum += (weight = std::exp(weight - largest));
  for (int64_t i = 0; i < count; ++i) {
    const double weight = weights[static_cast<size_t>(i)] / sum;
    const double* const value = keys.data() + i * kRowWidth;
    for (int64_t c = 0; c < kLatentDim; ++c) output[static_cast<size_t>(c)] += weight * value[c];
  }
  double error = 0, norm = 0;
  for (int64_t c = 0; c < kLatentDim; ++c) {
    const double found = bf16_to_float(sample.output[static_cast<size_t>(head * kLatentDim + c)]);
    const double expected = output[static_cast<size_t>(c)];
    error += (found - expected) * (found - expected);
    norm += expected * expected;
  }
  const double lse = largest + std::log(sum);
  return {std::sqrt(error / norm), std::fabs(sample.lse[static_cast<size_t>(head)] - lse)};
}

void RowChecker::check_attention(const CheckSample& sample, CheckVerdict* verdict) const {
  const int64_t layer = layers_[static_cast<size_t>(sample.row.layer)];
  const int64_t heads = inputs_.num_heads();
  std::vector<bf16_t> query(static_cast<size_t>(heads * kRowWidth));
  inputs_.query(layer, sample.row.request, sample.row.position, query);
  std::vector<double> keys(sample.positions.size() * kRowWidth);
  for (size_t i = 0; i < sample.positions.size(); ++i) {
    const uint64_t token = inputs_.workload().token_id(sample.row.request, sample.positions[i]);
    cached_latent_key(inputs_, layer, token, keys.data() + i * kRowWidth);
  }
  int64_t rms_head = 0, lse_head = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const HeadError error = check_head(
        std::span(query).subspan(static_cast<size_t>(h * kRowWidth), kRowWidth), keys, sample, h);
    if (is_worse(error.rms, verdict->worst_rms)) verdict->worst_rms = error.rms, rms_head = h;
    if (is_worse(error.lse, verdict->worst_lse)) verdict->worst_lse = error.lse, lse_head = h;
  }
  const auto fail_head = [&](const char* kind, int64_t head, double error, double allowed) {
    fail(sample, "sparse_mla", kind,
         "head " + std::to_string(head) + " is off by " + number(error) + ", allowed " +
             number(allowed),
         verdict);
  };
  if (!(verdict->worst_rms <= kOutputTolerance)) {
    fail_head("output", rms_head, verdict->worst_rms, kOutputTolerance);
  }
  if (!(verdict->worst_lse <= kLseTolerance)) {
    fail_head("lse", lse_head, verdict->worst_lse, kLseTolerance);
  }
}

std::vector<CheckVerdict> RowChecker::check(std::span<const CheckSample> samples) const {
  // Samples of one request and layer share their index keys.
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_request;
  for (size_t i = 0; i < samples.size(); ++i) {
    by_request[{samples[i].row.request, samples[i].row.layer}].push_back(i);
  }
  std::vector<std::vector<size_t>> groups;
  for (auto& [key, members] : by_request) groups.push_back(std::move(members));
  std::vector<CheckVerdict> verdicts(samples.size());
  ParallelFor(static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t g = begin; g < end; ++g) {
      const std::vector<size_t>& members = groups[static_cast<size_t>(g)];
      int64_t needed = 0;  // rows that fit topk need no logits
      for (const size_t i : members) {
        const int64_t length = samples[i].row.position + 1;
        if (length > topk_) needed = std::max(needed, length);
      }
      IndexKeys keys;
      const CheckRow& row = samples[members.front()].row;
      quantize_keys(row.request, layers_[static_cast<size_t>(row.layer)], needed, &keys);
      for (const size_t i : members) {
        check_selection(samples[i], keys, &verdicts[i]);
        // Output over a selection with foreign or repeated slots has no meaning.
        const bool usable = verdicts[i].failures.empty() || verdicts[i].selection_slack > 0;
        if (usable) check_attention(samples[i], &verdicts[i]);
      }
    }
  });
  return verdicts;
}

void summarize_check(std::span<const CheckRow> rows, std::span<const CheckVerdict> verdicts,
                     CheckSummary* summary) {
  constexpr size_t kMaxFailures = 32;
  std::set<int64_t> requests;
  for (size_t i = 0; i < rows.size(); ++i) {
    const CheckVerdict& verdict = verdicts[i];
    requests.insert(rows[i].request);
    ++summary->rows;
    ++(rows[i].decode ? summary->rows_decode : summary->rows_prefill);
    summary->rows_selecting += verdict.selecting ? 1 : 0;
    summary->mismatches += verdict.failures.empty() ? 0 : 1;
    const auto raise = [](double value, double* worst) {
      if (is_worse(value, *worst)) *worst = value;
    };
    raise(verdict.worst_rms, &summary->worst);
    raise(verdict.worst_lse, &summary->worst_lse);
    raise(verdict.selection_slack, &summary->selection_slack);
    for (const CheckFailure& failure : verdict.failures) {
      if (summary->failures.size() < kMaxFailures) summary->failures.push_back(failure);
    }
  }
  summary->requests = static_cast<int64_t>(requests.size());
}

}  // namespace fovea::internal

namespace fovea {

std::string CheckFailure::message() const {
  return "request " + std::to_string(request) + ", position " + std::to_string(position) +
         ", layer " + std::to_string(layer) + " (" + layer_kind + "), " + op + ": " + kind + ": " +
         detail;
}

}  // namespace fovea
