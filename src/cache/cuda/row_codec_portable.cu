#include "src/cache/pack_rows_impl.h"
#include "src/cache/unpack_rows_impl.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/fp8_tile.h"
#include "src/core/row_layout.h"

// A warp takes a row: codecs are bound by memory, and a row of any format is a few hundred bytes.
// Lane l handles channels 4 l .. 4 l + 3 of each 128, hence a tile of v32 is one pass of the warp.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarpThreads;
constexpr int kChannelsPerPass = 4 * kWarpThreads;

// The channels of one source row: latent | rope, or all in the first part.
struct SourceRow {
  const bf16_t* latent;
  const bf16_t* rope;
  int64_t latent_width;

  // Channels c .. c + 3 lie in one part: both widths are multiples of 4 when there are two.
  template <bool kAligned>
  __device__ void load(int64_t c, bf16_t (&to)[4]) const {
    cuda::load4<kAligned>(c < latent_width ? latent + c : rope + (c - latent_width), to);
  }
  __device__ bf16_t at(int64_t c) const {
    return c < latent_width ? latent[c] : rope[c - latent_width];
  }
};

struct CodecParams {
  RowFormat format;
  ScaleMode mode;
  float k_scale;
  int64_t width;
  const int32_t* slots;
  int64_t num_rows;
};

struct PackParams {
  CodecParams codec;
  const bf16_t* src;
  int64_t src_stride;
  int64_t src_width;
  const bf16_t* rope;
  int64_t rope_stride;
  PagedRows<uint8_t> pool;
  RowScales<uint8_t> scales;  // r512
};

__device__ float finite_magnitude(bf16_t x) {
  const float magnitude = fabsf(bf16_to_float(x));
  return isfinite(magnitude) ? magnitude : 0.0f;
}

// Calls each(c, x[4], n) for the lane's channels c .. c + n - 1 of [begin, end).
template <bool kAligned, class Each>
__device__ void for_channels(const SourceRow& row, int64_t begin, int64_t end, Each each) {
  for (int64_t c = begin + 4 * (threadIdx.x % kWarpThreads); c < end; c += kChannelsPerPass) {
    bf16_t x[4] = {};
    if (c + 4 <= end) {
      row.load<kAligned>(c, x);
      each(c, x, 4);
    } else {
      for (int64_t i = 0; i < end - c; ++i) x[i] = row.at(c + i);
      each(c, x, static_cast<int>(end - c));
    }
  }
}

template <bool kAligned>
__device__ float tile_max(const SourceRow& row, int64_t begin, int64_t end) {
  float amax = 0;
  for_channels<kAligned>(row, begin, end, [&](int64_t, const bf16_t(&x)[4], int) {
    for (const bf16_t value : x) amax = fmaxf(amax, finite_magnitude(value));
  });
  return cuda::warp_max(amax);
}

// codes[c - begin] = e4m3(x[c] / scale).
template <bool kAligned>
__device__ void encode(const SourceRow& row, int64_t begin, int64_t end, float scale,
                       uint8_t* codes) {
  for_channels<kAligned>(row, begin, end, [&](int64_t c, const bf16_t(&x)[4], int count) {
    uint8_t code[4];
    for (int i = 0; i < 4; ++i) code[i] = e4m3_from_float(bf16_to_float(x[i]) / scale);
    if (count == 4) {
      cuda::store4<kAligned>(code, codes + (c - begin));
    } else {
      for (int i = 0; i < count; ++i) codes[c - begin + i] = code[i];
    }
  });
}

