#pragma once

#include <cstdint>
#include <span>

#include "fovea/device.h"
#include "fovea/tensor.h"

/// Small writes into the arrays of a step, in the order of `stream` on a GPU. None allocates, waits
/// or keeps a reference to host memory: all may be captured.
namespace fovea::internal {

/// Writes host values to the first values.size() entries of i32 `to`. A GPU gets them as
/// parameters of launches, because a copy from pageable host memory may wait for the stream.
void put_entries(std::span<const int32_t> values, const TensorView& to, const Device& device,
                 Stream stream);

/// to[i] = from[indices[i]] for host indices that are inside `from`; i32.
void pick_entries(const ConstTensorView& from, std::span<const int32_t> indices,
                  const TensorView& to, const Device& device, Stream stream);

/// What an operator leaves alone: rows of no request, q_indptr[R] up to the end, become 0 in `out`
/// bf16 [T, H, D] and -inf in `lse` f32 [T, H].
struct PaddingRows {
  ConstTensorView q_indptr;  ///< i32 [R + 1]; absent: every row
  TensorView out;
  TensorView lse{};  ///< optional
};
void clear_padding(const PaddingRows& rows, const Device& device, Stream stream);

// On a GPU. Without `from` the values themselves are written.
void pick_entries_cuda_portable(const ConstTensorView& from, std::span<const int32_t> values,
                                const TensorView& to, const Device& device, Stream stream);
void clear_padding_cuda_portable(const PaddingRows& rows, const Device& device, Stream stream);

}  // namespace fovea::internal
