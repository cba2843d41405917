// The known faults of sparse attention operators, by name, and what sparse_mla refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "fovea/sparse_mla.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/sanitizers.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::CaseSpec;
using test::Outputs;
using test::SameBits;
using test::SparseMlaCase;
using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<bf16_t> out;
  std::vector<float> lse;
};

class SparseMlaFaultTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }

  // q [T, H, 576], indices [T, K] over a cache; optional lengths.
  Result attend(const Tensor& q, const ConstTensorView& kv, const Tensor& indices,
                RowFormat format = RowFormat::kBf16, int64_t page_size = 0,
                const ConstTensorView& topk_length = {}, int threads = 1) const {
    const int64_t rows = q.view().shape[0];
    const int64_t heads = q.view().shape[1];
    SparseMlaProblem problem;
    problem.max_rows = rows;
    problem.num_heads = heads;
    problem.topk = indices.view().shape[1];
    problem.softmax_scale = 0.05f;
    problem.row_format = format;
    problem.page_size = page_size;
    Tensor out(DType::kBf16, {rows, heads, 512}), lse(DType::kF32, {rows, heads});
    out.fill_bytes(0xFF);
    lse.fill_bytes(0xFF);
    SparseMlaTensors tensors;
    tensors.q = q;
    tensors.kv = kv;
    tensors.indices = indices;
    tensors.topk_length = topk_length;
    tensors.out = out;
    tensors.lse = lse;
    const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), threads), options());
    HostBuffer scratch(plan.workspace_bytes());
    plan.run(tensors, scratch.workspace());
    return {out.values<bf16_t>(), lse.values<float>()};
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SparseMlaFaultTest,
                         testing::ValuesIn(test::targets_of("sparse_mla", {"cuda_sm90_rows",
                                                                           "cuda_sm90_window"})),
                         test::target_name);

Tensor random_queries(int64_t rows, int64_t heads, uint64_t seed = 7) {
  test::Rng rng(seed);
  return Tensor::bf16({rows, heads, 576}, rng.bf16_normals(rows * heads * 576));
}

// A v32 row of random finite codes.
void write_v32_row(uint8_t* row, test::Rng& rng) {
  for (int d = 0; d < 512; ++d)
    row[d] = static_cast<uint8_t>(rng.integer(0, 0x70) | rng.integer(0, 1) << 7);
  for (int tile = 0; tile < 4; ++tile) {
    const float scale = 0.01f * (1 + static_cast<float>(rng.uniform()));
    std::memcpy(row + 512 + tile * 4, &scale, 4);
  }
  const std::vector<bf16_t> rope = rng.bf16_normals(64);
  std::memcpy(row + 528, rope.data(), 128);
}

void write_row(RowFormat format, uint8_t* row, test::Rng& rng) {
  if (format == RowFormat::kV32) {
    write_v32_row(row, rng);
  } else if (format == RowFormat::kF576) {
    for (int d = 0; d < 576; ++d)
      row[d] = static_cast<uint8_t>(rng.integer(0, 0x48) | rng.integer(0, 1) << 7);
  } else {
    const std::vector<bf16_t> values = rng.bf16_normals(576);
    std::memcpy(row, values.data(), 1152);
  }
}

int64_t row_bytes(RowFormat format) {
  return format == RowFormat::kV32 ? 656 : format == RowFormat::kF576 ? 576 : 1152;
}

TEST_P(SparseMlaFaultTest, KnownFault3InvalidEntriesInAnIndexList) {
  // 100 keys between NaN rows.
  test::Rng rng(3);
  Tensor memory(DType::kBf16, {102, 576});
  memory.fill_bytes(0xFF);
  for (int64_t key = 1; key <= 100; ++key)
    write_row(RowFormat::kBf16, reinterpret_cast<uint8_t*>(memory.data<bf16_t>() + key * 576), rng);
  const std::vector<uint8_t> before = memory.bytes();
  const ConstTensorView kv = slice_rows(memory.view(), 1, 101);
  std::vector<int32_t> list(128, -1);
  const int32_t head[] = {5, -1, 99, 100, -1, 2147480000, 0, -1};
  std::copy(std::begin(head), std::end(head), list.begin());
  const Tensor q = random_queries(1, 5);
  const Result mixed = attend(q, kv, Tensor::i32({1, 128}, list));
  const Result three = attend(q, kv, Tensor::i32({1, 3}, {5, 99, 0}));
  EXPECT_EQ(mixed.out, three.out);
  EXPECT_EQ(mixed.lse, three.lse);
  for (const float lse : mixed.lse) EXPECT_TRUE(std::isfinite(lse));
  const Result none = attend(q, kv, Tensor::i32({1, 5}, {-1, 100, INT_MIN, INT_MAX, 2147480000}));
  for (const bf16_t value : none.out) EXPECT_EQ(value.bits, 0);
  for (const float lse : none.lse) EXPECT_EQ(lse, -kInf);
  EXPECT_EQ(memory.bytes(), before);
}

