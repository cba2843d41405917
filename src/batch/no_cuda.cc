#include "src/core/no_cuda.h"
#include "src/batch/metadata_check_impl.h"
#include "src/batch/metadata_refresh_impl.h"
#include "src/batch/paged_schedule_impl.h"
#include "src/batch/split_schedule_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

size_t metadata_check_cuda_workspace(const MetadataCheckProblem&, const Device&) { return 0; }
void metadata_check_cuda_portable(const MetadataCheckProblem&, const Device&,
                                  const MetadataCheckTensors&, Workspace, Stream) {
  without_cuda("metadata_check");
}
size_t metadata_refresh_cuda_workspace(const MetadataProblem&, const Device&) { return 0; }
void metadata_refresh_cuda_portable(const MetadataProblem&, const Device&, const MetadataTensors&,
                                    Workspace, Stream) {
  without_cuda("metadata_refresh");
}
size_t paged_schedule_cuda_workspace(const PagedScheduleProblem&, const Device&) { return 0; }
void paged_schedule_cuda_portable(const PagedScheduleProblem&, const Device&,
                                  const PagedScheduleTensors&, Workspace, Stream) {
  without_cuda("paged_schedule");
}
size_t split_schedule_cuda_workspace(const SplitScheduleProblem&, const Device&) { return 0; }
void split_schedule_cuda_portable(const SplitScheduleProblem&, const Device&,
                                  const SplitScheduleTensors&, Workspace, Stream) {
  without_cuda("split_schedule");
}

}  // namespace fovea::internal
