#include "fovea/dense_mla.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/mla/dense_mla_case.h"
#include "tests/support/property.h"
#include "tests/support/sanitizers.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::DenseMlaCase;
using test::DenseMlaOutputs;
using test::DenseMlaSpec;
using test::SameBits;
using test::StridedTensor;
using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();

class DenseMlaTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }

  void check(const DenseMlaSpec& spec, int threads = 1) const {
    DenseMlaCase test_case(spec);
    EXPECT_TRUE(test_case.matches(test_case.run(options(), threads)))
        << "heads " << spec.heads << " of " << spec.heads_kv << ", page size " << spec.page_size
        << ", format " << to_string(spec.format);
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, DenseMlaTest, testing::ValuesIn(test::targets_of("dense_mla")),
                         test::target_name);

class FullDenseMlaTest : public DenseMlaTest {};
INSTANTIATE_TEST_SUITE_P(Targets, FullDenseMlaTest,
                         testing::ValuesIn(test::targets_of("dense_mla")), test::target_name);

// q = 0 makes every visible key weigh the same, so that with key j equal to j the output is the
// mean of the visible positions and shows which keys were read.
DenseMlaCase positions_case(DenseMlaSpec spec) {
  DenseMlaCase test_case(spec);
  for (int64_t t = 0; t < test_case.num_rows(); ++t) {
    for (int64_t h = 0; h < spec.heads; ++h) {
      for (int64_t d = 0; d < 576; ++d) test_case.set_q(t, h, d, 0);
    }
  }
  for (size_t r = 0; r < spec.rows.size(); ++r) {
    const auto request = static_cast<int64_t>(r);
    for (int64_t j = 0; j < test_case.num_keys(request); ++j) {
      for (int64_t d = 0; d < 576 && test_case.key_exists(request, j); ++d)
        test_case.set_key(request, 0, j, d, static_cast<float>(j));
    }
  }
  return test_case;
}

void expect_positions(const DenseMlaOutputs& outputs, const std::vector<int>& visible) {
  for (size_t t = 0; t < visible.size(); ++t) {
    const int count = visible[t];
    for (int64_t h = 0; h < outputs.heads; ++h) {
      const auto at = static_cast<size_t>(static_cast<int64_t>(t) * outputs.heads + h);
      const float mean = static_cast<float>(count - 1) / 2;
      for (size_t d = 0; d < 512; d += 73) {
        if (count == 0) {
          EXPECT_EQ(outputs.out_bits[at * 512 + d], 0) << "row " << t;
        } else {
          EXPECT_NEAR(outputs.out[at * 512 + d], mean, mean / 200) << "row " << t;
        }
      }
      if (count == 0) {
        EXPECT_EQ(outputs.lse[at], -kInf);
      } else {
        EXPECT_NEAR(outputs.lse[at], std::log(count), 1e-5) << "row " << t;
      }
    }
  }
}

TEST_P(DenseMlaTest, CausalIsRightAligned) {
  // 3 rows over 7 keys see 5, 6 and 7 keys; 4 rows over 4 keys see 1, 2, 3 and 4; one row sees all.
  for (const int64_t page_size : {1, 2, 3, 64}) {
    DenseMlaCase test_case = positions_case(
        {.rows = {3, 4, 1}, .kv_len = {7, 4, 9}, .heads = 2, .page_size = page_size});
    expect_positions(test_case.run(options()), {5, 6, 7, 1, 2, 3, 4, 9});
  }
}

TEST_P(DenseMlaTest, NonCausalRowsSeeEveryKeyOfTheirRequestOnly) {
  DenseMlaCase test_case =
      positions_case({.rows = {2, 0, 3}, .kv_len = {9, 4, 70}, .page_size = 4, .causal = false});
  expect_positions(test_case.run(options()), {9, 9, 70, 70, 70});
}

TEST_P(DenseMlaTest, KnownFault4RowsWithoutAKeyGiveZeroAndMinusInfinity) {
  // 5 rows over 3 keys: rows 0 and 1 see nothing. Then key counts 0, 7, 0, and 6 rows beside a long
  // request (known fault 8: per-row lengths -4..1), and a negative length.
  DenseMlaCase test_case = positions_case({.rows = {5, 2, 4, 1, 6, 3, 2},
                                           .kv_len = {3, 0, 7, 0, 1, 200, INT_MIN},
                                           .heads = 3,
                                           .page_size = 16});
  expect_positions(test_case.run(options()),
                   {0, 0, 1, 2, 3, 0, 0, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 1, 198, 199, 200, 0, 0});
}

