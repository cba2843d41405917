#pragma once

#include <cmath>

#include "fovea/msa_block_scores.h"
#include "fovea/msa_score_select.h"
#include "fovea/msa_select_blocks.h"
#include "tests/msa/paged_batch.h"
#include "tests/support/targets.h"

namespace fovea::test {

/// Index queries and keys of a batch, with the three operators of the index branch.
struct IndexCase {
  PagedBatch batch;
  int64_t heads;
  int64_t dim;
  Tensor iq, index_k, q_offset;  // q_offset: empty unless set
  bool has_offset = false;
  BlockScore score = BlockScore::kMax;
  float index_scale = 1;
  int64_t topk = 4, init_blocks = 0, local_blocks = 1, kv_heads = 0;
  IndexReduce reduce = IndexReduce::kPerGroup;
  BlocksLayout layout = BlocksLayout::kHeadMajor;
  Tensor scores, blocks;

  explicit IndexCase(PagedBatch requests, int64_t num_heads = 2, int64_t head_dim = 64,
                     uint64_t seed = 5)
      : batch(std::move(requests)), heads(num_heads), dim(head_dim) {
    Rng rng(seed);
    iq = Tensor::bf16({batch.num_rows, heads, dim}, rng.bf16_normals(batch.num_rows * heads * dim));
    index_k = random_pool(batch, 1, dim, seed + 1);
  }

  /// Small integers, whose products and sums are exact in any order.
  void make_integers(uint64_t seed) {
    Rng rng(seed);
    for (int64_t i = 0; i < batch.num_rows * heads * dim; ++i)
      iq.data<bf16_t>()[i] = bf16_from_float(static_cast<float>(rng.integer(-3, 3)));
    index_k = fill_pool(batch, 1, dim, [&](int64_t, int64_t, int64_t, int64_t) {
      return static_cast<float>(rng.integer(-3, 3));
    });
  }

  int64_t num_kv_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t width() const {
    return reduce == IndexReduce::kUnion ? heads / num_kv_heads() * topk : topk;
  }

  MsaBlockScoresProblem scores_problem() const {
    MsaBlockScoresProblem problem;
    problem.max_rows = batch.num_rows;
    problem.max_requests = batch.requests();
    problem.max_pages = batch.max_pages;
    problem.num_heads = heads;
    problem.head_dim = dim;
    problem.block_size = batch.block_size;
    problem.score = score;
    problem.index_scale = index_scale;
    return problem;
  }
  MsaSelectBlocksProblem select_problem() const {
    MsaSelectBlocksProblem problem;
    problem.max_rows = batch.num_rows;
    problem.max_requests = batch.requests();
    problem.max_pages = batch.max_pages;
    problem.num_heads = heads;
    problem.num_kv_heads = kv_heads;
    problem.block_size = batch.block_size;
    problem.topk = topk;
    problem.init_blocks = init_blocks;
    problem.local_blocks = local_blocks;
    problem.index_reduce = reduce;
    problem.blocks_layout = layout;
    return problem;
  }
  MsaScoreSelectProblem fused_problem() const {
    MsaScoreSelectProblem problem;
    problem.max_rows = batch.num_rows;
    problem.max_requests = batch.requests();
    problem.max_pages = batch.max_pages;
    problem.num_heads = heads;
    problem.num_kv_heads = kv_heads;
    problem.head_dim = dim;
    problem.block_size = batch.block_size;
    problem.score = score;
    problem.index_scale = index_scale;
    problem.topk = topk;
    problem.init_blocks = init_blocks;
    problem.local_blocks = local_blocks;
    problem.index_reduce = reduce;
    problem.blocks_layout = layout;
    return problem;
  }

  MsaBlockScoresTensors scores_tensors() {
    scores = Tensor(DType::kF32, {heads, batch.num_rows, batch.max_pages});
    scores.fill_bytes(0x55);
    MsaBlockScoresTensors tensors;
    tensors.iq = iq;
    tensors.index_k = index_k;
    tensors.page_table = batch.page_table;
    tensors.kv_len = batch.kv_len;
    tensors.q_indptr = batch.q_indptr;
    if (has_offset) tensors.q_offset = q_offset;
    tensors.scores = scores;
    return tensors;
  }
  MsaSelectBlocksTensors select_tensors() {
    make_blocks();
    MsaSelectBlocksTensors tensors;
    tensors.scores = scores;
    tensors.kv_len = batch.kv_len;
    tensors.q_indptr = batch.q_indptr;
    if (has_offset) tensors.q_offset = q_offset;
    tensors.blocks = blocks;
    return tensors;
  }
  MsaScoreSelectTensors fused_tensors() {
    make_blocks();
    MsaScoreSelectTensors tensors;
    tensors.iq = iq;
    tensors.index_k = index_k;
    tensors.page_table = batch.page_table;
    tensors.kv_len = batch.kv_len;
    tensors.q_indptr = batch.q_indptr;
    if (has_offset) tensors.q_offset = q_offset;
    tensors.blocks = blocks;
    return tensors;
  }
  void make_blocks() {
    blocks = layout == BlocksLayout::kHeadMajor
                 ? Tensor(DType::kI32, {num_kv_heads(), batch.num_rows, width()})
                 : Tensor(DType::kI32, {batch.num_rows, num_kv_heads(), width()});
    blocks.fill_bytes(0x55);
  }

  void run_scores(const Options& options, int threads = 1) {
    test::run(MsaBlockScores::plan(scores_problem(), device_of(options, threads), options),
              scores_tensors());
  }
  void run_select(const Options& options, int threads = 1) {
    test::run(MsaSelectBlocks::plan(select_problem(), device_of(options, threads), options),
              select_tensors());
  }
  void run_fused(const Options& options, int threads = 1) {
    test::run(MsaScoreSelect::plan(fused_problem(), device_of(options, threads), options),
              fused_tensors());
  }

  float score_at(int64_t h, int64_t t, int64_t n) const {
    return scores.data<float>()[(h * batch.num_rows + t) * batch.max_pages + n];
  }
  std::vector<int32_t> list_at(int64_t g, int64_t t) const {
    const int64_t row =
        layout == BlocksLayout::kHeadMajor ? g * batch.num_rows + t : t * num_kv_heads() + g;
    const int32_t* list = blocks.data<int32_t>() + row * width();
    return {list, list + width()};
  }
};

}  // namespace fovea::test
