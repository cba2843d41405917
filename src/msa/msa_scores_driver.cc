#include "src/msa/msa_scores_driver.h"

#include <limits>

#include "fovea/numeric.h"
#include "src/core/parallel.h"
#include "src/msa/msa_select_row.h"

namespace fovea::internal {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
// Fewer tiles than this per thread leave threads without work: the blocks are shared out instead.
constexpr int64_t kTilesPerThread = 4;
// Rows whose scores the fused operator keeps at a time for that; more rows make tiles enough.
constexpr int64_t kMaxSplitRows = 64;

int64_t num_chunks(int64_t max_pages) {
  return (max_pages + kMsaChunkBlocks - 1) / kMsaChunkBlocks;
}

}  // namespace

void MsaTileScorer::load_queries(const MsaRowTile& tile, const MsaScoreScratch& scratch) const {
  float* to = scratch.queries;
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    for (int64_t h = 0; h < problem_.num_heads; ++h) {
      const bf16_t* from = iq_.row(tile.first_row + i, h);
      for (int64_t d = 0; d < problem_.head_dim; ++d) *to++ = bf16_to_float(from[d]);
    }
  }
}

int64_t MsaTileScorer::find_visible(const MsaRowTile& tile, int64_t min_own, int64_t n,
                                    const MsaScoreScratch& scratch) const {
  int64_t most = 0;
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const MsaRow& row = rows_[tile.first_row + i];
    const int64_t visible = row.is_empty() || row.own < min_own
                                ? 0
                                : msa_visible_tokens(row, n, problem_.block_size, true);
    std::fill_n(scratch.visible + i * problem_.num_heads, problem_.num_heads,
                static_cast<int32_t>(visible));
    most = std::max(most, visible);
  }
  return most;
}

void MsaTileScorer::score(const MsaRowTile& tile, int64_t min_own, int64_t first_block,
                          int64_t end_block, const MsaScoreScratch& scratch,
                          const MsaScoreTarget& target) const {
  const int64_t heads = problem_.num_heads;
  const int64_t request = rows_[tile.first_row].request;
  bool loaded = false;
  MsaScoreTask task;
  task.queries = scratch.queries;
  task.visible = scratch.visible;
  task.num_queries = tile.num_rows * heads;
  task.head_dim = problem_.head_dim;
  task.key_stride = keys_.index_k.stride[0];
  task.product_stride = scratch.product_stride;
  task.score = problem_.score;
  task.index_scale = problem_.index_scale;
  task.packed = scratch.packed;
  task.products = scratch.products;
  task.results = scratch.results;
  for (int64_t n = first_block; n < end_block; ++n) {
    task.num_keys = find_visible(tile, min_own, n, scratch);
    const int64_t slot = task.num_keys > 0 ? keys_.first_slot(request, n) : -1;
    if (slot < 0) {
      std::fill_n(scratch.results, task.num_queries, kNegInf);
    } else {
      if (!loaded) load_queries(tile, scratch);
      loaded = true;
      task.keys = keys_.index_k.row(slot, 0);
      const int64_t next = n + 1 < end_block ? keys_.first_slot(request, n + 1) : -1;
      task.next_keys = next >= 0 ? keys_.index_k.row(next, 0) : nullptr;
      kernel_(task);
    }
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      for (int64_t h = 0; h < heads; ++h)
        target.data[h * target.head_stride + i * target.row_stride + n] =
            scratch.results[i * heads + h];
    }
  }
}

// ---- msa_block_scores

size_t msa_block_scores_cpu_workspace(const MsaBlockScoresProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  cutter.take<MsaRow>(problem.max_rows);
  cutter.take<MsaRowTile>(problem.max_rows);
  for (int worker = 0; worker < device.num_threads; ++worker) MsaScoreScratch(cutter, problem);
  return cutter.used_bytes();
}

