#include "fovea/mha_varlen.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "fovea/error.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/property.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr bf16_t kBf16Nan{0x7FFF};

std::vector<int32_t> cumulative(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

// A batch with its tensors; random unless overwritten.
struct Batch {
  MhaVarlenProblem problem;
  Tensor q, k, v, q_indptr, kv_indptr, out, lse;

  Batch(const std::vector<int32_t>& rows, const std::vector<int32_t>& keys, int64_t heads,
        bool causal, uint64_t seed = 1, int64_t dim_qk = 192, int64_t dim_v = 128) {
    const std::vector<int32_t> row_offsets = cumulative(rows);
    const std::vector<int32_t> key_offsets = cumulative(keys);
    const int64_t num_rows = row_offsets.back();
    const int64_t num_keys = key_offsets.back();
    problem = {.max_rows = num_rows,
               .max_keys = num_keys,
               .max_requests = static_cast<int64_t>(rows.size()),
               .num_heads = heads,
               .head_dim_qk = dim_qk,
               .head_dim_v = dim_v,
               .softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim_qk)),
               .causal = causal};
    test::Rng rng(seed);
    q = Tensor::bf16({num_rows, heads, dim_qk}, rng.bf16_normals(num_rows * heads * dim_qk, 3.0f));
    k = Tensor::bf16({num_keys, heads, dim_qk}, rng.bf16_normals(num_keys * heads * dim_qk));
    v = Tensor::bf16({num_keys, heads, dim_v}, rng.bf16_normals(num_keys * heads * dim_v));
    q_indptr = Tensor::i32({static_cast<int64_t>(row_offsets.size())}, row_offsets);
    kv_indptr = Tensor::i32({static_cast<int64_t>(key_offsets.size())}, key_offsets);
    out = Tensor(DType::kBf16, {num_rows, heads, dim_v});
    lse = Tensor(DType::kF32, {num_rows, heads});
    out.fill_bytes(0x55);
    lse.fill_bytes(0x55);
  }

  MhaVarlenTensors tensors() {
    return {.q = q,
            .k = k,
            .v = v,
            .q_indptr = q_indptr,
            .kv_indptr = kv_indptr,
            .out = out,
            .lse = lse};
  }

  void run(const Options& options, int threads = 1) {
    const MhaVarlen plan = MhaVarlen::plan(problem, test::device_of(options, threads), options);
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors(), buffer.workspace());
  }

  // Compares the output with one of the same batch; where weights were rounded, by what that may do
  // (tests/support/compare.h).
  testing::AssertionResult out_close_to(const Batch& expected, bool rounded) const {
    Batch unsigned_values = *this;
    for (size_t i = 1; i < v.bytes().size(); i += 2) unsigned_values.v.data<uint8_t>()[i] &= 0x7F;
    if (rounded) unsigned_values.run({"ref"});
    return test::ExpectCloseOutputs(
        test::to_doubles(out.view()), test::to_doubles(expected.out.view()),
        test::to_doubles(unsigned_values.out.view()), rounded ? 1 : 0, test::kBf16Output);
  }

  float out_at(int64_t t, int64_t h, int64_t d) const {
    return bf16_to_float(out.data<bf16_t>()[(t * problem.num_heads + h) * problem.head_dim_v + d]);
  }
  float lse_at(int64_t t, int64_t h) const { return lse.data<float>()[t * problem.num_heads + h]; }

  // Bytes of row t, all heads.
  std::vector<uint8_t> out_row(int64_t t) const { return row_bytes(out, t, problem.max_rows); }
  std::vector<uint8_t> lse_row(int64_t t) const { return row_bytes(lse, t, problem.max_rows); }

  static std::vector<uint8_t> row_bytes(const Tensor& tensor, int64_t t, int64_t rows) {
    const auto stride = static_cast<int64_t>(tensor.bytes().size()) / rows;
    return {tensor.bytes().begin() + t * stride, tensor.bytes().begin() + (t + 1) * stride};
  }
};

class MhaVarlenTest : public test::TargetTest {
 public:
  void run(Batch& batch, int threads = 1) { batch.run(GetParam().options(), threads); }

