#pragma once

#include <algorithm>
#include <cstdint>

#include "src/core/workspace.h"
#include "src/mla/mha_varlen_impl.h"

/// Tiles and scratch of the vector implementation of mha_varlen, for every instruction set.
namespace fovea::internal {

/// Rows of one request and head that are computed together. Keys and values are decoded once for
/// all of them; what a block needs (about 280 KiB for 192 and 128 channels) stays in the L2 cache.
inline constexpr int64_t kMhaBlockRows = 128;
/// Keys of one tile; every row walks the same tiles, starting at its request's first key. A
/// multiple of the keys of every register tile (6 and 12).
inline constexpr int64_t kMhaTileKeys = 60;
/// Floats past the end of a row of scratch. Rows of an odd number of cache lines meet all cache
/// sets.
inline constexpr int64_t kMhaRowPadding = 16;
/// Floats from the weights of one key to those of the next.
inline constexpr int64_t kMhaWeightStride = kMhaBlockRows + kMhaRowPadding;

/// Floats from one decoded key, or value, to the next.
constexpr int64_t mha_row_stride(int64_t head_dim) {
  return (head_dim + 15) / 16 * 16 + kMhaRowPadding;
}

/// Memory of one worker.
struct MhaScratch {
  float* query;    ///< [panel][Dqk][rows of the panel], see load_query()
  float* keys;     ///< [kMhaTileKeys][key stride]
  float* values;   ///< [kMhaTileKeys][value stride]
  float* weights;  ///< [kMhaTileKeys][kMhaWeightStride]: logits, then exp(logit - maximum)
  float* out;      ///< [kMhaBlockRows][value stride], not yet divided by the sum
  float* max;      ///< [kMhaBlockRows] running maximum of the logits
  float* sum;      ///< [kMhaBlockRows] running sum of the weights
  float* keep;     ///< [kMhaBlockRows] factor of the sums so far when the maximum rises
  int32_t*
      visible;  ///< [kMhaBlockRows] keys that the row sees, never falling; past the last row: its

  MhaScratch(WorkspaceCutter& cutter, const MhaVarlenProblem& problem) {
    const int64_t key_stride = mha_row_stride(problem.head_dim_qk);
    const int64_t value_stride = mha_row_stride(problem.head_dim_v);
    query = cutter.take<float>(problem.head_dim_qk * kMhaBlockRows);
    keys = cutter.take<float>(kMhaTileKeys * key_stride);
    values = cutter.take<float>(kMhaTileKeys * value_stride);
    weights = cutter.take<float>(kMhaTileKeys * kMhaWeightStride);
    out = cutter.take<float>(kMhaBlockRows * value_stride);
    max = cutter.take<float>(kMhaBlockRows);
    sum = cutter.take<float>(kMhaBlockRows);
    keep = cutter.take<float>(kMhaBlockRows);
    visible = cutter.take<int32_t>(kMhaBlockRows);
  }
};

/// The blocks of a batch: request by request, head by head, in order of rows.
class MhaBlocks {
 public:
  struct Block {
    RequestRange rows;  ///< of the request
    RequestRange keys;
    int64_t head;
    int64_t first_row;  ///< within the request
  };

  MhaBlocks(WorkspaceCutter& cutter, const MhaVarlenProblem& problem)
      : num_heads_(problem.num_heads),
        rows_(cutter.take<RequestRange>(problem.max_requests)),
        keys_(cutter.take<RequestRange>(problem.max_requests)),
        first_block_(cutter.take<int64_t>(problem.max_requests + 1)) {}

  /// Reads the offsets.
  void fill(const MhaVarlenTensors& tensors) {
    num_requests_ = tensors.q_indptr.shape[0] - 1;
    RequestRanges rows(static_cast<const int32_t*>(tensors.q_indptr.data), tensors.q.shape[0]);
    RequestRanges keys(static_cast<const int32_t*>(tensors.kv_indptr.data), tensors.k.shape[0]);
    first_block_[0] = 0;
    for (int64_t r = 0; r < num_requests_; ++r) {
      rows_[r] = rows.next();
      keys_[r] = keys.next();
      first_block_[r + 1] = first_block_[r] + num_heads_ * row_blocks(r);
    }
  }

  int64_t count() const { return first_block_[num_requests_]; }

  Block operator[](int64_t index) const {
    // The last request that starts at or before the block: requests without rows are passed over.
    const int64_t* next = std::upper_bound(first_block_, first_block_ + num_requests_ + 1, index);
    const int64_t r = next - first_block_ - 1;
    const int64_t within = index - first_block_[r];
    return {rows_[r], keys_[r], within / row_blocks(r), within % row_blocks(r) * kMhaBlockRows};
  }

 private:
  int64_t row_blocks(int64_t r) const {
    return (rows_[r].count() + kMhaBlockRows - 1) / kMhaBlockRows;
  }

  int64_t num_heads_;
  int64_t num_requests_ = 0;
  RequestRange* rows_;
  RequestRange* keys_;
  int64_t* first_block_;
};

}  // namespace fovea::internal
