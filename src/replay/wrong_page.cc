#include "src/replay/wrong_page.h"

#include <algorithm>

namespace fovea::internal {

WrongPage::WrongPage(const Fault& fault, const StepBatch& batch, int64_t page_size,
                     Scheduler* scheduler)
    : scheduler_(scheduler),
      request_(fault.request),
      page_size_(page_size),
      begin_(fault.page * page_size) {
  std::vector<int32_t> pages = scheduler->state(request_).pages;
  pages[static_cast<size_t>(fault.page)] = other_page(fault, batch);
  write(pages);
}

WrongPage::~WrongPage() { write(scheduler_->state(request_).pages); }

// A complete page that only another request of the step holds, or else the next complete one of
// the request itself.
int32_t WrongPage::other_page(const Fault& fault, const StepBatch& batch) const {
  const std::vector<int32_t>& own = scheduler_->state(request_).pages;
  int64_t complete = 1;
  for (const StepEntry& entry : batch.entries) {
    if (entry.request == request_) complete = entry.begin / page_size_;
  }
  for (const StepEntry& entry : batch.entries) {
    const std::vector<int32_t>& pages = scheduler_->state(entry.request).pages;
    for (int64_t page = 0; page < entry.begin / page_size_; ++page) {
      const int32_t candidate = pages[static_cast<size_t>(page)];
      if (std::find(own.begin(), own.end(), candidate) == own.end()) return candidate;
    }
  }
  return own[static_cast<size_t>((fault.page + 1) % complete)];
}

void WrongPage::write(const std::vector<int32_t>& pages) {
  scheduler_->table().write(scheduler_->state(request_).pool_row, pages, page_size_, begin_,
                            begin_ + page_size_);
}

}  // namespace fovea::internal
