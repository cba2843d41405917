#include "src/core/no_cuda.h"

#include "src/serving/selection_map.h"
#include "src/serving/step_rows.h"
#include "src/serving/v4_rows.h"
#include "src/serving/window_copy.h"

// The kernels of the room in a build without CUDA: no backend has a device that asks for them.
namespace fovea::internal {

void map_selection_cuda_portable(const SelectionMap&, const Device&, Stream) {
  without_cuda("map_selection");
}
void mask_slots_cuda_portable(const ConstTensorView&, const ConstTensorView&, const TensorView&,
                              const Device&, Stream) {
  without_cuda("mask_slots");
}
void list_slots_cuda_portable(const SlotList&, const Device&, Stream) {
  without_cuda("list_slots");
}
void pick_entries_cuda_portable(const ConstTensorView&, std::span<const int32_t>, const TensorView&,
                                const Device&, Stream) {
  without_cuda("pick_entries");
}
void clear_padding_cuda_portable(const PaddingRows&, const Device&, Stream) {
  without_cuda("clear_padding");
}
void copy_windows_cuda_portable(const WindowCopy&, bool, const Device&, Stream) {
  without_cuda("copy_windows");
}
void fill_row_facts_cuda_portable(const V4RowFacts&, const Device&, Stream) {
  without_cuda("v4_row_facts");
}
void copy_states_cuda_portable(const StateCopy&, const Device&, Stream) {
  without_cuda("v4_copy_states");
}
void snapshot_states_cuda_portable(const StateSnapshots&, const Device&, Stream) {
  without_cuda("v4_snapshot_states");
}
void keep_accepted_cuda_portable(const AcceptedRows&, const Device&, Stream) {
  without_cuda("v4_keep_accepted");
}
void own_slots_cuda_portable(const ConstTensorView&, const TensorView&, const Device&, Stream) {
  without_cuda("v4_own_slots");
}

}  // namespace fovea::internal
