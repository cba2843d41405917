#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "fovea/export.h"
#include "fovea/tensor.h"
#include "src/core/check.h"

/// Typed, strided access to the elements of a view.
namespace fovea::internal {

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<bf16_t> {
  static constexpr DType value = DType::kBf16;
};

/// Element (i, j, ...) of a rank-N tensor, addressed in 64 bits. T is const for inputs. Unchecked:
/// the shapes were compared with the plan before. An absent optional tensor gives data == nullptr.
template <class T, int Rank>
struct Accessor {
  T* data = nullptr;
  std::array<int64_t, Rank> shape{};
  std::array<int64_t, Rank> stride{};

  template <class... Index>
  FOVEA_HOST_DEVICE T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == Rank);
    return data[offset(index...)];
  }

  /// Pointer to the contiguous last axis at the leading indices.
  template <class... Index>
  FOVEA_HOST_DEVICE T* row(Index... index) const {
    static_assert(sizeof...(Index) == Rank - 1);
    return data + offset(index...);
  }

  FOVEA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }

 private:
  template <class... Index>
  FOVEA_HOST_DEVICE int64_t offset(Index... index) const {
    int64_t sum = 0;
    int axis = 0;
    ((sum += static_cast<int64_t>(index) * stride[static_cast<size_t>(axis++)]), ...);
    return sum;
  }
};

/// Views `tensor` as Accessor<T, Rank>. The type and rank must match (checked in debug builds).
template <class T, int Rank, class View>
Accessor<T, Rank> access(const View& tensor) {
  Accessor<T, Rank> result;
  if (!tensor.defined()) return result;
  FOVEA_DCHECK(tensor.rank == Rank && tensor.dtype == DTypeOf<std::remove_const_t<T>>::value);
  result.data = static_cast<T*>(tensor.data);
  for (size_t axis = 0; axis < Rank; ++axis) {
    result.shape[axis] = tensor.shape[axis];
    result.stride[axis] = tensor.stride[axis];
  }
  return result;
}

}  // namespace fovea::internal
