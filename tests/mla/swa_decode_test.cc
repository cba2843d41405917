// swa_decode: the window decode of DeepSeek-V4, and the faults of the kernel that it replaces.

#include "fovea/swa_decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();

// A problem over a pool of `pages` pages, the first of which is NaN and named by no good index.
struct Rig {
  SwaDecodeProblem problem;
  Tensor q, kv, inv_scale, sink, indices32, indices64, lens32, lens64;
  std::vector<double> keys;  // [slots, 512]
  int64_t rows;
  int64_t slots;
  int64_t list_rows;
  bool wide = false;
  bool has_sink = false;

  Rig(RowFormat format, int64_t num_rows, int64_t heads, int64_t width, int64_t window,
      int64_t page_size, bool bf16_scale = false, uint64_t seed = 1)
      : rows(num_rows), list_rows(num_rows + 3) {
    const int64_t pages = 40 / page_size + 3;
    slots = pages * page_size;
    problem.max_rows = rows;
    problem.num_heads = heads;
    problem.width = width;
    problem.window = window;
    problem.softmax_scale = static_cast<float>(1 / std::sqrt(512.0));
    problem.row_format = format;
    problem.page_size = page_size;
    test::Rng rng(seed);
    q = Tensor::bf16({rows, heads, 512}, rng.bf16_normals(rows * heads * 512, 1.0f));
    const int64_t row_bytes = test::latent_row_bytes(format, 512);
    const int64_t page_bytes = test::latent_page_bytes(format, 512, page_size) + 5;
    kv = Tensor(DType::kU8, {pages, page_bytes});
    kv.fill_bytes(0xFF);
    inv_scale = Tensor(bf16_scale ? DType::kBf16 : DType::kF32, {slots, 1});
    inv_scale.fill_bytes(0xFF);
    keys.assign(static_cast<size_t>(slots * 512), std::nan(""));
    for (int64_t slot = page_size; slot < slots; ++slot) {
      uint8_t* const page = kv.data<uint8_t>() + slot / page_size * page_bytes;
      test::ApartScales scales;
      scales.bf16 = bf16_scale;
      if (format == RowFormat::kV4)
        scales.bytes = page + page_size * 576 + slot % page_size * 8;
      else
        scales.bytes = inv_scale.data<uint8_t>() + slot * (bf16_scale ? 2 : 4);
      test::write_latent_row(format, 512, 1, rng, page + slot % page_size * row_bytes,
                             keys.data() + slot * 512, scales);
    }
    // Rows past T and columns past the lengths are hostile.
    indices64 = Tensor(DType::kI64, {list_rows, width});
    lens64 = Tensor(DType::kI64, {list_rows});
    for (int64_t i = 0; i < list_rows * width; ++i)
      indices64.data<int64_t>()[i] =
          i < rows * width ? rng.integer(page_size, slots - 1) : INT_MAX - i;
    for (int64_t t = 0; t < list_rows; ++t)
      lens64.data<int64_t>()[t] = t < rows ? rng.integer(0, width) : INT_MAX;
    sink = Tensor(DType::kF32, {heads});
    for (int64_t h = 0; h < heads; ++h) sink.data<float>()[h] = rng.normal();
  }

  int64_t& index(int64_t t, int64_t j) { return indices64.data<int64_t>()[t * problem.width + j]; }
  int64_t& len(int64_t t) { return lens64.data<int64_t>()[t]; }

  struct Result {
    std::vector<double> out, lse;
    std::vector<double> magnitude;  // of expected(): out of the values' magnitudes
    std::vector<uint8_t> bytes;
  };