TEST_P(DenseMlaTest, KnownFault8DegenerateBatchesReturn) {
  check({.rows = {}, .kv_len = {}, .heads = 3});
  check({.rows = {0, 0}, .kv_len = {4, 0}});
  check({.rows = std::vector<int32_t>(32, 1), .kv_len = std::vector<int32_t>(32, 0)});
  check({.rows = {1, 1, 1, 1}, .kv_len = {0, 0, 300, 0}});
  DenseMlaCase no_table({.rows = {2}, .kv_len = {5}});
  DenseMlaProblem problem = no_table.problem();
  DenseMlaTensors tensors = no_table.tensors();
  problem.max_pages = tensors.page_table.shape[1] = 0;
  expect_positions(no_table.run(problem, tensors, options()), {0, 0});
}

TEST_P(DenseMlaTest, LengthsAreCutToTheTable) {
  DenseMlaCase test_case =
      positions_case({.rows = {2, 1}, .kv_len = {INT_MAX, 41}, .page_size = 8, .max_pages = 5});
  expect_positions(test_case.run(options()), {39, 40, 40});
}

TEST_P(DenseMlaTest, KnownFault8OffsetsAreCutToTheRowsAndNeverFall) {
  DenseMlaCase test_case =
      positions_case({.rows = {2, 2, 2, 2, 4}, .kv_len = {20, 21, 22, 23, 24}, .causal = false});
  const int32_t offsets[] = {-3, 4, 2, 9, -7, INT_MAX};
  for (int64_t r = 0; r < 6; ++r) test_case.q_indptr.at<int32_t>({r}) = offsets[r];
  expect_positions(test_case.run(options()), {20, 20, 20, 20, 22, 22, 22, 22, 22, 24, 24, 24});
}

TEST_P(DenseMlaTest, RowsOfNoRequestAreNeitherReadNorWritten) {
  DenseMlaCase test_case({.rows = {10}, .kv_len = {30}, .heads = 2});
  test_case.q_indptr.at<int32_t>({0}) = 3;
  test_case.q_indptr.at<int32_t>({1}) = 8;
  const DenseMlaOutputs outputs = test_case.run(options());
  for (int64_t t = 0; t < 10; ++t) {
    const bool live = t >= 3 && t < 8;
    EXPECT_EQ(outputs.out_bits[static_cast<size_t>(t * 2 * 512)] == 0xABAB, !live) << "row " << t;
    EXPECT_EQ(outputs.lse_bits[static_cast<size_t>(t * 2)] == 0xABABABAB, !live) << "row " << t;
  }
}

TEST_P(DenseMlaTest, KnownFault3PagesOutsideThePoolAreMasked) {
  for (const int64_t page_size : {1, 3, 64}) {
    check({.rows = {3, 1, test::by_build(40, 12)},
           .kv_len = {70, 150, 130},
           .heads = 5,
           .page_size = page_size,
           .invalid_share = 0.4});
  }
  // Nothing but pages outside.
  DenseMlaCase nothing({.rows = {2, 1}, .kv_len = {70, 700}, .heads = 2, .invalid_share = 1.1});
  expect_positions(nothing.run(options(), 3), {0, 0, 0});
}

TEST_P(DenseMlaTest, AgreesWithTheFormula) {
  for (const int64_t heads : {1, 3, 9, 16, 40, 63, 128}) {
    if (test::kSanitized && heads > 9 && heads != 40) continue;
    check({.rows = {1, 2}, .kv_len = {20, 140}, .heads = heads, .seed = 2});
  }
  for (const int64_t heads_kv : {2, 3, 6})
    check({.rows = {4, 1}, .kv_len = {75, 33}, .heads = 6, .heads_kv = heads_kv, .page_size = 16});
  const bool limited = GetParam().implementation == "cuda_portable";  // to 128 heads
  check({.rows = {2},
         .kv_len = {50},
         .heads = limited ? 128 : test::by_build(300, 140),
         .heads_kv = 2},
        2);
  check({.rows = {3}, .kv_len = {99}, .heads = 4, .head_dim_qk = 512, .causal = false});
  check({.rows = {3}, .kv_len = {99}, .heads = 4, .head_dim_qk = 512, .packed = true});
}

