#include <algorithm>
#include <cstring>

#include "src/cache/unpack_rows_impl.h"
#include "src/core/access.h"
#include "src/core/fp8_tile.h"
#include "src/core/row_layout.h"

namespace fovea::internal {
namespace {

float load_scale(const uint8_t* bytes) {
  float scale;
  std::memcpy(&scale, bytes, sizeof(scale));
  return scale;
}

void unpack_v32(const uint8_t* record, bf16_t* out) {
  for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
    dequantize_tile(record + tile * kV32TileDim, kV32TileDim,
                    load_scale(record + kV32ScaleOffset + 4 * tile), out + tile * kV32TileDim);
  }
  std::memcpy(out + kV32LatentDim, record + kV32RopeOffset, sizeof(bf16_t) * kV32RopeDim);
}

void unpack_v4(const uint8_t* data, const uint8_t* scales, bf16_t* out) {
  for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
    dequantize_tile(data + tile * kV4TileDim, kV4TileDim, ue8m0_to_float(scales[tile]),
                    out + tile * kV4TileDim);
  }
  std::memcpy(out + kV4LatentDim, data + kV4LatentDim, sizeof(bf16_t) * kV4RopeDim);
}

}  // namespace

void unpack_rows_ref(const RowCodecProblem& problem, const Device&,
                     const UnpackRowsTensors& tensors, Workspace) {
  const auto pool = paged_rows<const uint8_t>(tensors.pool, problem.page_size);
  const auto slots = access<const int32_t, 1>(tensors.slots);
  const auto out = access<bf16_t, 2>(tensors.out);
  const auto scales = row_scales<const uint8_t>(tensors.inv_scale);
  const int64_t width = problem.width;
  for (int64_t i = 0; i < slots.shape[0]; ++i) {
    const int32_t slot = slots(i);
    bf16_t* const row = out.row(i);
    if (!pool.contains(slot)) {
      std::fill_n(row, width, bf16_t{0});
      continue;
    }
    switch (problem.row_format) {
      case RowFormat::kBf16:
        std::memcpy(row, pool.record(slot, 2 * width), static_cast<size_t>(2 * width));
        break;
      case RowFormat::kV32:
        unpack_v32(pool.record(slot, kV32RowBytes), row);
        break;
      case RowFormat::kI132:
        dequantize_tile(pool.i132_codes(slot, width), width,
                        load_scale(pool.i132_scale(slot, width)), row);
        break;
      case RowFormat::kV4:
        unpack_v4(pool.v4_data(slot), pool.v4_scales(slot), row);
        break;
      case RowFormat::kR512:
        dequantize_tile(pool.record(slot, kR512Width), kR512Width, scales.get(slot), row);
        break;
      case RowFormat::kF576:
        dequantize_tile(pool.record(slot, kF576Width), kF576Width, problem.k_scale, row);
        break;
    }
  }
}

}  // namespace fovea::internal
