#include "src/replay/dsa_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "fovea/numeric.h"
#include "fovea/sparse_mla.h"
#include "src/core/fp8_tile.h"
#include "src/core/parallel.h"
#include "src/replay/fp64_rows.h"

namespace fovea::internal {
namespace {

constexpr int64_t kScaleTile = 128;  // channels that share a scale in v32

// The latent key row as the cache gives it back.
void cached_latent_key(const DsaInputs& inputs, int64_t layer, uint64_t token_id, double* key) {
  std::array<bf16_t, kDsaRowWidth> row;
  inputs.latent_key(layer, token_id, row);
  const DsaShape& shape = inputs.shape();
  if (shape.row_format == RowFormat::kV32) {
    std::array<uint8_t, kScaleTile> codes;
    for (int64_t c = 0; c < kLatentDim; c += kScaleTile) {
      bf16_t* const tile = row.data() + c;
      const float scale =
          quantize_tile(tile, kScaleTile, latent_tile_scale, shape.kv_scale_mode, codes.data());
      dequantize_tile(codes.data(), kScaleTile, scale, tile);
    }
  }
  for (size_t c = 0; c < row.size(); ++c) key[c] = bf16_to_float(row[c]);
}

}  // namespace

DsaChecker::DsaChecker(const DsaInputs& inputs, std::vector<int64_t> layers, int64_t topk,
                       const CodecChoice& run)
    : inputs_(inputs),
      layers_(std::move(layers)),
      topk_(topk),
      reference_(inputs, {"ref"}),
      run_(inputs, run),
      selection_tolerance_(
          selection_tolerance(inputs.shape().index_heads, inputs.shape().index_dim, run)) {}

void DsaChecker::fail(const DsaSample& sample, const char* op, const char* kind, std::string detail,
                      CheckVerdict* verdict) const {
  CheckFailure failure;
  failure.request = inputs_.workload().request(sample.row.request).trace_row;
  failure.position = sample.row.position;
  failure.layer = layers_[static_cast<size_t>(sample.row.layer)];
  failure.layer_kind = inputs_.model().layer_kind(failure.layer);
  failure.op = op;
  failure.kind = kind;
  failure.detail = std::move(detail);
  verdict->failures.push_back(std::move(failure));
}

void DsaChecker::check_selection(const DsaSample& sample, const IndexKeys& keys,
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
  // Not selecting: the right number of distinct positions is all of them.
  if (verdict->selecting) check_logits(sample, selected, keys, verdict);
}

DsaChecker::Misplacement DsaChecker::misplacement(const std::vector<bool>& selected,
                                                  const std::vector<double>& logits) const {
  std::vector<double> sorted = logits;
  std::nth_element(sorted.begin(), sorted.begin() + (topk_ - 1), sorted.end(), std::greater<>());
  Misplacement worst;
  worst.boundary = sorted[static_cast<size_t>(topk_ - 1)];
  double largest = 0, distance = 0;
  for (size_t j = 0; j < logits.size(); ++j) {
    largest = std::max(largest, std::fabs(logits[j]));
    const double outside = selected[j] ? worst.boundary - logits[j] : logits[j] - worst.boundary;
    if (outside > distance) {
      distance = outside;
      worst.position = static_cast<int64_t>(j);
      worst.logit = logits[j];
    }
  }
  worst.slack = largest > 0 ? distance / largest : 0;
  return worst;
}

bool DsaChecker::same_codes(const CheckRow& row, const IndexQuery& query,
                            const IndexQuery& run_query, const IndexKeys& keys,
                            const IndexKeys& run_keys) const {
  const auto width = static_cast<size_t>(inputs_.shape().index_dim);
  const auto rows_agree = [&](const auto& a, const auto& b, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!same_up_to_rounding(std::span(a.codes).subspan(i * width, width), a.scales[i],
                               std::span(b.codes).subspan(i * width, width), b.scales[i])) {
        return false;
      }
    }
    return true;
  };
  for (size_t h = 0; h < query.head_weight.size(); ++h) {
    // gate * constants * scale, of which only the scale may differ.
    const double expected = static_cast<double>(query.head_weight[h]) / query.scales[h];
    const double found = static_cast<double>(run_query.head_weight[h]) / run_query.scales[h];
    if (!(std::fabs(found - expected) <= 1e-6 * std::fabs(expected))) return false;
  }
  return rows_agree(query, run_query, query.scales.size()) &&
         rows_agree(keys, run_keys, static_cast<size_t>(row.position + 1));
}