TEST_P(SparseMlaFaultTest, KnownFault4EmptyRowsAndEmptySplits) {
  // 8-way split; rows 0 and 4 of 8 are empty, the lists of the others leave some parts empty.
  CaseSpec spec;
  spec.rows = 8;
  spec.heads = 4;
  spec.primary = {RowFormat::kBf16, 0, 300, 640, false};
  spec.fixed_splits = 8;
  SparseMlaCase test_case(spec);
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t slot = 0; slot < 640; ++slot) {
      if (t % 4 == 0 || (slot / 80) % 8 == t) test_case.index(0, t, slot) = -1;
    }
  }
  for (const int threads : {1, 2}) {
    const Outputs outputs = test_case.run(options(), threads);
    EXPECT_TRUE(test_case.matches(outputs));
    for (size_t t : {0, 4}) {
      for (size_t h = 0; h < 4; ++h) {
        EXPECT_EQ(outputs.lse[t * 4 + h], -kInf);
        EXPECT_EQ(outputs.out[(t * 4 + h) * 512 + 5], 0.0);
      }
    }
  }
}

TEST_P(SparseMlaFaultTest, KnownFault5UnwrittenTailOfTheLastPage) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    for (const auto& [page_size, num_keys] :
         {std::pair<int64_t, int64_t>{4, 13}, {64, 1}, {64, 13}, {64, 63}, {64, 64}, {64, 65}}) {
      const int64_t pages = (num_keys + page_size - 1) / page_size;
      std::vector<Result> results;
      for (const uint8_t tail : {uint8_t{0}, uint8_t{0xFF}, uint8_t{0x7F}}) {
        test::Rng rng(5);
        Tensor pool(DType::kU8, {pages, page_size * row_bytes(format) + 7});
        pool.fill_bytes(tail);
        std::vector<int32_t> list(70, -1);
        for (int64_t key = 0; key < num_keys; ++key) {
          write_row(format,
                    pool.data<uint8_t>() + key / page_size * pool.view().stride[0] +
                        key % page_size * row_bytes(format),
                    rng);
          list[static_cast<size_t>(key)] = static_cast<int32_t>(key);
        }
        results.push_back(attend(random_queries(1, 3), pool.view(), Tensor::i32({1, 70}, list),
                                 format, page_size));
      }
      for (const Result& result : results) {
        EXPECT_EQ(result.out, results[0].out);
        EXPECT_EQ(result.lse, results[0].lse);
      }
    }
  }
}

TEST_P(SparseMlaFaultTest, KnownFault6PoolsBeyondTwoToThe32Bytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  for (const auto& [format, page] : {std::pair<RowFormat, int64_t>{RowFormat::kBf16, 58255},
                                     {RowFormat::kBf16, 116509},
                                     {RowFormat::kF576, 58255},
                                     {RowFormat::kF576, 116509},
                                     {RowFormat::kV32, 51151},
                                     {RowFormat::kV32, 102301}}) {
    const int64_t page_bytes = 64 * row_bytes(format);
    test::SparseMapping memory(static_cast<size_t>((page + 1) * page_bytes));
    auto* bytes = static_cast<uint8_t*>(memory.data());
    Tensor small(DType::kU8, {1, page_bytes});
    test::Rng rng(6), again(6);
    for (int64_t row = 0; row < 64; ++row) {
      write_row(format, bytes + page * page_bytes + row * row_bytes(format), rng);
      write_row(format, small.data<uint8_t>() + row * row_bytes(format), again);
    }
    std::vector<int32_t> low(64), high(64);
    for (int32_t i = 0; i < 64; ++i) {
      low[static_cast<size_t>(i)] = 63 - i;
      high[static_cast<size_t>(i)] = static_cast<int32_t>(page * 64) + 63 - i;
    }
    const Tensor q = random_queries(1, 3);
    const ConstTensorView pool =
        make_tensor(static_cast<const void*>(bytes), DType::kU8, {page + 1, page_bytes});
    const Result far = attend(q, pool, Tensor::i32({1, 64}, high), format, 64);
    const Result near = attend(q, small.view(), Tensor::i32({1, 64}, low), format, 64);
    EXPECT_EQ(far.out, near.out) << "page " << page;
    EXPECT_EQ(far.lse, near.lse);
  }
}

