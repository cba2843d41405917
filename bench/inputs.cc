#include "bench/inputs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "fovea/numeric.h"

namespace fovea::bench {

thread_local DeviceTensors* Placement::current_ = nullptr;

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

OwnedTensor filled_f32(std::initializer_list<int64_t> shape, float value) {
  OwnedTensor tensor(DType::kF32, shape);
  std::fill_n(tensor.data<float>(), tensor.num_elements(), value);
  return tensor;
}

OwnedTensor random_e4m3(Generator* generator, std::initializer_list<int64_t> shape, float scale) {
  OwnedTensor tensor(DType::kU8, shape);
  std::generate_n(tensor.data<uint8_t>(), tensor.num_elements(),
                  [&] { return e4m3_from_float(scale * generator->normal()); });
  return tensor;
}

OwnedTensor rope_table(int64_t num_positions, int64_t rope_dim) {
  OwnedTensor table(DType::kF32, {num_positions, rope_dim});
  const int64_t half = rope_dim / 2;
  for (int64_t position = 0; position < num_positions; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) *
                           std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
      table.data<float>()[position * rope_dim + i] = static_cast<float>(std::cos(angle));
      table.data<float>()[position * rope_dim + half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

OwnedTensor repeated(const OwnedTensor& pattern, std::initializer_list<int64_t> shape) {
  OwnedTensor tensor(pattern.view().dtype, shape);
  for (int64_t done = 0; done < tensor.bytes(); done += pattern.bytes()) {
    std::copy_n(pattern.data<uint8_t>(), std::min(pattern.bytes(), tensor.bytes() - done),
                tensor.data<uint8_t>() + done);
  }
  return tensor;
}

std::vector<int64_t> spread_rows(int64_t num_rows, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = std::min(i * num_rows / (count - 1), num_rows - 1);
    if (rows.empty() || rows.back() < row) rows.push_back(row);
  }
  return rows;
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
