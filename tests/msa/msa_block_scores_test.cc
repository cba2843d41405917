#include "fovea/msa_block_scores.h"

#include <gtest/gtest.h>

#include <cmath>

#include "fovea/error.h"
#include "tests/msa/msa_index_case.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::IndexCase;
using test::kInfinity;
using test::PagedBatch;
using test::Tensor;

// Products of two standard normal vectors of 64 to 128 channels are of order 10; fp32 sums of that
// many terms are within a few 1e-6 of it.
constexpr test::Tolerance kScore{.absolute = 1e-4, .relative = 1e-5, .cosine = 1e-7};

class MsaBlockScoresTest : public test::TargetTest {
 public:
  void expect_reference(IndexCase& actual) {
    IndexCase expected = actual;
    expected.run_scores({"ref"});
    actual.run_scores(GetParam().options());
    EXPECT_TRUE(test::ExpectClose(actual.scores.view(), expected.scores.view(), kScore));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MsaBlockScoresTest,
                         testing::ValuesIn(test::targets_of("msa_block_scores")),
                         test::target_name);

// iq = e0; token j of the one request has 2 at j = 5, 3 at j = 130, -1 elsewhere in channel 0.
IndexCase spec_case(int32_t position) {
  IndexCase index(PagedBatch({position + 1}, {1}, 128), 1, 64);
  index.iq.fill_bytes(0);
  index.iq.data<bf16_t>()[0] = bf16_from_float(1);
  index.index_k = fill_pool(index.batch, 1, 64, [](int64_t, int64_t j, int64_t, int64_t d) {
    return d != 0 ? 0.0f : j == 5 ? 2.0f : j == 130 ? 3.0f : -1.0f;
  });
  return index;
}

TEST_P(MsaBlockScoresTest, SmallCase2ScoresAtTheEdgeOfABlock) {
  IndexCase at129 = spec_case(129);
  at129.run_scores(GetParam().options());
  EXPECT_EQ(at129.score_at(0, 0, 0), 2);
  EXPECT_EQ(at129.score_at(0, 0, 1), -1);
  EXPECT_EQ(at129.score_at(0, 0, 2), -kInfinity);
  IndexCase at130 = spec_case(130);
  at130.run_scores(GetParam().options());
  EXPECT_EQ(at130.score_at(0, 0, 0), 2);
  EXPECT_EQ(at130.score_at(0, 0, 1), 3);
  IndexCase at127 = spec_case(127);
  at127.run_scores(GetParam().options());
  EXPECT_EQ(at127.score_at(0, 0, 0), 2);
  EXPECT_EQ(at127.score_at(0, 0, 1), -kInfinity);
}

TEST_P(MsaBlockScoresTest, LseOfASingleTokenIsItsProduct) {
  IndexCase index = spec_case(129);
  index.score = BlockScore::kLse;
  index.index_scale = 0.5f;
  index.run_scores(GetParam().options());
  // Block 0: 127 tokens of -0.5 and one of 1; block 1: two of -0.5.
  EXPECT_NEAR(index.score_at(0, 0, 0), std::log(127 * std::exp(-0.5) + std::exp(1.0)), 1e-5);
  EXPECT_NEAR(index.score_at(0, 0, 1), std::log(2.0) - 0.5, 1e-5);
  EXPECT_EQ(index.score_at(0, 0, 2), -kInfinity);
}

TEST_P(MsaBlockScoresTest, MatchesTheReferenceForEveryShape) {
  uint64_t seed = 1;
  for (const int64_t block : {16, 32, 64, 128, 256}) {
    for (const int64_t heads : {1, 3, 4}) {
      for (const BlockScore score : {BlockScore::kMax, BlockScore::kLse}) {
        const auto b = static_cast<int32_t>(block);
        IndexCase index(
            PagedBatch({3 * b + 5, 0, 2 * b, 1, b - 1}, {7, 0, 19, 1, 2}, block, seed, 2, 3), heads,
            seed % 2 == 0 ? 64 : 128, seed);
        index.score = score;
        index.index_scale = 0.25f;
        ++seed;
        expect_reference(index);
      }
    }
  }
}

TEST_P(MsaBlockScoresTest, NegativeScaleAndOddWidths) {
  IndexCase index(PagedBatch({50, 37}, {3, 4}, 10, 3), 5, 24, 8);
  index.index_scale = -0.5f;
  expect_reference(index);
}

TEST_P(MsaBlockScoresTest, KnownFault8EmptyRequestsAndRowsOfNobody) {
  // Requests without rows at start, middle and end, lengths of zero and below, more rows than keys,
  // padding rows, an offset.
  IndexCase index(PagedBatch({20, 0, 1, -4, 33, 16}, {0, 2, 6, 3, 5, 0}, 16, 4, 1, 4), 2);
  expect_reference(index);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t n = 0; n < index.batch.max_pages; ++n) {
      // Request 1 (length 0), 5 of the 6 rows of request 2 (positions -5..-1), request 3, padding.
      for (const int64_t t : {0, 1, 2, 6, 8, 9, 10, 16, 17, 18, 19})
        EXPECT_EQ(index.score_at(h, t, n), -kInfinity);
    }
    EXPECT_NE(index.score_at(h, 7, 0), -kInfinity);
  }
  IndexCase none(PagedBatch({}, {}, 16, 4, 1, 0), 2);
  none.run_scores(GetParam().options());
  IndexCase only_padding(PagedBatch({}, {}, 16, 4, 1, 5), 2);
  expect_reference(only_padding);
}

