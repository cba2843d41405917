#include <algorithm>
#include <array>

#include "src/core/access.h"
#include "src/core/cuda/launch.cuh"
#include "src/serving/step_rows.h"

namespace fovea::internal {
namespace {

constexpr int kThreads = 256;
// Parameters of a kernel hold 4 KiB.
constexpr int kEntriesPerLaunch = 1000;

struct EntryParams {
  const int32_t* from;  // may be null: the values themselves
  int32_t* to;
  int32_t count;
  int32_t values[kEntriesPerLaunch];
};
static_assert(sizeof(EntryParams) <= 4096);

__global__ void __launch_bounds__(kThreads)
    pick_entries_kernel(const __grid_constant__ EntryParams params) {
  for (int i = static_cast<int>(threadIdx.x); i < params.count; i += kThreads) {
    const int32_t value = params.values[i];
    params.to[i] = params.from != nullptr ? params.from[value] : value;
  }
}

struct PaddingParams {
  const int32_t* num_rows;  // behind the last request; null: 0
  Accessor<bf16_t, 3> out;
  Accessor<float, 2> lse;  // may be null
};

// One block a row; the live ones have nothing to do.
__global__ void __launch_bounds__(kThreads)
    clear_padding_kernel(const __grid_constant__ PaddingParams params) {
  const int64_t row = blockIdx.x;
  if (params.num_rows != nullptr && row < *params.num_rows) return;
  const auto heads = static_cast<int>(params.out.shape[1]);
  const auto width = static_cast<int>(params.out.shape[2]);
  for (int i = static_cast<int>(threadIdx.x); i < heads * width; i += kThreads) {
    params.out.row(row, i / width)[i % width] = bf16_t{0};
  }
  if (!params.lse) return;
  for (int h = static_cast<int>(threadIdx.x); h < heads; h += kThreads) {
    params.lse.row(row)[h] = -__int_as_float(0x7F800000);
  }
}

}  // namespace

void pick_entries_cuda_portable(const ConstTensorView& from, std::span<const int32_t> values,
                                const TensorView& to, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  EntryParams params{};
  params.from = static_cast<const int32_t*>(from.data);
  for (size_t done = 0; done < values.size(); done += kEntriesPerLaunch) {
    const size_t count = std::min<size_t>(kEntriesPerLaunch, values.size() - done);
    params.to = static_cast<int32_t*>(to.data) + done;
    params.count = static_cast<int32_t>(count);
    std::copy_n(values.data() + done, count, params.values);
    cuda::launch(from.data != nullptr ? "pick_entries" : "put_entries", pick_entries_kernel,
                 {dim3(1), dim3(kThreads)}, stream, params);
  }
}

void clear_padding_cuda_portable(const PaddingRows& rows, const Device& device, Stream stream) {
  const cuda::DeviceScope scope(device.ordinal);
  PaddingParams params{};
  if (rows.q_indptr.defined()) {
    params.num_rows = static_cast<const int32_t*>(rows.q_indptr.data) + rows.q_indptr.shape[0] - 1;
  }
  params.out = access<bf16_t, 3>(rows.out);
  params.lse = access<float, 2>(rows.lse);
  cuda::launch("clear_padding", clear_padding_kernel,
               {dim3(cuda::grid_blocks(params.out.shape[0], 1)), dim3(kThreads)}, stream, params);
}

}  // namespace fovea::internal