TEST_P(DenseMlaTest, AgreesWithTheFormulaOverEveryRowFormat) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    for (const int64_t page_size : {1, 2, 61, 64}) {
      if (test::kSanitized && page_size % 2 == 0) continue;
      check({.rows = {1, 5, 2},
             .kv_len = {65, 130, 13},
             .heads = 8,
             .format = format,
             .page_size = page_size,
             .packed = true});
    }
  }
  check({.rows = {2, 3},
         .kv_len = {65, 30},
         .heads = 5,
         .format = RowFormat::kF576,
         .page_size = 16,
         .q_code_scale = 0.0625f,
         .k_scale = 0.3f});
}

TEST_P(DenseMlaTest, RowsOfSeveralParts) {
  // 1, 2 and 3 parts of 256 keys and rows on both sides of a cut; then parts of 512 keys (above
  // 4096).
  check({.rows = {1, 3, 1}, .kv_len = {700, 257, 256}, .heads = 2, .seed = 3}, 2);
  check({.rows = {2}, .kv_len = {4097}, .heads = 1, .page_size = 256, .seed = 4}, 3);
  for (const int64_t split_keys : {64, 128, 1024})
    check({.rows = {2, 1}, .kv_len = {300, 129}, .heads = 3, .split_keys = split_keys}, 2);
}

TEST_P(DenseMlaTest, RowsAcrossAChangeOfThePartSize) {
  // Rows of one request with 4095 to 4098 keys: the first two are cut every 256, the others every
  // 512 keys, whatever is computed together.
  DenseMlaCase test_case({.rows = {4}, .kv_len = {4098}, .heads = 2, .page_size = 256, .seed = 5});
  const DenseMlaOutputs all = test_case.run(options(), 1);
  EXPECT_TRUE(test_case.matches(all));
  EXPECT_TRUE(SameBits(all, test_case.run(options(), 5)));
}

// Rows [begin, end) of request 0 as a batch of their own: a chunk of its prefill.
DenseMlaOutputs run_chunk(DenseMlaCase& test_case, const Options& options, int64_t begin,
                          int64_t end, int threads = 1) {
  DenseMlaTensors tensors = test_case.tensors();
  const int64_t rows = test_case.first_row(1);
  tensors.q = slice_rows(tensors.q, begin, end);
  tensors.page_table.shape[0] = 1;
  const Tensor kv_len =
      Tensor::i32({1}, {static_cast<int32_t>(test_case.num_keys(0) - rows + end)});
  const Tensor q_indptr = Tensor::i32({2}, {0, static_cast<int32_t>(end - begin)});
  tensors.kv_len = kv_len;
  tensors.q_indptr = q_indptr;
  DenseMlaProblem problem = test_case.problem();
  problem.max_rows = end - begin;
  problem.max_requests = 1;
  problem.split_keys = 256;
  return test_case.run(problem, tensors, options, threads);
}

TEST_P(DenseMlaTest, BitsDependOnTheRowAndItsKeysAlone) {
  for (const int64_t heads : {3, 40}) {
    DenseMlaCase test_case({.rows = {40, 1, 9},
                            .kv_len = {300, 500, 9},
                            .heads = heads,
                            .page_size = 16,
                            .invalid_share = 0.05,
                            .split_keys = 256,
                            .seed = 9});
    const bool slow = test::kSanitized && GetParam().isa == CpuIsa::kBaseline;
    if ((slow || GetParam().implementation == "ref") && heads > 3) continue;
    const DenseMlaOutputs all = test_case.run(options());
    for (const int threads : {2, 8}) EXPECT_TRUE(SameBits(all, test_case.run(options(), threads)));
    for (const auto& [begin, end] :
         {std::pair<int64_t, int64_t>{0, 1}, {0, 23}, {23, 40}, {39, 40}}) {
      const DenseMlaOutputs chunk = run_chunk(test_case, options(), begin, end, 2);
      for (int64_t t = begin; t < end; ++t)
        ASSERT_EQ(chunk.row(t - begin), all.row(t))
            << "row " << t << " of " << begin << ".." << end;
    }
  }
}

