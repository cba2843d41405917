#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/index/index_logits_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>

#include "src/index/index_logits_driver.h"
#include "src/index/index_logits_impl.h"

// Lanes hold keys. A tile of kKeyVectors vectors of keys is decoded to fp32 and transposed,
// k[d][key]; queries are kept as q[block of heads][d][head], so that a step d of the product takes
// a few key vectors and one broadcast per head:
//
//   dot[h][key] = fma(q[h][d], k[d][key], dot[h][key])                 d = 0 .. Di-1
//   sum[key]    = fma(w[h], max(0, dot[h][key]), sum[key])             h = 0 .. Hi-1
//   logit[key]  = k_scale[key] * sum[key]
//
// Every key sees this order whatever its lane, tile or row group is.
HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

using U32 = hn::ScalableTag<uint32_t>;

// Registers: AVX-512 has 32: 8 heads x 3 key vectors of accumulators, 3 key vectors, one broadcast.
// Elsewhere count on 16: 4 x 3. FMAs need 8 independent chains (latency 4, two per cycle); loads
// per FMA stay below (3 + 4) / 12.
constexpr int kKeyVectors = 3;
constexpr int kHeadTile = HWY_TARGET <= HWY_AVX3 ? 8 : 4;
constexpr int64_t kLanes = HWY_LANES(float);
constexpr int64_t kKeyTile = kKeyVectors * kLanes;
// Heads that are interleaved in the decoded queries.
constexpr int64_t kHeadBlock = kLanes > kHeadTile ? kLanes : kHeadTile;

#if HWY_TARGET == HWY_SCALAR

// One lane: plain loops.
HWY_INLINE hn::Vec<U32> decode_rows(const uint8_t* const* rows, int64_t dims, float* out,
                                    int64_t pitch) {
  uint32_t nan = 0;
  for (int64_t d = 0; d < dims; ++d) {
    out[d * pitch] = e4m3_to_float(rows[0][d]);
    nan |= (rows[0][d] & 0x7F) == 0x7F ? 1u : 0u;
  }
  return hn::Set(U32(), nan);
}

#else

// 16 bytes from `offset` on of every fourth row, one row per 128-bit block.
HWY_INLINE hn::Vec<U32> load_blocks(const uint8_t* const* rows, int64_t offset) {
  const hn::Full128<uint32_t> d128;
  const hn::Full128<uint8_t> d128_bytes;
  const auto block = [&](int b) {
    return hn::BitCast(d128, hn::LoadU(d128_bytes, rows[4 * b] + offset));
  };
#if HWY_TARGET == HWY_AVX2
  const U32 d;
  return hn::Combine(d, block(1), block(0));
#elif HWY_TARGET <= HWY_AVX3
  const U32 d;
  const hn::Full256<uint32_t> d256;
  return hn::Combine(d, hn::Combine(d256, block(3), block(2)),
                     hn::Combine(d256, block(1), block(0)));
#else
  return block(0);
#endif
}

// The four codes of every lane, as floats: channel c at out + c * pitch. A NaN code gives +-480.
HWY_INLINE void decode_store(hn::Vec<U32> codes, float* out, int64_t pitch) {
  const F32 d;
  const U32 du;
  const hn::Repartition<uint16_t, U32> du16;
  const hn::Repartition<int16_t, U32> di16;
  // In 16-bit halves: the arithmetic shift puts exponent and mantissa of the upper code into the
  // fields of a bf16 whose exponent is too small by 127 - 7 = 120, and leaves the sign in place.
  // Subnormal codes become subnormal numbers, for which the product with 2^120 is right too.
  const auto fields = [&](hn::Vec<decltype(du16)> upper) HWY_ATTR {
    const auto shifted = hn::BitCast(du16, hn::ShiftRight<4>(hn::BitCast(di16, upper)));
    return hn::BitCast(du, hn::And(shifted, hn::Set(du16, 0x87F0)));
  };
  const auto low = [&](hn::Vec<U32> halves) HWY_ATTR {
    return hn::Mul(hn::BitCast(d, hn::ShiftLeft<16>(halves)), hn::Set(d, 0x1p120f));
  };
  const auto high = [&](hn::Vec<U32> halves) HWY_ATTR {
    return hn::Mul(hn::BitCast(d, hn::And(halves, hn::Set(du, 0xFFFF0000u))), hn::Set(d, 0x1p120f));
  };
  const auto odd = fields(hn::BitCast(du16, codes));
  const auto even = fields(hn::ShiftLeft<8>(hn::BitCast(du16, codes)));
  hn::StoreU(low(even), d, out);
  hn::StoreU(low(odd), d, out + pitch);
  hn::StoreU(high(even), d, out + 2 * pitch);
  hn::StoreU(high(odd), d, out + 3 * pitch);
}

