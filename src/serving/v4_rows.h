#pragma once

#include <cstdint>

#include "fovea/device.h"
#include "fovea/tensor.h"

/// What rows of DeepSeek-V4 see beside their window, and the states of compressors. All of it in
/// the order of `stream` on a GPU; nothing allocates or waits; all may be captured.
namespace fovea::internal {

/// Facts of the rows of a step, from what metadata_refresh and build_swa_indices have written.
struct V4RowFacts {
  ConstTensorView row_len;         ///< i32 [E]: position + 1
  ConstTensorView row_to_request;  ///< i32 [T]
  ConstTensorView window_indices;  ///< i32 [T, Wi]
  ConstTensorView window_len;      ///< i32 [T]
  int64_t topk = 0;
  TensorView positions;     ///< i32 [T]: -1 in padding
  TensorView window_slots;  ///< i32 [T]: slot of the row's own token; -1 in padding
  TensorView csa_len;       ///< i32 [T]: n_c of ratio 4; 0 in padding
  TensorView selected_len;  ///< i32 [T]: min(csa_len, topk)
  TensorView hca_len;       ///< i32 [T]: n_c of ratio 128; 0 in padding
};
/// Padding: rows from E on, without a request, or with row_len <= 0.
void fill_row_facts(const V4RowFacts& facts, const Device& device, Stream stream);

/// state[to[r]] becomes a copy of state[from[r]], for f32 states of any shape. A slot outside the
/// states on either side, or equal slots: nothing. `to` names no slot twice, nor one that `from`
/// names for another request.
struct StateCopy {
  ConstTensorView source;  ///< f32 [states, ...]
  ConstTensorView from;    ///< i32 [R]
  TensorView target;       ///< f32 [states', ...], may be `source`
  ConstTensorView to;      ///< i32 [R]
};
void copy_states(const StateCopy& copy, const Device& device, Stream stream);

/// The rings of requests as a call that had ended after snapshot_pos rows would leave them.
struct StateSnapshots {
  ConstTensorView kv_gate;   ///< f32 [E, 2 * C]
  ConstTensorView ape;       ///< f32 [ratio, C]
  ConstTensorView kv_len;    ///< i32 [R]
  ConstTensorView q_indptr;  ///< i32 [R + 1]
  ConstTensorView slot;      ///< i32 [R]: holds the tokens before the call
  ConstTensorView seq;       ///< i32 [M]
  ConstTensorView pos;
  ConstTensorView to;
  TensorView state;  ///< f32 [states, S, 2, C]
};
/// Token t goes to entry t mod S, its logits with ape added. A request outside [0, R), a position
/// outside its rows, or a target outside the states: nothing. Without a state in `slot` the tokens
/// before the call are left out.
void snapshot_states(const StateSnapshots& snapshots, const Device& device, Stream stream);

/// kept[t] = row_to_request[t], -1 for the rows of a request from accepted[r] on; `rows` rows a
/// request.
struct AcceptedRows {
  ConstTensorView row_to_request;  ///< i32 [T]
  ConstTensorView accepted;        ///< i32 [R]
  int64_t rows = 1;
  TensorView kept;  ///< i32 [T]
};
void keep_accepted(const AcceptedRows& rows, const Device& device, Stream stream);

/// own[r] = r where slot[r] >= 0, else -1.
void own_slots(const ConstTensorView& slot, const TensorView& own, const Device& device,
               Stream stream);

// On a GPU.
void fill_row_facts_cuda_portable(const V4RowFacts& facts, const Device& device, Stream stream);
void copy_states_cuda_portable(const StateCopy& copy, const Device& device, Stream stream);
void snapshot_states_cuda_portable(const StateSnapshots& snapshots, const Device& device,
                                   Stream stream);
void keep_accepted_cuda_portable(const AcceptedRows& rows, const Device& device, Stream stream);
void own_slots_cuda_portable(const ConstTensorView& slot, const TensorView& own,
                             const Device& device, Stream stream);

}  // namespace fovea::internal
