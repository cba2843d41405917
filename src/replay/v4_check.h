#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "src/replay/check_summary.h"
#include "src/replay/dsa_index_codes.h"
#include "src/replay/v4_inputs.h"

/// Recomputation of sampled rows in fp64 from the inputs alone: no cache, state, page or sharing.
namespace fovea::internal {

/// What the backend produced for one row.
struct V4Sample {
  CheckRow row;
  std::vector<int32_t> entries;  ///< Ratio 4: selected; -1 for a slot that is not the request's.
  std::vector<bf16_t> output;    ///< [H, 512]
  std::vector<float> lse;        ///< [H]
};

/// Thread-safe.
class V4Checker {
 public:
  /// `layers`: model layer ids, by index; `topk`: of the run; `run`: where it ran and what it
  /// forces.
  V4Checker(const V4Inputs& inputs, std::vector<int64_t> layers, int64_t topk,
            const CodecChoice& run = {});

  /// Verdicts of samples, in their order; runs in parallel inside the caller's ThreadScope.
  ///
  /// Entries are compressed in fp64 from the tokens of their groups, rounded to bf16, packed by the
  /// reference codec. Selection, with c the topk-th best score and d = selection_tolerance() * max
  /// |score|: min(topk, n_c) distinct entries, each with score >= c - d, and every entry with score
  /// > c + d among them. Output and lse: fp64 attention over the window and the selected, or all,
  /// entries.
  ///
  /// Implementations compress in fp32, so that now and then a bf16 value is the next one, and a
  /// code or the scale of a tile another. A row that is wrong for the reference's entries is
  /// therefore compared with those that the implementation makes of the tokens alone, after these
  /// have been compared with the reference's.
  std::vector<CheckVerdict> check(std::span<const V4Sample> samples) const;

 private:
  struct Group;
  // By entry: its row as the cache gives it back.
  using Entries = std::map<int64_t, std::vector<double>>;
  // Relative rms error of the output and |lse error|, of the worst heads.
  struct HeadErrors {
    double rms = 0, lse = 0;
    int64_t rms_head = 0, lse_head = 0;

    bool within() const { return rms <= kOutputTolerance && lse <= kLseTolerance; }
  };
  using Rows = std::vector<std::vector<bf16_t>>;  // of entries, before their codec
  struct EntryRange {
    int64_t layer, request, begin, end;
    bool index;  // of the indexer
  };
  void check_group(std::span<const V4Sample> samples, const Group& group,
                   std::vector<CheckVerdict>* verdicts) const;
  void check_selection(const V4Sample& sample, const Rows& keys, CheckVerdict* verdict) const;
  void check_attention(const V4Sample& sample,
                       const std::map<int64_t, std::vector<bf16_t>>& entries,
                       CheckVerdict* verdict) const;
  HeadErrors attend(const V4Sample& sample, const Entries& entries) const;
  std::vector<bf16_t> compressed(const EntryRange& range, int64_t entry) const;
  Rows run_compressed(const EntryRange& range) const;
  IndexQuery index_query(const V4Sample& sample) const;
  // Entries that the row attends to.
  std::vector<int64_t> seen_entries(const V4Sample& sample) const;
  void fail(const V4Sample& sample, const char* op, const char* kind, std::string detail,
            CheckVerdict* verdict) const;
  int64_t layer_id(const V4Sample& sample) const {
    return layers_[static_cast<size_t>(sample.row.layer)];
  }
  int64_t num_entries(const V4Sample& sample) const {
    const int64_t ratio = inputs_.ratio(layer_id(sample));
    return ratio == 0 ? 0 : (sample.row.position + 1) / ratio;
  }

  const V4Inputs& inputs_;
  std::vector<int64_t> layers_;
  int64_t topk_;
  CodecChoice run_;
  double selection_tolerance_;
  // By layer: what compressing needs.
  struct Weights {
    std::vector<float> sink, ape, norm, index_ape, index_norm;
  };
  std::map<int64_t, Weights> weights_;
  std::vector<float> swa_cos_sin_, entry_cos_sin_;
};

}  // namespace fovea::internal
