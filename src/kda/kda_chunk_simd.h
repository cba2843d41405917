// One chunk of KDA on the CPU: the direct form of docs/kda.md. Included after src/core/simd.h
// by *_cpu.cc files, once per instruction set.
//
// All products are taken transposed, state rows (value channels) by chunk rows, so that a group of
// state rows goes through the whole chunk while it is in the L1 cache:
//
//   [S Kd^T | S Qd^T]  = S . [Kd^T | Qd^T]          [rows, K] . [K, 2C]
//   U^T = (V^T - S Kd^T) . (X diag(beta))^T         [rows, C] . [C, C]
//   O^T = S Qd^T + U^T . P^T                        [rows, C] . [C, C]
//   S   = S diag(D) + U^T . Kr                      [rows, C] . [C, K]
//
// Rows of S do not meet: any cut of V gives the same bits. Chunk rows are lanes: no row's bits
// depend on the rows behind it, nor on how many rows there are.
//
// No exponential of a sum is taken but D. Decays between two rows are products of the factors
// exp(g) of the rows between them: each is at most 1, so nothing overflows for any gate, and the
// relative error is one rounding per row.

#if defined(FOVEA_KDA_KDA_CHUNK_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_KDA_KDA_CHUNK_SIMD_H_
#undef FOVEA_KDA_KDA_CHUNK_SIMD_H_
#else
#define FOVEA_KDA_KDA_CHUNK_SIMD_H_
#endif

#include "src/kda/kda_chunk_scratch.h"
#include "src/kda/kda_row_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

// Register tiles (accumulators): state rows x vectors. 16 registers: 6 x 2; 32 registers: 12 x 2.
inline constexpr int kTileRows = HWY_TARGET == HWY_AVX3 ? 12 : 6;
inline constexpr int kTileVectors = 2;
/// Rows of a chunk between which decays are multiplied out row by row.
inline constexpr int64_t kKdaBlock = 16;

