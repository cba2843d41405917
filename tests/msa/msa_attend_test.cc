#include "fovea/msa_attend.h"

#include <gtest/gtest.h>

#include <array>

#include "fovea/error.h"
#include "tests/msa/msa_attend_target.h"

namespace fovea {
namespace {

using test::AttendCase;
using test::kInfinity;
using test::PagedBatch;
using test::Tensor;

class MsaAttendTest : public test::AttendTargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, MsaAttendTest, testing::ValuesIn(test::targets_of("msa_attend")),
                         test::target_name);

// q = 0 makes every visible token weigh the same; the value of token j is f(j).
template <class Value>
AttendCase mean_case(PagedBatch batch, int64_t topk, Value f) {
  AttendCase attend(std::move(batch), 2, 1, 64, topk);
  attend.q.fill_bytes(0);
  attend.v = fill_pool(attend.batch, 1, 64, [&](int64_t, int64_t j, int64_t, int64_t) {
    return static_cast<float>(f(j));
  });
  return attend;
}

TEST_P(MsaAttendTest, SmallCase1MeansOfTheListedBlocks) {
  // L = 300, blocks 0 and 2 of 128, V[j] = floor(j / 128).
  const auto value = [](int64_t j) { return j / 128; };
  AttendCase at299 = mean_case(PagedBatch({300}, {1}, 128), 5, value);
  at299.set_list(0, 0, {0, 2});
  run(at299);
  EXPECT_EQ(at299.out_at(0, 1, 3), bf16_to_float(bf16_from_float(88.0f / 172.0f)));
  EXPECT_NEAR(at299.lse_at(0, 1), 5.147494f, 2e-6f);
  AttendCase at260 = mean_case(PagedBatch({300}, {1}, 128), 5, value);
  at260.has_offset = true;
  at260.q_offset = test::i32_vector({260});
  at260.set_list(0, 0, {0, 2});
  run(at260);
  EXPECT_EQ(at260.out_at(0, 0, 63), bf16_to_float(bf16_from_float(10.0f / 133.0f)));
  EXPECT_NEAR(at260.lse_at(0, 0), 4.890349f, 2e-6f);
  for (const std::vector<int32_t>& list : {std::vector<int32_t>{2, 0},
                                           {0, 0, 2},
                                           {0, 2, -1},
                                           {-1, 2, 0},
                                           {0, 2, 5},
                                           {2, 2, 0, 0, 2},
                                           {2147483647, 2, -2147483647, 0, 3}}) {
    for (AttendCase* base : {&at299, &at260}) {
      AttendCase other = *base;
      other.set_list(0, 0, list);
      run(other);
      EXPECT_EQ(other.row_bits(0), base->row_bits(0));
    }
  }
}

TEST_P(MsaAttendTest, KnownFault19TheTailOfTheLastBlockIsNotCounted) {
  AttendCase attend = mean_case(PagedBatch({130}, {1}, 128), 2, [](int64_t) { return 1; });
  attend.set_list(0, 0, {0, 1});
  run(attend);
  EXPECT_EQ(attend.out_at(0, 0, 0), 1.0f);
  EXPECT_NEAR(attend.lse_at(0, 0), std::log(130.0f), 1e-5f);
  for (const int64_t page_size : {16, 64, 256}) {
    MsaAttendProblem problem = attend.problem();
    problem.page_size = page_size;
    EXPECT_THROW(MsaAttend::plan(problem, GetParam().device(1), GetParam().options()), Error);
  }
}

TEST_P(MsaAttendTest, KnownFault19GroupsEqualIndependentRuns) {
  AttendCase both(PagedBatch({40, 33}, {3, 5}, 16, 2), 8, 2, 64, 2);
  both.batch_invariant = true;  // a GPU splits the rows of fewer KV heads further otherwise
  for (int64_t t = 0; t < 8; ++t) {
    both.set_list(0, t, {0});
    both.set_list(1, t, {1});
  }
  run(both);
  for (int64_t g = 0; g < 2; ++g) {
    AttendCase single = both;
    single.heads = 4;
    single.kv_heads = 1;
    single.q = Tensor(DType::kBf16, {8, 4, 64});
    for (int64_t t = 0; t < 8; ++t)
      std::copy_n(both.q.data<bf16_t>() + (t * 8 + g * 4) * 64, 256,
                  single.q.data<bf16_t>() + t * 256);
    for (auto member : {&AttendCase::k, &AttendCase::v}) {
      single.*member = Tensor(DType::kBf16, {both.batch.slots(), 1, 64});
      for (int64_t s = 0; s < both.batch.slots(); ++s)
        std::copy_n((both.*member).data<bf16_t>() + (s * 2 + g) * 64, 64,
                    (single.*member).data<bf16_t>() + s * 64);
    }
    single.blocks = Tensor(DType::kI32, {1, 8, 2});
    std::copy_n(both.list(g, 0), 16, single.list(0, 0));
    single.make_outputs();
    run(single);
    for (int64_t t = 0; t < 8; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t d = 0; d < 64; ++d)
          EXPECT_EQ(single.out_at(t, h, d), both.out_at(t, g * 4 + h, d));
        EXPECT_EQ(single.lse_at(t, h), both.lse_at(t, g * 4 + h));
      }
    }
  }
}

