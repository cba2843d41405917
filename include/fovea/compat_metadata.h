#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/tensor.h"

/// What exists only for the interface of engines whose batch metadata has one slot per token and
/// per-step copies. The library's own operators need none of it: metadata_refresh fills every step
/// in place. Plain functions over host memory. Names of the original: docs/compat_metadata.md.
namespace fovea::compat {

/// The host lengths of a batch, in the terms of ForwardBatch: what seq_len includes differs by mode
/// (docs/concepts.md).
struct BatchLengths {
  ForwardMode mode = ForwardMode::kDecode;
  int64_t rows_per_request = 1;      ///< N; kTargetVerify, kDraftExtendV2
  std::span<const int32_t> seq_len;  ///< [R]
  std::span<const int32_t> ext_len;  ///< [R]; kExtend, kMixed, kDraftExtend
  /// kExtend, kMixed: seq_len and ext_len are ContextSplit::kv_len and ext_len of a rank.
  bool is_context_split = false;
  int64_t padded_rows = 0;  ///< T; 0: E
};

/// Fields that are functions of host lengths.
struct HostFields {
  std::vector<int32_t> extend_lens;       ///< [R]: rows of each request
  std::vector<int32_t> cu_seqlens_q;      ///< see host_fields()
  int32_t max_seqlen_q = 0;               ///< see host_fields()
  std::vector<int32_t> nsa_cu_seqlens_q;  ///< 0..T: every row is a sequence of its own
  int32_t nsa_max_seqlen_q = 1;
  std::optional<int64_t> seq_lens_sum;  ///< kExtend, kMixed: sum of L
};

/// cu_seqlens_q and max_seqlen_q by mode, with L the KV lengths, n the rows of each request and E
/// their sum:
///
///   kDecode, kIdle                                0..R, 1 (0 without requests)
///   kTargetVerify, kDraftExtend, kDraftExtendV2   0..E, 1 (0 without rows)
///   kExtend, kMixed, some prefix or a split       cum(n), max n (1 without requests)
///   kExtend, kMixed otherwise                     equal to cu_seqlens_k and max_seqlen_k: cum(L),
///                                                 max L
///
/// Throws Error(kInvalidArgument), naming the request, for L < n, n < 0 and sums beyond int32; for
/// arrays of different lengths or that the mode does not read, padded_rows < E, a split in another
/// mode.
FOVEA_API HostFields host_fields(const BatchLengths& lengths);

/// cu_seqlens i32 [n+1] = [0, x0, x0 + x1, ...] of lengths i32 [n]; negative lengths count as 0,
/// sums saturate at 2^31 - 1. Throws Error(kInvalidArgument) for other shapes.
FOVEA_API void compute_cu_seqlens(const ConstTensorView& lengths, const TensorView& cu_seqlens);

/// nsa_seqlens i32 [n] = min(max(length, 0), topk): keys that a row selects. May be in place.
/// Throws Error(kInvalidArgument) for other shapes and topk < 1.
FOVEA_API void compute_nsa_seqlens(const ConstTensorView& lengths, int64_t topk,
                                   const TensorView& nsa_seqlens);

/// padded i32 [T] = lengths i32 [E], then zeros. May be in place. Throws Error(kInvalidArgument)
/// when T < E.
FOVEA_API void pad_nsa_cache_seqlens(const ConstTensorView& lengths, const TensorView& padded);

struct PageTable1Tensors {
  ConstTensorView kv_len;          ///< i32 [R]: L, as metadata_refresh gives it
  ConstTensorView pool_row;        ///< i32 [R]; outside req_to_token: a row of slots -1
  ConstTensorView req_to_token;    ///< i32 [rows, W]
  ConstTensorView row_to_request;  ///< i32 [T]; kTargetVerify, kDraftExtend, kDraftExtendV2 only
};

/// page_table_1 i32 [R or T rows, columns]: slots of every position, one table row per request in
/// kDecode, kIdle, kExtend and kMixed, the request's row once per query row in the other modes.
///
/// Columns of req_to_token at L and beyond are never read, and the columns of page_table_1 there
/// are not written. Table rows that belong to no request hold slot 0, the dummy page, in every
/// column.
///
/// Throws Error(kInvalidArgument) before anything is written, naming the request, when L is
/// negative, above W or above the columns; for fewer table rows than needed; row_to_request given
/// or missing against the mode.
FOVEA_API void build_page_table_1(ForwardMode mode, const PageTable1Tensors& tensors,
                                  const TensorView& page_table_1);

/// page_table_1_flattened i32 [sum of L]: the slots of every request, one after the other.
/// row_to_request is not looked at. Throws as build_page_table_1, and for another extent.
FOVEA_API void build_page_table_1_flattened(const PageTable1Tensors& tensors,
                                            const TensorView& page_table_1_flattened);

/// Largest number of destinations of one copy.
inline constexpr int kMaxCopies = 8;

/// Arrays of one step: those of metadata_refresh, and the table of slots.
struct StepArrays {
  MetadataFields fields;
  TensorView page_table_1;  ///< i32 [R or rows, columns]
};

/// Copies the arrays of a step that were computed once into persistent arrays, 1 to 8 sets.
///
/// kv_len, kv_indptr, page_table_1, topk_length and topk_indptr in every mode, row_len in all but
/// kDecode and kIdle (there it is kv_len). Optional, copied when present in the source and in every
/// destination: page_table, schedule, split_schedule with split_indptr, and in kDraftExtend
/// q_indptr with row_to_request. Other fields are not looked at.
///
/// Element 0 of a cumulative array is never written. Arrays of requests are written over the
/// source's extent, arrays of rows over the destination's, with padding values after the rows of
/// the source: row_len and topk_length 0, row_to_request -1, topk_indptr and split_indptr their
/// last value, page_table_1 slot 0 in every column, so that a smaller batch leaves no trace of a
/// larger one. Every array has its own strides.
///
/// Throws before anything is copied: Error(kInvalidArgument) for a field that is missing, present
/// on one side only, of another type or inconsistent extent, or that does not fit its destination;
/// Error(kUnsupported) for kExtend and kMixed, whose arrays do not persist. Never allocates.
FOVEA_API void fused_metadata_copy(ForwardMode mode, const StepArrays& source,
                                   const StepArrays& destination);
FOVEA_API void fused_metadata_copy_multi(ForwardMode mode, const StepArrays& source,
                                         std::span<const StepArrays> destinations);

/// Compares everything that a copy writes. Throws Error(kMismatch) "fused_metadata_copy:
/// destination 1: topk_indptr[7] = 12, expected 13; 3 of 64 entries differ" for the first field
/// that differs; otherwise as the copy.
FOVEA_API void verify_metadata_copy(ForwardMode mode, const StepArrays& source,
                                    std::span<const StepArrays> destinations);

}  // namespace fovea::compat
