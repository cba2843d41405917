#include "fovea/msa_attend.h"

#include <gtest/gtest.h>

#include <array>

#include "fovea/error.h"
#include "fovea/stream.h"
#include "tests/msa/msa_attend_case.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::AttendCase;
using test::kInfinity;
using test::PagedBatch;
using test::Tensor;

class MsaAttendTest : public test::TargetTest {
 public:
  void run(AttendCase& attend, int threads = 1) {
    attend.run(options_of(attend.problem()), threads);
  }
  // Cases that cuda_by_block refuses run on the implementation behind it.
  static Options options_of(const MsaAttendProblem& problem) {
    try {
      MsaAttend::plan(problem, GetParam().device(), GetParam().options());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      return {"cuda_portable"};
    }
    return GetParam().options();
  }
  void expect_reference(AttendCase& attend, int threads = 1) {
    AttendCase expected = attend;
    expected.run({"ref"});
    run(attend, threads);
    EXPECT_TRUE(test::ExpectClose(attend.out.view(), expected.out.view(), test::kBf16Output));
    EXPECT_TRUE(test::ExpectClose(attend.lse.view(), expected.lse.view(), test::kLse));
  }
};
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
      EXPECT_TRUE(test::ExpectClose(row.out.view(), decode.out.view(), test::kBf16Output));
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

TEST_P(MsaAttendTest, SmallCase6ZeroLengthAndPaddedRowsAreWritten) {
  AttendCase attend(PagedBatch({20, 0, 1, -4, 33, 16}, {0, 2, 6, 3, 5, 0}, 16, 4, 1, 4), 4, 2, 64,
                    2);
  std::fill_n(attend.blocks.data<int32_t>(), 2 * attend.batch.num_rows * 2, 0);
  attend.has_sink = true;
  attend.sink = Tensor::f32({4}, {0.0f, -kInfinity, kInfinity, 3.0f});
  for (const bool causal : {true, false}) {
    attend.causal = causal;
    attend.make_outputs();
    expect_reference(attend);
    for (const int64_t t : {0, 1, 2, 6, 8, 9, 10, 16, 17, 18, 19}) {
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_EQ(attend.lse_at(t, h), -kInfinity) << t;
        for (int64_t d = 0; d < 64; ++d)
          EXPECT_EQ(attend.out.data<bf16_t>()[(t * 4 + h) * 64 + d].bits, 0);
      }
    }
    EXPECT_EQ(attend.lse_at(7, 0), attend.lse_at(7, 0));
    EXPECT_NE(attend.lse_at(7, 0), -kInfinity);
  }
  AttendCase none(PagedBatch({}, {}, 16, 4, 1, 0), 4, 2, 64, 2);
  run(none);
  AttendCase padding(PagedBatch({}, {}, 16, 4, 1, 3), 4, 2, 64, 2);
  run(padding, 4);
  EXPECT_EQ(padding.lse_at(2, 3), -kInfinity);
  AttendCase no_list(PagedBatch({30}, {2}, 16), 4, 2, 64, 0);
  run(no_list);
  EXPECT_EQ(no_list.lse_at(1, 3), -kInfinity);
}

TEST_P(MsaAttendTest, KnownFault4RowsOfInvalidIdsAreEmpty) {
  AttendCase attend(PagedBatch({100}, {3}, 16, 2), 4, 2, 64, 3);
  for (int64_t g = 0; g < 2; ++g) {
    attend.set_list(g, 0, {-1, -1, -1});
    attend.set_list(g, 1, {7, 2147483647, -2147483647});
    attend.set_list(g, 2, {8, 100000, -5});
  }
  run(attend, 4);
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(attend.lse_at(t, 3), -kInfinity);
    EXPECT_EQ(attend.out_at(t, 3, 5), 0.0f);
  }
}