TEST_P(MsaAttendTest, MatchesTheReferenceForEveryShape) {
  uint64_t seed = 1;
  for (const int64_t group : {1, 2, 4, 8, 16}) {
    for (const int64_t kv_heads : {1, 3}) {
      for (const int64_t block : {16, 32, 64, 128, 256}) {
        if (kv_heads == 3 && block > 32) continue;
        const auto b = static_cast<int32_t>(block);
        AttendCase attend(PagedBatch({2 * b + 5, 0, b + b / 2, 1, b - 1},
                                     {1, 0, group < 8 ? 9 : 3, 1, 1}, block, seed, 1, 2),
                          group * kv_heads, kv_heads, seed % 2 == 0 ? 64 : 128, 3, seed);
        ++seed;
        expect_reference(attend, 2);
      }
    }
  }
}

TEST_P(MsaAttendTest, ManyRowsShareBlocks) {
  AttendCase attend(PagedBatch({400, 130}, {40, 3}, 128, 3), 16, 1, 128, 3);
  EXPECT_EQ(options_of(attend.problem()).implementation, GetParam().implementation);
  expect_reference(attend, 2);
}

TEST_P(MsaAttendTest, KnownFault7OtherHeadCountsAndWidths) {
  for (const auto& [group, kv_heads, dim] :
       {std::array<int64_t, 3>{5, 4, 64}, {3, 7, 48}, {16, 5, 16}, {7, 1, 80}, {13, 2, 144}}) {
    AttendCase attend(PagedBatch({45, 33, 20}, {2, 9, 1}, 16, 3), group * kv_heads, kv_heads, dim,
                      3, 5);
    attend.has_sink = true;
    attend.sink = Tensor::f32({group * kv_heads}, test::Rng(3).normals(group * kv_heads, 2));
    expect_reference(attend, 2);
  }
}

TEST_P(MsaAttendTest, LongListsAndManyParts) {
  // 64 blocks of 16 tokens: two parts; 40 of 64: five parts of eight.
  AttendCase small(PagedBatch({1100, 700}, {1, 6}, 16, 3), 16, 1, 64, 64);
  expect_reference(small);
  AttendCase large(PagedBatch({2600}, {2}, 64, 3), 8, 2, 64, 40);
  expect_reference(large, 3);
}

TEST_P(MsaAttendTest, SmallCase4ChunkedEqualsWholeAndDecodeEqualsPrefill) {
  AttendCase whole(PagedBatch({700}, {700}, 64, 7, 0), 2, 1, 32, 3);
  whole.batch_invariant = true;
  run(whole, 2);
  AttendCase first = whole.rows_of(0, 0, 257);
  AttendCase second = whole.rows_of(0, 257, 700);
  run(first);
  run(second);
  for (int64_t t = 0; t < 700; ++t)
    ASSERT_EQ(whole.row_bits(t), t < 257 ? first.row_bits(t) : second.row_bits(t - 257)) << t;
  for (const int32_t t : {0, 63, 64, 300, 699}) {
    AttendCase decode = whole.rows_of(0, t, t + 1);
    run(decode, 4);
    EXPECT_EQ(decode.row_bits(0), whole.row_bits(t)) << t;
  }
}

