#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "fovea/safetensors.h"
#include "src/core/check.h"

namespace fovea {
namespace {

TensorShape checked_shape(std::string_view name, DType dtype, std::span<const int64_t> shape) {
  const std::string op = "tensor '" + std::string(name) + "'";
  if (shape.size() > kMaxRank) {
    internal::invalid(op.c_str(), "rank = " + std::to_string(shape.size()) + ", expected at most " +
                                      std::to_string(kMaxRank));
  }
  TensorShape layout;
  layout.dtype = dtype;
  layout.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), layout.shape.begin());
  int64_t stride = 1;
  bool fits = true;
  for (size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] < 0) {
      internal::invalid(op.c_str(), "shape[" + std::to_string(axis) +
                                        "] = " + std::to_string(shape[axis]) + ", expected >= 0");
    }
    layout.stride[axis] = stride;
    fits = fits && !__builtin_mul_overflow(stride, std::max<int64_t>(shape[axis], 1), &stride);
  }
  int64_t bytes = 0;
  fits = fits && !__builtin_mul_overflow(stride, static_cast<int64_t>(size_of(dtype)), &bytes);
  if (!fits) {
    throw Error(ErrorCode::kOutOfMemory,
                op + ": " + to_string(layout) + " has more bytes than 63 bits count");
  }
  return layout;
}

size_t packed_bytes(const TensorShape& layout) {
  return static_cast<size_t>(layout.num_elements()) * size_of(layout.dtype);
}

// Copies the sub-tensor from `axis` inwards; the last axis is contiguous in both.
void copy_axes(const ConstTensorView& from, int axis, const char* source, char*& target) {
  const auto i = static_cast<size_t>(axis);
  const auto element = static_cast<int64_t>(size_of(from.dtype));
  if (axis >= from.rank - 1) {
    const int64_t count = from.rank == 0 ? 1 : from.shape[i];
    std::memcpy(target, source, static_cast<size_t>(count * element));
    target += count * element;
    return;
  }
  for (int64_t k = 0; k < from.shape[i]; ++k) {
    copy_axes(from, axis + 1, source + k * from.stride[i] * element, target);
  }
}

constexpr size_t kAlignment = 64;

}  // namespace

void TensorMap::Free::operator()(void* block) const noexcept { std::free(block); }

TensorView TensorMap::add(std::string_view name, DType dtype, std::span<const int64_t> shape) {
  if (name.empty()) internal::invalid("tensor map", "a tensor has an empty name");
  if (tensors_.contains(name)) {
    internal::invalid("tensor map", "the name '" + std::string(name) + "' is taken");
  }
  Entry entry;
  entry.layout = checked_shape(name, dtype, shape);
  const size_t bytes = packed_bytes(entry.layout);
  // Room to align even an empty tensor, which has an address too.
  entry.block.reset(std::calloc(bytes + kAlignment, 1));
  if (entry.block == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "tensor '" + std::string(name) + "': cannot allocate " +
                                             std::to_string(bytes) + " bytes");
  }
  const auto address = reinterpret_cast<uintptr_t>(entry.block.get());
  entry.data =
      static_cast<char*>(entry.block.get()) + (kAlignment - address % kAlignment) % kAlignment;
  tensors_.emplace(name, std::move(entry));
  return find(name);
}

TensorView TensorMap::add_copy(std::string_view name, const ConstTensorView& source) {
  const TensorView view =
      add(name, source.dtype, std::span(source.shape.data(), static_cast<size_t>(source.rank)));
  if (view.num_elements() > 0) {
    auto* target = static_cast<char*>(view.data);
    copy_axes(source, 0, static_cast<const char*>(source.data), target);
  }
  return view;
}

TensorView TensorMap::find(std::string_view name) noexcept {
  const auto found = tensors_.find(name);
  TensorView view;
  if (found == tensors_.end()) return view;
  static_cast<TensorShape&>(view) = found->second.layout;
  view.data = found->second.data;
  return view;
}

ConstTensorView TensorMap::find(std::string_view name) const noexcept {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return {};
  return {found->second.layout, found->second.data};
}

bool TensorMap::remove(std::string_view name) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return false;
  tensors_.erase(found);
  return true;
}

std::vector<std::string> TensorMap::names() const {
  std::vector<std::string> result;
  for (const auto& [name, entry] : tensors_) result.push_back(name);
  return result;
}

}  // namespace fovea
