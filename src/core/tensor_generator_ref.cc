#include <Random123/philox.h>

#include <cmath>

#include "fovea/numeric.h"
#include "src/core/check.h"
#include "src/core/parallel.h"
#include "src/core/tensor_generator.h"

namespace fovea::internal {

void generate_noise_ref(const TensorStream& stream, int64_t first_channel,
                        std::span<float> values) {
  r123::Philox4x32 philox;
  const r123::Philox4x32::key_type key = {
      {static_cast<uint32_t>(stream.seed), static_cast<uint32_t>(stream.seed >> 32)}};
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t c = static_cast<size_t>(first_channel) + i;
    const r123::Philox4x32::ctr_type counter = {
        {static_cast<uint32_t>(c / 2),
         static_cast<uint32_t>(stream.layer * 256 + static_cast<int64_t>(stream.tensor)),
         static_cast<uint32_t>(stream.token_id), static_cast<uint32_t>(stream.token_id >> 32)}};
    const r123::Philox4x32::ctr_type words = philox(counter, key);
    int32_t sum = -131070;
    for (size_t word = c % 2 * 2; word < c % 2 * 2 + 2; ++word) {
      sum += static_cast<int32_t>(words[word] & 0xFFFFu) + static_cast<int32_t>(words[word] >> 16);
    }
    values[i] = bf16_to_float(bf16_from_float(static_cast<float>(sum) * 0x1p-16f));
  }
}

namespace {

// Sine and cosine of x in [-pi, pi] by their series: 14 terms leave an error below 1e-16.
void series(double x, double* cosine, double* sine) {
  double term = 1;
  *cosine = 0;
  *sine = 0;
  for (int n = 0; n < 28; ++n) {
    const double sign = n / 2 % 2 == 0 ? 1.0 : -1.0;
    if (n % 2 == 0)
      *cosine += sign * term;
    else
      *sine += sign * term;
    term = term * x / (n + 1);
  }
}

}  // namespace

std::vector<double> rotary_frequencies(double base, int64_t pairs) {
  FOVEA_DCHECK((pairs & (pairs - 1)) == 0);
  std::vector<double> frequencies(static_cast<size_t>(pairs), 1.0);
  for (int64_t i = 0; i < pairs; ++i) {
    // base^(-i/pairs) is the product of the roots base^(-1/2), base^(-1/4), ... that the binary
    // digits of i/pairs name; the square root of IEEE is exact to the last bit everywhere.
    double factor = 1 / base;
    for (int64_t digit = pairs / 2; digit >= 1; digit /= 2) {
      factor = std::sqrt(factor);
      if ((i & digit) != 0) frequencies[static_cast<size_t>(i)] *= factor;
    }
  }
  return frequencies;
}

void generate_cos_sin(std::span<const double> frequencies, int64_t num_positions, float* table) {
  constexpr double kTwoPi = 6.283185307179586476925;
  const auto pairs = static_cast<int64_t>(frequencies.size());
  ParallelFor(num_positions, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      float* row = table + p * 2 * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(p) * frequencies[static_cast<size_t>(i)];
        const double reduced = angle - kTwoPi * std::nearbyint(angle / kTwoPi);
        double cosine, sine;
        series(reduced, &cosine, &sine);
        row[i] = static_cast<float>(cosine);
        row[pairs + i] = static_cast<float>(sine);
      }
    }
  });
}

void generate_cos_sin(int64_t num_positions, int64_t rope_dim, float* table) {
  generate_cos_sin(rotary_frequencies(10000, rope_dim / 2), num_positions, table);
}

}  // namespace fovea::internal