// The pool is bytes: a bf16 element may lie at an odd address.
template <bool kAligned>
__device__ void copy_bf16(const SourceRow& row, int64_t begin, int64_t end, uint8_t* to) {
  for_channels<kAligned>(row, begin, end, [&](int64_t c, const bf16_t(&x)[4], int count) {
    uint8_t* const at = to + 2 * (c - begin);
    if (kAligned && count == 4) {
      cuda::store4<true>(x, reinterpret_cast<bf16_t*>(at));
      return;
    }
    for (int i = 0; i < count; ++i) {
      at[2 * i] = static_cast<uint8_t>(x[i].bits);
      at[2 * i + 1] = static_cast<uint8_t>(x[i].bits >> 8);
    }
  });
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackParams params) {
  const CodecParams& codec = params.codec;
  const int64_t i = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpThreads;
  if (i >= codec.num_rows) return;
  const int32_t slot = codec.slots[i];
  if (!params.pool.contains(slot)) return;
  const bool first_lane = threadIdx.x % kWarpThreads == 0;
  const SourceRow row{params.src + i * params.src_stride, params.rope + i * params.rope_stride,
                      params.src_width};
  switch (codec.format) {
    case RowFormat::kBf16:
      copy_bf16<kAligned>(row, 0, codec.width, params.pool.record(slot, 2 * codec.width));
      break;
    case RowFormat::kV32: {
      uint8_t* const record = params.pool.record(slot, kV32RowBytes);
      for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
        const int64_t begin = tile * kV32TileDim;
        const float amax = tile_max<kAligned>(row, begin, begin + kV32TileDim);
        const float scale = latent_tile_scale(amax, codec.mode);
        encode<kAligned>(row, begin, begin + kV32TileDim, scale, record + begin);
        if (first_lane) cuda::store_float<kAligned>(scale, record + kV32ScaleOffset + 4 * tile);
      }
      copy_bf16<kAligned>(row, kV32LatentDim, kV32Width, record + kV32RopeOffset);
      break;
    }
    case RowFormat::kI132: {
      const float amax = tile_max<kAligned>(row, 0, codec.width);
      const float scale = index_tile_scale(amax, codec.mode);
      encode<kAligned>(row, 0, codec.width, scale, params.pool.i132_codes(slot, codec.width));
      if (first_lane) {
        cuda::store_float<kAligned>(scale, params.pool.i132_scale(slot, codec.width));
      }
      break;
    }
    case RowFormat::kV4: {
      uint8_t* const data = params.pool.v4_data(slot);
      uint8_t* const scales = params.pool.v4_scales(slot);
      for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
        const int64_t begin = tile * kV4TileDim;
        const float amax = tile_max<kAligned>(row, begin, begin + kV4TileDim);
        const float scale = latent_tile_scale(amax, ScaleMode::kPow2);
        encode<kAligned>(row, begin, begin + kV4TileDim, scale, data + begin);
        if (first_lane) scales[tile] = ue8m0_from_float(scale);
      }
      if (first_lane) scales[kV4NumTiles] = 0;
      copy_bf16<kAligned>(row, kV4LatentDim, kV4Width, data + kV4LatentDim);
      break;
    }
    case RowFormat::kR512: {
      const float amax = tile_max<kAligned>(row, 0, kR512Width);
      const float scale = params.scales.is_bf16 ? row_scale_bf16(amax, codec.mode)
                                                : row_scale_fp32(amax, codec.mode);
      encode<kAligned>(row, 0, kR512Width, scale, params.pool.record(slot, kR512Width));
      if (first_lane) params.scales.set(slot, scale);
      break;
    }
    case RowFormat::kF576:
      encode<kAligned>(row, 0, kF576Width, codec.k_scale, params.pool.record(slot, kF576Width));
      break;
  }
}

struct UnpackParams {
  CodecParams codec;
  PagedRows<const uint8_t> pool;
  RowScales<const uint8_t> scales;  // r512
  bf16_t* out;
  int64_t out_stride;
};

__device__ bf16_t decoded(uint8_t code, float scale) {
  const float value = e4m3_to_float(code) * scale;
  return isnan(value) ? bf16_t{0x7FC0} : bf16_from_float(value);
}

template <bool kAligned>
__device__ void decode(const uint8_t* codes, int64_t count, float scale, bf16_t* out) {
  for (int64_t c = 4 * (threadIdx.x % kWarpThreads); c < count; c += kChannelsPerPass) {
    if (c + 4 > count) {
      for (; c < count; ++c) out[c] = decoded(codes[c], scale);
      return;
    }
    uint8_t code[4];
    bf16_t x[4];
    cuda::load4<kAligned>(codes + c, code);
    for (int i = 0; i < 4; ++i) x[i] = decoded(code[i], scale);
    cuda::store4<kAligned>(x, out + c);
  }
}

