// index_logits with bf16 dot products. Every e4m3 value is a bf16 value, so products stay exact and
// sums are fp32.

#include "fovea/device.h"
#include "src/index/index_logits_impl.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>

#include "src/index/index_logits_driver.h"

// g++ 12 warns about the undefined start values inside its own intrinsics (PR 105593, fixed in 13).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define FOVEA_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
#define FOVEA_AVX512_BF16_INLINE FOVEA_AVX512_BF16 __attribute__((always_inline)) inline

namespace fovea::internal {
namespace {

// As in index_logits_cpu.cc lanes hold keys, but a step takes two channels: a 32-bit word is a pair
// of bf16 values, the earlier channel in the low half, and the dot-product instruction adds both
// products to the lane's fp32 sum. Per key: channels in order, then heads in order.
constexpr int64_t kLanes = 16;
constexpr int kKeyVectors = 3;
constexpr int kHeadTile = 8;  // 8 x 3 sums of 32 registers; latency 6 needs 12 independent ones

// 16 bytes from `offset` on of rows 0, 4, 8 and 12, one row per 128-bit block.
FOVEA_AVX512_BF16_INLINE __m512i load_blocks(const uint8_t* const* rows, int64_t offset) {
  const auto load = [&](int row) { return reinterpret_cast<const __m128i*>(rows[row] + offset); };
  __m512i blocks = _mm512_castsi128_si512(_mm_loadu_si128(load(0)));
  blocks = _mm512_inserti32x4(blocks, _mm_loadu_si128(load(4)), 1);
  blocks = _mm512_inserti32x4(blocks, _mm_loadu_si128(load(8)), 2);
  return _mm512_inserti32x4(blocks, _mm_loadu_si128(load(12)), 3);
}

// Two codes in the upper bytes of each word, as bf16; a NaN code gives +-480.
FOVEA_AVX512_BF16_INLINE __m512i to_bf16(__m512i upper) {
  // The arithmetic shift puts exponent and mantissa into the fields of a bf16 whose exponent is too
  // small by 127 - 7 = 120, and leaves the sign in place.
  const __m512i fields =
      _mm512_and_si512(_mm512_srai_epi16(upper, 4), _mm512_set1_epi16(static_cast<short>(0x87F0)));
  const __m512i normal = _mm512_add_epi16(fields, _mm512_set1_epi16(120 << 7));
  // Subnormal codes (exponent field 0) are m * 2^-9, m = 0..7: looked up as bf16 words.
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(fields, _mm512_set1_epi16(0x0780));
  const __m512i subnormal_values = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  const __m512i subnormal =
      _mm512_permutexvar_epi16(_mm512_srli_epi16(fields, 4), subnormal_values);
  const __m512i sign = _mm512_and_si512(fields, _mm512_set1_epi16(static_cast<short>(0x8000)));
  return _mm512_mask_blend_epi16(is_subnormal, normal, _mm512_or_si512(subnormal, sign));
}

// Decodes 16 channels of 16 rows: out[pair * pitch + row]. Lanes of the result are non-zero for
// rows with a NaN code (magnitude 0x7F).
FOVEA_AVX512_BF16_INLINE __m512i decode_channels(const uint8_t* const* rows, int64_t offset,
                                                 uint32_t* out, int64_t pitch) {
  const __m512i a0 = load_blocks(rows, offset);
  const __m512i a1 = load_blocks(rows + 1, offset);
  const __m512i a2 = load_blocks(rows + 2, offset);
  const __m512i a3 = load_blocks(rows + 3, offset);
  // Transposes 4 x 4 groups of four codes inside each 128-bit block: lane l then holds row l.
  const __m512i low01 = _mm512_unpacklo_epi32(a0, a1);
  const __m512i high01 = _mm512_unpackhi_epi32(a0, a1);
  const __m512i low23 = _mm512_unpacklo_epi32(a2, a3);
  const __m512i high23 = _mm512_unpackhi_epi32(a2, a3);
  const __m512i codes[4] = {
      _mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
      _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
  // Bytes 0 and 1, or 2 and 3, of every lane to the upper bytes of its words.
  const __m512i first_pair = _mm512_broadcast_i32x4(
      _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
  const __m512i second_pair = _mm512_broadcast_i32x4(
      _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15));
  __m512i nan = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    uint32_t* to = out + 2 * i * pitch;
    _mm512_storeu_si512(to, to_bf16(_mm512_shuffle_epi8(codes[i], first_pair)));
    _mm512_storeu_si512(to + pitch, to_bf16(_mm512_shuffle_epi8(codes[i], second_pair)));
    // Bit 7 of a byte is set by adding 1 to the magnitude 0x7F only.
    const __m512i magnitude = _mm512_and_si512(codes[i], _mm512_set1_epi8(0x7F));
    nan = _mm512_or_si512(nan, _mm512_add_epi8(magnitude, _mm512_set1_epi8(1)));
  }
  return _mm512_and_si512(nan, _mm512_set1_epi8(static_cast<char>(0x80)));
}

// Decodes 16 rows of `dims` codes: out[pair * pitch + row], pairs up to the next multiple of 8.
// Nothing past a row's last code is read.
FOVEA_AVX512_BF16 void decode_rows(const uint8_t* const* rows, int64_t dims, uint32_t* out,
                                   int64_t pitch, uint32_t* nan_rows) {
  __m512i nan = _mm512_setzero_si512();
  int64_t d = 0;
  for (; d + 16 <= dims; d += 16) {
    nan = _mm512_or_si512(nan, decode_channels(rows, d, out + d / 2 * pitch, pitch));
  }
  if (d < dims) {
    uint8_t tail[kLanes][16] = {};
    const uint8_t* tail_rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      std::copy(rows[lane] + d, rows[lane] + dims, tail[lane]);
      tail_rows[lane] = tail[lane];
    }
    nan = _mm512_or_si512(nan, decode_channels(tail_rows, 0, out + d / 2 * pitch, pitch));
  }
  _mm512_storeu_si512(nan_rows, nan);
}

struct Kernel {
  using Word = uint32_t;
  static constexpr int64_t kKeyTile = kKeyVectors * kLanes;
  static constexpr int64_t kHeadBlock = kLanes;