TEST_P(MsaBlockScoresTest, OffsetsMoveThePositions) {
  IndexCase index(PagedBatch({100, 100, 100}, {4, 4, 4}, 16, 9), 2);
  index.has_offset = true;
  index.q_offset = test::i32_vector({10, -2, 2000000000});
  expect_reference(index);
  EXPECT_EQ(index.score_at(0, 0, 1), -kInfinity);  // position 10 stands in block 0
  EXPECT_EQ(index.score_at(0, 4, 0), -kInfinity);  // position -2
  EXPECT_NE(index.score_at(0, 6, 0), -kInfinity);  // position 0
  EXPECT_NE(index.score_at(0, 8, 6), -kInfinity);  // past the end: sees everything
}

TEST_P(MsaBlockScoresTest, HostileContentsAreMasked) {
  IndexCase index(PagedBatch({60, 70, 80}, {5, 5, 5}, 16, 2), 2);
  int32_t* table = index.batch.page_table.data<int32_t>();
  table[0] = -1;
  table[1] = static_cast<int32_t>(index.batch.num_pages);
  table[index.batch.max_pages + 2] = 2147483647;
  table[2 * index.batch.max_pages] = std::numeric_limits<int32_t>::min();
  expect_reference(index);
  EXPECT_EQ(index.score_at(1, 4, 0), -kInfinity);
  EXPECT_EQ(index.score_at(1, 4, 1), -kInfinity);
  EXPECT_NE(index.score_at(1, 4, 2), -kInfinity);
  // Lengths beyond the table are cut to it before anything else; its spare columns hold page 0.
  index.batch.kv_len = test::i32_vector({2147483647, 70, std::numeric_limits<int32_t>::min()});
  index.batch.q_indptr = test::i32_vector({-7, 4, 3, 2147483647});
  index.index_k.fill_bytes(0);
  expect_reference(index);
}

TEST_P(MsaBlockScoresTest, KnownFault5UnwrittenTailsAndForeignPagesHaveNoInfluence) {
  for (const int32_t length : {1, 13, 63, 64, 65}) {
    IndexCase index(PagedBatch({length, 40}, {1, 2}, 64, 3), 2);
    index.run_scores(GetParam().options());
    IndexCase zeros = index;
    bf16_t* pool = zeros.index_k.data<bf16_t>();
    for (int64_t i = 0; i < zeros.batch.slots() * zeros.dim; ++i) {
      if (pool[i].bits == test::kBf16NanBits.bits) pool[i] = bf16_t{0};
    }
    zeros.run_scores(GetParam().options());
    EXPECT_EQ(index.scores.bytes(), zeros.scores.bytes()) << "length " << length;
  }
}

