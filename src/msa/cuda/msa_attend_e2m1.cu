#include "src/msa/cuda/msa_attend_kernels.cuh"

namespace fovea::internal::msa {

void launch_attend_e2m1(const AttendParams& params, bool by_rows, Stream stream) {
  launch_attend<Stored::kE2m1>(params, by_rows, stream);
}

}  // namespace fovea::internal::msa
