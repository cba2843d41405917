#include <cstring>
#include <mutex>
#include <utility>

#include "src/batch/metadata_check_impl.h"
#include "src/core/parallel.h"

namespace fovea::internal {
namespace {

// Keeps the smallest fault and the count of its kind. The order of the pieces does not matter: a
// piece that has a fault of the smallest kind has counted all of its own of that kind.
void merge(const FaultTally& other, FaultTally* tally) {
  if (other.count == 0) return;
  if (tally->count == 0 || other.fault < tally->fault) {
    *tally = other;
    return;
  }
  if (other.fault > tally->fault) return;
  const int64_t count = tally->count + other.count;
  if (std::pair(other.request, other.position) < std::pair(tally->request, tally->position)) {
    *tally = other;
  }
  tally->count = count;
}

void add(MetadataFault fault, int64_t request, int64_t position, int64_t value, int64_t limit,
         FaultTally* tally) {
  merge({fault, request, position, value, limit, 1}, tally);
}

struct CpuCheck {
  CheckedBatch batch;

  void check_request(int64_t r, FaultTally* tally) const {
    const int64_t len = batch.kv_len(r), rows = batch.num_rows(r);
    const int64_t width = batch.problem.table_width;
    if (batch.given_len(r) < 0) {
      add(MetadataFault::kNegativeLength, r, 0, batch.given_len(r), 0, tally);
    }
    if (!batch.has_keys_for_rows(r)) {
      add(MetadataFault::kRowsOverLength, r, 0, rows, len, tally);
    }
    if (len > width) add(MetadataFault::kLengthOverWidth, r, 0, len, width, tally);
    if (reads_ext_len(batch.problem.mode) && batch.ext_len(r) < 0) {
      add(MetadataFault::kNegativeRows, r, 0, batch.ext_len(r), 0, tally);
    }
    const int64_t used = batch.used_len(r), pool_row = batch.pool_row(r);
    if (used == 0) return;
    if (batch.is_pool_row(pool_row)) {
      const auto req_to_token = access<const int32_t, 2>(batch.tensors.req_to_token);
      check_slots(r, req_to_token.row(pool_row), used, tally);
    } else {
      add(MetadataFault::kPoolRow, r, 0, pool_row, batch.tensors.req_to_token.shape[0], tally);
    }
  }

  void check_slots(int64_t request, const int32_t* slots, int64_t used, FaultTally* tally) const {
    const int64_t page_size = batch.problem.page_size;
    for (int64_t first = 0; first < used; first += page_size) {
      const int64_t count = std::min(page_size, used - first);
      if (is_page(slots + first, count)) continue;
      const int64_t page = slots[first] / page_size;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = slots[first + i], expected = page * page_size + i;
        if (!batch.is_slot(slot)) {
          add(MetadataFault::kSlotRange, request, first + i, slot, batch.problem.capacity, tally);
        } else if (!batch.is_in_place(request, page, slot, expected)) {
          add(MetadataFault::kSlotLayout, request, first + i, slot, expected, tally);
        }
      }
    }
  }

  // The slots of one page, all in range: one compare per slot, without a branch.
  bool is_page(const int32_t* slots, int64_t count) const {
    const int32_t first = slots[0];
    if (first < 0 || first % batch.problem.page_size != 0) return false;
    if (first + count > batch.problem.capacity) return false;
    int32_t differences = 0;
    for (int64_t i = 0; i < count; ++i) differences |= slots[i] ^ static_cast<int32_t>(first + i);
    return differences == 0;
  }

  // Rows of the batch end to end: a request that ends past the arrays loses rows.
  void check_row_count(FaultTally* tally) const {
    if (!reads_ext_len(batch.problem.mode)) return;
    const int64_t capacity = batch.row_capacity();
    int64_t end = 0;
    for (int64_t r = 0; r < batch.num_requests(); ++r) {
      end += batch.num_rows(r);
      if (batch.num_rows(r) > 0 && end > capacity) {
        add(MetadataFault::kRowCount, r, 0, end, capacity, tally);
      }
    }
  }

  // Slots or -1; -1 becomes 0 and everything outside becomes more than the capacity.
  bool are_slots(const int32_t* slots, int64_t count) const {
    const auto capacity = static_cast<uint32_t>(batch.problem.capacity);
    bool all = true;
    for (int64_t i = 0; i < count; ++i) all &= static_cast<uint32_t>(slots[i]) + 1 <= capacity;
    return all;
  }

  void check_store_slots(int64_t begin, int64_t end, FaultTally* tally) const {
    const auto* const slots = static_cast<const int32_t*>(batch.tensors.out_cache_loc.data);
    if (are_slots(slots + begin, end - begin)) return;
    for (int64_t t = begin; t < end; ++t) {
      if (are_slots(slots + t, 1)) continue;
      add(MetadataFault::kStoreSlot, t, 0, slots[t], batch.problem.capacity, tally);
    }
  }

  void check_indices(int64_t begin, int64_t end, FaultTally* tally) const {
    const auto indices = access<const int32_t, 2>(batch.tensors.topk_indices);
    int64_t request = 0, first_row = 0;
    for (int64_t t = begin; t < end; ++t) {
      while (request < batch.num_requests() && t >= first_row + batch.num_rows(request)) {
        first_row += batch.num_rows(request++);
      }
      if (request == batch.num_requests()) return;
      const int64_t row_len = batch.used_len(request) - batch.num_rows(request) + 1 + t - first_row;
      const int64_t used = std::clamp<int64_t>(row_len, 0, indices.shape[1]);
      const int32_t* const row = indices.row(t);
      if (are_slots(row, used)) continue;
      for (int64_t c = 0; c < used; ++c) {
        if (are_slots(row + c, 1)) continue;
        add(MetadataFault::kIndexRange, t, c, row[c], batch.problem.capacity, tally);
      }
    }
  }
};

}  // namespace

void metadata_check_cpu(const MetadataCheckProblem& problem, const Device& device,
                        const MetadataCheckTensors& tensors, Workspace) {
  const CpuCheck check{{problem, tensors}};
  const ThreadScope threads(device.num_threads);
  FaultTally found;
  std::mutex mutex;
  const auto loop = [&](int64_t count, int64_t grain, auto check_piece) {
    ParallelFor(count, grain, [&](int64_t begin, int64_t end, int) {
      FaultTally piece;
      check_piece(begin, end, &piece);
      if (piece.count == 0) return;
      const std::lock_guard<std::mutex> lock(mutex);
      merge(piece, &found);
    });
  };
  check.check_row_count(&found);
  loop(tensors.seq_len.shape[0], 4, [&](int64_t begin, int64_t end, FaultTally* piece) {
    for (int64_t r = begin; r < end; ++r) check.check_request(r, piece);
  });
  if (tensors.out_cache_loc.defined()) {
    loop(tensors.out_cache_loc.shape[0], 4096, [&](int64_t begin, int64_t end, FaultTally* piece) {
      check.check_store_slots(begin, end, piece);
    });
  }
  if (tensors.topk_indices.defined()) {
    loop(tensors.topk_indices.shape[0], 16, [&](int64_t begin, int64_t end, FaultTally* piece) {
      check.check_indices(begin, end, piece);
    });
  }
  const MetadataReport report = found.report();
  std::memcpy(tensors.error_word.data, &report, sizeof(report));
}

}  // namespace fovea::internal
