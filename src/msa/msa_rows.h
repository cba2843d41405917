#pragma once

#include <cstdint>

#include "src/core/access.h"

/// Where the rows of a batch stand, for every operator of the room and every backend.
namespace fovea::internal {

/// The part [begin, end) of the rows that one request owns.
struct MsaRowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// One query row. `own` is the block that it stands in; -1 marks an empty row, which sees nothing.
struct MsaRow {
  int64_t position = -1;
  int32_t request = -1;
  int32_t kv_len = 0;
  int32_t own = -1;

  FOVEA_HOST_DEVICE bool is_empty() const { return own < 0; }
};

/// The untrusted arrays that describe a batch, and the numbers that cut them.
struct MsaBatch {
  Accessor<const int32_t, 1> kv_len, q_indptr, q_offset;
  int64_t num_rows = 0;
  int64_t max_pages = 0;
  int64_t block_size = 1;

  FOVEA_HOST_DEVICE int64_t num_requests() const { return kv_len.shape[0]; }

  /// An offset, cut to the rows.
  FOVEA_HOST_DEVICE int64_t offset(int64_t i) const {
    const int64_t value = q_indptr(i);
    return value < 0 ? 0 : value > num_rows ? num_rows : value;
  }

  /// Row `t` of request `request`, which owns `range`.
  FOVEA_HOST_DEVICE MsaRow row(int64_t request, MsaRowRange range, int64_t t) const {
    return row(request, range, t, kv_len(request));
  }
  /// The same where kv_len of the request is at hand.
  FOVEA_HOST_DEVICE MsaRow row(int64_t request, MsaRowRange range, int64_t t, int64_t len) const {
    MsaRow result;
    const int64_t capacity = max_pages * block_size;
    if (len > capacity) len = capacity;
    if (len <= 0) return result;
    const int64_t prefix = q_offset ? q_offset(request) : len - (range.end - range.begin);
    const int64_t position = prefix + (t - range.begin);
    if (position < 0) return result;
    result.position = position;
    result.request = static_cast<int32_t>(request);
    result.kv_len = static_cast<int32_t>(len);
    // In 32 bits, which the capacity fits: a GPU has no 64-bit division.
    result.own = position < capacity
                     ? static_cast<int32_t>(position) / static_cast<int32_t>(block_size)
                     : static_cast<int32_t>(max_pages - 1);
    return result;
  }
};

/// The row sees no token from this one on.
FOVEA_HOST_DEVICE inline int64_t msa_row_end(const MsaRow& row, bool causal) {
  return causal && row.position < row.kv_len ? row.position + 1 : row.kv_len;
}

/// Tokens of block n, which start it, that the row sees.
FOVEA_HOST_DEVICE inline int64_t msa_visible_tokens(const MsaRow& row, int64_t n,
                                                    int64_t block_size, bool causal) {
  const int64_t seen = msa_row_end(row, causal) - n * block_size;
  return seen < 0 ? 0 : seen > block_size ? block_size : seen;
}

/// Fills rows[0 .. num_rows): offsets are cut and never fall, so that every row has one request or
/// none. Kernels of a GPU find a row's request as the first r with offset(r + 1) > t.
inline void read_msa_rows(const MsaBatch& batch, MsaRow* rows) {
  for (int64_t t = 0; t < batch.num_rows; ++t) rows[t] = MsaRow{};
  int64_t begin = batch.offset(0);
  for (int64_t r = 0; r < batch.num_requests(); ++r) {
    const int64_t next = batch.offset(r + 1);
    const MsaRowRange range{begin, next > begin ? next : begin};
    for (int64_t t = range.begin; t < range.end; ++t) rows[t] = batch.row(r, range, t);
    begin = range.end;
  }
}

}  // namespace fovea::internal
