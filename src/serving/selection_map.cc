#include "src/serving/selection_map.h"

#include <algorithm>
#include <limits>

#include "fovea/plan.h"
#include "src/core/access.h"
#include "src/core/parallel.h"

namespace fovea::internal {
namespace {

int32_t slot_of(int32_t page, int64_t page_size, int64_t offset) {
  const int64_t slot = page * page_size + offset;
  return page < 0 || slot > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(slot);
}

// Maps one position of one row.
class RowMapper {
 public:
  RowMapper(const SelectionMap& map, int64_t row) : map_(map) {
    if (map.transform == IndexTransform::kRagged) {
      offset_ = access<const int32_t, 1>(map.row_offset)(row);
    } else if (map.transform == IndexTransform::kPaged) {
      const auto page_table = access<const int32_t, 2>(map.page_table);
      const int64_t request = access<const int32_t, 1>(map.row_to_request)(row);
      if (request < 0 || request >= page_table.shape[0]) return;
      pages_ = page_table.row(request);
      num_pages_ = page_table.shape[1];
    }
  }

  int32_t operator()(int64_t position) const {
    switch (map_.transform) {
      case IndexTransform::kLocal:
        return static_cast<int32_t>(position);
      case IndexTransform::kRagged:
        return static_cast<int32_t>(
            std::min<int64_t>(position + offset_, std::numeric_limits<int32_t>::max()));
      case IndexTransform::kPaged:
        break;
    }
    const int64_t page = position / map_.page_size;
    if (page >= num_pages_) return -1;
    return slot_of(pages_[page], map_.page_size, position - page * map_.page_size);
  }

 private:
  const SelectionMap& map_;
  const int32_t* pages_ = nullptr;
  int64_t num_pages_ = 0;
  int64_t offset_ = 0;
};

void map_row(const SelectionMap& map, int64_t row) {
  const auto indices = access<int32_t, 2>(map.indices);
  const auto row_len = access<const int32_t, 1>(map.row_len);
  const int64_t width = indices.shape[1];
  int32_t* const out = indices.row(row);
  const int64_t len = row < row_len.shape[0] ? std::max(row_len(row), 0) : 0;
  const int64_t valid = std::min(len, width);
  if (valid > 0) {
    const RowMapper mapper(map, row);
    const bool identity = !map.positions.defined() || len <= width;
    const auto positions = access<const int32_t, 2>(map.positions);
    for (int64_t i = 0; i < valid; ++i) {
      const int64_t position = identity ? i : positions(row, i);
      out[i] = position < 0 || position >= len ? -1 : mapper(position);
    }
  }
  std::fill(out + valid, out + width, -1);
}

}  // namespace

void map_selection(const SelectionMap& map, const Device& device, Stream stream) {
  begin_launch("map_selection");
  if (device.kind == DeviceKind::kCuda) return map_selection_cuda_portable(map, device, stream);
  const ThreadScope threads(device.num_threads);
  ParallelFor(map.indices.shape[0], 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) map_row(map, row);
  });
}

void mask_slots(const ConstTensorView& row_to_request, const ConstTensorView& slots,
                const TensorView& store_slots, const Device& device, Stream stream) {
  begin_launch("mask_slots");
  if (device.kind == DeviceKind::kCuda) {
    return mask_slots_cuda_portable(row_to_request, slots, store_slots, device, stream);
  }
  const auto request = access<const int32_t, 1>(row_to_request);
  const auto in = access<const int32_t, 1>(slots);
  const auto out = access<int32_t, 1>(store_slots);
  for (int64_t row = 0; row < out.shape[0]; ++row) out(row) = request(row) < 0 ? -1 : in(row);
}

void list_slots(const SlotList& list, const Device& device, Stream stream) {
  begin_launch("list_slots");
  if (device.kind == DeviceKind::kCuda) return list_slots_cuda_portable(list, device, stream);
  const auto pages = access<const int32_t, 2>(list.page_table);
  const auto indptr = access<const int32_t, 1>(list.kv_indptr);
  const auto out = access<int32_t, 1>(list.slots);
  const int64_t page_size = list.page_size;
  const ThreadScope threads(device.num_threads);
  ParallelFor(pages.shape[0], 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t last = std::min<int64_t>(indptr(r + 1), out.shape[0]);
      for (int64_t i = indptr(r); i < last; ++i) {
        const int64_t position = i - indptr(r);
        const int64_t page = position / page_size;
        out(i) =
            page < pages.shape[1] ? slot_of(pages(r, page), page_size, position % page_size) : -1;
      }
    }
  });
}

}  // namespace fovea::internal