template <bool kAligned>
__device__ void read_bf16(const uint8_t* from, int64_t count, bf16_t* out) {
  for (int64_t c = 4 * (threadIdx.x % kWarpThreads); c < count; c += kChannelsPerPass) {
    bf16_t x[4] = {};
    if (kAligned && c + 4 <= count) {
      cuda::load4<true>(reinterpret_cast<const bf16_t*>(from + 2 * c), x);
      cuda::store4<true>(x, out + c);
      continue;
    }
    for (int i = 0; i < 4 && c + i < count; ++i) {
      const uint8_t* const at = from + 2 * (c + i);
      out[c + i].bits = static_cast<uint16_t>(at[0] | at[1] << 8);
    }
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) unpack(const __grid_constant__ UnpackParams params) {
  const CodecParams& codec = params.codec;
  const int64_t i = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpThreads;
  if (i >= codec.num_rows) return;
  const int32_t slot = codec.slots[i];
  bf16_t* const out = params.out + i * params.out_stride;
  if (!params.pool.contains(slot)) {
    for (int64_t c = threadIdx.x % kWarpThreads; c < codec.width; c += kWarpThreads) {
      out[c] = bf16_t{0};
    }
    return;
  }
  switch (codec.format) {
    case RowFormat::kBf16:
      read_bf16<kAligned>(params.pool.record(slot, 2 * codec.width), codec.width, out);
      break;
    case RowFormat::kV32: {
      const uint8_t* const record = params.pool.record(slot, kV32RowBytes);
      for (int64_t tile = 0; tile < kV32NumTiles; ++tile) {
        decode<kAligned>(record + tile * kV32TileDim, kV32TileDim,
                         cuda::load_float<kAligned>(record + kV32ScaleOffset + 4 * tile),
                         out + tile * kV32TileDim);
      }
      read_bf16<kAligned>(record + kV32RopeOffset, kV32RopeDim, out + kV32LatentDim);
      break;
    }
    case RowFormat::kI132:
      decode<kAligned>(params.pool.i132_codes(slot, codec.width), codec.width,
                       cuda::load_float<kAligned>(params.pool.i132_scale(slot, codec.width)), out);
      break;
    case RowFormat::kV4: {
      const uint8_t* const data = params.pool.v4_data(slot);
      const uint8_t* const scales = params.pool.v4_scales(slot);
      for (int64_t tile = 0; tile < kV4NumTiles; ++tile) {
        decode<kAligned>(data + tile * kV4TileDim, kV4TileDim, ue8m0_to_float(scales[tile]),
                         out + tile * kV4TileDim);
      }
      read_bf16<kAligned>(data + kV4LatentDim, kV4RopeDim, out + kV4LatentDim);
      break;
    }
    case RowFormat::kR512:
      decode<kAligned>(params.pool.record(slot, kR512Width), kR512Width, params.scales.get(slot),
                       out);
      break;
    case RowFormat::kF576:
      decode<kAligned>(params.pool.record(slot, kF576Width), kF576Width, codec.k_scale, out);
      break;
  }
}

CodecParams codec_params(const RowCodecProblem& problem, const ConstTensorView& slots) {
  return {problem.row_format,
          problem.scale_mode,
          problem.k_scale,
          problem.width,
          static_cast<const int32_t*>(slots.data),
          slots.shape[0]};
}

// Quads of bf16 elements at 8 bytes, of codes at 4: what every record offset keeps.
bool pool_is_aligned(const RowCodecProblem& problem, const void* data, int64_t page_stride_bytes) {
  return cuda::is_aligned(data, 8) && page_stride_bytes % 8 == 0 && problem.width % 4 == 0;
}

bool rows_are_aligned(const ConstTensorView& rows) {
  return !rows.defined() || (cuda::is_aligned(rows.data, 8) && rows.stride[0] % 4 == 0);
}

dim3 row_blocks(int64_t rows) { return dim3(cuda::grid_blocks(rows, kRowsPerBlock)); }

}  // namespace

void pack_rows_cuda_portable(const RowCodecProblem& problem, const Device& device,
                             const PackRowsTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  PackParams params{};
  params.codec = codec_params(problem, tensors.slots);
  params.src = static_cast<const bf16_t*>(tensors.src.data);
  params.src_stride = tensors.src.stride[0];
  params.src_width = tensors.src.shape[1];
  params.rope = static_cast<const bf16_t*>(tensors.rope.data);
  params.rope_stride = tensors.rope.defined() ? tensors.rope.stride[0] : 0;
  params.pool = paged_rows<uint8_t>(tensors.pool, problem.page_size);
  params.scales = row_scales<uint8_t>(tensors.inv_scale);
  const bool aligned = pool_is_aligned(problem, params.pool.data, params.pool.page_stride_bytes) &&
                       rows_are_aligned(tensors.src) && rows_are_aligned(tensors.rope);
  cuda::launch("pack_rows", aligned ? pack<true> : pack<false>,
               {row_blocks(params.codec.num_rows), dim3(kThreads)}, stream, params);
}

void unpack_rows_cuda_portable(const RowCodecProblem& problem, const Device& device,
                               const UnpackRowsTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  UnpackParams params{};
  params.codec = codec_params(problem, tensors.slots);
  params.pool = paged_rows<const uint8_t>(tensors.pool, problem.page_size);
  params.scales = row_scales<const uint8_t>(tensors.inv_scale);
  params.out = static_cast<bf16_t*>(tensors.out.data);
  params.out_stride = tensors.out.stride[0];
  const bool aligned = pool_is_aligned(problem, params.pool.data, params.pool.page_stride_bytes) &&
                       rows_are_aligned(tensors.out);
  cuda::launch("unpack_rows", aligned ? unpack<true> : unpack<false>,
               {row_blocks(params.codec.num_rows), dim3(kThreads)}, stream, params);
}

}  // namespace fovea::internal