TEST_P(DenseMlaTest, BitsDoNotDependOnPagesOrOnPacking) {
  DenseMlaSpec spec{.rows = {1, 3}, .kv_len = {300, 70}, .heads = 9, .seed = 10};
  spec.format = RowFormat::kV32;
  DenseMlaCase packed(spec);
  const DenseMlaOutputs expected = packed.run(options());
  spec.format = RowFormat::kBf16;
  for (const int64_t page_size : {1, 7, 64}) {
    for (const bool in_pool : {false, true}) {
      spec.page_size = page_size;
      spec.packed = in_pool;
      spec.max_pages = 300;
      DenseMlaCase bf16(spec);
      bf16.q = packed.q;
      for (int64_t r = 0; r < 2; ++r) {
        for (int64_t j = 0; j < packed.num_keys(r); ++j) {
          for (int64_t d = 0; d < 576; ++d)
            bf16.set_key(r, 0, j, d, static_cast<float>(packed.key(r, 0, j, d)));
        }
      }
      DenseMlaProblem problem = bf16.problem();
      problem.split_keys = 256;
      DenseMlaProblem packed_problem = packed.problem();
      packed_problem.split_keys = 256;
      EXPECT_TRUE(SameBits(packed.run(packed_problem, packed.tensors(), options()),
                           bf16.run(problem, bf16.tensors(), options())));
    }
  }
  EXPECT_TRUE(packed.matches(expected));
}

TEST_P(DenseMlaTest, ABf16CacheOfRowsIsAPagedOne) {
  DenseMlaCase test_case({.rows = {2, 1}, .kv_len = {50, 21}, .heads = 4, .page_size = 8});
  const ConstTensorView pages = test_case.kv.view();
  Tensor rows(DType::kBf16, {pages.shape[0] * 8, 576});
  for (int64_t i = 0; i < pages.shape[0] * 8; ++i) {
    std::copy_n(&test_case.kv.at<bf16_t>({i / 8, i % 8, 0, 0}), 576, rows.data<bf16_t>() + i * 576);
  }
  DenseMlaTensors tensors = test_case.tensors();
  tensors.kv = rows;
  EXPECT_TRUE(
      SameBits(test_case.run(options()), test_case.run(test_case.problem(), tensors, options())));
}

TEST_P(DenseMlaTest, KnownFault7EveryHeadEqualsItsOwnRun) {
  for (const int64_t heads : {1, 8, 20, 96}) {
    DenseMlaCase test_case({.rows = {3}, .kv_len = {75}, .heads = heads, .seed = 8});
    for (int64_t d = 0; d < 576; ++d) test_case.set_q(1, heads / 2, d, std::nanf(""));
    const DenseMlaOutputs all = test_case.run(options());
    for (int64_t h = 0; h < heads; h += 7) {
      DenseMlaTensors tensors = test_case.tensors();
      tensors.q.shape[1] = 1;
      tensors.q.data = &test_case.q.at<bf16_t>({0, h, 0});
      DenseMlaProblem problem = test_case.problem();
      problem.num_heads = 1;
      const DenseMlaOutputs alone = test_case.run(problem, tensors, options());
      for (int64_t t = 0; t < 3; ++t) {
        const auto from = static_cast<size_t>(t * heads + h), to = static_cast<size_t>(t);
        EXPECT_EQ(std::isnan(all.lse[from]), t == 1 && h == heads / 2);
        EXPECT_EQ(alone.lse_bits[to], all.lse_bits[from]) << "head " << h << " of " << heads;
        EXPECT_TRUE(std::equal(alone.out_bits.begin() + to * 512,
                               alone.out_bits.begin() + (to + 1) * 512,
                               all.out_bits.begin() + from * 512))
            << "head " << h << " of " << heads;
      }
    }
  }
}