  void expect_reference(Batch& batch) {
    Batch expected = batch;
    expected.run({"ref"});
    run(batch);
    EXPECT_TRUE(batch.out_close_to(expected, test::rounds_weights(GetParam().implementation)));
    EXPECT_TRUE(test::ExpectClose(batch.lse.view(), expected.lse.view(), test::kLse));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MhaVarlenTest, testing::ValuesIn(test::targets_of("mha_varlen")),
                         test::target_name);

class FullMhaVarlenTest : public MhaVarlenTest {};
INSTANTIATE_TEST_SUITE_P(Targets, FullMhaVarlenTest,
                         testing::ValuesIn(test::targets_of("mha_varlen")), test::target_name);

// q = 0 makes every visible key weigh the same, so that with value row j equal to j the output is
// the mean of the visible positions and shows which keys were read.
Batch positions_batch(const std::vector<int32_t>& rows, const std::vector<int32_t>& keys,
                      bool causal) {
  Batch batch(rows, keys, 2, causal);
  batch.q.fill_bytes(0);
  bf16_t* v = batch.v.data<bf16_t>();
  for (const int32_t count : keys) {
    for (int32_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < 2 * 128; ++i) *v++ = bf16_from_float(static_cast<float>(j));
    }
  }
  return batch;
}

TEST_P(MhaVarlenTest, CausalIsRightAligned) {
  // 3 rows over 7 keys see 5, 6 and 7 keys; 4 rows over 4 keys see 1, 2, 3 and 4.
  Batch batch = positions_batch({3, 4}, {7, 4}, true);
  run(batch);
  const float means[] = {2.0f, 2.5f, 3.0f, 0.0f, 0.5f, 1.0f, 1.5f};
  const float counts[] = {5, 6, 7, 1, 2, 3, 4};
  for (int64_t t = 0; t < 7; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t d = 0; d < 128; ++d) EXPECT_EQ(batch.out_at(t, h, d), means[t]);
      EXPECT_NEAR(batch.lse_at(t, h), std::log(counts[t]), 1e-6f);
    }
  }
}

TEST_P(MhaVarlenTest, NonCausalRowsSeeEveryKeyOfTheirRequestOnly) {
  Batch batch = positions_batch({2, 0, 3}, {9, 4, 5}, false);
  run(batch);
  for (int64_t t = 0; t < 5; ++t) {
    EXPECT_EQ(batch.out_at(t, 1, 7), t < 2 ? 4.0f : 2.0f);
    EXPECT_NEAR(batch.lse_at(t, 0), std::log(t < 2 ? 9.0f : 5.0f), 1e-6f);
  }
}

TEST_P(MhaVarlenTest, KnownFault4RowsWithoutAKeyGiveZeroAndMinusInfinity) {
  // 5 rows over 3 keys: rows 0 and 1 see nothing, rows 2..4 see 1, 2, 3 keys. Then key counts 0, 7,
  // 0, and 6 rows beside a long request (known fault 8: per-row lengths -4..1).
  Batch batch = positions_batch({5, 2, 4, 1, 6, 3}, {3, 0, 7, 0, 1, 500}, true);
  const int visible[] = {0, 0, 1, 2, 3, 0, 0, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 1, 498, 499, 500};
  run(batch);
  for (int64_t t = 0; t < 21; ++t) {
    const auto count = static_cast<float>(visible[t]);
    EXPECT_EQ(batch.out_at(t, 1, 3),
              visible[t] == 0 ? 0.0f : bf16_to_float(bf16_from_float((count - 1.0f) / 2.0f)))
        << "row " << t;
    if (visible[t] == 0) {
      EXPECT_EQ(batch.lse_at(t, 1), -kInf);
      EXPECT_EQ(batch.out_row(t), std::vector<uint8_t>(2 * 128 * 2, 0));
    } else {
      EXPECT_NEAR(batch.lse_at(t, 1), std::log(count), 1e-5f);
    }
  }
}