/// sum[r][v] += sum over x of a[r][x] * b[x][v], x in order.
template <int kRows, int kVectors>
HWY_INLINE void multiply_add(const float* HWY_RESTRICT a, int64_t a_stride,
                             const float* HWY_RESTRICT b, int64_t b_stride, int64_t count,
                             hn::Vec<Rows> (&sum)[kRows][kVectors]) {
  const Rows d;
  using V = hn::Vec<Rows>;
  for (int64_t x = 0; x < count; ++x) {
    V right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = hn::Load(d, b + x * b_stride + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const V left = hn::Set(d, a[r * a_stride + x]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(left, right[v], sum[r][v]);
    }
  }
}

/// to[j][i] = from[i][j] for 8 x 8 elements.
HWY_INLINE void transpose_8x8(const float* from, int64_t from_stride, float* to,
                              int64_t to_stride) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  const hn::CappedTag<float, 8> d8;
  using V8 = hn::Vec<decltype(d8)>;
  const hn::Repartition<double, decltype(d8)> d64;
  V8 in[8], pair[8], four[8];
  for (int i = 0; i < 8; ++i) in[i] = hn::LoadU(d8, from + i * from_stride);
  for (int i = 0; i < 4; ++i) {
    pair[2 * i] = hn::InterleaveLower(d8, in[2 * i], in[2 * i + 1]);
    pair[2 * i + 1] = hn::InterleaveUpper(d8, in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    for (int half = 0; half < 2; ++half) {
      const auto x = hn::BitCast(d64, pair[4 * i + half]);
      const auto y = hn::BitCast(d64, pair[4 * i + 2 + half]);
      four[4 * i + 2 * half] = hn::BitCast(d8, hn::InterleaveLower(d64, x, y));
      four[4 * i + 2 * half + 1] = hn::BitCast(d8, hn::InterleaveUpper(d64, x, y));
    }
  }
  for (int j = 0; j < 4; ++j) {
    hn::StoreU(hn::ConcatLowerLower(d8, four[4 + j], four[j]), d8, to + j * to_stride);
    hn::StoreU(hn::ConcatUpperUpper(d8, four[4 + j], four[j]), d8, to + (j + 4) * to_stride);
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
#endif
}

/// What a chunk of one head consists of. Row i of the arrays of kda scratch is row first + i.
template <int kC>
struct KdaChunk {
  const KdaChunkScratch& s;
  int64_t num_rows;  ///< 1..kC; rows of key, query, beta and values behind it are zero

  /// Multiplies rows [begin, end) of kr by `factor`.
  void decay_keys(int64_t begin, int64_t end, const float* factor) const {
    const Rows d;
    for (int64_t j = begin; j < end; ++j) {
      float* row = s.kr + j * s.stride_k;
      for (int64_t c = 0; c < s.padded_k; c += kLanes)
        hn::Store(hn::Mul(hn::Load(d, row + c), hn::Load(d, factor + c)), d, row + c);
    }
  }

  /// Entries (i, j .. j + kColumns - 1) of A (without beta) and P from kr, which with kDecay is
  /// first decayed by row i.
  template <int kColumns, bool kDecay>
  HWY_INLINE void pairs(int64_t i, int64_t j, const float* HWY_RESTRICT key,
                        const float* HWY_RESTRICT query) const {
    const Rows d;
    using V = hn::Vec<Rows>;
    const int64_t stride = s.stride_k;
    float* HWY_RESTRICT column = s.kr + j * stride;
    const float* HWY_RESTRICT decay = s.decay + i * stride;
    V sum[8];
    for (int n = 0; n < 8; ++n) sum[n] = hn::Zero(d);
    for (int64_t c = 0; c < s.padded_k; c += kLanes) {
      const V k = hn::Load(d, key + c), q = hn::Load(d, query + c);
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) {
        V x = hn::Load(d, column + n * stride + c);
        if constexpr (kDecay) {
          x = hn::Mul(x, hn::Load(d, decay + c));
          hn::Store(x, d, column + n * stride + c);
        }
        sum[n] = hn::MulAdd(x, k, sum[n]);
        sum[4 + n] = hn::MulAdd(x, q, sum[4 + n]);
      }
    }
    HWY_ALIGN float sums[8];
    sums_of_8(sum, sums);
    for (int n = 0; n < kColumns; ++n) {
      s.a[i * kC + j + n] = sums[n];
      s.p_t[(j + n) * kC + i] = sums[4 + n];
    }
  }

  /// Columns [begin, end) of row i.
  template <bool kDecay>
  HWY_INLINE void row_pairs(int64_t i, int64_t begin, int64_t end, const float* key,
                            const float* query) const {
    int64_t j = begin;
    for (; j + 4 <= end; j += 4) pairs<4, kDecay>(i, j, key, query);
    if (end - j == 3) pairs<3, kDecay>(i, j, key, query);
    if (end - j == 2) pairs<2, kDecay>(i, j, key, query);
    if (end - j == 1) pairs<1, kDecay>(i, j, key, query);
  }

  /// P_ii = q_i k_i, for 8 rows at a time.
  void diagonal() const {
    const Rows d;
    for (int64_t i0 = 0; i0 < num_rows; i0 += 8) {
      hn::Vec<Rows> sum[8];
      for (int n = 0; n < 8; ++n) sum[n] = hn::Zero(d);
      const float* key = s.key + i0 * s.stride_k;
      const float* query = s.query + i0 * s.stride_k;
      for (int64_t c = 0; c < s.padded_k; c += kLanes) {
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
          sum[n] = hn::MulAdd(hn::Load(d, key + n * s.stride_k + c),
                              hn::Load(d, query + n * s.stride_k + c), sum[n]);
        }
      }
      HWY_ALIGN float sums[8];
      sums_of_8(sum, sums);
      for (int64_t n = 0; n < 8; ++n) s.p_t[(i0 + n) * kC + i0 + n] = sums[n];
    }
  }

  /// row_key and row_query of the block that starts at row b0.
  void block_rows(int64_t b0, int64_t b1) const {
    const Rows d;
    for (int64_t c = 0; c < s.padded_k; c += kLanes) {
      auto e = hn::Set(d, 1.0f);
      for (int64_t i = b0; i < b1; ++i) {
        const int64_t at = i * s.stride_k + c;
        if (i > b0) e = hn::Mul(e, hn::Load(d, s.decay + at));
        const int64_t to = (i - b0) * s.stride_k + c;
        hn::Store(hn::Mul(e, hn::Load(d, s.key + at)), d, s.row_key + to);
        hn::Store(hn::Mul(e, hn::Load(d, s.query + at)), d, s.row_query + to);
      }
    }
  }

  /// factor = product of the decays of rows [begin, end).
  void decay_product(int64_t begin, int64_t end, float* factor) const {
    const Rows d;
    for (int64_t c = 0; c < s.padded_k; c += kLanes) {
      auto e = hn::Set(d, 1.0f);
      for (int64_t i = begin; i < end; ++i)
        e = hn::Mul(e, hn::Load(d, s.decay + i * s.stride_k + c));
      hn::Store(e, d, factor + c);
    }
  }

  /// a, p_t and kr.
  void grams() const {
    std::fill_n(s.p_t, kC * kC, 0.0f);
    std::copy_n(s.key, num_rows * s.stride_k, s.kr);
    std::fill_n(s.kr + num_rows * s.stride_k, (kC - num_rows) * s.stride_k, 0.0f);
    for (int64_t b0 = 0; b0 < num_rows; b0 += kKdaBlock) {
      const int64_t b1 = std::min(num_rows, b0 + kKdaBlock);
      if (b0 > 0) {
        // The columns of earlier blocks were last decayed up to the row before this block. Decayed
        // by its first row as well, they meet rows that are decayed from there on.
        decay_keys(0, b0, s.decay + b0 * s.stride_k);
        block_rows(b0, b1);
        for (int64_t i = b0; i < b1; ++i) {
          const int64_t at = (i - b0) * s.stride_k;
          row_pairs<false>(i, 0, b0, s.row_key + at, s.row_query + at);
        }
        if (b1 > b0 + 1) {
          decay_product(b0 + 1, b1, s.row_key);
          decay_keys(0, b0, s.row_key);
        }
      }
      for (int64_t i = b0 + 1; i < b1; ++i)
        row_pairs<true>(i, b0, i, s.key + i * s.stride_k, s.query + i * s.stride_k);
    }
    diagonal();
  }

  /// Kd^T and Qd^T, by 8 rows and 8 channels.
  void turn_keys_and_queries() const {
    const Rows d;
    HWY_ALIGN float block[2][8][kLanes < 8 ? 8 : kLanes];
    constexpr int64_t kStep = kLanes < 8 ? 8 : kLanes;
    for (int64_t c0 = 0; c0 < s.padded_k; c0 += kStep) {
      HWY_ALIGN float running[kStep];
      for (int64_t c = 0; c < kStep; c += kLanes) hn::Store(hn::Set(d, 1.0f), d, running + c);
      for (int64_t i0 = 0; i0 < kC; i0 += 8) {
        for (int64_t c = 0; c < kStep; c += kLanes) {
          auto e = hn::Load(d, running + c);
          for (int64_t r = 0; r < 8; ++r) {
            const int64_t at = (i0 + r) * s.stride_k + c0 + c;
            e = hn::Mul(e, hn::Load(d, s.decay + at));
            hn::Store(hn::Mul(e, hn::Load(d, s.key + at)), d, &block[0][r][c]);
            hn::Store(hn::Mul(e, hn::Load(d, s.query + at)), d, &block[1][r][c]);
          }
          hn::Store(e, d, running + c);
        }
        for (int half = 0; half < 2; ++half) {
          for (int64_t c = 0; c < kStep; c += 8) {
            transpose_8x8(&block[half][0][c], kStep,
                          s.key_query + (c0 + c) * 2 * kC + half * kC + i0, 2 * kC);
          }
        }
      }
    }
  }

  /// x_t = ((I + diag(beta) A)^-1 diag(beta))^T by forward substitution, row after row.
  void invert() const {
    const Rows d;
    std::fill_n(s.x, kC * kC, 0.0f);
    std::fill_n(s.x_t, kC * kC, 0.0f);
    for (int64_t i = 0; i < num_rows; ++i) {
      float* row = s.x + i * kC;
      const float minus_beta = -s.beta[i];
      // x[j][m] is zero for m > j: only vectors that start at or before j.
      for (int64_t m = 0; m < i; m += kLanes) {
        auto sum = hn::Zero(d);
        for (int64_t j = m; j < i; ++j)
          sum = hn::MulAdd(hn::Set(d, s.a[i * kC + j]), hn::Load(d, s.x + j * kC + m), sum);
        hn::Store(hn::Mul(hn::Set(d, minus_beta), sum), d, row + m);
      }
      row[i] = 1.0f;
      for (int64_t j = 0; j <= i; ++j) s.x_t[j * kC + i] = row[j] * s.beta[j];
    }
  }

  /// Everything that the products of any state row need.
  void prepare() const {
    grams();
    turn_keys_and_queries();
    invert();
  }

  /// to = start + left . right for one row, where right[j][i] with i < j is not used.
  HWY_NOINLINE static void triangle_careful(const float* left, const float* right,
                                            const float* start, float* to) {
    const Rows d;
    for (int64_t i = 0; i < kC; i += kLanes) {
      const auto index = hn::Iota(d, static_cast<float>(i));
      auto sum = start != nullptr ? hn::Load(d, start + i) : hn::Zero(d);
      for (int64_t j = 0; j < i + kLanes; ++j) {
        const auto next = hn::MulAdd(hn::Set(d, left[j]), hn::Load(d, right + j * kC + i), sum);
        sum = hn::IfThenElse(hn::Ge(index, hn::Set(d, static_cast<float>(j))), next, sum);
      }
      hn::Store(sum, d, to + i);
    }
  }

  /// to[r] = start[r] + left[r] . right for kRows rows, `right` as above; start counts
  /// with kStart.
  template <int kRows, bool kStart>
  HWY_INLINE static void triangle(const float* left, int64_t left_stride, const float* right,
                                  const float* start, int64_t start_stride, float* to) {
    constexpr int kVectors = std::min<int>(kTileVectors, kC / kLanes);
    constexpr int64_t kStep = kVectors * kLanes;
    const Rows d;
    auto difference = hn::Zero(d);
    for (int64_t i = 0; i < kC; i += kStep) {
      hn::Vec<Rows> sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (kStart)
            sum[r][v] = hn::Load(d, start + r * start_stride + i + v * kLanes);
          else
            sum[r][v] = hn::Zero(d);
        }
      }
      multiply_add<kRows, kVectors>(left, left_stride, right + i, kC, i + kStep, sum);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          difference = hn::Add(difference, hn::Sub(sum[r][v], sum[r][v]));
          hn::Store(sum[r][v], d, to + r * kC + i + v * kLanes);
        }
      }
    }
    // The zeros of `right` times an infinity or NaN of a later row: once more, without them.
    if (HWY_LIKELY(hn::AllTrue(d, hn::Eq(difference, hn::Zero(d))))) return;
    for (int r = 0; r < kRows; ++r) {
      triangle_careful(left + r * left_stride, right, kStart ? start + r * start_stride : nullptr,
                       to + r * kC);
    }
  }

  /// The chunk for state rows v .. v + kRows - 1.
  template <int kRows>
  HWY_NOINLINE void advance_rows(int64_t v0) const {
    const Rows d;
    constexpr int kVectors = kTileVectors;
    constexpr int64_t kStep = kVectors * kLanes;
    float* const state = s.state + v0 * s.stride_k;
    for (int64_t i = 0; i < 2 * kC; i += kStep) {
      hn::Vec<Rows> sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
      }
      multiply_add<kRows, kVectors>(state, s.stride_k, s.key_query + i, 2 * kC, s.padded_k, sum);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          hn::Store(sum[r][v], d, s.both + r * 2 * kC + i + v * kLanes);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* residual = s.both + r * 2 * kC;
      const float* value = s.value_t + (v0 + r) * kC;
      for (int64_t i = 0; i < kC; i += kLanes)
        hn::Store(hn::Sub(hn::Load(d, value + i), hn::Load(d, residual + i)), d, residual + i);
    }
    triangle<kRows, false>(s.both, 2 * kC, s.x_t, nullptr, 0, s.u);
    triangle<kRows, true>(s.u, kC, s.p_t, s.both + kC, 2 * kC, s.out_t + v0 * kC);
    for (int64_t c = 0; c < s.padded_k; c += kStep) {
      hn::Vec<Rows> sum[kRows][kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto keep = hn::Load(d, s.chunk_decay + c + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
          sum[r][v] = hn::Mul(keep, hn::Load(d, state + r * s.stride_k + c + v * kLanes));
      }
      multiply_add<kRows, kVectors>(s.u, kC, s.kr + c, s.stride_k, kC, sum);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          hn::Store(sum[r][v], d, state + r * s.stride_k + c + v * kLanes);
      }
    }
  }

  /// The chunk for state rows [0, count).
  ///
  /// Calls between(i), i = 0, 1, 2, .., before each group of them: loads of what comes next are
  /// best spread over the products.
  template <class Between>
  void advance(int64_t count, Between&& between) const {
    int64_t v = 0;
    for (int64_t group = 0; v < count; ++group) {
      between(group);
      const int64_t left = count - v;
      // Four rows still fill the pipes (8 chains of additions), two do not: a rest of one third
      // more than a tile goes in two smaller ones.
      if (left >= kTileRows && left != kTileRows + kTileRows / 3) {
        advance_rows<kTileRows>(v);
        v += kTileRows;
      } else if (left >= kTileRows * 2 / 3) {
        advance_rows<kTileRows * 2 / 3>(v);
        v += kTileRows * 2 / 3;
      } else if (left >= 2) {
        advance_rows<2>(v);
        v += 2;
      } else {
        advance_rows<1>(v);
        v += 1;
      }
    }
  }
};

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
