#include "fovea/msa_block_scores.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/msa/msa_index_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "msa_block_scores";

constexpr internal::Implementation<MsaBlockScoresProblem, MsaBlockScoresTensors>
    kImplementations[] = {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
         internal::msa_block_scores_cuda_supports, internal::msa_block_scores_cuda_workspace,
         nullptr, internal::msa_block_scores_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::msa_block_scores_cpu_workspace,
         internal::msa_block_scores_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::msa_block_scores_ref_workspace,
         internal::msa_block_scores_ref},
};

const internal::OperatorRegistration kRegistration("msa", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const MsaBlockScoresProblem& problem) {
  internal::check_msa_bounds(kOp, problem.max_rows, problem.max_requests, problem.max_pages,
                             problem.block_size, problem.page_size);
  internal::check_msa_index(kOp, problem.num_heads, problem.head_dim, problem.index_scale);
  internal::check_msa_score(kOp, problem.score);
}

void check_tensors(const MsaBlockScoresProblem& problem, const MsaBlockScoresTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "iq", tensors.iq, DType::kBf16,
                         {kAnyExtent, problem.num_heads, problem.head_dim});
  const int64_t rows = tensors.iq.shape[0];
  internal::check_range(kOp, "iq.shape[0]", rows, 0, problem.max_rows);
  internal::check_msa_alignment(kOp, "iq", tensors.iq);
  internal::check_msa_index_k(kOp, tensors.index_k, problem.head_dim, problem.block_size);
  internal::check_msa_batch(kOp, tensors.kv_len, tensors.q_indptr, tensors.q_offset,
                            problem.max_requests);
  internal::check_msa_page_table(kOp, tensors.page_table, tensors.kv_len.shape[0],
                                 problem.max_pages);
  internal::check_tensor(kOp, "scores", tensors.scores, DType::kF32,
                         {problem.num_heads, rows, tensors.page_table.shape[1]});
}

}  // namespace

MsaBlockScores MsaBlockScores::plan(const MsaBlockScoresProblem& problem, const Device& device,
                                    const Options& options) {
  check_problem(problem);
  return MsaBlockScores(
      internal::make_plan(kOp, kImplementations, problem, device, options, check_tensors));
}

}  // namespace fovea