TEST_P(MsaAttendTest, ManyRowsAndFewRowsGiveOneResult) {
  // More than 1056 rows times KV heads are too many for a GPU to split; the row of a plan for one
  // is split most.
  struct Form {
    int32_t rows;
    int64_t group, kv_heads, dim, block, topk;
  };
  for (const Form& form : {Form{1100, 16, 1, 64, 16, 2}, Form{280, 3, 4, 128, 64, 3}}) {
    AttendCase whole(PagedBatch({form.rows}, {form.rows}, form.block, 7, 0),
                     form.group * form.kv_heads, form.kv_heads, form.dim, form.topk);
    run(whole);
    const int64_t heads = whole.heads, width = heads * form.dim;
    for (const int32_t t : {0, 64, 133, form.rows - 1}) {
      AttendCase decode = whole.rows_of(0, t, t + 1);
      expect_reference(decode);
      AttendCase row = decode;
      std::copy_n(whole.out.data<bf16_t>() + t * width, width, row.out.data<bf16_t>());
      std::copy_n(whole.lse.data<float>() + t * heads, heads, row.lse.data<float>());
      EXPECT_TRUE(row.out_close_to(decode, 2 * num_rounded()));
      EXPECT_TRUE(test::ExpectClose(row.lse.view(), decode.lse.view(), test::kLse));
    }
  }
}

TEST_P(MsaAttendTest, InfiniteValuesAreNotNan) {
  // A value of +inf that a row sees gives +inf in that channel, in every part of the list.
  for (const int64_t rows : {1, 40}) {
    AttendCase attend(PagedBatch({400}, {static_cast<int32_t>(rows)}, 16, 3), 8, 2, 64, 25);
    for (int64_t g = 0; g < 2; ++g) {
      for (int64_t t = 0; t < rows; ++t) {
        std::vector<int32_t> all(25);
        std::iota(all.begin(), all.end(), 0);
        attend.set_list(g, t, all);
      }
    }
    attend.softmax_scale = 0.01f;  // no weight underflows
    bf16_t* const values = attend.v.data<bf16_t>();
    values[attend.batch.slot(0, 77) * 128 + 5] = bf16_from_float(kInfinity);
    values[attend.batch.slot(0, 300) * 128 + 64 + 63] = bf16_from_float(-kInfinity);
    expect_reference(attend, 2);
    EXPECT_EQ(attend.out_at(rows - 1, 3, 5), kInfinity);
    EXPECT_EQ(attend.out_at(rows - 1, 7, 63), -kInfinity);
    EXPECT_TRUE(std::isfinite(attend.out_at(rows - 1, 3, 6)));
  }
}

TEST_P(MsaAttendTest, SmallCase5AllBlocksEqualDenseAttention) {
  AttendCase attend(PagedBatch({150}, {5}, 16, 4), 4, 2, 64, 10);
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 5; ++t) {
      std::vector<int32_t> all(10);
      std::iota(all.begin(), all.end(), 0);
      attend.set_list(g, t, all);
    }
  }
  run(attend);
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t h = 0; h < 4; ++h) {
      std::vector<double> weights;
      double sum = 0;
      for (int64_t j = 0; j <= 145 + t; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < 64; ++d)
          dot += static_cast<double>(bf16_to_float(attend.q.data<bf16_t>()[(t * 4 + h) * 64 + d])) *
                 static_cast<double>(bf16_to_float(
                     attend.k.data<bf16_t>()[(attend.batch.slot(0, j) * 2 + h / 2) * 64 + d]));
        weights.push_back(std::exp(dot / 8));
        sum += weights.back();
      }
      EXPECT_NEAR(attend.lse_at(t, h), std::log(sum), 2e-4);
      double value = 0;
      for (size_t j = 0; j < weights.size(); ++j)
        value += weights[j] / sum *
                 static_cast<double>(bf16_to_float(
                     attend.v.data<bf16_t>()
                         [(attend.batch.slot(0, static_cast<int64_t>(j)) * 2 + h / 2) * 64 + 9]));
      EXPECT_NEAR(attend.out_at(t, h, 9), value, 4e-3 + 1e-2 * std::abs(value));
    }
  }
}

