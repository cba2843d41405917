#include "src/core/no_cuda.h"
#include "src/cache/move_rows_impl.h"
#include "src/cache/pack_rows_impl.h"
#include "src/cache/unpack_rows_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

void pack_rows_cuda_portable(const RowCodecProblem&, const Device&, const PackRowsTensors&,
                             Workspace, Stream) {
  without_cuda("pack_rows");
}
void unpack_rows_cuda_portable(const RowCodecProblem&, const Device&, const UnpackRowsTensors&,
                               Workspace, Stream) {
  without_cuda("unpack_rows");
}
void move_rows_cuda_portable(const MoveRowsProblem&, const Device&, const MoveRowsTensors&,
                             Workspace, Stream) {
  without_cuda("move_rows");
}

}  // namespace fovea::internal
