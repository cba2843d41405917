#include "fovea/msa_score_select.h"

#include <gtest/gtest.h>

#include "fovea/error.h"
#include "tests/msa/msa_index_case.h"

namespace fovea {
namespace {

using test::IndexCase;
using test::PagedBatch;
using test::Tensor;

class MsaScoreSelectTest : public test::TargetTest {
 public:
  // The fused operator, and the two single ones of the same implementation.
  void expect_equal_to_parts(IndexCase& index, int threads = 1) {
    IndexCase parts = index;
    parts.run_scores(GetParam().options());
    parts.run_select(GetParam().options());
    index.run_fused(GetParam().options(), threads);
    EXPECT_EQ(index.blocks.bytes(), parts.blocks.bytes());
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MsaScoreSelectTest,
                         testing::ValuesIn(test::targets_of("msa_score_select")),
                         test::target_name);

TEST_P(MsaScoreSelectTest, EqualsScoresThenSelection) {
  uint64_t seed = 1;
  for (const int64_t block : {16, 64}) {
    for (const IndexReduce reduce :
         {IndexReduce::kPerGroup, IndexReduce::kMaxAll, IndexReduce::kUnion}) {
      for (const BlockScore score : {BlockScore::kMax, BlockScore::kLse}) {
        const auto b = static_cast<int32_t>(block);
        IndexCase index(
            PagedBatch({9 * b + 5, 0, 12 * b, 1, 7 * b - 1}, {7, 0, 19, 1, 2}, block, seed, 2, 3),
            4, 16, seed);
        index.reduce = reduce;
        index.score = score;
        index.kv_heads = reduce == IndexReduce::kPerGroup ? 0 : 2;
        index.layout = seed % 2 == 0 ? BlocksLayout::kHeadMajor : BlocksLayout::kRowMajor;
        index.init_blocks = 1;
        ++seed;
        expect_equal_to_parts(index, 1);
        expect_equal_to_parts(index, 3);
      }
    }
  }
}

TEST_P(MsaScoreSelectTest, IntegerInputsSelectExactlyAsTheReference) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    IndexCase index(PagedBatch({400, 33, 777}, {5, 33, 20}, 16, seed), 3, 64);
    index.make_integers(seed);
    index.topk = 6;
    index.init_blocks = 1;
    IndexCase expected = index;
    expected.run_fused({"ref"});
    index.run_fused(GetParam().options(), 2);
    EXPECT_EQ(index.blocks.bytes(), expected.blocks.bytes());
  }
}

TEST_P(MsaScoreSelectTest, SmallCase4ChunkedPrefillAndDecodeSelectTheSame) {
  IndexCase whole(PagedBatch({700}, {700}, 32, 7, 0), 2);
  whole.run_fused(GetParam().options());
  const auto part = [&](int32_t first, int32_t last) {
    IndexCase index = whole;
    index.batch.kv_len = test::i32_vector({last});
    index.batch.q_indptr = test::i32_vector({0, last - first});
    index.batch.num_rows = last - first;
    index.iq = Tensor(DType::kBf16, {last - first, 2, 64});
    std::copy_n(whole.iq.data<bf16_t>() + first * 2 * 64, (last - first) * 2 * 64,
                index.iq.data<bf16_t>());
    index.run_fused(GetParam().options(), 2);
    for (int64_t g = 0; g < 2; ++g) {
      for (int64_t t = first; t < last; ++t)
        ASSERT_EQ(index.list_at(g, t - first), whole.list_at(g, t)) << t;
    }
  };
  part(0, 257);
  part(257, 700);
  part(699, 700);
  part(411, 412);
}

TEST_P(MsaScoreSelectTest, SmallCase11VerifyRowsEqualRowsRunSingly) {
  // Eight drafts of a request, each with its own position and list.
  IndexCase batch(PagedBatch({500}, {8}, 16, 3, 0), 2);
  batch.run_fused(GetParam().options(), 2);
  for (int32_t i = 0; i < 8; ++i) {
    IndexCase single = batch;
    single.batch.kv_len = test::i32_vector({500 - 7 + i});
    single.batch.q_indptr = test::i32_vector({0, 1});
    single.batch.num_rows = 1;
    single.iq = Tensor(DType::kBf16, {1, 2, 64});
    std::copy_n(batch.iq.data<bf16_t>() + i * 128, 128, single.iq.data<bf16_t>());
    single.run_fused(GetParam().options());
    for (int64_t g = 0; g < 2; ++g) EXPECT_EQ(single.list_at(g, 0), batch.list_at(g, i));
  }
}

TEST_P(MsaScoreSelectTest, ThreadsAndBatchMatesChangeNothing) {
  IndexCase index(PagedBatch({300, 90, 511, 700}, {1, 30, 5, 70}, 32, 11), 4, 128);
  index.run_fused(GetParam().options(), 1);
  const std::vector<uint8_t> expected = index.blocks.bytes();
  for (const int threads : {2, 3, 8}) {
    index.run_fused(GetParam().options(), threads);
    EXPECT_EQ(index.blocks.bytes(), expected);
  }
  IndexCase alone = index;
  const int64_t first = index.batch.first_row(2);
  alone.batch.kv_len = test::i32_vector({0, 0, 511, 0});
  alone.batch.q_indptr = test::i32_vector({0, 0, 0, 5, 5});
  alone.batch.num_rows = 5;
  alone.iq = Tensor(DType::kBf16, {5, 4, 128});
  std::copy_n(index.iq.data<bf16_t>() + first * 512, 5 * 512, alone.iq.data<bf16_t>());
  for (const int threads : {1, 4}) {
    alone.run_fused(GetParam().options(), threads);
    for (int64_t g = 0; g < 4; ++g) {
      for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(alone.list_at(g, i), index.list_at(g, first + i));
    }
  }
}

TEST_P(MsaScoreSelectTest, SmallCase9OnePlanForGrowingAndShrinkingLengths) {
  // The plan and its workspace see [64, 4096] and then [4096, 64].
  IndexCase index(PagedBatch({4096, 4096}, {2, 2}, 64, 5), 2);
  const MsaScoreSelect plan =
      MsaScoreSelect::plan(index.fused_problem(), GetParam().device(2), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{64, 4096}, {4096, 64}, {0, 0}, {4096, 4096}, {1, 129}}) {
    index.batch.kv_len = test::i32_vector(lengths);
    const MsaScoreSelectTensors tensors = index.fused_tensors();
    plan.run(tensors, workspace.workspace());
    const std::vector<uint8_t> reused = index.blocks.bytes();
    index.run_fused(GetParam().options());
    EXPECT_EQ(reused, index.blocks.bytes());
  }
}

