#include "fovea/tensor.h"

#include <string>

#include "src/core/check.h"

namespace fovea {

TensorShape packed_shape(DType dtype, std::initializer_list<int64_t> shape) {
  if (shape.size() > kMaxRank) {
    internal::invalid("tensor", "rank = " + std::to_string(shape.size()) + ", expected at most " +
                                    std::to_string(kMaxRank));
  }
  TensorShape result;
  result.dtype = dtype;
  result.rank = static_cast<int>(shape.size());
  size_t axis = 0;
  for (const int64_t extent : shape) {
    if (extent < 0)
      internal::invalid("tensor", "extent = " + std::to_string(extent) + ", expected >= 0");
    result.shape[axis++] = extent;
  }
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    result.stride[i] = stride;
    stride *= result.shape[i];
  }
  return result;
}

TensorView make_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView view;
  static_cast<TensorShape&>(view) = packed_shape(dtype, shape);
  view.data = data;
  return view;
}

ConstTensorView make_tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
  return {packed_shape(dtype, shape), data};
}

namespace {

template <class View, class Byte>
View slice(const View& view, int64_t begin, int64_t end) {
  if (!view.defined()) return view;
  if (view.rank < 1 || begin < 0 || end < begin || end > view.shape[0]) {
    internal::invalid("slice_rows", "rows [" + std::to_string(begin) + ", " + std::to_string(end) +
                                        ") of " + to_string(view));
  }
  View result = view;
  result.shape[0] = end - begin;
  if (view.data != nullptr) {
    result.data = static_cast<Byte*>(view.data) +
                  begin * view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
  }
  return result;
}

}  // namespace

TensorView slice_rows(const TensorView& view, int64_t begin, int64_t end) {
  return slice<TensorView, char>(view, begin, end);
}

ConstTensorView slice_rows(const ConstTensorView& view, int64_t begin, int64_t end) {
  return slice<ConstTensorView, const char>(view, begin, end);
}

std::string to_string(const TensorShape& tensor) {
  std::string text = std::string(to_string(tensor.dtype)) + " [";
  int64_t packed = 1;
  bool is_packed = true;
  for (size_t i = static_cast<size_t>(tensor.rank); i-- > 0;) {
    if (tensor.shape[i] > 1 && tensor.stride[i] != packed) is_packed = false;
    // Refused shapes are printed too: their product may wrap.
    static_cast<void>(__builtin_mul_overflow(packed, tensor.shape[i], &packed));
  }
  std::string strides;
  for (size_t i = 0; i < static_cast<size_t>(tensor.rank); ++i) {
    if (i > 0) {
      text += ", ";
      strides += ", ";
    }
    text += std::to_string(tensor.shape[i]);
    strides += std::to_string(tensor.stride[i]);
  }
  text += "]";
  return is_packed ? text : text + " with strides [" + strides + "]";
}

}  // namespace fovea