TEST_P(MhaVarlenTest, KnownFault8DegenerateBatchesReturn) {
  Batch none({}, {}, 3, true);
  run(none);
  Batch all_empty(std::vector<int32_t>(32, 1), std::vector<int32_t>(32, 0), 1, true);
  run(all_empty);
  for (const float lse : all_empty.lse.values<float>()) EXPECT_EQ(lse, -kInf);
  Batch one_live({1, 1, 1, 1}, {0, 0, 300, 0}, 1, true);
  expect_reference(one_live);
  Batch no_rows({0, 0}, {4, 5}, 1, true);
  run(no_rows);
}

TEST_P(MhaVarlenTest, KnownFault8OffsetsAreCutToTheTensorsAndNeverFall) {
  const auto mean_of = [](int first, int last) {
    return static_cast<float>(first + last) / 2.0f;  // of values equal to the global key index
  };
  Batch batch = positions_batch({12}, {20}, false);
  batch.problem.max_requests = 5;
  // Requests: rows [0,4), empty, [4,9), [9,9), [9,12) and keys [2,10), [10,10), [10,15), [15,15),
  // [15,20).
  batch.q_indptr = Tensor::i32({6}, {-3, 4, 2, 9, -7, 0x7FFFFFFF});
  batch.kv_indptr = Tensor::i32({6}, {2, 10, 8, 15, -100, 21});
  run(batch);
  for (int64_t t = 0; t < 12; ++t) {
    const float expected = t < 4 ? mean_of(2, 9) : t < 9 ? mean_of(10, 14) : mean_of(15, 19);
    EXPECT_EQ(batch.out_at(t, 0, 0), expected) << "row " << t;
  }
}

TEST_P(MhaVarlenTest, RowsOfNoRequestAreNotWritten) {
  Batch batch({10}, {10}, 2, true);
  batch.q_indptr = Tensor::i32({2}, {3, 8});
  run(batch);
  for (int64_t t = 0; t < 10; ++t) {
    if (t >= 3 && t < 8) continue;
    EXPECT_EQ(batch.out_row(t), std::vector<uint8_t>(2 * 128 * 2, 0x55));
    EXPECT_EQ(batch.lse_row(t), std::vector<uint8_t>(2 * 4, 0x55));
  }
}

TEST_P(MhaVarlenTest, KeysThatARowDoesNotSeeMayHoldNan) {
  // NaN in q of rows of no request, in keys of no request, and in the keys after each row's last
  // one; large finite numbers instead of the NaN change nothing.
  for (const int32_t length : {1, 37, 70}) {
    Batch clean({length, 5}, {length, 40}, 2, true);
    clean.problem.max_requests = 1;
    clean.q_indptr = Tensor::i32({2}, {0, length});
    clean.kv_indptr = Tensor::i32({2}, {0, length});
    run(clean);
    for (const bf16_t poison : {kBf16Nan, bf16_t{0x7F7F}, bf16_t{0x7F80}}) {
      for (const int32_t first_poisoned : {length, length - 1, length / 2, length / 3}) {
        Batch batch = clean;
        std::fill_n(batch.q.data<bf16_t>() + length * 2 * 192, 5 * 2 * 192, poison);
        std::fill(batch.k.data<bf16_t>() + first_poisoned * 2 * 192,
                  batch.k.data<bf16_t>() + (length + 40) * 2 * 192, poison);
        std::fill(batch.v.data<bf16_t>() + first_poisoned * 2 * 128,
                  batch.v.data<bf16_t>() + (length + 40) * 2 * 128, poison);
        batch.out.fill_bytes(0x55);
        run(batch);
        for (int64_t t = 0; t < first_poisoned; ++t) {
          ASSERT_EQ(batch.out_row(t), clean.out_row(t))
              << "row " << t << " of " << length << ", poison from " << first_poisoned;
          ASSERT_EQ(batch.lse_row(t), clean.lse_row(t));
        }
      }
    }
  }
}

