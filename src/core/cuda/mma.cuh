#pragma once

#include <cstdint>

#include "fovea/dtype.h"

/// Tensor cores as every GPU from compute capability 8.0 has them: one warp multiplies a 16 x 16
/// piece of A with a 16 x 8 piece of B, bf16 in, fp32 sums.
namespace fovea::internal::cuda {

/// A of one step: rows (lane / 4) and + 8, columns 2 * (lane % 4) .. + 1 and + 8.
struct MmaA {
  uint32_t x[4];
};
/// B of one step: column lane / 4, rows 2 * (lane % 4) .. + 1 and + 8.
struct MmaB {
  uint32_t x[2];
};
/// Sums: rows lane / 4 (x[0], x[1]) and + 8 (x[2], x[3]), columns 2 * (lane % 4) .. + 1.
struct MmaC {
  float x[4];
};

__device__ inline void mma(MmaC& c, const MmaA& a, const MmaB& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}

/// A matrix of 8 x 8 bf16 turned over: of row lane / 4, columns 2 * (lane % 4) and the next.
__device__ inline uint32_t turned(uint32_t pair) {
  uint32_t columns;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(pair));
  return columns;
}

__device__ inline uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

// ldmatrix: lane l names row l % 8 of matrix l / 8; each row is 16 bytes, aligned to 16. Rows whose
// distance is an odd multiple of 16 bytes are read without bank conflicts.

/// A at `tile` [16][16], row-major with `stride` elements.
__device__ inline MmaA load_a(const bf16_t* tile, int stride) {
  const int lane = threadIdx.x % 32;
  const bf16_t* const row = tile + (lane % 16) * stride + lane / 16 * 8;
  MmaA a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3])
               : "r"(shared_address(row))
               : "memory");
  return a;
}

/// Two B's, columns 0..7 and 8..15, from their transpose at `tile` [16 columns][16 rows]: the
/// product with a row-major matrix of keys.
__device__ inline void load_b_transposed(const bf16_t* tile, int stride, MmaB& low, MmaB& high) {
  const int lane = threadIdx.x % 32;
  const bf16_t* const row = tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(low.x[0]), "=r"(low.x[1]), "=r"(high.x[0]), "=r"(high.x[1])
               : "r"(shared_address(row))
               : "memory");
}

/// The two B's of rows 0..15 and 16..31 of one group of 8 columns, from `tile` [8 columns][32
/// rows].
__device__ inline void load_b_transposed_deep(const bf16_t* tile, int stride, MmaB& first,
                                              MmaB& second) {
  const int lane = threadIdx.x % 32;
  const bf16_t* const row = tile + (lane % 8) * stride + lane / 8 * 8;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(first.x[0]), "=r"(first.x[1]), "=r"(second.x[0]), "=r"(second.x[1])
               : "r"(shared_address(row))
               : "memory");
}

/// load_b() from rows that the lanes name: lane l gives 16 bytes, 8 columns, of row l % 16, columns
/// 0..7 the lanes below 16, 8..15 the others.
__device__ inline void load_b_units(const void* unit, MmaB& low, MmaB& high) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(low.x[0]), "=r"(low.x[1]), "=r"(high.x[0]), "=r"(high.x[1])
               : "r"(shared_address(unit))
               : "memory");
}

/// Two B's, columns 0..7 and 8..15, from `tile` [16 rows][16 columns] as it stands: the product
/// with a row-major matrix of values.
__device__ inline void load_b(const bf16_t* tile, int stride, MmaB& low, MmaB& high) {
  const int lane = threadIdx.x % 32;
  load_b_units(tile + (lane % 16) * stride + lane / 16 * 8, low, high);
}

}  // namespace fovea::internal::cuda
