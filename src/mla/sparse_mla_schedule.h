#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fovea/metadata.h"
#include "fovea/sparse_mla.h"
#include "src/core/access.h"
#include "src/core/workspace.h"
#include "src/mla/sparse_mla_cache.h"

/// The split plan of a step (SplitSchedule) as sparse_mla follows it: read once, checked against
/// the lengths, kept in the workspace. Nothing of the caller's array is read after that, so that no
/// content of it, not even one that changes meanwhile, moves a write.
namespace fovea::internal {

inline constexpr int64_t kSplitPartFields = sizeof(SplitPart) / sizeof(int32_t);

/// What one part walks: rows first_row .. last_row, the first one from first_block on, the last one
/// up to end_block or, with ends_row, to its end. Empty: first_row > last_row.
struct WalkedPart {
  int32_t first_row;
  int32_t last_row;
  int32_t first_block;
  int32_t end_block;
  int32_t first_piece;  // pieces of split rows that earlier parts hold
  bool ends_row;

  bool is_piece(int64_t row) const {
    return (row == first_row && first_block > 0) || (row == last_row && !ends_row);
  }
};

/// A row of several pieces, which are numbered in their order.
struct SplitRow {
  int32_t row;
  int32_t first_piece;
  int32_t num_pieces;
};

/// Pieces of split rows at most: P parts make P - 1 cuts, each of which ends one piece and starts
/// another; a row has one piece more than cuts.
inline int64_t max_split_pieces(const SparseMlaProblem& problem) {
  const int64_t cuts = std::max<int64_t>(problem.split_parts - 1, 0);
  if (cuts == 0 || problem.max_rows == 0) return 0;
  return std::min(problem.max_rows + cuts, 2 * cuts);
}

class SplitWalk {
 public:
  /// Takes the arrays; null while measuring.
  void cut(const SparseMlaProblem& problem, WorkspaceCutter& cutter) {
    parts_ = cutter.take<WalkedPart>(problem.split_parts);
    // A refused schedule may cut one row more than a plan can.
    split_rows_ = cutter.take<SplitRow>(std::min(problem.max_rows, problem.split_parts));
  }

  /// False when the schedule does not tile exactly the blocks of `num_rows` rows.
  bool read(const Accessor<const int32_t, 2>& schedule, const SparseMlaSegment& primary,
            int64_t num_rows) {
    num_parts_ = num_split_rows_ = 0;
    int64_t row = 0, block = 0;
    int32_t piece = 0;
    for (int64_t p = 0; p < schedule.shape[0]; ++p) {
      const int32_t* line = schedule.row(p);
      const SplitPart part{line[0], line[1], line[2], line[3], 0, 0, 0, 0};
      if (part.first_row < 0 || part.first_row >= num_rows) continue;  // no work
      const int64_t last_row = part.last_row;
      if (row >= num_rows || part.first_row != row || part.first_block != block) return false;
      if (last_row < row || last_row >= num_rows) return false;
      const int64_t last_blocks = scheduled_blocks(primary, last_row);
      const int64_t least = last_row == row ? block : 0;
      if (part.end_block <= least || part.end_block > last_blocks) return false;
      WalkedPart& walked = parts_[num_parts_++];
      walked = {part.first_row, part.last_row, part.first_block,
                part.end_block, piece,         part.end_block == last_blocks};
      if (walked.is_piece(row)) add_piece(row, piece++, block == 0);
      if (last_row != row && walked.is_piece(last_row)) add_piece(last_row, piece++, true);
      row = walked.ends_row ? last_row + 1 : last_row;
      block = walked.ends_row ? 0 : part.end_block;
    }
    return row == num_rows;
  }

  int64_t num_parts() const { return num_parts_; }  // with work
  const WalkedPart& part(int64_t p) const { return parts_[p]; }
  int64_t num_split_rows() const { return num_split_rows_; }
  const SplitRow& split_row(int64_t i) const { return split_rows_[i]; }

 private:
  // As the planner counts them: of the length as it stands, an empty row as one block.
  static int64_t scheduled_blocks(const SparseMlaSegment& primary, int64_t row) {
    const int64_t slots = primary.topk_length ? primary.topk_length(row) : primary.indices.shape[1];
    return std::max<int64_t>(1, (slots + kSplitBlockSlots - 1) / kSplitBlockSlots);
  }

  void add_piece(int64_t row, int32_t piece, bool starts_row) {
    if (starts_row) split_rows_[num_split_rows_++] = {static_cast<int32_t>(row), piece, 0};
    ++split_rows_[num_split_rows_ - 1].num_pieces;
  }

  WalkedPart* parts_ = nullptr;
  SplitRow* split_rows_ = nullptr;
  int64_t num_parts_ = 0;
  int64_t num_split_rows_ = 0;
};

}  // namespace fovea::internal
