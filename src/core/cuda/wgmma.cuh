#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "src/core/cuda/mma.cuh"

/// Tensor cores of compute capability 9.0 (code for sm_90a only): the four warps of a warpgroup
/// multiply A [64][16] with B [16][N], bf16 in, fp32 sums in registers (at the end of this file: a
/// form for e4m3). The products run behind the instructions that follow; see `wgmma_fence`.
///
/// **Shared memory.** Both operands read *panels*: matrices of 64 columns of bf16, a row 128 bytes,
/// rows one after the other, the base aligned to 1024 bytes, and the eight 16-byte pieces of row r
/// in the order given by `panel_offset` (exclusive or with r % 8). A matrix wider than 64 columns
/// is several panels, one `panel_bytes` after the other. One and the same tile of keys
/// [keys][channels] is B of both products of attention:
/// * *by rows* (logits, sum over channels): N are the rows, 16 columns are one step;
/// * *by columns* (values, sum over keys): N are the columns, 16 rows are one step.
/// The same two ways make it A, of 64 rows or columns.
///
/// Descriptors and layouts: PTX ISA, "Asynchronous warpgroup level matrix instructions".
namespace fovea::internal::cuda {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

/// Bytes from the start of a panel to 16-byte piece `piece` (8 columns, 0..7) of row `row`.
__host__ __device__ constexpr int panel_offset(int row, int piece) {
  return row * kPanelRowBytes + ((piece ^ (row % 8)) << 4);
}

/// A matrix descriptor. Steps are taken by `advanced`.
struct PanelMatrix {
  uint64_t bits;

