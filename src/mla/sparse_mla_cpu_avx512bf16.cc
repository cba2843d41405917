// sparse_mla with bf16 dot products: q, k and v enter the products as the bf16 values they are, the
// weights as one bf16 or, where that shows, as the sum of two; sums are fp32.

#include <algorithm>
#include <cstring>

#include "fovea/device.h"
#include "src/mla/sparse_mla_driver.h"
#include "src/mla/sparse_mla_impl.h"

#if defined(__x86_64__)

#include <immintrin.h>

// A test gives these instructions' work to plain loops, which need no target.
#ifndef FOVEA_AVX512_BF16
#define FOVEA_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
#endif
#define FOVEA_AVX512_BF16_INLINE FOVEA_AVX512_BF16 __attribute__((always_inline)) inline

namespace fovea::internal {
namespace {

// A dot-product instruction multiplies pairs of bf16 values and adds both products to one of 16 (8)
// fp32 sums. Layouts, all in 32-bit words that hold such a pair, the earlier element in the low
// half:
//   query    [panel][Dqk / 2][width]    pairs of channels, for the heads of a panel side by side
//   keys     [64][kKeyStride]           pairs of channels: the rows as they are
//   values   [32][512]                  pairs of keys (2i, 2i + 1), per channel
//   weights  [padded_heads / 4][32][4]  pairs of keys, for 4 heads: rounded to bf16
//   rests    the same, without the pairs that have none: what the rounding left
// kKeyStride is 19 cache lines: an odd number meets all sets of the cache. It is a constant so that
// the keys of a register tile are reached by displacements from one register.
// Of 32 registers 16 are sums: 8 keys x 2 vectors of heads or 16 keys x 1 for the logits, 4 heads x
// 4 vectors of channels for the values. That hides a latency of 8 cycles and divides 64 keys
// evenly.
constexpr int64_t kKeyStride = 576 / 2 + 16;
constexpr int64_t kPairs = kTileKeys / 2;
constexpr int64_t kFullPanel = 32;
constexpr int64_t kValueHeads = 4;
constexpr int64_t kValueVectors = 4;
// Words of a logits loop between two steps of the prefetcher, 200 to 300 cycles.
constexpr int64_t kStepWords = 16;
// A weight below this share of the sum so far loses its rest, at most 2^-9 of it: a 32nd each, such
// keys move an output by 1.5e-4 of a value (rms of 32 roundings), a fifth of the limit. Keys above
// are few, so that the rests cost a pass over the values of a few pairs: the second products of all
// pairs would take half as long again as everything else.
constexpr float kRestShare = 1.0f / 32;

// Of 4 heads: the pairs of keys that have rests.
struct RestList {
  int32_t count;
  uint8_t pair[kPairs];
};

struct Tile {
  uint32_t* keys;
  uint32_t* values;
  uint32_t* weights;
  uint32_t* rests;
  RestList* lists;  // [padded_heads / 4]
};

Tile cut_tile(void* memory) {
  auto* words = static_cast<uint32_t*>(memory);
  Tile tile;
  tile.keys = words;
  tile.values = tile.keys + kTileKeys * kKeyStride;
  tile.weights = tile.values + kPairs * kLatentDim;
  tile.rests = tile.weights + kMaxGroupHeads * kPairs;
  tile.lists = reinterpret_cast<RestList*>(tile.rests + kMaxGroupHeads * kPairs);
  return tile;
}

size_t tile_bytes() {
  const int64_t words = kTileKeys * kKeyStride + kPairs * kLatentDim + 2 * kMaxGroupHeads * kPairs;
  return static_cast<size_t>(words) * sizeof(uint32_t) + kMaxGroupHeads / 4 * sizeof(RestList);
}

size_t query_bytes(int64_t head_dim_qk, int64_t padded) {
  return static_cast<size_t>(head_dim_qk / 2 * padded) * sizeof(uint32_t);
}

int64_t panel_width(int64_t head, int64_t padded) {
  const int64_t rest = padded - head;
  return rest >= 32 ? 32 : rest >= 16 ? 16 : 8;
}

void load_query(const GroupShape& shape, const bf16_t* const* heads, void* query) {
  const int64_t words = shape.head_dim_qk / 2;
  for (int64_t first = 0; first < shape.padded_heads;) {
    const int64_t width = panel_width(first, shape.padded_heads);
    uint32_t* panel = static_cast<uint32_t*>(query) + first * words;
    // 32 words at a time: the lines written stay in the first-level cache.
    for (int64_t begin = 0; begin < words; begin += 32) {
      for (int64_t h = 0; h < width; ++h) {
        const bf16_t* from = heads[first + h];
        for (int64_t i = begin; i < begin + 32; ++i) {
          uint32_t pair = 0;
          if (from != nullptr) std::memcpy(&pair, from + 2 * i, sizeof(pair));
          panel[i * width + h] = pair;
        }
      }
    }
    first += width;
  }
}

// Vectors of 16 or 8 sums; the shorter for the last 8 heads.
struct Lanes16 {
  using Sums = __m512;
  static constexpr int64_t kLanes = 16;
  FOVEA_AVX512_BF16_INLINE static Sums load(const float* from) { return _mm512_loadu_ps(from); }
  FOVEA_AVX512_BF16_INLINE static void store(float* to, Sums sums) { _mm512_storeu_ps(to, sums); }
  FOVEA_AVX512_BF16_INLINE static __m512i pairs(const uint32_t* from) {
    return _mm512_loadu_si512(from);
  }
  FOVEA_AVX512_BF16_INLINE static __m512i broadcast(uint32_t pair) {
    return _mm512_set1_epi32(static_cast<int>(pair));
  }
  FOVEA_AVX512_BF16_INLINE static Sums add_dot(Sums sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
  }
  FOVEA_AVX512_BF16_INLINE static Sums zero() { return _mm512_setzero_ps(); }
};

struct Lanes8 {
  using Sums = __m256;
  static constexpr int64_t kLanes = 8;
  FOVEA_AVX512_BF16_INLINE static Sums load(const float* from) { return _mm256_loadu_ps(from); }
  FOVEA_AVX512_BF16_INLINE static void store(float* to, Sums sums) { _mm256_storeu_ps(to, sums); }
  FOVEA_AVX512_BF16_INLINE static __m256i pairs(const uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  FOVEA_AVX512_BF16_INLINE static __m256i broadcast(uint32_t pair) {
    return _mm256_set1_epi32(static_cast<int>(pair));
  }
  FOVEA_AVX512_BF16_INLINE static Sums add_dot(Sums sums, __m256i a, __m256i b) {
    return _mm256_dpbf16_ps(sums, (__m256bh)a, (__m256bh)b);
  }
  FOVEA_AVX512_BF16_INLINE static Sums zero() { return _mm256_setzero_ps(); }
};

// logits[k, head] = dot over all channels, for kKeys keys and kVectors vectors of heads. Channel
// pairs are added one by one in their order, whatever the tile.
template <class Lanes, int kKeys, int kVectors>
FOVEA_AVX512_BF16_INLINE void dot_tile(const uint32_t* __restrict query,
                                       const uint32_t* __restrict keys, int64_t words,
                                       Prefetcher& prefetcher, float* __restrict logits) {
  constexpr int64_t kWidth = kVectors * Lanes::kLanes;
  typename Lanes::Sums sum[kKeys][kVectors];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[k][v] = Lanes::zero();
  }
  for (int64_t begin = 0; begin < words; begin += kStepWords) {
    prefetcher.step();
    for (int64_t i = begin; i < begin + kStepWords; ++i) {
      decltype(Lanes::pairs(query)) q[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        q[v] = Lanes::pairs(query + i * kWidth + v * Lanes::kLanes);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const auto key = Lanes::broadcast(keys[k * kKeyStride + i]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[k][v] = Lanes::add_dot(sum[k][v], q[v], key);
      }
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      Lanes::store(logits + k * kWidth + v * Lanes::kLanes, sum[k][v]);
  }
}

template <class Lanes, int kKeys, int kVectors>
FOVEA_AVX512_BF16 void panel_logits(const uint32_t* query, const uint32_t* keys,
                                    int64_t head_dim_qk, int64_t num_keys, Prefetcher& prefetcher,
                                    float* logits) {
  const int64_t words = head_dim_qk / 2;
  constexpr int64_t kWidth = kVectors * Lanes::kLanes;
  int64_t k = 0;
  for (; k + kKeys <= num_keys; k += kKeys) {
    dot_tile<Lanes, kKeys, kVectors>(query, keys + k * kKeyStride, words, prefetcher,
                                     logits + k * kWidth);
  }
  for (; k + 4 <= num_keys; k += 4) {
    dot_tile<Lanes, 4, kVectors>(query, keys + k * kKeyStride, words, prefetcher,
                                 logits + k * kWidth);
  }
  for (; k < num_keys; ++k)
    dot_tile<Lanes, 1, kVectors>(query, keys + k * kKeyStride, words, prefetcher,
                                 logits + k * kWidth);
}

// values[pair, d] = (v[2 pair][d], v[2 pair + 1][d]); the missing partner of an odd last key is 0.
FOVEA_AVX512_BF16 void interleave_values(const uint32_t* keys, int64_t num_keys, uint32_t* values) {
  // Channels 0..15 and 16..31 of two rows: word i of the result takes halfword i of each.
  alignas(64) uint16_t low[32], high[32];
  for (uint16_t i = 0; i < 16; ++i) {
    low[2 * i] = i;
    low[2 * i + 1] = static_cast<uint16_t>(32 + i);
    high[2 * i] = static_cast<uint16_t>(16 + i);
    high[2 * i + 1] = static_cast<uint16_t>(48 + i);
  }
  const __m512i take_low = _mm512_load_si512(low);
  const __m512i take_high = _mm512_load_si512(high);
  for (int64_t k = 0; k < num_keys; k += 2) {
    const uint32_t* even = keys + k * kKeyStride;
    uint32_t* to = values + k / 2 * kLatentDim;
    for (int64_t d = 0; d < kLatentDim; d += 32) {
      const __m512i a = _mm512_loadu_si512(even + d / 2);
      const __m512i b =
          k + 1 < num_keys ? _mm512_loadu_si512(even + kKeyStride + d / 2) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, take_low, b));
      _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, take_high, b));
    }
  }
}

