#include "src/msa/cuda/msa_attend_kernels.cuh"

namespace fovea::internal::msa {

void launch_attend_bf16(const AttendParams& params, bool by_rows, Stream stream) {
  launch_attend<Stored::kBf16>(params, by_rows, stream);
}

}  // namespace fovea::internal::msa
