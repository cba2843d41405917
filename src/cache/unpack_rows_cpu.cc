#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cache/unpack_rows_cpu.cc"
#include "src/core/simd.h"
// The tile functions need the helpers of simd.h.
#include <algorithm>
#include <cstring>

#include "src/cache/unpack_rows_impl.h"
#include "src/core/access.h"
#include "src/core/fp8_tile_simd.h"
#include "src/core/parallel.h"
#include "src/core/row_layout.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

void unpack_v32(const uint8_t* record, bf16_t* out) {
  float scales[kV32NumTiles];
  std::memcpy(scales, record + kV32ScaleOffset, sizeof(scales));
  for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
    dequantize_tile_simd(record + tile * kV32TileDim, kV32TileDim, scales[tile],
                         out + tile * kV32TileDim);
  }
  std::memcpy(out + kV32LatentDim, record + kV32RopeOffset, sizeof(bf16_t) * kV32RopeDim);
}

void unpack_i132(const uint8_t* codes, const uint8_t* scale_from, int64_t width, bf16_t* out) {
  float scale;
  std::memcpy(&scale, scale_from, sizeof(scale));
  dequantize_tile_simd(codes, width, scale, out);
}

void unpack_rows(const RowCodecProblem& problem, const Device& device,
                 const UnpackRowsTensors& tensors) {
  const auto pool = paged_rows<const uint8_t>(tensors.pool, problem.page_size);
  const auto slots = access<const int32_t, 1>(tensors.slots);
  const auto out = access<bf16_t, 2>(tensors.out);
  const int64_t width = problem.width;
  const auto unpack_one = [&](int64_t slot, bf16_t* row) {
    switch (problem.row_format) {
      case RowFormat::kBf16:
        std::memcpy(row, pool.record(slot, 2 * width), static_cast<size_t>(2 * width));
        break;
      case RowFormat::kV32:
        unpack_v32(pool.record(slot, kV32RowBytes), row);
        break;
      case RowFormat::kI132:
        unpack_i132(pool.i132_codes(slot, width), pool.i132_scale(slot, width), width, row);
        break;
    }
  };
  const ThreadScope threads(device.num_threads);
  // 32 rows take some microseconds: enough to pay for a task, few enough to balance.
  ParallelFor(slots.shape[0], 32, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (pool.contains(slots(i))) {
        unpack_one(slots(i), out.row(i));
      } else {
        std::fill_n(out.row(i), width, bf16_t{0});
      }
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(unpack_rows);

void unpack_rows_cpu(const RowCodecProblem& problem, const Device& device,
                     const UnpackRowsTensors& tensors, Workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(unpack_rows)(problem, device, tensors);
}

}  // namespace fovea::internal
#endif