TEST_P(MsaBlockScoresTest, NanAndInfinityStayInTheirBlockAndRow) {
  IndexCase index(PagedBatch({70}, {5}, 16, 6), 2);
  index.iq.data<bf16_t>()[(3 * 2 + 1) * 64 + 7] = test::kBf16NanBits;               // row 3, head 1
  index.index_k.data<bf16_t>()[index.batch.slot(0, 20) * 64] = test::kBf16NanBits;  // block 1
  index.index_k.data<bf16_t>()[index.batch.slot(0, 69) * 64] = bf16_from_float(kInfinity);
  for (const BlockScore score : {BlockScore::kMax, BlockScore::kLse}) {
    index.score = score;
    index.run_scores(GetParam().options());
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t t = 0; t < 5; ++t) {
        for (int64_t n = 0; n < 5; ++n) {
          EXPECT_EQ(std::isnan(index.score_at(h, t, n)), n == 1 || (t == 3 && h == 1))
              << h << " " << t << " " << n;
        }
      }
      // Token 69, whose channel 0 is infinite, is the last of all: only row 4 sees it.
      EXPECT_TRUE(std::isfinite(index.score_at(0, 2, 4)));
      EXPECT_TRUE(std::isinf(index.score_at(h, 4, 4)));
    }
  }
}

TEST_P(MsaBlockScoresTest, SmallCase4ChunkedEqualsWholeBitForBit) {
  // 700 rows at once, 257 and then 443 with the prefix, and the last row alone.
  const int64_t block = 64;
  IndexCase whole(PagedBatch({700}, {700}, block, 7, 0), 2);
  whole.run_scores(GetParam().options());
  const auto part = [&](int32_t first, int32_t last) {
    IndexCase index = whole;
    index.batch.kv_len = test::i32_vector({last});
    index.batch.q_indptr = test::i32_vector({0, last - first});
    index.batch.num_rows = last - first;
    index.iq = Tensor(DType::kBf16, {last - first, 2, 64});
    std::copy_n(whole.iq.data<bf16_t>() + first * 2 * 64, (last - first) * 2 * 64,
                index.iq.data<bf16_t>());
    index.run_scores(GetParam().options(), 2);
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t t = first; t < last; ++t) {
        for (int64_t n = 0; n < whole.batch.max_pages; ++n)
          ASSERT_EQ(std::bit_cast<uint32_t>(index.score_at(h, t - first, n)),
                    std::bit_cast<uint32_t>(whole.score_at(h, t, n)))
              << h << " " << t << " " << n;
      }
    }
  };
  part(0, 257);
  part(257, 700);
  part(699, 700);
  part(100, 101);
}

TEST_P(MsaBlockScoresTest, ThreadsBatchMatesAndPagesChangeNoBit) {
  IndexCase index(PagedBatch({300, 90, 511}, {1, 30, 5}, 32, 11), 4, 128);
  index.run_scores(GetParam().options(), 1);
  const std::vector<uint8_t> expected = index.scores.bytes();
  for (const int threads : {2, 3, 8}) {
    index.run_scores(GetParam().options(), threads);
    EXPECT_EQ(index.scores.bytes(), expected);
  }
  // Another page order: the same tokens elsewhere.
  IndexCase moved = index;
  moved.batch = PagedBatch({300, 90, 511}, {1, 30, 5}, 32, 12);
  moved.index_k = Tensor(DType::kBf16, {moved.batch.slots(), 1, 128});
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t j = 0; j < index.batch.lengths[static_cast<size_t>(r)]; ++j)
      std::copy_n(index.index_k.data<bf16_t>() + index.batch.slot(r, j) * 128, 128,
                  moved.index_k.data<bf16_t>() + moved.batch.slot(r, j) * 128);
  }
  moved.run_scores(GetParam().options(), 2);
  EXPECT_EQ(moved.scores.bytes(), expected);
}