TEST_P(MhaVarlenTest, NanReachesOnlyTheRowsAndHeadsThatUseIt) {
  Batch clean({40}, {40}, 3, true), batch({40}, {40}, 3, true);
  run(clean);
  batch.q.data<bf16_t>()[(11 * 3 + 1) * 192 + 191] = kBf16Nan;
  batch.k.data<bf16_t>()[(20 * 3 + 2) * 192] = kBf16Nan;
  batch.v.data<bf16_t>()[(30 * 3 + 0) * 128 + 5] = kBf16Nan;
  run(batch);
  for (int64_t t = 0; t < 40; ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      const bool all_nan = (h == 1 && t == 11) || (h == 2 && t >= 20);
      EXPECT_EQ(std::isnan(batch.lse_at(t, h)), all_nan) << t << " " << h;
      for (int64_t d = 0; d < 128; ++d) {
        const bool nan = all_nan || (h == 0 && t >= 30 && d == 5);
        EXPECT_EQ(std::isnan(batch.out_at(t, h, d)), nan) << t << " " << h << " " << d;
        if (!nan) {
          EXPECT_EQ(batch.out_at(t, h, d), clean.out_at(t, h, d));
        }
      }
    }
  }
}

TEST_P(MhaVarlenTest, AnInfiniteValueGivesInfinityNotNan) {
  Batch batch({40}, {100}, 2, true, 15);
  batch.v.data<bf16_t>()[(10 * 2 + 1) * 128 + 7] = bf16_from_float(kInf);
  batch.v.data<bf16_t>()[(71 * 2 + 0) * 128 + 3] = bf16_from_float(-kInf);
  expect_reference(batch);
}

TEST_P(MhaVarlenTest, AgreesWithTheReference) {
  for (const bool causal : {true, false}) {
    Batch one({1}, {1}, 1, causal);
    expect_reference(one);
    Batch odd({17, 0, 1, 70}, {60, 3, 129, 70}, 3, causal, 2);
    expect_reference(odd);
    Batch dims({19, 20}, {33, 18}, 2, causal, 3, 77, 45);
    expect_reference(dims);
    Batch tiny_dims({9}, {9}, 2, causal, 4, 1, 1);
    expect_reference(tiny_dims);
  }
}

TEST_P(FullMhaVarlenTest, AgreesWithTheReferenceOnModelShapes) {
  Batch batch({300, 1, 513}, {700, 900, 513}, 2, true, 5);
  expect_reference(batch);
  Batch wide({64}, {2048}, 8, true, 6);
  expect_reference(wide);
}

TEST_P(MhaVarlenTest, HugeAndTinyScores) {
  for (const float scale : {1e-6f, 1.0f, 30.0f, 1e4f}) {
    Batch batch({20}, {50}, 1, true, 7);
    batch.problem.softmax_scale = scale;
    expect_reference(batch);
  }
}

// Every head of a batch whose middle head has nothing but NaN in q equals its own run.
void check_heads(MhaVarlenTest& test, int64_t heads, int32_t rows = 13, int32_t keys = 35,
                 int64_t step = 1) {
  Batch batch({rows}, {keys}, heads, true, 8);
  bf16_t* q = batch.q.data<bf16_t>();
  for (int64_t t = 0; t < rows; ++t) std::fill_n(q + (t * heads + heads / 2) * 192, 192, kBf16Nan);
  test.run(batch);
  for (int64_t h = 0; h < heads; h += step) {
    Batch alone({rows}, {keys}, 1, true, 8);
    const auto take_head = [&](const Tensor& from, Tensor& to, int64_t count, int64_t dim) {
      for (int64_t t = 0; t < count; ++t)
        std::copy_n(from.data<bf16_t>() + (t * heads + h) * dim, dim, to.data<bf16_t>() + t * dim);
    };
    take_head(batch.q, alone.q, rows, 192);
    take_head(batch.k, alone.k, keys, 192);
    take_head(batch.v, alone.v, keys, 128);
    test.run(alone);
    Tensor column(DType::kBf16, {rows, 1, 128});
    take_head(batch.out, column, rows, 128);
    EXPECT_EQ(column.bytes(), alone.out.bytes()) << "head " << h << " of " << heads;
  }
}

TEST_P(MhaVarlenTest, KnownFault7EveryHeadEqualsItsOwnRun) {
  for (const int64_t heads : {1, 8, 20}) check_heads(*this, heads);
}

TEST_P(FullMhaVarlenTest, KnownFault7EveryHeadEqualsItsOwnRun) {
  for (const int64_t heads : {16, 32, 40, 64, 96, 128}) check_heads(*this, heads);
}