  __device__ PanelMatrix advanced(int bytes) const {
    return {bits + static_cast<uint64_t>(bytes >> 4)};
  }
};

/// Panels at `shared` (aligned to 1024 bytes); `panel_bytes` from one to the next, which matters by
/// columns with N > 64 only. Next 16 columns of a panel: `advanced(32)`; next 16 rows:
/// `advanced(16 * kPanelRowBytes)`; another panel: `advanced(panel_bytes)`.
__device__ inline PanelMatrix panel_matrix(const void* shared, int panel_bytes) {
  const uint64_t address = shared_address(shared);
  constexpr uint64_t kEightRows = 8 * kPanelRowBytes;
  constexpr uint64_t kSwizzle128 = 1;
  return {((address & 0x3ffff) >> 4) | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
          (kEightRows >> 4) << 32 | kSwizzle128 << 62};
}

enum class PanelSide { kRows, kColumns };

/// What a thread holds of the sums [64][N]: x[4 * j + i] is row
/// 16 * (warp % 4) + lane / 4 + 8 * (i / 2), column 8 * j + 2 * (lane % 4) + i % 2.
template <int kN>
struct WgmmaSums {
  float x[kN / 2];
};

/// What a thread holds of A [64][16] when it comes from registers: four pairs of bf16, the first in
/// the lower half; pair i is row 16 * (warp % 4) + lane / 4 + 8 * (i % 2), columns
/// 2 * (lane % 4) + 8 * (i / 2) and the next. Sums of columns 16 k .. 16 k + 15 of an earlier
/// product, rounded, are such a piece: x[8 k], x[8 k + 1] are pair 0, and so on.
struct WgmmaA {
  uint32_t x[4];
};

/// Before the first product of a series, and whenever registers of sums or of A were touched since.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Closes a series of products.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` series are under way. Sums of the others may be used, and memory
/// and registers that they read may be written, behind it.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Ordinary stores to shared memory become visible to products of later `wgmma_*` calls (of all
/// threads behind a barrier).
__device__ inline void shared_stores_before_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Keeps the compiler from moving uses of `sums` across the point: call it behind `wgmma_wait`
/// where more than one series is under way.
template <int kN>
__device__ inline void wgmma_pin(WgmmaSums<kN>& sums) {
#pragma unroll
  for (float& x : sums.x) asm volatile("" : "+f"(x)::"memory");
}

/// Stores four 8 x 8 matrices of bf16 turned over: pair i of a lane is row lane / 4, columns
/// 2 * (lane % 4) and the next of matrix i; lane l names the 16 bytes that become column l % 8 of
/// matrix l / 8.
__device__ inline void store_columns(void* column, const uint32_t (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(column)),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

/// The same without turning them: lane l names the 16 bytes that become row l % 8 of matrix l / 8.
/// The pairs of a piece of A (WgmmaA) are such matrices: rows 0..7 and 8..15 of columns 0..7, then
/// of columns 8..15.
__device__ inline void store_rows(void* row, const uint32_t (&pairs)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
      : "memory");
}

// Registers %0 .. of the sums, as text and as operands.
#define FOVEA_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FOVEA_TEXT_16 FOVEA_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FOVEA_TEXT_32                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOVEA_TEXT_64                                                                \
  FOVEA_TEXT_32                                                                      \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOVEA_TEXT_128                                                                   \
  FOVEA_TEXT_64                                                                          \
  ", "                                                                                   \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "     \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
#define FOVEA_SUMS_8(b)                                                                 \
  "+f"(s.x[b]), "+f"(s.x[b + 1]), "+f"(s.x[b + 2]), "+f"(s.x[b + 3]), "+f"(s.x[b + 4]), \
      "+f"(s.x[b + 5]), "+f"(s.x[b + 6]), "+f"(s.x[b + 7])
#define FOVEA_SUMS_16(b) FOVEA_SUMS_8(b), FOVEA_SUMS_8(b + 8)
#define FOVEA_SUMS_32(b) \
  FOVEA_SUMS_8(b), FOVEA_SUMS_8(b + 8), FOVEA_SUMS_8(b + 16), FOVEA_SUMS_8(b + 24)
#define FOVEA_SUMS_64 FOVEA_SUMS_32(0), FOVEA_SUMS_32(32)
#define FOVEA_SUMS_128 FOVEA_SUMS_64, FOVEA_SUMS_32(64), FOVEA_SUMS_32(96)

// A from shared memory; operands behind the sums: A, B, whether the sums are kept, sides of A and
// B.
#define FOVEA_WGMMA_SHARED(n, text, a, b, keep, side_a, side_b, ...)                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" keep                                         \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" text "}, %" a ", %" b \
               ", p, 1, 1, %" side_a ", %" side_b ";\n}\n"                                       \
               : __VA_ARGS__                                                                     \
               : "l"(a_matrix.bits), "l"(b_matrix.bits), "r"(keep_sums),                         \
                 "n"(kSideOfA == PanelSide::kColumns ? 1 : 0),                                   \
                 "n"(kSide == PanelSide::kColumns ? 1 : 0))
// A from registers; operands behind the sums: the four of A, B, keep, side.
#define FOVEA_WGMMA_REGISTERS(n, text, a0, a1, a2, a3, b, keep, side, ...)                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" keep                                   \
               ", 0;\n"                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" text "}, {%" a0 \
               ", %" a1 ", %" a2 ", %" a3 "}, %" b ", p, 1, 1, %" side ";\n}\n"            \
               : __VA_ARGS__                                                               \
               : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "l"(b_matrix.bits),   \
                 "r"(keep_sums), "n"(kSide == PanelSide::kColumns ? 1 : 0))

