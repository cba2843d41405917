#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "fovea/numeric.h"

namespace fovea::test {

/// The only source of randomness in tests: SplitMix64, equal on every platform.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  /// Uniform in [lowest, highest].
  int64_t integer(int64_t lowest, int64_t highest) {
    return lowest + static_cast<int64_t>(next() % static_cast<uint64_t>(highest - lowest + 1));
  }

  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  float uniform(float lowest, float highest) {
    return lowest + (highest - lowest) * static_cast<float>(uniform());
  }

  /// Standard normal.
  float normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return static_cast<float>(radius * std::cos(6.283185307179586 * uniform()));
  }

  std::vector<float> normals(int64_t count, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = scale * normal();
    return values;
  }

  std::vector<bf16_t> bf16_normals(int64_t count, float scale = 1.0f) {
    std::vector<bf16_t> values(static_cast<size_t>(count));
    for (bf16_t& value : values) value = bf16_from_float(scale * normal());
    return values;
  }

 private:
  uint64_t state_;
};

}  // namespace fovea::test