TEST_P(MsaAttendTest, KnownFault3PagesOutsideTheCacheMaskTheirBlock) {
  AttendCase attend(PagedBatch({100}, {5}, 16, 2), 4, 2, 64, 4);
  int32_t* table = attend.batch.page_table.data<int32_t>();
  table[0] = -1;
  table[1] = static_cast<int32_t>(attend.batch.num_pages);
  table[2] = std::numeric_limits<int32_t>::min();
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 5; ++t) attend.set_list(g, t, {0, 1, 2, 4});
  }
  expect_reference(attend);
  AttendCase only = attend;
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 5; ++t) only.set_list(g, t, {4});
  }
  run(only);
  EXPECT_EQ(only.out.bytes(), attend.out.bytes());
}

TEST_P(MsaAttendTest, KnownFault8HostileLengthsAndOffsets) {
  AttendCase attend(PagedBatch({60, 70, 80}, {5, 5, 5}, 16, 2), 4, 1, 64, 4);
  attend.k.fill_bytes(0x11);
  attend.v.fill_bytes(0x22);
  attend.batch.kv_len = test::i32_vector({2147483647, 70, std::numeric_limits<int32_t>::min()});
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{-7, 4, 3, 2147483647},
                                              {3, 3, 15, 15},
                                              {2147483647, 0, 0, 0},
                                              {-2147483647, -1, -1, 7}}) {
    attend.batch.q_indptr = test::i32_vector(offsets);
    attend.make_outputs();
    expect_reference(attend, 2);
  }
  attend.has_offset = true;
  attend.q_offset = test::i32_vector({2147483647, -2147483647, -3});
  attend.make_outputs();
  expect_reference(attend);
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

TEST_P(MsaAttendTest, SmallCase7PoisonChangesNoBit) {
  // Unused pages, and slots past the last row's position in the last page, hold NaN; then zeros.
  for (const int32_t length : {1, 13, 15, 16, 17, 63, 65, 150}) {
    AttendCase attend(PagedBatch({length, 40}, {1, 3}, 16, 3), 8, 2, 64, 4);
    run(attend);
    AttendCase zeros = attend;
    for (auto member : {&AttendCase::k, &AttendCase::v}) {
      bf16_t* pool = (zeros.*member).data<bf16_t>();
      for (int64_t i = 0; i < zeros.batch.slots() * 2 * 64; ++i) {
        if (pool[i].bits == test::kBf16NanBits.bits) pool[i] = bf16_t{0};
      }
    }
    run(zeros);
    EXPECT_EQ(attend.out.bytes(), zeros.out.bytes()) << length;
    EXPECT_EQ(attend.lse.bytes(), zeros.lse.bytes()) << length;
  }
}

TEST_P(MsaAttendTest, KnownFault19TokensOfTheFutureMayBeNan) {
  // Rows of one tile: a NaN token is seen by the rows at and after it only. Every group size.
  for (const int64_t group : {1, 2, 4, 16}) {
    AttendCase attend(PagedBatch({48}, {20}, 16, 3), group, 1, 64, 3);
    for (int64_t t = 0; t < 20; ++t) attend.set_list(0, t, {0, 1, 2});
    AttendCase clean = attend;
    run(clean);
    for (auto member : {&AttendCase::k, &AttendCase::v}) {
      AttendCase poisoned = attend;
      for (int64_t d = 0; d < 64; ++d)
        (poisoned.*member).data<bf16_t>()[poisoned.batch.slot(0, 37) * 64 + d] = test::kBf16NanBits;
      run(poisoned);
      for (int64_t t = 0; t < 20; ++t) {
        const bool sees = 28 + t >= 37;
        for (int64_t h = 0; h < group; ++h) {
          for (int64_t d = 0; d < 64; ++d) {
            if (sees)
              EXPECT_TRUE(std::isnan(poisoned.out_at(t, h, d)));
            else
              EXPECT_EQ(poisoned.out_at(t, h, d), clean.out_at(t, h, d));
          }
        }
      }
    }
  }
}

