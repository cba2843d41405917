#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/numeric.h"
#include "fovea/tensor.h"

/// Elements of a tensor of any type, for comparisons.
namespace fovea::internal {

/// Element `flat` in row-major order as a double, strides honoured; 0 for a tensor without a type.
inline double element(const ConstTensorView& tensor, int64_t flat) {
  int64_t offset = 0;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<size_t>(axis);
    offset += flat % tensor.shape[i] * tensor.stride[i];
    flat /= tensor.shape[i];
  }
  switch (tensor.dtype) {
    case DType::kU8:
      return static_cast<const uint8_t*>(tensor.data)[offset];
    case DType::kI32:
      return static_cast<const int32_t*>(tensor.data)[offset];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(tensor.data)[offset]);
    case DType::kF32:
      return static_cast<const float*>(tensor.data)[offset];
    case DType::kBf16:
      return bf16_to_float(static_cast<const bf16_t*>(tensor.data)[offset]);
    case DType::kNone:
      break;
  }
  return 0;
}

}  // namespace fovea::internal
