#include <cstring>

#include "src/batch/split_schedule_impl.h"
#include "src/core/access.h"

namespace fovea::internal {
namespace {

// Where the walk over the blocks stands.
struct Cursor {
  int64_t row = 0;
  int64_t block = 0;   // of the row
  int32_t split = 0;   // pieces of the row so far
  int32_t pieces = 0;  // of all earlier rows
};

}  // namespace

// One walk over the rows: O(rows + parts). A piece is numbered when it is cut.
void split_schedule_cpu(const SplitScheduleProblem& problem, const Device&,
                        const SplitScheduleTensors& tensors, Workspace) {
  const auto topk_length = access<const int32_t, 1>(tensors.topk_length);
  const auto schedule = access<int32_t, 2>(tensors.split_schedule);
  const auto indptr = access<int32_t, 1>(tensors.split_indptr);
  const int64_t rows = topk_length.shape[0];
  int64_t cost = rows * kSplitOverheadBlocks;
  for (int64_t r = 0; r < rows; ++r) cost += split_blocks(topk_length(r));
  const int64_t full_budget = (cost + problem.parts - 1) / problem.parts + kSplitOverheadBlocks;
  Cursor at;
  indptr(0) = 0;
  for (int64_t p = 0; p < problem.parts; ++p) {
    SplitPart part{};
    part.first_row = static_cast<int32_t>(at.row);
    part.last_row = static_cast<int32_t>(rows - 1);
    part.first_block = static_cast<int32_t>(at.block);
    part.first_split = at.split;
    part.first_is_split = at.split > 0 ? 1 : 0;
    int64_t budget = full_budget;
    while (at.row < rows) {
      const int64_t blocks = split_blocks(topk_length(at.row));
      const int64_t needed = blocks - at.block + kSplitOverheadBlocks;
      if (budget < needed) break;
      part.last_row = static_cast<int32_t>(at.row);
      part.end_block = static_cast<int32_t>(blocks);
      part.last_is_split = at.split > 0 ? 1 : 0;
      at.pieces += at.split + 1;
      indptr(at.row + 1) = at.pieces;
      budget -= needed;
      at = {at.row + 1, 0, 0, at.pieces};
    }
    if (at.row < rows && budget > kSplitOverheadBlocks) {
      at.block += budget - kSplitOverheadBlocks;
      ++at.split;
      part.last_row = static_cast<int32_t>(at.row);
      part.end_block = static_cast<int32_t>(at.block);
      part.last_is_split = 1;
      if (part.first_row == part.last_row) part.first_is_split = 1;
    }
    std::memcpy(schedule.row(p), &part, sizeof(part));
  }
}

}  // namespace fovea::internal
