#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/replay.h"
#include "src/replay/check_summary.h"
#include "src/replay/dsa_index_codes.h"
#include "src/replay/dsa_inputs.h"
#include "src/replay/run_plan.h"

/// Recomputation of sampled rows in fp64, from the generator and the reference codecs alone: no
/// cache, no page, no sharing.
namespace fovea::internal {

/// What the backend produced for one row.
struct DsaSample {
  CheckRow row;
  std::vector<int32_t> positions;  ///< Selected; -1 for a slot that is not the request's.
  std::vector<bf16_t> output;      ///< [H, 512]
  std::vector<float> lse;          ///< [H]
};

/// Thread-safe.
class DsaChecker {
 public:
  /// `layers`: model layer ids, by index; `topk`: selection width of the run; `run`: where it ran
  /// and what it forces.
  DsaChecker(const DsaInputs& inputs, std::vector<int64_t> layers, int64_t topk,
             const CodecChoice& run = {});

  /// Verdicts of samples, in their order; runs in parallel inside the caller's ThreadScope.
  ///
  /// Selection, with c the topk-th largest logit and d = selection_tolerance() * max |logit|:
  /// min(len, topk) distinct positions, each with logit >= c - d, and every position with logit > c
  /// + d among them; for len <= topk exactly 0..len-1. The logits are those of the reference's
  /// index codes. The reference rounds fp64 values to bf16, implementations round fp32 values: now
  /// and then a code differs by a step, which moves logits by more than d. A selection that is
  /// wrong for the reference's codes is therefore compared with those of the implementation that
  /// ran, after these have been compared with the reference's.
  ///
  /// Output and lse: fp64 attention over the selected keys.
  std::vector<CheckVerdict> check(std::span<const DsaSample> samples) const;

 private:
  // How far a selection is from that of given logits.
  struct Misplacement {
    int64_t position = 0;  // of the worst key
    double logit = 0;
    double boundary = 0;
    double slack = 0;  // distance of the worst key from the boundary / max |logit|
  };
  Misplacement misplacement(const std::vector<bool>& selected,
                            const std::vector<double>& logits) const;
  bool same_codes(const CheckRow& row, const IndexQuery& query, const IndexQuery& run_query,
                  const IndexKeys& keys, const IndexKeys& run_keys) const;
  void check_selection(const DsaSample& sample, const IndexKeys& keys, CheckVerdict* verdict) const;
  void check_logits(const DsaSample& sample, const std::vector<bool>& selected,
                    const IndexKeys& keys, CheckVerdict* verdict) const;
  // Relative rms error of the output and |lse error|.
  struct HeadError {
    double rms = 0;
    double lse = 0;
  };
  HeadError check_head(std::span<const bf16_t> raw_query, std::span<const double> keys,
                       const DsaSample& sample, int64_t head) const;
  void check_attention(const DsaSample& sample, CheckVerdict* verdict) const;
  void fail(const DsaSample& sample, const char* op, const char* kind, std::string detail,
            CheckVerdict* verdict) const;

  const DsaInputs& inputs_;
  std::vector<int64_t> layers_;
  int64_t topk_;
  IndexCodec reference_;
  IndexCodec run_;
  double selection_tolerance_;
};

}  // namespace fovea::internal