TEST_P(MsaAttendTest, NanOfOneRowListOrHeadStaysThere) {
  AttendCase attend(PagedBatch({200}, {12}, 16, 3), 8, 2, 64, 4);
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t t = 0; t < 12; ++t) attend.set_list(g, t, {0, 3, 11});
  }
  attend.set_list(0, 5, {0, 2, 11});
  AttendCase clean = attend;
  run(clean);
  // Block 2 is listed by row 5 and KV head 0 alone; head 6 of row 9 has a NaN query.
  for (int64_t d = 0; d < 64; ++d) {
    attend.v.data<bf16_t>()[attend.batch.slot(0, 2 * 16 + 3) * 128 + d] = test::kBf16NanBits;
    attend.q.data<bf16_t>()[(9 * 8 + 6) * 64 + d] = test::kBf16NanBits;
  }
  run(attend);
  for (int64_t t = 0; t < 12; ++t) {
    for (int64_t h = 0; h < 8; ++h) {
      const bool nan = (t == 5 && h < 4) || (t == 9 && h == 6);
      for (int64_t d = 0; d < 64; ++d) {
        if (nan)
          EXPECT_TRUE(std::isnan(attend.out_at(t, h, d)));
        else
          EXPECT_EQ(attend.out_at(t, h, d), clean.out_at(t, h, d));
      }
    }
  }
}

TEST_P(MsaAttendTest, HugeAndTinyLogits) {
  AttendCase attend(PagedBatch({90}, {4}, 16, 3), 4, 2, 64, 4);
  for (const float scale : {1e-6f, 40.0f, 1000.0f}) {
    attend.softmax_scale = scale;
    attend.make_outputs();
    AttendCase expected = attend;
    expected.run({"ref"});
    run(attend, 2);
    EXPECT_TRUE(test::ExpectClose(attend.lse.view(), expected.lse.view(),
                                  {.absolute = 1e-3, .relative = 1e-5, .cosine = 1e-6}));
  }
  // All logits -inf: an empty row; one of +inf: NaN.
  for (int64_t d = 0; d < 64; ++d) {
    attend.q.data<bf16_t>()[d] = bf16_from_float(d == 0 ? -1.0f : 0.0f);
    attend.q.data<bf16_t>()[64 + d] = bf16_from_float(d == 0 ? 1.0f : 0.0f);
  }
  for (int64_t j = 0; j < 90; ++j)
    attend.k.data<bf16_t>()[attend.batch.slot(0, j) * 128] = bf16_from_float(kInfinity);
  run(attend);
  EXPECT_EQ(attend.lse_at(0, 0), -kInfinity);
  EXPECT_EQ(attend.out_at(0, 0, 5), 0.0f);
  EXPECT_TRUE(std::isnan(attend.out_at(0, 1, 5)));
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

TEST_P(MsaAttendTest, SmallCase9OnePlanForGrowingAndShrinkingLengths) {
  AttendCase attend(PagedBatch({4096, 4096, 4096}, {1, 1, 1}, 128, 5, 1), 16, 1, 64, 4);
  const MsaAttend plan =
      MsaAttend::plan(attend.problem(), GetParam().device(2), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{129, 513, 1024},
                                              {0, 0, 0},
                                              {1, 128, 257},
                                              {2048, 2049, 4096},
                                              {64, 4096, 0},
                                              {4096, 64, 0}}) {
    attend.batch.kv_len = test::i32_vector(lengths);
    attend.make_outputs();
    plan.run(attend.tensors(), workspace.workspace());
    AttendCase fresh = attend;
    fresh.make_outputs();
    fresh.run(GetParam().options(), 1);
    EXPECT_EQ(attend.out.bytes(), fresh.out.bytes());
    EXPECT_EQ(attend.lse.bytes(), fresh.lse.bytes());
  }
}