TEST_P(SparseMlaFaultTest, KnownFault6RowsFarApart) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  // bf16 [S, 576] with rows 2^20 elements apart: row 2049 starts past 2^32 bytes.
  constexpr int64_t kStride = int64_t{1} << 20;
  test::SparseMapping memory(static_cast<size_t>(2050 * kStride * 2));
  auto* rows = static_cast<bf16_t*>(memory.data());
  ConstTensorView kv = make_tensor(static_cast<const void*>(rows), DType::kBf16, {2050, 576});
  kv.stride[0] = kStride;
  Tensor packed(DType::kBf16, {3, 576});
  test::Rng rng(61), again(61);
  for (int64_t i = 0; i < 3; ++i) {
    write_row(RowFormat::kBf16, reinterpret_cast<uint8_t*>(rows + (2047 + i) * kStride), rng);
    write_row(RowFormat::kBf16, reinterpret_cast<uint8_t*>(packed.data<bf16_t>() + i * 576), again);
  }
  const Tensor q = random_queries(1, 3);
  const Result far = attend(q, kv, Tensor::i32({1, 3}, {2048, 2049, 2047}));
  const Result near = attend(q, packed.view(), Tensor::i32({1, 3}, {1, 2, 0}));
  EXPECT_EQ(far.out, near.out);
  EXPECT_EQ(far.lse, near.lse);
}

TEST_P(SparseMlaFaultTest, KnownFault7EveryHeadEqualsItsOwnRun) {
  for (const RowFormat format : {RowFormat::kV32, RowFormat::kBf16, RowFormat::kF576}) {
    for (const int64_t heads : {1, 8, 16, 20, 32, 40, 64, 96, 128}) {
      SCOPED_TRACE(std::string(to_string(format)) + ", heads " + std::to_string(heads));
      CaseSpec spec;
      spec.rows = 1;
      spec.heads = heads;
      spec.primary = {format, format == RowFormat::kBf16 ? 0 : 8, 40, 30, false};
      spec.sink = true;  // ends at a guard page, so reading a padding head's sink is fatal
      if (format == RowFormat::kF576) {
        spec.q_code_scale = 0.25f;
        spec.k_scale = 0.7f;
      }
      SparseMlaCase test_case(spec);
      for (int64_t d = 0; d < 576; ++d) test_case.set_q(0, heads / 2, d, std::nanf(""));
      const Outputs all = test_case.run(options());
      for (const int64_t head : {int64_t{0}, heads / 2, heads - 1}) {
        const Outputs alone = test_case.run_head(options(), head);
        const auto begin = static_cast<std::ptrdiff_t>(head * 512);
        EXPECT_TRUE(
            std::equal(alone.out_bits.begin(), alone.out_bits.end(), all.out_bits.begin() + begin))
            << "head " << head;
        EXPECT_EQ(alone.lse_bits[0], all.lse_bits[static_cast<size_t>(head)]);
      }
      for (size_t h = 0; h < static_cast<size_t>(heads); ++h)
        EXPECT_EQ(std::isnan(all.lse[h]), h == static_cast<size_t>(heads / 2));
    }
  }
}

