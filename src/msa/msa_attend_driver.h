#pragma once

#include <algorithm>
#include <cstdint>

#include "src/core/workspace.h"
#include "src/msa/msa_attend_impl.h"

/// The loops around the vector kernels of msa_attend.
///
/// A task is one KV head and one row, or a tile of consecutive rows of a
/// request. It walks over the blocks that its rows list, ascending, decodes
/// each once, and lets the rows that list it attend. The query heads of the
/// rows stand in the lanes of panels: lane = row in the panel * G + head.
///
/// Every (row, head) is computed in the same way whatever runs beside it: its
/// blocks in parts of kMsaPartTokens tokens, each part by itself in tiles of
/// keys with a running maximum, then the parts folded in their order. Threads
/// share out tiles of rows, or, where rows are few, parts.
namespace fovea::internal {

inline constexpr int64_t kMsaPanelLanes = 16;
/// Panels of a tile of rows: their sums (64 KiB at 128 channels) and queries
/// share the second-level cache with the decoded keys and values.
inline constexpr int64_t kMsaTilePanels = 8;
/// Keys that are decoded at a time.
inline constexpr int64_t kMsaTileKeys = 64;
inline constexpr int64_t kMsaPartTokens = 512;

/// Floats from one decoded key, or value, to the next: an odd number of cache
/// lines, which meets all sets of the cache.
constexpr int64_t msa_key_stride(int64_t head_dim) { return (head_dim + 31) / 32 * 32 + 16; }

/// Rows of keys and values that are asked for while others are computed, row by row: a core has a
/// few dozen miss buffers, and a burst that fills them stops the arithmetic too. A kernel calls
/// step() every hundred cycles.
class MsaPrefetch {
 public:
  MsaPrefetch() = default;
  MsaPrefetch(const char* keys, const char* values, int64_t stride_bytes, int64_t row_bytes,
              int64_t num_rows)
      : keys_(keys),
        values_(values),
        stride_(stride_bytes),
        row_bytes_(row_bytes),
        left_(num_rows) {}

  /// Spreads the rows over so many steps.
  void spread(int64_t num_steps) {
    rows_per_step_ = (2 * left_ + num_steps - 1) / std::max<int64_t>(1, num_steps);
  }

  /// The next rows: a key, then its value.
  [[gnu::always_inline]] inline void step() {
    for (int64_t i = 0; i < rows_per_step_; ++i) row();
  }

  /// All that are left.
  void finish() {
    while (left_ > 0) row();
  }

 private:
  [[gnu::always_inline]] inline void row() {
    if (left_ == 0) return;
    const char* const from = value_is_next_ ? values_ : keys_;
    // Into the second-level cache: a tile is larger than the first.
    for (int64_t byte = 0; byte < row_bytes_; byte += 64) __builtin_prefetch(from + byte, 0, 2);
    if (value_is_next_) {
      keys_ += stride_;
      values_ += stride_;
      --left_;
    }
    value_is_next_ = !value_is_next_;
  }

  const char* keys_ = nullptr;
  const char* values_ = nullptr;
  int64_t stride_ = 0;
  int64_t row_bytes_ = 0;
  int64_t left_ = 0;  // keys whose values have not been asked for
  int64_t rows_per_step_ = 2;
  bool value_is_next_ = false;
};

/// Softmax state of lanes: `out` is the sum of exp(x_j - max) * v_j.
struct MsaState {
  float* max;  ///< [lanes]; -inf: no key with any weight
  float* sum;  ///< [lanes]
  float* out;  ///< [lanes][head_dim]

  MsaState at(int64_t lane, int64_t head_dim) const {
    return {max + lane, sum + lane, out + lane * head_dim};
  }
};

/// Consecutive rows of a pool, as they are stored.
struct MsaStoredRows {
  MsaKvMode mode;
  const char* rows;
  int64_t stride_bytes;
  const uint8_t* group_scales;  ///< Of kQ8Kv4.
  int64_t scale_stride;

  MsaStoredRows from(int64_t row) const {
    return {mode, rows + row * stride_bytes, stride_bytes,
            group_scales == nullptr ? nullptr : group_scales + row * scale_stride, scale_stride};
  }
};

/// One panel and one tile of keys. A panel alone decodes its tile itself, some rows at a time, so
/// that the first-level cache holds them from there to their products: a whole decoded tile of 128
/// channels, 72 KiB, would go through the second level.
struct MsaPanelTask {
  const float* query;  ///< [head_dim][kMsaPanelLanes]
  float* keys;         ///< [num_keys, up to 11 more that are finite][key stride]
  float* values;       ///< [num_keys][key stride]
  const MsaStoredRows*
      stored;  ///< Keys and values; `keys` and `values` are scratch. Null: decoded.
  int64_t head_dim;
  int64_t num_keys;          ///< The largest of `visible`.
  int64_t num_rows;          ///< Rows of the panel
  int64_t lanes_per_row;     ///< G
  const int32_t* visible;    ///< [kMsaPanelLanes]: keys that the lane sees
  const uint8_t* fresh;      ///< [rows]: whether the row's `out` holds nothing yet
  const float* scale;        ///< [kMsaPanelLanes]
  const float* key_scale;    ///< [num_keys], or null
  const float* value_scale;  ///< [num_keys], or null
  MsaState state;
  float* logits;  ///< [kMsaTileKeys + 12][kMsaPanelLanes]
  float* keep;    ///< [kMsaPanelLanes]
  MsaPrefetch* prefetch;
};

struct MsaAttendKernel {
  /// The first `count` rows as fp32, a key stride apart.
  void (*decode_rows)(const MsaStoredRows& stored, int64_t head_dim, int64_t count, float* out);
  /// Adds the keys to the state of the lanes that see some.
  void (*attend_panel)(const MsaPanelTask& task);
  /// run += part for `lanes` lanes; `first`: run = part.
  void (*fold)(int64_t lanes, int64_t head_dim, bool first, const MsaState& part,
               const MsaState& run);
  /// out = bf16(values * factor).
  void (*write_row)(const float* values, float factor, int64_t head_dim, bf16_t* out);
};

/// The kernel of the best instruction set that Highway dispatches to.
MsaAttendKernel msa_attend_kernel();

size_t msa_attend_workspace(const MsaAttendProblem& problem, const Device& device);
void run_msa_attend(const MsaAttendKernel& kernel, const MsaAttendProblem& problem,
                    const Device& device, const MsaAttendTensors& tensors, Workspace workspace);

}  // namespace fovea::internal
