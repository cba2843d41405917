#pragma once

#include "tests/gpu_model/cuda_words.h"

// Model of src/core/cuda/arithmetic.cuh.
namespace fovea::internal::cuda {

inline float exp2_fast(float x) { return exp2f(x); }
template <class T>
void hold(T&) {}
inline float relu(float x) { return x < 0 ? 0.0f : x; }
inline int computed_here(int x) { return x; }

}  // namespace fovea::internal::cuda