TEST_P(MsaAttendTest, NonCausalRowsSeeTheWholeOfTheirBlocks) {
  AttendCase attend(PagedBatch({100, 60}, {5, 20}, 16, 2), 4, 2, 64, 4);
  attend.causal = false;
  attend.has_offset = true;
  attend.q_offset = test::i32_vector({10, 0});
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 25; ++t) attend.set_list(g, t, {0, 3, 6});
  }
  expect_reference(attend, 2);
}

TEST_P(MsaAttendTest, SinkEntersTheDenominatorOnly) {
  AttendCase attend(PagedBatch({90}, {4}, 16, 3), 4, 2, 64, 4);
  run(attend);
  AttendCase sunk = attend;
  sunk.has_sink = true;
  sunk.sink = Tensor::f32({4}, {-kInfinity, kInfinity, attend.lse_at(0, 2), 0.0f});
  sunk.make_outputs();
  expect_reference(sunk);
  EXPECT_EQ(sunk.lse.bytes(), attend.lse.bytes());
  EXPECT_EQ(sunk.out_at(0, 0, 7), attend.out_at(0, 0, 7));
  EXPECT_EQ(sunk.out_at(0, 1, 7), 0.0f);
  EXPECT_NEAR(sunk.out_at(0, 2, 7), attend.out_at(0, 2, 7) / 2, 4e-3);
}

TEST_P(MsaAttendTest, SmallCase11VerifyRowsEqualRowsRunSingly) {
  for (int32_t rows = 2; rows <= 8; ++rows) {
    AttendCase verify(PagedBatch({333}, {rows}, 16, 3, 0), 16, 2, 64, 5, 7);
    verify.batch_invariant = true;
    run(verify, 2);
    for (int32_t i = 0; i < rows; ++i) {
      AttendCase single = verify.rows_of(0, i, i + 1);
      run(single);
      EXPECT_EQ(single.row_bits(0), verify.row_bits(i));
    }
  }
}

TEST_P(MsaAttendTest, ThreadsBatchMatesAndPagesChangeNoBit) {
  AttendCase attend(PagedBatch({900, 90, 511}, {1, 30, 5}, 32, 11), 16, 2, 64, 20);
  attend.batch_invariant = true;
  run(attend, 1);
  for (const int threads : {2, 3, 8}) {
    AttendCase again = attend;
    again.make_outputs();
    run(again, threads);
    EXPECT_EQ(again.out.bytes(), attend.out.bytes());
    EXPECT_EQ(again.lse.bytes(), attend.lse.bytes());
  }
  for (int64_t r = 0; r < 3; ++r) {
    AttendCase alone = attend.rows_of(r, 0, attend.batch.counts[static_cast<size_t>(r)]);
    for (const int threads : {1, 8}) {
      run(alone, threads);
      for (int64_t i = 0; i < alone.batch.num_rows; ++i)
        EXPECT_EQ(alone.row_bits(i), attend.row_bits(attend.batch.first_row(r) + i));
    }
  }
  AttendCase moved = attend;
  moved.batch = PagedBatch({900, 90, 511}, {1, 30, 5}, 32, 12);
  for (auto member : {&AttendCase::k, &AttendCase::v}) {
    (moved.*member).fill_bytes(0xFF);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t j = 0; j < attend.batch.lengths[static_cast<size_t>(r)]; ++j)
        std::copy_n((attend.*member).data<bf16_t>() + attend.batch.slot(r, j) * 128, 128,
                    (moved.*member).data<bf16_t>() + moved.batch.slot(r, j) * 128);
    }
  }
  moved.make_outputs();
  run(moved);
  EXPECT_EQ(moved.out.bytes(), attend.out.bytes());
}

}  // namespace
}  // namespace fovea
