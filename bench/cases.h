#pragma once

#include <vector>

#include "bench/case.h"

/// The cases of each operator; all_cases() joins them.
namespace fovea::bench {

std::vector<BenchCase> merge_lse_cases();

}  // namespace fovea::bench
