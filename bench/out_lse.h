#pragma once

#include <string>

#include "bench/check.h"
#include "bench/inputs.h"

/// The results of an attention operator in a benchmark case.
namespace fovea::bench {

struct OutLse {
  OwnedTensor out, lse;
  int64_t bytes() const { return out.bytes() + lse.bytes(); }
};

template <class Tensors>
std::string out_lse_difference(const Tensors& actual, const Tensors& reference,
                               const Tolerance& out_tolerance) {
  const std::string wrong = difference_text("out", actual.out, reference.out, out_tolerance);
  return wrong.empty() ? difference_text("lse", actual.lse, reference.lse, kFp32Output) : wrong;
}

}  // namespace fovea::bench
