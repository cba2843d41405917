#pragma once

#include <cstdint>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/cuda/arithmetic.cuh"
#include "src/kda/kda_math.h"
#include "src/kda/kda_rows.h"

/// What kernels read of the rows of a KDA layer.
namespace fovea::internal::cuda {

__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float sigmoid_fast(float x) {
  return __fdividef(1.0f, 1.0f + exp2_fast(-x * static_cast<float>(kLog2E)));
}

/// log2(1 + e^x).
__device__ inline float softplus_log2(float x) {
  constexpr float kLog2e = static_cast<float>(kLog2E);
  if (x > 20.0f) return x * kLog2e;
  const float e = exp2_fast(x * kLog2e);
  // The hardware's logarithm has an absolute error near 1; a series keeps small decays exact.
  const float series = e * (1.0f - e * (0.5f - e * (1.0f / 3 - e * 0.25f))) * kLog2e;
  return e < 0.015625f ? series : log2_fast(1.0f + e);
}

/// exp(a_log) cut to fp32's range (infinity times the 0 of a softplus would be NaN); NaN for NaN.
__device__ inline float finite_rate(float a_log) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const float rate = expf(a_log);
  return rate > kLargest ? kLargest : rate;
}

/// An element that is bf16 or fp32.
__device__ inline float load_float(const void* data, bool is_bf16, int64_t at) {
  return is_bf16 ? bf16_to_float(static_cast<const bf16_t*>(data)[at])
                 : static_cast<const float*>(data)[at];
}

/// Rows of q, k, v, g and beta, and the layer's numbers.
struct KdaInput {
  Accessor<const bf16_t, 3> q, k, v;
  const void* g = nullptr;
  bool g_is_bf16 = false;
  int64_t g_row = 0, g_head = 0;  // strides in elements
  const void* beta = nullptr;
  bool beta_is_bf16 = false;
  int64_t beta_row = 0;
  const float* a_log = nullptr;
  Accessor<const float, 2> dt_bias;
  GateKind gate = GateKind::kGiven;
  BetaKind beta_kind = BetaKind::kProb;
  bool allow_neg_eigval = false;
  bool normalise = false;
  float lower_bound = 0;
  float scale = 1;
  int value_heads = 1;
  int heads_per_key = 1;  // value heads that share a head of q and k

  KdaInput() = default;
  KdaInput(const KdaLayer& layer, const KdaRows& rows)
      : q(access<const bf16_t, 3>(rows.q)),
        k(access<const bf16_t, 3>(rows.k)),
        v(access<const bf16_t, 3>(rows.v)),
        g(rows.g.data),
        g_is_bf16(rows.g.dtype == DType::kBf16),
        g_row(rows.g.stride[0]),
        g_head(rows.g.stride[1]),
        beta(rows.beta.data),
        beta_is_bf16(rows.beta.dtype == DType::kBf16),
        beta_row(rows.beta.stride[0]),
        a_log(static_cast<const float*>(rows.a_log.data)),
        dt_bias(access<const float, 2>(rows.dt_bias)),
        gate(layer.gate.kind),
        beta_kind(layer.beta_kind),
        allow_neg_eigval(layer.allow_neg_eigval),
        normalise(layer.normalise),
        lower_bound(layer.gate.lower_bound),
        scale(static_cast<float>(kda_scale(layer))),
        value_heads(static_cast<int>(layer.num_value_heads)),
        heads_per_key(static_cast<int>(layer.num_value_heads / layer.num_heads)) {}

  /// exp(a_log) of a value head; 1 without a_log.
  __device__ float rate(int hv) const { return a_log != nullptr ? finite_rate(a_log[hv]) : 1.0f; }
  __device__ float bias(int hv, int channel) const { return dt_bias ? dt_bias(hv, channel) : 0.0f; }

  /// Log decay in base 2 of a raw value, not below kKdaLeastLog2Decay.
  __device__ float log2_decay(float raw, float dt, float rate) const {
    constexpr float kLog2e = static_cast<float>(kLog2E);
    float decay;
    if (gate == GateKind::kSoftplus) {
      decay = -rate * softplus_log2(raw + dt);
    } else if (gate == GateKind::kLowerBound) {
      decay = lower_bound * kLog2e * sigmoid_fast(rate * (raw + dt));
    } else {
      decay = raw * kLog2e;
    }
    return decay < kKdaLeastLog2Decay ? kKdaLeastLog2Decay : decay;
  }

  __device__ float load_gate(int64_t row, int hv, int channel) const {
    return load_float(g, g_is_bf16, row * g_row + hv * g_head + channel);
  }
  __device__ float load_beta(int64_t row, int hv) const {
    const float b = load_float(beta, beta_is_bf16, row * beta_row + hv);
    if (beta_kind == BetaKind::kProb) return b;
    return (allow_neg_eigval ? 2.0f : 1.0f) * sigmoid_fast(b);
  }
};

}  // namespace fovea::internal::cuda