// Decodes 16 channels of kLanes rows: out[d * pitch + lane]. Lanes of the result are non-zero for
// rows with a NaN code (magnitude 0x7F).
HWY_INLINE hn::Vec<U32> decode_channels(const uint8_t* const* rows, int64_t offset, float* out,
                                        int64_t pitch) {
  const U32 du;
  const hn::Repartition<uint64_t, U32> d64;
  const hn::Repartition<uint8_t, U32> d8;
  const auto wide = [&](hn::Vec<U32> v) { return hn::BitCast(d64, v); };
  const auto a0 = load_blocks(rows, offset);
  const auto a1 = load_blocks(rows + 1, offset);
  const auto a2 = load_blocks(rows + 2, offset);
  const auto a3 = load_blocks(rows + 3, offset);
  // Transposes 4 x 4 groups of four codes inside each 128-bit block: lane l then holds row l.
  const auto low01 = wide(hn::InterleaveLower(du, a0, a1));
  const auto high01 = wide(hn::InterleaveUpper(du, a0, a1));
  const auto low23 = wide(hn::InterleaveLower(du, a2, a3));
  const auto high23 = wide(hn::InterleaveUpper(du, a2, a3));
  const hn::Vec<U32> codes[4] = {hn::BitCast(du, hn::InterleaveLower(d64, low01, low23)),
                                 hn::BitCast(du, hn::InterleaveUpper(d64, low01, low23)),
                                 hn::BitCast(du, hn::InterleaveLower(d64, high01, high23)),
                                 hn::BitCast(du, hn::InterleaveUpper(d64, high01, high23))};
  auto nan = hn::Zero(d8);
  for (int i = 0; i < 4; ++i) {
    decode_store(codes[i], out + 4 * i * pitch, pitch);
    const auto magnitude = hn::And(hn::BitCast(d8, codes[i]), hn::Set(d8, 0x7F));
    nan = hn::Or(nan, hn::Add(magnitude, hn::Set(d8, 0x01)));
  }
  return hn::And(hn::BitCast(du, nan), hn::Set(du, 0x80808080u));
}

// Decodes kLanes rows of `dims` codes: out[d * pitch + lane], d up to the next multiple of 16.
// Nothing past a row's last code is read. Lanes of the result are non-zero for rows with a NaN.
HWY_NOINLINE hn::Vec<U32> decode_rows(const uint8_t* const* rows, int64_t dims, float* out,
                                      int64_t pitch) {
  const U32 du;
  auto nan = hn::Zero(du);
  int64_t d = 0;
  for (; d + 16 <= dims; d += 16) {
    nan = hn::Or(nan, decode_channels(rows, d, out + d * pitch, pitch));
  }
  if (d < dims) {
    uint8_t tail[kLanes][16] = {};
    const uint8_t* tail_rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      std::copy(rows[lane] + d, rows[lane] + dims, tail[lane]);
      tail_rows[lane] = tail[lane];
    }
    nan = hn::Or(nan, decode_channels(tail_rows, 0, out + d * pitch, pitch));
  }
  return nan;
}

#endif  // HWY_SCALAR

