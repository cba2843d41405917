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
  int64_t table_width = 0;  ///< W, columns of req_to_token.
  int64_t rows_per_request = 1;  ///< N of kTargetVerify and kDraftExtendV2.
  int64_t topk = 0;
  int64_t page_size = 0;                              ///< P, 1..256.
  IndexTransform transform = IndexTransform::kPaged;  ///< kRagged asks for row_offset.
  int64_t workers = 64;                               ///< Workers of the paged-logits schedule.
};

/// The arrays of one step: device i32, owned by the caller, at least as long as their bounds.
/// Shapes below use the live R, E and T = padded_rows (E when 0). Formulas: docs/metadata.md.
struct MetadataFields {
  TensorView kv_len;      ///< [R]
  TensorView kv_indptr;   ///< [R+1]
  TensorView max_kv_len;  ///< [1]
  TensorView q_indptr;    ///< [R+1]
  TensorView max_q_len;   ///< [1]
  TensorView
      page_table;  ///< [R, >= ceil(max kv_len / P)]; columns past a request's pages are unspecified
  TensorView row_to_request;  ///< [T]; -1 in padding
  TensorView row_len;         ///< [E]; in kDecode and kIdle it equals kv_len
  TensorView topk_length;     ///< [T]; 0 in padding
  TensorView topk_indptr;     ///< [T+1]
  TensorView ext_len;         ///< [R]: rows of each request
  TensorView k_start;         ///< [E]; kExtend, kMixed only
  TensorView k_end;           ///< [E]; kExtend, kMixed only
  TensorView row_offset;      ///< [E]; kExtend, kMixed with transform kRagged only
  TensorView schedule;        ///< [workers+1, 2]; the other modes only
};

struct MetadataTensors {
  ConstTensorView seq_len;       ///< i32 [R]
  ConstTensorView pool_row;      ///< i32 [R]: row of req_to_token
  ConstTensorView req_to_token;  ///< i32 [rows, W]: slot of each position
  ConstTensorView ext_len;       ///< i32 [R]; kExtend, kMixed, kDraftExtend
  ConstTensorView prefix_len;    ///< optional i32 [R]; absent: seq_len - ext_len
  int64_t padded_rows = 0;       ///< T; 0: no padding
  int num_steps = 1;             ///< Steps to fill, 1..8; more than one only in kDecode
  std::array<int32_t, kMaxRefreshSteps>
      kv_len_delta{};  ///< Added to every length of the step (kDecode)
  std::array<MetadataFields, kMaxRefreshSteps> steps{};
};

/// Builds every per-step array of sparse attention from lengths and the request table, without host
/// lengths.
class FOVEA_API MetadataRefresh : public OperatorPlan<MetadataProblem, MetadataTensors> {
 public:
  static MetadataRefresh plan(const MetadataProblem& problem, const Device& device,
                              const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

/// Tokens that one unit of paged-logits work covers.
inline constexpr int64_t kScheduleTokens = 256;

struct PagedScheduleProblem {
  int64_t max_rows = 0;  ///< Upper bound of T.
  int64_t workers = 64;
  int64_t rows_per_group = 1;  ///< Divides T; the last row of a group gives its length.
};

struct PagedScheduleTensors {
  ConstTensorView row_len;  ///< i32 [T]; negative counts as 0
  TensorView
      schedule;  ///< i32 [workers+1, 2]: (group, 256-token segment in it) where each worker starts
};

/// Balances 256-token segments over workers; the remainder goes to the last ones.
class FOVEA_API PagedSchedule : public OperatorPlan<PagedScheduleProblem, PagedScheduleTensors> {
 public:
  static PagedSchedule plan(const PagedScheduleProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
