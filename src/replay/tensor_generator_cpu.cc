#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/replay/tensor_generator_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>

#include "fovea/device.h"
#include "src/core/check.h"
#include "src/replay/tensor_generator.h"

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

// Philox4x32-10 for Lanes(U64()) counters that differ in word 0: word w of the counter of lane l is
// the low half of lane l of c[w]; the high halves hold rubbish that no operation looks at.
HWY_INLINE void philox(const TensorStream& stream, V64 c[4]) {
  const U64 d;
  const V64 m0 = hn::Set(d, 0xD2511F53u);
  const V64 m1 = hn::Set(d, 0xCD9E8D57u);
  auto key0 = static_cast<uint32_t>(stream.seed);
  auto key1 = static_cast<uint32_t>(stream.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const V64 product0 = multiply_low(c[0], m0);
    const V64 product1 = multiply_low(c[2], m1);
    c[0] = hn::Xor(hn::ShiftRight<32>(product1), hn::Xor(c[1], hn::Set(d, key0)));
    c[2] = hn::Xor(hn::ShiftRight<32>(product0), hn::Xor(c[3], hn::Set(d, key1)));
    c[1] = product1;
    c[3] = product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The sum of the four 16-bit halves of the low 32 bits of a and b.
HWY_INLINE V64 sum_halves(V64 a, V64 b) {
  const U64 d;
  const V64 mask = hn::Set(d, 0xFFFFu);
  return hn::Add(hn::Add(hn::And(a, mask), hn::And(hn::ShiftRight<16>(a), mask)),
                 hn::Add(hn::And(b, mask), hn::And(hn::ShiftRight<16>(b), mask)));
}

// Lanes(F32()) consecutive values of a stream, already bf16 values, from channel 2 * first_pair.
HWY_INLINE hn::Vec<F32> noise_vector(const TensorStream& stream, uint64_t first_pair) {
  const U64 d;
  V64 c[4] = {
      hn::Iota(d, first_pair),
      hn::Set(d, static_cast<uint32_t>(stream.layer * 256 + static_cast<int64_t>(stream.tensor))),
      hn::Set(d, stream.token_id), hn::Set(d, stream.token_id >> 32)};
  philox(stream, c);
  const V64 even = sum_halves(c[0], c[1]);
  const V64 odd = sum_halves(c[2], c[3]);
  // In a little-endian lane the low half comes first: channels 2i, 2i+1.
  const F32 df;
  const hn::RebindToSigned<F32> di;
  const auto sums = hn::BitCast(di, hn::Or(even, hn::ShiftLeft<32>(odd)));
  const auto centred = hn::Sub(sums, hn::Set(di, 131070));
  return round_to_bf16(df, hn::Mul(hn::ConvertTo(df, centred), hn::Set(df, 0x1p-16f)));
}

HWY_INLINE void store_values(F32 d, hn::Vec<F32> value, bf16_t* to) { store_bf16(d, value, to); }
HWY_INLINE void store_values(F32 d, hn::Vec<F32> value, float* to) { hn::StoreU(value, d, to); }

template <class T>
void noise(const TensorStream& stream, std::span<T> values) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  size_t c = 0;
  for (; c + lanes <= values.size(); c += lanes) {
    store_values(d, noise_vector(stream, c / 2), values.data() + c);
  }
  if (c < values.size()) {
    T rest[hn::MaxLanes(d)];
    store_values(d, noise_vector(stream, c / 2), rest);
    std::copy_n(rest, values.size() - c, values.data() + c);
  }
}

void noise_around(const TensorStream& stream, const NoiseAround& around, std::span<bf16_t> values) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, around.factor);
  const auto first_pair = static_cast<uint64_t>(around.first_channel / 2);
  const size_t width = around.base.size();
  for (size_t row = 0; row + width <= values.size(); row += width) {
    for (size_t c = 0; c + lanes <= width; c += lanes) {
      const auto value = hn::Add(noise_vector(stream, first_pair + (row + c) / 2),
                                 hn::Mul(factor, load_bf16(d, around.base.data() + c)));
      store_bf16(d, round_to_bf16(d, value), values.data() + row + c);
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
  // 16 is the widest vector: rows of whole vectors need no tail.
  FOVEA_DCHECK(around.base.size() % 16 == 0 && values.size() % around.base.size() == 0);
  current_cpu_isa();
  HWY_DYNAMIC_DISPATCH(noise_around)(stream, around, values);
}

}  // namespace fovea::internal
#endif