TEST_P(DenseMlaTest, NanReachesOnlyTheRowsAndHeadsThatSeeIt) {
  const DenseMlaSpec spec{
      .rows = {80}, .kv_len = {100}, .heads = 4, .heads_kv = 2, .page_size = 16, .seed = 11};
  DenseMlaCase clean(spec), test_case(spec);
  const DenseMlaOutputs before = clean.run(options());
  test_case.set_key(0, 1, 60, 575, std::nanf(""));  // in the logits of rows 40.. of heads 2 and 3
  test_case.set_key(0, 0, 90, 5, kInf);             // rows 70.. of heads 0 and 1, channel 5
  test_case.set_q(7, 3, 0, std::nanf(""));
  const DenseMlaOutputs after = test_case.run(options(), 2);
  for (int64_t t = 0; t < 80; ++t) {
    for (int64_t h = 0; h < 4; ++h) {
      const auto at = static_cast<size_t>(t * 4 + h);
      const bool all_nan = (h >= 2 && t >= 40) || (h == 3 && t == 7);
      const bool infinite = h < 2 && t >= 70;
      if (!infinite) {
        EXPECT_EQ(std::isnan(after.lse[at]), all_nan) << t << " " << h;
      }
      for (size_t d = 0; d < 512; d += 3) {
        if (all_nan) {
          EXPECT_TRUE(std::isnan(after.out[at * 512 + d])) << t << " " << h;
        } else if (!infinite) {
          EXPECT_EQ(after.out_bits[at * 512 + d], before.out_bits[at * 512 + d]) << t << " " << h;
        }
      }
    }
  }
}

TEST_P(DenseMlaTest, KnownFault5TheTailOfTheLastPageMayHoldAnything) {
  // The case fills what no row sees with NaN; a large finite number there changes nothing.
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32}) {
    for (const auto& [page_size, length] :
         {std::pair<int64_t, int32_t>{4, 13}, {64, 1}, {64, 13}, {64, 63}, {64, 64}, {64, 65}}) {
      DenseMlaSpec spec{.rows = {1}, .kv_len = {length}, .heads = 3, .format = format};
      spec.page_size = page_size;
      DenseMlaCase test_case(spec);
      const DenseMlaOutputs with_nan = test_case.run(options());
      EXPECT_TRUE(test_case.matches(with_nan));
      const int64_t row_bytes = test::latent_row_bytes(format, 576);
      const int32_t page = test_case.page_table.at<int32_t>({0, (length - 1) / page_size});
      auto* bytes = static_cast<uint8_t*>(test_case.kv.view().data) +
                    page * test_case.kv.view().stride[0] * (format == RowFormat::kBf16 ? 2 : 1);
      for (int64_t i = (length - 1) % page_size + 1; i < page_size && format == RowFormat::kV32;
           ++i)
        std::memset(bytes + i * row_bytes, 0x70, static_cast<size_t>(row_bytes));
      EXPECT_TRUE(SameBits(test_case.run(options()), with_nan));
    }
  }
}

TEST_P(DenseMlaTest, KnownFault6PagesBeyondFourGigabytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  DenseMlaCase small({.rows = {1, 2}, .kv_len = {100, 64}, .heads = 3});
  const DenseMlaOutputs expected = small.run(options());
  for (const int64_t first_page : {29128, 58255, 116509}) {
    const int64_t pages = small.kv.view().shape[0];
    const int64_t page_elements = 64 * 576;
    test::SparseMapping pool(static_cast<size_t>(2 * page_elements * (first_page + pages)));
    auto* data = static_cast<bf16_t*>(pool.data());
    for (int64_t page = 0; page < pages; ++page) {
      for (int64_t i = 0; i < 64; ++i) {
        std::copy_n(&small.kv.at<bf16_t>({page, i, 0, 0}), 576,
                    data + (first_page + page) * page_elements + i * 576);
      }
    }
    StridedTensor table(DType::kI32, {2, small.page_table.view().shape[1]}, {0, 0}, 0x7F);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t column = 0; column * 64 < small.num_keys(r); ++column)
        table.at<int32_t>({r, column}) =
            small.page_table.at<int32_t>({r, column}) + static_cast<int32_t>(first_page);
    }
    DenseMlaTensors tensors = small.tensors();
    tensors.kv.data = data;
    tensors.kv.shape = {first_page + pages, 64, 1, 576};
    tensors.kv.stride = {page_elements, 576, 576, 1};
    tensors.page_table = table.view();
    EXPECT_TRUE(SameBits(small.run(small.problem(), tensors, options()), expected));
  }
}

