#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cache/unpack_rows_cpu.cc"
#include "src/core/simd.h"
// These need what simd.h includes.
#include <algorithm>
#include <cstring>

#include "src/cache/stream_row_cpu.h"
#include "src/cache/unpack_rows_impl.h"
#include "src/core/access.h"
#include "src/core/fp8_tile_simd.h"
#include "src/core/parallel.h"
#include "src/core/row_layout.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// What one call works on.
struct UnpackContext {
  PagedRows<const uint8_t> pool;
  Accessor<const int32_t, 1> slots;
  Accessor<bf16_t, 2> out;
  int64_t width;
  float k_scale;
  RowScales<const uint8_t> scales;  // r512
};

template <bool kStream>
HWY_INLINE void unpack_v32(const uint8_t* record, bf16_t* out) {
  float scales[kV32NumTiles];
  const uint8_t* codes[kV32NumTiles];
  bf16_t* to[kV32NumTiles];
  std::memcpy(scales, record + kV32ScaleOffset, sizeof(scales));
  for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
    codes[tile] = record + tile * kV32TileDim;
    to[tile] = out + tile * kV32TileDim;
  }
  dequantize_tiles_simd<kStream>(codes, kV32TileDim, scales, to);
  const uint8_t* const rope = record + kV32RopeOffset;
  auto* const rope_to = reinterpret_cast<uint8_t*>(out + kV32LatentDim);
  if constexpr (kStream) {
    stream_row(rope, rope_to, sizeof(bf16_t) * kV32RopeDim);
  } else {
    std::memcpy(rope_to, rope, sizeof(bf16_t) * kV32RopeDim);
  }
}

template <bool kStream>
HWY_INLINE void unpack_i132(const UnpackContext& context, int32_t slot, bf16_t* out) {
  float scales[1];
  std::memcpy(scales, context.pool.i132_scale(slot, context.width), sizeof(scales));
  const uint8_t* const codes[] = {context.pool.i132_codes(slot, context.width)};
  bf16_t* const to[] = {out};
  // The width of the models as a constant: the loops over it unroll.
  if (context.width == kI132Width) {
    dequantize_tiles_simd<kStream>(codes, kI132Width, scales, to);
  } else {
    dequantize_tiles_simd<kStream>(codes, context.width, scales, to);
  }
}

template <bool kStream>
HWY_INLINE void unpack_v4(const uint8_t* data, const uint8_t* scale_codes, bf16_t* out) {
  float scales[kV4NumTiles];
  const uint8_t* codes[kV4NumTiles];
  bf16_t* to[kV4NumTiles];
  for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
    scales[tile] = ue8m0_to_float(scale_codes[tile]);
    codes[tile] = data + tile * kV4TileDim;
    to[tile] = out + tile * kV4TileDim;
  }
  dequantize_tiles_simd<kStream>(codes, kV4TileDim, scales, to);
  const uint8_t* const rope = data + kV4LatentDim;
  auto* const rope_to = reinterpret_cast<uint8_t*>(out + kV4LatentDim);
  if constexpr (kStream) {
    stream_row(rope, rope_to, sizeof(bf16_t) * kV4RopeDim);
  } else {
    std::memcpy(rope_to, rope, sizeof(bf16_t) * kV4RopeDim);
  }
}

// A row of codes with one scale.
template <bool kStream, int64_t kWidth>
HWY_INLINE void unpack_codes(const uint8_t* record, float scale, bf16_t* out) {
  const uint8_t* const codes[] = {record};
  const float scales[] = {scale};
  bf16_t* const to[] = {out};
  dequantize_tiles_simd<kStream>(codes, kWidth, scales, to);
}

template <bool kStream>
HWY_INLINE void unpack_bf16(const UnpackContext& context, int32_t slot, bf16_t* out) {
  const int64_t bytes = 2 * context.width;
  const uint8_t* const from = context.pool.record(slot, bytes);
  if constexpr (kStream) {
    stream_row(from, reinterpret_cast<uint8_t*>(out), bytes);
  } else {
    std::memcpy(out, from, static_cast<size_t>(bytes));
  }
}

