#include "fovea/msa_score_select.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/msa/msa_index_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "msa_score_select";

constexpr internal::Implementation<MsaScoreSelectProblem, MsaScoreSelectTensors>
    kImplementations[] = {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
         internal::msa_score_select_cuda_supports, internal::msa_score_select_cuda_workspace,
         nullptr, internal::msa_score_select_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::msa_score_select_cpu_workspace,
         internal::msa_score_select_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::msa_score_select_ref_workspace,
         internal::msa_score_select_ref},
};

const internal::OperatorRegistration kRegistration("msa", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_problem(const MsaScoreSelectProblem& problem) {
  internal::check_msa_bounds(kOp, problem.max_rows, problem.max_requests, problem.max_pages,
                             problem.block_size, problem.page_size);
  internal::check_msa_index(kOp, problem.num_heads, problem.head_dim, problem.index_scale);
  internal::check_msa_score(kOp, problem.score);
  internal::check_msa_selection(kOp, internal::msa_select_problem(problem));
}

void check_tensors(const MsaScoreSelectProblem& problem, const MsaScoreSelectTensors& tensors) {
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
  internal::check_msa_blocks(kOp, tensors.blocks, problem.blocks_layout, problem.num_kv_heads, rows,
                             internal::msa_list_width(problem.index_reduce, problem.topk,
                                                      problem.num_heads, problem.num_kv_heads));
}

}  // namespace

MsaScoreSelect MsaScoreSelect::plan(const MsaScoreSelectProblem& problem, const Device& device,
                                    const Options& options) {
  MsaScoreSelectProblem resolved = problem;
  if (resolved.num_kv_heads == 0) resolved.num_kv_heads = resolved.num_heads;
  check_problem(resolved);
  return MsaScoreSelect(
      internal::make_plan(kOp, kImplementations, resolved, device, options, check_tensors));
}

}  // namespace fovea