TEST_P(FullMhaVarlenTest, LargerBlocksOfManyHeadsGiveTheSameBits) {
  if (GetParam().kind != DeviceKind::kCuda) GTEST_SKIP() << "blocks do not grow with the batch";
  check_heads(*this, 160, 270, 301, 40);
}

// Any shape, small: against the reference.
void check_random_problem(const test::Target& target) {
  const auto requests = *rc::gen::inRange<size_t>(0, 4);
  std::vector<int32_t> rows, keys;
  for (size_t r = 0; r < requests; ++r) {
    rows.push_back(*rc::gen::inRange<int32_t>(0, 20));
    keys.push_back(*rc::gen::inRange<int32_t>(0, 140));
  }
  const auto heads = *rc::gen::inRange<int64_t>(1, 4);
  const auto dim_qk = *rc::gen::inRange<int64_t>(1, 70);
  const auto dim_v = *rc::gen::inRange<int64_t>(1, 70);
  const bool causal = *rc::gen::arbitrary<bool>();
  Batch batch(rows, keys, heads, causal, *rc::gen::arbitrary<uint64_t>(), dim_qk, dim_v);
  Batch expected = batch;
  expected.run({"ref"});
  batch.run(target.options(), *rc::gen::inRange(1, 4));
  const auto out = batch.out_close_to(expected, test::rounds_weights(target.implementation));
  const auto lse = test::ExpectClose(batch.lse.view(), expected.lse.view(), test::kLse);
  if (!out) RC_FAIL(out.message());
  if (!lse) RC_FAIL(lse.message());
}

TEST_P(MhaVarlenTest, RandomProblemsAgreeWithTheReference) {
  EXPECT_TRUE(test::holds("agrees with the reference", [] { check_random_problem(GetParam()); }));
}

TEST_P(MhaVarlenTest, BitsDependOnTheRowAndItsKeysAlone) {
  Batch batch({150, 9, 33}, {190, 9, 40}, 2, true, 9);
  run(batch);
  for (const int threads : {2, 3}) {
    Batch threaded({150, 9, 33}, {190, 9, 40}, 2, true, 9);
    run(threaded, threads);
    EXPECT_EQ(threaded.out.bytes(), batch.out.bytes());
    EXPECT_EQ(threaded.lse.bytes(), batch.lse.bytes());
  }
  // The last `count` rows of request 0 alone: right alignment gives them the same keys.
  for (const int32_t count : {1, 2, 5, 31, 127, 149}) {
    Batch part({150, 9, 33}, {190, 9, 40}, 2, true, 9);
    part.problem.max_requests = 1;
    part.q_indptr = Tensor::i32({2}, {150 - count, 150});
    part.kv_indptr = Tensor::i32({2}, {0, 190});
    run(part);
    for (int64_t t = 150 - count; t < 150; ++t) {
      EXPECT_EQ(part.out_row(t), batch.out_row(t)) << "row " << t << " of the last " << count;
      EXPECT_EQ(part.lse_row(t), batch.lse_row(t));
    }
  }
  // Request 1 alone, at another offset of the batch.
  Batch moved({3, 9}, {1, 9}, 2, true, 10);
  const auto copy_rows = [](const Tensor& from, int64_t from_row, Tensor& to, int64_t to_row,
                            int64_t rows, int64_t row_elements) {
    std::copy_n(from.data<bf16_t>() + from_row * row_elements, rows * row_elements,
                to.data<bf16_t>() + to_row * row_elements);
  };
  copy_rows(batch.q, 150, moved.q, 3, 9, 2 * 192);
  copy_rows(batch.k, 190, moved.k, 1, 9, 2 * 192);
  copy_rows(batch.v, 190, moved.v, 1, 9, 2 * 128);
  run(moved);
  for (int64_t t = 0; t < 9; ++t) EXPECT_EQ(moved.out_row(3 + t), batch.out_row(150 + t));
}

