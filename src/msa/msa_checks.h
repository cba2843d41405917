#pragma once

#include <cstdint>
#include <utility>

#include "fovea/msa_block_scores.h"
#include "fovea/msa_select_blocks.h"
#include "fovea/tensor.h"
#include "src/msa/msa_rows.h"

/// Checks that several operators of the room share.
namespace fovea::internal {

/// Bounds of T, R and of the page table's columns; block_size; page_size, which must be it.
void check_msa_bounds(const char* op, int64_t max_rows, int64_t max_requests, int64_t max_pages,
                      int64_t block_size, int64_t page_size);

/// The index branch's own: heads, channels, scale.
void check_msa_index(const char* op, int64_t num_heads, int64_t head_dim, float index_scale);

void check_msa_score(const char* op, BlockScore score);

/// The selection's own; `num_kv_heads` is resolved already.
void check_msa_selection(const char* op, const MsaSelectBlocksProblem& problem);

/// `kv_len`, `q_indptr`, `q_offset` of a batch; at most max_requests requests.
void check_msa_batch(const char* op, const ConstTensorView& kv_len, const ConstTensorView& q_indptr,
                     const ConstTensorView& q_offset, int64_t max_requests);

/// `page_table` of that batch, at most max_pages wide.
void check_msa_page_table(const char* op, const ConstTensorView& page_table, int64_t num_requests,
                          int64_t max_pages);

/// Rows (the last axis) start at multiples of 16 bytes.
void check_msa_alignment(const char* op, const char* name, const ConstTensorView& tensor);

/// Slots of a pool fill whole pages.
void check_msa_slots(const char* op, const char* name, int64_t slots, int64_t block_size);

/// `index_k` bf16 [slots, 1, head_dim].
void check_msa_index_k(const char* op, const ConstTensorView& index_k, int64_t head_dim,
                       int64_t block_size);

/// `blocks` [Hkv, T, width] or [T, Hkv, width].
void check_msa_blocks(const char* op, const ConstTensorView& blocks, BlocksLayout layout,
                      int64_t num_kv_heads, int64_t rows, int64_t width);

/// Columns of a selection's list.
inline int64_t msa_list_width(IndexReduce reduce, int64_t topk, int64_t num_heads,
                              int64_t num_kv_heads) {
  return reduce == IndexReduce::kUnion ? num_heads / num_kv_heads * topk : topk;
}

/// The batch of checked tensors.
inline MsaBatch msa_batch(const ConstTensorView& kv_len, const ConstTensorView& q_indptr,
                          const ConstTensorView& q_offset, int64_t num_rows, int64_t max_pages,
                          int64_t block_size) {
  return {access<const int32_t, 1>(kv_len),
          access<const int32_t, 1>(q_indptr),
          access<const int32_t, 1>(q_offset),
          num_rows,
          max_pages,
          block_size};
}

/// Lists [KV head][row][entry] of either layout.
template <class T, class View>
Accessor<T, 3> access_blocks(const View& blocks, BlocksLayout layout) {
  Accessor<T, 3> lists = access<T, 3>(blocks);
  if (layout == BlocksLayout::kRowMajor) {
    std::swap(lists.shape[0], lists.shape[1]);
    std::swap(lists.stride[0], lists.stride[1]);
  }
  return lists;
}

}  // namespace fovea::internal
