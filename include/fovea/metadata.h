#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What a batch asks of the model (docs/concepts.md; what seq_len includes differs by mode).
enum class ForwardMode : uint8_t {
  kExtend,
  kDecode,
  kIdle,
  kTargetVerify,
  kDraftExtend,
  kDraftExtendV2,
  kMixed
};

/// "extend", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2", "mixed".
FOVEA_API std::string_view to_string(ForwardMode mode) noexcept;

/// Where the indices of a selection point.
enum class IndexTransform : uint8_t {
  kLocal,   ///< Positions of the request, 0..len-1.
  kPaged,   ///< Slots of the pool: page_table[request][pos / P] * P + pos % P.
  kRagged,  ///< pos + row_offset[row]: rows of a contiguous K array.
};

/// "local", "paged", "ragged".
FOVEA_API std::string_view to_string(IndexTransform transform) noexcept;

/// Largest number of step plans that one refresh fills.
inline constexpr int kMaxRefreshSteps = 8;

/// Problem of metadata_refresh: bounds only.
struct MetadataProblem {
  ForwardMode mode = ForwardMode::kDecode;
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t max_rows = 0;     ///< Upper bound of E, the rows of the batch, and of T, the padded rows.
  int64_t table_width = 0;  ///< W >= 1, columns of req_to_token.
  int64_t rows_per_request = 1;  ///< N >= 1 of kTargetVerify and kDraftExtendV2.
  int64_t topk = 0;              ///< >= 1.
  int64_t page_size = 0;         ///< P, 1..256.
  IndexTransform transform =
      IndexTransform::kPaged;  ///< kRagged asks for row_offset; kExtend and kMixed only.
  int64_t workers = 64;        ///< >= 1, workers of the paged-logits schedule.
};

/// The arrays of one step: device i32, owned by the caller.
///
/// A shape below is the smallest extent that is accepted. Arrays of requests ([R], [R+1]) are
/// written over exactly that part. Arrays of rows are written over their whole extent (with
/// padded_rows = T > 0: over the first T entries, T + 1 of topk_indptr), padding values after the E
/// live rows, so that a smaller batch leaves no trace of a larger one. Formulas: docs/metadata.md.
struct MetadataFields {
  TensorView kv_len;      ///< [R] = L, cut to 0..min(W, columns of page_table * P)
  TensorView kv_indptr;   ///< [R+1] = cum(kv_len)
  TensorView max_kv_len;  ///< [1]; 0 when R is 0
  TensorView q_indptr;    ///< [R+1] = cum(rows of each request); the last entry is E
  TensorView max_q_len;   ///< [1]; when R is 0: 1 in kExtend and kMixed, else 0
  TensorView page_table;  ///< [R, ceil(max kv_len / P)]; -1: masked; columns past a request's pages
                          ///< are not written
  TensorView row_to_request;  ///< [T]; -1 in padding
  TensorView row_len;         ///< [E] = L - n + 1 .. L; 0 in padding; may be the memory of kv_len
                              ///< in kDecode and kIdle, where the two are equal
  TensorView topk_length;     ///< [T] = min(max(row_len, 0), topk); 0 in padding
  TensorView topk_indptr;     ///< [T+1] = cum(topk_length)
  TensorView ext_len;         ///< [R]: rows of each request
  TensorView k_start;         ///< [E] = kv_indptr of the row's request; kExtend, kMixed only
  TensorView k_end;           ///< [E] = k_start + row_len; kExtend, kMixed only
  TensorView row_offset;      ///< [E] = k_start; kExtend, kMixed with transform kRagged only
  TensorView schedule;        ///< [workers+1, 2] of row_len; the other modes only
};

