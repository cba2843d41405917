#include "src/replay/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "src/replay/hash.h"
#include "tests/support/rng.h"

namespace fovea::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

SchedulerConfig config_of(int64_t page_size, int64_t num_pages) {
  SchedulerConfig config;
  config.page_size = page_size;
  config.num_pages = num_pages;
  config.chunk = 8192;
  config.max_batch = 64;
  return config;
}

PageHashFunction no_hashes() {
  return [](int64_t) { return std::vector<uint64_t>(); };
}

// Hashes of prompts in which the first `shared` pages are common to all requests.
PageHashFunction shared_hashes(std::vector<SchedulerRequest> requests, int64_t page_size,
                               int64_t shared) {
  return [=](int64_t r) {
    std::vector<uint64_t> hashes;
    const int64_t pages = requests[static_cast<size_t>(r)].prompt_tokens / page_size;
    for (int64_t page = 0; page < pages; ++page) {
      hashes.push_back(hash_words(1, page, page < shared ? -1 : r));
    }
    return hashes;
  };
}

// Executes steps against a model of the cache: what each slot holds. Verifies that every row finds
// its whole prefix in its own slots, and that no request misses or repeats a row.
class FakeExecutor {
 public:
  FakeExecutor(const SchedulerConfig& config, std::vector<SchedulerRequest> requests,
               const PageHashFunction& hashes)
      : config_(config),
        requests_(requests),
        hashes_(hashes),
        scheduler_(config, requests, hashes),
        produced_(requests.size(), 0) {}

  void run() {
    StepBatch batch;
    while (scheduler_.next(&batch)) {
      run_step(batch);
      scheduler_.commit();
      steps_.push_back(batch.facts);
      ASSERT_LT(steps_.size(), 100000u) << "no progress";
    }
    const PageCounts counts = scheduler_.allocator().counts();
    EXPECT_EQ(counts.referenced, 0);
    EXPECT_EQ(counts.free + counts.cached, counts.total);
    EXPECT_EQ(scheduler_.table().num_free(), scheduler_.table().num_rows() - 1);
    for (size_t r = 0; r < requests_.size(); ++r) {
      const RequestState& state = scheduler_.state(static_cast<int64_t>(r));
      EXPECT_TRUE(state.finished);
      if (state.outcome == RequestOutcome::kCompleted) {
        EXPECT_EQ(produced_[r], requests_[r].prompt_tokens + requests_[r].output_tokens - 1);
      }
    }
  }

  Scheduler& scheduler() { return scheduler_; }
  const std::vector<ReplayStep>& steps() const { return steps_; }

 private:
  // Identity of a token: its page's hash where the page is shared, else its request.
  std::pair<uint64_t, int64_t> token(int64_t r, int64_t position) {
    const std::vector<uint64_t> hashes = hashes_(r);
    const auto page = static_cast<size_t>(position / config_.page_size);
    return {page < hashes.size() ? hashes[page] : hash_words(2, r), position};
  }

  int32_t slot(const StepEntry& entry, int64_t position) {
    const ConstTensorView table = scheduler_.table().view();
    return static_cast<const int32_t*>(table.data)[entry.pool_row * table.stride[0] + position];
  }

  void run_step(const StepBatch& batch) {
    int64_t prefill = 0, decode = 0;
    for (const StepEntry& entry : batch.entries) {
      const auto r = static_cast<size_t>(entry.request);
      ASSERT_LT(entry.begin, entry.end);
      ASSERT_TRUE(entry.pool_row > 0);
      (entry.decode ? decode : prefill) += entry.end - entry.begin;
      if (entry.decode) {
        ASSERT_EQ(entry.end, entry.begin + 1);
      }
      for (int64_t p = entry.begin; p < entry.end; ++p) {
        ASSERT_GE(slot(entry, p), config_.page_size) << "the dummy page";
        content_[slot(entry, p)] = token(entry.request, p);
      }
      if (produced_[r] == 0) produced_[r] = scheduler_.state(entry.request).hit_tokens;
      ASSERT_EQ(entry.first_new, produced_[r]);
      ASSERT_LE(entry.begin, produced_[r]);
      produced_[r] = std::max(produced_[r], entry.end);
    }
    for (const StepEntry& entry : batch.entries) {
      for (int64_t p = 0; p < entry.end; ++p) {
        ASSERT_EQ(content_[slot(entry, p)], token(entry.request, p))
            << "request " << entry.request << ", position " << p << " of " << entry.end;
      }
    }
    EXPECT_EQ(batch.facts.prefill_tokens, prefill);
    EXPECT_EQ(batch.facts.decode_tokens, decode);
    EXPECT_LE(prefill, config_.chunk);
    EXPECT_LE(static_cast<int64_t>(batch.entries.size()), config_.max_batch);
    if (!config_.mixed) {
      EXPECT_TRUE(prefill == 0 || decode == 0);
    }
  }

