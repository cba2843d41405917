#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/serving/selection_map.h"

namespace fovea::internal {
namespace {

constexpr int kThreads = 256;

__device__ int32_t slot_of(int32_t page, int32_t page_size, int32_t offset) {
  const int64_t slot = int64_t{page} * page_size + offset;
  return page < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

struct MapParams {
  IndexTransform transform;
  int32_t page_size;
  int64_t num_rows;                           // E
  Accessor<const int32_t, 2> positions;       // may be null
  Accessor<const int32_t, 1> row_len;         // [E]
  Accessor<const int32_t, 2> page_table;      // kPaged
  Accessor<const int32_t, 1> row_to_request;  // kPaged
  Accessor<const int32_t, 1> row_offset;      // kRagged
  Accessor<int32_t, 2> indices;               // [T, K]
};

// One block a row; a thread reads the position that it replaces, so that both may be one array.
__global__ void __launch_bounds__(kThreads)
    map_selection_kernel(const __grid_constant__ MapParams params) {
  const int64_t row = blockIdx.x;
  const auto width = static_cast<int32_t>(params.indices.shape[1]);
  int32_t* const out = params.indices.row(row);
  const int32_t len = row < params.num_rows && params.row_len(row) > 0 ? params.row_len(row) : 0;
  const int32_t valid = len < width ? len : width;
  const int32_t* const positions =
      params.positions && len > width ? params.positions.row(row) : nullptr;
  const int32_t* pages = nullptr;
  int64_t offset = 0;
  if (valid > 0 && params.transform == IndexTransform::kRagged) offset = params.row_offset(row);
  if (valid > 0 && params.transform == IndexTransform::kPaged) {
    const int64_t request = params.row_to_request(row);
    if (request >= 0 && request < params.page_table.shape[0])
      pages = params.page_table.row(request);
  }
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < width; i += kThreads) {
    int32_t index = -1;
    const int32_t position = i >= valid ? -1 : positions != nullptr ? positions[i] : i;
    if (position >= 0 && position < len) {
      if (params.transform == IndexTransform::kPaged) {
        const int32_t page = position / params.page_size;
        if (pages != nullptr && page < params.page_table.shape[1]) {
          index = slot_of(pages[page], params.page_size, position - page * params.page_size);
        }
      } else {
        const int64_t shifted = position + offset;
        index = shifted > INT32_MAX ? INT32_MAX : static_cast<int32_t>(shifted);
      }
    }
    out[i] = index;
  }
}

__global__ void __launch_bounds__(kThreads)
    mask_slots_kernel(const int32_t* row_to_request, const int32_t* slots, int32_t* store_slots,
                      int64_t rows) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < rows) store_slots[row] = row_to_request[row] < 0 ? -1 : slots[row];
}

struct ListParams {
  Accessor<const int32_t, 2> page_table;
  const int32_t* kv_indptr;
  int64_t requests;
  int32_t page_size;
  int32_t* slots;
  int64_t capacity;
};

__global__ void __launch_bounds__(kThreads)
    list_slots_kernel(const __grid_constant__ ListParams params) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= params.capacity || i >= params.kv_indptr[params.requests]) return;
  // Requests that end at or before entry i; the next one holds it.
  const int64_t r = cuda::count_up_to([&](int64_t k) { return int64_t{params.kv_indptr[k + 1]}; },
                                      params.requests, i);
  if (r >= params.requests) return;
  const auto position = static_cast<int32_t>(i - params.kv_indptr[r]);
  if (position < 0) return;
  const int32_t page = position / params.page_size;
  params.slots[i] = page < params.page_table.shape[1]
                        ? slot_of(params.page_table(r, page), params.page_size,
                                  position - page * params.page_size)
                        : -1;
}

template <class View>
auto entries(const View& view) {
  return static_cast<const int32_t*>(view.data);
}

}  // namespace

void map_selection_cuda_portable(const SelectionMap& map, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  MapParams params{};
  params.transform = map.transform;
  params.page_size = static_cast<int32_t>(map.page_size);
  params.num_rows = map.row_len.shape[0];
  params.positions = access<const int32_t, 2>(map.positions);
  params.row_len = access<const int32_t, 1>(map.row_len);
  if (map.transform == IndexTransform::kPaged) {
    params.page_table = access<const int32_t, 2>(map.page_table);
    params.row_to_request = access<const int32_t, 1>(map.row_to_request);
  } else if (map.transform == IndexTransform::kRagged) {
    params.row_offset = access<const int32_t, 1>(map.row_offset);
  }
  params.indices = access<int32_t, 2>(map.indices);
  cuda::launch("map_selection", map_selection_kernel,
               {dim3(cuda::grid_blocks(params.indices.shape[0], 1)), dim3(kThreads)}, stream,
               params);
}

void mask_slots_cuda_portable(const ConstTensorView& row_to_request, const ConstTensorView& slots,
                              const TensorView& store_slots, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  const int64_t rows = store_slots.shape[0];
  cuda::launch("mask_slots", mask_slots_kernel,
               {dim3(cuda::grid_blocks(rows, kThreads)), dim3(kThreads)}, stream,
               entries(row_to_request), entries(slots), static_cast<int32_t*>(store_slots.data),
               rows);
}

void list_slots_cuda_portable(const SlotList& list, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  ListParams params{};
  params.page_table = access<const int32_t, 2>(list.page_table);
  params.kv_indptr = entries(list.kv_indptr);
  params.requests = list.kv_indptr.shape[0] - 1;
  params.page_size = static_cast<int32_t>(list.page_size);
  params.slots = static_cast<int32_t*>(list.slots.data);
  params.capacity = list.slots.shape[0];
  cuda::launch("list_slots", list_slots_kernel,
               {dim3(cuda::grid_blocks(params.capacity, kThreads)), dim3(kThreads)}, stream,
               params);
}

}  // namespace fovea::internal
