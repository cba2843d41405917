#pragma once

#include <cstdint>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/kda/kda_rows.h"

/// The row tensors of a layer as the vector implementations address them.
namespace fovea::internal {

/// Rows of bf16 or fp32, [T, heads, width] or [T, heads].
struct FloatRows {
  const void* data = nullptr;
  bool is_bf16 = false;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  explicit FloatRows(const ConstTensorView& view)
      : data(view.data),
        is_bf16(view.dtype == DType::kBf16),
        row_stride(view.stride[0]),
        head_stride(view.stride[1]) {}

  const bf16_t* bf16(int64_t t, int64_t head) const {
    return static_cast<const bf16_t*>(data) + t * row_stride + head * head_stride;
  }
  const float* f32(int64_t t, int64_t head) const {
    return static_cast<const float*>(data) + t * row_stride + head * head_stride;
  }
  float value(int64_t t, int64_t head) const {
    return is_bf16 ? bf16_to_float(*bf16(t, head)) : *f32(t, head);
  }
};

struct KdaInputs {
  Accessor<const bf16_t, 3> q, k, v;
  FloatRows g, beta;
  Accessor<const float, 1> a_log;
  Accessor<const float, 2> dt_bias;

  explicit KdaInputs(const KdaRows& rows)
      : q(access<const bf16_t, 3>(rows.q)),
        k(access<const bf16_t, 3>(rows.k)),
        v(access<const bf16_t, 3>(rows.v)),
        g(rows.g),
        beta(rows.beta),
        a_log(access<const float, 1>(rows.a_log)),
        dt_bias(access<const float, 2>(rows.dt_bias)) {}

  const float* rate_of(int64_t head) const { return a_log ? &a_log(head) : nullptr; }
  const float* bias_of(int64_t head) const { return dt_bias ? dt_bias.row(head) : nullptr; }
};

}  // namespace fovea::internal