TEST_P(DenseMlaTest, HugeAndTinyScores) {
  for (const float scale : {1e-6f, 1.0f, 30.0f}) {
    DenseMlaCase test_case({.rows = {2}, .kv_len = {90}, .heads = 2, .seed = 12});
    DenseMlaProblem problem = test_case.problem();
    problem.softmax_scale = scale;
    const DenseMlaOutputs expected = test_case.run(problem, test_case.tensors(), {"ref"});
    const DenseMlaOutputs found = test_case.run(problem, test_case.tensors(), options());
    EXPECT_TRUE(test::ExpectCloseOutputs(found.out, expected.out,
                                         test_case.expected(problem).magnitude, found.num_rounded(),
                                         test::kBf16Output));
    EXPECT_TRUE(test::ExpectClose(found.lse, expected.lse, test::kLse));
  }
}

// Any shape, small: against the formula.
void check_random_problem(const test::Target& target) {
  DenseMlaSpec spec;
  spec.rows.clear();
  spec.kv_len.clear();
  const auto requests = *rc::gen::inRange<size_t>(0, 4);
  for (size_t r = 0; r < requests; ++r) {
    spec.rows.push_back(*rc::gen::inRange<int32_t>(0, 12));
    spec.kv_len.push_back(*rc::gen::inRange<int32_t>(-2, 150));
  }
  spec.heads_kv = *rc::gen::inRange<int64_t>(1, 3);
  spec.heads = spec.heads_kv * *rc::gen::inRange<int64_t>(1, 6);
  spec.page_size = *rc::gen::inRange<int64_t>(1, 70);
  spec.causal = *rc::gen::arbitrary<bool>();
  spec.invalid_share = *rc::gen::element(0.0, 0.2);
  spec.split_keys = *rc::gen::element<int64_t>(0, 64, 192);
  if (spec.heads_kv == 1)
    spec.format = *rc::gen::element(RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576);
  spec.seed = *rc::gen::arbitrary<uint64_t>();
  DenseMlaCase test_case(spec);
  const auto result = test_case.matches(test_case.run(target.options(), *rc::gen::inRange(1, 4)));
  if (!result) RC_FAIL(result.message());
}

TEST_P(DenseMlaTest, RandomProblemsAgreeWithTheFormula) {
  EXPECT_TRUE(test::holds("agrees with the formula", [] { check_random_problem(GetParam()); }));
}

TEST_P(FullDenseMlaTest, TheDimensionsOfTheSpecification) {
  const bool slow = GetParam().implementation == "ref" || GetParam().isa == CpuIsa::kBaseline;
  for (const int64_t heads : {16, 64, 128}) {
    for (const int32_t rows : {1, 2, 4}) {
      check({.rows = {rows, rows}, .kv_len = {140, slow ? 300 : 1500}, .heads = heads, .seed = 6},
            2);
    }
  }
  check({.rows = std::vector<int32_t>(64, 1), .kv_len = std::vector<int32_t>(64, 77), .heads = 3},
        2);
}

