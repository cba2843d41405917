#include "src/mla/cuda/sparse_mla_fold.cuh"

#include "src/core/cuda/launch.cuh"
#include "src/mla/sparse_mla_parts.h"

namespace fovea::internal::latent {
namespace {

__global__ void __launch_bounds__(kFoldThreads) fold_parts(const __grid_constant__ Fold fold) {
  const Outputs& outputs = fold.outputs;
  const auto num_heads = static_cast<uint32_t>(outputs.num_heads);
  const int64_t t = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
  const RowParts parts(fold.segments[0].length(t), fold.segments[1].length(t), outputs.num_parts);
  const RowTurn turn{fold.rotations.row(t), fold.rope_dim};
  if (outputs.sink != nullptr) cuda::prefetch_l2(&outputs.sink[head]);
  cuda::wait_for_last_launch();
  if (parts.num_parts > 1) fold_head(outputs, t, head, parts.num_parts, turn, threadIdx.x);
}

}  // namespace

void launch_fold(const Fold& fold, int64_t num_rows, Stream stream) {
  if (fold.outputs.num_parts <= 1) return;
  cuda::LaunchShape shape{dim3(static_cast<unsigned>(num_rows * fold.outputs.num_heads)),
                          dim3(kFoldThreads)};
  shape.starts_early = fold.starts_early;
  cuda::launch("sparse_mla", fold_parts, shape, stream, fold);
}

}  // namespace fovea::internal::latent