TEST_P(MsaScoreSelectTest, HostileContentsEqualTheParts) {
  IndexCase index(PagedBatch({200, 170, 180}, {5, 5, 5}, 16, 2), 2);
  int32_t* table = index.batch.page_table.data<int32_t>();
  table[1] = -1;
  table[2] = static_cast<int32_t>(index.batch.num_pages);
  table[index.batch.max_pages + 2] = 2147483647;
  index.batch.kv_len = test::i32_vector({2147483647, 170, -5});
  index.batch.q_indptr = test::i32_vector({-7, 4, 3, 2147483647});
  expect_equal_to_parts(index, 2);
}

TEST_P(MsaScoreSelectTest, ALargeWorkspaceIsNotNeededForManyRows) {
  IndexCase index(PagedBatch({200}, {5}, 16, 2), 2);
  MsaScoreSelectProblem problem = index.fused_problem();
  problem.max_pages = 8192;
  problem.max_rows = 16384;
  const MsaScoreSelect plan =
      MsaScoreSelect::plan(problem, GetParam().device(2), GetParam().options());
  // The scores of all rows would be 1 GiB.
  EXPECT_LT(plan.workspace_bytes(), size_t{32} << 20);
}

TEST_P(MsaScoreSelectTest, RunDoesNotAllocate) {
  IndexCase index(PagedBatch({200, 90}, {5, 3}, 16, 2), 2);
  const MsaScoreSelectTensors tensors = index.fused_tensors();
  const MsaScoreSelect plan =
      MsaScoreSelect::plan(index.fused_problem(), GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(MsaScoreSelect, RefusesWhatDoesNotFit) {
  IndexCase index(PagedBatch({200, 90}, {5, 3}, 16, 2), 2);
  const Device cpu = Device::cpu(1);
  const auto refuse_plan = [&](auto change) {
    MsaScoreSelectProblem problem = index.fused_problem();
    change(problem);
    EXPECT_THROW(MsaScoreSelect::plan(problem, cpu), Error);
  };
  refuse_plan([](MsaScoreSelectProblem& p) { p.page_size = 128; });
  refuse_plan([](MsaScoreSelectProblem& p) { p.init_blocks = 4; });
  refuse_plan([](MsaScoreSelectProblem& p) { p.head_dim = 9; });
  refuse_plan([](MsaScoreSelectProblem& p) { p.score = static_cast<BlockScore>(2); });
  refuse_plan([](MsaScoreSelectProblem& p) { p.num_kv_heads = 3; });
  const auto refuse_run = [&](auto change) {
    MsaScoreSelectTensors tensors = index.fused_tensors();
    change(tensors);
    EXPECT_THROW(test::run(MsaScoreSelect::plan(index.fused_problem(), cpu), tensors), Error);
    EXPECT_EQ(index.blocks.bytes(), std::vector<uint8_t>(index.blocks.bytes().size(), 0x55));
  };
  refuse_run([](MsaScoreSelectTensors& t) { t.index_k.shape[0] -= 1; });
  refuse_run([](MsaScoreSelectTensors& t) { t.blocks.shape[2] -= 1; });
  refuse_run([](MsaScoreSelectTensors& t) { t.page_table.shape[1] += 1; });
  refuse_run([](MsaScoreSelectTensors& t) { t.q_offset = t.q_indptr; });
}

}  // namespace
}  // namespace fovea
