#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "fovea/dtype.h"
#include "fovea/export.h"

namespace fovea {

/// Largest rank of a tensor view.
inline constexpr int kMaxRank = 5;

/// Shape, strides and type of a tensor. Strides count elements, not bytes. The last axis is
/// contiguous; every other stride is free: implementations honour it or refuse it with an error.
struct TensorShape {
  DType dtype = DType::kNone;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};

  /// Product of the axes; 1 for rank 0.
  int64_t num_elements() const noexcept {
    int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= shape[static_cast<size_t>(axis)];
    return count;
  }
};

/// A non-owning, mutable view. A default-constructed view is "absent": that is how an optional
/// tensor is left out. The caller keeps the memory alive for the duration of the call, or of the
/// graph that captured it.
struct TensorView : TensorShape {
  void* data = nullptr;

  bool defined() const noexcept { return dtype != DType::kNone; }
};

/// The same for inputs.
struct ConstTensorView : TensorShape {
  const void* data = nullptr;

  ConstTensorView() = default;
  ConstTensorView(const TensorView& view) noexcept  // NOLINT: a mutable view is a readable one
      : TensorShape(view), data(view.data) {}
  ConstTensorView(const TensorShape& layout, const void* pointer) noexcept
      : TensorShape(layout), data(pointer) {}

  bool defined() const noexcept { return dtype != DType::kNone; }
};

/// A packed (row-major) shape. Throws Error(kInvalidArgument) for more than kMaxRank axes or a
/// negative one.
FOVEA_API TensorShape packed_shape(DType dtype, std::initializer_list<int64_t> shape);

/// A packed view of `data`.
FOVEA_API TensorView make_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape);
FOVEA_API ConstTensorView make_tensor(const void* data, DType dtype,
                                      std::initializer_list<int64_t> shape);

/// Rows [begin, end) of axis 0. Throws Error(kInvalidArgument) outside the axis.
FOVEA_API TensorView slice_rows(const TensorView& view, int64_t begin, int64_t end);
FOVEA_API ConstTensorView slice_rows(const ConstTensorView& view, int64_t begin, int64_t end);

/// "bf16 [3, 128, 576]", with strides where they are not packed. For messages.
FOVEA_API std::string to_string(const TensorShape& shape);

}  // namespace fovea
