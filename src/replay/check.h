#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/index_quantize.h"
#include "fovea/replay.h"
#include "src/replay/row_inputs.h"
#include "src/replay/run_plan.h"

/// Recomputation of sampled rows in fp64, from the generator and the reference codecs alone: no
/// cache, no page, no sharing.
namespace fovea::internal {

inline constexpr double kOutputTolerance = 5e-3;        ///< Relative rms of a head's output.
inline constexpr double kLseTolerance = 1e-3;           ///< Absolute.
inline constexpr double kSelectionTolerance = 0x1p-16;  ///< Of the row's max |logit|.

/// What the backend produced for one row.
struct CheckSample {
  CheckRow row;
  std::vector<int32_t> positions;  ///< Selected; -1 for a slot that is not the request's.
  std::vector<bf16_t> output;      ///< [H, 512]
  std::vector<float> lse;          ///< [H]
};

struct CheckVerdict {
  bool selecting = false;
  double worst_rms = 0;
  double worst_lse = 0;
  double selection_slack = 0;
  std::vector<CheckFailure> failures;
};

/// Thread-safe.
class RowChecker {
 public:
  /// `layers`: model layer ids, by index; `topk`: selection width of the run.
  RowChecker(const RowInputs& inputs, std::vector<int64_t> layers, int64_t topk);

  /// Verdicts of samples, in their order; runs in parallel inside the caller's ThreadScope.
  /// Selection, with c the topk-th largest logit and d = kSelectionTolerance * max |logit|:
  /// min(len, topk) distinct positions, each with logit >= c - d, and every position with logit > c
  /// + d among them; for len <= topk exactly 0..len-1. Output and lse: fp64 attention over the
  /// selected keys.
  std::vector<CheckVerdict> check(std::span<const CheckSample> samples) const;

 private:
  struct IndexKeys;
  void quantize_keys(int64_t request, int64_t layer, int64_t count, IndexKeys* keys) const;
  std::vector<double> logits(const CheckRow& row, const IndexKeys& keys) const;
  void check_selection(const CheckSample& sample, const IndexKeys& keys,
                       CheckVerdict* verdict) const;
  // Relative rms error of the output and |lse error|.
  struct HeadError {
    double rms = 0;
    double lse = 0;
  };
  HeadError check_head(std::span<const bf16_t> raw_query, std::span<const double> keys,
                       const CheckSample& sample, int64_t head) const;
  void check_attention(const CheckSample& sample, CheckVerdict* verdict) const;
  void fail(const CheckSample& sample, const char* op, const char* kind, std::string detail,
            CheckVerdict* verdict) const;

  const RowInputs& inputs_;
  std::vector<int64_t> layers_;
  int64_t topk_;
  std::vector<float> cos_sin_;
  IndexQuantize quantize_keys_;
  IndexQuantize quantize_query_;
};

/// Adds verdicts to a summary. `rows` is parallel to `verdicts`.
void summarize_check(std::span<const CheckRow> rows, std::span<const CheckVerdict> verdicts,
                     CheckSummary* summary);

}  // namespace fovea::internal
