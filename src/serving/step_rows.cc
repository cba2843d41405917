#include "src/serving/step_rows.h"

#include <algorithm>
#include <limits>

#include "fovea/plan.h"
#include "src/core/access.h"

namespace fovea::internal {

void put_entries(std::span<const int32_t> values, const TensorView& to, const Device& device,
                 Stream stream) {
  if (values.empty()) return;
  begin_launch("put_entries");
  if (device.kind == DeviceKind::kCuda) {
    return pick_entries_cuda_portable({}, values, to, device, stream);
  }
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(to.data));
}

void pick_entries(const ConstTensorView& from, std::span<const int32_t> indices,
                  const TensorView& to, const Device& device, Stream stream) {
  if (indices.empty()) return;
  begin_launch("pick_entries");
  if (device.kind == DeviceKind::kCuda) {
    return pick_entries_cuda_portable(from, indices, to, device, stream);
  }
  const auto in = access<const int32_t, 1>(from);
  const auto out = access<int32_t, 1>(to);
  for (size_t i = 0; i < indices.size(); ++i) out(static_cast<int64_t>(i)) = in(indices[i]);
}

void clear_padding(const PaddingRows& rows, const Device& device, Stream stream) {
  begin_launch("clear_padding");
  if (device.kind == DeviceKind::kCuda) return clear_padding_cuda_portable(rows, device, stream);
  const auto out = access<bf16_t, 3>(rows.out);
  const auto lse = access<float, 2>(rows.lse);
  const auto q_indptr = access<const int32_t, 1>(rows.q_indptr);
  const int64_t first = q_indptr ? q_indptr(q_indptr.shape[0] - 1) : 0;
  for (int64_t row = first; row < out.shape[0]; ++row) {
    for (int64_t h = 0; h < out.shape[1]; ++h) {
      std::fill_n(out.row(row, h), out.shape[2], bf16_t{0});
    }
    if (lse) std::fill_n(lse.row(row), lse.shape[1], -std::numeric_limits<float>::infinity());
  }
}

}  // namespace fovea::internal
