#include "src/core/no_cuda.h"

#include "src/mla/dense_mla_impl.h"
#include "src/mla/merge_lse_impl.h"
#include "src/mla/mha_varlen_impl.h"
#include "src/mla/mla_inputs_impl.h"
#include "src/mla/sparse_mla_impl.h"
#include "src/mla/swa_decode_impl.h"
#include "src/mla/swa_indices_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

void merge_lse_cuda_portable(const MergeLseProblem&, const Device&, const MergeLseTensors&,
                             Workspace, Stream) {
  without_cuda("merge_lse");
}

void concat_absorbed_q_cuda_portable(const ConcatAbsorbedQProblem&, const Device&,
                                     const ConcatAbsorbedQTensors&, Workspace, Stream) {
  without_cuda("concat_absorbed_q");
}
void mla_rope_quantize_cuda_portable(const MlaRopeQuantizeProblem&, const Device&,
                                     const MlaRopeQuantizeTensors&, Workspace, Stream) {
  without_cuda("mla_rope_quantize");
}

Refusal dense_mla_cuda_supports(const DenseMlaProblem&) { return {}; }
size_t dense_mla_cuda_workspace(const DenseMlaProblem&, const Device&) { return 0; }
void dense_mla_cuda_portable(const DenseMlaProblem&, const Device&, const DenseMlaTensors&,
                             Workspace, Stream) {
  without_cuda("dense_mla");
}

Refusal mha_varlen_cuda_supports(const MhaVarlenProblem&) { return {}; }
size_t mha_varlen_cuda_workspace(const MhaVarlenProblem&, const Device&) { return 0; }
void mha_varlen_cuda_portable(const MhaVarlenProblem&, const Device&, const MhaVarlenTensors&,
                              Workspace, Stream) {
  without_cuda("mha_varlen");
}

size_t swa_indices_cuda_workspace(const SwaIndicesProblem&, const Device&) { return 0; }
void swa_indices_cuda_portable(const SwaIndicesProblem&, const Device&, const SwaIndicesTensors&,
                               Workspace, Stream) {
  without_cuda("build_swa_indices");
}

Refusal swa_decode_cuda_supports(const SwaDecodeProblem&) { return {}; }
size_t swa_decode_cuda_workspace(const SwaDecodeProblem&, const Device&) { return 0; }
void swa_decode_cuda_portable(const SwaDecodeProblem&, const Device&, const SwaDecodeTensors&,
                              Workspace, Stream) {
  without_cuda("swa_decode");
}
size_t swa_decode_cuda_sm90_workspace(const SwaDecodeProblem&, const Device&) { return 0; }
void swa_decode_cuda_sm90(const SwaDecodeProblem&, const Device&, const SwaDecodeTensors&,
                          Workspace, Stream) {
  without_cuda("swa_decode");
}

Refusal sparse_mla_cuda_supports(const SparseMlaProblem&) { return {}; }
size_t sparse_mla_cuda_workspace(const SparseMlaProblem&, const Device&) { return 0; }
void sparse_mla_cuda_portable(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                              Workspace, Stream) {
  without_cuda("sparse_mla");
}
size_t sparse_mla_cuda_sm90_few_heads_workspace(const SparseMlaProblem&, const Device&) {
  return 0;
}
void sparse_mla_cuda_sm90_few_heads(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                                    Workspace, Stream) {
  without_cuda("sparse_mla");
}
size_t sparse_mla_cuda_sm90_rows_workspace(const SparseMlaProblem&, const Device&) { return 0; }
void sparse_mla_cuda_sm90_rows(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                               Workspace, Stream) {
  without_cuda("sparse_mla");
}
void sparse_mla_cuda_sm90_window(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                                 Workspace, Stream) {
  without_cuda("sparse_mla");
}
size_t sparse_mla_cuda_sm90_workspace(const SparseMlaProblem&, const Device&) { return 0; }
void sparse_mla_cuda_sm90(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                          Workspace, Stream) {
  without_cuda("sparse_mla");
}

}  // namespace fovea::internal
