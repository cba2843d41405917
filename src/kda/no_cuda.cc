#include "src/core/no_cuda.h"

#include "src/kda/causal_conv1d_impl.h"
#include "src/kda/kda_commit_impl.h"
#include "src/kda/kda_decode_impl.h"
#include "src/kda/kda_gate_impl.h"
#include "src/kda/kda_prefill_impl.h"
#include "src/kda/kda_stages_impl.h"
#include "src/kda/kda_verify_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

Refusal kda_gate_cuda_supports(const KdaGateProblem&) { return {}; }
void kda_gate_cuda_portable(const KdaGateProblem&, const Device&, const KdaGateTensors&, Workspace,
                            Stream) {
  without_cuda("kda_gate");
}

Refusal kda_decode_cuda_supports(const KdaDecodeProblem&) { return {}; }
size_t kda_decode_cuda_workspace(const KdaDecodeProblem&, const Device&) { return 0; }
void kda_decode_cuda_portable(const KdaDecodeProblem&, const Device&, const KdaDecodeTensors&,
                              Workspace, Stream) {
  without_cuda("kda_decode");
}

Refusal kda_prefill_cuda_supports(const KdaPrefillProblem&) { return {}; }
size_t kda_prefill_cuda_workspace(const KdaPrefillProblem&, const Device&) { return 0; }
void kda_prefill_cuda_portable(const KdaPrefillProblem&, const Device&, const KdaPrefillTensors&,
                               Workspace, Stream) {
  without_cuda("kda_prefill");
}

Refusal kda_stage_cuda_supports(const KdaStageProblem&) { return {}; }
size_t kda_stage_cuda_workspace(const KdaStageProblem&, const Device&) { return 0; }
void kda_stage_gate_cuda_portable(const KdaStageProblem&, const Device&, const KdaStageGateTensors&,
                                  Workspace, Stream) {
  without_cuda("kda_stage_gate");
}
void kda_stage_intra_cuda_portable(const KdaStageProblem&, const Device&,
                                   const KdaStageIntraTensors&, Workspace, Stream) {
  without_cuda("kda_stage_intra");
}
void kda_stage_inter_cuda_portable(const KdaStageProblem&, const Device&,
                                   const KdaStageInterTensors&, Workspace, Stream) {
  without_cuda("kda_stage_inter");
}
void kda_stage_output_cuda_portable(const KdaStageProblem&, const Device&,
                                    const KdaStageOutputTensors&, Workspace, Stream) {
  without_cuda("kda_stage_output");
}

Refusal kda_verify_cuda_supports(const KdaVerifyProblem&) { return {}; }
size_t kda_verify_cuda_workspace(const KdaVerifyProblem&, const Device&) { return 0; }
void kda_verify_cuda_portable(const KdaVerifyProblem&, const Device&, const KdaVerifyTensors&,
                              Workspace, Stream) {
  without_cuda("kda_verify");
}

Refusal kda_commit_cuda_supports(const KdaCommitProblem&) { return {}; }
size_t kda_commit_cuda_workspace(const KdaCommitProblem&, const Device&) { return 0; }
void kda_commit_cuda_portable(const KdaCommitProblem&, const Device&, const KdaCommitTensors&,
                              Workspace, Stream) {
  without_cuda("kda_commit");
}

Refusal causal_conv1d_cuda_supports(const CausalConv1dProblem&) { return {}; }
size_t causal_conv1d_cuda_workspace(const CausalConv1dProblem&, const Device&) { return 0; }
void causal_conv1d_cuda_portable(const CausalConv1dProblem&, const Device&,
                                 const CausalConv1dTensors&, Workspace, Stream) {
  without_cuda("causal_conv1d");
}

}  // namespace fovea::internal
