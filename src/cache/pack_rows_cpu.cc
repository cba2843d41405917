#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cache/pack_rows_cpu.cc"
#include "src/core/simd.h"
// These need what simd.h includes.
#include <algorithm>
#include <cstring>

#include "src/cache/pack_rows_impl.h"
#include "src/cache/stream_row_cpu.h"
#include "src/core/access.h"
#include "src/core/fp8_tile_simd.h"
#include "src/core/parallel.h"
#include "src/core/row_layout.h"
#include "src/core/v4_row_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

// What one call works on.
struct PackContext {
  Accessor<const bf16_t, 2> src;
  Accessor<const int32_t, 1> slots;
  PagedRows<uint8_t> pool;
  int64_t width;
  ScaleMode mode;
  float k_scale;
  Accessor<const bf16_t, 2> rope;  // null: the rows of src are whole
  RowScales<uint8_t> scales;       // r512

  // The rope part of a row of kV32Width channels, whose other channels are src.row(i).
  const bf16_t* rope_of(int64_t i) const { return rope ? rope.row(i) : src.row(i) + kV32LatentDim; }
  bool takes(int64_t i) const { return pool.contains(slots(i)); }
};

// Asks for the source of a row a little further on and, unless rows are streamed, for the place it
// goes to.
template <bool kStream>
HWY_INLINE void prefetch_ahead(const PackContext& context, int64_t i, int64_t bytes) {
  const int64_t ahead = i + kPrefetchRows;
  if (ahead >= context.slots.shape[0] || !context.takes(ahead)) return;
  prefetch_row(reinterpret_cast<const uint8_t*>(context.src.row(ahead)), 2 * context.src.shape[1]);
  if (context.rope) {
    prefetch_row(reinterpret_cast<const uint8_t*>(context.rope.row(ahead)), 2 * kV32RopeDim);
  }
  if constexpr (!kStream) {
    prefetch_row(context.pool.record(context.slots(ahead), bytes), bytes);
  }
}

template <bool kStream>
HWY_INLINE void copy_elements(const bf16_t* x, int64_t count, uint8_t* to) {
  const int64_t bytes = 2 * count;
  if constexpr (kStream) {
    stream_row(reinterpret_cast<const uint8_t*>(x), to, bytes);
  } else {
    std::memcpy(to, x, static_cast<size_t>(bytes));
  }
}

template <bool kStream>
void pack_bf16_rows(const PackContext& context, int64_t begin, int64_t end) {
  const int64_t bytes = 2 * context.width;
  const int64_t src_width = context.src.shape[1];
  for (int64_t i = begin; i < end; ++i) {
    prefetch_ahead<kStream>(context, i, bytes);
    if (!context.takes(i)) continue;
    uint8_t* const to = context.pool.record(context.slots(i), bytes);
    copy_elements<kStream>(context.src.row(i), src_width, to);
    if (context.rope) copy_elements<kStream>(context.rope.row(i), kV32RopeDim, to + 2 * src_width);
  }
}

HWY_INLINE void pack_v32(const bf16_t* x, const bf16_t* rope, ScaleMode mode, uint8_t* record) {
  const bf16_t* const from[] = {x, x + kV32TileDim, x + 2 * kV32TileDim, x + 3 * kV32TileDim};
  uint8_t* const to[] = {record, record + kV32TileDim, record + 2 * kV32TileDim,
                         record + 3 * kV32TileDim};
  float scales[kV32NumTiles];
  quantize_tiles_simd(from, kV32TileDim, latent_tile_scale, mode, to, scales);
  std::memcpy(record + kV32ScaleOffset, scales, sizeof(scales));
  std::memcpy(record + kV32RopeOffset, rope, sizeof(bf16_t) * kV32RopeDim);
}

// Records of one piece: pack_record(i, record) packs row i.
template <bool kStream, int64_t kBytes, class PackRecord>
HWY_INLINE void pack_records(const PackContext& context, int64_t begin, int64_t end,
                             const PackRecord& pack_record) {
  // Streamed by way of two records in the first-level cache, one leaving while the other is packed:
  // a wide load just after the narrower stores that it covers would wait for them.
  HWY_ALIGN uint8_t records[2][kStream ? kBytes : 1];
  int current = 0;
  uint8_t* pending = nullptr;  // where the other record goes
  for (int64_t i = begin; i < end; ++i) {
    prefetch_ahead<kStream>(context, i, kBytes);
    if (!context.takes(i)) continue;
    uint8_t* const to = context.pool.record(context.slots(i), kBytes);
    pack_record(i, kStream ? records[current] : to);
    if constexpr (kStream) {
      current ^= 1;
      if (pending != nullptr) stream_row(records[current], pending, kBytes);
      pending = to;
    }
  }
  if (pending != nullptr) stream_row(records[current ^ 1], pending, kBytes);
}

template <bool kStream>
void pack_v32_rows(const PackContext& context, int64_t begin, int64_t end) {
  pack_records<kStream, kV32RowBytes>(context, begin, end, [&](int64_t i, uint8_t* record) {
    pack_v32(context.src.row(i), context.rope_of(i), context.mode, record);
  });
}

