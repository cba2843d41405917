#include "src/mla/cuda/sparse_mla_fold.cuh"

#include "src/core/cuda/launch.cuh"
#include "src/mla/sparse_mla_parts.h"

namespace fovea::internal::latent {
namespace {

__global__ void __launch_bounds__(kFoldThreads) fold_parts(const __grid_constant__ Fold fold) {
  const Outputs& outputs = fold.outputs;
  const int64_t t = blockIdx.x / outputs.num_heads;
  const int64_t head = blockIdx.x % outputs.num_heads;
  const RowParts parts(fold.segments[0].length(t), fold.segments[1].length(t), outputs.num_parts);
  if (parts.num_parts <= 1) return;
  fold_head(outputs, t, head, parts.num_parts, RowTurn{fold.rotations.row(t), fold.rope_dim});
}

}  // namespace

void launch_fold(const Fold& fold, int64_t num_rows, Stream stream) {
  if (fold.outputs.num_parts <= 1) return;
  cuda::launch("sparse_mla", fold_parts,
               {dim3(static_cast<unsigned>(num_rows * fold.outputs.num_heads)), dim3(kFoldThreads)},
               stream, fold);
}

}  // namespace fovea::internal::latent
