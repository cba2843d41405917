#include "fovea/msa_select_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "fovea/error.h"
#include "tests/msa/msa_index_case.h"
#include "tests/support/property.h"

namespace fovea {
namespace {

using test::IndexCase;
using test::kInfinity;
using test::PagedBatch;
using test::Tensor;
using List = std::vector<int32_t>;

const float kNan = std::nanf("");

// One row per request over blocks of 4 tokens: own is the block of the last token.
struct Selection {
  IndexCase index;

  // `owns`: own block of each request's one row; -1: a request of length 0.
  explicit Selection(const std::vector<int32_t>& owns, int64_t heads = 1, int64_t spare = 2)
      : index(PagedBatch(lengths(owns), std::vector<int32_t>(owns.size(), 1), 4, 1, spare), heads,
              8) {
    index.scores = Tensor(DType::kF32, {heads, index.batch.num_rows, index.batch.max_pages});
    for (int64_t i = 0; i < heads * index.batch.num_rows * index.batch.max_pages; ++i)
      index.scores.data<float>()[i] = 0;
  }
  static std::vector<int32_t> lengths(const std::vector<int32_t>& owns) {
    std::vector<int32_t> result;
    for (const int32_t own : owns) result.push_back(own < 0 ? 0 : own * 4 + 1);
    return result;
  }
  float& score(int64_t h, int64_t t, int64_t n) {
    return index.scores.data<float>()[(h * index.batch.num_rows + t) * index.batch.max_pages + n];
  }
  void random_scores(uint64_t seed) {
    test::Rng rng(seed);
    const float special[] = {kNan, kInfinity, -kInfinity, 0.0f, -0.0f, 1.0f};
    for (int64_t i = 0; i < index.heads * index.batch.num_rows * index.batch.max_pages; ++i) {
      index.scores.data<float>()[i] = rng.integer(0, 3) == 0
                                          ? special[rng.integer(0, 5)]
                                          : static_cast<float>(rng.integer(-20, 20));
    }
  }
};

class MsaSelectBlocksTest : public test::TargetTest {
 public:
  void run(Selection& selection, int threads = 1) {
    selection.index.run_select(GetParam().options(), threads);
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MsaSelectBlocksTest,
                         testing::ValuesIn(test::targets_of("msa_select_blocks")),
                         test::target_name);

TEST_P(MsaSelectBlocksTest, SmallCase3ForcedBlocksAndTheBestFreeOne) {
  Selection selection({19});
  selection.index.topk = 4;
  selection.index.init_blocks = 1;
  selection.index.local_blocks = 2;
  for (int64_t n = 0; n < 20; ++n) selection.score(0, 0, n) = n == 5 ? 1.0f : -1.0f;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 5, 18, 19}));
}

TEST_P(MsaSelectBlocksTest, SmallCase3ShortRowsTakeEverything) {
  Selection selection({2});
  selection.index.topk = 16;
  selection.index.scores.fill_bytes(0xFF);  // scores are not needed
  run(selection);
  List expected(16, -1);
  expected[0] = 0;
  expected[1] = 1;
  expected[2] = 2;
  EXPECT_EQ(selection.index.list_at(0, 0), expected);
}

TEST_P(MsaSelectBlocksTest, SmallCase3EqualScoresGoToSmallerBlocks) {
  Selection selection({19});
  selection.index.topk = 3;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 1, 19}));
  selection.index.local_blocks = 0;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 1, 2}));
  // +0 and -0 are equal.
  for (int64_t n = 0; n < 20; ++n) selection.score(0, 0, n) = n % 2 == 0 ? -0.0f : 0.0f;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 1, 2}));
}

TEST_P(MsaSelectBlocksTest, SmallCase3NanNeverBeatsANumber) {
  Selection selection({19});
  selection.index.topk = 4;
  selection.index.local_blocks = 0;
  for (int64_t n = 0; n < 20; ++n)
    selection.score(0, 0, n) = n < 16 ? kNan : n == 17 ? -kInfinity : -1e30f;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{16, 17, 18, 19}));
  selection.index.topk = 6;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 1, 16, 17, 18, 19}));
}

