#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/v4_compress.h"
#include "src/core/access.h"
#include "src/core/implementation_list.h"
#include "src/core/row_layout.h"

/// The implementations of v4_compress, and where tokens and rows lie.
namespace fovea::internal {

void v4_compress_ref(const V4CompressProblem& problem, const Device& device,
                     const V4CompressTensors& tensors, Workspace workspace);
void v4_compress_cpu(const V4CompressProblem& problem, const Device& device,
                     const V4CompressTensors& tensors, Workspace workspace);
void v4_compress_cuda_portable(const V4CompressProblem& problem, const Device& device,
                               const V4CompressTensors& tensors, Workspace workspace,
                               Stream stream);

inline constexpr int64_t kCompressRopeDim = 64;
/// Rows of d channels, d <= this.
inline constexpr int64_t kMaxCompressDim = 512;

/// c: groups of ratio 4 reach back over the group before.
FOVEA_HOST_DEVICE inline int64_t groups_of_row(int64_t ratio) { return ratio == 4 ? 2 : 1; }

/// One row of kv_gate: a token of a request.
struct CompressToken {
  int64_t request = -1;  ///< -1: padding.
  int64_t state = 0;
  int64_t position = 0;

  FOVEA_HOST_DEVICE bool valid() const { return request >= 0; }
};

/// One term of a row's softmax: a token's channels, d of them.
struct CompressTerm {
  const float* value;
  const float* logit;
  const float* ape;  ///< Null where it has been added already.
};

/// A call's tensors, and what follows from their untrusted contents.
struct CompressView {
  int64_t ratio;
  int64_t groups;  ///< c
  int64_t dim;     ///< d
  int64_t ring;    ///< S; 0 when online
  int64_t num_rows;
  Accessor<const float, 2> kv_gate;
  Accessor<const float, 2> ape;
  Accessor<const int32_t, 1> positions;
  Accessor<const int32_t, 1> row_to_request;
  Accessor<const float, 2> cos_sin;
  Accessor<float, 4> stored;  ///< [states, S, 2, c*d]
  Accessor<float, 3> online;  ///< [states, 3, d]
  Accessor<const int32_t, 1> state_slot;
  Accessor<const int32_t, 2> page_table;
  PagedRows<uint8_t> pool;
  Accessor<int32_t, 1> emitted;

  CompressView() = default;
  CompressView(const V4CompressProblem& problem, const V4CompressTensors& tensors);

  FOVEA_HOST_DEVICE CompressToken token(int64_t row) const {
    const int64_t request = row_to_request(row);
    if (request < 0 || request >= state_slot.shape[0] || positions(row) < 0) return {};
    const int64_t state = state_slot(request);
    if (state < 0 || state >= (ring > 0 ? stored.shape[0] : online.shape[0])) return {};
    return {request, state, positions(row)};
  }

  /// Whether row `row + step` holds the token `step` after (or, negative, before) `token`, which is
  /// in row `row`.
  FOVEA_HOST_DEVICE bool has_token(const CompressToken& token, int64_t row, int64_t step) const {
    const int64_t other = row + step;
    return other >= 0 && other < num_rows && row_to_request(other) == token.request &&
           positions(other) == token.position + step;
  }

  /// How many of the `most` latest tokens up to row `row` are rows of this call.
  FOVEA_HOST_DEVICE int64_t tokens_here(const CompressToken& token, int64_t row,
                                        int64_t most) const {
    int64_t count = 1;
    while (count < most && has_token(token, row, -count)) ++count;
    return count;
  }

  FOVEA_HOST_DEVICE bool completes_group(const CompressToken& token) const {
    return (token.position + 1) % ratio == 0;
  }

  /// The token `back` before the one in row `row`, of which the `here` latest are rows of this
  /// call; channels from `half` * d on.
  FOVEA_HOST_DEVICE CompressTerm term(const CompressToken& token, int64_t row, int64_t here,
                                      int64_t back, int64_t half) const {
    const int64_t position = token.position - back;
    if (back < here) {
      const float* values = kv_gate.row(row - back) + half * dim;
      return {values, values + groups * dim, ape.row(position % ratio) + half * dim};
    }
    const float* values = stored.row(token.state, position % ring, 0) + half * dim;
    return {values, stored.row(token.state, position % ring, 1) + half * dim, nullptr};
  }

  /// The terms of the group that the token in row `row` completes, in order of positions: at most
  /// groups * ratio. Only for the stored form.
  FOVEA_HOST_DEVICE int64_t stored_terms(const CompressToken& token, int64_t row,
                                         CompressTerm* terms) const {
    const int64_t span = groups * ratio;
    const int64_t here = tokens_here(token, row, span);
    int64_t count = 0;
    for (int64_t back = span - 1; back >= 0; --back) {
      if (back > token.position) continue;  // group 0 has none before it
      terms[count++] = term(token, row, here, back, groups == 2 && back < ratio ? 1 : 0);
    }
    return count;
  }

  /// Where the row that the token completes goes; -1: nowhere.
  FOVEA_HOST_DEVICE int32_t slot(const CompressToken& token) const {
    const int64_t group = token.position / ratio;
    const int64_t column = group / pool.page_size;
    if (column >= page_table.shape[1]) return -1;
    const int64_t page = page_table(token.request, column);
    if (page < 0 || page >= pool.num_pages) return -1;
    const int64_t index = page * pool.page_size + group % pool.page_size;
    return index > 0x7FFFFFFF ? -1 : static_cast<int32_t>(index);
  }

  /// The cosines and sines of the row that the token completes.
  FOVEA_HOST_DEVICE const float* rotation(const CompressToken& token) const {
    const int64_t first = token.position + 1 - ratio;
    return cos_sin.row(first < cos_sin.shape[0] ? first : cos_sin.shape[0] - 1);
  }

  /// Whether the token in row `row` is the one that its ring entry keeps.
  FOVEA_HOST_DEVICE bool stays(const CompressToken& token, int64_t row) const {
    return !has_token(token, row, ring);
  }
};

}  // namespace fovea::internal
