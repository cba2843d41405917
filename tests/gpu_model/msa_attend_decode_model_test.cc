// The kernel of msa_attend for few rows, run by a model of a GPU, against the reference.

#include <gtest/gtest.h>

#include <array>

#include "tests/gpu_model/msa_attend_model_suite.h"
#include "tests/msa/msa_attend_case.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::AttendCase;
using test::PagedBatch;
using test::Tensor;

// Runs return the blocks of a cluster.
class MsaAttendDecodeModel : public test::MsaAttendModelSuite<test::gpu::run_msa_attend_decode> {};

TEST_F(MsaAttendDecodeModel, FollowsTheReferenceForEveryShape) {
  expect_reference_for_every_shape();
}

// From a whole list a block to the largest cluster; the lengths leave the last parts without steps.
TEST_F(MsaAttendDecodeModel, EveryNumberOfPartsFollowsTheReference) {
  for (const int64_t parts : {1, 2, 4, 8, 16}) {
    for (const bool tile_each : {false, true}) {
      SCOPED_TRACE(std::to_string(parts) + (tile_each ? ", a tile each" : ""));
      // Limited by multiprocessors, of which each takes two blocks, or by a tile a group.
      const int64_t topk = tile_each ? 4 * parts : 64;
      AttendCase attend(PagedBatch({700, 17}, {1, 1}, 32, 5, 60), 6, 2, 128, topk);
      attend.has_sink = true;
      attend.sink = Tensor::f32({6}, test::Rng(4).normals(6, 2));
      for (int64_t g = 0; g < 2; ++g) {
        std::vector<int32_t> all(static_cast<size_t>(std::min<int64_t>(22, topk)));
        std::iota(all.begin(), all.end(), 0);
        attend.set_list(g, 0, all);
      }
      test::gpu::settings().num_sms = static_cast<int>(tile_each   ? 64
                                                       : parts > 2 ? 4 * parts
                                                                   : 2 * parts);
      EXPECT_EQ(expect_reference(attend), parts);
    }
  }
}

TEST_F(MsaAttendDecodeModel, TheOrderOfListsAndThreadsChangesNoBit) {
  // Up to 32 entries stand in the lanes of a warp, more in shared memory.
  for (const int64_t topk : {9, 40}) {
    AttendCase attend(PagedBatch({300, 300}, {2, 1}, 16, 7), 4, 2, 64, topk);
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t g = 0; g < 2; ++g) attend.set_list(g, t, {17, 3, 4, 0, 11, 5});
    }
    expect_reference(attend);
    for (const std::vector<int32_t>& list : {std::vector<int32_t>{0, 3, 4, 5, 11, 17},
                                             {17, 17, 11, 5, 4, 3, 0},
                                             {-1, 3, 0, 3, 11, 4, 5, 17, 0},
                                             {0, 4, 3, 99, 5, 11, 17, -7}}) {
      AttendCase other = attend;
      ++test::gpu::settings().seed;
      for (int64_t t = 0; t < 3; ++t) {
        for (int64_t g = 0; g < 2; ++g) other.set_list(g, t, list);
      }
      run(other);
      EXPECT_EQ(other.out.bytes(), attend.out.bytes());
      EXPECT_EQ(other.lse.bytes(), attend.lse.bytes());
    }
  }
}

TEST_F(MsaAttendDecodeModel, BatchInvariantRowsDoNotDependOnTheNumberOfRows) {
  AttendCase attend(PagedBatch({250, 90, 130}, {1, 3, 2}, 32, 11), 4, 2, 64, 5);
  attend.batch_invariant = true;
  run(attend);
  for (int64_t r = 0; r < 3; ++r) {
    AttendCase alone = attend.rows_of(r, 0, attend.batch.counts[static_cast<size_t>(r)]);
    run(alone);
    for (int64_t i = 0; i < alone.batch.num_rows; ++i)
      EXPECT_EQ(alone.row_bits(i), attend.row_bits(attend.batch.first_row(r) + i));
  }
}

