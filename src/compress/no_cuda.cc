#include "src/core/no_cuda.h"

#include "src/compress/v4_compress_impl.h"

// The kernels of the room in a build without CUDA: plan() never chooses them.
namespace fovea::internal {

void v4_compress_cuda_portable(const V4CompressProblem&, const Device&, const V4CompressTensors&,
                               Workspace, Stream) {
  without_cuda("v4_compress");
}

}  // namespace fovea::internal
