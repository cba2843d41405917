#pragma once

#include "fovea/kda_stages.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_state.h"

/// The implementations of the stages of a chunked prefill.
namespace fovea::internal {

void kda_stage_gate_ref(const KdaStageProblem& problem, const Device& device,
                        const KdaStageGateTensors& tensors, Workspace workspace);
size_t kda_stage_gate_cpu_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_gate_cpu(const KdaStageProblem& problem, const Device& device,
                        const KdaStageGateTensors& tensors, Workspace workspace);

size_t kda_stage_intra_ref_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_intra_ref(const KdaStageProblem& problem, const Device& device,
                         const KdaStageIntraTensors& tensors, Workspace workspace);
size_t kda_stage_intra_cpu_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_intra_cpu(const KdaStageProblem& problem, const Device& device,
                         const KdaStageIntraTensors& tensors, Workspace workspace);

size_t kda_stage_inter_ref_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_inter_ref(const KdaStageProblem& problem, const Device& device,
                         const KdaStageInterTensors& tensors, Workspace workspace);
size_t kda_stage_inter_cpu_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_inter_cpu(const KdaStageProblem& problem, const Device& device,
                         const KdaStageInterTensors& tensors, Workspace workspace);

void kda_stage_output_ref(const KdaStageProblem& problem, const Device& device,
                          const KdaStageOutputTensors& tensors, Workspace workspace);
size_t kda_stage_output_cpu_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_output_cpu(const KdaStageProblem& problem, const Device& device,
                          const KdaStageOutputTensors& tensors, Workspace workspace);

/// Of every stage.
Refusal kda_stage_cuda_supports(const KdaStageProblem& problem);
size_t kda_stage_cuda_workspace(const KdaStageProblem& problem, const Device& device);
void kda_stage_gate_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                  const KdaStageGateTensors& tensors, Workspace workspace,
                                  Stream stream);
void kda_stage_intra_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                   const KdaStageIntraTensors& tensors, Workspace workspace,
                                   Stream stream);
void kda_stage_inter_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                   const KdaStageInterTensors& tensors, Workspace workspace,
                                   Stream stream);
void kda_stage_output_cuda_portable(const KdaStageProblem& problem, const Device& device,
                                    const KdaStageOutputTensors& tensors, Workspace workspace,
                                    Stream stream);

/// One chunk: `count` rows from row `first` on, of sequence n, number `index` of the call.
struct StageChunk {
  int64_t n = 0;
  int64_t index = 0;
  int64_t first = 0;
  int64_t count = 0;
};

/// Calls fn(chunk) for every chunk of the call, in order.
template <class Function>
void for_each_chunk(const PackedOffsets& offsets, int64_t chunk_length, Function&& fn) {
  SequenceReader reader(offsets);
  StageChunk chunk;
  for (chunk.n = 0; chunk.n < offsets.sequences; ++chunk.n) {
    const SequenceRows rows = reader.next();
    for (chunk.first = rows.begin; chunk.first < rows.end; chunk.first += chunk_length) {
      chunk.count = std::min(chunk_length, rows.end - chunk.first);
      fn(static_cast<const StageChunk&>(chunk));
      ++chunk.index;
    }
  }
}

}  // namespace fovea::internal
