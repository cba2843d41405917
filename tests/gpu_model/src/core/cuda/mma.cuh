#pragma once

#include "fovea/dtype.h"
#include "fovea/numeric.h"
#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/mma.cuh. Products are added in the order of the columns of A, in fp32.
namespace fovea::internal::cuda {

struct MmaA {
  uint32_t x[4];
};
struct MmaB {
  uint32_t x[2];
};
struct MmaC {
  float x[4];
};

inline float bf16_of(uint32_t pair, int i) {
  return bf16_to_float(bf16_t{static_cast<uint16_t>(pair >> (16 * i))});
}

inline void mma(MmaC& c, const MmaA& a, const MmaB& b) {
  struct Operands {
    MmaA a;
    MmaB b;
  };
  const test::gpu::Exchange<Operands> shown({a, b});
  const unsigned lane = threadIdx.x % 32;
  // Column k of A and row k of B: pair k / 8 of the lanes' registers, lane k % 8 / 2 of four.
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2;  // rows lane / 4 and + 8
    const unsigned column = 2 * (lane % 4) + static_cast<unsigned>(i % 2);
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned of_four = k % 8 / 2;
      const uint32_t left =
          shown.from(lane / 4 * 4 + of_four).a.x[row_half + 2 * static_cast<int>(k / 8)];
      const uint32_t right = shown.from(column * 4 + of_four).b.x[k / 8];
      c.x[i] += bf16_of(left, static_cast<int>(k % 2)) * bf16_of(right, static_cast<int>(k % 2));
    }
  }
}

inline uint32_t pair_of(bf16_t low, bf16_t high) {
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}
inline uint32_t pair_at(const bf16_t* from) { return pair_of(from[0], from[1]); }

inline uint32_t turned(uint32_t pair) {
  const test::gpu::Exchange<uint32_t> shown(pair);
  const unsigned row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  const auto at = [&](unsigned r) {
    return shown.from(r * 4 + row / 2) >> (16 * (row % 2)) & 0xFFFF;
  };
  return at(column) | at(column + 1) << 16;
}

inline MmaA load_a(const bf16_t* tile, int stride) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  test::gpu::need_alignment(tile + lane % 16 * stride + lane / 16 * 8, 16);
  const bf16_t* const low = tile + lane / 4 * stride + 2 * (lane % 4);
  const bf16_t* const high = low + 8 * stride;
  return {{pair_at(low), pair_at(high), pair_at(low + 8), pair_at(high + 8)}};
}

inline void load_b_transposed_deep(const bf16_t* tile, int stride, MmaB& first, MmaB& second) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  test::gpu::need_alignment(tile + lane % 8 * stride + lane / 8 * 8, 16);
  const bf16_t* const from = tile + lane / 4 * stride + 2 * (lane % 4);
  first = {{pair_at(from), pair_at(from + 8)}};
  second = {{pair_at(from + 16), pair_at(from + 24)}};
}

// Lane l holds rows 2 (l % 4), + 1 and + 8, + 9, column l / 4, of both products.
inline void load_b_units(const void* unit, MmaB& low, MmaB& high) {
  test::gpu::need_alignment(unit, 16);
  const test::gpu::Exchange<const void*> shown(unit);
  const unsigned lane = threadIdx.x % 32;
  const auto pair = [&](unsigned row, unsigned first_lane) {
    const auto at = [&](unsigned r) {
      return static_cast<const bf16_t*>(shown.from(first_lane + r))[lane / 4];
    };
    return pair_of(at(row), at(row + 1));
  };
  const unsigned row = 2 * (lane % 4);
  low = {{pair(row, 0), pair(row + 8, 0)}};
  high = {{pair(row, 16), pair(row + 8, 16)}};
}

inline void load_b(const bf16_t* tile, int stride, MmaB& low, MmaB& high) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  test::gpu::need_alignment(tile + lane % 16 * stride + lane / 16 * 8, 16);
  const auto pair = [&](int row, int column) {
    const bf16_t* const from = tile + row * stride + column;
    return pair_of(from[0], from[stride]);
  };
  const int row = 2 * (lane % 4), column = lane / 4;
  low = {{pair(row, column), pair(row + 8, column)}};
  high = {{pair(row, column + 8), pair(row + 8, column + 8)}};
}

}  // namespace fovea::internal::cuda
