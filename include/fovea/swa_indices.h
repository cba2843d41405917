#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// Where the tokens of a sliding window lie.
enum class WindowStorage : uint8_t {
  kPaged,  ///< Token p in page page_table[r, p / page_size], at p % page_size.
  kRing,   ///< The request's ring is page page_table[r, 0]: token p at p % page_size.
};

struct SwaIndicesProblem {
  int64_t max_rows = 0;      ///< Upper bound of T.
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t window = 0;        ///< W >= 1, the row's own token included.
  int64_t width = 0;         ///< Wi >= W, columns of indices.
  int64_t page_size = 0;     ///< Tokens per page, or (kRing) of a ring, >= 1.
  WindowStorage storage = WindowStorage::kPaged;
  int64_t pages = -1;  ///< Pages of the pool; -1: unknown, only negative pages are outside.
};

struct SwaIndicesTensors {
  ConstTensorView q_indptr{};      ///< i32 [R+1]: rows of request r
  ConstTensorView kv_len{};        ///< i32 [R], the tokens of this step included
  ConstTensorView page_table{};    ///< i32 [R, max_pages]; kRing: [R, 1]
  ConstTensorView row_valid = {};  ///< optional u8 [T]; 0: the row is padding
  TensorView indices{};            ///< i32 [T, Wi]
  TensorView row_len{};            ///< i32 [T]
};

/// The slots that each query row of a sliding window sees, oldest first: what sparse_mla and
/// swa_decode take as index list.
///
/// Row i of the n rows of request r stands at position p = kv_len[r] - n + i and sees
///   lo .. p with lo = max(0, p - W + 1);   row_len = p + 1 - lo
///   indices[j] = slot of token lo + j for j < row_len, -1 in the other columns up to Wi
///   slot of token t = page * page_size + t % page_size
///
/// Edges. A token whose page is outside the pool or whose column is beyond the table is -1 in its
/// place, and so is one whose slot does not fit int32; row_len counts columns. A row at a negative
/// position, a row with row_valid 0, and a row that belongs to no request (before q_indptr[0], at
/// or past q_indptr[R]) is padding: row_len 0, all columns -1. Offsets are device contents and
/// never trusted: each is cut to [0, T] and raised to its predecessor. Every element is written.
///
/// Throws Error(kInvalidArgument) from plan() for a value outside the table and from run() for
/// tensors that do not match, before anything is written. Deterministic. Ownership, threads and
/// streams: OperatorPlan.
///
/// Source: sliding-window attention of the DeepSeek-V4 technical report; docs/build_swa_indices.md.
class FOVEA_API BuildSwaIndices : public OperatorPlan<SwaIndicesProblem, SwaIndicesTensors> {
 public:
  static BuildSwaIndices plan(const SwaIndicesProblem& problem, const Device& device,
                              const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