// Takes the rests of two pairs of keys, a word per head, to the list of their 4 heads.
FOVEA_AVX512_BF16_INLINE void list_rests(__m256i rests, uint32_t which, int64_t pair,
                                         RestList* list, uint32_t* to) {
  alignas(32) uint32_t words[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), rests);
  for (int64_t i = 0; i < 2; ++i) {
    if ((which >> (8 * i) & 0xFF) == 0) continue;
    std::memcpy(to + list->count * 4, words + 4 * i, 4 * sizeof(uint32_t));
    list->pair[list->count++] = static_cast<uint8_t>(pair + i);
  }
}

// fp32 weights [group of 4 heads][64][4] to bf16 pairs of keys, round to nearest even, and their
// rests. A partner past the last key becomes 0. What becomes of a weight depends on its own head
// alone: a rest of 0 beside one that counts adds 0 to a sum that has met this key.
FOVEA_AVX512_BF16 void pair_weights(float* from, int64_t num_heads, int64_t num_keys,
                                    const float* sums, const Tile& tile) {
  // 4 keys x 4 heads: word h of a pair takes head h of the even key and of the odd one.
  const __m256i order = _mm256_setr_epi16(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  constexpr __mmask16 kAll = 0xFFFF;
  const int64_t end = (num_keys + 3) / 4 * 4;
  for (int64_t head = 0; head < num_heads; head += 4) {
    float* group = from + head * kTileKeys;
    std::fill(group + num_keys * 4, group + end * 4, 0.0f);
    alignas(64) float smallest[16];
    for (int64_t i = 0; i < 16; ++i) smallest[i] = kRestShare * sums[head + i % 4];
    const __m512 limit = _mm512_loadu_ps(smallest);
    RestList* const list = tile.lists + head / 4;
    list->count = 0;
    for (int64_t k = 0; k < end; k += 4) {
      const __m512 weight = _mm512_loadu_ps(group + k * 4);
      const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weight);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.weights + head * kPairs + k / 2 * 4),
                          _mm256_permutexvar_epi16(order, rounded));
      // The forms with a mask: GCC 12 warns of the undefined operand of the others.
      const __m512i words = _mm512_maskz_cvtepu16_epi32(kAll, rounded);
      const __m512 rest =
          _mm512_sub_ps(weight, _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, words, 16)));
      // NaN counts.
      const uint32_t counts = _mm512_cmp_ps_mask(weight, limit, _CMP_NLE_UQ) &
                              _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      if (counts == 0) continue;
      const __m256i rests =
          (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(static_cast<__mmask16>(counts), rest));
      list_rests(_mm256_permutexvar_epi16(order, rests), counts, k / 2, list,
                 tile.rests + head * kPairs);
    }
  }
}