void msa_block_scores_cpu(const MsaBlockScoresProblem& problem, const Device& device,
                          const MsaBlockScoresTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  auto* rows = cutter.take<MsaRow>(problem.max_rows);
  auto* tiles = cutter.take<MsaRowTile>(problem.max_rows);
  const auto iq = access<const bf16_t, 3>(tensors.iq);
  const auto scores = access<float, 3>(tensors.scores);
  const int64_t max_pages = scores.shape[2];
  read_msa_rows(msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, iq.shape[0],
                          max_pages, problem.block_size),
                rows);
  const int64_t num_tiles =
      cut_msa_tiles(rows, iq.shape[0], msa_tile_rows(problem.num_heads), tiles);
  const MsaIndexKeys keys{access<const bf16_t, 3>(tensors.index_k),
                          access<const int32_t, 2>(tensors.page_table), problem.block_size};
  const MsaTileScorer scorer(problem, iq, keys, rows);
  const int64_t chunks = num_chunks(max_pages);
  const ThreadScope threads(device.num_threads);
  ParallelFor(num_tiles * chunks, 1, [&](int64_t begin, int64_t end, int worker) {
    WorkspaceCutter rest = cutter;
    for (int i = 0; i < worker; ++i) MsaScoreScratch(rest, problem);
    const MsaScoreScratch scratch(rest, problem);
    for (int64_t unit = begin; unit < end; ++unit) {
      const MsaRowTile& tile = tiles[unit / chunks];
      const int64_t first = unit % chunks * kMsaChunkBlocks;
      scorer.score(tile, 0, first, std::min(max_pages, first + kMsaChunkBlocks), scratch,
                   {scores.row(0, tile.first_row), scores.stride[0], scores.stride[1]});
    }
  });
}

// ---- msa_score_select

namespace {

// Tiles of rows by whole workers, each with the scores of a tile at hand; or, where tiles are few,
// chunks of blocks into the scores of all rows, then rows.
class ScoreSelect {
 public:
  ScoreSelect(WorkspaceCutter& cutter, const MsaScoreSelectProblem& problem, const Device& device)
      : problem_(problem),
        scoring_(msa_scores_problem(problem)),
        selection_(msa_select_problem(problem)),
        num_threads_(std::max(1, device.num_threads)),
        tile_rows_(
            std::min(msa_tile_rows(problem.num_heads), std::max<int64_t>(1, problem.max_rows))),
        split_rows_(std::min(kMaxSplitRows, problem.max_rows)),
        rows_(cutter.take<MsaRow>(problem.max_rows)),
        tiles_(cutter.take<MsaRowTile>(problem.max_rows)),
        split_scores_(cutter.take<float>(problem.num_heads * split_rows_ * problem.max_pages)),
        workers_(cutter) {
    for (int worker = 0; worker < num_threads_; ++worker) Worker(cutter, *this);
  }

  void run(const MsaScoreSelectTensors& tensors) {
    const auto iq = access<const bf16_t, 3>(tensors.iq);
    lists_ = access_blocks<int32_t>(tensors.blocks, problem_.blocks_layout);
    const MsaIndexKeys keys{access<const bf16_t, 3>(tensors.index_k),
                            access<const int32_t, 2>(tensors.page_table), problem_.block_size};
    max_pages_ = keys.page_table.shape[1];
    num_rows_ = iq.shape[0];
    read_msa_rows(msa_batch(tensors.kv_len, tensors.q_indptr, tensors.q_offset, num_rows_,
                            max_pages_, problem_.block_size),
                  rows_);
    num_tiles_ = cut_msa_tiles(rows_, num_rows_, tile_rows_, tiles_);
    const MsaTileScorer scorer(scoring_, iq, keys, rows_);
    const ThreadScope threads(num_threads_);
    if (num_threads_ > 1 && num_rows_ <= split_rows_ && num_tiles_ < kTilesPerThread * num_threads_)
      run_split(scorer);
    else
      run_tiles(scorer);
  }