/// s = (keep_sums ? s : 0) + A B for one step of 16, both taken from panels by their sides; N is
/// 16, 32, 64, 128 or 256. Asynchronous: `wgmma_fence` before, `wgmma_commit` and `wgmma_wait`
/// behind. All threads of the warpgroup pass the same arguments.
template <PanelSide kSide, int kN, PanelSide kSideOfA = PanelSide::kRows>
__device__ inline void wgmma(WgmmaSums<kN>& s, PanelMatrix a_matrix, PanelMatrix b_matrix,
                             int keep_sums) {
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 128 || kN == 256);
  if constexpr (kN == 16) {
    FOVEA_WGMMA_SHARED("16", FOVEA_TEXT_8, "8", "9", "10", "11", "12", FOVEA_SUMS_8(0));
  } else if constexpr (kN == 32) {
    FOVEA_WGMMA_SHARED("32", FOVEA_TEXT_16, "16", "17", "18", "19", "20", FOVEA_SUMS_16(0));
  } else if constexpr (kN == 64) {
    FOVEA_WGMMA_SHARED("64", FOVEA_TEXT_32, "32", "33", "34", "35", "36", FOVEA_SUMS_32(0));
  } else if constexpr (kN == 128) {
    FOVEA_WGMMA_SHARED("128", FOVEA_TEXT_64, "64", "65", "66", "67", "68", FOVEA_SUMS_64);
  } else {
    FOVEA_WGMMA_SHARED("256", FOVEA_TEXT_128, "128", "129", "130", "131", "132", FOVEA_SUMS_128);
  }
}

/// The same with A from registers, which no one may write until `wgmma_wait`.
template <PanelSide kSide, int kN>
__device__ inline void wgmma(WgmmaSums<kN>& s, const WgmmaA& a, PanelMatrix b_matrix,
                             int keep_sums) {
  static_assert(kN == 16 || kN == 64 || kN == 128 || kN == 256);
  if constexpr (kN == 16) {
    FOVEA_WGMMA_REGISTERS("16", FOVEA_TEXT_8, "8", "9", "10", "11", "12", "13", "14",
                          FOVEA_SUMS_8(0));
  } else if constexpr (kN == 64) {
    FOVEA_WGMMA_REGISTERS("64", FOVEA_TEXT_32, "32", "33", "34", "35", "36", "37", "38",
                          FOVEA_SUMS_32(0));
  } else if constexpr (kN == 128) {
    FOVEA_WGMMA_REGISTERS("128", FOVEA_TEXT_64, "64", "65", "66", "67", "68", "69", "70",
                          FOVEA_SUMS_64);
  } else {
    FOVEA_WGMMA_REGISTERS("256", FOVEA_TEXT_128, "128", "129", "130", "131", "132", "133", "134",
                          FOVEA_SUMS_128);
  }
}

// A from shared memory, B, keep.
#define FOVEA_WGMMA_E4M3(n, text, a, b, keep, ...)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" keep                                         \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" text "}, %" a ", %" b \
               ", p, 1, 1;\n}\n"                                                                 \
               : __VA_ARGS__                                                                     \
               : "l"(a_matrix.bits), "l"(b_matrix.bits), "r"(keep_sums))

/// The same for codes e4m3, by rows: panels of 128 columns of one byte, 32 columns (32 bytes) a
/// step; N is 64 or 128. Products are exact, but an addend of a step (a product, or the sum so far)
/// loses what lies below 2^-13 of the power of two of the largest.
template <int kN>
__device__ inline void wgmma_e4m3(WgmmaSums<kN>& s, PanelMatrix a_matrix, PanelMatrix b_matrix,
                                  int keep_sums) {
  static_assert(kN == 64 || kN == 128);
  if constexpr (kN == 64) {
    FOVEA_WGMMA_E4M3("64", FOVEA_TEXT_32, "32", "33", "34", FOVEA_SUMS_32(0));
  } else {
    FOVEA_WGMMA_E4M3("128", FOVEA_TEXT_64, "64", "65", "66", FOVEA_SUMS_64);
  }
}

#undef FOVEA_TEXT_8
#undef FOVEA_TEXT_16
#undef FOVEA_TEXT_32
#undef FOVEA_TEXT_64
#undef FOVEA_TEXT_128
#undef FOVEA_SUMS_8
#undef FOVEA_SUMS_16
#undef FOVEA_SUMS_32
#undef FOVEA_SUMS_64
#undef FOVEA_SUMS_128
#undef FOVEA_WGMMA_SHARED
#undef FOVEA_WGMMA_REGISTERS
#undef FOVEA_WGMMA_E4M3

}  // namespace fovea::internal::cuda