TEST_P(MhaVarlenTest, KnownFault14StridedViewsEqualPackedCopies) {
  // q, k and v are column slices of one buffer whose rows are aligned to two bytes only; out and
  // lse are slices too.
  Batch batch({30}, {30}, 2, true, 11);
  run(batch);
  const int64_t pitch = 2 * (192 + 192 + 128) + 7;
  Tensor buffer(DType::kBf16, {30, pitch}), out(DType::kBf16, {30, 3, 131}),
      lse(DType::kF32, {30, 5});
  buffer.fill_bytes(0xFF);
  out.fill_bytes(0x55);
  lse.fill_bytes(0x55);
  const auto slice = [&](const Tensor& from, int64_t first, int64_t dim) {
    for (int64_t t = 0; t < 30; ++t)
      std::copy_n(from.data<bf16_t>() + t * 2 * dim, 2 * dim,
                  buffer.data<bf16_t>() + t * pitch + first);
    ConstTensorView view = from.view();
    view.data = buffer.data<bf16_t>() + first;
    view.stride = {pitch, dim, 1};
    return view;
  };
  MhaVarlenTensors tensors = batch.tensors();
  tensors.q = slice(batch.q, 1, 192);
  tensors.k = slice(batch.k, 2 + 2 * 192, 192);
  tensors.v = slice(batch.v, 5 + 4 * 192, 128);
  tensors.out = out;
  tensors.out.data = out.data<bf16_t>() + 1;
  tensors.out.shape = {30, 2, 128};
  tensors.lse = lse;
  tensors.lse.shape[1] = 2;
  const MhaVarlen plan = MhaVarlen::plan(batch.problem, GetParam().device(1), GetParam().options());
  HostBuffer scratch(plan.workspace_bytes());
  plan.run(tensors, scratch.workspace());
  for (int64_t t = 0; t < 30; ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t d = 0; d < 131; ++d) {
        const bf16_t found = out.data<bf16_t>()[(t * 3 + h) * 131 + d];
        const bool inside = h < 2 && d >= 1 && d < 129;
        const bf16_t expected =
            inside ? batch.out.data<bf16_t>()[(t * 2 + h) * 128 + d - 1] : bf16_t{0x5555};
        ASSERT_EQ(found, expected) << t << " " << h << " " << d;
      }
    }
    EXPECT_EQ(lse.data<float>()[t * 5 + 1], batch.lse_at(t, 1));
  }
}

TEST_P(MhaVarlenTest, ReadsAndWritesNothingOutsideTheTensors) {
  Batch batch({21}, {43}, 1, true, 12, 37, 19);
  run(batch);
  const auto guard = [](const Tensor& tensor, test::GuardedMemory& memory) {
    std::copy(tensor.bytes().begin(), tensor.bytes().end(), static_cast<uint8_t*>(memory.data()));
  };
  test::GuardedMemory q(batch.q.bytes().size()), k(batch.k.bytes().size()),
      v(batch.v.bytes().size()), out(batch.out.bytes().size()), lse(batch.lse.bytes().size());
  guard(batch.q, q);
  guard(batch.k, k);
  guard(batch.v, v);
  MhaVarlenTensors tensors = batch.tensors();
  tensors.q.data = q.data();
  tensors.k.data = k.data();
  tensors.v.data = v.data();
  tensors.out.data = out.data();
  tensors.lse.data = lse.data();
  const MhaVarlen plan = MhaVarlen::plan(batch.problem, GetParam().device(1), GetParam().options());
  test::GuardedMemory scratch((plan.workspace_bytes() + 63) / 64 * 64);
  plan.run(tensors, {scratch.data(), plan.workspace_bytes()});
  EXPECT_TRUE(std::equal(batch.out.bytes().begin(), batch.out.bytes().end(),
                         static_cast<const uint8_t*>(out.data())));
}

