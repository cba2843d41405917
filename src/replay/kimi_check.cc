#include "src/replay/kimi_check.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "fovea/causal_conv1d.h"
#include "fovea/numeric.h"
#include "fovea/sparse_mla.h"
#include "src/core/parallel.h"
#include "src/kda/kda_math.h"
#include "src/replay/fp64_rows.h"

namespace fovea::internal {
namespace {

// One KDA layer of one request, token after token.
class Recurrence {
 public:
  Recurrence(const KimiInputs& inputs, int64_t layer, int64_t request)
      : inputs_(inputs),
        layer_(layer),
        request_(request),
        heads_(inputs.num_heads()),
        dim_k_(inputs.shape().head_dim_k),
        dim_v_(inputs.shape().head_dim_v),
        channels_(inputs.num_channels()),
        weight_(size(channels_ * kConvWidth)),
        bias_(size(channels_)),
        a_log_(size(heads_)),
        dt_bias_(size(heads_ * dim_k_)),
        history_(size(channels_ * kConvWidth), 0.0),
        convolved_(size(channels_)),
        decay_(size(dim_k_)),
        state_(size(heads_ * dim_v_ * dim_k_), 0.0),
        raw_(size(channels_)),
        gate_(size(heads_ * dim_k_)),
        beta_(size(heads_)) {
    inputs.weights(layer, {weight_, bias_, a_log_, dt_bias_});
  }

  // Takes the token of `position`; with `out`, [H, V], its outputs.
  void step(int64_t position, double* out) {
    const uint64_t token = inputs_.workload().token_id(request_, position);
    inputs_.qkv(layer_, token, raw_);
    inputs_.gate(layer_, token, gate_);
    inputs_.beta(layer_, token, beta_);
    convolve();
    for (int64_t h = 0; h < heads_; ++h) advance(h, out == nullptr ? nullptr : out + h * dim_v_);
  }

 private:
  static size_t size(int64_t count) { return static_cast<size_t>(count); }

  void convolve() {
    for (int64_t c = 0; c < channels_; ++c) {
      double* const past = history_.data() + c * kConvWidth;
      std::copy(past + 1, past + kConvWidth, past);
      past[kConvHistory] = bf16_to_float(raw_[size(c)]);
      double sum = bf16_to_float(bias_[size(c)]);
      for (int64_t w = 0; w < kConvWidth; ++w) {
        sum += bf16_to_float(weight_[size(c * kConvWidth + w)]) * past[w];
      }
      const double y = sum * kda_sigmoid(sum);
      convolved_[size(c)] = bf16_to_float(bf16_from_float(static_cast<float>(y)));
    }
  }

  void normalise(double* values) const {
    const double factor = kda_inverse_norm(dot(values, values, dim_k_));
    for (int64_t c = 0; c < dim_k_; ++c) values[c] *= factor;
  }

  void advance(int64_t h, double* out) {
    double* const query = convolved_.data() + h * dim_k_;
    double* const key = convolved_.data() + (heads_ + h) * dim_k_;
    const double* const value = convolved_.data() + 2 * heads_ * dim_k_ + h * dim_v_;
    normalise(query);
    normalise(key);
    const double rate = std::exp(static_cast<double>(a_log_[size(h)]));
    for (int64_t c = 0; c < dim_k_; ++c) {
      const size_t i = size(h * dim_k_ + c);
      const auto a = static_cast<double>(bf16_to_float(gate_[i]) + dt_bias_[i]);
      decay_[size(c)] = std::exp(-rate * kda_softplus(a));
    }
    const double beta = kda_sigmoid(static_cast<double>(beta_[size(h)]));
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim_k_));
    for (int64_t v = 0; v < dim_v_; ++v) {
      double* const row = state_.data() + (h * dim_v_ + v) * dim_k_;
      for (int64_t c = 0; c < dim_k_; ++c) row[c] *= decay_[size(c)];
      const double u = beta * (value[v] - dot(row, key, dim_k_));
      for (int64_t c = 0; c < dim_k_; ++c) row[c] += u * key[c];
      if (out != nullptr) out[v] = scale * dot(row, query, dim_k_);
    }
  }

  const KimiInputs& inputs_;
  int64_t layer_, request_, heads_, dim_k_, dim_v_, channels_;
  std::vector<bf16_t> weight_, bias_;
  std::vector<float> a_log_, dt_bias_;
  std::vector<double> history_;  // [D][4], oldest first
  std::vector<double> convolved_, decay_;
  std::vector<double> state_;  // [H][V][K]
  std::vector<bf16_t> raw_, gate_;
  std::vector<float> beta_;
};

}  // namespace

// Samples of one request and layer.
struct KimiChecker::Group {
  int64_t request = 0;
  int64_t layer = 0;  // model layer id
  std::vector<size_t> members;
};

