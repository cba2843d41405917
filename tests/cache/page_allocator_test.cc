#include "fovea/page_allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/property.h"

namespace fovea {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Pages = std::vector<int32_t>;
using Hashes = std::vector<uint64_t>;

// The code of the Error that `call` throws; empty when it throws none.
template <class Call>
std::optional<ErrorCode> error_of(Call&& call, std::string* text = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.code();
  }
  return std::nullopt;
}

void expect_counts(const PageAllocator& pages, int64_t free, int64_t referenced, int64_t cached,
                   int64_t evictions) {
  const PageCounts counts = pages.counts();
  EXPECT_EQ(counts.total, pages.num_pages() - 1);
  EXPECT_EQ(counts.free, free);
  EXPECT_EQ(counts.referenced, referenced);
  EXPECT_EQ(counts.cached, cached);
  EXPECT_EQ(counts.evictions, evictions);
}

TEST(PageAllocator, RefusesSizesOutsideItsTable) {
  for (const int64_t page_size : {-1, 0, 257}) {
    EXPECT_EQ(error_of([&] { PageAllocator(10, page_size); }), ErrorCode::kInvalidArgument);
  }
  for (const int64_t num_pages : {int64_t{-5}, int64_t{0}, (int64_t{1} << 31) / 64 + 1}) {
    EXPECT_EQ(error_of([&] { PageAllocator(num_pages, 64); }), ErrorCode::kInvalidArgument);
  }
  for (const int64_t page_size : {1, 61, 256}) {
    EXPECT_EQ(PageAllocator(3, page_size).page_size(), page_size);
  }
}

TEST(PageAllocator, HandsOutEveryPageButTheDummyOnce) {
  PageAllocator pages(100, 64);
  const Pages all = pages.allocate(99);
  const std::set<int32_t> distinct(all.begin(), all.end());
  EXPECT_EQ(distinct.size(), 99u);
  EXPECT_EQ(*distinct.begin(), 1);
  EXPECT_EQ(*distinct.rbegin(), 99);
  expect_counts(pages, 0, 99, 0, 0);
  pages.release(all);
  expect_counts(pages, 99, 0, 0, 0);
}

