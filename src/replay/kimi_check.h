#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/replay/check_summary.h"
#include "src/replay/kimi_inputs.h"

/// Recomputation of sampled rows in fp64 from the inputs alone: no state, snapshot, page or
/// sharing.
namespace fovea::internal {

/// What the backend produced for one row.
struct KimiSample {
  CheckRow row;
  std::vector<bf16_t> output;  ///< KDA layers: [H, V]; full attention: [H, 512]
  std::vector<float> lse;      ///< [H]; full attention only
};

/// Thread-safe.
class KimiChecker {
 public:
  /// `layers`: model layer ids, by index.
  KimiChecker(const KimiInputs& inputs, std::vector<int64_t> layers)
      : inputs_(inputs), layers_(std::move(layers)) {}

  /// Verdicts of samples, in their order; runs in parallel inside the caller's ThreadScope.
  ///
  /// KDA layers: the recurrence from the request's first token, once for all samples of a request
  /// and layer; convolved rows are rounded to bf16, as the operator's contract says. Full
  /// attention: over every key up to the row.
  std::vector<CheckVerdict> check(std::span<const KimiSample> samples) const;

 private:
  struct Group;
  void check_recurrence(std::span<const KimiSample> samples, const Group& group,
                        std::vector<CheckVerdict>* verdicts) const;
  void check_attention(const KimiSample& sample, CheckVerdict* verdict) const;
  void judge(const KimiSample& sample, int64_t width, std::span<const double> expected,
             std::span<const double> lse, CheckVerdict* verdict) const;

  const KimiInputs& inputs_;
  std::vector<int64_t> layers_;
};

}  // namespace fovea::internal
