#pragma once

#include <algorithm>
#include <cstdint>

#include "src/core/workspace.h"
#include "src/msa/msa_index_impl.h"

/// What msa_block_scores and msa_score_select share on the CPU: tiles of rows, the walk over
/// blocks. A kernel supplies the arithmetic of one instruction set.
///
/// The keys of a block stand in the lanes, queries are broadcast; a product adds its channels one
/// by one in their order. So its bits depend on the query and the key alone, whatever tile, chunk
/// of blocks or thread computes it.
namespace fovea::internal {

/// Queries (row, head) that pass over a block together; more only where a row has more heads.
inline constexpr int64_t kMsaTileQueries = 64;
/// Keys of the widest kernel tile; products of a query are padded to a multiple of it.
inline constexpr int64_t kMsaMaxKeyTile = 64;
/// Blocks that one task scores where rows are few.
inline constexpr int64_t kMsaChunkBlocks = 64;

/// One block and the queries of a tile.
struct MsaScoreTask {
  const float* queries;    ///< [num_queries][head_dim]
  const int32_t* visible;  ///< [num_queries]: tokens of the block that the query sees
  int64_t num_queries;
  int64_t head_dim;
  const bf16_t* keys;  ///< num_keys rows, key_stride elements apart
  int64_t key_stride;
  int64_t num_keys;         ///< The largest of `visible`.
  const bf16_t* next_keys;  ///< The keys of the next block, or null: asked for meanwhile.
  int64_t product_stride;
  BlockScore score;
  float index_scale;
  float* packed;    ///< [head_dim][kMsaMaxKeyTile]
  float* products;  ///< [num_queries][product_stride]
  float* results;   ///< [num_queries]
};
using MsaScoreKernel = void (*)(const MsaScoreTask& task);

/// The kernel of the best instruction set that Highway dispatches to.
MsaScoreKernel msa_score_kernel();

/// Consecutive rows of one request, or of none.
struct MsaRowTile {
  int32_t first_row = 0;
  int32_t num_rows = 0;
};

inline int64_t msa_tile_rows(int64_t num_heads) {
  return std::max<int64_t>(1, kMsaTileQueries / num_heads);
}

/// Cuts the rows into tiles of at most `tile_rows`; returns their number (at most the rows).
inline int64_t cut_msa_tiles(const MsaRow* rows, int64_t num_rows, int64_t tile_rows,
                             MsaRowTile* tiles) {
  int64_t count = 0;
  for (int64_t t = 0; t < num_rows; ++t) {
    MsaRowTile* last = count > 0 ? &tiles[count - 1] : nullptr;
    if (last != nullptr && last->num_rows < tile_rows && rows[t].request == rows[t - 1].request)
      ++last->num_rows;
    else
      tiles[count++] = {static_cast<int32_t>(t), 1};
  }
  return count;
}

/// Memory of one worker.
struct MsaScoreScratch {
  float* queries;
  float* packed;
  float* products;
  float* results;
  int32_t* visible;
  int64_t product_stride;

  MsaScoreScratch(WorkspaceCutter& cutter, const MsaBlockScoresProblem& problem) {
    const int64_t capacity = msa_tile_rows(problem.num_heads) * problem.num_heads;
    product_stride = (problem.block_size + kMsaMaxKeyTile - 1) / kMsaMaxKeyTile * kMsaMaxKeyTile;
    queries = cutter.take<float>(capacity * problem.head_dim);
    packed = cutter.take<float>(problem.head_dim * kMsaMaxKeyTile);
    products = cutter.take<float>(capacity * product_stride);
    results = cutter.take<float>(capacity);
    visible = cutter.take<int32_t>(capacity);
  }
};

/// Where scores go: element (h, row of the tile, n) at data[h * head_stride + row * row_stride +
/// n].
struct MsaScoreTarget {
  float* data;
  int64_t head_stride;
  int64_t row_stride;
};

/// Scores of blocks [first_block, end_block) for the rows of a tile. A row with own < `min_own` is
/// not scored: its part of the target becomes -inf, like all blocks without a visible token.
class MsaTileScorer {
 public:
  MsaTileScorer(const MsaBlockScoresProblem& problem, const Accessor<const bf16_t, 3>& iq,
                const MsaIndexKeys& keys, const MsaRow* rows)
      : problem_(problem), iq_(iq), keys_(keys), rows_(rows), kernel_(msa_score_kernel()) {}

  void score(const MsaRowTile& tile, int64_t min_own, int64_t first_block, int64_t end_block,
             const MsaScoreScratch& scratch, const MsaScoreTarget& target) const;

 private:
  void load_queries(const MsaRowTile& tile, const MsaScoreScratch& scratch) const;
  // Fills scratch.visible for block n; returns the largest.
  int64_t find_visible(const MsaRowTile& tile, int64_t min_own, int64_t n,
                       const MsaScoreScratch& scratch) const;

  const MsaBlockScoresProblem& problem_;
  Accessor<const bf16_t, 3> iq_;
  MsaIndexKeys keys_;
  const MsaRow* rows_;
  MsaScoreKernel kernel_;
};

}  // namespace fovea::internal
