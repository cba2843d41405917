#pragma once

#include <cstdint>
#include <vector>

#include "src/replay/run_plan.h"
#include "src/replay/scheduler.h"

namespace fovea::internal {

/// Makes one entry of a request's page table point to a page with other tokens while it lives
/// (`inject = page`).
class WrongPage {
 public:
  WrongPage(const Fault& fault, const StepBatch& batch, int64_t page_size, Scheduler* scheduler);
  ~WrongPage();
  WrongPage(const WrongPage&) = delete;
  WrongPage& operator=(const WrongPage&) = delete;

 private:
  int32_t other_page(const Fault& fault, const StepBatch& batch) const;
  void write(const std::vector<int32_t>& pages);

  Scheduler* scheduler_;
  int64_t request_;
  int64_t page_size_;
  int64_t begin_;
};

}  // namespace fovea::internal