 private:
  struct Worker {
    MsaScoreScratch scratch;
    MsaRowSelector selector;
    float* scores;  // [heads][tile rows][max_pages]

    Worker(WorkspaceCutter& cutter, const ScoreSelect& owner)
        : scratch(cutter, owner.scoring_),
          selector(cutter, owner.selection_),
          scores(cutter.take<float>(owner.problem_.num_heads * owner.tile_rows_ *
                                    owner.problem_.max_pages)) {}
  };

  // Memory of a worker: the same cuts as in the constructor.
  Worker worker(int index) const {
    WorkspaceCutter rest = workers_;
    for (int i = 0; i < index; ++i) Worker(rest, *this);
    return Worker(rest, *this);
  }

  // The blocks that some row of the tile chooses among.
  int64_t candidates(const MsaRowTile& tile) const {
    int64_t most = 0;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      const int64_t own = rows_[tile.first_row + i].own;
      if (own >= problem_.topk) most = std::max(most, own + 1);
    }
    return most;
  }

  void run_tiles(const MsaTileScorer& scorer) const {
    ParallelFor(num_tiles_, 1, [&](int64_t begin, int64_t end, int index) {
      Worker mine = worker(index);
      const MsaScoreTarget target{mine.scores, tile_rows_ * max_pages_, max_pages_};
      for (int64_t i = begin; i < end; ++i) {
        const MsaRowTile& tile = tiles_[i];
        scorer.score(tile, problem_.topk, 0, candidates(tile), mine.scratch, target);
        for (int64_t row = 0; row < tile.num_rows; ++row) {
          const int64_t t = tile.first_row + row;
          mine.selector.select(rows_[t], t, mine.scores + row * max_pages_, target.head_stride,
                               lists_);
        }
      }
    });
  }

  void run_split(const MsaTileScorer& scorer) const {
    const int64_t chunks = num_chunks(max_pages_);
    const int64_t head_stride = num_rows_ * max_pages_;
    ParallelFor(num_tiles_ * chunks, 1, [&](int64_t begin, int64_t end, int index) {
      const Worker mine = worker(index);
      for (int64_t unit = begin; unit < end; ++unit) {
        const MsaRowTile& tile = tiles_[unit / chunks];
        const int64_t first = unit % chunks * kMsaChunkBlocks;
        const int64_t last = std::min(candidates(tile), first + kMsaChunkBlocks);
        scorer.score(tile, problem_.topk, first, last, mine.scratch,
                     {split_scores_ + tile.first_row * max_pages_, head_stride, max_pages_});
      }
    });
    ParallelFor(num_rows_, 1, [&](int64_t begin, int64_t end, int index) {
      Worker mine = worker(index);
      for (int64_t t = begin; t < end; ++t)
        mine.selector.select(rows_[t], t, split_scores_ + t * max_pages_, head_stride, lists_);
    });
  }

  const MsaScoreSelectProblem& problem_;
  MsaBlockScoresProblem scoring_;
  MsaSelectBlocksProblem selection_;
  int num_threads_;
  int64_t tile_rows_;
  int64_t split_rows_;
  MsaRow* rows_;
  MsaRowTile* tiles_;
  float* split_scores_;
  WorkspaceCutter workers_;
  Accessor<int32_t, 3> lists_;
  int64_t max_pages_ = 0;
  int64_t num_rows_ = 0;
  int64_t num_tiles_ = 0;
};

}  // namespace

size_t msa_score_select_cpu_workspace(const MsaScoreSelectProblem& problem, const Device& device) {
  WorkspaceCutter cutter({});
  const ScoreSelect measure(cutter, problem, device);
  return cutter.used_bytes();
}

void msa_score_select_cpu(const MsaScoreSelectProblem& problem, const Device& device,
                          const MsaScoreSelectTensors& tensors, Workspace workspace) {
  WorkspaceCutter cutter(workspace);
  ScoreSelect(cutter, problem, device).run(tensors);
}

}  // namespace fovea::internal