void DsaChecker::check_logits(const DsaSample& sample, const std::vector<bool>& selected,
                              const IndexKeys& keys, CheckVerdict* verdict) const {
  const CheckRow& row = sample.row;
  const int64_t layer = layers_[static_cast<size_t>(row.layer)];
  const int64_t length = row.position + 1;
  const IndexQuery query = reference_.query(layer, row.request, row.position);
  const Misplacement worst = misplacement(selected, fp64_logits(query, keys, length));
  verdict->selection_slack = worst.slack;
  if (worst.slack <= selection_tolerance_) return;
  const IndexQuery run_query = run_.query(layer, row.request, row.position);
  const IndexKeys run_keys = run_.keys(layer, row.request, length);
  if (!same_codes(row, query, run_query, keys, run_keys)) {
    fail(sample, "index_quantize", "selection",
         "index codes differ from the reference by more than a rounding", verdict);
    return;
  }
  const Misplacement run_worst = misplacement(selected, fp64_logits(run_query, run_keys, length));
  if (run_worst.slack <= selection_tolerance_) {
    verdict->selection_slack = run_worst.slack;
    verdict->requantised = true;
    return;
  }
  fail(sample, "index_select", "selection",
       "position " + std::to_string(worst.position) + " with logit " + error_text(worst.logit) +
           " is " + (selected[static_cast<size_t>(worst.position)] ? "selected" : "left out") +
           ", the boundary is " + error_text(worst.boundary),
       verdict);
}

DsaChecker::HeadError DsaChecker::check_head(std::span<const bf16_t> raw_query,
                                             std::span<const double> keys, const DsaSample& sample,
                                             int64_t head) const {
  const auto count = static_cast<int64_t>(sample.positions.size());
  std::vector<double> query(kDsaRowWidth), weights(static_cast<size_t>(count)), output(kLatentDim);
  std::transform(raw_query.begin(), raw_query.end(), query.begin(), bf16_to_float);
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    const double score = static_cast<double>(inputs_.shape().softmax_scale) *
                         dot(query.data(), keys.data() + i * kDsaRowWidth, kDsaRowWidth);
    weights[static_cast<size_t>(i)] = score;
    largest = std::max(largest, score);
  }
  double sum = 0;
  for (double& weight : weights) sum += (weight = std::exp(weight - largest));
  for (int64_t i = 0; i < count; ++i) {
    const double weight = weights[static_cast<size_t>(i)] / sum;
    const double* const value = keys.data() + i * kDsaRowWidth;
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

void DsaChecker::check_attention(const DsaSample& sample, CheckVerdict* verdict) const {
  const int64_t layer = layers_[static_cast<size_t>(sample.row.layer)];
  const int64_t heads = inputs_.num_heads();
  std::vector<bf16_t> query(static_cast<size_t>(heads * kDsaRowWidth));
  inputs_.query(layer, sample.row.request, sample.row.position, query);
  std::vector<double> keys(sample.positions.size() * kDsaRowWidth);
  for (size_t i = 0; i < sample.positions.size(); ++i) {
    const uint64_t token = inputs_.workload().token_id(sample.row.request, sample.positions[i]);
    cached_latent_key(inputs_, layer, token, keys.data() + i * kDsaRowWidth);
  }
  int64_t rms_head = 0, lse_head = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const HeadError error =
        check_head(std::span(query).subspan(static_cast<size_t>(h * kDsaRowWidth), kDsaRowWidth),
                   keys, sample, h);
    if (is_worse(error.rms, verdict->worst_rms)) verdict->worst_rms = error.rms, rms_head = h;
    if (is_worse(error.lse, verdict->worst_lse)) verdict->worst_lse = error.lse, lse_head = h;
  }
  const auto fail_head = [&](const char* kind, int64_t head, double error, double allowed) {
    fail(sample, "sparse_mla", kind,
         "head " + std::to_string(head) + " is off by " + error_text(error) + ", allowed " +
             error_text(allowed),
         verdict);
  };
  if (!(verdict->worst_rms <= kOutputTolerance)) {
    fail_head("output", rms_head, verdict->worst_rms, kOutputTolerance);
  }
  if (!(verdict->worst_lse <= kLseTolerance)) {
    fail_head("lse", lse_head, verdict->worst_lse, kLseTolerance);
  }
}

std::vector<CheckVerdict> DsaChecker::check(std::span<const DsaSample> samples) const {
  // Samples of one request and layer share their index keys.
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_request;
  for (size_t i = 0; i < samples.size(); ++i) {
    by_request[{samples[i].row.request, samples[i].row.layer}].push_back(i);
  }
  std::vector<std::vector<size_t>> groups;
  groups.reserve(by_request.size());
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
      const CheckRow& row = samples[members.front()].row;
      const IndexKeys keys =
          reference_.keys(layers_[static_cast<size_t>(row.layer)], row.request, needed);
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

}  // namespace fovea::internal
