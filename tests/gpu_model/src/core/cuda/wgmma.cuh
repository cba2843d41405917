#pragma once

#include "src/core/cuda/mma.cuh"

// Model of src/core/cuda/wgmma.cuh. A product reads shared memory and writes its sums when the
// thread waits for it. Products are added in the order of the columns of A, in fp32.
namespace fovea::internal::cuda {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

constexpr int panel_offset(int row, int piece) {
  return row * kPanelRowBytes + ((piece ^ (row % 8)) << 4);
}

struct PanelMatrix {
  uintptr_t address;
  int panel_bytes;

  PanelMatrix advanced(int bytes) const {
    return {address + static_cast<uintptr_t>(bytes), panel_bytes};
  }
  // Bits 4..6 of an address are turned over by bits 7..9.
  float at(int row, int column) const {
    const uintptr_t from = address + static_cast<uintptr_t>(row * kPanelRowBytes + column % 64 * 2 +
                                                            column / 64 * panel_bytes);
    return bf16_to_float(*reinterpret_cast<const bf16_t*>(from ^ (from >> 7 & 7) << 4));
  }
  float code(int row, int column) const {
    const uintptr_t from = address + static_cast<uintptr_t>(row * kPanelRowBytes + column);
    return e4m3_to_float(*reinterpret_cast<const uint8_t*>(from ^ (from >> 7 & 7) << 4));
  }
};

inline PanelMatrix panel_matrix(const void* shared, int panel_bytes) {
  test::gpu::need_alignment(shared, 1024);
  return {reinterpret_cast<uintptr_t>(shared), panel_bytes};
}

enum class PanelSide { kRows, kColumns };

template <int kN>
struct WgmmaSums {
  float x[kN / 2];
};
struct WgmmaA {
  uint32_t x[4];
};

inline void wgmma_fence() {}
inline void wgmma_commit() { test::gpu::close_work(); }
template <int kPending>
void wgmma_wait() {
  test::gpu::finish_work(kPending);
  test::gpu::wait_warp();  // products are those of whole warps
}
inline void shared_stores_before_wgmma() {}
template <int kN>
void wgmma_pin(WgmmaSums<kN>&) {}

// Rows lane / 4 and + 8 of the warp's 16 rows of A.
struct WgmmaRows {
  float x[2][16];
};

template <PanelSide kSide, int kN>
void multiply_rows(WgmmaSums<kN>& s, const WgmmaRows& a, PanelMatrix b, bool keep) {
  const int first = 2 * static_cast<int>(threadIdx.x % 4);
  for (int i = 0; i < kN / 2; ++i) {
    const int n = 8 * (i / 4) + first + i % 2;
    float sum = keep ? s.x[i] : 0;
    for (int k = 0; k < 16; ++k)
      sum += a.x[i / 2 % 2][k] * (kSide == PanelSide::kRows ? b.at(n, k) : b.at(k, n));
    s.x[i] = sum;
  }
}

template <PanelSide kSide, int kN, PanelSide kSideOfA = PanelSide::kRows>
void wgmma(WgmmaSums<kN>& s, PanelMatrix a, PanelMatrix b, int keep_sums) {
  test::gpu::start_work([&s, a, b, keep_sums] {
    WgmmaRows rows;
    const int row = static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 16; ++k) {
        const int m = row + 8 * half;
        rows.x[half][k] = kSideOfA == PanelSide::kRows ? a.at(m, k) : a.at(k, m);
      }
    }
    multiply_rows<kSide>(s, rows, b, keep_sums != 0);
  });
}

template <PanelSide kSide, int kN>
void wgmma(WgmmaSums<kN>& s, const WgmmaA& a, PanelMatrix b, int keep_sums) {
  const test::gpu::Exchange<WgmmaA> shown(a);
  WgmmaRows rows;
  for (unsigned k = 0; k < 16; ++k) {
    const WgmmaA from = shown.from(threadIdx.x % 32 / 4 * 4 + k % 8 / 2);
    for (unsigned half = 0; half < 2; ++half)
      rows.x[half][k] = bf16_of(from.x[half + 2 * (k / 8)], static_cast<int>(k % 2));
  }
  test::gpu::start_work(
      [&s, rows, b, keep_sums] { multiply_rows<kSide>(s, rows, b, keep_sums != 0); });
}

// Codes: 32 columns of A a step; products in the order of the columns, in fp32.
template <int kN>
void wgmma_e4m3(WgmmaSums<kN>& s, PanelMatrix a, PanelMatrix b, int keep_sums) {
  test::gpu::start_work([&s, a, b, keep_sums] {
    const int row = static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    const int first = 2 * static_cast<int>(threadIdx.x % 4);
    for (int i = 0; i < kN / 2; ++i) {
      const int n = 8 * (i / 4) + first + i % 2;
      float sum = keep_sums != 0 ? s.x[i] : 0;
      for (int k = 0; k < 32; ++k) sum += a.code(row + 8 * (i / 2 % 2), k) * b.code(n, k);
      s.x[i] = sum;
    }
  });
}

// What a lane shows to store matrices.
struct StoredMatrices {
  void* to;
  uint32_t pairs[4];
};

inline void store_columns(void* column, const uint32_t (&pairs)[4]) {
  test::gpu::need_alignment(column, 16);
  const test::gpu::Exchange<StoredMatrices> shown(
      {column, {pairs[0], pairs[1], pairs[2], pairs[3]}});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned e = 0; e < 2; ++e) {
      auto* const to = static_cast<uint16_t*>(shown.from(8 * i + 2 * (lane % 4) + e).to) + lane / 4;
      *to = static_cast<uint16_t>(pairs[i] >> (16 * e));
    }
  }
}

inline void store_rows(void* row, const uint32_t (&pairs)[4]) {
  test::gpu::need_alignment(row, 16);
  const test::gpu::Exchange<StoredMatrices> shown({row, {pairs[0], pairs[1], pairs[2], pairs[3]}});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i)
    std::memcpy(static_cast<uint32_t*>(shown.from(8 * i + lane / 4).to) + lane % 4, &pairs[i], 4);
}

}  // namespace fovea::internal::cuda