template <bool kStream>
void pack_f576_rows(const PackContext& context, int64_t begin, int64_t end) {
  const TileScale scale(context.k_scale);
  pack_records<kStream, kF576Width>(context, begin, end, [&](int64_t i, uint8_t* record) {
    encode_tile_simd(context.src.row(i), kV32LatentDim, scale, record);
    encode_tile_simd(context.rope_of(i), kV32RopeDim, scale, record + kV32LatentDim);
  });
}

// Data and scale rows are stored as they come: a row is too short to be streamed in two parts.
void pack_v4_rows(const PackContext& context, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (!context.takes(i)) continue;
    const int32_t slot = context.slots(i);
    pack_v4_row_simd(context.src.row(i), context.pool.v4_data(slot), context.pool.v4_scales(slot));
  }
}

// One tile over the row, so that the scale rule sees the whole of it.
void pack_r512_rows(const PackContext& context, int64_t begin, int64_t end) {
  const TileScaleRule rule = context.scales.is_bf16 ? row_scale_bf16 : row_scale_fp32;
  for (int64_t i = begin; i < end; ++i) {
    if (!context.takes(i)) continue;
    const int32_t slot = context.slots(i);
    const bf16_t* const from[] = {context.src.row(i)};
    uint8_t* const to[] = {context.pool.record(slot, kR512Width)};
    float scales[1];
    quantize_tiles_simd(from, context.width, rule, context.mode, to, scales);
    context.scales.set(slot, scales[0]);
  }
}

template <int kRows>
HWY_INLINE void pack_i132(const PackContext& context, const int64_t (&rows)[kRows]) {
  const bf16_t* from[kRows];
  uint8_t* to[kRows];
  float scales[kRows];
  for (int r = 0; r < kRows; ++r) {
    from[r] = context.src.row(rows[r]);
    to[r] = context.pool.i132_codes(context.slots(rows[r]), context.width);
  }
  // The width of the models as a constant: the loops over it unroll.
  if (context.width == kI132Width) {
    quantize_tiles_simd<kRows>(from, kI132Width, index_tile_scale, context.mode, to, scales);
  } else {
    quantize_tiles_simd<kRows>(from, context.width, index_tile_scale, context.mode, to, scales);
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(context.pool.i132_scale(context.slots(rows[r]), context.width), &scales[r],
                sizeof(float));
  }
}

// Four rows side by side; see quantize_tiles_simd. Codes and scales are too short to be streamed.
void pack_i132_rows(const PackContext& context, int64_t begin, int64_t end) {
  constexpr int kRows = 4;
  int64_t rows[kRows];
  int count = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (!context.takes(i)) continue;
    rows[count++] = i;
    if (count == kRows) {
      pack_i132<kRows>(context, rows);
      count = 0;
    }
  }
  for (int r = 0; r < count; ++r) pack_i132<1>(context, {rows[r]});
}

template <bool kStream>
void pack_piece(RowFormat format, const PackContext& context, int64_t begin, int64_t end) {
  switch (format) {
    case RowFormat::kBf16:
      pack_bf16_rows<kStream>(context, begin, end);
      break;
    case RowFormat::kV32:
      pack_v32_rows<kStream>(context, begin, end);
      break;
    case RowFormat::kI132:
      pack_i132_rows(context, begin, end);
      break;
    case RowFormat::kV4:
      pack_v4_rows(context, begin, end);
      break;
    case RowFormat::kR512:
      pack_r512_rows(context, begin, end);
      break;
    case RowFormat::kF576:
      pack_f576_rows<kStream>(context, begin, end);
      break;
  }
  if constexpr (kStream) hwy::FlushStream();
}

// Whether every record starts and ends where a streaming store can, and there are many.
bool may_stream(const PackContext& context, int64_t record_bytes) {
  return context.slots.shape[0] * record_bytes >= kStreamFromBytes &&
         reinterpret_cast<uintptr_t>(context.pool.data) % kStreamAlignment == 0 &&
         context.pool.page_stride_bytes % kStreamAlignment == 0 &&
         record_bytes % kStreamAlignment == 0;
}

void pack_rows(const RowCodecProblem& problem, const Device& device,
               const PackRowsTensors& tensors) {
  const PackContext context{access<const bf16_t, 2>(tensors.src),
                            access<const int32_t, 1>(tensors.slots),
                            paged_rows<uint8_t>(tensors.pool, problem.page_size),
                            problem.width,
                            problem.scale_mode,
                            problem.k_scale,
                            access<const bf16_t, 2>(tensors.rope),
                            row_scales<uint8_t>(tensors.inv_scale)};
  const bool stream = may_stream(context, row_bytes(problem.row_format, problem.width));
  const ThreadScope threads(device.num_threads);
  // 32 rows take some microseconds: enough to pay for a task, few enough to balance.
  ParallelFor(context.slots.shape[0], 32, [&](int64_t begin, int64_t end, int) {
    if (stream) {
      pack_piece<true>(problem.row_format, context, begin, end);
    } else {
      pack_piece<false>(problem.row_format, context, begin, end);
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
