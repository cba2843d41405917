#include <cstring>

#include "src/batch/metadata_check_impl.h"

namespace fovea::internal {
namespace {

// Looks for one kind of fault at a time, in the order of requests and positions.
class CheckReference {
 public:
  CheckReference(const CheckedBatch& batch, MetadataFault fault) : batch_(batch) {
    tally_.fault = fault;
  }

  FaultTally find() {
    switch (tally_.fault) {
      case MetadataFault::kStoreSlot:
        find_store_slots();
        break;
      case MetadataFault::kIndexRange:
        find_indices();
        break;
      default:
        for (int64_t r = 0; r < batch_.num_requests(); ++r) {
          check_request(r);
          check_table(r);
        }
    }
    return tally_;
  }

 private:
  void add_if(bool is_faulty, int64_t request, int64_t position, int64_t value, int64_t limit) {
    if (!is_faulty) return;
    if (tally_.count == 0) {
      tally_.request = request;
      tally_.position = position;
      tally_.value = value;
      tally_.limit = limit;
    }
    ++tally_.count;
  }

  void check_request(int64_t r) {
    const bool has_ext_len = reads_ext_len(batch_.problem.mode);
    const int64_t len = batch_.kv_len(r), rows = batch_.num_rows(r);
    rows_before_end_ += rows;
    switch (tally_.fault) {
      case MetadataFault::kNegativeLength:
        return add_if(batch_.given_len(r) < 0, r, 0, batch_.given_len(r), 0);
      case MetadataFault::kRowsOverLength:
        return add_if(!batch_.has_keys_for_rows(r), r, 0, rows, len);
      case MetadataFault::kLengthOverWidth:
        return add_if(len > batch_.problem.table_width, r, 0, len, batch_.problem.table_width);
      case MetadataFault::kNegativeRows:
        return add_if(has_ext_len && batch_.ext_len(r) < 0, r, 0,
                      has_ext_len ? batch_.ext_len(r) : 0, 0);
      case MetadataFault::kRowCount:
        return add_if(rows > 0 && rows_before_end_ > batch_.row_capacity(), r, 0, rows_before_end_,
                      batch_.row_capacity());
      case MetadataFault::kPoolRow:
        return add_if(batch_.used_len(r) > 0 && !batch_.is_pool_row(batch_.pool_row(r)), r, 0,
                      batch_.pool_row(r), batch_.tensors.req_to_token.shape[0]);
      default:
        return;
    }
  }

  void check_table(int64_t r) {
    const bool is_range = tally_.fault == MetadataFault::kSlotRange;
    if (!is_range && tally_.fault != MetadataFault::kSlotLayout) return;
    const int64_t row = batch_.pool_row(r), page_size = batch_.problem.page_size;
    if (!batch_.is_pool_row(row)) return;
    const auto req_to_token = access<const int32_t, 2>(batch_.tensors.req_to_token);
    for (int64_t p = 0; p < batch_.used_len(r); ++p) {
      const int64_t slot = req_to_token(row, p);
      const int64_t page = req_to_token(row, p / page_size * page_size) / page_size;
      const int64_t expected = page * page_size + p % page_size;
      const bool is_faulty =
          is_range ? !batch_.is_slot(slot) : !batch_.is_in_place(r, page, slot, expected);
      add_if(is_faulty, r, p, slot, is_range ? batch_.problem.capacity : expected);
    }
  }

  void find_store_slots() {
    if (!batch_.tensors.out_cache_loc.defined()) return;
    const auto slots = access<const int32_t, 1>(batch_.tensors.out_cache_loc);
    for (int64_t t = 0; t < slots.shape[0]; ++t) {
      add_if(slots(t) != -1 && !batch_.is_slot(slots(t)), t, 0, slots(t), batch_.problem.capacity);
    }
  }

  void find_indices() {
    if (!batch_.tensors.topk_indices.defined()) return;
    const auto indices = access<const int32_t, 2>(batch_.tensors.topk_indices);
    int64_t t = 0;
    for (int64_t r = 0; r < batch_.num_requests(); ++r) {
      for (int64_t i = 0; i < batch_.num_rows(r) && t < indices.shape[0]; ++i, ++t) {
        const int64_t row_len = batch_.used_len(r) - batch_.num_rows(r) + 1 + i;
        for (int64_t c = 0; c < std::min(row_len, indices.shape[1]); ++c) {
          add_if(indices(t, c) != -1 && !batch_.is_slot(indices(t, c)), t, c, indices(t, c),
                 batch_.problem.capacity);
        }
      }
    }
  }

  const CheckedBatch& batch_;
  FaultTally tally_;
  int64_t rows_before_end_ = 0;  // of the request that is looked at
};

}  // namespace

void metadata_check_ref(const MetadataCheckProblem& problem, const Device&,
                        const MetadataCheckTensors& tensors, Workspace) {
  const CheckedBatch batch{problem, tensors};
  FaultTally found;
  for (auto fault = static_cast<int32_t>(MetadataFault::kNegativeLength);
       fault <= static_cast<int32_t>(MetadataFault::kIndexRange) && found.count == 0; ++fault) {
    found = CheckReference(batch, static_cast<MetadataFault>(fault)).find();
  }
  if (found.count == 0) found = {};
  const MetadataReport report = found.report();
  std::memcpy(tensors.error_word.data, &report, sizeof(report));
}

}  // namespace fovea::internal
