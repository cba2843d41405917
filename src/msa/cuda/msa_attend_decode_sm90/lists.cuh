#pragma once

#include "src/core/cuda/cached_copy.cuh"
#include "src/msa/cuda/msa_attend_kernels.cuh"

namespace fovea::internal::msa::decode {

// read_list() that asks for what it needs as early as addresses allow: lists and offsets of
// requests, then lengths and pages, one way to memory each time; calls meanwhile() on the first
// one. Returns the row, too. Lanes hold the entries of a list that is not longer than a warp.
template <class Meanwhile>
__device__ int read_list_early(const AttendParams& params, int64_t t, int64_t kv_head,
                               const ListMemory& list, MsaRow* row, Meanwhile meanwhile) {
  const MsaAttendInputs& inputs = params.inputs;
  const int lane = threadIdx.x % kWarpThreads;
  const int32_t n = lane < params.topk ? inputs.lists.row(kv_head, t)[lane] : -1;
  const auto& offsets = params.rows.batch.q_indptr;
  constexpr int kOfLine = 32;
  cuda::prefetch(&offsets(min(lane * kOfLine, static_cast<int>(offsets.shape[0]) - 1)));
  meanwhile();
  const MsaRowPlace place = __builtin_expect(params.rows.offsets != nullptr, 0)
                                ? find_msa_place(params.rows, t)
                                : seek_msa_place(params.rows.batch, t);
  int32_t page = -1;
  if (place.request >= 0 && n >= 0 && n < inputs.page_table.shape[1]) {
    page = inputs.page_table(place.request, n);
  }
  *row = place.row(params.rows.batch, t);
  if (__builtin_expect(params.topk > kWarpThreads, 0)) {
    return read_list(params, *row, t, kv_head, list);
  }
  // is_empty(), without its division.
  if (row->position < 0) return 0;
  const bool seen = page >= 0 && page < inputs.k.num_pages &&
                    msa_visible_tokens(*row, n, params.block_size, params.causal) > 0;

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
  if (!__any_sync(0xFFFFFFFF, present && list.blocks[lane] <= before())) return count;

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
  return keep(fresh, sorted, sorted_page);
}

}  // namespace fovea::internal::msa::decode
