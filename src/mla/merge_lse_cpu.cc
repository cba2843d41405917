#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/mla/merge_lse_cpu.cc"
#include "src/core/simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/core/sink.h"
#include "src/mla/merge_lse_impl.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {
namespace {

HWY_INLINE hn::Vec<F32> load_vector(F32 d, const float* from) { return hn::LoadU(d, from); }
HWY_INLINE hn::Vec<F32> load_vector(F32 d, const bf16_t* from) { return load_bf16(d, from); }
HWY_INLINE void store_vector(F32 d, hn::Vec<F32> value, float* to) { hn::StoreU(value, d, to); }
HWY_INLINE void store_vector(F32 d, hn::Vec<F32> value, bf16_t* to) {
  store_bf16(d, round_to_bf16(d, value), to);
}
HWY_INLINE float load_scalar(float value) { return value; }
HWY_INLINE float load_scalar(bf16_t value) { return bf16_to_float(value); }
HWY_INLINE void store_scalar(float value, float* to) { *to = value; }
HWY_INLINE void store_scalar(float value, bf16_t* to) { *to = bf16_from_float(value); }

// One (row, head). The parts are added in their order 0, 1, 2, ..., in fp32, for every element
// alike. `weights` is scratch of num_parts elements; a part that counts as empty has weight 0 and
// is not read.
template <class T>
void merge_one(const MergeLseProblem& problem, const Accessor<const T, 4>& out_parts,
               const Accessor<const float, 3>& lse_parts, const float* sink, int64_t t, int64_t h,
               float* weights, T* out, float* lse) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  float largest = kNegInf;
  for (int64_t p = 0; p < problem.num_parts; ++p) {
    if (std::isfinite(lse_parts(p, t, h))) largest = std::max(largest, lse_parts(p, t, h));
  }
  float sum = 0;
  for (int64_t p = 0; p < problem.num_parts; ++p) {
    weights[p] = std::isfinite(lse_parts(p, t, h)) ? std::exp(lse_parts(p, t, h) - largest) : 0.0f;
    sum += weights[p];
  }
  const float merged = largest == kNegInf ? kNegInf : largest + std::log(sum);
  *lse = merged;
  const float scale =
      largest == kNegInf ? 0.0f : (sink != nullptr ? sink_factor(sink[h], merged) : 1.0f) / sum;
  for (int64_t p = 0; p < problem.num_parts; ++p) weights[p] *= scale;
  const auto is_read = [&](int64_t p) { return std::isfinite(lse_parts(p, t, h)); };
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= problem.head_dim; i += lanes) {
    auto value = hn::Zero(d);
    for (int64_t p = 0; p < problem.num_parts; ++p) {
      if (is_read(p))
        value =
            hn::MulAdd(hn::Set(d, weights[p]), load_vector(d, out_parts.row(p, t, h) + i), value);
    }
    store_vector(d, value, out + i);
  }
  for (; i < problem.head_dim; ++i) {
    float value = 0;
    for (int64_t p = 0; p < problem.num_parts; ++p) {
      if (is_read(p)) value = std::fma(weights[p], load_scalar(out_parts.row(p, t, h)[i]), value);
    }
    store_scalar(value, out + i);
  }
}

template <class T>
void merge_rows(const MergeLseProblem& problem, const Device& device,
                const MergeLseTensors& tensors, Workspace workspace) {
  const auto out_parts = access<const T, 4>(tensors.out_parts);
  const auto lse_parts = access<const float, 3>(tensors.lse_parts);
  const auto sink = access<const float, 1>(tensors.sink);
  const auto out = access<T, 3>(tensors.out);
  const auto lse = access<float, 2>(tensors.lse);
  const ThreadScope threads(device.num_threads);
  ParallelFor(out.shape[0] * problem.num_heads, 16, [&](int64_t begin, int64_t end, int worker) {
    float* const weights =
        static_cast<float*>(workspace.data) + worker * merge_weights_stride(problem);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / problem.num_heads;
      const int64_t h = i % problem.num_heads;
      merge_one(problem, out_parts, lse_parts, sink.data, t, h, weights, out.row(t, h), &lse(t, h));
    }
  });
}

void merge_lse(const MergeLseProblem& problem, const Device& device, const MergeLseTensors& tensors,
               Workspace workspace) {
  if (problem.dtype == DType::kBf16)
    merge_rows<bf16_t>(problem, device, tensors, workspace);
  else
    merge_rows<float>(problem, device, tensors, workspace);
}

}  // namespace
}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::internal {

HWY_EXPORT(merge_lse);

size_t merge_lse_cpu_workspace_bytes(const MergeLseProblem& problem, const Device& device) {
  return sizeof(float) * static_cast<size_t>(merge_weights_stride(problem) * device.num_threads);
}

void merge_lse_cpu(const MergeLseProblem& problem, const Device& device,
                   const MergeLseTensors& tensors, Workspace workspace) {
  current_cpu_isa();  // applies FOVEA_CPU_ISA before the first dispatch
  HWY_DYNAMIC_DISPATCH(merge_lse)(problem, device, tensors, workspace);
}

}  // namespace fovea::internal
#endif
