#include "src/core/check.h"

#include <gtest/gtest.h>

#include "tests/support/memory.h"

namespace fovea {
namespace {

TEST(Check, TensorsThatPassCostNoAllocation) {
  test::Tensor tensor(DType::kBf16, {3, 128, 576});
  const ConstTensorView view = tensor.view();
  const test::AllocationCounter counter;
  internal::check_tensor("some_operator", "a_long_argument_name", view, DType::kBf16,
                         {internal::kAnyExtent, 128, 576});
  internal::check_optional("some_operator", "absent", {}, DType::kI32, {3});
  internal::check_range("some_operator", "rows", 3, 0, 3);
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace fovea
