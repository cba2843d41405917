#include "src/core/no_cuda.h"

#include "src/msa/build_page_table_impl.h"
#include "src/msa/msa_attend_impl.h"
#include "src/msa/msa_index_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

void build_page_table_cuda_portable(const BuildPageTableProblem&, const Device&,
                                    const BuildPageTableTensors&, Workspace, Stream) {
  without_cuda("build_page_table");
}

Refusal msa_block_scores_cuda_supports(const MsaBlockScoresProblem&) { return {}; }
size_t msa_block_scores_cuda_workspace(const MsaBlockScoresProblem&, const Device&) { return 0; }
void msa_block_scores_cuda_portable(const MsaBlockScoresProblem&, const Device&,
                                    const MsaBlockScoresTensors&, Workspace, Stream) {
  without_cuda("msa_block_scores");
}

Refusal msa_select_blocks_cuda_supports(const MsaSelectBlocksProblem&) { return {}; }
size_t msa_select_blocks_cuda_workspace(const MsaSelectBlocksProblem&, const Device&) { return 0; }
void msa_select_blocks_cuda_portable(const MsaSelectBlocksProblem&, const Device&,
                                     const MsaSelectBlocksTensors&, Workspace, Stream) {
  without_cuda("msa_select_blocks");
}

Refusal msa_score_select_cuda_supports(const MsaScoreSelectProblem&) { return {}; }
size_t msa_score_select_cuda_workspace(const MsaScoreSelectProblem&, const Device&) { return 0; }
void msa_score_select_cuda_portable(const MsaScoreSelectProblem&, const Device&,
                                    const MsaScoreSelectTensors&, Workspace, Stream) {
  without_cuda("msa_score_select");
}

Refusal msa_attend_cuda_supports(const MsaAttendProblem&) { return {}; }
size_t msa_attend_cuda_workspace(const MsaAttendProblem&, const Device&) { return 0; }
void msa_attend_cuda_portable(const MsaAttendProblem&, const Device&, const MsaAttendTensors&,
                              Workspace, Stream) {
  without_cuda("msa_attend");
}

Refusal msa_attend_cuda_sm90_supports(const MsaAttendProblem&) { return {}; }
Refusal msa_attend_cuda_sm90_preferred(const MsaAttendProblem&) { return {}; }
size_t msa_attend_cuda_sm90_workspace(const MsaAttendProblem&, const Device&) { return 0; }
void msa_attend_cuda_sm90(const MsaAttendProblem&, const Device&, const MsaAttendTensors&,
                          Workspace, Stream) {
  without_cuda("msa_attend");
}

Refusal msa_attend_cuda_sm90_decode_supports(const MsaAttendProblem&) { return {}; }
Refusal msa_attend_cuda_sm90_decode_preferred(const MsaAttendProblem&) { return {}; }
size_t msa_attend_cuda_sm90_decode_workspace(const MsaAttendProblem&, const Device&) { return 0; }
void msa_attend_cuda_sm90_decode(const MsaAttendProblem&, const Device&, const MsaAttendTensors&,
                                 Workspace, Stream) {
  without_cuda("msa_attend");
}

}  // namespace fovea::internal
