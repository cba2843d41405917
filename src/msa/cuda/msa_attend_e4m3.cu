#include "src/msa/cuda/msa_attend_kernels.cuh"

namespace fovea::internal::msa {

void launch_attend_e4m3(const AttendParams& params, bool by_rows, Stream stream) {
  launch_attend<Stored::kE4m3>(params, by_rows, stream);
}

}  // namespace fovea::internal::msa
