#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fovea/export.h"
#include "fovea/metadata.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What is wrong with the device contents of a batch. A higher value never hides a lower one.
enum class MetadataFault : int32_t {
  kNone,
  kNegativeLength,   ///< seq_len (plus delta) < 0
  kRowsOverLength,   ///< More rows than keys: some row_len < 1
  kLengthOverWidth,  ///< KV length > W
  kNegativeRows,     ///< ext_len < 0
  kRowCount,         ///< The rows of ext_len are more than the arrays of rows hold
  kPoolRow,          ///< pool_row outside req_to_token, of a request with keys
  kSlotRange,        ///< A used slot outside [0, capacity)
  kSlotLayout,       ///< A used slot is not page * P + position % P of its page's first slot
  kStoreSlot,        ///< out_cache_loc outside [0, capacity); -1 is padding and legal
  kIndexRange,       ///< A used entry of topk_indices outside [0, capacity); -1 is legal
};

/// "none", "negative_length", ...
FOVEA_API std::string_view to_string(MetadataFault fault) noexcept;

/// The error word: i32 [8] on the device. The smallest (fault, request, position) wins, whatever
/// order the contents are looked at.
struct MetadataReport {
  MetadataFault fault;
  int32_t request;   ///< kStoreSlot, kIndexRange: the row.
  int32_t position;  ///< Position in the request, or column of topk_indices; otherwise 0.
  int32_t value;     ///< The slot, length or row that is wrong; kRowsOverLength: the rows of the
                     ///< request, kRowCount: those up to its end. Saturating.
  int32_t limit;     ///< The capacity or bound that it breaks; kSlotLayout: the slot that belongs
                     ///< there.
  int32_t count;     ///< Faults of this kind, saturating.
  int32_t unused[2];
};
static_assert(sizeof(MetadataReport) == 32);

/// "request 3, position 130: slot 9000 is outside the capacity of 8192 (2 such slots)". Empty for
/// kNone.
FOVEA_API std::string to_string(const MetadataReport& report);

struct MetadataCheckProblem {
  ForwardMode mode = ForwardMode::kDecode;
  int64_t max_requests = 0;
  int64_t max_rows = 0;
  int64_t table_width = 0;
  int64_t rows_per_request = 1;
  int64_t page_size = 0;
  int64_t topk = 0;      ///< Width of topk_indices; 0 when it is never given.
  int64_t capacity = 0;  ///< Slots of the pools, the dummy page included.
};

struct MetadataCheckTensors {
  ConstTensorView seq_len;        ///< i32 [R]
  ConstTensorView pool_row;       ///< i32 [R]
  ConstTensorView req_to_token;   ///< i32 [rows, W]
  ConstTensorView ext_len;        ///< i32 [R]; modes that read it
  ConstTensorView out_cache_loc;  ///< optional i32 [T]
  ConstTensorView topk_indices;   ///< optional i32 [T, K]
  int32_t kv_len_delta = 0;       ///< kDecode, kIdle
  TensorView error_word;          ///< i32 [8]: a MetadataReport
};

/// Looks at every length, table entry and slot that a step uses and reports the first fault. What
/// it reports was masked or clamped by the operators all the same; nothing is changed.
///
/// Padded requests are legal: slots of pool row 0 may repeat inside the dummy page, and there
/// kDraftExtendV2 with seq_len 1 may have more rows than keys (kPaddedPoolRow, kPaddedSeqLen).
///
/// Only used entries are read: columns of req_to_token below a request's length (after clamping to
/// W), the first min(row_len, topk) columns of topk_indices in live rows; out_cache_loc is read
/// whole. Never waits for the device: the caller reads error_word when it likes. Exact and equal on
/// every implementation; never allocates. plan() and run() throw Error(kInvalidArgument) as
/// MetadataRefresh does.
class FOVEA_API MetadataCheck : public OperatorPlan<MetadataCheckProblem, MetadataCheckTensors> {
 public:
  static MetadataCheck plan(const MetadataCheckProblem& problem, const Device& device,
                            const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