TEST_P(MsaBlockScoresTest, KnownFault14StridesAndGuardPages) {
  IndexCase index(PagedBatch({45, 33}, {3, 2}, 16, 3, 0), 2);
  index.run_scores(GetParam().options());
  const int64_t rows = index.batch.num_rows, slots = index.batch.slots(),
                pages = index.batch.max_pages;
  // Queries and keys as column slices of wider buffers that end at a guard page, everything else
  // right before one too.
  const int64_t pitch = 2 * 64 + 16;
  test::GuardedMemory iq(static_cast<size_t>(2 * (rows * pitch - 16)));
  test::GuardedMemory keys(static_cast<size_t>(2 * (slots * 72 - 8)));
  test::GuardedMemory table(static_cast<size_t>(4 * 2 * pages)), lengths(8), offsets(12);
  test::GuardedMemory scores(static_cast<size_t>(4 * (2 * rows * (pages + 1) - 1)));
  for (int64_t t = 0; t < rows; ++t)
    std::copy_n(index.iq.data<bf16_t>() + t * 128, 128,
                static_cast<bf16_t*>(iq.data()) + t * pitch);
  for (int64_t s = 0; s < slots; ++s)
    std::copy_n(index.index_k.data<bf16_t>() + s * 64, 64,
                static_cast<bf16_t*>(keys.data()) + s * 72);
  std::copy_n(index.batch.page_table.data<int32_t>(), 2 * pages,
              static_cast<int32_t*>(table.data()));
  std::copy_n(index.batch.kv_len.data<int32_t>(), 2, static_cast<int32_t*>(lengths.data()));
  std::copy_n(index.batch.q_indptr.data<int32_t>(), 3, static_cast<int32_t*>(offsets.data()));
  const std::vector<float> expected = index.scores.values<float>();
  MsaBlockScoresTensors tensors = index.scores_tensors();
  tensors.iq.data = iq.data();
  tensors.iq.stride[0] = pitch;
  tensors.index_k.data = keys.data();
  tensors.index_k.stride[0] = 72;
  tensors.page_table.data = table.data();
  tensors.kv_len.data = lengths.data();
  tensors.q_indptr.data = offsets.data();
  tensors.scores.data = scores.data();
  tensors.scores.stride[1] = pages + 1;
  tensors.scores.stride[0] = rows * (pages + 1);
  test::run(
      MsaBlockScores::plan(index.scores_problem(), GetParam().device(2), GetParam().options()),
      tensors);
  for (int64_t i = 0; i < 2 * rows; ++i) {
    for (int64_t n = 0; n < pages; ++n)
      EXPECT_EQ(static_cast<float*>(scores.data())[i * (pages + 1) + n],
                expected[static_cast<size_t>(i * pages + n)]);
  }
}

TEST_P(MsaBlockScoresTest, SmallCase9AMillionTokensOnOneAliasedPage) {
  // 524,289 and 1,048,576 tokens: 4097 and 8192 blocks, all of them page 1.
  const int64_t pages = 8192;
  IndexCase index(PagedBatch({128, 128}, {1, 2}, 128, 3), 1, 64);
  std::vector<int32_t> table(static_cast<size_t>(2 * pages),
                             index.batch.page_table.data<int32_t>()[0]);
  index.batch.max_pages = pages;
  index.batch.page_table = Tensor::i32({2, pages}, table);
  index.batch.kv_len = test::i32_vector({524289, 1048576});
  index.run_scores(GetParam().options(), 2);
  const float first_row = index.score_at(0, 0, 0);
  const float last_row = index.score_at(0, 2, 0);
  EXPECT_TRUE(std::isfinite(first_row) && std::isfinite(last_row));
  for (int64_t n = 0; n < pages; ++n) {
    // The first row stands on the first token of block 4096; the last sees all blocks whole.
    EXPECT_EQ(index.score_at(0, 2, n), last_row);
    if (n == 4096) continue;
    EXPECT_EQ(index.score_at(0, 0, n), n < 4096 ? first_row : -kInfinity);
  }
  EXPECT_NE(index.score_at(0, 0, 4096), -kInfinity);
  EXPECT_LE(index.score_at(0, 0, 4096), first_row);
}

