#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cache/pack_rows_cpu.cc"
#include "src/core/simd.h"
// The tile functions need the helpers of simd.h.
#include <cstring>

#include "src/cache/pack_rows_impl.h"
#include "src/core/access.h"
#include "src/core/fp8_tile_simd.h"
#include "src/core/parallel.h"
#include "src/core/row_layout.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

void pack_v32(const bf16_t* x, ScaleMode mode, uint8_t* record) {
  float scales[kV32NumTiles];
  for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
    scales[tile] = quantize_tile_simd(x + tile * kV32TileDim, kV32TileDim, latent_tile_scale, mode,
                                      record + tile * kV32TileDim);
  }
  std::memcpy(record + kV32ScaleOffset, scales, sizeof(scales));
  std::memcpy(record + kV32RopeOffset, x + kV32LatentDim, sizeof(bf16_t) * kV32RopeDim);
}

void pack_i132(const bf16_t* x, int64_t width, ScaleMode mode, uint8_t* codes, uint8_t* scale_to) {
  const float scale = quantize_tile_simd(x, width, index_tile_scale, mode, codes);
  std::memcpy(scale_to, &scale, sizeof(scale));
}

void pack_rows(const RowCodecProblem& problem, const Device& device,
               const PackRowsTensors& tensors) {
  const auto src = access<const bf16_t, 2>(tensors.src);
  const auto slots = access<const int32_t, 1>(tensors.slots);
  const auto pool = paged_rows<uint8_t>(tensors.pool, problem.page_size);
  const int64_t width = problem.width;
  const auto pack_one = [&](const bf16_t* x, int64_t slot) {
    switch (problem.row_format) {
      case RowFormat::kBf16:
        std::memcpy(pool.record(slot, 2 * width), x, static_cast<size_t>(2 * width));
        break;
      case RowFormat::kV32:
        pack_v32(x, problem.scale_mode, pool.record(slot, kV32RowBytes));
        break;
      case RowFormat::kI132:
        pack_i132(x, width, problem.scale_mode, pool.i132_codes(slot, width),
                  pool.i132_scale(slot, width));
        break;
    }
  };
  const ThreadScope threads(device.num_threads);
  // 32 rows take some microseconds: enough to pay for a task, few enough to balance.
  ParallelFor(slots.shape[0], 32, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (pool.contains(slots(i))) pack_one(src.row(i), slots(i));
    }
  });
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(pack_rows);

void pack_rows_cpu(const RowCodecProblem& problem, const Device& device,
                   const PackRowsTensors& tensors, Workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(pack_rows)(problem, device, tensors);
}

}  // namespace fovea::internal
#endif
