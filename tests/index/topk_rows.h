#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/rng.h"

namespace fovea::test {

/// One kind of row that breaks selections which trust the distribution of the values.
struct HostileRow {
  std::string name;
  std::function<float(int64_t position, int64_t length, Rng& rng)> value;
};

/// Rows of spec'd trouble: plateaus, one histogram bin, order, NaN, infinities, extreme magnitudes.
inline std::vector<HostileRow> hostile_rows() {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  return {
      {"normal", [](int64_t, int64_t, Rng& rng) { return rng.normal(); }},
      {"all_equal", [](int64_t, int64_t, Rng&) { return -3.5f; }},
      {"all_zero", [](int64_t, int64_t, Rng&) { return 0.0f; }},
      {"all_minus_zero", [](int64_t, int64_t, Rng&) { return -0.0f; }},
      {"mixed_zeros",
       [](int64_t, int64_t, Rng& rng) { return (rng.next() & 1) != 0 ? 0.0f : -0.0f; }},
      {"few_large_rest_zero",
       [](int64_t i, int64_t, Rng&) { return i % 83 == 0 ? 1.0f + static_cast<float>(i) : 0.0f; }},
      {"relu", [](int64_t, int64_t, Rng& rng) { return std::max(0.0f, rng.normal() - 2.2f); }},
      {"negated_relu", [](int64_t, int64_t, Rng& rng) { return -std::max(0.0f, rng.normal()); }},
      {"one_half_precision_bin",
       [](int64_t i, int64_t n, Rng&) {
         return 1.0f + 0.245f * static_cast<float>(i * 7919 % n) / static_cast<float>(n);
       }},
      {"consecutive_floats",
       [](int64_t i, int64_t n, Rng&) {
         return std::bit_cast<float>(static_cast<uint32_t>(0x40000000 + i * 7919 % n));
       }},
      {"ascending", [](int64_t i, int64_t, Rng&) { return static_cast<float>(i); }},
      {"descending", [](int64_t i, int64_t, Rng&) { return -static_cast<float>(i); }},
      {"ascending_pairs", [](int64_t i, int64_t, Rng&) { return static_cast<float>(i / 2); }},
      {"beyond_half_precision",
       [](int64_t, int64_t, Rng& rng) { return 70000.0f * rng.normal() + 1e6f; }},
      {"extreme_magnitudes",
       [](int64_t, int64_t, Rng& rng) {
         return std::bit_cast<float>(static_cast<uint32_t>(rng.next() & 0xFF7FFFFFu));
       }},
      {"any_bits",
       [](int64_t, int64_t, Rng& rng) {
         return std::bit_cast<float>(static_cast<uint32_t>(rng.next()));
       }},
      {"subnormal",
       [](int64_t, int64_t, Rng& rng) {
         return std::bit_cast<float>(static_cast<uint32_t>(rng.next() & 0x80000FFFu));
       }},
      {"all_nan", [](int64_t i, int64_t, Rng&) { return i % 2 == 0 ? kNan : -kNan; }},
      {"some_nan",
       [](int64_t, int64_t, Rng& rng) { return rng.next() % 400 == 0 ? kNan : rng.normal(); }},
      {"mostly_nan",
       [](int64_t, int64_t, Rng& rng) { return rng.next() % 64 != 0 ? -kNan : rng.normal(); }},
      {"minus_infinity_tail",
       [](int64_t i, int64_t n, Rng& rng) { return i > n / 40 ? -kInf : rng.normal(); }},
      {"nan_and_minus_infinity",
       [](int64_t, int64_t, Rng& rng) { return rng.next() % 3 == 0 ? -kInf : kNan; }},
      {"all_plus_infinity", [](int64_t, int64_t, Rng&) { return kInf; }},
      {"many_plus_infinity",
       [](int64_t, int64_t, Rng& rng) { return rng.next() % 5 == 0 ? kInf : rng.normal(); }},
      {"winners_in_one_run",
       [](int64_t i, int64_t n, Rng& rng) {
         return rng.normal() + (i > n / 2 && i < n / 2 + n / 16 ? 50.0f : 0.0f);
       }},
      {"winners_periodic",
       [](int64_t i, int64_t, Rng& rng) { return rng.normal() + (i % 64 == 0 ? 50.0f : 0.0f); }},
      {"three_plateaus",
       [](int64_t, int64_t, Rng& rng) {
         return static_cast<float>(rng.next() % 32 == 0) +
                2.0f * static_cast<float>(rng.next() % 64 == 0);
       }},
  };
}

inline std::vector<float> make_row(const HostileRow& row, int64_t length, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> values(static_cast<size_t>(length));
  for (int64_t i = 0; i < length; ++i) values[static_cast<size_t>(i)] = row.value(i, length, rng);
  return values;
}

}  // namespace fovea::test
