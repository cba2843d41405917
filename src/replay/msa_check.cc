#include "src/replay/msa_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "fovea/numeric.h"
#include "src/core/parallel.h"
#include "src/replay/fp64_rows.h"

namespace fovea::internal {
namespace {

// Sums of one query head over tokens that come one after the other.
class HeadSums {
 public:
  explicit HeadSums(int64_t dim) : sums_(static_cast<size_t>(dim), 0.0) {}

  void add(double logit, const double* value) {
    if (logit > largest_) {
      const double keep = std::exp(largest_ - logit);
      for (double& sum : sums_) sum *= keep;
      weight_ *= keep;
      largest_ = logit;
    }
    const double weight = std::exp(logit - largest_);
    weight_ += weight;
    for (size_t c = 0; c < sums_.size(); ++c) sums_[c] += weight * value[c];
  }

  double output(size_t channel) const { return sums_[channel] / weight_; }
  double lse() const { return largest_ + std::log(weight_); }

 private:
  double largest_ = -HUGE_VAL, weight_ = 0;
  std::vector<double> sums_;
};

}  // namespace

void MsaChecker::fail(const MsaSample& sample, const char* op, const char* kind, std::string detail,
                      CheckVerdict* verdict) const {
  CheckFailure failure;
  failure.request = inputs_.workload().request(sample.row.request).trace_row;
  failure.position = sample.row.position;
  failure.layer = layer_of(sample);
  failure.layer_kind = inputs_.model().layer_kind(failure.layer);
  failure.op = op;
  failure.kind = kind;
  failure.detail = std::move(detail);
  verdict->failures.push_back(std::move(failure));
}

std::span<const int32_t> MsaChecker::list_of(const MsaSample& sample, int64_t kv_head) const {
  const auto width = static_cast<size_t>(inputs_.topk());
  std::span<const int32_t> list =
      std::span(sample.blocks).subspan(static_cast<size_t>(kv_head) * width, width);
  while (!list.empty() && list.back() == -1) list = list.first(list.size() - 1);
  return list;
}

std::vector<double> MsaChecker::block_scores(const MsaSample& sample, int64_t kv_head) const {
  const int64_t layer = layer_of(sample), dim = inputs_.shape().index_dim;
  const CheckRow& row = sample.row;
  const Workload& workload = inputs_.workload();
  std::vector<bf16_t> queries(static_cast<size_t>(inputs_.num_kv_heads() * dim));
  inputs_.index_query(
      layer, {row.request, row.position, workload.token_id(row.request, row.position)}, queries);
  const std::vector<double> query = widened(
      std::span(queries).subspan(static_cast<size_t>(kv_head * dim), static_cast<size_t>(dim)));
  std::vector<double> scores(static_cast<size_t>(num_blocks(sample)), -HUGE_VAL);
  std::vector<bf16_t> key(static_cast<size_t>(dim));
  for (int64_t j = 0; j <= row.position; ++j) {
    inputs_.index_key(layer, workload.token_id(row.request, j), key);
    double& score = scores[static_cast<size_t>(j / inputs_.block_size())];
    score = std::max(score, dot(query.data(), widened(key).data(), dim));
  }
  return scores;
}

// What is wrong with the blocks that were chosen by score; empty: nothing.
std::string MsaChecker::misplaced_block(std::span<const int32_t> list,
                                        std::span<const double> scores,
                                        CheckVerdict* verdict) const {
  const auto blocks = static_cast<int64_t>(scores.size());
  const int64_t first_local = blocks - inputs_.shape().local_blocks;
  const auto is_forced = [&](int64_t n) {
    return n < inputs_.shape().init_blocks || n >= first_local;
  };
  std::vector<bool> selected(scores.size(), false);
  for (const int32_t n : list) selected[static_cast<size_t>(n)] = true;
  std::vector<double> others;
  double largest = 0;
  int64_t places = inputs_.topk();
  for (int64_t n = 0; n < blocks; ++n) {
    const auto at = static_cast<size_t>(n);
    largest = std::max(largest, std::fabs(scores[at]));
    if (is_forced(n)) {
      if (!selected[at]) return "block " + std::to_string(n) + " is always chosen, and left out";
      --places;
    } else {
      others.push_back(scores[at]);
    }
  }
  if (places == 0) return "";
  const auto last = others.begin() + (places - 1);
  std::nth_element(others.begin(), last, others.end(), std::greater<>());
  const double boundary = *last;
  double worst = 0;
  int64_t worst_block = 0;
  for (int64_t n = 0; n < blocks; ++n) {
    if (is_forced(n)) continue;
    const double score = scores[static_cast<size_t>(n)];
    const double outside = selected[static_cast<size_t>(n)] ? boundary - score : score - boundary;
    if (outside > worst) worst = outside, worst_block = n;
  }
  const double slack = largest > 0 ? worst / largest : 0;
  verdict->selection_slack = std::max(verdict->selection_slack, slack);
  if (slack <= kBlockTolerance) return "";
  const auto at = static_cast<size_t>(worst_block);
  return "block " + std::to_string(worst_block) + " with score " + error_text(scores[at]) + " is " +
         (selected[at] ? "selected" : "left out") + ", the boundary is " + error_text(boundary);
}

// Whether the lists are such that attention over them has a meaning.
bool MsaChecker::check_lists(const MsaSample& sample, CheckVerdict* verdict) const {
  const int64_t blocks = num_blocks(sample);
  const auto wanted = static_cast<size_t>(std::min(blocks, inputs_.topk()));
  verdict->selecting = blocks > inputs_.topk();
  bool usable = true;
  for (int64_t g = 0; g < inputs_.num_kv_heads(); ++g) {
    const std::span<const int32_t> list = list_of(sample, g);
    const auto selection_fails = [&](const std::string& detail) {
      fail(sample, "msa_score_select", "selection", "KV head " + std::to_string(g) + ": " + detail,
           verdict);
    };
    const bool ascends =
        std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end();
    const bool inside = list.empty() || (list.front() >= 0 && list.back() < blocks);
    if (!ascends || !inside || list.size() != wanted) {
      selection_fails(!ascends  ? "the list does not ascend"
                      : !inside ? "the list names a block that the row does not see"
                                : std::to_string(list.size()) + " blocks are selected, expected " +
                                      std::to_string(wanted));
      usable = false;
      continue;
    }
    // Not selecting: the right number of distinct blocks is all of them.
    if (!verdict->selecting) continue;
    const std::string detail = misplaced_block(list, block_scores(sample, g), verdict);
    if (!detail.empty()) selection_fails(detail);
  }
  return usable;
}

void MsaChecker::check_attention(const MsaSample& sample, CheckVerdict* verdict) const {
  const int64_t layer = layer_of(sample), dim = inputs_.shape().head_dim;
  const int64_t heads = inputs_.num_heads(), kv_heads = inputs_.num_kv_heads();
  const int64_t group = heads / kv_heads;
  const CheckRow& row = sample.row;
  const Workload& workload = inputs_.workload();
  const bool dense = is_dense_layer(inputs_.model(), layer);
  std::vector<bf16_t> raw(static_cast<size_t>(heads * dim)),
      key(static_cast<size_t>(kv_heads * dim)), value(key.size());
  inputs_.query(layer, {row.request, row.position, workload.token_id(row.request, row.position)},
                raw);
  const std::vector<double> query = widened(raw);
  std::vector<HeadSums> sums(static_cast<size_t>(heads), HeadSums(dim));
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  for (int64_t j = 0; j <= row.position; ++j) {
    const auto block = static_cast<int32_t>(j / inputs_.block_size());
    std::vector<double> keys, values;
    for (int64_t g = 0; g < kv_heads; ++g) {
      const std::span<const int32_t> list = dense ? std::span<const int32_t>() : list_of(sample, g);
      if (!dense && !std::binary_search(list.begin(), list.end(), block)) continue;
      if (keys.empty()) {
        const uint64_t token = workload.token_id(row.request, j);
        inputs_.key(layer, token, key);
        inputs_.value(layer, token, value);
        keys = widened(key);
        values = widened(value);
      }
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        const double logit = scale * dot(query.data() + h * dim, keys.data() + g * dim, dim);
        sums[static_cast<size_t>(h)].add(logit, values.data() + g * dim);
      }
    }
  }
  int64_t rms_head = 0, lse_head = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const HeadSums& head = sums[static_cast<size_t>(h)];
    double error = 0, norm = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const double expected = head.output(static_cast<size_t>(c));
      const double found = bf16_to_float(sample.output[static_cast<size_t>(h * dim + c)]);
      error += (found - expected) * (found - expected);
      norm += expected * expected;
    }
    const double rms = std::sqrt(error / norm);
    const double off = std::fabs(sample.lse[static_cast<size_t>(h)] - head.lse());
    if (is_worse(rms, verdict->worst_rms)) verdict->worst_rms = rms, rms_head = h;
    if (is_worse(off, verdict->worst_lse)) verdict->worst_lse = off, lse_head = h;
  }
  const auto fail_head = [&](const char* kind, int64_t head, double error, double allowed) {
    fail(sample, "msa_attend", kind,
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

void MsaChecker::check_sample(const MsaSample& sample, CheckVerdict* verdict) const {
  const bool dense = is_dense_layer(inputs_.model(), layer_of(sample));
  if (dense || check_lists(sample, verdict)) check_attention(sample, verdict);
}

std::vector<CheckVerdict> MsaChecker::check(std::span<const MsaSample> samples) const {
  std::vector<CheckVerdict> verdicts(samples.size());
  ParallelFor(static_cast<int64_t>(samples.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      check_sample(samples[static_cast<size_t>(i)], &verdicts[static_cast<size_t>(i)]);
    }
  });
  return verdicts;
}

}  // namespace fovea::internal
