#include "fovea/page_allocator.h"

#include <limits>
#include <new>
#include <string>
#include <unordered_map>

#include "src/core/check.h"

namespace fovea {
namespace {

constexpr char kName[] = "page_allocator";
constexpr int32_t kNoPage = -1;
constexpr int32_t kDummyPage = 0;

enum class PageUse : uint8_t { kFree, kReferenced, kCached };

struct Page {
  int64_t references = 0;
  uint64_t hash = 0;  // valid when published
  PageUse use = PageUse::kFree;
  bool published = false;
  // Neighbours in the eviction list, which holds the cached pages.
  int32_t older = kNoPage;
  int32_t newer = kNoPage;
};

}  // namespace

struct PageAllocator::State {
  int64_t page_size = 0;
  std::vector<Page> pages;                          // index 0 is the dummy page, never handed out
  std::vector<int32_t> free;                        // the last one is handed out next
  std::unordered_map<uint64_t, int32_t> published;  // hash -> page
  int32_t oldest = kNoPage;                         // is evicted next
  int32_t newest = kNoPage;
  int64_t num_cached = 0;
  int64_t num_evictions = 0;

  Page& at(int32_t page) { return pages[static_cast<size_t>(page)]; }

  void append_to_eviction_list(int32_t page) {
    at(page).older = newest;
    at(page).newer = kNoPage;
    (newest != kNoPage ? at(newest).newer : oldest) = page;
    newest = page;
    ++num_cached;
  }

  void remove_from_eviction_list(int32_t page) {
    const Page& node = at(page);
    (node.older != kNoPage ? at(node.older).newer : oldest) = node.newer;
    (node.newer != kNoPage ? at(node.newer).older : newest) = node.older;
    --num_cached;
  }

  int32_t evict_oldest() {
    const int32_t page = oldest;
    remove_from_eviction_list(page);
    published.erase(at(page).hash);
    at(page).published = false;
    ++num_evictions;
    return page;
  }

  int64_t num_available() const { return static_cast<int64_t>(free.size()) + num_cached; }

  /// Throws unless the page exists and somebody holds it.
  void check_held(const char* call, int32_t page) const {
    const bool exists = page > kDummyPage && static_cast<size_t>(page) < pages.size();
    if (exists && pages[static_cast<size_t>(page)].references > 0) return;
    internal::invalid(
        kName, std::string(call) + ": page " + std::to_string(page) +
                   (exists ? " is held by nobody, or listed more often than held"
                           : " does not exist, expected 1.." + std::to_string(pages.size() - 1)));
  }
};

PageAllocator::PageAllocator(int64_t num_pages, int64_t page_size) {
  internal::check_range(kName, "page_size", page_size, 1, 256);
  // Slots, page * page_size + offset, are stored as int32.
  constexpr int64_t kMaxSlots = int64_t{std::numeric_limits<int32_t>::max()} + 1;
  internal::check_range(kName, "num_pages", num_pages, 1, kMaxSlots / page_size);
  try {
    state_ = std::make_unique<State>();
    state_->page_size = page_size;
    state_->pages.resize(static_cast<size_t>(num_pages));
    // The whole capacity now, so that giving pages back never allocates.
    state_->free.reserve(static_cast<size_t>(num_pages));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, std::string(kName) + ": no memory to administer " +
                                             std::to_string(num_pages) + " pages");
  }
  for (int64_t page = num_pages - 1; page > kDummyPage; --page) {
    state_->free.push_back(static_cast<int32_t>(page));
  }
}

PageAllocator::~PageAllocator() = default;
PageAllocator::PageAllocator(PageAllocator&&) noexcept = default;
PageAllocator& PageAllocator::operator=(PageAllocator&&) noexcept = default;

int64_t PageAllocator::page_size() const noexcept { return state_->page_size; }

int64_t PageAllocator::num_pages() const noexcept {
  return static_cast<int64_t>(state_->pages.size());
}

