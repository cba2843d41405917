#pragma once

#include "fovea/msa_block_scores.h"
#include "fovea/msa_score_select.h"
#include "fovea/msa_select_blocks.h"
#include "src/core/implementation_list.h"
#include "src/msa/msa_checks.h"

/// The implementations of msa_block_scores, msa_select_blocks and msa_score_select.
namespace fovea::internal {

size_t msa_block_scores_ref_workspace(const MsaBlockScoresProblem& problem, const Device& device);
void msa_block_scores_ref(const MsaBlockScoresProblem& problem, const Device& device,
                          const MsaBlockScoresTensors& tensors, Workspace workspace);
size_t msa_block_scores_cpu_workspace(const MsaBlockScoresProblem& problem, const Device& device);
void msa_block_scores_cpu(const MsaBlockScoresProblem& problem, const Device& device,
                          const MsaBlockScoresTensors& tensors, Workspace workspace);
Refusal msa_block_scores_cuda_supports(const MsaBlockScoresProblem& problem);
size_t msa_block_scores_cuda_workspace(const MsaBlockScoresProblem& problem, const Device& device);
void msa_block_scores_cuda_portable(const MsaBlockScoresProblem& problem, const Device& device,
                                    const MsaBlockScoresTensors& tensors, Workspace workspace,
                                    Stream stream);

size_t msa_select_blocks_ref_workspace(const MsaSelectBlocksProblem& problem, const Device& device);
void msa_select_blocks_ref(const MsaSelectBlocksProblem& problem, const Device& device,
                           const MsaSelectBlocksTensors& tensors, Workspace workspace);
size_t msa_select_blocks_cpu_workspace(const MsaSelectBlocksProblem& problem, const Device& device);
void msa_select_blocks_cpu(const MsaSelectBlocksProblem& problem, const Device& device,
                           const MsaSelectBlocksTensors& tensors, Workspace workspace);
Refusal msa_select_blocks_cuda_supports(const MsaSelectBlocksProblem& problem);
size_t msa_select_blocks_cuda_workspace(const MsaSelectBlocksProblem& problem,
                                        const Device& device);
void msa_select_blocks_cuda_portable(const MsaSelectBlocksProblem& problem, const Device& device,
                                     const MsaSelectBlocksTensors& tensors, Workspace workspace,
                                     Stream stream);

size_t msa_score_select_ref_workspace(const MsaScoreSelectProblem& problem, const Device& device);
void msa_score_select_ref(const MsaScoreSelectProblem& problem, const Device& device,
                          const MsaScoreSelectTensors& tensors, Workspace workspace);
size_t msa_score_select_cpu_workspace(const MsaScoreSelectProblem& problem, const Device& device);
void msa_score_select_cpu(const MsaScoreSelectProblem& problem, const Device& device,
                          const MsaScoreSelectTensors& tensors, Workspace workspace);
Refusal msa_score_select_cuda_supports(const MsaScoreSelectProblem& problem);
size_t msa_score_select_cuda_workspace(const MsaScoreSelectProblem& problem, const Device& device);
void msa_score_select_cuda_portable(const MsaScoreSelectProblem& problem, const Device& device,
                                    const MsaScoreSelectTensors& tensors, Workspace workspace,
                                    Stream stream);

/// The two halves of a fused problem.
inline MsaBlockScoresProblem msa_scores_problem(const MsaScoreSelectProblem& problem) {
  MsaBlockScoresProblem half;
  half.max_rows = problem.max_rows;
  half.max_requests = problem.max_requests;
  half.max_pages = problem.max_pages;
  half.num_heads = problem.num_heads;
  half.head_dim = problem.head_dim;
  half.block_size = problem.block_size;
  half.page_size = problem.page_size;
  half.score = problem.score;
  half.index_scale = problem.index_scale;
  return half;
}

inline MsaSelectBlocksProblem msa_select_problem(const MsaScoreSelectProblem& problem) {
  MsaSelectBlocksProblem half;
  half.max_rows = problem.max_rows;
  half.max_requests = problem.max_requests;
  half.max_pages = problem.max_pages;
  half.num_heads = problem.num_heads;
  half.num_kv_heads = problem.num_kv_heads;
  half.block_size = problem.block_size;
  half.page_size = problem.page_size;
  half.topk = problem.topk;
  half.init_blocks = problem.init_blocks;
  half.local_blocks = problem.local_blocks;
  half.index_reduce = problem.index_reduce;
  half.blocks_layout = problem.blocks_layout;
  return half;
}

/// The index keys of one request: block n of a row, by way of the page table.
struct MsaIndexKeys {
  Accessor<const bf16_t, 3> index_k;
  Accessor<const int32_t, 2> page_table;
  int64_t block_size;

  /// First slot of block n; -1 when its page is outside the cache.
  FOVEA_HOST_DEVICE int64_t first_slot(int64_t request, int64_t n) const {
    const int64_t page = page_table(request, n);
    const int64_t slot = page * block_size;  // the slots are whole pages
    return page >= 0 && slot < index_k.shape[0] ? slot : -1;
  }
};

/// Bits that order scores as the selection does: larger first, -0 equal to +0, NaN last (0).
FOVEA_HOST_DEVICE inline uint32_t msa_score_rank(float score) {
  if (!(score == score)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// Whether block n is chosen whatever its score.
FOVEA_HOST_DEVICE inline bool msa_block_is_forced(int64_t n, int64_t own, int64_t init_blocks,
                                                  int64_t local_blocks) {
  return n < init_blocks || n > own - local_blocks;
}

/// One row of the reference: its block score, and its lists from scores [head * head_stride + n].
float msa_block_score_ref(const MsaBlockScoresProblem& problem, const MsaIndexKeys& keys,
                          const bf16_t* iq, const MsaRow& row, int64_t n, double* products);
void msa_select_row_ref(const MsaSelectBlocksProblem& problem, const MsaRow& row, int64_t t,
                        const float* scores, int64_t head_stride, int32_t* candidates,
                        const Accessor<int32_t, 3>& lists);

}  // namespace fovea::internal