TEST(PageAllocator, ExhaustionNamesPagesAndLosesNothing) {
  PageAllocator pages(11, 4);
  const Pages held = pages.allocate(6);
  ASSERT_TRUE(pages.publish(held[0], 7));
  pages.release(std::vector<int32_t>{held[0]});
  EXPECT_TRUE(pages.can_allocate(5));
  EXPECT_FALSE(pages.can_allocate(6));
  EXPECT_FALSE(pages.can_allocate(-1));
  std::string text;
  EXPECT_EQ(error_of([&] { pages.allocate(6); }, &text), ErrorCode::kOutOfMemory);
  EXPECT_THAT(text, HasSubstr("asked for 6 pages, 5 are available (4 free, 1 cached) of 10"));
  expect_counts(pages, 4, 5, 1, 0);
  EXPECT_EQ(pages.match_prefix(Hashes{7}), 1);
  EXPECT_EQ(pages.allocate(5).size(), 5u);
  expect_counts(pages, 0, 10, 0, 1);
  EXPECT_EQ(error_of([&] { pages.allocate(-1); }), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(pages.allocate(0).empty());
}

TEST(PageAllocator, WithOnlyTheDummyPageNothingCanBeAllocated) {
  PageAllocator pages(1, 64);
  EXPECT_EQ(error_of([&] { pages.allocate(1); }), ErrorCode::kOutOfMemory);
  expect_counts(pages, 0, 0, 0, 0);
}

TEST(PageAllocator, SharesThePublishedPrefixAndOnlyThat) {
  PageAllocator pages(20, 64);
  const Pages first = pages.allocate(3);
  EXPECT_TRUE(pages.publish(first[0], 100));
  EXPECT_TRUE(pages.publish(first[1], 101));
  EXPECT_EQ(pages.match_prefix(Hashes{100, 101, 102}), 2);
  EXPECT_EQ(pages.match_prefix(Hashes{101}), 1);  // a hash stands for everything before it too
  EXPECT_EQ(pages.match_prefix(Hashes{99, 100}), 0);
  EXPECT_THAT(pages.acquire_prefix(Hashes{100, 101, 102}), ElementsAre(first[0], first[1]));
  EXPECT_THAT(pages.acquire_prefix(Hashes{5}), ElementsAre());
  expect_counts(pages, 16, 3, 0, 0);
  // The first owner leaves: the shared pages stay referenced, the other one is free.
  pages.release(first);
  expect_counts(pages, 17, 2, 0, 0);
  pages.release(Pages{first[0], first[1]});
  expect_counts(pages, 17, 0, 2, 0);
  // A hit on cached pages takes them back.
  EXPECT_THAT(pages.acquire_prefix(Hashes{100, 101}), ElementsAre(first[0], first[1]));
  expect_counts(pages, 17, 2, 0, 0);
}

TEST(PageAllocator, EvictsTheLeastRecentlyUsedAndTheDeepEndOfAChainFirst) {
  PageAllocator pages(7, 64);
  const Pages a = pages.allocate(3);
  const Pages b = pages.allocate(3);
  for (size_t i = 0; i < 3; ++i) {
    pages.publish(a[i], 10 + i);
    pages.publish(b[i], 20 + i);
  }
  pages.release(a);
  pages.release(b);
  EXPECT_THAT(pages.allocate(1), ElementsAre(a[2]));
  EXPECT_EQ(pages.match_prefix(Hashes{10, 11, 12}), 2);
  // A use of a's rest makes b the older one.
  pages.release(pages.acquire_prefix(Hashes{10, 11}));
  EXPECT_THAT(pages.allocate(4), ElementsAre(b[2], b[1], b[0], a[1]));
  EXPECT_EQ(pages.match_prefix(Hashes{10}), 1);
  EXPECT_EQ(pages.match_prefix(Hashes{20}), 0);
  expect_counts(pages, 0, 5, 1, 5);
}

TEST(PageAllocator, FreePagesGoBeforeCachedOnes) {
  PageAllocator pages(5, 64);
  const Pages held = pages.allocate(2);
  pages.publish(held[0], 1);
  pages.release(held);
  pages.allocate(3);
  EXPECT_EQ(pages.match_prefix(Hashes{1}), 1);
  expect_counts(pages, 0, 3, 1, 0);
}

TEST(PageAllocator, TheFirstPageUnderAHashStays) {
  PageAllocator pages(5, 64);
  const Pages held = pages.allocate(2);
  EXPECT_TRUE(pages.publish(held[0], 1));
  EXPECT_FALSE(pages.publish(held[1], 1));
  EXPECT_TRUE(pages.publish(held[0], 1));
  EXPECT_THAT(pages.acquire_prefix(Hashes{1}), ElementsAre(held[0]));
  // The page that was not published is free at once.
  pages.release(Pages{held[1]});
  expect_counts(pages, 3, 1, 0, 0);
  // A page stands for one content.
  EXPECT_EQ(error_of([&] { pages.publish(held[0], 2); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { pages.publish(held[1], 3); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { pages.publish(0, 3); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(pages.match_prefix(Hashes{2}), 0);
  EXPECT_EQ(pages.match_prefix(Hashes{3}), 0);
}

TEST(PageAllocator, WrongReleasesAndRetainsChangeNothing) {
  PageAllocator pages(6, 64);
  const Pages held = pages.allocate(2);
  const int32_t stranger = held[0] + held[1];  // 1 + 2: still free
  for (const Pages& wrong : {Pages{held[0], stranger}, Pages{held[0], held[0]}, Pages{held[1], 0},
                             Pages{held[1], -1}, Pages{held[0], 6}, Pages{held[0], 1 << 30}}) {
    EXPECT_EQ(error_of([&] { pages.release(wrong); }), ErrorCode::kInvalidArgument);
    expect_counts(pages, 3, 2, 0, 0);
  }
  EXPECT_EQ(error_of([&] { pages.retain(Pages{held[0], stranger}); }), ErrorCode::kInvalidArgument);
  pages.retain(Pages{held[0], held[0]});
  pages.release(Pages{held[0], held[0], held[1]});
  expect_counts(pages, 4, 1, 0, 0);
  pages.release(Pages{held[0]});
  expect_counts(pages, 5, 0, 0, 0);
  // All references of a page in one call: it becomes free, or cached, once.
  const Pages twice = pages.allocate(2);
  pages.retain(twice);
  pages.publish(twice[1], 9);
  pages.release(Pages{twice[0], twice[1], twice[0], twice[1]});
  expect_counts(pages, 4, 0, 1, 0);
  EXPECT_EQ(error_of([&] { pages.release(Pages{held[0]}); }), ErrorCode::kInvalidArgument);
}

TEST(PageAllocator, GivingPagesBackAllocatesNothing) {
  PageAllocator pages(1000, 1);
  const Pages held = pages.allocate(999);
  for (size_t i = 0; i < 500; ++i) pages.publish(held[i], i);
  const test::AllocationCounter allocations;
  pages.release(held);
  EXPECT_EQ(allocations.count(), 0);
}

// What an allocator is, in the most direct words: sets and lists.
struct Model {
  explicit Model(int32_t num_pages) {
    for (int32_t page = 1; page < num_pages; ++page) free.insert(page);
  }

  std::set<int32_t> free;
  std::map<int32_t, int> references;
  std::map<uint64_t, int32_t> published;
  std::list<int32_t> cached;  // the least recently used one first
  int64_t evictions = 0;

  bool is_held(int32_t page) const { return references.contains(page); }
  std::optional<uint64_t> hash_of(int32_t page) const {
    for (const auto& [hash, owner] : published) {
      if (owner == page) return hash;
    }
    return std::nullopt;
  }
  void take(int32_t page) {
    cached.remove(page);
    ++references[page];
  }
  void give_back(int32_t page) {
    if (--references[page] > 0) return;
    references.erase(page);
  }
};

// Both together; every operation compares what they say.
class ModelledAllocator {
 public:
  static constexpr int32_t kNumPages = 6;

  void allocate(int64_t count) {
    const auto available = static_cast<int64_t>(model_.free.size() + model_.cached.size());
    RC_ASSERT(allocator_.can_allocate(count) == (count >= 0 && count <= available));
    Pages got;
    const auto error = error_of([&] { got = allocator_.allocate(count); });
    if (count < 0) return RC_ASSERT(error == ErrorCode::kInvalidArgument);
    if (count > available) return RC_ASSERT(error == ErrorCode::kOutOfMemory);
    RC_ASSERT(!error && static_cast<int64_t>(got.size()) == count);
    for (const int32_t page : got) {
      if (!model_.free.empty()) {
        RC_ASSERT(model_.free.erase(page) == 1u);
      } else {
        RC_ASSERT(page == model_.cached.front());
        model_.cached.pop_front();
        model_.published.erase(*model_.hash_of(page));
        ++model_.evictions;
      }
      model_.references[page] = 1;
    }
  }

  void publish(int32_t page, uint64_t hash) {
    bool found = false;
    const auto error = error_of([&] { found = allocator_.publish(page, hash); });
    const auto former = model_.hash_of(page);
    if (!model_.is_held(page) || (former && *former != hash)) {
      return RC_ASSERT(error == ErrorCode::kInvalidArgument);
    }
    RC_ASSERT(!error);
    model_.published.emplace(hash, page);
    RC_ASSERT(found == (model_.published.at(hash) == page));
  }

  void acquire(const Hashes& hashes) {
    Pages expected;
    for (const uint64_t hash : hashes) {
      if (!model_.published.contains(hash)) break;
      expected.push_back(model_.published.at(hash));
    }
    RC_ASSERT(allocator_.match_prefix(hashes) == static_cast<int64_t>(expected.size()));
    RC_ASSERT(allocator_.acquire_prefix(hashes) == expected);
    for (const int32_t page : expected) model_.take(page);
  }

  void retain(const Pages& pages) {
    const auto error = error_of([&] { allocator_.retain(pages); });
    const bool legal =
        std::all_of(pages.begin(), pages.end(), [&](int32_t page) { return model_.is_held(page); });
    RC_ASSERT(error.has_value() != legal);
    if (!legal) return RC_ASSERT(error == ErrorCode::kInvalidArgument);
    for (const int32_t page : pages) ++model_.references[page];
  }

  void release(const Pages& pages) {
    const auto error = error_of([&] { allocator_.release(pages); });
    std::map<int32_t, int> mentions;
    for (const int32_t page : pages) ++mentions[page];
    const bool legal = std::all_of(mentions.begin(), mentions.end(), [&](const auto& mention) {
      return model_.is_held(mention.first) && model_.references[mention.first] >= mention.second;
    });
    RC_ASSERT(error.has_value() != legal);
    if (!legal) return RC_ASSERT(error == ErrorCode::kInvalidArgument);
    for (const int32_t page : pages) model_.give_back(page);
    std::set<int32_t> seen;
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
      if (model_.is_held(*page) || !seen.insert(*page).second) continue;
      if (model_.hash_of(*page)) {
        model_.cached.push_back(*page);
      } else {
        model_.free.insert(*page);
      }
    }
  }

  // As release(), of the pages that are held only: random lists rarely are.
  void release_held(Pages pages) {
    std::erase_if(pages, [&](int32_t page) { return !model_.is_held(page); });
    release(pages);
  }

  void compare() const {
    const PageCounts counts = allocator_.counts();
    RC_ASSERT(counts.total == kNumPages - 1);
    RC_ASSERT(counts.total == counts.free + counts.referenced + counts.cached);
    RC_ASSERT(counts.free == static_cast<int64_t>(model_.free.size()));
    RC_ASSERT(counts.referenced == static_cast<int64_t>(model_.references.size()));
    RC_ASSERT(counts.cached == static_cast<int64_t>(model_.cached.size()));
    RC_ASSERT(counts.evictions == model_.evictions);
    for (uint64_t hash = 0; hash < kNumPages + 2; ++hash) {
      RC_ASSERT((allocator_.match_prefix(Hashes{hash}) == 1) == model_.published.contains(hash));
    }
  }

 private:
  PageAllocator allocator_{kNumPages, 64};
  Model model_{kNumPages};
};

TEST(PageAllocator, AgreesWithASimpleModelOnRandomCalls) {
  // Arguments are page numbers or hashes, a few of them out of range. rapidcheck narrows inRange at
  // small sizes; 100 is the size at which the whole range is used.
  const auto number = [](int lowest, int highest) {
    return rc::gen::resize(100, rc::gen::inRange(lowest, highest + 1));
  };
  using Call = std::tuple<int, int, std::vector<int>>;  // kind, number of arguments, arguments
  const auto call = rc::gen::tuple(
      number(0, 6), number(0, 4),
      rc::gen::container<std::vector<int>>(4, number(-1, ModelledAllocator::kNumPages)));
  const auto calls = rc::gen::scale(4, rc::gen::container<std::vector<Call>>(call));
  EXPECT_TRUE(test::holds("page allocator against a model", [&] {
    ModelledAllocator both;
    for (const auto& [kind, count, arguments] : *calls) {
      const Pages pages(arguments.begin(), arguments.begin() + count);
      switch (kind) {
        case 0:
          both.allocate(arguments[0]);
          break;
        case 1:
          both.publish(arguments[0], static_cast<uint64_t>(arguments[1]));
          break;
        case 2:
          both.acquire(Hashes(pages.begin(), pages.end()));
          break;
        case 3:
          both.retain(pages);
          break;
        case 4:
          both.release(pages);
          break;
        default:
          both.release_held(pages);
          break;
      }
      both.compare();
    }
  }));
}

TEST(PageAllocator, MillionsOfPagesCostTheSameEach) {
  // Two million calls on a large cache and a full eviction list: linear searching would take
  // minutes.
  PageAllocator pages(200'001, 1);
  Pages held = pages.allocate(200'000);
  for (const int32_t page : held) pages.publish(page, static_cast<uint64_t>(page) * 0x10001);
  pages.release(held);
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 1000; ++i) {
      held = pages.allocate(20);
      pages.release(pages.acquire_prefix(Hashes{uint64_t{200'000} * 0x10001}));
      for (const int32_t page : held) {
        pages.publish(page, static_cast<uint64_t>(page) * 0x10001 + 1);
      }
      pages.release(held);
    }
  }
  expect_counts(pages, 0, 0, 200'000, 100'000);
}

}  // namespace
}  // namespace fovea
