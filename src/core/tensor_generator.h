#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/dtype.h"

/// Synthetic input tensors from a counter-based generator (Philox4x32-10): a value depends on seed,
/// token id, layer, tensor and channel alone, and on integers until one exact conversion, so that
/// it is equal on every device and equal prefixes give equal keys.
///
///   value = (u0 + u1 + u2 + u3 - 131070) * 2^-16, ui uniform in 0..65535; nearly normal, |value|
///   <= 2, variance 1/3; exact in fp32, then rounded to bf16.
///
/// Counter: {channel / 2, layer * 256 + tensor, token id low, token id high}; key: the seed's
/// halves. Channel 2i takes the four 16-bit halves of output words 0 and 1, channel 2i+1 those of
/// words 2 and 3.
namespace fovea::internal {

enum class TensorKind : uint8_t {
  kLatentK,     ///< 512 latent and 64 rope channels of the token's key row.
  kQ,           ///< Absorbed query, heads x 576.
  kIndexK,      ///< Index key before its LayerNorm.
  kIndexQ,      ///< Index query, index heads x Di.
  kHeadGate,    ///< Gate of each index head.
  kNormWeight,  ///< LayerNorm of the index key: per layer, token id 0.
  kNormBias,
  kKdaQkv,      ///< q|k|v of a KDA layer, before its convolution.
  kKdaGate,     ///< Raw gate, heads x K.
  kKdaBeta,     ///< Logit of each head.
  kConvWeight,  ///< Of the short convolution: per layer, token id 0, as the rest.
  kConvBias,
  kALog,
  kDtBias,
  kMsaK,  ///< Keys of block-sparse attention, KV heads x D; kQ is then heads x D.
  kMsaV,
  kCompressGate,  ///< Values and logits of a compressor of DeepSeek-V4, and of its indexer's.
  kIndexCompressGate,
  kApe,  ///< Of the compressors: per layer, token id 0, as the rest.
  kIndexApe,
  kCompressNorm,
  kIndexCompressNorm,
  kSink,
};

/// One stream of values.
struct TensorStream {
  uint64_t seed = 0;
  uint64_t token_id = 0;
  int64_t layer = 0;  ///< 0 <= layer < 2^24
  TensorKind tensor = TensorKind::kLatentK;
};

/// Channels 0..count-1 of a stream, as bf16 or as the same values in fp32.
void generate_noise(const TensorStream& stream, std::span<bf16_t> values);
void generate_noise(const TensorStream& stream, std::span<float> values);

/// values[i] = bf16(noise(first_channel + i) + factor * base[i % base.size()]), the sum in fp32.
/// `factor` is a power of two, so that the product is exact; first_channel is even; base is a
/// multiple of 32 long and divides values.
struct NoiseAround {
  std::span<const bf16_t> base;
  float factor = 0;
  int64_t first_channel = 0;
};
void generate_noise_around(const TensorStream& stream, const NoiseAround& around,
                           std::span<bf16_t> values);

/// Channels first_channel, first_channel + 1, ... without vectors, from Random123: what the vector
/// code is tested against.
void generate_noise_ref(const TensorStream& stream, int64_t first_channel, std::span<float> values);

/// base^(-i/pairs) for i = 0..pairs-1, pairs a power of two.
std::vector<double> rotary_frequencies(double base, int64_t pairs);

/// Rows of a rotary table: n cosines, then n sines of position * frequencies[i]. This and the
/// frequencies are computed with +, *, /, sqrt and rounding of doubles only (no libm), so that they
/// are equal on every platform.
void generate_cos_sin(std::span<const double> frequencies, int64_t num_positions, float* table);

/// The same with the frequencies of base 10000.
void generate_cos_sin(int64_t num_positions, int64_t rope_dim, float* table);

}  // namespace fovea::internal
