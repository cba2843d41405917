#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct MoveRowsProblem {
  int64_t max_rows = 0;                     ///< Upper bound of N.
  RowFormat row_format = RowFormat::kBf16;  ///< Any but kR512.
  int64_t page_size = 0;  ///< Tokens per page, 1..256; 0 for a pool given as bf16 [S, D].
  int64_t width = 0;      ///< Channels of a row, as in RowCodecProblem.
};

struct MoveRowsTensors {
  TensorView pool;            ///< u8 [pages, >= page_bytes], updated; kBf16 also as bf16 [S, D]
  ConstTensorView src_slots;  ///< i32 [N]; page * page_size + offset
  ConstTensorView dst_slots;  ///< i32 [N]
};

/// Moves stored tokens inside a paged pool: the token in dst_slots[i] becomes the one that was in
/// src_slots[i], byte for byte, nothing decoded. Of i132 and v4 the codes and the scales move, each
/// to its own part of the page.
///
/// All sources are read before any destination is written. So the lists may overlap in any way:
/// chains (1 -> 0, 2 -> 1), swaps, cycles, one source for several destinations. This is how the
/// accepted tokens of a draft tree close ranks.
///
/// A pair of which either slot is outside the pool (e.g. -1) moves nothing. All bytes of the pool
/// that belong to no destination keep their value. The content of a destination that occurs twice
/// is unspecified. N = 0: nothing happens.
///
/// The workspace holds max_rows tokens. Same inputs: the same bytes, for any number of threads.
/// plan() throws Error(kInvalidArgument) for a page size or width outside the table of
/// RowCodecProblem, or when the workspace would exceed the address space; run() compares the
/// tensors with the plan and refuses a pool whose pages or rows overlap, before it writes.
/// Thread-safe while no slot of one run is written by another.
///
/// Source of the layouts: docs/formats.md. Source of the operation: the cache moves of engines that
/// verify draft trees.
class FOVEA_API MoveRows : public OperatorPlan<MoveRowsProblem, MoveRowsTensors> {
 public:
  static MoveRows plan(const MoveRowsProblem& problem, const Device& device,
                       const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
