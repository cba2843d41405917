#include "src/replay/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "src/replay/acceptance.h"
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

// `draft_tokens` a round, each accepted with `chance`.
void add_drafts(SchedulerConfig* config, int64_t draft_tokens, double chance, uint64_t seed = 0) {
  config->draft_tokens = draft_tokens;
  config->accepted = [model = AcceptanceModel(chance, seed)](int64_t r, int64_t first,
                                                             int64_t count) {
    return model.accepted(r, first, count);
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
      file_states(batch);
      scheduler_.commit();
      steps_.push_back(batch.facts);
      entries_.push_back(batch.entries);
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
  const std::vector<std::vector<StepEntry>>& entries() const { return entries_; }

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

  // The slots that a round writes lie in pages that the request holds.
  void expect_owned(const StepEntry& entry) {
    const std::vector<int32_t>& pages = scheduler_.state(entry.request).pages;
    ASSERT_LE(entry.end, scheduler_.table().width());
    for (int64_t p = entry.begin; p < entry.end; ++p) {
      const int64_t page = slot(entry, p) / config_.page_size;
      ASSERT_EQ(page, pages[static_cast<size_t>(p / config_.page_size)]);
      ASSERT_EQ(slot(entry, p) % config_.page_size, p % config_.page_size);
    }
  }

  // A recurrent state, one per pool row: it stands where the request's rows end, or comes from the
  // snapshot of the last page that was found in the cache.
  void expect_state(const StepEntry& entry) {
    const std::pair at(entry.request, entry.begin);
    if (!entry.starts) {
      ASSERT_EQ(states_[entry.pool_row], at);
    } else if (entry.begin > 0 && !config_.rules.share_within_step) {
      ASSERT_EQ(entry.begin % config_.page_size, 0);
      const auto page = static_cast<size_t>(entry.begin / config_.page_size - 1);
      ASSERT_EQ(snapshots_[scheduler_.state(entry.request).pages[page]],
                hashes_(entry.request)[page]);
    }
  }

  void file_states(const StepBatch& batch) {
    for (const StepEntry& entry : batch.entries) {
      states_[entry.pool_row] = {entry.request, entry.kept_end};
      for (int64_t i = entry.begin / config_.page_size; i < entry.published_end; ++i) {
        const auto page = static_cast<size_t>(i);
        snapshots_[scheduler_.state(entry.request).pages[page]] = hashes_(entry.request)[page];
      }
    }
  }

  void run_step(const StepBatch& batch) {
    int64_t prefill = 0, decode = 0, computed = 0;
    ASSERT_EQ(batch.entries.empty(), batch.facts.kind == StepKind::kIdle);
    for (const StepEntry& entry : batch.entries) {
      const auto r = static_cast<size_t>(entry.request);
      ASSERT_LT(entry.begin, entry.end);
      ASSERT_TRUE(entry.pool_row > 0);
      (entry.decode ? decode : prefill) += entry.kept_rows();
      computed += entry.rows();
      const bool round = batch.facts.kind == StepKind::kVerify;
      if (entry.decode) {
        ASSERT_EQ(entry.rows(), round ? config_.draft_tokens + 1 : 1);
        ASSERT_EQ(scheduler_.state(entry.request).known, entry.begin + 1);
      }
      ASSERT_GT(entry.kept_end, entry.begin);
      ASSERT_LE(entry.kept_end, entry.end);
      ASSERT_TRUE(round || entry.kept_end == entry.end);
      expect_owned(entry);
      for (int64_t p = entry.begin; p < entry.end; ++p) {
        ASSERT_GE(slot(entry, p), config_.page_size) << "the dummy page";
        content_[slot(entry, p)] =
            entry.is_wrong(p) ? std::pair(~uint64_t{0}, p) : token(entry.request, p);
      }
      expect_state(entry);
      if (produced_[r] == 0) produced_[r] = scheduler_.state(entry.request).hit_tokens;
      ASSERT_EQ(entry.first_new, produced_[r]);
      ASSERT_LE(entry.begin, produced_[r]);
      produced_[r] = std::max(produced_[r], entry.kept_end);
    }
    for (const StepEntry& entry : batch.entries) {
      for (int64_t p = 0; p < entry.kept_end; ++p) {
        ASSERT_EQ(content_[slot(entry, p)], token(entry.request, p))
            << "request " << entry.request << ", position " << p << " of " << entry.end;
      }
    }
    EXPECT_EQ(batch.num_computed(), computed);
    EXPECT_EQ(batch.facts.prefill_tokens, prefill);
    EXPECT_EQ(batch.facts.decode_tokens, decode);
    EXPECT_LE(prefill, config_.chunk);
    EXPECT_LE(static_cast<int64_t>(batch.entries.size()), config_.max_batch);
    if (!config_.mixed) {
      EXPECT_TRUE(prefill == 0 || decode == 0);
    }
    if (config_.draft_tokens > 0) {
      EXPECT_EQ(batch.facts.kind == StepKind::kVerify, decode > 0 && prefill == 0);
    }
  }

  SchedulerConfig config_;
  std::vector<SchedulerRequest> requests_;
  PageHashFunction hashes_;
  Scheduler scheduler_;
  std::vector<int64_t> produced_;
  std::map<int32_t, std::pair<uint64_t, int64_t>> content_;
  std::map<int32_t, std::pair<int64_t, int64_t>> states_;  // by pool row: request, rows
  std::map<int32_t, uint64_t> snapshots_;  // by page: hash of what lies before its end
  std::vector<ReplayStep> steps_;
  std::vector<std::vector<StepEntry>> entries_;
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
  // 0: idle until 5; 5: prefill of the first (2 * 4 * 1 ms); 13: the second has arrived, its
  // prefill comes first; 21: decode (2 * (10 + 0.5) ms); 42: idle until 1000.
  EXPECT_THAT(starts, ElementsAre(0, 5, 13, 21, 42, 1000));
  EXPECT_EQ(run.steps()[0].kind, StepKind::kIdle);
  EXPECT_EQ(run.steps()[4].kind, StepKind::kIdle);
  EXPECT_EQ(run.steps()[4].running, 0);
  EXPECT_EQ(run.scheduler().state(0).first_token_virtual_ms, 13);
  EXPECT_EQ(run.scheduler().state(0).finish_virtual_ms, 42);
  EXPECT_EQ(run.steps()[2].waiting, 0);
}

TEST(Scheduler, ARoundCostsItsRowsAndItsDraftForwards) {
  SchedulerConfig config = config_of(4, 100);
  config.cost = {1.0, 10.0, 0.5, 3.0};
  add_drafts(&config, 2, 1.0);
  FakeExecutor run(config, {{4, 5}}, no_hashes());
  run.run();
  ASSERT_EQ(run.steps().size(), 3u);
  EXPECT_EQ(run.steps()[2].virtual_ms - run.steps()[1].virtual_ms, 10 + 3 * 0.5 + 2 * 3);
}

// Rows [begin, kept_end) of every round of a single request.
std::vector<std::pair<int64_t, int64_t>> kept_rows_of(const FakeExecutor& run) {
  std::vector<std::pair<int64_t, int64_t>> kept;
  for (const std::vector<StepEntry>& entries : run.entries()) {
    if (entries.front().decode) kept.emplace_back(entries.front().begin, entries.front().kept_end);
  }
  return kept;
}

TEST(Scheduler, ARoundKeepsTheAcceptedTokensAndOneMore) {
  using Pair = std::pair<int64_t, int64_t>;
  // Five prompt rows give token 5; tokens 5..13 are output, of which 5..12 need rows.
  const auto rounds = [](std::vector<int64_t> wrong) {
    SchedulerConfig config = config_of(4, 100);
    config.draft_tokens = 3;
    config.accepted = [wrong](int64_t, int64_t first, int64_t count) {
      int64_t accepted = 0;
      while (accepted < count && std::count(wrong.begin(), wrong.end(), first + accepted) == 0) {
        ++accepted;
      }
      return accepted;
    };
    FakeExecutor run(config, {{5, 9}}, no_hashes());
    run.run();
    return std::pair(kept_rows_of(run), run.scheduler().drafts());
  };
  const auto [all, all_drafts] = rounds({});
  EXPECT_THAT(all, ElementsAre(Pair(5, 9), Pair(9, 13)));
  EXPECT_EQ(all_drafts.accepted, 6);
  EXPECT_EQ(all_drafts.decided, 6);
  EXPECT_EQ(all_drafts.rolled_back_rows, 0);
  // Token 7 is wrong: rows 5 and 6 stay, and row 6 gives token 7. Token 11 is not reached again.
  const auto [some, some_drafts] = rounds({7, 8, 11});
  EXPECT_THAT(some, ElementsAre(Pair(5, 7), Pair(7, 8), Pair(8, 11), Pair(11, 13)));
  EXPECT_EQ(some_drafts.rounds, 4);
  EXPECT_EQ(some_drafts.drafted, 12);
  // 6; then 9 and 10; then 12 and 13, where the output ends before the third draft.
  EXPECT_EQ(some_drafts.accepted, 5);
  EXPECT_EQ(some_drafts.decided, 8);
  EXPECT_EQ(some_drafts.rolled_back_rows, 2 + 3 + 1 + 2);
  EXPECT_THAT(some_drafts.accepted_lengths, ElementsAre(1, 1, 2, 0));
  const auto [none, none_drafts] = rounds({6, 7, 8, 9, 10, 11, 12, 13, 14});
  EXPECT_EQ(none.size(), 8u);
  EXPECT_EQ(none_drafts.accepted, 0);
  EXPECT_EQ(none_drafts.decided, 8);
}

TEST(Scheduler, APromptWithOneOutputTokenDraftsNothing) {
  SchedulerConfig config = config_of(4, 2);
  add_drafts(&config, 3, 1.0);
  FakeExecutor run(config, {{8, 1}, {8, 2}}, no_hashes());
  run.run();
  EXPECT_EQ(run.scheduler().completed(), 1);
  EXPECT_EQ(run.scheduler().drafts().rounds, 0);
  // One row is missing, and three more are written past it.
  EXPECT_THAT(run.scheduler().state(1).message, HasSubstr("needs 12 tokens (3 pages of 4)"));
}

TEST(Scheduler, MixedStepsDraftOnlyWhenNothingIsPrefilled) {
  SchedulerConfig config = config_of(4, 100);
  config.chunk = 10;
  config.mixed = true;
  add_drafts(&config, 2, 1.0);
  FakeExecutor run(config, {{9, 5}, {12, 4}}, no_hashes());
  run.run();
  std::vector<StepKind> kinds;
  std::vector<int64_t> decode;
  for (const ReplayStep& step : run.steps()) {
    kinds.push_back(step.kind);
    decode.push_back(step.decode_tokens);
  }
  EXPECT_THAT(kinds, ElementsAre(StepKind::kPrefill, StepKind::kMixed, StepKind::kMixed,
                                 StepKind::kVerify));
  EXPECT_THAT(decode, ElementsAre(0, 1, 1, 5));
  EXPECT_EQ(run.steps()[3].verify_rows, 6);
}

TEST(Scheduler, AcceptanceIsNearItsChanceAndIndependentOfTheSchedule) {
  std::vector<SchedulerRequest> requests(40, SchedulerRequest{20, 101, 0});
  SchedulerConfig config = config_of(4, 2000);
  add_drafts(&config, 3, 0.7, 5);
  const auto drafts_of = [&](const SchedulerConfig& changed) {
    FakeExecutor run(changed, requests, no_hashes());
    run.run();
    return run.scheduler().drafts();
  };
  const ReplayDrafts drafts = drafts_of(config);
  // About 3300 decisions: the standard error is 0.008.
  EXPECT_NEAR(static_cast<double>(drafts.accepted) / static_cast<double>(drafts.decided), 0.7,
              0.03);
  EXPECT_EQ(drafts.drafted, 3 * drafts.verifications);
  EXPECT_EQ(std::accumulate(drafts.accepted_lengths.begin(), drafts.accepted_lengths.end(), 0),
            drafts.verifications);
  // Every row that is not the last of its prompt is kept by one verification.
  EXPECT_EQ(4 * drafts.verifications - drafts.rolled_back_rows, 40 * 100);
  config.chunk = 33;
  config.max_batch = 7;
  const ReplayDrafts other = drafts_of(config);
  EXPECT_EQ(other.accepted_lengths, drafts.accepted_lengths);
  EXPECT_GT(other.rounds, drafts.rounds);
}

TEST(Acceptance, ChancesOfZeroAndOneAreCertain) {
  for (int64_t position = 0; position < 1000; ++position) {
    EXPECT_EQ(AcceptanceModel(0.0, 1).accepted(3, position, 5), 0);
    EXPECT_EQ(AcceptanceModel(1.0, 1).accepted(3, position, 5), 5);
  }
  // Another seed, request or position is another draw.
  const auto pattern = [](uint64_t seed, int64_t request, int64_t first) {
    std::vector<bool> draws;
    for (int64_t p = first; p < first + 64; ++p) {
      draws.push_back(AcceptanceModel(0.5, seed).accepts(request, p));
    }
    return draws;
  };
  EXPECT_EQ(pattern(1, 2, 3), pattern(1, 2, 3));
  EXPECT_NE(pattern(1, 2, 3), pattern(2, 2, 3));
  EXPECT_NE(pattern(1, 2, 3), pattern(1, 3, 3));
  EXPECT_NE(pattern(1, 2, 3), pattern(1, 2, 4));
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

TEST(Scheduler, PrefillsStopAtAlignedPositions) {
  SchedulerConfig config = config_of(4, 40);
  config.chunk = 10;
  config.rules.prefill_alignment = 4;
  FakeExecutor run(config, {{23, 1}, {5, 1}}, no_hashes());
  run.run();
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const std::vector<StepEntry>& entries : run.entries()) {
    for (const StepEntry& entry : entries) parts.emplace_back(entry.begin, entry.end);
  }
  using Part = std::pair<int64_t, int64_t>;
  EXPECT_EQ(parts, (std::vector<Part>{{0, 8}, {8, 16}, {16, 23}, {0, 5}}));
}

TEST(Scheduler, PagesOfAStepCanWaitForItsCommit) {
  for (const bool within : {true, false}) {
    SchedulerConfig config = config_of(4, 40);
    config.rules.share_within_step = within;
    const std::vector<SchedulerRequest> requests = {{9, 1}, {9, 1}};
    FakeExecutor run(config, requests, shared_hashes(requests, 4, 2));
    run.run();
    EXPECT_EQ(run.scheduler().state(1).hit_tokens, within ? 8 : 0);
    EXPECT_EQ(run.entries()[0][0].published_end, 2);
  }
}

// Random traffic in caches from roomy to barely large enough, with and without sharing and mixing.
TEST(Scheduler, RandomTrafficAlwaysFindsItsOwnTokens) {
  test::Rng rng(3);
  int64_t preempted = 0, hits = 0, evictions = 0, drafted_preempted = 0, rolled_back = 0;
  for (int round = 0; round < 120; ++round) {
    const int64_t page_size = rng.integer(1, 9);
    std::vector<SchedulerRequest> requests;
    int64_t largest = 0;
    for (int64_t r = 0; r < 12; ++r) {
      requests.push_back({rng.integer(1, 60), rng.integer(1, 70), static_cast<double>(100 * r)});
      largest = std::max(largest, requests.back().prompt_tokens + requests.back().output_tokens);
    }
    const int64_t draft_tokens = round % 2 == 0 ? 0 : rng.integer(1, 7);
    largest += draft_tokens;
    SchedulerConfig config = config_of(page_size, (largest + rng.integer(0, 80)) / page_size + 1);
    if (draft_tokens > 0) {
      add_drafts(&config, draft_tokens, rng.uniform(), static_cast<uint64_t>(round));
    }
    config.rules.share_within_step = rng.integer(0, 1) == 0;
    config.rules.prefill_alignment = rng.integer(0, 1) == 0 ? 1 : rng.integer(2, 8);
    config.chunk = rng.integer(config.rules.prefill_alignment, 40);
    config.max_batch = rng.integer(1, 6);
    config.mixed = rng.integer(0, 1) == 1;
    config.arrivals = rng.integer(0, 1) == 1 ? Arrivals::kTrace : Arrivals::kAsap;
    const int64_t shared = rng.integer(0, 5);
    FakeExecutor run(config, requests,
                     shared == 0 ? no_hashes() : shared_hashes(requests, page_size, shared));
    run.run();
    EXPECT_EQ(run.scheduler().completed(), 12);
    preempted += run.scheduler().preempted();
    drafted_preempted += draft_tokens > 0 ? run.scheduler().preempted() : 0;
    rolled_back += run.scheduler().drafts().rolled_back_rows;
    evictions += run.scheduler().allocator().counts().evictions;
    for (int64_t r = 0; r < 12; ++r) hits += run.scheduler().state(r).hit_tokens;
  }
  // The rounds really reach the rare paths.
  EXPECT_GT(preempted, 10);
  EXPECT_GT(drafted_preempted, 10);
  EXPECT_GT(rolled_back, 100);
  EXPECT_GT(hits, 100);
  EXPECT_GT(evictions, 10);
}

}  // namespace
}  // namespace fovea::internal
