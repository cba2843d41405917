#include <cmath>
#include <limits>

#include "fovea/numeric.h"
#include "src/core/access.h"
#include "src/core/sink.h"
#include "src/mla/merge_lse_impl.h"

namespace fovea::internal {
namespace {

template <class T>
double load(const T& element) {
  if constexpr (std::is_same_v<T, bf16_t>)
    return bf16_to_float(element);
  else
    return element;
}

template <class T>
void store(double value, T* element) {
  if constexpr (std::is_same_v<T, bf16_t>)
    *element = bf16_from_float(static_cast<float>(value));
  else
    *element = static_cast<float>(value);
}

// lse = ln sum_p exp(lse_p),  out = sink_factor * sum_p exp(lse_p - lse) * out_p, over the parts
// with a finite lse_p.
template <class T>
void merge(const MergeLseProblem& problem, const MergeLseTensors& tensors) {
  const auto out_parts = access<const T, 4>(tensors.out_parts);
  const auto lse_parts = access<const float, 3>(tensors.lse_parts);
  const auto sink = access<const float, 1>(tensors.sink);
  const auto out = access<T, 3>(tensors.out);
  const auto lse = access<float, 2>(tensors.lse);
  for (int64_t t = 0; t < out.shape[0]; ++t) {
    for (int64_t h = 0; h < problem.num_heads; ++h) {
      double largest = -std::numeric_limits<double>::infinity();
      for (int64_t p = 0; p < problem.num_parts; ++p) {
        if (std::isfinite(lse_parts(p, t, h))) largest = std::fmax(largest, lse_parts(p, t, h));
      }
      double sum = 0;
      for (int64_t p = 0; p < problem.num_parts; ++p) {
        if (std::isfinite(lse_parts(p, t, h))) sum += std::exp(lse_parts(p, t, h) - largest);
      }
      const double merged = largest + std::log(sum);  // -inf when no part is finite
      lse(t, h) = static_cast<float>(merged);
      const double factor = sink ? sink_factor(sink(h), merged) : 1.0;
      for (int64_t d = 0; d < problem.head_dim; ++d) {
        double value = 0;
        for (int64_t p = 0; p < problem.num_parts; ++p) {
          if (!std::isfinite(lse_parts(p, t, h))) continue;
          value += std::exp(lse_parts(p, t, h) - merged) * load(out_parts(p, t, h, d));
        }
        store(factor * value, &out(t, h, d));
      }
    }
  }
}

}  // namespace

void merge_lse_ref(const MergeLseProblem& problem, const Device&, const MergeLseTensors& tensors,
                   Workspace) {
  if (problem.dtype == DType::kBf16)
    merge<bf16_t>(problem, tensors);
  else
    merge<float>(problem, tensors);
}

}  // namespace fovea::internal
