#include "src/core/access.h"
#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/core/cuda/vector_io.cuh"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

// A warp takes a token: its codes in quads, its scale from the first lane.
namespace fovea::internal {
namespace {

using cuda::kWarpThreads;

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = kThreads / kWarpThreads;

__device__ int64_t own_token() {
  return int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarpThreads;
}

template <bool kAligned>
__device__ void copy_codes(const uint8_t* from, uint8_t* to, int64_t count) {
  constexpr int64_t kBytes = kAligned ? 4 : 1;  // aligned: count is a multiple of 4
  for (int64_t d = kBytes * (threadIdx.x % kWarpThreads); d < count; d += kBytes * kWarpThreads) {
    if constexpr (kAligned) {
      *reinterpret_cast<uint32_t*>(to + d) = *reinterpret_cast<const uint32_t*>(from + d);
    } else {
      to[d] = from[d];
    }
  }
}

template <class Slot, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    store(Accessor<const uint8_t, 2> k_fp8, const float* k_scale, const Slot* slots,
          IndexPages<uint8_t> pages) {
  const int64_t t = own_token();
  if (t >= k_fp8.shape[0]) return;
  const int64_t slot = slots[t];
  if (slot < 0 || slot >= pages.num_pages * pages.page_size) return;
  const auto [page, offset] = cuda::divide_small(slot, static_cast<uint32_t>(pages.page_size));
  copy_codes<kAligned>(k_fp8.row(t), pages.codes(page, offset), pages.head_dim);
  if (threadIdx.x % kWarpThreads == 0) {
    cuda::store_float<kAligned>(k_scale[t], pages.scale(page, offset));
  }
}

// The request of a row: the last one that starts at or before it and reaches past it. Offsets come
// from the device and may descend, hence the search goes through all of them.
__device__ int64_t request_of(const int32_t* kv_indptr, int64_t requests, int64_t row) {
  int64_t found = -1;
  for (int64_t r = threadIdx.x % kWarpThreads; r < requests; r += kWarpThreads) {
    const int64_t begin = kv_indptr[r] > 0 ? kv_indptr[r] : 0;
    if (row >= begin && row < kv_indptr[r + 1]) found = r;
  }
  for (int step = kWarpThreads / 2; step > 0; step /= 2) {
    const int64_t other = __shfl_xor_sync(0xFFFFFFFF, found, step);
    found = found > other ? found : other;
  }
  return found;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    gather(IndexPages<const uint8_t> pages, Accessor<const int32_t, 2> page_table,
           const int32_t* kv_indptr, Accessor<uint8_t, 2> k_fp8, float* k_scale) {
  const int64_t row = own_token();
  if (row >= k_fp8.shape[0]) return;
  const int64_t r = request_of(kv_indptr, page_table.shape[0], row);
  if (r < 0) return;
  const auto [column, offset] =
      cuda::divide_small(row - kv_indptr[r], static_cast<uint32_t>(pages.page_size));
  const int64_t page = column < page_table.shape[1] ? page_table(r, column) : -1;
  if (pages.holds(page)) {
    copy_codes<kAligned>(pages.codes(page, offset), k_fp8.row(row), pages.head_dim);
  } else {
    for (int64_t d = threadIdx.x % kWarpThreads; d < pages.head_dim; d += kWarpThreads) {
      k_fp8(row, d) = 0;
    }
  }
  if (threadIdx.x % kWarpThreads == 0) {
    k_scale[row] = pages.holds(page) ? cuda::load_float<kAligned>(pages.scale(page, offset)) : 0.0f;
  }
}

template <class Pages, class Rows>
bool all_aligned(const Pages& pages, const Rows& rows) {
  return cuda::is_aligned(pages.data, 4) && pages.page_stride_bytes % 4 == 0 &&
         pages.head_dim % 4 == 0 && cuda::is_aligned(rows.data, 4) && rows.stride[0] % 4 == 0;
}

template <class Slot>
void run_store(const IndexCacheProblem& problem, const IndexStoreTensors& tensors, Stream stream) {
  const IndexPages<uint8_t> pages(tensors.index_pool, problem.page_size, problem.head_dim);
  const auto k_fp8 = access<const uint8_t, 2>(tensors.k_fp8);
  cuda::launch("index_store", all_aligned(pages, k_fp8) ? store<Slot, true> : store<Slot, false>,
               {dim3(cuda::grid_blocks(k_fp8.shape[0], kTokensPerBlock)), dim3(kThreads)}, stream,
               k_fp8, static_cast<const float*>(tensors.k_scale.data),
               static_cast<const Slot*>(tensors.slots.data), pages);
}

}  // namespace

void index_store_cuda_portable(const IndexCacheProblem& problem, const Device& device,
                               const IndexStoreTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  if (tensors.slots.dtype == DType::kI64) {
    run_store<int64_t>(problem, tensors, stream);
  } else {
    run_store<int32_t>(problem, tensors, stream);
  }
}

void index_gather_cuda_portable(const IndexCacheProblem& problem, const Device& device,
                                const IndexGatherTensors& tensors, Workspace, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const IndexPages<const uint8_t> pages(tensors.index_pool, problem.page_size, problem.head_dim);
  const auto k_fp8 = access<uint8_t, 2>(tensors.k_fp8);
  cuda::launch("index_gather", all_aligned(pages, k_fp8) ? gather<true> : gather<false>,
               {dim3(cuda::grid_blocks(k_fp8.shape[0], kTokensPerBlock)), dim3(kThreads)}, stream,
               pages, access<const int32_t, 2>(tensors.page_table),
               static_cast<const int32_t*>(tensors.kv_indptr.data), k_fp8,
               static_cast<float*>(tensors.k_scale.data));
}

}  // namespace fovea::internal