TEST_P(MsaBlockScoresTest, KnownFault6AddressesBeyondFourGigabytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  IndexCase index(PagedBatch({60}, {2}, 16, 5, 0), 2);
  index.run_scores(GetParam().options());
  const std::vector<uint8_t> expected = index.scores.bytes();
  const int64_t pitch = int64_t{1} << 26;
  const int64_t slots = index.batch.slots();
  test::SparseMapping pool(static_cast<size_t>(2 * (slots * pitch)));
  for (int64_t j = 0; j < 60; ++j) {
    const int64_t slot = index.batch.slot(0, j);
    std::copy_n(index.index_k.data<bf16_t>() + slot * 64, 64,
                static_cast<bf16_t*>(pool.data()) + slot * pitch);
  }
  MsaBlockScoresTensors tensors = index.scores_tensors();
  tensors.index_k.data = pool.data();
  tensors.index_k.stride[0] = pitch;
  test::run(
      MsaBlockScores::plan(index.scores_problem(), GetParam().device(1), GetParam().options()),
      tensors);
  EXPECT_EQ(index.scores.bytes(), expected);
}

TEST_P(MsaBlockScoresTest, RunDoesNotAllocate) {
  IndexCase index(PagedBatch({60, 20}, {3, 3}, 16, 5), 2);
  const MsaBlockScoresTensors tensors = index.scores_tensors();
  const MsaBlockScores plan =
      MsaBlockScores::plan(index.scores_problem(), GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(MsaBlockScores, SmallCase13RefusesWhatDoesNotFit) {
  IndexCase index(PagedBatch({60, 20}, {3, 3}, 16, 5), 2);
  const Device cpu = Device::cpu(1);
  const auto refuse_plan = [&](const char* word, auto change) {
    MsaBlockScoresProblem problem = index.scores_problem();
    change(problem);
    try {
      MsaBlockScores::plan(problem, cpu);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuse_plan("max_rows", [](MsaBlockScoresProblem& p) { p.max_rows = -1; });
  refuse_plan("max_requests", [](MsaBlockScoresProblem& p) { p.max_requests = -1; });
  refuse_plan("max_pages", [](MsaBlockScoresProblem& p) { p.max_pages = int64_t{1} << 30; });
  refuse_plan("num_heads", [](MsaBlockScoresProblem& p) { p.num_heads = 0; });
  refuse_plan("head_dim", [](MsaBlockScoresProblem& p) { p.head_dim = 60; });
  refuse_plan("block_size", [](MsaBlockScoresProblem& p) { p.block_size = 0; });
  refuse_plan("page_size", [](MsaBlockScoresProblem& p) { p.page_size = 32; });
  refuse_plan("index_scale", [](MsaBlockScoresProblem& p) { p.index_scale = kInfinity; });
  refuse_plan("score", [](MsaBlockScoresProblem& p) { p.score = static_cast<BlockScore>(7); });

  const auto refuse_run = [&](const char* word, auto change) {
    MsaBlockScoresTensors tensors = index.scores_tensors();
    change(tensors);
    try {
      test::run(MsaBlockScores::plan(index.scores_problem(), cpu), tensors);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
    EXPECT_EQ(index.scores.bytes(), std::vector<uint8_t>(index.scores.bytes().size(), 0x55));
  };
  refuse_run("slots", [](MsaBlockScoresTensors& t) { t.index_k.shape[0] -= 1; });
  refuse_run("multiples of 16", [](MsaBlockScoresTensors& t) {
    t.index_k.shape[0] -= 16;
    t.index_k.data = static_cast<const char*>(t.index_k.data) + 2;
  });
  refuse_run("multiples of 16", [](MsaBlockScoresTensors& t) { t.iq.stride[0] += 1; });
  refuse_run("index_k", [](MsaBlockScoresTensors& t) { t.index_k.shape[2] = 32; });
  refuse_run("page_table", [](MsaBlockScoresTensors& t) { t.page_table.shape[0] = 1; });
  refuse_run("page_table", [](MsaBlockScoresTensors& t) { t.page_table.shape[1] += 1; });
  refuse_run("q_indptr", [](MsaBlockScoresTensors& t) { t.q_indptr.shape[0] = 2; });
  refuse_run("scores", [](MsaBlockScoresTensors& t) { t.scores.shape[2] -= 1; });
  refuse_run("iq", [](MsaBlockScoresTensors& t) { t.iq.dtype = DType::kF32; });
}

}  // namespace
}  // namespace fovea
