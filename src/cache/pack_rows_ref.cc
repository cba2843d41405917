#include <algorithm>
#include <cstring>

#include "src/cache/pack_rows_impl.h"
#include "src/core/access.h"
#include "src/core/fp8_tile.h"
#include "src/core/row_layout.h"
#include "src/core/v4_row.h"

namespace fovea::internal {
namespace {

// The quotients are fp32, not double: the format defines its bytes by an fp32 division.
void pack_v32(const bf16_t* x, ScaleMode mode, uint8_t* record) {
  for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
    const float scale = quantize_tile(x + tile * kV32TileDim, kV32TileDim, latent_tile_scale, mode,
                                      record + tile * kV32TileDim);
    std::memcpy(record + kV32ScaleOffset + 4 * tile, &scale, sizeof(scale));
  }
  std::memcpy(record + kV32RopeOffset, x + kV32LatentDim, sizeof(bf16_t) * kV32RopeDim);
}

}  // namespace

void pack_rows_ref(const RowCodecProblem& problem, const Device&, const PackRowsTensors& tensors,
                   Workspace) {
  const auto src = access<const bf16_t, 2>(tensors.src);
  const auto slots = access<const int32_t, 1>(tensors.slots);
  const auto pool = paged_rows<uint8_t>(tensors.pool, problem.page_size);
  const auto rope = access<const bf16_t, 2>(tensors.rope);
  const auto scales = row_scales<uint8_t>(tensors.inv_scale);
  const int64_t width = problem.width;
  bf16_t joined[kV32Width];
  for (int64_t i = 0; i < slots.shape[0]; ++i) {
    const int32_t slot = slots(i);
    if (!pool.contains(slot)) continue;
    const bf16_t* x = src.row(i);
    if (rope) {
      std::copy_n(x, kV32LatentDim, joined);
      std::copy_n(rope.row(i), kV32RopeDim, joined + kV32LatentDim);
      x = joined;
    }
    switch (problem.row_format) {
      case RowFormat::kBf16:
        std::memcpy(pool.record(slot, 2 * width), x, static_cast<size_t>(2 * width));
        break;
      case RowFormat::kV32:
        pack_v32(x, problem.scale_mode, pool.record(slot, kV32RowBytes));
        break;
      case RowFormat::kI132: {
        const float scale = quantize_tile(x, width, index_tile_scale, problem.scale_mode,
                                          pool.i132_codes(slot, width));
        std::memcpy(pool.i132_scale(slot, width), &scale, sizeof(scale));
        break;
      }
      case RowFormat::kV4:
        pack_v4_row(x, pool.v4_data(slot), pool.v4_scales(slot));
        break;
      case RowFormat::kR512:
        scales.set(slot,
                   quantize_tile(x, kR512Width, scales.is_bf16 ? row_scale_bf16 : row_scale_fp32,
                                 problem.scale_mode, pool.record(slot, kR512Width)));
        break;
      case RowFormat::kF576:
        encode_tile(x, kF576Width, problem.k_scale, pool.record(slot, kF576Width));
        break;
    }
  }
}

}  // namespace fovea::internal
