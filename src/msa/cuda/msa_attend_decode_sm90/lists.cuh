#pragma once

#include "src/core/cuda/cached_copy.cuh"
#include "src/msa/cuda/msa_attend_decode_sm90/config.h"

namespace fovea::internal::msa::decode {

// Steps of the list: only its last block may be seen in part.
__device__ inline RowList count_list(const AttendParams& params, const MsaRow& row, int num_blocks,
                                     int last_block) {
  // max_pages * block_size fits 32 bits.
  const auto end = static_cast<int32_t>(msa_row_end(row, params.causal));
  if (num_blocks == 0) return {end, 0};
  const int seen = min(end - last_block * params.block_size, params.block_size);
  return {end, (num_blocks - 1) * params.steps_per_block + (seen + kStepKeys - 1) / kStepKeys};
}
__device__ inline RowList count_list(const AttendParams& params, const MsaRow& row,
                                     const ListMemory& list, int num_blocks) {
  return count_list(params, row, num_blocks, num_blocks > 0 ? list.blocks[num_blocks - 1] : 0);
}

// seek_msa_place(), in few instructions where all requests up to that of the row have one row.
template <int kLoads>
__device__ MsaRowPlace place_of_row(const MsaBatch& batch, int64_t t,
                                    const MsaOffsets<kLoads>& offsets) {
  const auto end = static_cast<int32_t>(t) + 1;
  bool plain = end < kLoads * kWarpThreads && end <= static_cast<int32_t>(batch.num_requests());
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int i = k * kWarpThreads + static_cast<int>(threadIdx.x) % kWarpThreads;
    plain = plain && (i > end || offsets.x[k] == i);
  }
  if (__all_sync(0xFFFFFFFF, plain)) return {t, {t, t + 1}};
  return seek_msa_place(batch, t, offsets);
}

// read_list() that asks for what it needs as early as addresses allow: lists and offsets of
// requests, then lengths and pages of the request that is most likely that of the row (the only
// one, or that of its number), one way to memory each time; calls meanwhile() on the first one.
// Lanes hold the entries of a list that is not longer than a warp.
template <class Meanwhile>
__device__ RowList read_list_early(const AttendParams& params, int64_t t, int64_t kv_head,
                                   const ListMemory& list, Meanwhile meanwhile) {
  const MsaAttendInputs& inputs = params.inputs;
  const MsaBatch& batch = params.rows.batch;
  const int lane = threadIdx.x % kWarpThreads;
  const int32_t n = lane < params.topk ? inputs.lists.row(kv_head, t)[lane] : -1;
  const bool sought = __builtin_expect(params.rows.offsets == nullptr, 1);
  const bool few = batch.num_requests() < kWarpThreads;
  MsaOffsets<1> few_offsets;
  MsaOffsets<kMsaManyLoads> many_offsets;
  if (few) {
    few_offsets.load(batch, 0);
  } else if (sought) {
    many_offsets.load(batch, 0);
  }
  const auto requests = static_cast<int32_t>(batch.num_requests());
  const int32_t likely = requests == 1 ? 0 : min(static_cast<int32_t>(t), requests - 1);
  const auto max_pages = static_cast<int32_t>(inputs.page_table.shape[1]);
  const auto page_of = [&](int64_t request) {
    return n >= 0 && n < max_pages ? inputs.page_table(request, n) : -1;
  };
  int32_t page = -1, len = 0;
  if (likely >= 0) {
    constexpr int kOfLine = 32;
    if (kOfLine * lane < max_pages) cuda::prefetch(&inputs.page_table(likely, kOfLine * lane));
    len = batch.kv_len(likely);
  }
  meanwhile();
  if (likely >= 0) page = page_of(likely);
  const MsaRowPlace place = !sought ? find_msa_place(params.rows, t)
                            : few   ? place_of_row(batch, t, few_offsets)
                                    : place_of_row(batch, t, many_offsets);
  if (place.request < 0) return {0, 0};
  if (place.request != likely) {
    page = page_of(place.request);
    len = batch.kv_len(place.request);
  }
  const MsaRow row = batch.row(place.request, place.range, t, len);
  if (__builtin_expect(params.topk > kWarpThreads, 0)) {
    return count_list(params, row, list, read_list(params, row, t, kv_head, list));
  }
  // is_empty(), without its division.
  if (row.position < 0) return {0, 0};
  const bool seen = page >= 0 && page < inputs.k.num_pages &&
                    msa_visible_tokens(row, n, params.block_size, params.causal) > 0;

  // Most lists are what they should be.
  const uint32_t all_seen = __ballot_sync(0xFFFFFFFF, seen);
  const int32_t left = __shfl_up_sync(0xFFFFFFFF, n, 1);
  const bool rises = !seen || lane == 0 || n > left;
  if ((all_seen & (all_seen + 1)) == 0 && __all_sync(0xFFFFFFFF, rises)) {
    if (seen) {
      list.blocks[lane] = n;
      list.pages[lane] = page;
    }
    const int num_blocks = __popc(all_seen);
    return count_list(params, row, num_blocks,
                      __shfl_sync(0xFFFFFFFF, n, (num_blocks - 1) % kWarpThreads));
  }

  // Those that count, in the order of the list; then in their own, each once.
  const auto keep = [&](bool kept, int32_t block, int32_t its_page) {
    const uint32_t all = __ballot_sync(0xFFFFFFFF, kept);
    if (kept) {
      const int at = __popc(all & ((1u << lane) - 1));
      list.blocks[at] = block;
      list.pages[at] = its_page;
    }
    __syncwarp();
    return __popc(all);
  };
  const int count = keep(seen, n, page);
  const bool present = lane < count;
  const auto before = [&] { return lane > 0 ? list.blocks[lane - 1] : -1; };
  if (!__any_sync(0xFFFFFFFF, present && list.blocks[lane] <= before())) {
    return count_list(params, row, list, count);
  }

  const int32_t own = present ? list.blocks[lane] : 0;
  const int32_t own_page = present ? list.pages[lane] : 0;
  int rank = 0;
#pragma unroll 4
  for (int j = 0; j < count; ++j) {
    const int32_t other = list.blocks[j];
    rank += other < own || (other == own && j < lane) ? 1 : 0;
  }
  __syncwarp();
  if (present) {
    list.blocks[rank] = own;
    list.pages[rank] = own_page;
  }
  __syncwarp();
  const int32_t sorted = present ? list.blocks[lane] : 0;
  const int32_t sorted_page = present ? list.pages[lane] : 0;
  const bool fresh = present && sorted != before();
  __syncwarp();
  return count_list(params, row, list, keep(fresh, sorted, sorted_page));
}

}  // namespace fovea::internal::msa::decode