  SchedulerConfig config_;
  std::vector<SchedulerRequest> requests_;
  PageHashFunction hashes_;
  Scheduler scheduler_;
  std::vector<int64_t> produced_;
  std::map<int32_t, std::pair<uint64_t, int64_t>> content_;
  std::vector<ReplayStep> steps_;
};

TEST(Scheduler, ChunksPrefillsThenDecodesTheBatch) {
  SchedulerConfig config = config_of(4, 100);
  config.chunk = 10;
  FakeExecutor run(config, {{12, 3}, {5, 1}}, no_hashes());
  run.run();
  // 10 + 2 rows of the first prompt, 5 of the second in the same chunk; one output token comes
  // from the last prompt row, so that the first request decodes twice and the second never.
  std::vector<int64_t> prefill, decode;
  for (const ReplayStep& step : run.steps()) {
    prefill.push_back(step.prefill_tokens);
    decode.push_back(step.decode_tokens);
  }
  EXPECT_THAT(prefill, ElementsAre(10, 7, 0, 0));
  EXPECT_THAT(decode, ElementsAre(0, 0, 1, 1));
}

TEST(Scheduler, MixedStepsGiveDecodeRowsTheirPlaceFirst) {
  SchedulerConfig config = config_of(4, 100);
  config.chunk = 10;
  config.mixed = true;
  FakeExecutor run(config, {{9, 4}, {12, 2}}, no_hashes());
  run.run();
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (const ReplayStep& step : run.steps()) {
    rows.emplace_back(step.decode_tokens, step.prefill_tokens);
  }
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_THAT(rows, ElementsAre(Pair(0, 10), Pair(1, 9), Pair(1, 2), Pair(2, 0)));
  EXPECT_EQ(run.steps()[1].kind, StepKind::kMixed);
}

TEST(Scheduler, SharesPublishedPagesButNeverTheLastToken) {
  // Three full pages are common; the second prompt ends with the third page, so that only two of
  // them may be taken.
  const std::vector<SchedulerRequest> requests = {{13, 1}, {12, 1}, {14, 1}};
  SchedulerConfig config = config_of(4, 100);
  config.chunk = 13;  // the second request is admitted in the next step
  FakeExecutor run(config, requests, shared_hashes(requests, 4, 3));
  run.run();
  EXPECT_EQ(run.scheduler().state(0).hit_tokens, 0);
  EXPECT_EQ(run.scheduler().state(1).hit_tokens, 8);
  EXPECT_EQ(run.scheduler().state(2).hit_tokens, 12);
  EXPECT_EQ(run.steps()[1].hit_tokens, 20);
}

TEST(Scheduler, RequestsOfOneStepShareThePagesItComputes) {
  const std::vector<SchedulerRequest> requests = {{13, 1}, {13, 1}};
  FakeExecutor run(config_of(4, 100), requests, shared_hashes(requests, 4, 3));
  run.run();
  EXPECT_EQ(run.steps().size(), 1u);
  EXPECT_EQ(run.scheduler().state(1).hit_tokens, 12);
  // A chunk that ends inside the first prompt leaves the second request to the next step.
  SchedulerConfig config = config_of(4, 100);
  config.chunk = 10;
  FakeExecutor chunked(config, {{13, 1}, {13, 1}}, shared_hashes(requests, 4, 3));
  chunked.run();
  EXPECT_EQ(chunked.scheduler().state(1).hit_tokens, 12);
  EXPECT_EQ(chunked.steps()[0].hit_tokens, 0);
}

TEST(Scheduler, RejectsWhatCanNeverFitAndRunsTheRest) {
  FakeExecutor run(config_of(4, 5), {{17, 4}, {17, 5}, {4, 1}, {100, 1}}, no_hashes());
  run.run();
  EXPECT_EQ(run.scheduler().completed(), 2);
  EXPECT_EQ(run.scheduler().rejected(), 2);
  EXPECT_EQ(run.scheduler().state(0).outcome, RequestOutcome::kCompleted);  // 20 tokens, 5 pages
  EXPECT_EQ(run.scheduler().state(1).outcome, RequestOutcome::kRejected);
  EXPECT_THAT(run.scheduler().state(3).message,
              HasSubstr("needs 100 tokens (25 pages of 4), but the whole cache has 5 pages"));
}

