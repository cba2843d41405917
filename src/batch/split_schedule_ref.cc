#include "src/batch/split_schedule_impl.h"
#include "src/core/access.h"

namespace fovea::internal {
namespace {

struct Reference {
  const SplitScheduleProblem& problem;
  Accessor<const int32_t, 1> topk_length;
  Accessor<int32_t, 2> schedule;
  Accessor<int32_t, 1> indptr;

  int64_t rows() const { return topk_length.shape[0]; }
  int64_t blocks(int64_t row) const { return split_blocks(topk_length(row)); }

  int64_t part_budget() const {
    int64_t cost = 0;
    for (int64_t r = 0; r < rows(); ++r) cost += blocks(r) + kSplitOverheadBlocks;
    return (cost + problem.parts - 1) / problem.parts + kSplitOverheadBlocks;
  }

  // Where each part begins and ends: the walk, as it is written.
  void walk() const {
    const int64_t full_budget = part_budget();
    int64_t row = 0, block = 0;
    for (int64_t p = 0; p < problem.parts; ++p) {
      schedule(p, 0) = static_cast<int32_t>(row);
      schedule(p, 1) = static_cast<int32_t>(rows() - 1);  // without work: before first_row
      schedule(p, 2) = static_cast<int32_t>(block);
      for (int64_t field = 3; field < 8; ++field) schedule(p, field) = 0;
      int64_t budget = full_budget;
      while (row < rows()) {
        const int64_t rest = blocks(row) - block;
        const bool takes_all = budget >= rest + kSplitOverheadBlocks;
        if (!takes_all && budget <= kSplitOverheadBlocks) break;
        block += takes_all ? rest : budget - kSplitOverheadBlocks;
        schedule(p, 1) = static_cast<int32_t>(row);
        schedule(p, 3) = static_cast<int32_t>(block);
        if (!takes_all) break;
        budget -= rest + kSplitOverheadBlocks;
        ++row;
        block = 0;
      }
    }
  }

  // How many of the first `parts` parts hold a piece of the row.
  int32_t pieces(int64_t row, int64_t parts) const {
    int32_t count = 0;
    for (int64_t p = 0; p < parts; ++p) {
      if (schedule(p, 0) <= row && row <= schedule(p, 1)) ++count;
    }
    return count;
  }

  void number_pieces() const {
    indptr(0) = 0;
    for (int64_t r = 0; r < rows(); ++r) indptr(r + 1) = indptr(r) + pieces(r, problem.parts);
    for (int64_t p = 0; p < problem.parts; ++p) {
      const int64_t first = schedule(p, 0), last = schedule(p, 1);
      if (first == rows()) continue;
      schedule(p, 4) = pieces(first, p);
      schedule(p, 5) = indptr(first + 1) - indptr(first) > 1 ? 1 : 0;
      schedule(p, 6) = indptr(last + 1) - indptr(last) > 1 ? 1 : 0;
    }
  }
};

}  // namespace

// First the walk, then the pieces of each row, counted over the parts: O(rows * parts).
void split_schedule_ref(const SplitScheduleProblem& problem, const Device&,
                        const SplitScheduleTensors& tensors, Workspace) {
  const Reference reference{problem, access<const int32_t, 1>(tensors.topk_length),
                            access<int32_t, 2>(tensors.split_schedule),
                            access<int32_t, 1>(tensors.split_indptr)};
  reference.walk();
  reference.number_pieces();
}

}  // namespace fovea::internal