  Result run(const Options& options, int threads = 1) {
    indices32 = Tensor(DType::kI32, {list_rows, problem.width});
    lens32 = Tensor(DType::kI32, {list_rows});
    for (int64_t i = 0; i < list_rows * problem.width; ++i)
      indices32.data<int32_t>()[i] = static_cast<int32_t>(indices64.data<int64_t>()[i]);
    for (int64_t t = 0; t < list_rows; ++t)
      lens32.data<int32_t>()[t] = static_cast<int32_t>(len(t));
    Tensor out(DType::kBf16, {rows, problem.num_heads, 512});
    Tensor lse(DType::kF32, {rows, problem.num_heads});
    out.fill_bytes(0xFF);
    lse.fill_bytes(0xFF);
    SwaDecodeTensors tensors;
    tensors.q = q;
    tensors.kv = kv;
    if (problem.row_format == RowFormat::kR512) tensors.inv_scale = inv_scale;
    tensors.swa_indices = wide ? indices64.view() : indices32.view();
    tensors.swa_lens = wide ? lens64.view() : lens32.view();
    if (has_sink) tensors.sink = sink;
    tensors.out = out;
    tensors.lse = lse;
    test::run(SwaDecode::plan(problem, test::device_of(options, threads), options), tensors);
    Result result{test::to_doubles(out.view()), test::to_doubles(lse.view()), {}, out.bytes()};
    const std::vector<uint8_t> lse_bytes = lse.bytes();
    result.bytes.insert(result.bytes.end(), lse_bytes.begin(), lse_bytes.end());
    return result;
  }

  // The definition, in double precision.
  Result expected() {
    Result result;
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<int64_t> seen;
      const int64_t n = std::clamp<int64_t>(len(t), 0, std::min(problem.width, problem.window));
      for (int64_t j = 0; j < n; ++j) {
        if (index(t, j) >= 0 && index(t, j) < slots) seen.push_back(index(t, j));
      }
      for (int64_t h = 0; h < problem.num_heads; ++h) {
        std::vector<double> weights, value(512, 0.0), magnitude(512, 0.0);
        double sum = 0;
        for (const int64_t slot : seen) {
          double dot = 0;
          for (int64_t d = 0; d < 512; ++d) {
            dot += bf16_to_float(q.data<bf16_t>()[(t * problem.num_heads + h) * 512 + d]) *
                   keys[static_cast<size_t>(slot * 512 + d)];
          }
          weights.push_back(std::exp(dot * problem.softmax_scale));
          sum += weights.back();
        }
        const double all = sum + (has_sink ? std::exp(sink.data<float>()[h]) : 0.0);
        for (size_t j = 0; j < seen.size(); ++j) {
          for (size_t d = 0; d < 512; ++d) {
            const double key = keys[static_cast<size_t>(seen[j]) * 512 + d];
            value[d] += weights[j] / all * key;
            magnitude[d] += weights[j] / all * std::fabs(key);
          }
        }
        result.out.insert(result.out.end(), value.begin(), value.end());
        result.magnitude.insert(result.magnitude.end(), magnitude.begin(), magnitude.end());
        result.lse.push_back(std::log(sum));
      }
    }
    return result;
  }
};

class SwaDecodeTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }

  void expect_definition(Rig& rig) {
    const Rig::Result expected = rig.expected();
    expect_close(rig.run(options()), expected, expected, 1);
  }
  // `reference` with its magnitudes; of as many runs of the target.
  void expect_close(const Rig::Result& found, const Rig::Result& expected,
                    const Rig::Result& reference, int num_runs) {
    const int num_rounded = test::rounds_weights(GetParam().implementation) ? num_runs : 0;
    EXPECT_TRUE(test::ExpectCloseOutputs(found.out, expected.out, reference.magnitude, num_rounded,
                                         test::kSparseFp8Out));
    EXPECT_TRUE(test::ExpectClose(found.lse, expected.lse, test::kSparseFp8Lse));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SwaDecodeTest, testing::ValuesIn(test::targets_of("swa_decode")),
                         test::target_name);

constexpr RowFormat kRows[] = {RowFormat::kR512, RowFormat::kV4};

TEST_P(SwaDecodeTest, FollowsTheDefinition) {
  uint64_t seed = 1;
  for (const RowFormat format : kRows) {
    for (const int64_t page_size : {1, 2, 61, 64}) {
      for (const bool has_sink : {false, true}) {
        Rig rig(format, 5, 6, 133, 128, page_size, has_sink, ++seed);
        rig.has_sink = has_sink;
        rig.wide = seed % 2 == 0;
        expect_definition(rig);
      }
    }
  }
}

TEST_P(SwaDecodeTest, Bf16RowsWorkToo) {
  Rig rig(RowFormat::kBf16, 3, 4, 70, 64, 16);
  expect_definition(rig);
}

