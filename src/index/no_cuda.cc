#include "src/core/no_cuda.h"

#include "src/index/index_logits_impl.h"
#include "src/index/index_quantize_impl.h"
#include "src/index/index_select_driver.h"
#include "src/index/index_store_impl.h"
#include "src/index/topk_select_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

void index_logits_cuda_portable(const IndexLogitsProblem&, const Device&, const IndexLogitsTensors&,
                                Workspace, Stream) {
  without_cuda("index_logits");
}
void index_logits_cuda_sm90(const IndexLogitsProblem&, const Device&, const IndexLogitsTensors&,
                            Workspace, Stream) {
  without_cuda("index_logits");
}
void fill_index_select_chunk_cuda(const IndexSelectRows&, int64_t, int64_t, const Device&,
                                  const IndexSelectChunk&, Stream) {
  without_cuda("index_select");
}
void index_store_cuda_portable(const IndexCacheProblem&, const Device&, const IndexStoreTensors&,
                               Workspace, Stream) {
  without_cuda("index_store");
}
void index_gather_cuda_portable(const IndexCacheProblem&, const Device&, const IndexGatherTensors&,
                                Workspace, Stream) {
  without_cuda("index_gather");
}
size_t topk_select_cuda_workspace(const TopkSelectProblem&, const Device&) { return 0; }
void topk_select_cuda_portable(const TopkSelectProblem&, const Device&, const TopkSelectTensors&,
                               Workspace, Stream) {
  without_cuda("topk_select");
}
void topk_select_cuda_sm90(const TopkSelectProblem&, const Device&, const TopkSelectTensors&,
                           Workspace, Stream) {
  without_cuda("topk_select");
}
void index_quantize_cuda_portable(const IndexQuantizeProblem&, const Device&,
                                  const IndexQuantizeTensors&, Workspace, Stream) {
  without_cuda("index_quantize");
}

}  // namespace fovea::internal
