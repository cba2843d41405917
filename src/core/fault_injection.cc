#include "src/core/fault_injection.h"

#include <atomic>
#include <string>

#include "fovea/error.h"
#include "fovea/plan.h"

namespace fovea::internal {
namespace {

// Runs left before the fault; counts on below zero after it. kDisarmed: no fault is planned.
constexpr int64_t kDisarmed = INT64_MAX;
std::atomic<int64_t> runs_left{kDisarmed};
std::atomic<int64_t> results_left{kDisarmed};
int32_t* wrong_address = nullptr;
int32_t wrong_value = 0;

}  // namespace

LaunchFault::LaunchFault(int64_t nth) { runs_left = nth; }

LaunchFault::~LaunchFault() { runs_left = kDisarmed; }

bool LaunchFault::fired() const { return runs_left <= 0; }

ResultFault::ResultFault(int64_t nth, int32_t* address, int32_t value) {
  wrong_address = address;
  wrong_value = value;
  results_left = nth;
}

ResultFault::~ResultFault() { results_left = kDisarmed; }

bool ResultFault::fired() const { return results_left <= 0; }

void end_launch() {
  if (results_left.load(std::memory_order_relaxed) == kDisarmed) return;
  if (--results_left == 0) *wrong_address = wrong_value;
}

void begin_launch(const char* op) {
  if (runs_left.load(std::memory_order_relaxed) == kDisarmed) return;
  if (--runs_left == 0) {
    throw Error(ErrorCode::kDevice, std::string(op) + ": launch failed (injected fault)");
  }
}

}  // namespace fovea::internal
