#pragma once

#include "fovea/kda.h"
#include "fovea/tensor.h"

/// What a KDA layer reads of every row, the same in each operator.
namespace fovea::internal {

struct KdaRows {
  ConstTensorView q{};        // bf16 [T, H, K]
  ConstTensorView k{};        // bf16 [T, H, K]
  ConstTensorView v{};        // bf16 [T, HV, V]
  ConstTensorView g{};        // bf16 or f32 [T, HV, K]
  ConstTensorView beta{};     // bf16 or f32 [T, HV]
  ConstTensorView a_log{};    // optional f32 [HV]
  ConstTensorView dt_bias{};  // optional f32 [HV, K]
};

/// The row tensors of any operator that names them so.
template <class Tensors>
KdaRows rows_of(const Tensors& t) {
  return {t.q, t.k, t.v, t.g, t.beta, t.a_log, t.dt_bias};
}

/// With `qkv` [T, 2*H*K + HV*V] instead: q, k and v are column ranges of it.
inline KdaRows split_qkv(const KdaLayer& layer, KdaRows rows, const ConstTensorView& qkv) {
  if (!qkv.defined()) return rows;
  const auto columns = [&](int64_t first, int64_t heads, int64_t dim) {
    TensorShape shape{.dtype = DType::kBf16, .rank = 3};
    shape.shape = {qkv.shape[0], heads, dim};
    shape.stride = {qkv.stride[0], dim, 1};
    const auto* data = static_cast<const bf16_t*>(qkv.data);
    return ConstTensorView(shape, data != nullptr ? data + first : nullptr);
  };
  const int64_t keys = layer.num_heads * layer.head_dim_k;
  rows.q = columns(0, layer.num_heads, layer.head_dim_k);
  rows.k = columns(keys, layer.num_heads, layer.head_dim_k);
  rows.v = columns(2 * keys, layer.num_value_heads, layer.head_dim_v);
  return rows;
}
template <class Tensors>
KdaRows split_qkv(const KdaLayer& layer, const Tensors& t) {
  return split_qkv(layer, rows_of(t), t.qkv);
}

}  // namespace fovea::internal