struct MetadataTensors {
  ConstTensorView seq_len;       ///< i32 [R]
  ConstTensorView pool_row;      ///< i32 [R]: row of req_to_token; outside it: a row of pages -1
  ConstTensorView req_to_token;  ///< i32 [rows, W]: slot of each position; negative: page -1
  ConstTensorView ext_len;       ///< i32 [R]; kExtend, kMixed, kDraftExtend; negative counts as 0
  ConstTensorView prefix_len;    ///< optional i32 [R], only with ext_len; it is seq_len - ext_len,
                                 ///< so that nothing depends on it: accepted for the caller's ease
  int64_t padded_rows = 0;       ///< T; 0: the extent of each array of rows
  int num_steps = 1;             ///< Steps to fill, 1..8; more than one only in kDecode, kIdle
  std::array<int32_t, kMaxRefreshSteps>
      kv_len_delta{};  ///< Added to every length of the step; kDecode, kIdle
  std::array<MetadataFields, kMaxRefreshSteps> steps{};
};

/// Builds every per-step array of sparse attention from lengths and the request table, without host
/// lengths.
///
/// With L the KV length of a request (seq_len; + rows_per_request in kTargetVerify; + the step's
/// kv_len_delta in kDecode and kIdle) and n its rows (1 in kDecode and kIdle, rows_per_request in
/// kTargetVerify and kDraftExtendV2, ext_len otherwise): row i of the request sees L - n + 1 + i
/// keys, and column j of its page table is req_to_token[pool_row, j * P] / P. Only those columns of
/// req_to_token are read, for j < ceil(L / P).
///
/// Device contents are never trusted and never an error: L is cut to what W and the page table
/// hold, rows past the smallest array of rows are dropped (the last requests lose theirs), a
/// row_len <= 0 keeps its value and counts as an empty row, sums saturate at 2^31 - 1.
///
/// run() throws Error(kInvalidArgument) before anything is written when a tensor is missing, has
/// another type or shape, is given in a mode that does not read it, or cannot hold the rows that
/// the mode and R determine. R = 0 is legal: the cumulative arrays are [0]. Fields that a mode does
/// not have are not looked at. Exact integers: equal on every implementation and thread count.
/// run() never allocates. Thread-safe with distinct outputs.
///
/// Source: the batch metadata of DeepSeek-V3.2 sparse attention, restated in docs/metadata.md.
class FOVEA_API MetadataRefresh : public OperatorPlan<MetadataProblem, MetadataTensors> {
 public:
  /// Throws Error(kInvalidArgument) for a bound outside the ranges of MetadataProblem.
  static MetadataRefresh plan(const MetadataProblem& problem, const Device& device,
                              const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

/// Tokens that one unit of paged-logits work covers.
inline constexpr int64_t kScheduleTokens = 256;

struct PagedScheduleProblem {
  int64_t max_rows = 0;        ///< Upper bound of T.
  int64_t workers = 64;        ///< >= 1.
  int64_t rows_per_group = 1;  ///< Divides T; the last row of a group gives its length.
};

struct PagedScheduleTensors {
  ConstTensorView row_len;  ///< i32 [T]; negative counts as 0
  TensorView schedule;  ///< i32 [workers+1, 2]: (group, 256-token segment in it) where each worker
                        ///< starts; the last entry is (groups, 0)
};

/// Balances 256-token segments over workers; the remainder goes to the last ones.
///
/// With S = sum over groups of ceil(len / 256), q = S / workers and rem = S % workers, worker i
/// starts at segment i * q + max(0, i - (workers - rem)) of the groups laid end to end. Without any
/// segment every start is (0, 0): a worker tests for emptiness before it loads a length. Exact;
/// never allocates; thread-safe.
///
/// Throws Error(kInvalidArgument) from plan() for a bound outside its range, from run() when T is
/// above max_rows or not a multiple of rows_per_group, or the schedule has another worker count.
///
/// Source: the split schedule of paged multi-query logits, restated in docs/paged_schedule.md.
class FOVEA_API PagedSchedule : public OperatorPlan<PagedScheduleProblem, PagedScheduleTensors> {
 public:
  static PagedSchedule plan(const PagedScheduleProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