// Original: zero rows behind a short length keep logit 0 and take weight, up to the next multiple
// of 16 of the window.
TEST_P(SwaDecodeTest, OriginalFaultPhantomKeysOfShortWindows) {
  for (const RowFormat format : kRows) {
    Rig rig(format, 127, 1, 128, 128, 16);
    // One key for everybody: the output is that key, whatever the length.
    for (int64_t t = 0; t < rig.rows; ++t) {
      rig.len(t) = t + 1;
      for (int64_t j = 0; j <= t; ++j) rig.index(t, j) = 17;
    }
    const Rig::Result found = rig.run(options());
    for (int64_t t = 0; t < rig.rows; ++t) {
      for (int64_t d = 0; d < 512; ++d) {
        const double key = rig.keys[17 * 512 + static_cast<size_t>(d)];
        ASSERT_NEAR(found.out[static_cast<size_t>(t * 512 + d)], key, std::fabs(key) / 256)
            << "length " << t + 1 << " channel " << d;
      }
    }
  }
}

// Original: -1 is clamped to slot 0, which is then attended to. Here slot 0 is NaN.
TEST_P(SwaDecodeTest, OriginalFaultHolesInsideTheLength) {
  for (const RowFormat format : kRows) {
    for (const int64_t hole : {int64_t{-1}, int64_t{INT_MIN}, int64_t{-77}}) {
      Rig rig(format, 3, 5, 70, 64, 16), without = rig;
      for (int64_t t = 0; t < 3; ++t) {
        rig.len(t) = 40;
        without.len(t) = 39;
        rig.index(t, 7) = hole;
        for (int64_t j = 7; j < 39; ++j) without.index(t, j) = rig.index(t, j + 1);
      }
      expect_definition(rig);
      expect_close(rig.run(options()), without.run(options()), rig.expected(), 2);
    }
    // A length counts columns: what stands behind a hole is seen, and slots past the pool are
    // holes.
    Rig rig(format, 1, 2, 5, 5, 16);
    rig.len(0) = 5;
    for (int64_t j = 0; j < 5; ++j) rig.index(0, j) = j == 4 ? 20 : j % 2 == 0 ? -1 : rig.slots;
    const Rig::Result found = rig.run(options());
    for (size_t d = 0; d < 512; ++d) EXPECT_EQ(found.out[d], rig.keys[20 * 512 + d]);
  }
}

// Original: empty rows are zero in the kernel and NaN in its fallback.
TEST_P(SwaDecodeTest, OriginalFaultEmptyRows) {
  for (const bool has_sink : {false, true}) {
    for (const EmptyLse empty_lse : {EmptyLse::kNegInf, EmptyLse::kPosInf}) {
      Rig rig(RowFormat::kR512, 4, 9, 20, 16, 4);
      rig.has_sink = has_sink;
      rig.problem.empty_lse = empty_lse;
      rig.len(0) = 0;
      rig.len(1) = -3;
      rig.len(2) = 20;
      rig.len(3) = 7;
      for (int64_t j = 0; j < 20; ++j) rig.index(2, j) = -1;
      const Rig::Result found = rig.run(options());
      for (size_t i = 0; i < 27; ++i) {
        EXPECT_EQ(found.lse[i], empty_lse == EmptyLse::kPosInf ? kInf : -kInf);
        for (size_t d = 0; d < 512; ++d) ASSERT_EQ(found.out[i * 512 + d], 0.0);
      }
      for (size_t i = 27; i < 36; ++i) EXPECT_TRUE(std::isfinite(found.lse[i]));
    }
  }
}

// Original: the grid is H / 16, so that 8 heads compute nothing and 20 leave four.
TEST_P(SwaDecodeTest, OriginalFaultHeadsPastTheLastSixteen) {
  for (const int64_t heads : {1, 8, 16, 20, 64, 96, 128}) {
    Rig rig(RowFormat::kR512, 2, heads, 40, 32, 8, false, static_cast<uint64_t>(heads));
    rig.len(0) = 33;
    rig.len(1) = 5;
    expect_definition(rig);
  }
}

// Original: a window that is no multiple of 16 reads the keys of the next token.
TEST_P(SwaDecodeTest, OriginalFaultWindowsThatAreNoMultipleOfSixteen) {
  for (const int64_t window : {1, 5, 20, 127, 133}) {
    for (const int64_t len : {int64_t{1}, window - 1, window, window + 1, int64_t{400}}) {
      Rig rig(RowFormat::kV4, 3, 3, 192, window, 16);
      for (int64_t t = 0; t < 3; ++t) rig.len(t) = len;
      expect_definition(rig);
    }
  }
}