void KimiChecker::judge(const KimiSample& sample, int64_t width, std::span<const double> expected,
                        std::span<const double> lse, CheckVerdict* verdict) const {
  const int64_t heads = inputs_.num_heads();
  const int64_t layer = layers_[static_cast<size_t>(sample.row.layer)];
  int64_t rms_head = 0, lse_head = 0;
  for (int64_t h = 0; h < heads; ++h) {
    double error = 0, norm = 0;
    for (int64_t c = 0; c < width; ++c) {
      const auto i = static_cast<size_t>(h * width + c);
      const double found = bf16_to_float(sample.output[i]);
      error += (found - expected[i]) * (found - expected[i]);
      norm += expected[i] * expected[i];
    }
    const double rms = std::sqrt(error / norm);
    if (is_worse(rms, verdict->worst_rms)) verdict->worst_rms = rms, rms_head = h;
    if (lse.empty()) continue;
    const auto i = static_cast<size_t>(h);
    const double off = std::fabs(sample.lse[i] - lse[i]);
    if (is_worse(off, verdict->worst_lse)) verdict->worst_lse = off, lse_head = h;
  }
  const auto fail = [&](const char* kind, int64_t head, double error, double allowed) {
    CheckFailure failure;
    failure.request = inputs_.workload().request(sample.row.request).trace_row;
    failure.position = sample.row.position;
    failure.layer = layer;
    failure.layer_kind = inputs_.model().layer_kind(layer);
    failure.op = !lse.empty() ? "dense_mla" : sample.row.decode ? "kda_verify" : "kda_prefill";
    failure.kind = kind;
    failure.detail = "head " + std::to_string(head) + " is off by " + error_text(error) +
                     ", allowed " + error_text(allowed);
    verdict->failures.push_back(std::move(failure));
  };
  if (!(verdict->worst_rms <= kOutputTolerance)) {
    fail("output", rms_head, verdict->worst_rms, kOutputTolerance);
  }
  if (!(verdict->worst_lse <= kLseTolerance)) {
    fail("lse", lse_head, verdict->worst_lse, kLseTolerance);
  }
}

void KimiChecker::check_recurrence(std::span<const KimiSample> samples, const Group& group,
                                   std::vector<CheckVerdict>* verdicts) const {
  std::map<int64_t, std::vector<size_t>> by_position;
  for (const size_t i : group.members) by_position[samples[i].row.position].push_back(i);
  Recurrence recurrence(inputs_, group.layer, group.request);
  const int64_t width = inputs_.shape().head_dim_v;
  std::vector<double> expected(static_cast<size_t>(inputs_.num_heads() * width));
  const int64_t last = by_position.rbegin()->first;
  for (int64_t position = 0; position <= last; ++position) {
    const auto found = by_position.find(position);
    if (found == by_position.end()) {
      recurrence.step(position, nullptr);
      continue;
    }
    recurrence.step(position, expected.data());
    for (const size_t i : found->second) {
      judge(samples[i], width, expected, {}, &(*verdicts)[i]);
    }
  }
}

void KimiChecker::check_attention(const KimiSample& sample, CheckVerdict* verdict) const {
  const int64_t layer = layers_[static_cast<size_t>(sample.row.layer)];
  const int64_t heads = inputs_.num_heads(), length = sample.row.position + 1;
  const uint64_t token = inputs_.workload().token_id(sample.row.request, sample.row.position);
  std::vector<bf16_t> query(static_cast<size_t>(heads * kKimiRowWidth)), row(kKimiRowWidth);
  inputs_.query(layer, {sample.row.request, sample.row.position, token}, query);
  std::vector<double> keys(static_cast<size_t>(length * kKimiRowWidth));
  for (int64_t j = 0; j < length; ++j) {
    inputs_.latent_key(layer, inputs_.workload().token_id(sample.row.request, j), row);
    std::transform(row.begin(), row.end(), keys.begin() + j * kKimiRowWidth, bf16_to_float);
  }
  std::vector<double> expected(static_cast<size_t>(heads * kLatentDim), 0.0);
  std::vector<double> lse(static_cast<size_t>(heads)), weights(static_cast<size_t>(length));
  std::vector<double> head(kKimiRowWidth);
  for (int64_t h = 0; h < heads; ++h) {
    std::transform(query.begin() + h * kKimiRowWidth, query.begin() + (h + 1) * kKimiRowWidth,
                   head.begin(), bf16_to_float);
    double largest = -HUGE_VAL, sum = 0;
    for (int64_t j = 0; j < length; ++j) {
      double& score = weights[static_cast<size_t>(j)];
      score = static_cast<double>(inputs_.shape().softmax_scale) *
              dot(head.data(), keys.data() + j * kKimiRowWidth, kKimiRowWidth);
      largest = std::max(largest, score);
    }
    for (double& weight : weights) sum += (weight = std::exp(weight - largest));
    for (int64_t j = 0; j < length; ++j) {
      const double weight = weights[static_cast<size_t>(j)] / sum;
      const double* const value = keys.data() + j * kKimiRowWidth;
      double* const out = expected.data() + h * kLatentDim;
      for (int64_t c = 0; c < kLatentDim; ++c) out[c] += weight * value[c];
    }
    lse[static_cast<size_t>(h)] = largest + std::log(sum);
  }
  judge(sample, kLatentDim, expected, lse, verdict);
}

std::vector<CheckVerdict> KimiChecker::check(std::span<const KimiSample> samples) const {
  std::vector<Group> groups;
  std::map<std::pair<int64_t, int64_t>, size_t> recurrences;
  for (size_t i = 0; i < samples.size(); ++i) {
    const CheckRow& row = samples[i].row;
    const int64_t layer = layers_[static_cast<size_t>(row.layer)];
    size_t group = groups.size();
    if (is_kda_layer(inputs_.model(), layer)) {
      group = recurrences.try_emplace({row.request, layer}, group).first->second;
    }
    if (group == groups.size()) groups.push_back({row.request, layer, {}});
    groups[group].members.push_back(i);
  }
  std::vector<CheckVerdict> verdicts(samples.size());
  ParallelFor(static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t g = begin; g < end; ++g) {
      const Group& group = groups[static_cast<size_t>(g)];
      if (is_kda_layer(inputs_.model(), group.layer)) {
        check_recurrence(samples, group, &verdicts);
      } else {
        check_attention(samples[group.members.front()], &verdicts[group.members.front()]);
      }
    }
  });
  return verdicts;
}

}  // namespace fovea::internal
