#include "bench/cases.h"

#include <iterator>

namespace fovea::bench {

std::vector<BenchCase> all_cases() {
  std::vector<BenchCase> cases;
  for (auto* make : {merge_lse_cases}) {
    std::vector<BenchCase> more = make();
    cases.insert(cases.end(), std::make_move_iterator(more.begin()),
                 std::make_move_iterator(more.end()));
  }
  return cases;
}

}  // namespace fovea::bench