// Adds kHeads heads to the sums of a key tile. q: channel d, head i at q[d * kHeadBlock + i]. Not
// inlined: the loop needs every register, and constants of the caller would take some. The loops
// over heads and key vectors are unrolled early, or the accumulators would pass through memory.
template <int kHeads>
HWY_NOINLINE void score_heads(const float* HWY_RESTRICT q, const float* HWY_RESTRICT k,
                              int64_t dims, const float* HWY_RESTRICT weight,
                              float* HWY_RESTRICT sums) {
  const F32 d;
  hn::Vec<F32> dot[kHeads][kKeyVectors];
  HWY_UNROLL(8)
  for (int h = 0; h < kHeads; ++h) {
    HWY_UNROLL(3)
    for (int v = 0; v < kKeyVectors; ++v) dot[h][v] = hn::Zero(d);
  }
  for (int64_t i = 0; i < dims; ++i) {
    hn::Vec<F32> key[kKeyVectors];
    HWY_UNROLL(3)
    for (int v = 0; v < kKeyVectors; ++v) key[v] = hn::Load(d, k + i * kKeyTile + v * kLanes);
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) {
      const auto query = hn::Set(d, q[i * kHeadBlock + h]);
      HWY_UNROLL(3)
      for (int v = 0; v < kKeyVectors; ++v) dot[h][v] = hn::MulAdd(query, key[v], dot[h][v]);
    }
  }
  HWY_UNROLL(3)
  for (int v = 0; v < kKeyVectors; ++v) {
    auto sum = hn::Load(d, sums + v * kLanes);
    HWY_UNROLL(8)
    for (int h = 0; h < kHeads; ++h) {
      sum = hn::MulAdd(hn::Set(d, weight[h]), hn::Max(hn::Zero(d), dot[h][v]), sum);
    }
    hn::Store(sum, d, sums + v * kLanes);
  }
}

struct Kernel {
  using Word = float;
  static constexpr int64_t kKeyTile = HWY_NAMESPACE::kKeyTile;
  static constexpr int64_t kHeadBlock = HWY_NAMESPACE::kHeadBlock;

  static int64_t steps(int64_t dims) { return (dims + 15) / 16 * 16; }

  static void decode_heads(const uint8_t* const* rows, int64_t dims, float* out, uint32_t* nan) {
    decode<kHeadBlock>(rows, dims, out, nan);
  }
  static void decode_keys(const uint8_t* const* rows, int64_t dims, float* out, uint32_t* nan) {
    decode<kKeyTile>(rows, dims, out, nan);
  }

  static void score(const float* q, const float* k, int64_t dims, int64_t num_heads,
                    const float* weight, const float* scale, float* logits) {
    const F32 d;
    for (int64_t i = 0; i < kKeyTile; i += kLanes) hn::Store(hn::Zero(d), d, logits + i);
    for (int64_t h = 0; h < num_heads; h += kHeadTile) {
      const int64_t block = h / kHeadBlock * kHeadBlock;
      score_heads<kHeadTile>(q + block * steps(dims) + (h - block), k, dims, weight + h, logits);
    }
    for (int64_t i = 0; i < kKeyTile; i += kLanes) {
      hn::Store(hn::Mul(hn::LoadU(d, scale + i), hn::Load(d, logits + i)), d, logits + i);
    }
  }

 private:
  template <int64_t kRows>
  static void decode(const uint8_t* const* rows, int64_t dims, float* out, uint32_t* nan) {
    for (int64_t i = 0; i < kRows; i += kLanes) {
      hn::StoreU(decode_rows(rows + i, dims, out + i, kRows), U32(), nan + i);
    }
  }
};

size_t index_logits_bytes(const IndexLogitsProblem& problem, const Device& device) {
  return logits_workspace_bytes<Kernel>(problem, device);
}

void index_logits(const IndexLogitsProblem& problem, const Device& device,
                  const IndexLogitsTensors& tensors, Workspace workspace) {
  run_logits<Kernel>(problem, device, tensors, workspace);
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(index_logits);
HWY_EXPORT(index_logits_bytes);

size_t index_logits_cpu_bytes(const IndexLogitsProblem& problem, const Device& device) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  return HWY_DYNAMIC_DISPATCH(index_logits_bytes)(problem, device);
}

void index_logits_cpu(const IndexLogitsProblem& problem, const Device& device,
                      const IndexLogitsTensors& tensors, Workspace workspace) {
  current_cpu_isa();
  HWY_DYNAMIC_DISPATCH(index_logits)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