// Original: the width of the list must be the window (fallback), or is read out of bounds (kernel).
TEST_P(SwaDecodeTest, OriginalFaultListsOfAnotherWidthThanTheWindow) {
  for (const int64_t width : {1, 5, 64, 127, 128, 133, 192, 256}) {
    Rig rig(RowFormat::kR512, 3, 3, width, 128, 16, true, static_cast<uint64_t>(width));
    rig.len(0) = 10 * width;
    rig.len(1) = width;
    for (int64_t j = 5; j < width; ++j) rig.index(2, j) = INT_MAX;
    rig.len(2) = 5;
    expect_definition(rig);
  }
}

// Original: the compiled kernel is chosen without the type of the lengths: int32 read as int64.
TEST_P(SwaDecodeTest, OriginalFaultTypeOfTheLengths) {
  Rig rig(RowFormat::kR512, 6, 4, 40, 32, 8);
  const Rig::Result narrow = rig.run(options());
  rig.wide = true;
  EXPECT_EQ(narrow.bytes, rig.run(options()).bytes);
  rig.wide = false;
  EXPECT_EQ(narrow.bytes, rig.run(options()).bytes);
  // What 32 bits do not hold is outside: 2^32 + 20 is not slot 20, 2^40 columns are all of them.
  rig.wide = true;
  for (int64_t t = 0; t < 6; ++t) {
    rig.len(t) = t % 2 == 0 ? int64_t{1} << 40 : -(int64_t{1} << 40);
    rig.index(t, 3) = (int64_t{1} << 32) + 20;
    rig.index(t, 4) = std::numeric_limits<int64_t>::min() + 20;
  }
  expect_definition(rig);
}

// Original: a batch of another size is another compiled kernel, and its scratch holds every window.
TEST_P(SwaDecodeTest, OriginalFaultOnePlanServesEveryBatch) {
  Rig rig(RowFormat::kV4, 5, 4, 40, 32, 8);
  const Rig::Result all = rig.run(options());
  const SwaDecode plan = SwaDecode::plan(rig.problem, test::device_of(options(), 1), options());
  for (const int64_t rows : {0, 1, 3}) {
    Tensor out(DType::kBf16, {rows, 4, 512});
    SwaDecodeTensors tensors;
    tensors.q = slice_rows(rig.q.view(), 0, rows);
    tensors.kv = rig.kv;
    tensors.swa_indices = rig.indices32;
    tensors.swa_lens = rig.lens32;
    tensors.out = out;
    test::run(plan, tensors);  // lse is not asked for
    EXPECT_TRUE(std::equal(out.bytes().begin(), out.bytes().end(), all.bytes.begin()));
  }
}

TEST_P(SwaDecodeTest, ListsOfThreeAxesAndStridedOnesAreTheSame) {
  Rig rig(RowFormat::kR512, 3, 4, 40, 32, 8);
  rig.list_rows = 3;
  const Rig::Result expected = rig.run(options());
  Tensor out(DType::kBf16, {3, 4, 512}), wide(DType::kI32, {3, 2, 50});
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t j = 0; j < 40; ++j)
      wide.data<int32_t>()[t * 100 + j] = static_cast<int32_t>(rig.index(t, j));
  }
  SwaDecodeTensors tensors;
  tensors.q = rig.q;
  tensors.kv = rig.kv;
  tensors.inv_scale = rig.inv_scale;
  tensors.swa_lens = rig.lens32;
  tensors.out = out;
  ConstTensorView narrowed = wide.view();  // [3, 1, 40] of [3, 2, 50]
  narrowed.shape[1] = 1;
  narrowed.shape[2] = 40;
  ConstTensorView flat = make_tensor(wide.view().data, DType::kI32, {3, 40});
  flat.stride[0] = 100;
  ConstTensorView front = make_tensor(wide.view().data, DType::kI32, {1, 3, 40});
  front.stride[1] = 100;
  const SwaDecode plan = SwaDecode::plan(rig.problem, test::device_of(options(), 1), options());
  for (const ConstTensorView& lists : {narrowed, flat, front}) {
    tensors.swa_indices = lists;
    out.fill_bytes(0xFF);
    test::run(plan, tensors);
    EXPECT_TRUE(std::equal(out.bytes().begin(), out.bytes().end(), expected.bytes.begin()));
  }
}

