#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/replay/check_summary.h"
#include "src/replay/msa_inputs.h"

/// Recomputation of sampled rows in fp64 from the inputs alone: no cache, page or sharing.
namespace fovea::internal {

/// Slack of a block score, as a share of the row's largest |score|.
inline constexpr double kBlockTolerance = 0x1p-16;

/// What the backend produced for one row.
struct MsaSample {
  CheckRow row;
  std::vector<int32_t> blocks;  ///< [Hkv, K], ascending, then -1; dense layers: empty
  std::vector<bf16_t> output;   ///< [Hq, D]
  std::vector<float> lse;       ///< [Hq]
};

/// Thread-safe.
class MsaChecker {
 public:
  /// `layers`: model layer ids, by index.
  MsaChecker(const MsaInputs& inputs, std::vector<int64_t> layers)
      : inputs_(inputs), layers_(std::move(layers)) {}

  /// Verdicts of samples, in their order; runs in parallel inside the caller's ThreadScope.
  ///
  /// Selection of every KV head, with n the blocks up to the row's own: min(n, K) distinct ones in
  /// ascending order, every forced one among them; with c the score of the last place that is left
  /// to the others and d = kBlockTolerance * max |score|, each of the others has score >= c - d,
  /// and every block with score > c + d is there.
  ///
  /// Output and lse: fp64 attention over the tokens of the selected blocks; of a dense layer over
  /// all tokens.
  std::vector<CheckVerdict> check(std::span<const MsaSample> samples) const;

 private:
  void check_sample(const MsaSample& sample, CheckVerdict* verdict) const;
  bool check_lists(const MsaSample& sample, CheckVerdict* verdict) const;
  std::string misplaced_block(std::span<const int32_t> list, std::span<const double> scores,
                              CheckVerdict* verdict) const;
  std::vector<double> block_scores(const MsaSample& sample, int64_t kv_head) const;
  void check_attention(const MsaSample& sample, CheckVerdict* verdict) const;
  void fail(const MsaSample& sample, const char* op, const char* kind, std::string detail,
            CheckVerdict* verdict) const;

  int64_t layer_of(const MsaSample& sample) const {
    return layers_[static_cast<size_t>(sample.row.layer)];
  }
  int64_t num_blocks(const MsaSample& sample) const {
    return sample.row.position / inputs_.block_size() + 1;
  }
  // The entries of a head's list that are blocks.
  std::span<const int32_t> list_of(const MsaSample& sample, int64_t kv_head) const;

  const MsaInputs& inputs_;
  std::vector<int64_t> layers_;
};

}  // namespace fovea::internal