  static int64_t steps(int64_t dims) { return (dims + 15) / 16 * 8; }

  static void decode_heads(const uint8_t* const* rows, int64_t dims, uint32_t* out, uint32_t* nan) {
    decode_rows(rows, dims, out, kHeadBlock, nan);
  }
  static void decode_keys(const uint8_t* const* rows, int64_t dims, uint32_t* out, uint32_t* nan) {
    for (int64_t i = 0; i < kKeyTile; i += kLanes) {
      decode_rows(rows + i, dims, out + i, kKeyTile, nan + i);
    }
  }

  FOVEA_AVX512_BF16 static void score(const uint32_t* q, const uint32_t* k, int64_t dims,
                                      int64_t num_heads, const float* weight, const float* scale,
                                      float* logits) {
    const int64_t pairs = (dims + 1) / 2;
    __m512 sums[kKeyVectors] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t h = 0; h < num_heads; h += kHeadTile) {
      const int64_t block = h / kHeadBlock * kHeadBlock;
      add_heads(q + block * steps(dims) + (h - block), k, pairs, weight + h, sums);
    }
    for (int v = 0; v < kKeyVectors; ++v) {
      const __m512 scales = _mm512_loadu_ps(scale + v * kLanes);
      _mm512_store_ps(logits + v * kLanes, _mm512_mul_ps(scales, sums[v]));
    }
  }

 private:
  // Adds kHeadTile heads to the sums of a key tile. q: pair i, head h at q[i * kHeadBlock + h].
  FOVEA_AVX512_BF16_INLINE static void add_heads(const uint32_t* q, const uint32_t* k,
                                                 int64_t pairs, const float* weight, __m512* sums) {
    __m512 dot[kHeadTile][kKeyVectors];
#pragma GCC unroll 8
    for (int h = 0; h < kHeadTile; ++h) {
#pragma GCC unroll 3
      for (int v = 0; v < kKeyVectors; ++v) dot[h][v] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < pairs; ++i) {
      __m512bh key[kKeyVectors];
#pragma GCC unroll 3
      for (int v = 0; v < kKeyVectors; ++v) {
        key[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(k + i * kKeyTile + v * kLanes));
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeadTile; ++h) {
        const auto query =
            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(q[i * kHeadBlock + h])));
#pragma GCC unroll 3
        for (int v = 0; v < kKeyVectors; ++v) {
          dot[h][v] = _mm512_dpbf16_ps(dot[h][v], query, key[v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeadTile; ++h) {
#pragma GCC unroll 3
      for (int v = 0; v < kKeyVectors; ++v) {
        const __m512 positive = _mm512_max_ps(_mm512_setzero_ps(), dot[h][v]);
        sums[v] = _mm512_fmadd_ps(_mm512_set1_ps(weight[h]), positive, sums[v]);
      }
    }
  }
};

}  // namespace

Refusal index_logits_avx512bf16_available() {
  if (current_cpu_isa() >= CpuIsa::kAvx512Bf16) return {};
  return "needs AVX512-BF16, and this machine offers " + std::string(to_string(current_cpu_isa()));
}

size_t index_logits_avx512bf16_bytes(const IndexLogitsProblem& problem, const Device& device) {
  return logits_workspace_bytes<Kernel>(problem, device);
}

void index_logits_avx512bf16(const IndexLogitsProblem& problem, const Device& device,
                             const IndexLogitsTensors& tensors, Workspace workspace) {
  run_logits<Kernel>(problem, device, tensors, workspace);
}

}  // namespace fovea::internal

#else  // not x86-64

namespace fovea::internal {

Refusal index_logits_avx512bf16_available() { return "needs an x86-64 CPU with AVX512-BF16"; }

size_t index_logits_avx512bf16_bytes(const IndexLogitsProblem&, const Device&) { return 0; }

void index_logits_avx512bf16(const IndexLogitsProblem&, const Device&, const IndexLogitsTensors&,
                             Workspace) {}

}  // namespace fovea::internal

#endif