TEST_P(DenseMlaTest, RunDoesNotAllocate) {
  DenseMlaCase test_case({.rows = {2, 1}, .kv_len = {50, 700}, .heads = 4});
  const StridedTensor out(DType::kBf16, {3, 4, 512}, {0, 0, 0}, 0);
  const StridedTensor lse(DType::kF32, {3, 4}, {0, 0}, 0);
  DenseMlaTensors tensors = test_case.tensors();
  tensors.out = out.view();
  tensors.lse = lse.view();
  const DenseMla plan = DenseMla::plan(test_case.problem(), GetParam().device(2), options());
  HostBuffer scratch(plan.workspace_bytes());
  // The thread pool allocates on its first use, which need not meet every thread.
  for (int i = 0; i < 20; ++i) plan.run(tensors, scratch.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, scratch.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(DenseMla, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  DenseMlaCase test_case({.rows = {1, 2}, .kv_len = {2, 4}, .heads = 2, .page_size = 16});
  const DenseMlaProblem good = test_case.problem();
  const auto refuse_plan = [&](auto&& change) {
    DenseMlaProblem problem = good;
    change(problem);
    EXPECT_THROW(DenseMla::plan(problem, cpu), Error);
  };
  refuse_plan([](DenseMlaProblem& p) { p.max_rows = -1; });
  refuse_plan([](DenseMlaProblem& p) { p.max_requests = int64_t{1} << 31; });
  refuse_plan([](DenseMlaProblem& p) { p.max_pages = -1; });
  refuse_plan([](DenseMlaProblem& p) { p.num_heads = 0; });
  refuse_plan([](DenseMlaProblem& p) { p.num_heads_kv = 0; });
  refuse_plan([](DenseMlaProblem& p) { p.num_heads = 3, p.num_heads_kv = 2; });
  refuse_plan([](DenseMlaProblem& p) { p.page_size = 0; });
  refuse_plan([](DenseMlaProblem& p) { p.head_dim_qk = 192; });
  refuse_plan([](DenseMlaProblem& p) { p.row_format = RowFormat::kI132; });
  refuse_plan([](DenseMlaProblem& p) { p.row_format = RowFormat::kV32, p.head_dim_qk = 512; });
  refuse_plan([](DenseMlaProblem& p) { p.row_format = RowFormat::kV32, p.num_heads_kv = 2; });
  refuse_plan([](DenseMlaProblem& p) { p.k_scale = 2; });
  refuse_plan([](DenseMlaProblem& p) { p.q_scale = 0.5f; });
  refuse_plan([](DenseMlaProblem& p) { p.split_keys = 65; });
  refuse_plan([](DenseMlaProblem& p) { p.split_keys = -64; });
  for (const float scale : {0.0f, -1.0f, kInf, std::nanf("")}) {
    refuse_plan([scale](DenseMlaProblem& p) { p.softmax_scale = scale; });
  }

  const auto refuse_run = [&](auto&& change, const DenseMlaProblem& problem) {
    const StridedTensor out(DType::kBf16, {3, 2, 512}, {0, 0, 0}, 0x55);
    const StridedTensor lse(DType::kF32, {3, 2}, {0, 0}, 0x55);
    DenseMlaTensors tensors = test_case.tensors();
    tensors.out = out.view();
    tensors.lse = lse.view();
    change(tensors);
    const DenseMla plan = DenseMla::plan(problem, cpu);
    HostBuffer scratch(plan.workspace_bytes());
    EXPECT_THROW(plan.run(tensors, scratch.workspace()), Error);
    EXPECT_EQ((out.at<uint16_t>({2, 1, 511})), 0x5555);
    EXPECT_EQ((lse.at<uint32_t>({2, 1})), 0x55555555u);
  };
  const auto refuse = [&](auto&& change) { refuse_run(change, good); };
  refuse([](DenseMlaTensors& t) { t.q = {}; });
  refuse([](DenseMlaTensors& t) { t.q.shape[2] = 512; });
  refuse([](DenseMlaTensors& t) { t.q.dtype = DType::kU8; });
  refuse([](DenseMlaTensors& t) { t.kv.shape[1] = 15; });
  refuse([](DenseMlaTensors& t) { t.kv.shape[2] = 2; });
  refuse([](DenseMlaTensors& t) { t.kv.dtype = DType::kU8; });
  refuse([](DenseMlaTensors& t) { t.kv.rank = 2, t.kv.shape[1] = 576, t.kv.shape[0] = 17; });
  refuse([](DenseMlaTensors& t) { t.page_table.shape[0] = 3; });
  refuse([](DenseMlaTensors& t) { t.page_table.shape[1] += 1; });
  refuse([](DenseMlaTensors& t) { t.page_table.dtype = DType::kI64; });
  refuse([](DenseMlaTensors& t) { t.kv_len.shape[0] = 1; });
  refuse([](DenseMlaTensors& t) { t.q_indptr.shape[0] = 2; });
  refuse([](DenseMlaTensors& t) { t.out.shape[0] = 2; });
  refuse([](DenseMlaTensors& t) { t.lse.shape[1] = 1; });
  DenseMlaProblem v32 = good;
  v32.row_format = RowFormat::kV32;
  refuse_run([](DenseMlaTensors&) {}, v32);
  refuse_run(
      [](DenseMlaTensors& t) {
        t.kv.dtype = DType::kU8, t.kv.rank = 2, t.kv.shape[1] = 16 * 656 - 1;
      },
      v32);
}

}  // namespace
}  // namespace fovea