TEST_P(MsaSelectBlocksTest, NoScoreDisplacesAForcedBlock) {
  Selection selection({19});
  selection.index.topk = 3;
  selection.index.init_blocks = 1;
  for (int64_t n = 0; n < 20; ++n) selection.score(0, 0, n) = kInfinity;
  selection.score(0, 0, 0) = kNan;
  selection.score(0, 0, 19) = -kInfinity;
  selection.score(0, 0, 1) = 1e30f;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 2, 19}));
  selection.index.topk = 2;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 19}));
}

TEST_P(MsaSelectBlocksTest, KnownFault2BlocksOfTheFutureAreNotCandidates) {
  Selection selection({5, 6});
  selection.index.topk = 6;
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t n = 7; n < selection.index.batch.max_pages; ++n) selection.score(0, t, n) = 1e30f;
  }
  selection.score(0, 1, 2) = -3;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(selection.index.list_at(0, 1), (List{0, 1, 3, 4, 5, 6}));
}

TEST_P(MsaSelectBlocksTest, MaxAllTakesTheMaximumInRankOrder) {
  Selection selection({9}, 3);
  selection.index.topk = 3;
  selection.index.reduce = IndexReduce::kMaxAll;
  selection.index.kv_heads = 2;
  selection.index.local_blocks = 0;
  for (int64_t n = 0; n < 10; ++n) {
    for (int64_t h = 0; h < 3; ++h) selection.score(h, 0, n) = -10;
  }
  selection.score(2, 0, 7) = 5;
  selection.score(0, 0, 4) = kNan;  // of one head: the others count
  selection.score(1, 0, 4) = 4;
  for (int64_t h = 0; h < 3; ++h) selection.score(h, 0, 0) = kNan;
  selection.score(1, 0, 2) = 3;
  selection.score(0, 0, 3) = 2;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{2, 4, 7}));
  EXPECT_EQ(selection.index.list_at(1, 0), (List{2, 4, 7}));
}

TEST_P(MsaSelectBlocksTest, UnionMergesTheListsOfAGroup) {
  Selection selection({9}, 4);
  selection.index.topk = 2;
  selection.index.reduce = IndexReduce::kUnion;
  selection.index.kv_heads = 2;
  selection.score(0, 0, 3) = 1;
  selection.score(1, 0, 6) = 1;
  selection.score(2, 0, 8) = 1;
  selection.score(3, 0, 8) = 1;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{3, 6, 9, -1}));
  EXPECT_EQ(selection.index.list_at(1, 0), (List{8, 9, -1, -1}));
}

TEST_P(MsaSelectBlocksTest, SmallCase10BothLayoutsWhereRowsEqualHeads) {
  for (const int64_t heads : {3, 2}) {
    std::vector<int32_t> owns(static_cast<size_t>(heads), 30);
    Selection selection(owns, heads);
    selection.random_scores(4);
    run(selection);
    const IndexCase head_major = selection.index;
    selection.index.layout = BlocksLayout::kRowMajor;
    run(selection);
    for (int64_t g = 0; g < heads; ++g) {
      for (int64_t t = 0; t < heads; ++t)
        EXPECT_EQ(selection.index.list_at(g, t), head_major.list_at(g, t));
    }
    EXPECT_NE(selection.index.blocks.bytes(), head_major.blocks.bytes());
  }
}

TEST_P(MsaSelectBlocksTest, SmallCase6RowsOfNobodyAndEmptyRequests) {
  IndexCase index(PagedBatch({20, 0, 1, -4, 33, 16}, {0, 2, 6, 3, 5, 0}, 16, 4, 1, 4), 1);
  index.topk = 2;
  index.run_scores({"ref"});
  index.run_select(GetParam().options());
  for (const int64_t t : {0, 1, 2, 6, 8, 9, 10, 16, 17, 18, 19})
    EXPECT_EQ(index.list_at(0, t), (List{-1, -1})) << t;
  EXPECT_EQ(index.list_at(0, 7), (List{0, -1}));
  IndexCase none(PagedBatch({}, {}, 16, 4, 1, 3), 1);
  none.scores = Tensor(DType::kF32, {1, 3, 1});
  none.run_select(GetParam().options());
  for (int64_t t = 0; t < 3; ++t) EXPECT_EQ(none.list_at(0, t), List(4, -1));
}

