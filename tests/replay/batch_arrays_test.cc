#include "src/replay/batch_arrays.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace fovea::internal {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<int32_t> values(const ConstTensorView& view) {
  const auto* const data = static_cast<const int32_t*>(view.data);
  return {data, data + view.shape[0]};
}

// Two requests with pages of 4 after their prefill: prompts of 5 and 3 tokens, 9 output tokens
// each. In the round that follows, the first has one right draft of three, the second all.
class BatchArraysTest : public testing::Test {
 protected:
  BatchArraysTest()
      : trace_(parse_trace("0,5,9\n0,3,9\n", "a.csv")),
        workload_(trace_, {}),
        scheduler_(config(), {{5, 9}, {3, 9}}, [](int64_t) { return std::vector<uint64_t>(); }),
        arrays_(workload_, 4) {
    scheduler_.next(&prefill_);
    arrays_.build(ForwardMode::kExtend, scheduler_, prefill_);
    first_rows_ = arrays_.rows();
    scheduler_.commit();
    scheduler_.next(&round_);
  }

  static SchedulerConfig config() {
    SchedulerConfig config;
    config.page_size = 4;
    config.num_pages = 20;
    config.chunk = 100;
    config.max_batch = 4;
    config.draft_tokens = 3;
    config.accepted = [](int64_t request, int64_t, int64_t count) {
      return request == 0 ? int64_t{1} : count;
    };
    return config;
  }

  // Slot of a position, from the pages of its request.
  int32_t slot(int64_t request, int64_t position) const {
    const int32_t page = scheduler_.state(request).pages[static_cast<size_t>(position / 4)];
    return page * 4 + static_cast<int32_t>(position % 4);
  }

  std::vector<bool> right_tokens() const {
    std::vector<bool> right;
    for (const StepRow& row : arrays_.rows()) {
      const int64_t request = round_.entries[static_cast<size_t>(row.entry)].request;
      right.push_back(row.token_id == workload_.token_id(request, row.position));
    }
    return right;
  }

  Trace trace_;
  Workload workload_;
  Scheduler scheduler_;
  BatchArrays arrays_;
  StepBatch prefill_, round_;
  std::vector<StepRow> first_rows_;
};

TEST_F(BatchArraysTest, APrefillHasTheTokensOfThePrompts) {
  ASSERT_EQ(first_rows_.size(), 8u);
  for (const StepRow& row : first_rows_) {
    EXPECT_EQ(row.token_id, workload_.token_id(row.entry, row.position));
  }
}

TEST_F(BatchArraysTest, AVerificationStartsAtTheCommittedLength) {
  arrays_.build(ForwardMode::kTargetVerify, scheduler_, round_);
  const ForwardBatch batch = arrays_.batch(scheduler_.table().view());
  EXPECT_THAT(values(batch.seq_len), ElementsAre(5, 3));
  EXPECT_THAT(values(batch.positions), ElementsAre(5, 6, 7, 8, 3, 4, 5, 6));
  EXPECT_FALSE(batch.ext_len.defined());
  EXPECT_EQ(batch.num_rows, 8);
  EXPECT_THAT(right_tokens(), ElementsAre(true, true, false, false, true, true, true, true));
  EXPECT_EQ(values(batch.out_cache_loc)[3], slot(0, 8));
  EXPECT_EQ(values(batch.out_cache_loc)[7], slot(1, 6));
}

TEST_F(BatchArraysTest, DraftExtendHasTheRowsThatStay) {
  arrays_.build(ForwardMode::kDraftExtend, scheduler_, round_);
  const ForwardBatch batch = arrays_.batch(scheduler_.table().view());
  EXPECT_THAT(values(batch.seq_len), ElementsAre(7, 7));
  EXPECT_THAT(values(batch.ext_len), ElementsAre(2, 4));
  EXPECT_THAT(values(batch.positions), ElementsAre(5, 6, 3, 4, 5, 6));
  EXPECT_THAT(right_tokens(), Each(true));
  arrays_.build(ForwardMode::kDraftExtendV2, scheduler_, round_);
  const ForwardBatch all = arrays_.batch(scheduler_.table().view());
  EXPECT_THAT(values(all.seq_len), ElementsAre(9, 7));
  EXPECT_THAT(values(all.positions), ElementsAre(5, 6, 7, 8, 3, 4, 5, 6));
  EXPECT_FALSE(all.ext_len.defined());
}

TEST_F(BatchArraysTest, ADraftStepHasOneRowBehindTheCommittedOnes) {
  arrays_.build_draft_step(2, scheduler_, round_);
  const ForwardBatch batch = arrays_.batch(scheduler_.table().view());
  EXPECT_EQ(batch.mode, ForwardMode::kDecode);
  EXPECT_THAT(values(batch.seq_len), ElementsAre(5, 3));
  EXPECT_THAT(values(batch.positions), ElementsAre(7, 5));
  EXPECT_THAT(values(batch.out_cache_loc), ElementsAre(slot(0, 7), slot(1, 5)));
  EXPECT_THAT(right_tokens(), ElementsAre(false, true));
}

TEST_F(BatchArraysTest, PaddingReadsAndWritesTheDummyPage) {
  arrays_.build(ForwardMode::kTargetVerify, scheduler_, round_);
  arrays_.pad_requests(3, 4);
  const ForwardBatch batch = arrays_.device_batch(scheduler_.table().view());
  EXPECT_THAT(values(batch.seq_len), ElementsAre(5, 3, kPaddedSeqLen));
  EXPECT_EQ(values(batch.pool_row)[2], 0);
  EXPECT_EQ(batch.num_rows, 12);
  EXPECT_EQ(arrays_.rows().size(), 8u);
  for (size_t t = 8; t < 12; ++t) EXPECT_EQ(values(batch.out_cache_loc)[t], 0);
  EXPECT_THAT(batch.host_seq_len, IsEmpty());
  arrays_.build(ForwardMode::kDraftExtend, scheduler_, round_);
  arrays_.pad_requests(3, 4);
  const ForwardBatch extend = arrays_.batch(scheduler_.table().view());
  EXPECT_THAT(values(extend.ext_len), ElementsAre(2, 4, 0));
  EXPECT_EQ(extend.num_rows, 6);
}

TEST_F(BatchArraysTest, AnIdleBatchHasRowsOfPaddingOnly) {
  arrays_.build(ForwardMode::kIdle, scheduler_, StepBatch{});
  arrays_.pad_rows(2);
  const ForwardBatch batch = arrays_.batch(scheduler_.table().view());
  EXPECT_EQ(batch.seq_len.shape[0], 0);
  EXPECT_EQ(batch.num_rows, 0);
  EXPECT_EQ(batch.padded_rows, 2);
  EXPECT_THAT(values(batch.out_cache_loc), ElementsAre(-1, -1));
}

}  // namespace
}  // namespace fovea::internal
