#pragma once

#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace fovea::internal {

/// The rows that a run has sampled: those of a step count once the step is committed.
template <class Sample>
class StepSamples {
 public:
  void start_step() { of_step_.clear(); }
  std::vector<Sample>* of_step() { return &of_step_; }
  void commit_step() {
    std::move(of_step_.begin(), of_step_.end(), std::back_inserter(committed_));
    of_step_.clear();
  }

  int64_t count() const { return static_cast<int64_t>(committed_.size()); }
  std::vector<Sample> take() { return std::exchange(committed_, {}); }

 private:
  std::vector<Sample> of_step_;
  std::vector<Sample> committed_;
};

}  // namespace fovea::internal