TEST_P(SwaDecodeTest, ThreadsChangeNoBitAndNothingIsAllocated) {
  Rig rig(RowFormat::kR512, 7, 20, 133, 128, 16);
  rig.wide = true;
  const Rig::Result one = rig.run(options());
  for (const int threads : {2, 3}) EXPECT_EQ(one.bytes, rig.run(options(), threads).bytes);
  const SwaDecode plan = SwaDecode::plan(rig.problem, test::device_of(options(), 1), options());
  Tensor out(DType::kBf16, {7, 20, 512});
  SwaDecodeTensors tensors;
  tensors.q = rig.q;
  tensors.kv = rig.kv;
  tensors.inv_scale = rig.inv_scale;
  tensors.swa_indices = rig.indices64;
  tensors.swa_lens = rig.lens64;
  tensors.out = out;
  HostBuffer scratch(plan.workspace_bytes());
  for (int i = 0; i < 20; ++i) plan.run(tensors, scratch.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, scratch.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST(SwaDecode, RefusesWhatItsTableDoesNotList) {
  const Rig rig(RowFormat::kR512, 2, 4, 40, 32, 8);
  const auto refuse = [&](auto change) {
    SwaDecodeProblem problem = rig.problem;
    change(problem);
    EXPECT_THROW(SwaDecode::plan(problem, Device::cpu(1)), Error);
  };
  refuse([](SwaDecodeProblem& p) { p.max_rows = -1; });
  refuse([](SwaDecodeProblem& p) { p.num_heads = 0; });
  refuse([](SwaDecodeProblem& p) { p.width = 0; });
  refuse([](SwaDecodeProblem& p) { p.window = 0; });
  refuse([](SwaDecodeProblem& p) { p.max_rows = p.width = p.window = 0x7FFFFFFF; });
  refuse([](SwaDecodeProblem& p) { p.softmax_scale = 0; });
  refuse([](SwaDecodeProblem& p) { p.page_size = 0; });
  refuse([](SwaDecodeProblem& p) { p.row_format = RowFormat::kV32; });
  const SwaDecode plan = SwaDecode::plan(rig.problem, Device::cpu(1));
  HostBuffer scratch(plan.workspace_bytes());
  Tensor out(DType::kBf16, {2, 4, 512});
  out.fill_bytes(0x11);
  const std::vector<uint8_t> before = out.bytes();
  SwaDecodeTensors good;
  good.q = rig.q;
  good.kv = rig.kv;
  good.inv_scale = rig.inv_scale;
  good.swa_indices = rig.indices64;
  good.swa_lens = rig.lens64;
  good.out = out;
  const auto refuse_run = [&](auto change) {
    SwaDecodeTensors tensors = good;
    change(tensors);
    EXPECT_THROW(plan.run(tensors, scratch.workspace()), Error);
  };
  const Tensor narrow_q(DType::kBf16, {2, 4, 576}), few_lists(DType::kI32, {1, 40});
  const Tensor other_width(DType::kI32, {2, 41}), few_lens(DType::kI32, {1});
  const Tensor deep(DType::kI32, {2, 2, 40}), floats(DType::kF32, {2, 40}),
      pages(DType::kU8, {8, 8 * 512 - 1});
  refuse_run([&](SwaDecodeTensors& t) { t.q = narrow_q; });
  refuse_run([&](SwaDecodeTensors& t) { t.kv = pages; });
  refuse_run([](SwaDecodeTensors& t) { t.inv_scale = {}; });
  for (const Tensor* const lists : {&few_lists, &other_width, &deep, &floats})
    refuse_run([&](SwaDecodeTensors& t) { t.swa_indices = *lists; });
  refuse_run([&](SwaDecodeTensors& t) { t.swa_lens = few_lens; });
  refuse_run([](SwaDecodeTensors& t) { t.out = {}; });
  EXPECT_EQ(out.bytes(), before);
}

}  // namespace
}  // namespace fovea
