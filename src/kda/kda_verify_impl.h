#pragma once

#include <cstdint>

#include "fovea/kda_verify.h"
#include "src/core/implementation_list.h"
#include "src/kda/kda_checks.h"

/// The implementations of kda_verify.
namespace fovea::internal {

size_t kda_verify_ref_workspace(const KdaVerifyProblem& problem, const Device& device);
void kda_verify_ref(const KdaVerifyProblem& problem, const Device& device,
                    const KdaVerifyTensors& tensors, Workspace workspace);
size_t kda_verify_cpu_workspace(const KdaVerifyProblem& problem, const Device& device);
void kda_verify_cpu(const KdaVerifyProblem& problem, const Device& device,
                    const KdaVerifyTensors& tensors, Workspace workspace);
Refusal kda_verify_cuda_supports(const KdaVerifyProblem& problem);
size_t kda_verify_cuda_workspace(const KdaVerifyProblem& problem, const Device& device);
void kda_verify_cuda_portable(const KdaVerifyProblem& problem, const Device& device,
                              const KdaVerifyTensors& tensors, Workspace workspace, Stream stream);

/// Elements of int64_t that judge_kda_verify needs: 0 without `check`.
int64_t kda_verify_check_elements(const KdaVerifyProblem& problem);
/// What an implementation on the host does first: with `check` a fault of the contents throws.
void judge_kda_verify(const KdaVerifyProblem& problem, const KdaVerifyTensors& tensors,
                      int64_t* scratch);

/// The row after which draft row t comes: -1 (the committed state) or a smaller one.
FOVEA_HOST_DEVICE inline int64_t parent_row(const int32_t* parent, int64_t t) {
  if (parent == nullptr) return t - 1;
  const int64_t row = parent[t];
  return row >= 0 && row < t ? row : -1;
}

/// The scratch tensor of a verify, in either mode. Addresses of one (request, row, value head);
/// `v_stride` is that of states.
struct VerifyScratch {
  float* data = nullptr;
  int64_t request_stride = 0, row_stride = 0, head_stride = 0, v_stride = 0;

  VerifyScratch() = default;
  explicit VerifyScratch(const ConstTensorView& view)
      : data(static_cast<float*>(const_cast<void*>(view.data))),
        request_stride(view.stride[0]),
        row_stride(view.stride[1]),
        head_stride(view.stride[2]),
        v_stride(view.stride[3]) {}

  FOVEA_HOST_DEVICE float* at(int64_t request, int64_t row, int64_t head) const {
    return data + request * request_stride + row * row_stride + head * head_stride;
  }
};

}  // namespace fovea::internal
