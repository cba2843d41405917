#include "src/core/kernel_fault.h"

#include <atomic>

namespace fovea::internal {
namespace {

// Launches left before the fault; counts on below zero after it. kDisarmed: no fault is planned.
constexpr int64_t kDisarmed = INT64_MAX;
std::atomic<int64_t> launches_left{kDisarmed};

}  // namespace

KernelFault::KernelFault(int64_t nth) { launches_left = nth; }

KernelFault::~KernelFault() { launches_left = kDisarmed; }

bool KernelFault::fired() const { return launches_left <= 0; }

bool kernel_launch_fails() {
  if (launches_left.load(std::memory_order_relaxed) == kDisarmed) return false;
  return --launches_left == 0;
}

}  // namespace fovea::internal