// The head counts that tensor parallelism leaves of 128 query heads, on every cache of the model:
// every single head, over lists of several parts and for one thread and for more.
TEST_P(SparseMlaFaultTest, LocalHeadsOfTensorParallelEqualTheirSingleHeadRuns) {
  for (const RowFormat format : {RowFormat::kV32, RowFormat::kBf16, RowFormat::kF576}) {
    for (const int64_t heads : {8, 16, 32, 96, 128}) {
      if (test::kSanitized && heads > 16 && heads < 128) continue;
      SCOPED_TRACE(std::string(to_string(format)) + ", heads " + std::to_string(heads));
      CaseSpec spec;
      spec.rows = 2;
      spec.heads = heads;
      spec.primary = {format, format == RowFormat::kBf16 ? 0 : 8, 40, 330, false};
      spec.seed = static_cast<uint64_t>(heads);
      if (format == RowFormat::kF576) spec.k_scale = 2.0f;
      SparseMlaCase test_case(spec);
      const Outputs all = test_case.run(options());
      EXPECT_TRUE(SameBits(all, test_case.run(options(), 2)));
      const bool slow = GetParam().implementation == "ref" || GetParam().isa == CpuIsa::kBaseline;
      const int64_t step = slow || test::kSanitized ? test::by_build(7, 21) : 1;
      for (int64_t head = 0; head < heads; head += step) {
        const Outputs alone = test_case.run_head(options(), head);
        for (int64_t t = 0; t < 2; ++t) {
          const auto from = static_cast<std::ptrdiff_t>(t * 512);
          const auto to = static_cast<std::ptrdiff_t>((t * heads + head) * 512);
          ASSERT_TRUE(std::equal(alone.out_bits.begin() + from, alone.out_bits.begin() + from + 512,
                                 all.out_bits.begin() + to))
              << "row " << t << ", head " << head;
          ASSERT_EQ(alone.lse_bits[static_cast<size_t>(t)],
                    all.lse_bits[static_cast<size_t>(t * heads + head)]);
          ASSERT_EQ(alone.max_logits_bits[static_cast<size_t>(t)],
                    all.max_logits_bits[static_cast<size_t>(t * heads + head)]);
        }
      }
    }
  }
}

TEST_P(SparseMlaFaultTest, KnownFault8DegenerateLengths) {
  test::Rng rng(8);
  const Tensor kv = Tensor::bf16({600, 576}, rng.bf16_normals(600 * 576));
  std::vector<int32_t> list;
  for (int32_t i = 0; i < 7 * 500; ++i) list.push_back(static_cast<int32_t>(rng.integer(0, 599)));
  const Tensor indices = Tensor::i32({7, 500}, list);
  const Tensor lengths = Tensor::i32({7}, {-4, -3, -2, -1, 0, 1, 500});
  const Tensor q = random_queries(7, 2);
  const Result all = attend(q, kv.view(), indices, RowFormat::kBf16, 0, lengths.view());
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(all.lse[i], -kInf);
    for (size_t d = 0; d < 512; ++d) ASSERT_EQ(all.out[i * 512 + d].bits, 0);
  }
  // One key: its value, and its logit as the lse.
  for (size_t h = 0; h < 2; ++h) {
    for (size_t d = 0; d < 512; ++d) {
      ASSERT_EQ(all.out[(10 + h) * 512 + d],
                kv.data<bf16_t>()[list[5 * 500] * 576 + static_cast<int64_t>(d)]);
    }
  }
  for (size_t h = 12; h < 14; ++h) EXPECT_TRUE(std::isfinite(all.lse[h]));
}

TEST_P(SparseMlaFaultTest, KnownFault8ManyEmptyRowsAndNoRows) {
  test::Rng rng(9);
  const Tensor kv = Tensor::bf16({4, 576}, rng.bf16_normals(4 * 576));
  const Tensor lengths = Tensor::i32({32}, std::vector<int32_t>(32, 0));
  const Result none = attend(random_queries(32, 3), kv.view(),
                             Tensor::i32({32, 9}, std::vector<int32_t>(32 * 9, 1)),
                             RowFormat::kBf16, 0, lengths.view(), 3);
  for (const float lse : none.lse) EXPECT_EQ(lse, -kInf);
  const Result nothing = attend(random_queries(0, 3), kv.view(), Tensor(DType::kI32, {0, 9}));
  EXPECT_TRUE(nothing.out.empty());
  // An empty cache: no index is inside it.
  const Result no_keys = attend(random_queries(1, 3), Tensor(DType::kBf16, {0, 576}).view(),
                                Tensor::i32({1, 2}, {0, 1}));
  for (const float lse : no_keys.lse) EXPECT_EQ(lse, -kInf);
}