TEST(Scheduler, NothingButRejectedRequestsIsAnEmptyRun) {
  FakeExecutor run(config_of(4, 2), {{17, 4}}, no_hashes());
  run.run();
  EXPECT_TRUE(run.steps().empty());
}

TEST(Scheduler, PreemptsTheYoungestAndRecomputesIt) {
  // Two requests of 8 + 40 tokens in 14 pages of 4: the reserve lets both in, but not to the end.
  FakeExecutor run(config_of(4, 14), {{8, 40}, {8, 40}, {8, 40}}, no_hashes());
  run.run();
  EXPECT_EQ(run.scheduler().completed(), 3);
  EXPECT_GT(run.scheduler().preempted(), 0);
  EXPECT_EQ(run.scheduler().state(0).preemptions, 0);
  EXPECT_EQ(run.scheduler().pages_peak(), 14);
}

TEST(Scheduler, TraceArrivalsWaitForTheVirtualClock) {
  SchedulerConfig config = config_of(4, 100);
  config.arrivals = Arrivals::kTrace;
  config.token_scale = 2;
  config.cost = {1.0, 10.0, 0.5};
  FakeExecutor run(config, {{4, 2, 5}, {4, 1, 6}, {4, 1, 1000}}, no_hashes());
  run.run();
  std::vector<double> starts;
  for (const ReplayStep& step : run.steps()) starts.push_back(step.virtual_ms);
  // 5: prefill of the first (2 * 4 * 1 ms); 13: the second has arrived, its prefill comes first;
  // 21: decode (2 * (10 + 0.5) ms); nothing runs from 42 to 1000.
  EXPECT_THAT(starts, ElementsAre(5, 13, 21, 1000));
  EXPECT_EQ(run.scheduler().state(0).first_token_virtual_ms, 13);
  EXPECT_EQ(run.scheduler().state(0).finish_virtual_ms, 42);
  EXPECT_EQ(run.steps()[1].waiting, 0);
}

TEST(Scheduler, AFailedStepIsGivenAgain) {
  const std::vector<SchedulerRequest> requests = {{9, 4}, {12, 2}};
  Scheduler scheduler(config_of(4, 20), requests, no_hashes());
  StepBatch first, again;
  while (scheduler.next(&first)) {
    const PageCounts counts = scheduler.allocator().counts();
    ASSERT_TRUE(scheduler.next(&again));
    EXPECT_EQ(scheduler.allocator().counts().referenced, counts.referenced);
    ASSERT_EQ(again.entries.size(), first.entries.size());
    EXPECT_EQ(again.entries[0].begin, first.entries[0].begin);
    scheduler.commit();
  }
  EXPECT_EQ(scheduler.completed(), 2);
}

// Random traffic in caches from roomy to barely large enough, with and without sharing and mixing.
TEST(Scheduler, RandomTrafficAlwaysFindsItsOwnTokens) {
  test::Rng rng(3);
  int64_t preempted = 0, hits = 0, evictions = 0;
  for (int round = 0; round < 60; ++round) {
    const int64_t page_size = rng.integer(1, 9);
    std::vector<SchedulerRequest> requests;
    int64_t largest = 0;
    for (int64_t r = 0; r < 12; ++r) {
      requests.push_back({rng.integer(1, 60), rng.integer(1, 70), static_cast<double>(100 * r)});
      largest = std::max(largest, requests.back().prompt_tokens + requests.back().output_tokens);
    }
    SchedulerConfig config = config_of(page_size, (largest + rng.integer(0, 80)) / page_size + 1);
    config.chunk = rng.integer(1, 40);
    config.max_batch = rng.integer(1, 6);
    config.mixed = rng.integer(0, 1) == 1;
    config.arrivals = rng.integer(0, 1) == 1 ? Arrivals::kTrace : Arrivals::kAsap;
    const int64_t shared = rng.integer(0, 5);
    FakeExecutor run(config, requests,
                     shared == 0 ? no_hashes() : shared_hashes(requests, page_size, shared));
    run.run();
    EXPECT_EQ(run.scheduler().completed(), 12);
    preempted += run.scheduler().preempted();
    evictions += run.scheduler().allocator().counts().evictions;
    for (int64_t r = 0; r < 12; ++r) hits += run.scheduler().state(r).hit_tokens;
  }
  // The rounds really reach the rare paths.
  EXPECT_GT(preempted, 10);
  EXPECT_GT(hits, 100);
  EXPECT_GT(evictions, 10);
}

}  // namespace
}  // namespace fovea::internal