TEST_P(MsaAttendTest, SmallCase8ReplaysOfAGraphEqualEagerRuns) {
  // Two plans of one shape with a workspace each, captured once, replayed on other contents.
  const Device device = GetParam().device(2);
  AttendCase base(
      PagedBatch({300, 300, 300, 300, 300, 300, 300, 300}, {1, 1, 1, 1, 1, 1, 1, 1}, 16, 5, 1), 4,
      2, 32, 4);
  AttendCase other = base;
  const MsaAttend plan = MsaAttend::plan(base.problem(), device, GetParam().options());
  const MsaAttend second = MsaAttend::plan(base.problem(), device, GetParam().options());
  HostBuffer workspace(plan.workspace_bytes()), second_workspace(second.workspace_bytes());
  const OwnedStream stream(device);
  const MsaAttendTensors tensors = base.tensors(), other_tensors = other.tensors();
  const Graph graph = Graph::capture(device, stream, [&](Stream s) {
    plan.run(tensors, workspace.workspace(), s);
    second.run(other_tensors, second_workspace.workspace(), s);
    plan.run(tensors, workspace.workspace(), s);
  });
  test::Rng rng(9);
  for (int replay = 0; replay < 100; ++replay) {
    for (AttendCase* each : {&base, &other}) {
      for (int64_t r = 0; r < 8; ++r) {
        const int64_t kind = rng.integer(0, 5);
        each->batch.kv_len.data<int32_t>()[r] =
            replay % 10 == 0 || kind == 0 ? 0 : static_cast<int32_t>(rng.integer(1, 300));
        for (int64_t p = 0; p < base.batch.max_pages; ++p)
          each->batch.page_table.data<int32_t>()[r * base.batch.max_pages + p] =
              static_cast<int32_t>(rng.integer(-1, base.batch.num_pages));
      }
      for (int64_t i = 0; i < 2 * 8 * 4; ++i)
        each->blocks.data<int32_t>()[i] = static_cast<int32_t>(rng.integer(-1, 20));
      each->out.fill_bytes(0x55);
      each->lse.fill_bytes(0x55);
    }
    graph.launch(stream);
    stream.synchronize();
    for (AttendCase* each : {&base, &other}) {
      AttendCase eager = *each;
      eager.make_outputs();
      eager.run(GetParam().options());
      ASSERT_EQ(eager.out.bytes(), each->out.bytes()) << replay;
      ASSERT_EQ(eager.lse.bytes(), each->lse.bytes()) << replay;
    }
  }
}

