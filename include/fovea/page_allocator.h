#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fovea/export.h"

namespace fovea {

/// Exact state of a PageAllocator: total = free + referenced + cached.
struct PageCounts {
  int64_t total = 0;       ///< Usable pages, without the dummy page.
  int64_t free = 0;        ///< Hold nothing.
  int64_t referenced = 0;  ///< Held by at least one owner (published or not).
  /// Published and held by nobody: reused on a hit, evicted when space is needed.
  int64_t cached = 0;
  int64_t evictions = 0;  ///< Cached pages given to somebody else so far.
};

/// Hands out pages of a paged cache, shares published ones between requests with an equal prefix,
/// and evicts cached pages, least recently used first. Pages are reference-counted; page 0 is the
/// dummy page of padded rows and never handed out.
///
/// A prefix is a chain of 64-bit block hashes, one per full page, each standing for the page and
/// everything before it. A page counts as used when its last reference is given back; of the pages
/// of one release() call the first is the most recently used one, so that a chain is evicted from
/// its deep end. Cost: constant per page of a call, whatever the size of the cache.
///
/// Holds page numbers only, no tensor memory. Deterministic: the same calls give the same pages.
/// Not thread-safe. Every call either succeeds whole or throws Error and changes nothing.
/// docs/page_allocator.md has the state diagram.
class FOVEA_API PageAllocator {
 public:
  /// `num_pages` counts the dummy page. Throws Error(kInvalidArgument) unless page_size is in
  /// 1..256, num_pages >= 1 and every slot number (page * page_size + offset) fits int32;
  /// Error(kOutOfMemory) when the host lacks the memory for the books.
  PageAllocator(int64_t num_pages, int64_t page_size);
  ~PageAllocator();
  PageAllocator(PageAllocator&&) noexcept;
  PageAllocator& operator=(PageAllocator&&) noexcept;

  int64_t page_size() const noexcept;
  int64_t num_pages() const noexcept;
  PageCounts counts() const noexcept;

  /// Number of leading hashes that are published, without taking them.
  int64_t match_prefix(std::span<const uint64_t> hashes) const;

  /// Takes a reference to the page of every leading published hash and returns those pages in
  /// order; none when the first hash is unknown.
  std::vector<int32_t> acquire_prefix(std::span<const uint64_t> hashes);

  /// `count` fresh pages, one reference each, evicting cached ones when no free ones are left.
  /// Their content is whatever the former owner left. Throws Error(kOutOfMemory), naming the pages
  /// asked and available, when free + cached < count, Error(kInvalidArgument) for count < 0; then
  /// nothing has changed.
  std::vector<int32_t> allocate(int64_t count);

  /// Whether allocate(count) would succeed.
  bool can_allocate(int64_t count) const noexcept;

  /// Publishes a referenced page under `hash`, so that later prefixes find it; true when they now
  /// find this page. The first page published under a hash stays: publishing another one is a no-op
  /// that returns false. Throws Error(kInvalidArgument) for a page that nobody holds, and for one
  /// that is published under another hash.
  bool publish(int32_t page, uint64_t hash);

  /// Adds one reference to each page (a second owner), one per mention. Throws
  /// Error(kInvalidArgument) for a page that nobody holds.
  void retain(std::span<const int32_t> pages);

  /// Gives one reference of each page back; a published page without references becomes cached,
  /// another one free. Throws Error(kInvalidArgument) for a page that nobody holds (or listed more
  /// often than held); then nothing has changed.
  void release(std::span<const int32_t> pages);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fovea