TEST_P(SparseMlaFaultTest, KnownFault14StridedInputsEqualPackedCopies) {
  // Lists stored [slot group][row][k] and viewed per row, q and kv as columns of wider buffers.
  test::Rng rng(14);
  const std::vector<bf16_t> wide_q = rng.bf16_normals(3 * 2 * 700);
  const std::vector<bf16_t> wide_kv = rng.bf16_normals(50 * 601);
  std::vector<int32_t> wide_lists;
  for (int i = 0; i < 3 * 4 * 21; ++i)
    wide_lists.push_back(static_cast<int32_t>(rng.integer(-1, 50)));
  Tensor q(DType::kBf16, {3, 2, 576}), kv(DType::kBf16, {50, 576}), lists(DType::kI32, {3, 20});
  for (int64_t i = 0; i < 6; ++i)
    std::copy_n(wide_q.data() + i * 700 + 33, 576, q.data<bf16_t>() + i * 576);
  for (int64_t i = 0; i < 50; ++i)
    std::copy_n(wide_kv.data() + i * 601 + 1, 576, kv.data<bf16_t>() + i * 576);
  for (int64_t i = 0; i < 3; ++i)
    std::copy_n(wide_lists.data() + i * 4 * 21 + 21, 20, lists.data<int32_t>() + i * 20);
  const Result packed = attend(q, kv.view(), lists);

  SparseMlaProblem problem;
  problem.max_rows = 3;
  problem.num_heads = 2;
  problem.topk = 20;
  problem.softmax_scale = 0.05f;
  const SparseMla plan = SparseMla::plan(problem, test::device_of(options(), 1), options());
  HostBuffer scratch(plan.workspace_bytes());
  Tensor out(DType::kBf16, {3, 2, 512}), lse(DType::kF32, {3, 2});
  SparseMlaTensors tensors;
  tensors.q = make_tensor(static_cast<const void*>(wide_q.data() + 33), DType::kBf16, {3, 2, 576});
  tensors.q.stride = {1400, 700, 1};
  tensors.kv = make_tensor(static_cast<const void*>(wide_kv.data() + 1), DType::kBf16, {50, 576});
  tensors.kv.stride = {601, 1};
  tensors.indices =
      make_tensor(static_cast<const void*>(wide_lists.data() + 21), DType::kI32, {3, 20});
  tensors.indices.stride = {84, 1};
  tensors.out = out;
  tensors.lse = lse;
  plan.run(tensors, scratch.workspace());
  EXPECT_EQ(out.values<bf16_t>(), packed.out);
  EXPECT_EQ(lse.values<float>(), packed.lse);

  // Lengths two elements apart are refused before anything is written.
  const Tensor lengths = Tensor::i32({6}, {1, 9, 1, 9, 1, 9});
  tensors.topk_length =
      make_tensor(static_cast<const void*>(lengths.data<int32_t>()), DType::kI32, {3});
  tensors.topk_length.stride = {2};
  out.fill_bytes(0x55);
  EXPECT_THROW(plan.run(tensors, scratch.workspace()), Error);
  EXPECT_EQ(out.bytes(), std::vector<uint8_t>(out.bytes().size(), 0x55));
}

// Runs `action` and returns the message of the Error it must throw.
template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

SparseMlaProblem small_problem() {
  SparseMlaProblem problem;
  problem.max_rows = 2;
  problem.num_heads = 3;
  problem.topk = 4;
  problem.softmax_scale = 1;
  return problem;
}

