#include "src/core/no_cuda.h"

#include "tests/support/spin_kernel.h"

namespace fovea::test {

void start_spinning(const Device&, Stream, SpinFlags*) { internal::without_cuda("spin"); }

}  // namespace fovea::test