TEST_P(MsaAttendTest, SmallCase10LayoutsWithEqualExtentsAndThreeHeads) {
  for (const int64_t group : {4, 8, 16}) {
    AttendCase attend(PagedBatch({100, 80, 120}, {1, 1, 1}, 16, 3), 3 * group, 3, 64, 3);
    run(attend);
    AttendCase row_major = attend;
    row_major.layout = BlocksLayout::kRowMajor;
    for (int64_t g = 0; g < 3; ++g) {
      for (int64_t t = 0; t < 3; ++t)
        std::copy_n(attend.list(g, t), 3, row_major.blocks.data<int32_t>() + (t * 3 + g) * 3);
    }
    row_major.make_outputs();
    run(row_major);
    EXPECT_EQ(row_major.out.bytes(), attend.out.bytes());
    EXPECT_EQ(row_major.lse.bytes(), attend.lse.bytes());
    expect_reference(attend);
  }
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

TEST_P(MsaAttendTest, KnownFault14AnyStridesOfTheCache) {
  AttendCase attend(PagedBatch({100, 61}, {3, 20}, 16, 3), 8, 2, 64, 4);
  run(attend);
  const int64_t pages = attend.batch.num_pages;
  // Rank-4 forms: slot-major seen as pages of heads; pages of heads of tokens; interleaved K|V
  // rows.
  struct Form {
    int64_t page, head, token, value_offset;
  };
  for (const Form& form : {Form{16 * 128, 64, 128, 0}, Form{2 * 16 * 64, 16 * 64, 64, 0},
                           Form{16 * 256, 128, 256, 64}, Form{2 * 16 * 72 + 8, 16 * 72, 72, 0}}) {
    const int64_t total = pages * form.page + 64;
    Tensor k_memory(DType::kBf16, {total}), v_memory(DType::kBf16, {total});
    k_memory.fill_bytes(0xFF);
    v_memory.fill_bytes(0xFF);
    Tensor& values = form.value_offset > 0 ? k_memory : v_memory;
    for (int64_t page = 0; page < pages; ++page) {
      for (int64_t g = 0; g < 2; ++g) {
        for (int64_t token = 0; token < 16; ++token) {
          const int64_t from = ((page * 16 + token) * 2 + g) * 64;
          const int64_t to = page * form.page + g * form.head + token * form.token;
          std::copy_n(attend.k.data<bf16_t>() + from, 64, k_memory.data<bf16_t>() + to);
          std::copy_n(attend.v.data<bf16_t>() + from, 64,
                      values.data<bf16_t>() + to + form.value_offset);
        }
      }
    }
    AttendCase other = attend;
    other.make_outputs();
    MsaAttendTensors tensors = other.tensors();
    tensors.k_pool = make_tensor(static_cast<const void*>(k_memory.data<bf16_t>()), DType::kBf16,
                                 {pages, 2, 16, 64});
    tensors.k_pool.stride = {form.page, form.head, form.token, 1};
    tensors.v_pool = tensors.k_pool;
    tensors.v_pool.data = values.data<bf16_t>() + form.value_offset;
    test::run(MsaAttend::plan(other.problem(), GetParam().device(2), GetParam().options()),
              tensors);
    EXPECT_EQ(other.out.bytes(), attend.out.bytes());
    EXPECT_EQ(other.lse.bytes(), attend.lse.bytes());
  }
}

TEST_P(MsaAttendTest, KnownFault14StridedQueriesListsTablesAndOutputsWithGuards) {
  AttendCase attend(PagedBatch({45, 33}, {3, 2}, 16, 3, 0), 4, 2, 64, 3);
  run(attend);
  const int64_t rows = 5, pages = attend.batch.max_pages, slots = attend.batch.slots();
  const int64_t pitch = 4 * 64 + 24;
  test::GuardedMemory q(static_cast<size_t>(2 * (rows * pitch - 24)));
  test::GuardedMemory out(static_cast<size_t>(2 * (rows * pitch - 24)));
  test::GuardedMemory k(static_cast<size_t>(2 * slots * 128)),
      v(static_cast<size_t>(2 * slots * 128));
  test::GuardedMemory lists(static_cast<size_t>(4 * (rows * 2 * 5 - 2)));
  test::GuardedMemory table(static_cast<size_t>(4 * (2 * (pages + 1) - 1))), lengths(8),
      offsets(12);
  test::GuardedMemory lse(static_cast<size_t>(4 * (rows * 5 - 1)));
  for (int64_t t = 0; t < rows; ++t) {
    std::copy_n(attend.q.data<bf16_t>() + t * 256, 256, static_cast<bf16_t*>(q.data()) + t * pitch);
    for (int64_t g = 0; g < 2; ++g)
      std::copy_n(attend.list(g, t), 3, static_cast<int32_t*>(lists.data()) + (t * 2 + g) * 5);
  }
  std::copy_n(attend.k.data<bf16_t>(), slots * 128, static_cast<bf16_t*>(k.data()));
  std::copy_n(attend.v.data<bf16_t>(), slots * 128, static_cast<bf16_t*>(v.data()));
  for (int64_t r = 0; r < 2; ++r)
    std::copy_n(attend.batch.page_table.data<int32_t>() + r * pages, pages,
                static_cast<int32_t*>(table.data()) + r * (pages + 1));
  std::copy_n(attend.batch.kv_len.data<int32_t>(), 2, static_cast<int32_t*>(lengths.data()));
  std::copy_n(attend.batch.q_indptr.data<int32_t>(), 3, static_cast<int32_t*>(offsets.data()));
  MsaAttendTensors tensors = attend.tensors();
  tensors.q.data = q.data();
  tensors.q.stride[0] = pitch;
  tensors.out.data = out.data();
  tensors.out.stride[0] = pitch;
  tensors.k_pool.data = k.data();
  tensors.v_pool.data = v.data();
  tensors.blocks.data = lists.data();  // [row][head][entry], viewed as [head][row][entry]
  tensors.blocks.stride = {5, 10, 1};
  tensors.page_table.data = table.data();
  tensors.page_table.stride[0] = pages + 1;
  tensors.kv_len.data = lengths.data();
  tensors.q_indptr.data = offsets.data();
  tensors.lse.data = lse.data();
  tensors.lse.stride[0] = 5;
  const MsaAttend plan =
      MsaAttend::plan(attend.problem(), GetParam().device(2), GetParam().options());
  test::GuardedMemory scratch((plan.workspace_bytes() + 63) / 64 * 64);
  plan.run(tensors, {scratch.data(), plan.workspace_bytes()});
  for (int64_t t = 0; t < rows; ++t) {
    EXPECT_TRUE(std::equal(attend.out.data<uint16_t>() + t * 256,
                           attend.out.data<uint16_t>() + (t + 1) * 256,
                           static_cast<uint16_t*>(out.data()) + t * pitch));
    for (int64_t h = 0; h < 4; ++h)
      EXPECT_EQ(static_cast<float*>(lse.data())[t * 5 + h], attend.lse_at(t, h));
  }
}

TEST_P(MsaAttendTest, KnownFault6AddressesBeyondFourGigabytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  AttendCase attend(PagedBatch({60}, {2}, 16, 5, 0), 4, 1, 64, 4);
  run(attend);
  const int64_t pitch = int64_t{1} << 26;
  const int64_t slots = attend.batch.slots();
  test::SparseMapping k(static_cast<size_t>(2 * slots * pitch)),
      v(static_cast<size_t>(2 * slots * pitch));
  for (int64_t j = 0; j < 60; ++j) {
    const int64_t slot = attend.batch.slot(0, j);
    std::copy_n(attend.k.data<bf16_t>() + slot * 64, 64,
                static_cast<bf16_t*>(k.data()) + slot * pitch);
    std::copy_n(attend.v.data<bf16_t>() + slot * 64, 64,
                static_cast<bf16_t*>(v.data()) + slot * pitch);
  }
  AttendCase far = attend;
  far.make_outputs();
  MsaAttendTensors tensors = far.tensors();
  tensors.k_pool.data = k.data();
  tensors.v_pool.data = v.data();
  tensors.k_pool.stride[0] = tensors.v_pool.stride[0] = pitch;
  test::run(MsaAttend::plan(far.problem(), GetParam().device(1), GetParam().options()), tensors);
  EXPECT_EQ(far.out.bytes(), attend.out.bytes());
}

TEST_P(MsaAttendTest, RunDoesNotAllocateAndLseIsOptional) {
  AttendCase attend(PagedBatch({200, 90}, {5, 3}, 16, 2), 8, 2, 64, 4);
  MsaAttendTensors tensors = attend.tensors();
  const MsaAttend plan =
      MsaAttend::plan(attend.problem(), GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const std::vector<uint8_t> expected = attend.out.bytes();
  attend.make_outputs();
  tensors = attend.tensors();
  tensors.lse = {};
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
  EXPECT_EQ(attend.out.bytes(), expected);
  EXPECT_EQ(attend.lse.bytes(), std::vector<uint8_t>(attend.lse.bytes().size(), 0x55));
}

TEST(MsaAttend, SmallCase13RefusesWhatDoesNotFit) {
  const Device cpu = Device::cpu(1);
  AttendCase attend(PagedBatch({200, 90}, {5, 3}, 16, 2), 8, 2, 64, 4);
  const auto refuse_plan = [&](const char* word, auto change) {
    MsaAttendProblem problem = attend.problem();
    change(problem);
    try {
      MsaAttend::plan(problem, cpu);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuse_plan("block_size", [](MsaAttendProblem& p) { p.block_size = 0; });
  refuse_plan("page_size", [](MsaAttendProblem& p) { p.page_size = 128; });
  refuse_plan("num_kv_heads", [](MsaAttendProblem& p) { p.num_kv_heads = 3; });
  refuse_plan("num_kv_heads", [](MsaAttendProblem& p) { p.num_kv_heads = 0; });
  refuse_plan("head_dim", [](MsaAttendProblem& p) { p.head_dim = 100; });
  refuse_plan("softmax_scale", [](MsaAttendProblem& p) { p.softmax_scale = -1; });
  refuse_plan("softmax_scale", [](MsaAttendProblem& p) { p.softmax_scale = kInfinity; });
  refuse_plan("topk", [](MsaAttendProblem& p) { p.topk = -1; });
  refuse_plan("kv_mode", [](MsaAttendProblem& p) { p.kv_mode = static_cast<MsaKvMode>(9); });
  refuse_plan("blocks_layout",
              [](MsaAttendProblem& p) { p.blocks_layout = static_cast<BlocksLayout>(9); });
  refuse_plan("max_rows", [](MsaAttendProblem& p) { p.max_rows = -1; });

  const auto refuse_run = [&](const char* word, auto change) {
    MsaAttendTensors tensors = attend.tensors();
    change(tensors);
    try {
      test::run(MsaAttend::plan(attend.problem(), cpu), tensors);
      ADD_FAILURE() << word << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
    EXPECT_EQ(attend.out.bytes(), std::vector<uint8_t>(attend.out.bytes().size(), 0x55));
  };
  refuse_run("slots", [](MsaAttendTensors& t) { t.k_pool.shape[0] = t.v_pool.shape[0] -= 3; });
  refuse_run("strides of k_pool", [](MsaAttendTensors& t) { t.v_pool.stride[0] *= 2; });
  refuse_run("strides of k_pool", [](MsaAttendTensors& t) { t.v_pool.shape[0] -= 16; });
  refuse_run("multiples of 16", [](MsaAttendTensors& t) {
    t.k_pool.data = static_cast<const char*>(t.k_pool.data) + 2;
    t.k_pool.shape[0] -= 16;
  });
  refuse_run("blocks", [](MsaAttendTensors& t) { t.blocks.shape[2] = 3; });
  refuse_run("blocks",
             [](MsaAttendTensors& t) { std::swap(t.blocks.shape[0], t.blocks.shape[1]); });
  refuse_run("k_scale", [](MsaAttendTensors& t) { t.k_scale = t.lse; });
  refuse_run("k_global_scale", [](MsaAttendTensors& t) { t.k_global_scale = t.lse; });
  refuse_run("sink", [](MsaAttendTensors& t) { t.sink = t.lse; });
  refuse_run("k_pool", [](MsaAttendTensors& t) { t.k_pool.dtype = DType::kU8; });
  refuse_run("q ", [](MsaAttendTensors& t) { t.q.shape[1] = 4; });
  refuse_run("lse", [](MsaAttendTensors& t) { t.lse.shape[1] = 4; });
  refuse_run("page_table", [](MsaAttendTensors& t) { t.page_table.shape[1] += 1; });
  refuse_run("kv_len", [](MsaAttendTensors& t) { t.kv_len.dtype = DType::kF32; });
  refuse_run("q_indptr", [](MsaAttendTensors& t) { t.q_indptr = t.kv_len; });
}

}  // namespace
}  // namespace fovea