PageCounts PageAllocator::counts() const noexcept {
  PageCounts counts;
  counts.total = num_pages() - 1;
  counts.free = static_cast<int64_t>(state_->free.size());
  counts.cached = state_->num_cached;
  counts.referenced = counts.total - counts.free - counts.cached;
  counts.evictions = state_->num_evictions;
  return counts;
}

int64_t PageAllocator::match_prefix(std::span<const uint64_t> hashes) const {
  int64_t count = 0;
  for (const uint64_t hash : hashes) {
    if (!state_->published.contains(hash)) break;
    ++count;
  }
  return count;
}

std::vector<int32_t> PageAllocator::acquire_prefix(std::span<const uint64_t> hashes) {
  const auto count = static_cast<size_t>(match_prefix(hashes));
  std::vector<int32_t> pages(count);
  for (size_t i = 0; i < count; ++i) {
    pages[i] = state_->published.find(hashes[i])->second;
    Page& page = state_->at(pages[i]);
    if (page.use == PageUse::kCached) state_->remove_from_eviction_list(pages[i]);
    page.use = PageUse::kReferenced;
    ++page.references;
  }
  return pages;
}

std::vector<int32_t> PageAllocator::allocate(int64_t count) {
  internal::check_range(kName, "count", count, 0, std::numeric_limits<int64_t>::max());
  if (!can_allocate(count)) {
    const PageCounts now = counts();
    throw Error(ErrorCode::kOutOfMemory,
                std::string(kName) + ": asked for " + std::to_string(count) + " pages, " +
                    std::to_string(now.free + now.cached) + " are available (" +
                    std::to_string(now.free) + " free, " + std::to_string(now.cached) +
                    " cached) of " + std::to_string(now.total) +
                    "; release pages or make the cache larger");
  }
  std::vector<int32_t> pages(static_cast<size_t>(count));
  for (int32_t& page : pages) {
    if (state_->free.empty()) {
      page = state_->evict_oldest();
    } else {
      page = state_->free.back();
      state_->free.pop_back();
    }
    state_->at(page).use = PageUse::kReferenced;
    state_->at(page).references = 1;
  }
  return pages;
}

bool PageAllocator::can_allocate(int64_t count) const noexcept {
  return count >= 0 && count <= state_->num_available();
}

bool PageAllocator::publish(int32_t page, uint64_t hash) {
  state_->check_held("publish", page);
  Page& entry = state_->at(page);
  if (entry.published && entry.hash != hash) {
    internal::invalid(kName, "publish: page " + std::to_string(page) +
                                 " is already published under another hash, and what others may "
                                 "find cannot change; allocate a new page");
  }
  const auto [found, inserted] = state_->published.try_emplace(hash, page);
  if (inserted) {
    entry.published = true;
    entry.hash = hash;
  }
  return found->second == page;
}

void PageAllocator::retain(std::span<const int32_t> pages) {
  for (const int32_t page : pages) state_->check_held("retain", page);
  for (const int32_t page : pages) ++state_->at(page).references;
}

void PageAllocator::release(std::span<const int32_t> pages) {
  // Counting down shows a page that is listed too often; that is undone before the error leaves.
  size_t counted = 0;
  try {
    for (; counted < pages.size(); ++counted) {
      state_->check_held("release", pages[counted]);
      --state_->at(pages[counted]).references;
    }
  } catch (...) {
    while (counted > 0) ++state_->at(pages[--counted]).references;
    throw;
  }
  // Backwards: of a prefix the deepest page becomes the oldest, since it is of no use without those
  // before it.
  for (size_t i = pages.size(); i-- > 0;) {
    Page& page = state_->at(pages[i]);
    // A page that is listed twice has left this state when it comes up again.
    if (page.references > 0 || page.use != PageUse::kReferenced) continue;
    if (page.published) {
      page.use = PageUse::kCached;
      state_->append_to_eviction_list(pages[i]);
    } else {
      page.use = PageUse::kFree;
      state_->free.push_back(pages[i]);
    }
  }
}

}  // namespace fovea