TEST_P(MhaVarlenTest, KnownFault6AddressesBeyondFourGigabytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  // One head of k and v rows that stand 2^26 elements apart: key 40 starts at byte 5 * 2^30.
  const int64_t pitch = int64_t{1} << 26;
  Batch batch({41}, {41}, 1, true, 13);
  run(batch);
  test::SparseMapping k(static_cast<size_t>(2 * (40 * pitch + 192))),
      v(static_cast<size_t>(2 * (40 * pitch + 128)));
  for (int64_t j = 0; j < 41; ++j) {
    std::copy_n(batch.k.data<bf16_t>() + j * 192, 192, static_cast<bf16_t*>(k.data()) + j * pitch);
    std::copy_n(batch.v.data<bf16_t>() + j * 128, 128, static_cast<bf16_t*>(v.data()) + j * pitch);
  }
  const Batch expected = batch;
  batch.out.fill_bytes(0x55);
  MhaVarlenTensors tensors = batch.tensors();
  tensors.k.data = k.data();
  tensors.v.data = v.data();
  tensors.k.stride[0] = tensors.v.stride[0] = pitch;
  const MhaVarlen plan = MhaVarlen::plan(batch.problem, GetParam().device(1), GetParam().options());
  HostBuffer scratch(plan.workspace_bytes());
  plan.run(tensors, scratch.workspace());
  EXPECT_EQ(batch.out.bytes(), expected.out.bytes());
}

TEST_P(MhaVarlenTest, RunDoesNotAllocate) {
  Batch batch({20, 30}, {50, 30}, 2, true, 14);
  const MhaVarlen plan = MhaVarlen::plan(batch.problem, GetParam().device(1), GetParam().options());
  HostBuffer scratch(plan.workspace_bytes());
  plan.run(batch.tensors(), scratch.workspace());
  const test::AllocationCounter counter;
  plan.run(batch.tensors(), scratch.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(MhaVarlen, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  const MhaVarlenProblem good{
      .max_rows = 4, .max_keys = 6, .max_requests = 2, .num_heads = 2, .softmax_scale = 0.1f};
  const auto refuse_plan = [&](auto&& change) {
    MhaVarlenProblem problem = good;
    change(problem);
    EXPECT_THROW(MhaVarlen::plan(problem, cpu), Error);
  };
  refuse_plan([](MhaVarlenProblem& p) { p.max_rows = -1; });
  refuse_plan([](MhaVarlenProblem& p) { p.max_keys = int64_t{1} << 31; });
  refuse_plan([](MhaVarlenProblem& p) { p.max_requests = -1; });
  refuse_plan([](MhaVarlenProblem& p) { p.num_heads = 0; });
  refuse_plan([](MhaVarlenProblem& p) { p.head_dim_qk = 0; });
  refuse_plan([](MhaVarlenProblem& p) { p.head_dim_v = 1 << 17; });
  for (const float scale : {0.0f, -1.0f, kInf, std::nanf("")}) {
    refuse_plan([scale](MhaVarlenProblem& p) { p.softmax_scale = scale; });
  }

  const MhaVarlen plan = MhaVarlen::plan(good, cpu);
  HostBuffer scratch(plan.workspace_bytes());
  const auto refuse_run = [&](auto&& change) {
    Batch batch({1, 3}, {2, 4}, 2, true);
    MhaVarlenTensors tensors = batch.tensors();
    change(tensors);
    EXPECT_THROW(plan.run(tensors, scratch.workspace()), Error);
    EXPECT_EQ(batch.out.bytes(), std::vector<uint8_t>(batch.out.bytes().size(), 0x55));
  };
  refuse_run([](MhaVarlenTensors& t) { t.q = {}; });
  refuse_run([](MhaVarlenTensors& t) { t.q.shape[2] = 191; });
  refuse_run([](MhaVarlenTensors& t) { t.k.shape[0] = 7; });
  refuse_run([](MhaVarlenTensors& t) { t.k.stride[2] = 2; });
  refuse_run([](MhaVarlenTensors& t) { t.v.shape[0] = 5; });
  refuse_run([](MhaVarlenTensors& t) { t.v.dtype = DType::kF32; });
  refuse_run([](MhaVarlenTensors& t) { t.q_indptr.shape[0] = 0; });
  refuse_run([](MhaVarlenTensors& t) { t.q_indptr.shape[0] = 2; });  // kv_indptr has 3
  refuse_run([](MhaVarlenTensors& t) { t.q_indptr.shape[0] = t.kv_indptr.shape[0] = 4; });
  refuse_run([](MhaVarlenTensors& t) { t.out.shape[0] = 3; });
  refuse_run([](MhaVarlenTensors& t) { t.lse.shape[1] = 1; });
}

}  // namespace
}  // namespace fovea