TEST_P(MsaSelectBlocksTest, OwnBlockIsCappedAtTheTable) {
  // Position 1000 of a table of 5 blocks: own is 4.
  Selection selection({4}, 1, 0);
  selection.index.has_offset = true;
  selection.index.q_offset = test::i32_vector({1000});
  selection.index.topk = 2;
  selection.score(0, 0, 2) = 1;
  run(selection);
  EXPECT_EQ(selection.index.list_at(0, 0), (List{2, 4}));
}

TEST_P(MsaSelectBlocksTest, KnownFault2LengthsAroundTheSelection) {
  for (const int32_t own : {0, 1, 3, 5, 7, 8, 9, 63, 65}) {
    for (const int64_t topk : {1, 8, 64, 200}) {
      Selection selection({own});
      selection.index.topk = topk;
      for (int64_t n = 0; n < selection.index.batch.max_pages; ++n)
        selection.score(0, 0, n) = n > own ? 1e30f : -3.5f;
      run(selection);
      List expected;
      for (int32_t n = 0; n < own && static_cast<int64_t>(expected.size()) + 1 < topk; ++n)
        expected.push_back(n);
      expected.push_back(own);
      expected.resize(static_cast<size_t>(topk), -1);
      EXPECT_EQ(selection.index.list_at(0, 0), expected) << own << " " << topk;
    }
  }
}

TEST_P(MsaSelectBlocksTest, EqualsTheReferenceOnRandomScores) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    test::Rng rng(seed);
    std::vector<int32_t> owns;
    for (int i = 0; i < 20; ++i) owns.push_back(static_cast<int32_t>(rng.integer(-1, 300)));
    const int64_t heads = rng.integer(1, 3) * 2;
    Selection selection(owns, heads);
    selection.random_scores(seed);
    selection.index.init_blocks = rng.integer(0, 2);
    selection.index.local_blocks = rng.integer(0, 2);
    selection.index.topk = selection.index.init_blocks + selection.index.local_blocks +
                           rng.integer(seed % 4 == 0 ? 130 : 1, seed % 4 == 0 ? 180 : 20);
    selection.index.reduce = static_cast<IndexReduce>(seed % 3);
    if (selection.index.reduce != IndexReduce::kPerGroup) selection.index.kv_heads = heads / 2;
    selection.index.layout = seed % 2 == 0 ? BlocksLayout::kHeadMajor : BlocksLayout::kRowMajor;
    IndexCase expected = selection.index;
    expected.run_select({"ref"});
    for (const int threads : {1, 3}) {
      run(selection, threads);
      EXPECT_EQ(selection.index.blocks.bytes(), expected.blocks.bytes()) << "seed " << seed;
    }
  }
}

TEST_P(MsaSelectBlocksTest, PropertyListsAreSortedUniqueAndHoldTheForcedBlocks) {
  const Options options = GetParam().options();
  EXPECT_TRUE(test::holds("a list is ascending, unique, in range, with every forced block", [&] {
    const auto own = *rc::gen::inRange<int32_t>(0, 60);
    const auto seed = *rc::gen::inRange<uint64_t>(0, 1000);
    Selection selection({own});
    selection.random_scores(seed);
    selection.index.init_blocks = *rc::gen::inRange<int64_t>(0, 4);
    selection.index.local_blocks = *rc::gen::inRange<int64_t>(0, 4);
    selection.index.topk = std::max<int64_t>(
        1, selection.index.init_blocks + selection.index.local_blocks + *rc::gen::inRange(0, 20));
    selection.index.run_select(options);
    const List list = selection.index.list_at(0, 0);
    const auto count = std::min<int64_t>(selection.index.topk, own + 1);
    std::set<int32_t> chosen;
    for (int64_t i = 0; i < selection.index.topk; ++i) {
      const int32_t n = list[static_cast<size_t>(i)];
      RC_ASSERT((i < count) == (n >= 0));
      if (i >= count) continue;
      RC_ASSERT(n <= own);
      // Not one expression in RC_ASSERT, which takes both sides of || always.
      const bool ascending = i == 0 || n > list[static_cast<size_t>(i - 1)];
      RC_ASSERT(ascending);
      chosen.insert(n);
    }
    for (int32_t n = 0; n <= own; ++n) {
      if (n < selection.index.init_blocks || n > own - selection.index.local_blocks)
        RC_ASSERT(chosen.contains(n));
    }
  }));
}

