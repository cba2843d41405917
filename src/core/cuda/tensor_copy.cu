#include "src/core/cuda/tensor_copy.cuh"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <string>

#include "fovea/error.h"

namespace fovea::internal::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking the driver; null where it has none.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

PanelMap make_panel_map(const char* op, const void* data, int64_t rows, int64_t pages,
                        int64_t page_stride_bytes, int box_rows) {
  static const Encode encode = find_encode();
  constexpr cuuint64_t kRowBytes = 128;
  const cuuint64_t extents[3] = {kRowBytes, static_cast<cuuint64_t>(rows),
                                 static_cast<cuuint64_t>(pages)};
  const cuuint64_t strides[2] = {kRowBytes, static_cast<cuuint64_t>(page_stride_bytes)};
  const cuuint32_t box[3] = {kRowBytes, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode == nullptr
          ? CUDA_ERROR_NOT_SUPPORTED
          : encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), extents,
                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice, std::string(op) +
                                        ": the driver describes no copies of pages: "
                                        "CUresult " +
                                        std::to_string(static_cast<int>(status)));
  }
  PanelMap words;
  static_assert(sizeof(words) == sizeof(map));
  std::memcpy(&words, &map, sizeof(map));
  return words;
}

}  // namespace fovea::internal::cuda
