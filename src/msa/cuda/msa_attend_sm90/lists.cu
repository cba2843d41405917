#include "src/core/cuda/scan.cuh"
#include "src/msa/cuda/msa_attend_sm90/config.h"

// What attend_items works on, from the lists of the rows.
namespace fovea::internal::msa::by_block {
namespace {

__global__ void __launch_bounds__(kListThreads) zero_counts(int32_t* counts, int64_t number) {
  const int64_t i = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (i < number) counts[i] = 0;
}

__global__ void __launch_bounds__(kRowWarps* kWarpThreads)
    count_places(const __grid_constant__ ByBlockParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  const AttendParams& attend = params.attend;
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t kv_head = blockIdx.x / static_cast<uint32_t>(attend.num_tiles);
  const int64_t tile = blockIdx.x % static_cast<uint32_t>(attend.num_tiles);
  const int64_t t = tile * kRowWarps + warp;
  if (t >= attend.num_rows) return;
  const ListMemory list(reinterpret_cast<int32_t*>(memory) + warp * 3 * attend.topk, attend.topk);
  const MsaRow row = find_msa_row(attend.rows, t);
  const int count = read_list(attend, row, t, kv_head, list);
  const int64_t pair = t * attend.num_kv_heads + kv_head;
  if (lane == 0) {
    params.num_places[pair] = count;
    if (kv_head == 0) params.row_end[t] = static_cast<int32_t>(msa_row_end(row, attend.causal));
  }
  const auto pages = static_cast<int32_t>(attend.inputs.page_table.shape[1]);
  const auto slab = static_cast<int32_t>(t / params.slab_rows);
  const int32_t first_cell =
      slab * params.cells_per_slab +
      (static_cast<int32_t>(kv_head) * static_cast<int32_t>(attend.rows.batch.num_requests()) +
       row.request) *
          pages;
  for (int i = lane; i < count; i += kWarpThreads) {
    const int32_t cell = first_cell + list.blocks[i];
    params.targets[pair * attend.topk + i] = {cell, atomicAdd(&params.counts[cell], 1)};
  }
}

// A thread block per slab and kCutThreads of its cells.
__global__ void __launch_bounds__(kCutThreads)
    cut_items(const __grid_constant__ ByBlockParams params) {
  __shared__ int64_t sums[cuda::kWarpThreads + 1];
  __shared__ int32_t starts[2];
  constexpr int64_t kOneItem = int64_t{1} << 32;  // items in the upper half, places in the lower
  const AttendParams& attend = params.attend;
  const uint32_t slab = blockIdx.y;
  const uint32_t in_slab = blockIdx.x * kCutThreads + threadIdx.x;
  const bool present = in_slab < static_cast<uint32_t>(params.cells_per_slab);
  const int64_t cell = int64_t{slab} * params.cells_per_slab + in_slab;
  const int32_t count = present ? params.counts[cell] : 0;
  const int64_t own = count + (count + params.item_places - 1) / params.item_places * kOneItem;
  int64_t total;
  const int64_t before = cuda::block_inclusive_sum(own, sums, &total) - own;
  if (threadIdx.x == 0) {
    SlabCounts& counts = params.slab_counts[slab];
    starts[0] = atomicAdd(&counts.places, static_cast<int32_t>(total));
    starts[1] = atomicAdd(&counts.items, static_cast<int32_t>(total >> 32));
  }
  __syncthreads();
  if (count == 0) return;
  const auto first = static_cast<int32_t>(int64_t{slab} * params.places_per_slab + starts[0] +
                                          static_cast<int32_t>(before));
  params.firsts[cell] = first;
  const auto pages = static_cast<uint32_t>(attend.inputs.page_table.shape[1]);
  const auto requests = static_cast<uint32_t>(attend.rows.batch.num_requests());
  const uint32_t block = in_slab % pages;
  const uint32_t request = in_slab / pages % requests;
  const auto kv_head = static_cast<int32_t>(in_slab / pages / requests);
  const int32_t page = attend.inputs.page_table(request, block);
  Item* item = params.items + int64_t{slab} * params.items_per_slab + starts[1] + (before >> 32);
  for (int32_t i = 0; i < count; i += params.item_places) {
    *item++ = {page, kv_head, first + i, min(count - i, params.item_places)};
  }
}

__global__ void __launch_bounds__(kListThreads)
    sort_places(const __grid_constant__ ByBlockParams params) {
  const AttendParams& attend = params.attend;
  const auto topk = static_cast<uint32_t>(attend.topk);
  const auto kv_heads = static_cast<uint32_t>(attend.num_kv_heads);
  const auto i = static_cast<uint32_t>(blockIdx.x) * kListThreads + threadIdx.x;
  const uint32_t pair = i / topk;
  const uint32_t index = i % topk;
  if (pair >= attend.num_rows * attend.num_kv_heads) return;
  if (static_cast<int32_t>(index) >= params.num_places[pair]) return;
  const Target target = params.targets[i];
  const uint32_t t = pair / kv_heads;
  const auto block = static_cast<int32_t>(static_cast<uint32_t>(target.cell) %
                                          static_cast<uint32_t>(attend.inputs.page_table.shape[1]));
  const uint32_t row = t % static_cast<uint32_t>(params.slab_rows);
  params.places[params.firsts[target.cell] + target.number] = {
      static_cast<int32_t>((row * kv_heads + pair % kv_heads) * topk + index),
      min(params.row_end[t] - block * attend.block_size, attend.block_size)};
}

}  // namespace

void launch_lists(const ByBlockParams& params, int num_slabs, Stream stream) {
  const AttendParams& attend = params.attend;
  const int64_t cells = params.cells_per_slab;
  auto* const counters = reinterpret_cast<int32_t*>(params.slab_counts);
  const int64_t num_counters = params.counts + cells * num_slabs - counters;
  cuda::launch(kAttendOp, zero_counts,
               {dim3(cuda::grid_blocks(num_counters, kListThreads)), dim3(kListThreads)}, stream,
               counters, num_counters);
  cuda::launch(kAttendOp, count_places,
               {dim3(static_cast<unsigned>(attend.num_tiles * attend.num_kv_heads)),
                dim3(kRowWarps * kWarpThreads), kRowWarps * ListMemory::bytes(attend.topk)},
               stream, params);
  cuda::launch(kAttendOp, cut_items,
               {dim3(cuda::grid_blocks(cells, kCutThreads), static_cast<unsigned>(num_slabs)),
                dim3(kCutThreads)},
               stream, params);
  const int64_t places = attend.num_rows * attend.num_kv_heads * attend.topk;
  cuda::launch(kAttendOp, sort_places,
               {dim3(cuda::grid_blocks(places, kListThreads)), dim3(kListThreads)}, stream, params);
}

}  // namespace fovea::internal::msa::by_block
