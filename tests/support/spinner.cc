#include "tests/support/spinner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/support/spin_kernel.h"

namespace fovea::test {

struct Spinner::Flags : SpinFlags {};

Spinner::Spinner(const Device& device, Stream stream)
    : flags_(std::make_unique<Flags>()), is_running_(device.kind == DeviceKind::kCuda) {
  if (is_running_) start_spinning(device, stream, flags_.get());
}

Spinner::~Spinner() {
  release();
  // The kernel writes to the flags until it ends.
  while (is_running_ && !has_ended()) usleep(1000);
}

void Spinner::release() { flags_->released = 1; }

bool Spinner::has_ended() const { return is_running_ && flags_->ended != 0; }

bool launches_block() {
  const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && std::string(value) == "1";
}

bool passes_without_blocking() {
  char program[4096] = {};
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0) return false;
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  const std::string command = "CUDA_LAUNCH_BLOCKING=0 '" + std::string(program) +
                              "' --gtest_brief=1 '--gtest_filter=" + test.test_suite_name() + "." +
                              test.name() + "'";
  return std::system(command.c_str()) == 0;
}

}  // namespace fovea::test