// The part of a row that its slot gives in the first place, a little ahead of its use.
HWY_INLINE void prefetch_ahead(const UnpackContext& context, int64_t i, int64_t bytes) {
  const int64_t ahead = i + kPrefetchRows;
  if (ahead >= context.slots.shape[0] || !context.pool.contains(context.slots(ahead))) return;
  prefetch_row(context.pool.record(context.slots(ahead), bytes), bytes);
}

template <RowFormat kFormat, bool kStream>
void unpack_piece(const UnpackContext& context, int64_t begin, int64_t end) {
  const int64_t record_bytes = kFormat == RowFormat::kBf16  ? 2 * context.width
                               : kFormat == RowFormat::kV32 ? kV32RowBytes
                               : kFormat == RowFormat::kV4  ? kV4DataBytes
                                                            : context.width;
  for (int64_t i = begin; i < end; ++i) {
    prefetch_ahead(context, i, record_bytes);
    const int32_t slot = context.slots(i);
    bf16_t* const out = context.out.row(i);
    if (!context.pool.contains(slot)) {
      std::fill_n(out, context.width, bf16_t{0});
    } else if constexpr (kFormat == RowFormat::kBf16) {
      unpack_bf16<kStream>(context, slot, out);
    } else if constexpr (kFormat == RowFormat::kV32) {
      unpack_v32<kStream>(context.pool.record(slot, kV32RowBytes), out);
    } else if constexpr (kFormat == RowFormat::kV4) {
      unpack_v4<kStream>(context.pool.v4_data(slot), context.pool.v4_scales(slot), out);
    } else if constexpr (kFormat == RowFormat::kF576) {
      unpack_codes<kStream, kF576Width>(context.pool.record(slot, kF576Width), context.k_scale,
                                        out);
    } else if constexpr (kFormat == RowFormat::kR512) {
      unpack_codes<kStream, kR512Width>(context.pool.record(slot, kR512Width),
                                        context.scales.get(slot), out);
    } else {
      unpack_i132<kStream>(context, slot, out);
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

template <RowFormat kFormat>
void unpack_format(const UnpackContext& context) {
  const int64_t num_rows = context.slots.shape[0];
  const int64_t stride_bytes = 2 * context.out.stride[0];
  const bool is_aligned = reinterpret_cast<uintptr_t>(context.out.data) % kLineBytes == 0 &&
                          stride_bytes % kLineBytes == 0 &&
                          2 * context.width % kStreamAlignment == 0;
  const bool stream = num_rows * 2 * context.width >= kStreamFromBytes && is_aligned;
  // 32 rows take some microseconds: enough to pay for a task, few enough to balance.
  ParallelFor(num_rows, 32, [&](int64_t begin, int64_t end, int) {
    if (stream) {
      unpack_piece<kFormat, true>(context, begin, end);
    } else {
      unpack_piece<kFormat, false>(context, begin, end);
    }
  });
}

void unpack_rows(const RowCodecProblem& problem, const Device& device,
                 const UnpackRowsTensors& tensors) {
  const UnpackContext context{paged_rows<const uint8_t>(tensors.pool, problem.page_size),
                              access<const int32_t, 1>(tensors.slots),
                              access<bf16_t, 2>(tensors.out),
                              problem.width,
                              problem.k_scale,
                              row_scales<const uint8_t>(tensors.inv_scale)};
  const ThreadScope threads(device.num_threads);
  switch (problem.row_format) {
    case RowFormat::kBf16:
      unpack_format<RowFormat::kBf16>(context);
      break;
    case RowFormat::kV32:
      unpack_format<RowFormat::kV32>(context);
      break;
    case RowFormat::kI132:
      unpack_format<RowFormat::kI132>(context);
      break;
    case RowFormat::kV4:
      unpack_format<RowFormat::kV4>(context);
      break;
    case RowFormat::kR512:
      unpack_format<RowFormat::kR512>(context);
      break;
    case RowFormat::kF576:
      unpack_format<RowFormat::kF576>(context);
      break;
  }
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
