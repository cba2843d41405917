#include "bench/inputs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "fovea/numeric.h"

namespace fovea::bench {

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape) {
  static_cast<TensorShape&>(view_) = packed_shape(dtype, shape);
  memory_.reserve(static_cast<size_t>(std::max<int64_t>(64, bytes())));
  view_.data = memory_.data();
}

int64_t OwnedTensor::bytes() const {
  return view_.num_elements() * static_cast<int64_t>(size_of(view_.dtype));
}

OwnedTensor normal_bf16(Generator* generator, std::initializer_list<int64_t> shape, float scale) {
  OwnedTensor tensor(DType::kBf16, shape);
  std::generate_n(tensor.data<bf16_t>(), tensor.num_elements(),
                  [&] { return bf16_from_float(scale * generator->normal()); });
  return tensor;
}

OwnedTensor normal_f32(Generator* generator, std::initializer_list<int64_t> shape, float scale) {
  OwnedTensor tensor(DType::kF32, shape);
  std::generate_n(tensor.data<float>(), tensor.num_elements(),
                  [&] { return scale * generator->normal(); });
  return tensor;
}

OwnedTensor filled_i32(std::initializer_list<int64_t> shape, int32_t value) {
  OwnedTensor tensor(DType::kI32, shape);
  std::fill_n(tensor.data<int32_t>(), tensor.num_elements(), value);
  return tensor;
}

OwnedTensor from_i32(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
  OwnedTensor tensor(DType::kI32, shape);
  std::copy_n(values.begin(), tensor.num_elements(), tensor.data<int32_t>());
  return tensor;
}

std::vector<int32_t> permutation(Generator* generator, int64_t count) {
  return distinct(generator, count, count);
}

std::vector<int32_t> distinct(Generator* generator, int64_t count, int64_t bound) {
  std::vector<int32_t> values(static_cast<size_t>(bound));
  std::iota(values.begin(), values.end(), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t j = i + generator->below(bound - i);
    std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(j)]);
  }
  values.resize(static_cast<size_t>(count));
  return values;
}

}  // namespace fovea::bench