TEST_F(MsaAttendDecodeModel, RowsSeeNothingOfTokensOfTheirFuture) {
  AttendCase attend(PagedBatch({70}, {9}, 64, 7, 0), 3, 1, 64, 2);
  AttendCase expected = attend;
  run(expected);
  // What only later rows see: NaN for row 4, whose position is 65.
  for (int64_t j = 66; j < 70; ++j) {
    for (Tensor* pool : {&attend.k, &attend.v}) {
      std::fill_n(pool->data<bf16_t>() + attend.batch.slot(0, j) * 64, 64,
                  bf16_from_float(std::numeric_limits<float>::quiet_NaN()));
    }
  }
  run(attend);
  for (int64_t t = 0; t <= 4; ++t) EXPECT_EQ(attend.row_bits(t), expected.row_bits(t)) << t;
}

TEST_F(MsaAttendDecodeModel, InfiniteValuesAreNotNan) {
  AttendCase attend(PagedBatch({400}, {3}, 128, 7, 0), 2, 1, 32, 4);
  for (int64_t t = 0; t < 3; ++t) attend.set_list(0, t, {0, 1, 2, 3});
  attend.softmax_scale = 0.01f;  // no weight underflows
  attend.v.data<bf16_t>()[attend.batch.slot(0, 77) * 32 + 5] = bf16_from_float(test::kInfinity);
  attend.v.data<bf16_t>()[attend.batch.slot(0, 150) * 32 + 9] = bf16_from_float(-test::kInfinity);
  EXPECT_GT(expect_reference(attend), 1);
  EXPECT_EQ(attend.out_at(2, 1, 5), test::kInfinity);
  EXPECT_EQ(attend.out_at(2, 1, 9), -test::kInfinity);
}

TEST_F(MsaAttendDecodeModel, HostileLengthsOffsetsPagesAndLists) {
  AttendCase attend(PagedBatch({100, 60, 33}, {3, 4, 2}, 16, 3, 1), 4, 2, 32, 4);
  attend.batch.kv_len.data<int32_t>()[0] = std::numeric_limits<int32_t>::max();
  attend.batch.kv_len.data<int32_t>()[2] = -5;
  attend.batch.q_indptr.data<int32_t>()[1] = 6;
  attend.batch.q_indptr.data<int32_t>()[2] = 2;
  attend.batch.page_table.data<int32_t>()[0] = -1;
  attend.batch.page_table.data<int32_t>()[1] = std::numeric_limits<int32_t>::max();
  attend.set_list(0, 0, {0, 1, 2, 2});
  attend.set_list(1, 1, {-7, std::numeric_limits<int32_t>::max(), 3, 3});
  expect_reference(attend);
}

// More than 160 offsets are sought in several steps; more than 512 are cleaned by a launch.
TEST_F(MsaAttendDecodeModel, ManyRequestsMostOfThemWithoutRows) {
  for (const int64_t requests : {200, 600}) {
    std::vector<int32_t> lengths(static_cast<size_t>(requests), 9), counts(lengths.size(), 0);
    for (size_t r = 0; r < lengths.size(); r += 37) counts[r] = 1, lengths[r] = 16 + r % 16;
    AttendCase attend(PagedBatch(lengths, counts, 16, 3, 0, 1), 1, 1, 16, 2);
    expect_reference(attend);
  }
}

TEST_F(MsaAttendDecodeModel, PlansWithoutPages) {
  AttendCase attend(PagedBatch({40}, {2}, 16, 3, 0), 2, 1, 32, 2);
  MsaAttendTensors tensors = attend.tensors();
  tensors.page_table.shape[1] = 0;
  MsaAttendProblem problem = attend.problem();
  problem.softmax_scale = 1;
  test::gpu::run_msa_attend_decode(problem, tensors);
  for (int64_t t = 0; t < 2; ++t) {
    EXPECT_EQ(attend.out_at(t, 1, 3), 0.0f);
    EXPECT_EQ(attend.lse_at(t, 1), -std::numeric_limits<float>::infinity());
  }
}

}  // namespace
}  // namespace fovea