// sum[h, channels] += the weights of a pair of keys, for 4 heads, times its values.
FOVEA_AVX512_BF16_INLINE void add_pair(const uint32_t* __restrict values,
                                       const uint32_t* __restrict weights,
                                       __m512 (&sum)[kValueHeads][kValueVectors]) {
  __m512i value[kValueVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kValueVectors; ++v) value[v] = Lanes16::pairs(values + v * 16);
#pragma GCC unroll 4
  for (int h = 0; h < kValueHeads; ++h) {
    const __m512i weight = Lanes16::broadcast(weights[h]);
#pragma GCC unroll 4
    for (int v = 0; v < kValueVectors; ++v)
      sum[h][v] = Lanes16::add_dot(sum[h][v], value[v], weight);
  }
}

// out[h, d] = alpha[h] * out + sum over pairs of keys, then over the rests, for the 4 heads from
// `head` on and the 64 channels from `channel` on.
FOVEA_AVX512_BF16_INLINE void value_tile(const Tile& tile, int64_t head, int64_t channel,
                                         int64_t num_pairs, bool first,
                                         const float* __restrict alpha, float* __restrict out) {
  __m512 sum[kValueHeads][kValueVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kValueHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kValueVectors; ++v) {
      sum[h][v] = first ? _mm512_setzero_ps()
                        : _mm512_mul_ps(_mm512_set1_ps(alpha[h]),
                                        _mm512_loadu_ps(out + h * kLatentDim + v * 16));
    }
  }
  const uint32_t* const values = tile.values + channel;
  const uint32_t* const weights = tile.weights + head * kPairs;
  for (int64_t pair = 0; pair < num_pairs; ++pair)
    add_pair(values + pair * kLatentDim, weights + pair * 4, sum);
  const uint32_t* const rests = tile.rests + head * kPairs;
  const RestList& list = tile.lists[head / 4];
  for (int64_t i = 0; i < list.count; ++i)
    add_pair(values + list.pair[i] * kLatentDim, rests + i * 4, sum);
