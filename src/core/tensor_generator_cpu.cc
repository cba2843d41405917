#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/core/tensor_generator_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>

#include "fovea/device.h"
#include "src/core/check.h"
#include "src/core/tensor_generator.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR

// Plain loops, in blocks that stay on the stack.
constexpr size_t kBlock = 64;

template <class T>
void noise(const TensorStream& stream, std::span<T> values) {
  float block[kBlock];
  for (size_t c = 0; c < values.size(); c += kBlock) {
    const size_t count = std::min(kBlock, values.size() - c);
    generate_noise_ref(stream, static_cast<int64_t>(c), std::span<float>(block, count));
    for (size_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<T, float>)
        values[c + i] = block[i];
      else
        values[c + i] = bf16_from_float(block[i]);
    }
  }
}

void noise_around(const TensorStream& stream, const NoiseAround& around, std::span<bf16_t> values) {
  float block[kBlock];
  const size_t width = around.base.size();
  for (size_t c = 0; c < values.size(); c += kBlock) {
    const size_t count = std::min(kBlock, values.size() - c);
    generate_noise_ref(stream, around.first_channel + static_cast<int64_t>(c),
                       std::span<float>(block, count));
    for (size_t i = 0; i < count; ++i) {
      values[c + i] =
          bf16_from_float(block[i] + around.factor * bf16_to_float(around.base[(c + i) % width]));
    }
  }
}

#else

using U64 = hn::ScalableTag<uint64_t>;
using V64 = hn::Vec<U64>;

// The low 32 bits of every 64-bit lane multiplied, all 64 bits of the product. The high halves of
// the operands are ignored.
HWY_INLINE V64 multiply_low(V64 a, V64 b) {
  const hn::Repartition<uint32_t, U64> d32;
  return hn::MulEven(hn::BitCast(d32, a), hn::BitCast(d32, b));
}

// What all vectors of a stream share: the round keys and the words of the counter above word 0.
struct PhiloxStream {
  explicit PhiloxStream(const TensorStream& stream)
      : word1(static_cast<uint32_t>(stream.layer * 256 + static_cast<int64_t>(stream.tensor))),
        token_id(stream.token_id) {
    auto low = static_cast<uint32_t>(stream.seed);
    auto high = static_cast<uint32_t>(stream.seed >> 32);
    for (int round = 0; round < kRounds; ++round) {
      key_low[round] = low;
      key_high[round] = high;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }

  static constexpr int kRounds = 10;
  uint64_t word1;
  uint64_t token_id;
  uint64_t key_low[kRounds];
  uint64_t key_high[kRounds];
};

// Philox4x32-10 for kBlocks vectors of counters that differ in word 0: word w of lane l of block b
// is the low half of lane l of c[b][w]; the high halves hold rubbish that no operation looks at.
// Two blocks share the keys and hide the latency of the multiplications (two a round, in a chain
// of ten).
template <int kBlocks>
HWY_INLINE void philox(const PhiloxStream& stream, V64 (&c)[kBlocks][4]) {
  const U64 d;
  const V64 m0 = hn::Set(d, 0xD2511F53u);
  const V64 m1 = hn::Set(d, 0xCD9E8D57u);
  for (int round = 0; round < PhiloxStream::kRounds; ++round) {
    const V64 key_low = hn::Set(d, stream.key_low[round]);
    const V64 key_high = hn::Set(d, stream.key_high[round]);
    for (int b = 0; b < kBlocks; ++b) {
      const V64 product0 = multiply_low(c[b][0], m0);
      const V64 product1 = multiply_low(c[b][2], m1);
      c[b][0] = hn::Xor(hn::ShiftRight<32>(product1), hn::Xor(c[b][1], key_low));
      c[b][2] = hn::Xor(hn::ShiftRight<32>(product0), hn::Xor(c[b][3], key_high));
      c[b][1] = product1;
      c[b][3] = product0;
    }
  }
}

// kBlocks * Lanes(F32()) consecutive values of a stream, already bf16 values, from channel
// 2 * first_pair.
template <int kBlocks>
HWY_INLINE void noise_vectors(const PhiloxStream& stream, uint64_t first_pair,
                              hn::Vec<F32> (&values)[kBlocks]) {
  const U64 d;
  const F32 df;
  const hn::RebindToSigned<F32> di;
  const hn::Repartition<uint32_t, U64> d32;
  V64 c[kBlocks][4];
  for (int b = 0; b < kBlocks; ++b) {
    c[b][0] = hn::Iota(d, first_pair + static_cast<uint64_t>(b) * hn::Lanes(d));
    c[b][1] = hn::Set(d, stream.word1);
    c[b][2] = hn::Set(d, stream.token_id);
    c[b][3] = hn::Set(d, stream.token_id >> 32);
  }
  philox(stream, c);
  const auto low_half = hn::Set(d32, 0xFFFFu);
  for (int b = 0; b < kBlocks; ++b) {
    // Words 0 and 1 belong to the even channel, which comes first in a little-endian lane.
    const auto word02 =
        hn::OddEven(hn::BitCast(d32, hn::ShiftLeft<32>(c[b][2])), hn::BitCast(d32, c[b][0]));
    const auto word13 =
        hn::OddEven(hn::BitCast(d32, hn::ShiftLeft<32>(c[b][3])), hn::BitCast(d32, c[b][1]));
    const auto sums = hn::Add(hn::Add(hn::And(word02, low_half), hn::ShiftRight<16>(word02)),
                              hn::Add(hn::And(word13, low_half), hn::ShiftRight<16>(word13)));
    const auto centred = hn::Sub(hn::BitCast(di, sums), hn::Set(di, 131070));
    values[b] = round_to_bf16(df, hn::Mul(hn::ConvertTo(df, centred), hn::Set(df, 0x1p-16f)));
  }
}

HWY_INLINE void store_values(F32 d, hn::Vec<F32> value, bf16_t* to) { store_bf16(d, value, to); }
HWY_INLINE void store_values(F32 d, hn::Vec<F32> value, float* to) { hn::StoreU(value, d, to); }

template <class T>
void noise(const TensorStream& stream, std::span<T> values) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  const PhiloxStream shared(stream);
  hn::Vec<F32> two[2], one[1];
  size_t c = 0;
  for (; c + 2 * lanes <= values.size(); c += 2 * lanes) {
    noise_vectors(shared, c / 2, two);
    store_values(d, two[0], values.data() + c);
    store_values(d, two[1], values.data() + c + lanes);
  }
  for (; c < values.size(); c += lanes) {
    T rest[hn::MaxLanes(d)];
    noise_vectors(shared, c / 2, one);
    store_values(d, one[0], rest);
    std::copy_n(rest, std::min(lanes, values.size() - c), values.data() + c);
  }
}