TEST_P(MsaSelectBlocksTest, KnownFault14StridedScoresAndListsWithGuards) {
  Selection selection({40, 12, 33}, 2);
  selection.random_scores(6);
  selection.index.topk = 5;
  run(selection);
  const IndexCase expected = selection.index;
  const int64_t pages = selection.index.batch.max_pages;
  // Scores [row][head][block] with a pitch, lists [row][head][entry] viewed as [head][row][entry].
  test::GuardedMemory scores(static_cast<size_t>(4 * (6 * (pages + 3) - 3)));
  test::GuardedMemory lists(static_cast<size_t>(4 * (6 * 7 - 2)));
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t h = 0; h < 2; ++h)
      std::copy_n(&selection.score(h, t, 0), pages,
                  static_cast<float*>(scores.data()) + (t * 2 + h) * (pages + 3));
  }
  MsaSelectBlocksTensors tensors = selection.index.select_tensors();
  tensors.scores.data = scores.data();
  tensors.scores.stride = {pages + 3, 2 * (pages + 3), 1};
  tensors.blocks.data = lists.data();
  tensors.blocks.stride = {7, 14, 1};
  test::run(MsaSelectBlocks::plan(selection.index.select_problem(), GetParam().device(2),
                                  GetParam().options()),
            tensors);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      const int32_t* list = static_cast<int32_t*>(lists.data()) + t * 14 + h * 7;
      EXPECT_EQ(List(list, list + 5), expected.list_at(h, t));
    }
  }
}

TEST_P(MsaSelectBlocksTest, RunDoesNotAllocate) {
  Selection selection({40, 12, 33}, 2);
  selection.random_scores(6);
  const MsaSelectBlocksTensors tensors = selection.index.select_tensors();
  const MsaSelectBlocks plan = MsaSelectBlocks::plan(selection.index.select_problem(),
                                                     GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(MsaSelectBlocks, SmallCase13RefusesWhatDoesNotFit) {
  const Device cpu = Device::cpu(1);
  Selection selection({40, 12, 33}, 4);
  const auto refuse_plan = [&](const char* word, auto change) {
    MsaSelectBlocksProblem problem = selection.index.select_problem();
    change(problem);
    try {
      MsaSelectBlocks::plan(problem, cpu);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuse_plan("topk", [](MsaSelectBlocksProblem& p) { p.topk = 0; });
  refuse_plan("init_blocks + local_blocks", [](MsaSelectBlocksProblem& p) { p.init_blocks = 4; });
  refuse_plan("page_size", [](MsaSelectBlocksProblem& p) { p.page_size = 64; });
  refuse_plan("per_group", [](MsaSelectBlocksProblem& p) { p.num_kv_heads = 2; });
  refuse_plan("union", [](MsaSelectBlocksProblem& p) {
    p.num_kv_heads = 3;
    p.index_reduce = IndexReduce::kUnion;
  });
  refuse_plan("local_blocks", [](MsaSelectBlocksProblem& p) { p.local_blocks = -1; });
  refuse_plan("index_reduce",
              [](MsaSelectBlocksProblem& p) { p.index_reduce = static_cast<IndexReduce>(9); });

  const auto refuse_run = [&](const char* word, auto change) {
    MsaSelectBlocksTensors tensors = selection.index.select_tensors();
    change(tensors);
    try {
      test::run(MsaSelectBlocks::plan(selection.index.select_problem(), cpu), tensors);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
    EXPECT_EQ(selection.index.blocks.bytes(),
              std::vector<uint8_t>(selection.index.blocks.bytes().size(), 0x55));
  };
  refuse_run("blocks", [](MsaSelectBlocksTensors& t) { t.blocks.shape[2] = 5; });
  refuse_run("blocks",
             [](MsaSelectBlocksTensors& t) { std::swap(t.blocks.shape[0], t.blocks.shape[1]); });
  refuse_run("scores", [](MsaSelectBlocksTensors& t) { t.scores.shape[0] = 3; });
  refuse_run("kv_len", [](MsaSelectBlocksTensors& t) { t.kv_len = {}; });
}

}  // namespace
}  // namespace fovea