#pragma GCC unroll 4
  for (int h = 0; h < kValueHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kValueVectors; ++v)
      _mm512_storeu_ps(out + h * kLatentDim + v * 16, sum[h][v]);
  }
}

FOVEA_AVX512_BF16 void add_values(const GroupShape& shape, const Tile& tile, int64_t num_keys,
                                  bool first, const float* alpha, Prefetcher& prefetcher,
                                  float* out) {
  const int64_t num_pairs = (num_keys + 1) / 2;
  for (int64_t d = 0; d < kLatentDim; d += 16 * kValueVectors) {
    for (int64_t head = 0; head < shape.num_heads; head += kValueHeads) {
      prefetcher.step();
      value_tile(tile, head, d, num_pairs, first, alpha + head, out + head * kLatentDim + d);
    }
  }
}

void attend_tile(const SparseMlaKernel& kernel, const GroupShape& shape, const KeyTile& tile,
                 const KeyTile& upcoming, bool first, const SparseMlaScratch& scratch,
                 const HeadState& state) {
  const Tile buffers = cut_tile(scratch.tile);
  for (int k = 0; k < tile.num_keys; ++k) {
    kernel.unpack_row(k < tile.num_primary ? shape.row_format : shape.extra_row_format,
                      {tile.rows[k], tile.scales[k]}, shape.head_dim_qk,
                      reinterpret_cast<bf16_t*>(buffers.keys + k * kKeyStride));
  }
  interleave_values(buffers.keys, tile.num_keys, buffers.values);
  // Steps of the logits (a panel meets 8 keys at a time, the last and narrow ones 16), then of the
  // values.
  const int64_t num_steps = (shape.padded_heads + 31) / 32 * (tile.num_keys / 16 + 1) *
                                (shape.head_dim_qk / 2 / kStepWords) +
                            shape.padded_heads / kValueHeads * (kLatentDim / (16 * kValueVectors));
  Prefetcher prefetcher(shape, upcoming, num_steps);
  for (int64_t head = 0; head < shape.padded_heads;) {
    const int64_t width = panel_width(head, shape.padded_heads);
    const auto* query =
        static_cast<const uint32_t*>(scratch.query) + head * (shape.head_dim_qk / 2);
    if (width == kFullPanel) {
      panel_logits<Lanes16, 8, 2>(query, buffers.keys, shape.head_dim_qk, tile.num_keys, prefetcher,
                                  scratch.logits);
    } else if (width == 16) {
      panel_logits<Lanes16, 16, 1>(query, buffers.keys, shape.head_dim_qk, tile.num_keys,
                                   prefetcher, scratch.logits);
    } else {
      panel_logits<Lanes8, 16, 1>(query, buffers.keys, shape.head_dim_qk, tile.num_keys, prefetcher,
                                  scratch.logits);
    }
    kernel.softmax(shape, head, width, tile.num_keys, first, scratch, state);
    head += width;
  }
  pair_weights(scratch.weights, shape.num_heads, tile.num_keys, state.sum, buffers);
  add_values(shape, buffers, tile.num_keys, first, scratch.alpha, prefetcher, state.out);
  prefetcher.finish();
}

}  // namespace

