#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "fovea/device.h"
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

/// Where EXTEND reads the keys of its own new rows.
enum class ExtendKvSource : uint8_t {
  kCache,  ///< Stored first and read back through the codec: a row does not depend on chunking or
           ///< prefix hits.
  kFresh,  ///< This call's unquantised rows, where the contiguous kernel runs and no request has a
           ///< prefix.
};

/// "cache", "fresh".
FOVEA_API std::string_view to_string(ExtendKvSource source) noexcept;

/// A padded request of a graph bucket: seq_len 1, and a row of req_to_token that no request gets.
/// Its slots lie in the dummy page, all of them in slot 0 as a rule.
inline constexpr int32_t kPaddedSeqLen = 1;
inline constexpr int32_t kPaddedPoolRow = 0;

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
  int64_t split_parts = 0;     ///< Parts of split_schedule (SplitScheduleProblem::parts); 0: none.
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
  TensorView split_schedule;  ///< [split_parts, 8] of topk_length, in any mode with split_parts > 0
  TensorView split_indptr;    ///< [T+1], with split_schedule: pieces of each row, cumulative; a
                              ///< padding row has one, whose zeros its part writes
};

struct MetadataTensors {
  ConstTensorView seq_len;       ///< i32 [R]
  ConstTensorView pool_row;      ///< i32 [R]: row of req_to_token; outside it: a row of pages -1
  ConstTensorView req_to_token;  ///< i32 [rows, W]: slot of each position; negative: page -1
  ConstTensorView ext_len;       ///< i32 [R]; kExtend, kMixed, kDraftExtend; negative counts as 0
  ConstTensorView prefix_len;    ///< optional i32 [R], only with ext_len; it is seq_len - ext_len,
                                 ///< so that nothing depends on it: accepted for the caller's ease
  int64_t padded_rows = 0;       ///< T; 0: the extent of each array of rows
  int num_steps = 1;             ///< Steps to fill, 1..8, in any mode
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

/// Compares what a refresh has written with what the reference builder writes from the same inputs:
/// every field, every step, over exactly the ranges that a refresh writes. Owns the scratch arrays
/// of one step, so that verify() allocates only for its message.
///
/// On a GPU it waits for the stream, copies inputs and fields to the host (into memory that it
/// keeps), and compares there; a stream that is being captured is refused.
class FOVEA_API MetadataVerifier {
 public:
  /// Bounds as for MetadataRefresh::plan; throws as it does.
  MetadataVerifier(const MetadataProblem& problem, const Device& device);

  /// Throws Error(kMismatch) "metadata_refresh: step 1: topk_indptr[7] = 12, expected 13; 3 of 64
  /// entries differ" for the first field that differs.
  void verify(const MetadataTensors& tensors, Stream stream = {});

 private:
  MetadataTensors on_host(const MetadataTensors& tensors, Stream stream);

  MetadataProblem problem_;
  Device device_;
  MetadataRefresh reference_;
  HostBuffer scratch_, copies_;
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

/// Slots that one block of sparse-decode work covers.
inline constexpr int64_t kSplitBlockSlots = 64;
/// Blocks that starting a piece of work costs, in the balance of parts.
inline constexpr int64_t kSplitOverheadBlocks = 5;

struct SplitScheduleProblem {
  int64_t max_rows = 0;  ///< Upper bound of T.
  int64_t parts = 64;    ///< P >= 1: workers that walk the blocks.
};

struct SplitScheduleTensors {
  ConstTensorView topk_length;  ///< i32 [T]: slots of each row; negative counts as 0
  TensorView split_schedule;    ///< i32 [P, 8], see SplitPart
  TensorView split_indptr;      ///< i32 [T+1]: row r has pieces split_indptr[r] ..
                                ///< split_indptr[r+1]-1
};

/// One line of split_schedule: the blocks that part p walks, rows laid end to end.
struct SplitPart {
  int32_t first_row;       ///< T: the part has no work; last_row is then T - 1 and the rest 0.
  int32_t last_row;        ///< Inclusive.
  int32_t first_block;     ///< Of first_row.
  int32_t end_block;       ///< Of last_row, exclusive.
  int32_t first_split;     ///< Which piece of first_row the part starts with.
  int32_t first_is_split;  ///< 1: first_row has several pieces.
  int32_t last_is_split;   ///< 1: last_row has several pieces.
  int32_t unused;
};
static_assert(sizeof(SplitPart) == 32);

/// Cuts the blocks of 64 slots of every row into P contiguous parts of nearly equal cost.
///
/// With n_r = max(1, ceil(len_r / 64)) blocks, F = 5 blocks of overhead per piece and budget cap =
/// ceil(sum (n_r + F) / P) + F, parts walk the rows in order: a part takes the rest of a row when
/// budget >= rest + F, else budget - F of its blocks when budget > F, else it is full. A part has
/// at most two pieces of split rows, so that min(T + P, 2 P) accumulators suffice for any lengths.
/// An empty row has one block: whoever walks it writes its zeros. Any T. Exact; never allocates;
/// thread-safe. The cuts depend on the whole batch; an operator that must be batch-invariant does
/// not use them.
///
/// Throws Error(kInvalidArgument) from plan() for a bound outside its range, from run() when T is
/// above max_rows or the arrays have another shape.
///
/// Source: spec of the sparse-decode planner, restated in docs/split_schedule.md.
class FOVEA_API SplitSchedule : public OperatorPlan<SplitScheduleProblem, SplitScheduleTensors> {
 public:
  static SplitSchedule plan(const SplitScheduleProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
