#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "fovea/device.h"
#include "fovea/device_tensors.h"
#include "fovea/dtype.h"
#include "fovea/tensor.h"

/// Inputs of benchmark cases: seeded, equal on every platform, never zeros.
namespace fovea::bench {

/// SplitMix64.
class Generator {
 public:
  explicit Generator(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  /// The sum of four 16-bit uniforms, centred and scaled to variance 1: close to a standard normal,
  /// at a nanosecond each.
  float normal() {
    const uint64_t bits = next();
    const auto sum = static_cast<int32_t>((bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) +
                                          ((bits >> 32) & 0xFFFF) + (bits >> 48));
    return static_cast<float>(sum - 131070) * (1.7320508f / 65536.0f);
  }

  /// Uniform in [0, bound).
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t state_;
};

/// While it lives, the views that owned tensors of this thread convert to are those of `tensors`:
/// what an operator is given on a device. A case builds its tensors struct inside of one and needs
/// not know where it will run. view() stays on the host.
class Placement {
 public:
  explicit Placement(DeviceTensors* tensors) : previous_(current_) { current_ = tensors; }
  ~Placement() { current_ = previous_; }
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  static TensorView place(const TensorView& host) {
    return current_ == nullptr ? host : current_->output(host);
  }
  static ConstTensorView place(const ConstTensorView& host) {
    return current_ == nullptr ? host : current_->input(host);
  }

 private:
  static thread_local DeviceTensors* current_;
  DeviceTensors* previous_;
};

/// A packed tensor that owns its memory (64-byte aligned).
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape);

  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }
  operator TensorView() { return Placement::place(view_); }  // NOLINT: cases read better
  operator ConstTensorView() const { return Placement::place(view()); }  // NOLINT
  int64_t num_elements() const { return view_.num_elements(); }
  int64_t bytes() const;

  template <class T>
  T* data() {
    return static_cast<T*>(view_.data);
  }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(view_.data);
  }

 private:
  HostBuffer memory_;
  TensorView view_;
};

OwnedTensor normal_bf16(Generator* generator, std::initializer_list<int64_t> shape,
                        float scale = 1.0f);
OwnedTensor normal_f32(Generator* generator, std::initializer_list<int64_t> shape,
                       float scale = 1.0f);
OwnedTensor filled_f32(std::initializer_list<int64_t> shape, float value);
/// e4m3 codes of scaled normals.
OwnedTensor random_e4m3(Generator* generator, std::initializer_list<int64_t> shape, float scale);
/// f32 [num_positions, rope_dim]: cosines, then sines, base 10000.
OwnedTensor rope_table(int64_t num_positions, int64_t rope_dim);
OwnedTensor filled_i32(std::initializer_list<int64_t> shape, int32_t value);
OwnedTensor from_i32(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);

/// `shape` filled with copies of `pattern`, one after the other: large pools cost a copy instead of
/// a generator.
OwnedTensor repeated(const OwnedTensor& pattern, std::initializer_list<int64_t> shape);

/// First, last and rows between at equal distances: up to `count` (at least 2) in all.
std::vector<int64_t> spread_rows(int64_t num_rows, int64_t count = 4);

/// A pseudo-random order of 0..count-1.
std::vector<int32_t> permutation(Generator* generator, int64_t count);

/// `count` distinct values of 0..bound-1, in random order.
std::vector<int32_t> distinct(Generator* generator, int64_t count, int64_t bound);

}  // namespace fovea::bench
