// The kernels of msa_attend that go block by block, run by a model of a GPU, against the reference.

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "tests/gpu_model/msa_attend_model_suite.h"
#include "tests/msa/msa_attend_case.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::AttendCase;
using test::PagedBatch;
using test::Tensor;

class MsaAttendModel : public test::MsaAttendModelSuite<test::gpu::run_msa_attend_sm90> {};

TEST_F(MsaAttendModel, FollowsTheReferenceForEveryShape) { expect_reference_for_every_shape(); }

TEST_F(MsaAttendModel, ManyRowsShareBlocksWhateverTheOrderOfThreads) {
  // Up to 90 rows list a block: three items.
  AttendCase attend(PagedBatch({90, 20}, {90, 3}, 16, 7, 0), 4, 2, 32, 3);
  expect_reference(attend);
  const std::vector<uint8_t> out = attend.out.bytes(), lse = attend.lse.bytes();
  test::gpu::settings().seed = 9;
  for (int64_t t = 0; t < attend.batch.num_rows; ++t) {
    for (int64_t g = 0; g < 2; ++g) std::reverse(attend.list(g, t), attend.list(g, t) + 3);
  }
  run(attend);
  EXPECT_EQ(attend.out.bytes(), out);
  EXPECT_EQ(attend.lse.bytes(), lse);
}

TEST_F(MsaAttendModel, FullRowsInSeveralSlabs) {
  // Lists of 1024 columns and 64 heads leave room for 384 rows at a time.
  AttendCase attend(PagedBatch({400}, {400}, 16, 5, 0), 64, 4, 16, 1024, 3);
  for (int64_t g = 0; g < 4; ++g) {
    for (int64_t t = 0; t < 400; ++t) {
      attend.set_list(g, t, {static_cast<int32_t>(t % 16 == 0 ? t / 32 : t / 16)});
    }
  }
  expect_reference(attend);
}

TEST_F(MsaAttendModel, RowsSeeNothingOfTokensOfTheirFuture) {
  AttendCase attend(PagedBatch({70}, {9}, 64, 7, 0), 3, 1, 64, 2);
  const AttendCase clean = attend;
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

TEST_F(MsaAttendModel, InfiniteValuesAreNotNan) {
  AttendCase attend(PagedBatch({200}, {3}, 128, 7, 0), 2, 1, 32, 2);
  for (int64_t t = 0; t < 3; ++t) attend.set_list(0, t, {0, 1});
  attend.softmax_scale = 0.01f;  // no weight underflows
  attend.v.data<bf16_t>()[attend.batch.slot(0, 77) * 32 + 5] = bf16_from_float(test::kInfinity);
  attend.v.data<bf16_t>()[attend.batch.slot(0, 150) * 32 + 9] = bf16_from_float(-test::kInfinity);
  expect_reference(attend);
  EXPECT_EQ(attend.out_at(2, 1, 5), test::kInfinity);
  EXPECT_EQ(attend.out_at(2, 1, 9), -test::kInfinity);
}

TEST_F(MsaAttendModel, InfiniteValuesAreThoseOfRowsThatSeeThem) {
  for (const int64_t dim : {64, 128}) {
    // Rows at positions 128 to 167, ten places of a block and more in a tile.
    AttendCase attend(PagedBatch({168}, {40}, 128, 7, 0), 4, 1, dim, 2);
    for (int64_t t = 0; t < 40; ++t) attend.set_list(0, t, {0, 1});
    attend.softmax_scale = 0.01f;
    AttendCase clean = attend;
    run(clean);
    attend.v.data<bf16_t>()[attend.batch.slot(0, 148) * dim + dim - 7] =
        bf16_from_float(test::kInfinity);
    expect_reference(attend);
    for (int64_t t = 0; t < 40; ++t) {
      EXPECT_EQ(attend.row_bits(t) == clean.row_bits(t), t < 20) << t;
      EXPECT_EQ(std::isinf(attend.out_at(t, 3, dim - 7)), t >= 20) << t;
    }
  }
}

// Sums are stored as halves.
TEST_F(MsaAttendModel, ValuesOfEveryMagnitude) {
  for (const int exponent : {-110, -40, 40, 110}) {
    for (const bool with_infinity : {false, true}) {
      SCOPED_TRACE(exponent);
      AttendCase attend(PagedBatch({200}, {3}, 128, 7, 0), 2, 1, 32, 2);
      for (int64_t t = 0; t < 3; ++t) attend.set_list(0, t, {0, 1});
      attend.softmax_scale = 0.01f;
      bf16_t* const values = attend.v.data<bf16_t>();
      AttendCase plain = attend;
      for (int64_t i = 0; i < attend.batch.slots() * 32; ++i)
        values[i] = bf16_from_float(std::ldexp(bf16_to_float(values[i]), exponent));
      if (with_infinity)
        values[attend.batch.slot(0, 77) * 32 + 5] = bf16_from_float(test::kInfinity);
      run(plain);
      run(attend);
      for (int64_t t = 0; t < 3; ++t) {
        for (int64_t d = 0; d < 32; ++d) {
          if (with_infinity && d == 5) {
            EXPECT_EQ(attend.out_at(t, 1, d), test::kInfinity);
          } else {
            const float expected = plain.out_at(t, 1, d);
            EXPECT_NEAR(std::ldexp(attend.out_at(t, 1, d), -exponent), expected,
                        std::fabs(expected) / 64 + 1e-3)
                << d;
          }
        }
        EXPECT_NEAR(attend.lse_at(t, 1), plain.lse_at(t, 1), 1e-4);
      }
    }
  }
}

TEST_F(MsaAttendModel, BlocksWhoseValuesAreZero) {
  AttendCase attend(PagedBatch({200}, {3}, 128, 7, 0), 2, 1, 32, 2);
  for (int64_t t = 0; t < 3; ++t) attend.set_list(0, t, {0, 1});
  std::fill_n(attend.v.data<bf16_t>() + attend.batch.slot(0, 0) * 32, 128 * 32,
              bf16_from_float(0.0f));
  expect_reference(attend);
}

TEST_F(MsaAttendModel, HostileLengthsOffsetsPagesAndLists) {
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

TEST_F(MsaAttendModel, PlansWithoutPagesOrRequests) {
  AttendCase attend(PagedBatch({40}, {2}, 16, 3, 0), 2, 1, 32, 2);
  MsaAttendTensors tensors = attend.tensors();
  tensors.page_table.shape[1] = 0;
  MsaAttendProblem problem = attend.problem();
  problem.softmax_scale = 1;
  test::gpu::run_msa_attend_sm90(problem, tensors);
  for (int64_t t = 0; t < 2; ++t) {
    EXPECT_EQ(attend.out_at(t, 1, 3), 0.0f);
    EXPECT_EQ(attend.lse_at(t, 1), -std::numeric_limits<float>::infinity());
  }
}

}  // namespace
}  // namespace fovea
