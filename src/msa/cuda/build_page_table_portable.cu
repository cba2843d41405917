#include <algorithm>

#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/msa/build_page_table_impl.h"

// One read of the map per page: a thread for each entry of the table. The packed form takes two
// launches more: a block sums up the page counts, then every request's pages go to their place.
namespace fovea::internal {
namespace {

constexpr char kOp[] = "build_page_table";
constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kMaxTailBlocks = 1024;

struct Params {
  PageTableSource source;
  Accessor<int32_t, 2> table;
  Accessor<int32_t, 1> packed, indptr;
};

__global__ void __launch_bounds__(kThreads) fill_table(const __grid_constant__ Params params) {
  const int64_t r = blockIdx.x;
  const int64_t count = params.source.page_count(r);
  int32_t* const row = params.table.row(r);
  for (int64_t p = blockIdx.y * int64_t{kThreads} + threadIdx.x; p < params.table.shape[1];
       p += gridDim.y * int64_t{kThreads}) {
    row[p] = p < count ? params.source.page(r, p) : 0;
  }
}

// The counts add up to R * max_pages at most, which fits kv_indices and int32.
__global__ void __launch_bounds__(kScanThreads) sum_counts(const __grid_constant__ Params params) {
  __shared__ int32_t shared[33];
  const int64_t requests = params.table.shape[0];
  const int32_t total = cuda::block_scan(
      requests, shared,
      [&](int64_t r) { return static_cast<int32_t>(params.source.page_count(r)); },
      [&](int64_t r, int32_t before, int32_t) { params.indptr(r) = before; });
  if (threadIdx.x == 0) params.indptr(requests) = total;
}

// Blocks 0 .. R - 1: the pages of a request. The others: zeros past the last page.
__global__ void __launch_bounds__(kThreads) fill_packed(const __grid_constant__ Params params) {
  const int64_t requests = params.table.shape[0];
  if (blockIdx.x < requests) {
    const int64_t r = blockIdx.x;
    const int64_t begin = params.indptr(r);
    const int64_t count = params.indptr(r + 1) - begin;
    for (int64_t p = threadIdx.x; p < count; p += kThreads) {
      params.packed(begin + p) = params.source.page(r, p);
    }
    return;
  }
  const int64_t step = (gridDim.x - requests) * kThreads;
  int64_t i = params.indptr(requests) + (blockIdx.x - requests) * kThreads + threadIdx.x;
  for (; i < params.packed.shape[0]; i += step) params.packed(i) = 0;
}

}  // namespace

void build_page_table_cuda_portable(const BuildPageTableProblem& problem, const Device& device,
                                    const BuildPageTableTensors& tensors, Workspace,
                                    Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const Params params{page_table_source(problem, tensors), access<int32_t, 2>(tensors.page_table),
                      access<int32_t, 1>(tensors.kv_indices),
                      access<int32_t, 1>(tensors.kv_page_indptr)};
  const int64_t requests = params.table.shape[0];
  const int64_t columns = (params.table.shape[1] + kThreads - 1) / kThreads;
  cuda::launch(
      kOp, fill_table,
      {dim3(static_cast<unsigned>(requests), static_cast<unsigned>(std::min(columns, kMaxGridY))),
       dim3(kThreads)},
      stream, params);
  if (!params.packed) return;
  cuda::launch(kOp, sum_counts, {dim3(1), dim3(kScanThreads)}, stream, params);
  const int64_t tail = std::min(kMaxTailBlocks, (params.packed.shape[0] + kThreads - 1) / kThreads);
  cuda::launch(kOp, fill_packed, {dim3(static_cast<unsigned>(requests + tail)), dim3(kThreads)},
               stream, params);
}

}  // namespace fovea::internal
