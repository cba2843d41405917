#include "fovea/msa_select_blocks.h"

#include "src/core/check.h"
#include "src/core/implementation_list.h"
#include "src/msa/msa_index_impl.h"

namespace fovea {
namespace {

constexpr char kOp[] = "msa_select_blocks";

constexpr internal::Implementation<MsaSelectBlocksProblem, MsaSelectBlocksTensors>
    kImplementations[] = {
        {"cuda_portable", DeviceKind::kCuda, internal::cuda_available,
         internal::msa_select_blocks_cuda_supports, internal::msa_select_blocks_cuda_workspace,
         nullptr, internal::msa_select_blocks_cuda_portable},
        {"cpu", DeviceKind::kCpu, nullptr, nullptr, internal::msa_select_blocks_cpu_workspace,
         internal::msa_select_blocks_cpu},
        {"ref", DeviceKind::kCpu, nullptr, nullptr, internal::msa_select_blocks_ref_workspace,
         internal::msa_select_blocks_ref},
};

const internal::OperatorRegistration kRegistration("msa", kOp, [] {
  return internal::list_implementations(kImplementations);
});

void check_tensors(const MsaSelectBlocksProblem& problem, const MsaSelectBlocksTensors& tensors) {
  using internal::kAnyExtent;
  internal::check_tensor(kOp, "scores", tensors.scores, DType::kF32,
                         {problem.num_heads, kAnyExtent, kAnyExtent});
  const int64_t rows = tensors.scores.shape[1];
  internal::check_range(kOp, "scores.shape[1]", rows, 0, problem.max_rows);
  internal::check_range(kOp, "scores.shape[2]", tensors.scores.shape[2], 0, problem.max_pages);
  internal::check_msa_batch(kOp, tensors.kv_len, tensors.q_indptr, tensors.q_offset,
                            problem.max_requests);
  internal::check_msa_blocks(kOp, tensors.blocks, problem.blocks_layout, problem.num_kv_heads, rows,
                             internal::msa_list_width(problem.index_reduce, problem.topk,
                                                      problem.num_heads, problem.num_kv_heads));
}

}  // namespace

MsaSelectBlocks MsaSelectBlocks::plan(const MsaSelectBlocksProblem& problem, const Device& device,
                                      const Options& options) {
  MsaSelectBlocksProblem resolved = problem;
  if (resolved.num_kv_heads == 0) resolved.num_kv_heads = resolved.num_heads;
  internal::check_msa_bounds(kOp, resolved.max_rows, resolved.max_requests, resolved.max_pages,
                             resolved.block_size, resolved.page_size);
  internal::check_msa_selection(kOp, resolved);
  return MsaSelectBlocks(
      internal::make_plan(kOp, kImplementations, resolved, device, options, check_tensors));
}

}  // namespace fovea
