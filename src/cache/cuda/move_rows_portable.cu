#include "src/cache/move_rows_impl.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/core/row_layout.h"

// Two launches, all reads and then all writes: what one of them writes the other must not read
// early. A warp takes a token.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = kThreads / kWarpThreads;

struct MoveParams {
  PagedRows<uint8_t> pool;
  const int32_t* src_slots;
  const int32_t* dst_slots;
  int64_t num_tokens;
  int64_t token_bytes;
  int64_t first_bytes;  // of a token in the first of two regions; 0: one record
  uint8_t* tokens;      // [num_tokens, token_bytes]
};

template <bool kAligned>
__device__ void copy(const uint8_t* from, uint8_t* to, int64_t count) {
  constexpr int64_t kBytes = kAligned ? 4 : 1;  // aligned: count is a multiple of 4
  for (int64_t i = kBytes * (threadIdx.x % kWarpThreads); i < count; i += kBytes * kWarpThreads) {
    if constexpr (kAligned) {
      *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const uint32_t*>(from + i);
    } else {
      to[i] = from[i];
    }
  }
}

template <bool kAligned, bool kIntoPool>
__global__ void __launch_bounds__(kThreads) move(const __grid_constant__ MoveParams params) {
  const int64_t i = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarpThreads;
  if (i >= params.num_tokens) return;
  const int32_t src = params.src_slots[i];
  const int32_t dst = params.dst_slots[i];
  if (!params.pool.contains(src) || !params.pool.contains(dst)) return;
  const auto part = [&](uint8_t* in_pool, uint8_t* outside, int64_t bytes) {
    copy<kAligned>(kIntoPool ? outside : in_pool, kIntoPool ? in_pool : outside, bytes);
  };
  const int32_t slot = kIntoPool ? dst : src;
  uint8_t* const token = params.tokens + i * params.token_bytes;
  if (params.first_bytes > 0) {
    const int64_t first = params.first_bytes, second = params.token_bytes - first;
    part(params.pool.at(slot, first), token, first);
    part(params.pool.at(slot, second, params.pool.page_size * first), token + first, second);
  } else {
    part(params.pool.record(slot, params.token_bytes), token, params.token_bytes);
  }
}

}  // namespace

void move_rows_cuda_portable(const MoveRowsProblem& problem, const Device& device,
                             const MoveRowsTensors& tensors, Workspace workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  MoveParams params{};
  params.pool = paged_rows<uint8_t>(tensors.pool, problem.page_size);
  params.src_slots = static_cast<const int32_t*>(tensors.src_slots.data);
  params.dst_slots = static_cast<const int32_t*>(tensors.dst_slots.data);
  params.num_tokens = tensors.src_slots.shape[0];
  params.token_bytes = row_bytes(problem.row_format, problem.width);
  params.first_bytes = first_region_bytes(problem.row_format, problem.width);
  params.tokens = static_cast<uint8_t*>(workspace.data);
  const bool aligned = cuda::is_aligned(params.pool.data, 4) &&
                       params.pool.page_stride_bytes % 4 == 0 && params.token_bytes % 4 == 0;
  const cuda::LaunchShape shape{dim3(cuda::grid_blocks(params.num_tokens, kTokensPerBlock)),
                                dim3(kThreads)};
  cuda::launch("move_rows", aligned ? move<true, false> : move<false, false>, shape, stream,
               params);
  cuda::launch("move_rows", aligned ? move<true, true> : move<false, true>, shape, stream, params);
}

}  // namespace fovea::internal
