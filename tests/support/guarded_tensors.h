#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fovea/dtype.h"
#include "tests/support/memory.h"

namespace fovea::test {

/// Copies of tensors that end at unreadable pages, for as long as it lives.
class GuardedTensors {
 public:
  /// Copies the packed tensor behind `view` (a TensorView or ConstTensorView) and points the view
  /// to the copy.
  template <class View>
  void guard(View& view) {
    const size_t bytes = static_cast<size_t>(view.num_elements()) * size_of(view.dtype);
    memory_.push_back(std::make_unique<GuardedMemory>(bytes));
    std::copy_n(static_cast<const uint8_t*>(view.data), bytes,
                static_cast<uint8_t*>(memory_.back()->data()));
    view.data = memory_.back()->data();
  }

 private:
  std::vector<std::unique_ptr<GuardedMemory>> memory_;
};

}  // namespace fovea::test