void noise_around(const TensorStream& stream, const NoiseAround& around, std::span<bf16_t> values) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  const PhiloxStream shared(stream);
  const auto factor = hn::Set(d, around.factor);
  const auto first_pair = static_cast<uint64_t>(around.first_channel / 2);
  const size_t width = around.base.size();
  hn::Vec<F32> two[2];
  for (size_t row = 0; row + width <= values.size(); row += width) {
    for (size_t c = 0; c + 2 * lanes <= width; c += 2 * lanes) {
      noise_vectors(shared, first_pair + (row + c) / 2, two);
      for (size_t b = 0; b < 2; ++b) {
        const bf16_t* const base = around.base.data() + c + b * lanes;
        const auto value = hn::Add(two[b], hn::Mul(factor, load_bf16(d, base)));
        store_bf16(d, round_to_bf16(d, value), values.data() + row + c + b * lanes);
      }
    }
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

void noise_bf16(const TensorStream& stream, std::span<bf16_t> values) { noise(stream, values); }
void noise_f32(const TensorStream& stream, std::span<float> values) { noise(stream, values); }

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(noise_bf16);
HWY_EXPORT(noise_f32);
HWY_EXPORT(noise_around);

void generate_noise(const TensorStream& stream, std::span<bf16_t> values) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(noise_bf16)(stream, values);
}

void generate_noise(const TensorStream& stream, std::span<float> values) {
  current_cpu_isa();
  HWY_DYNAMIC_DISPATCH(noise_f32)(stream, values);
}

void generate_noise_around(const TensorStream& stream, const NoiseAround& around,
                           std::span<bf16_t> values) {
  // Two vectors of 16 are the widest step: rows of whole steps need no tail.
  FOVEA_DCHECK(around.base.size() % 32 == 0 && values.size() % around.base.size() == 0);
  current_cpu_isa();
  HWY_DYNAMIC_DISPATCH(noise_around)(stream, around, values);
}

}  // namespace fovea::internal
#endif
