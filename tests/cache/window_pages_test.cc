#include "fovea/window_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "fovea/error.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using testing::ElementsAre;

std::vector<int32_t> row_of(const WindowPages& pages, int64_t row) {
  const ConstTensorView table = pages.table();
  const auto* const data = static_cast<const int32_t*>(table.data) + row * table.shape[1];
  return {data, data + table.shape[1]};
}

WindowPagesConfig small_config() {
  return {.num_rows = 2, .width = 24, .num_pages = 7, .page_size = 4, .window = 6};
}

TEST(WindowPages, FreesPagesWhollyBelowTheNextWindow) {
  WindowPages pages(small_config());
  pages.extend(0, 0, 9);
  EXPECT_THAT(row_of(pages, 0), ElementsAre(1, 2, 3, -1, -1, -1));
  // Token 9 sees tokens 4..9, token 8 would see 3.
  EXPECT_EQ(pages.free_behind(0, 8), 0);
  EXPECT_EQ(pages.free_behind(0, 9), 1);
  EXPECT_THAT(row_of(pages, 0), ElementsAre(-1, 2, 3, -1, -1, -1));
  EXPECT_EQ(pages.free_behind(0, 9), 0);
  EXPECT_EQ(pages.counts().referenced, 2);
  pages.clear(0);
  EXPECT_THAT(row_of(pages, 0), ElementsAre(-1, -1, -1, -1, -1, -1));
  EXPECT_EQ(pages.counts().referenced, 0);
}

TEST(WindowPages, KeepsWhatTakenBackDraftsStillSee) {
  WindowPagesConfig config = small_config();
  config.draft_tokens = 3;
  WindowPages pages(config);
  pages.extend(0, 0, 12);
  EXPECT_EQ(pages.free_behind(0, 11), 0);  // 11 - 5 - 3 = 3: page 0 is still needed
  EXPECT_EQ(pages.free_behind(0, 12), 1);
}

TEST(WindowPages, AFailedCallChangesNothing) {
  WindowPages pages(small_config());
  pages.extend(0, 0, 16);
  const std::vector<int32_t> before = row_of(pages, 1);
  try {
    pages.extend(1, 0, 12);
    FAIL() << "three pages of two";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
  EXPECT_EQ(row_of(pages, 1), before);
  EXPECT_EQ(pages.counts().free, 2);
  EXPECT_THROW(pages.extend(2, 0, 1), Error);
  EXPECT_THROW(pages.extend(0, 3, 2), Error);
  EXPECT_THROW(pages.extend(0, 0, 25), Error);
  EXPECT_THROW(pages.free_behind(0, 25), Error);
  EXPECT_THROW(pages.clear(-1), Error);
  for (const auto change :
       {+[](WindowPagesConfig& c) { c.num_rows = 0; }, +[](WindowPagesConfig& c) { c.width = 0; },
        +[](WindowPagesConfig& c) { c.num_pages = 0; },
        +[](WindowPagesConfig& c) { c.page_size = 257; },
        +[](WindowPagesConfig& c) { c.window = 0; },
        +[](WindowPagesConfig& c) { c.draft_tokens = -1; }}) {
    WindowPagesConfig config = small_config();
    change(config);
    EXPECT_THROW(WindowPages{config}, Error);
  }
}

// Whatever the steps, every token that a later step may see has its page, no page has two owners,
// and a request never holds more than the promised number.
TEST(WindowPages, RandomStepsKeepEveryWindow) {
  test::Rng rng(4);
  for (int round = 0; round < 40; ++round) {
    WindowPagesConfig config;
    config.num_rows = 3;
    config.width = 200;
    config.page_size = rng.integer(1, 17);
    config.window = rng.integer(1, 40);
    config.draft_tokens = rng.integer(0, 4);
    config.num_pages = 1 + config.num_rows * 200;
    WindowPages pages(config);
    std::vector<int64_t> next(3, 0);
    for (int step = 0; step < 60; ++step) {
      const auto row = static_cast<size_t>(rng.integer(0, 2));
      const auto r = static_cast<int64_t>(row);
      const int64_t rows = std::min<int64_t>(rng.integer(1, 20), config.width - next[row]);
      if (rows == 0 || rng.uniform() < 0.05) {
        pages.clear(r);
        next[row] = 0;
        continue;
      }
      pages.extend(r, next[row], next[row] + rows);
      const std::vector<int32_t> held = row_of(pages, r);
      EXPECT_LE(std::count_if(held.begin(), held.end(), [](int32_t page) { return page > 0; }),
                pages.max_pages_per_row(rows));
      const int64_t taken_back = rng.integer(0, std::min(rows - 1, config.draft_tokens));
      next[row] += rows;
      pages.free_behind(r, next[row]);
      next[row] -= taken_back;  // allowed, because draft_tokens rows stay behind
      std::multiset<int32_t> owned;
      for (int64_t other = 0; other < 3; ++other) {
        const std::vector<int32_t> table = row_of(pages, other);
        for (const int32_t page : table) {
          if (page > 0) owned.insert(page);
        }
        const int64_t first =
            std::max<int64_t>(0, next[static_cast<size_t>(other)] - config.window + 1);
        for (int64_t p = first; p < next[static_cast<size_t>(other)]; ++p) {
          EXPECT_GT(table[static_cast<size_t>(p / config.page_size)], 0) << p;
        }
      }
      EXPECT_EQ(owned.size(), std::set<int32_t>(owned.begin(), owned.end()).size());
      EXPECT_EQ(static_cast<int64_t>(owned.size()), pages.counts().referenced);
    }
  }
}

}  // namespace
}  // namespace fovea