TEST(SparseMla, PlanRefusesBadProblemsAndSaysWhy) {
  const Device cpu = Device::cpu(1);
  const auto refusal = [&](auto change) {
    SparseMlaProblem problem = small_problem();
    change(problem);
    return message_of([&] { SparseMla::plan(problem, cpu); });
  };
  using P = SparseMlaProblem;
  using testing::HasSubstr;
  EXPECT_THAT(refusal([](P& p) { p.num_heads = 0; }), HasSubstr("sparse_mla: num_heads = 0"));
  EXPECT_THAT(refusal([](P& p) { p.max_rows = -1; }), HasSubstr("max_rows = -1"));
  EXPECT_THAT(refusal([](P& p) { p.topk = -1; }), HasSubstr("topk = -1"));
  EXPECT_THAT(refusal([](P& p) { p.extra_topk = int64_t{1} << 40; }), HasSubstr("extra_topk"));
  EXPECT_THAT(refusal([](P& p) { p.fixed_splits = -2; }), HasSubstr("fixed_splits = -2"));
  for (const float scale : {0.0f, -1.0f, kInf, std::nanf("")})
    EXPECT_THAT(refusal([&](P& p) { p.softmax_scale = scale; }), HasSubstr("softmax_scale"));
  for (const float cap : {-1.0f, kInf, std::nanf("")})
    EXPECT_THAT(refusal([&](P& p) { p.logit_cap = cap; }), HasSubstr("logit_cap"));
  EXPECT_THAT(refusal([](P& p) { p.head_dim_qk = 128; }), HasSubstr("expected 576 or 512"));
  EXPECT_THAT(refusal([](P& p) { p.page_size = -64; }), HasSubstr("page_size = -64"));
  EXPECT_THAT(refusal([](P& p) { p.row_format = RowFormat::kV32; }),
              HasSubstr("page_size = 0, but row_format v32 needs a packed pool"));
  EXPECT_THAT(refusal([](P& p) { p.row_format = RowFormat::kI132; }),
              HasSubstr("row_format = i132, expected bf16, v32, v4, r512 or f576"));
  EXPECT_THAT(refusal([](P& p) { p.row_format = RowFormat::kF576; }),
              HasSubstr("page_size = 0, but row_format f576 needs a packed pool"));
  const auto f576 = [](P& p) {
    p.row_format = RowFormat::kF576;
    p.page_size = 64;
  };
  EXPECT_THAT(refusal([&](P& p) {
                f576(p);
                p.head_dim_qk = 512;
              }),
              HasSubstr("row_format f576 needs 576"));
  for (const float scale : {0.0f, -1.0f, kInf, std::nanf("")}) {
    EXPECT_THAT(refusal([&](P& p) {
                  f576(p);
                  p.q_scale = scale;
                }),
                HasSubstr("q_scale"));
    EXPECT_THAT(refusal([&](P& p) {
                  f576(p);
                  p.k_scale = scale;
                }),
                HasSubstr("k_scale"));
  }
  EXPECT_THAT(refusal([](P& p) { p.q_scale = 2; }), HasSubstr("q_scale = 2"));
  EXPECT_THAT(refusal([](P& p) { p.k_scale = 2; }), HasSubstr("k_scale = 2"));
  EXPECT_THAT(refusal([&](P& p) {
                f576(p);
                p.k_scale = 2;
                p.extra_row_format = RowFormat::kV32;
              }),
              HasSubstr("k_scale = 2.000000, but rows of v32"));
  EXPECT_THAT(refusal([&](P& p) {
                f576(p);
                p.softmax_scale = p.q_scale = p.k_scale = 1e-20f;
              }),
              HasSubstr("leaves the range of fp32"));
  EXPECT_THAT(refusal([](P& p) {
                p.row_format = RowFormat::kV32;
                p.page_size = 64;
                p.head_dim_qk = 512;
              }),
              HasSubstr("row_format v32 needs 576"));
  EXPECT_THAT(refusal([](P& p) { p.extra_row_format = RowFormat::kV32; }),
              HasSubstr("extra_page_size = 0, but extra_row_format v32"));
}

TEST(SparseMla, RunRefusesTensorsThatDoNotFitThePlan) {
  const SparseMla plan = SparseMla::plan(small_problem(), Device::cpu(1));
  HostBuffer scratch(plan.workspace_bytes());
  Tensor q(DType::kBf16, {2, 3, 576}), kv(DType::kBf16, {9, 576}), indices(DType::kI32, {2, 4});
  Tensor out(DType::kBf16, {2, 3, 512}), lse(DType::kF32, {2, 3});
  out.fill_bytes(0x55);
  SparseMlaTensors good;
  good.q = q;
  good.kv = kv;
  good.indices = indices;
  good.out = out;
  good.lse = lse;
  const auto refusal = [&](auto change) {
    SparseMlaTensors tensors = good;
    change(tensors);
    const std::string text = message_of([&] { plan.run(tensors, scratch.workspace()); });
    EXPECT_EQ(out.bytes(), std::vector<uint8_t>(out.bytes().size(), 0x55));
    return text;
  };
  using T = SparseMlaTensors;
  using testing::HasSubstr;
  Tensor wide(DType::kI32, {2, 5}), three(DType::kF32, {4}), more(DType::kBf16, {3, 3, 576});
  Tensor bytes(DType::kU8, {9, 1152}), ints(DType::kI32, {2}), extra_list(DType::kI32, {2, 0});
  EXPECT_THAT(refusal([&](T& t) { t.q = {}; }), HasSubstr("sparse_mla: q is missing"));
  EXPECT_THAT(refusal([&](T& t) { t.q = more; }), HasSubstr("q.shape[0] = 3"));
  EXPECT_THAT(refusal([&](T& t) { t.kv = bytes; }), HasSubstr("kv = u8 [9, 1152], expected bf16"));
  EXPECT_THAT(refusal([&](T& t) { t.indices = wide; }), HasSubstr("indices = i32 [2, 5]"));
  EXPECT_THAT(refusal([&](T& t) { t.sink = three; }), HasSubstr("sink = f32 [4]"));
  EXPECT_THAT(refusal([&](T& t) { t.lse = {}; }), HasSubstr("lse is missing"));
  EXPECT_THAT(refusal([&](T& t) { t.max_logits = out; }), HasSubstr("max_logits"));
  EXPECT_THAT(refusal([&](T& t) { t.extra_topk_length = ints; }), HasSubstr("extra_topk_length"));
  EXPECT_THAT(refusal([&](T& t) { t.extra_indices = extra_list; }),
              HasSubstr("extra_kv is missing"));
  EXPECT_THAT(refusal([&](T& t) { t.extra_kv = kv; }), HasSubstr("extra_indices is missing"));
  EXPECT_THAT(message_of([&] {
                plan.run(good, Workspace{scratch.data(), 8});
              }),
              HasSubstr("workspace"));
}

