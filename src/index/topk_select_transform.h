#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "fovea/topk_select.h"
#include "src/core/access.h"

/// Windows of rows and the map from positions to indices, common to every implementation.
namespace fovea::internal {

/// The columns that row t may read: [start, start + len) with 0 <= start, start + len <= W.
struct TopkWindow {
  int64_t start = 0;
  int64_t len = 0;
};

/// Reads the row arrays of topk_select and turns positions into indices.
class TopkRows {
 public:
  TopkRows(const TopkSelectProblem& problem, const TopkSelectTensors& tensors)
      : transform_(problem.transform),
        page_size_(problem.page_size),
        page_shift_(std::has_single_bit(static_cast<uint64_t>(problem.page_size))
                        ? std::countr_zero(static_cast<uint64_t>(problem.page_size))
                        : -1),
        topk_(problem.topk),
        width_(tensors.logits.shape[1]),
        live_rows_(tensors.row_len.shape[0]),
        logits_(access<const float, 2>(tensors.logits)),
        row_len_(access<const int32_t, 1>(tensors.row_len)),
        row_start_(access<const int32_t, 1>(tensors.row_start)),
        row_to_request_(access<const int32_t, 1>(tensors.row_to_request)),
        row_offset_(access<const int32_t, 1>(tensors.row_offset)),
        indices_(access<int32_t, 2>(tensors.indices)) {
    if (transform_ != IndexTransform::kPaged) return;
    by_token_ = tensors.token_table.defined();
    table_ = access<const int32_t, 2>(by_token_ ? tensors.token_table : tensors.page_table);
  }

  FOVEA_HOST_DEVICE int64_t num_rows() const { return indices_.shape[0]; }
  FOVEA_HOST_DEVICE int64_t width() const { return width_; }

  /// The window of row t; empty for padding rows and, kPaged, for rows without a request.
  FOVEA_HOST_DEVICE TopkWindow window(int64_t t) const {
    if (t >= live_rows_) return {};
    if (transform_ == IndexTransform::kPaged) {
      const int64_t r = request(t);
      if (r < 0 || r >= table_.shape[0]) return {};
    }
    TopkWindow window;
    if (row_start_) window.start = within(row_start_(t), width_);
    window.len = within(row_len_(t), width_ - window.start);
    return window;
  }

  /// The logits of row t's window, which must not be empty.
  FOVEA_HOST_DEVICE const float* logits(int64_t t, const TopkWindow& window) const {
    return logits_.row(t) + window.start;
  }

  /// Column 0 of row t, whether or not its window has it; null for padding rows.
  FOVEA_HOST_DEVICE const float* columns(int64_t t) const {
    return t < live_rows_ ? logits_.row(t) : nullptr;
  }

  /// Row t of `indices`; there must be columns.
  FOVEA_HOST_DEVICE int32_t* out(int64_t t) const { return indices_.row(t); }

  /// What position `pos` of row t, within its window, becomes.
  FOVEA_HOST_DEVICE int32_t index(int64_t t, int32_t pos) const {
    if (transform_ == IndexTransform::kRagged) return index_or_hole(pos + int64_t{row_offset_(t)});
    if (transform_ != IndexTransform::kPaged) return pos;
    const int32_t* table = table_.row(request(t));
    return by_token_ ? token(table, pos) : slot(table, pos);
  }

  /// Writes the whole of row t of `indices` from its selected positions, ascending.
  void write(int64_t t, const int32_t* positions, int64_t count) const {
    int32_t* out = topk_ > 0 ? indices_.row(t) : nullptr;
    for (int64_t i = 0; i < count; ++i) out[i] = positions[i];
    finish(t, out, count);
  }

  /// The same for positions 0..count-1.
  void write_identity(int64_t t, int64_t count) const {
    int32_t* out = topk_ > 0 ? indices_.row(t) : nullptr;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(i);
    finish(t, out, count);
  }

 private:
  FOVEA_HOST_DEVICE int64_t request(int64_t t) const {
    return row_to_request_ ? row_to_request_(t) : t;
  }

  /// `value` cut to [0, limit]; kernels have no stack for the references that std::clamp takes.
  FOVEA_HOST_DEVICE static int64_t within(int64_t value, int64_t limit) {
    return value < 0 ? 0 : value > limit ? limit : value;
  }

  FOVEA_HOST_DEVICE static int32_t index_or_hole(int64_t index) {
    return index >= 0 && index <= std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(index)
                                                                      : -1;
  }

  void finish(int64_t t, int32_t* out, int64_t count) const {
    if (count > 0 && transform_ == IndexTransform::kRagged) {
      const int64_t offset = row_offset_(t);
      for (int64_t i = 0; i < count; ++i) out[i] = index_or_hole(out[i] + offset);
    }
    if (count > 0 && transform_ == IndexTransform::kPaged) {
      const int32_t* table = table_.row(request(t));
      for (int64_t i = 0; i < count; ++i)
        out[i] = by_token_ ? token(table, out[i]) : slot(table, out[i]);
    }
    for (int64_t i = count; i < topk_; ++i) out[i] = -1;
  }

  FOVEA_HOST_DEVICE int32_t token(const int32_t* table, int64_t pos) const {
    return pos < table_.shape[1] ? index_or_hole(table[pos]) : -1;
  }

  FOVEA_HOST_DEVICE int32_t slot(const int32_t* table, int64_t pos) const {
    // A division takes longer than the rest of the row's entry; page sizes are mostly powers of
    // two. Positions and page sizes are below 2^31.
    const int64_t column = page_shift_ >= 0
                               ? pos >> page_shift_
                               : static_cast<uint32_t>(pos) / static_cast<uint32_t>(page_size_);
    if (column >= table_.shape[1] || table[column] < 0) return -1;
    return index_or_hole(table[column] * page_size_ + (pos - column * page_size_));
  }

  IndexTransform transform_;
  int64_t page_size_;
  int page_shift_;  // log2 of page_size_, or -1
  int64_t topk_;
  int64_t width_;
  int64_t live_rows_;
  bool by_token_ = false;
  Accessor<const float, 2> logits_;
  Accessor<const int32_t, 1> row_len_;
  Accessor<const int32_t, 1> row_start_;
  Accessor<const int32_t, 1> row_to_request_;
  Accessor<const int32_t, 1> row_offset_;
  Accessor<const int32_t, 2> table_;
  Accessor<int32_t, 2> indices_;
};

}  // namespace fovea::internal
