#pragma once

#include <cstdint>

#include "fovea/device.h"
#include "fovea/metadata.h"
#include "fovea/tensor.h"

/// From positions of a request to what attention reads. The tensors are memory of `device`; a GPU
/// gets the work in the order of `stream`. Same bits on every device.
namespace fovea::internal {

struct SelectionMap {
  IndexTransform transform = IndexTransform::kPaged;
  int64_t page_size = 0;           ///< kPaged: P.
  ConstTensorView positions;       ///< optional i32 [>= E, K]; absent: the identity 0..row_len-1
  ConstTensorView row_len;         ///< i32 [E]
  ConstTensorView page_table;      ///< kPaged: i32 [R, max_pages]
  ConstTensorView row_to_request;  ///< kPaged: i32 [E]
  ConstTensorView row_offset;      ///< kRagged: i32 [E]
  TensorView indices;              ///< i32 [T, K]; may be the memory of positions
};

/// Writes every row of `indices`: the mapped positions of its first min(row_len, K) entries, then
/// -1; rows >= E are -1. A row that fits K is the identity whatever `positions` says, because a
/// selection made earlier may lack its newest tokens. Positions outside 0..row_len-1, past the page
/// table, or on a negative page give -1 in their place; so does a request outside 0..R-1.
void map_selection(const SelectionMap& map, const Device& device, Stream stream = {});

/// Copies `slots` i32 [>= E] to `store_slots` i32 [E], -1 for the rows of no request.
void mask_slots(const ConstTensorView& row_to_request, const ConstTensorView& slots,
                const TensorView& store_slots, const Device& device, Stream stream = {});

struct SlotList {
  ConstTensorView page_table;  ///< i32 [R, max_pages]
  ConstTensorView kv_indptr;   ///< i32 [R + 1], ascending
  int64_t page_size = 0;
  TensorView slots;  ///< i32 [>= sum L]
};

/// Writes for each request r and position p < L the slot of that token at kv_indptr[r] + p; -1
/// where the page is negative or past the table. Entries past the sum are not written, and nothing
/// past the array.
void list_slots(const SlotList& list, const Device& device, Stream stream = {});

// On a GPU.
void map_selection_cuda_portable(const SelectionMap& map, const Device& device, Stream stream);
void mask_slots_cuda_portable(const ConstTensorView& row_to_request, const ConstTensorView& slots,
                              const TensorView& store_slots, const Device& device, Stream stream);
void list_slots_cuda_portable(const SlotList& list, const Device& device, Stream stream);

}  // namespace fovea::internal
