#include "src/core/no_cuda.h"

#include "src/kda/kda_decode_impl.h"
#include "src/kda/kda_gate_impl.h"
#include "src/kda/kda_prefill_impl.h"

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

}  // namespace fovea::internal