TEST(SparseMla, QueriesOfCodesNeedF576AndTheirScaleNeedsCodes) {
  SparseMlaProblem problem = small_problem();
  problem.page_size = 4;
  Tensor codes(DType::kU8, {2, 3, 576}), q(DType::kBf16, {2, 3, 576}), kv(DType::kU8, {9, 4 * 656});
  Tensor indices(DType::kI32, {2, 4}), out(DType::kBf16, {2, 3, 512}), lse(DType::kF32, {2, 3});
  const auto refusal = [&](const Tensor& query) {
    const SparseMla plan = SparseMla::plan(problem, Device::cpu(1));
    HostBuffer scratch(plan.workspace_bytes());
    SparseMlaTensors tensors;
    tensors.q = query;
    tensors.kv = kv;
    tensors.indices = indices;
    tensors.out = out;
    tensors.lse = lse;
    return message_of([&] { plan.run(tensors, scratch.workspace()); });
  };
  problem.row_format = RowFormat::kV32;
  EXPECT_THAT(refusal(codes), testing::HasSubstr("q = u8 [2, 3, 576], expected bf16"));
  problem.row_format = RowFormat::kF576;
  problem.q_scale = 2;
  EXPECT_THAT(refusal(q), testing::HasSubstr("q = bf16 with q_scale = 2"));
}

TEST(SparseMla, RefusesPoolPagesThatAreTooShort) {
  SparseMlaProblem problem = small_problem();
  problem.row_format = RowFormat::kV32;
  problem.page_size = 4;
  const SparseMla plan = SparseMla::plan(problem, Device::cpu(1));
  HostBuffer scratch(plan.workspace_bytes());
  Tensor q(DType::kBf16, {2, 3, 576}), kv(DType::kU8, {9, 4 * 656 - 1});
  Tensor indices(DType::kI32, {2, 4}), out(DType::kBf16, {2, 3, 512}), lse(DType::kF32, {2, 3});
  SparseMlaTensors tensors;
  tensors.q = q;
  tensors.kv = kv;
  tensors.indices = indices;
  tensors.out = out;
  tensors.lse = lse;
  EXPECT_THAT(message_of([&] { plan.run(tensors, scratch.workspace()); }),
              testing::HasSubstr("kv.shape[1] = 2623 page bytes, expected at least 2624"));
}

TEST(SparseMla, WorkspaceDependsOnBoundsAloneAndStaysBounded) {
  SparseMlaProblem problem = small_problem();
  problem.num_heads = 128;
  problem.topk = 2048;
  problem.row_format = RowFormat::kF576;  // the format that needs most
  problem.page_size = 64;
  for (const int threads : {1, 2, 64}) {
    size_t previous = 0;
    for (const int64_t rows : {1, 16, 4096, 1 << 20}) {
      problem.max_rows = rows;
      const size_t bytes = SparseMla::plan(problem, Device::cpu(threads)).workspace_bytes();
      EXPECT_GE(bytes, previous);
      EXPECT_LE(bytes, static_cast<size_t>(threads) * (6u << 20));
      previous = bytes;
    }
  }
}

}  // namespace
}  // namespace fovea