SparseMlaKernel sparse_mla_cpu_avx512bf16_kernel() {
  SparseMlaKernel kernel = sparse_mla_cpu_kernel();
  kernel.query_bytes = query_bytes;
  kernel.tile_bytes = tile_bytes;
  kernel.load_query = load_query;
  kernel.attend_tile = attend_tile;
  return kernel;
}

Refusal sparse_mla_cpu_avx512bf16_available() {
  if (current_cpu_isa() >= CpuIsa::kAvx512Bf16) return {};
  return "needs AVX512-BF16, and this machine offers " + std::string(to_string(current_cpu_isa()));
}

size_t sparse_mla_cpu_avx512bf16_workspace(const SparseMlaProblem& problem, const Device& device) {
  return sparse_mla_workspace(sparse_mla_cpu_avx512bf16_kernel(), problem, device);
}

void sparse_mla_cpu_avx512bf16(const SparseMlaProblem& problem, const Device& device,
                               const SparseMlaTensors& tensors, Workspace workspace) {
  run_sparse_mla(sparse_mla_cpu_avx512bf16_kernel(), problem, device, tensors, workspace);
}

}  // namespace fovea::internal

#else  // not x86-64

namespace fovea::internal {

Refusal sparse_mla_cpu_avx512bf16_available() { return "needs an x86-64 CPU with AVX512-BF16"; }
SparseMlaKernel sparse_mla_cpu_avx512bf16_kernel() { return {}; }
size_t sparse_mla_cpu_avx512bf16_workspace(const SparseMlaProblem&, const Device&) { return 0; }
void sparse_mla_cpu_avx512bf16(const SparseMlaProblem&, const Device&, const SparseMlaTensors&,
                               Workspace) {
  unsupported("sparse_mla", sparse_mla_cpu_avx512bf16_available());
}

}  // namespace fovea::internal

#endif
