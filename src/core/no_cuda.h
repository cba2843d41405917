#pragma once

#include "src/core/check.h"

/// For the twins of kernels in a build without CUDA.
namespace fovea::internal {

/// What a kernel's entry point does there: plan() never chooses it.
[[noreturn]] inline void without_cuda(const char* op) { unsupported(op, "this build has no CUDA"); }

}  // namespace fovea::internal
