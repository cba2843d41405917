#include "fovea/merge_lse.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fovea/error.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();

class MergeLseTest : public test::TargetTest {
 protected:
  void merge(const MergeLseProblem& problem, const MergeLseTensors& tensors, int threads = 1) {
    const MergeLse plan = MergeLse::plan(problem, GetParam().device(threads), GetParam().options());
    HostBuffer buffer(plan.workspace_bytes());
    plan.run(tensors, buffer.workspace());
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MergeLseTest, testing::ValuesIn(test::targets_of("merge_lse")),
                         test::target_name);

TEST_P(MergeLseTest, WeightsPartsByTheirSumsOfExponentials) {
  // Sums 2 and 8, outputs 10 and 0: (2 * 10 + 8 * 0) / 10 = 2. A base-2 reading of the lse would
  // give 2.767.
  const Tensor parts = Tensor::f32({2, 1, 1, 1}, {10.0f, 0.0f});
  const Tensor lse_parts = Tensor::f32({2, 1, 1}, {std::log(2.0f), std::log(8.0f)});
  Tensor out(DType::kF32, {1, 1, 1}), lse(DType::kF32, {1, 1});
  merge({2, 1, 1, 1, DType::kF32}, {parts, lse_parts, {}, out, lse});
  EXPECT_NEAR(out.data<float>()[0], 2.0f, 1e-6f);
  EXPECT_NEAR(lse.data<float>()[0], std::log(10.0f), 1e-6f);
}

TEST_P(MergeLseTest, EmptyPartsLeaveTheOtherBitExactAndAreNotRead) {
  test::Rng rng(1);
  const std::vector<float> values = rng.normals(21);
  for (const float empty : {-kInf, kInf, std::nanf("")}) {
    for (int live = 0; live < 2; ++live) {
      std::vector<float> both(42, std::nanf(""));
      std::copy(values.begin(), values.end(), both.begin() + 21 * live);
      const Tensor parts = Tensor::f32({2, 1, 1, 21}, both);
      const Tensor lse_parts =
          Tensor::f32({2, 1, 1}, {live == 0 ? 3.25f : empty, live == 1 ? 3.25f : empty});
      Tensor out(DType::kF32, {1, 1, 21}), lse(DType::kF32, {1, 1});
      merge({2, 1, 1, 21, DType::kF32}, {parts, lse_parts, {}, out, lse});
      EXPECT_EQ(out.values<float>(), values);
      EXPECT_EQ(lse.data<float>()[0], 3.25f);
    }
  }
}

TEST_P(MergeLseTest, NothingButEmptyPartsGivesZeroAndMinusInfinity) {
  Tensor parts(DType::kBf16, {3, 2, 5, 19});
  parts.fill_bytes(0xFF);
  const Tensor lse_parts = Tensor::f32({3, 2, 5}, std::vector<float>(30, -kInf));
  const Tensor sink = Tensor::f32({5}, {0.0f, kInf, -kInf, 1e38f, -1e38f});
  Tensor out(DType::kBf16, {2, 5, 19}), lse(DType::kF32, {2, 5});
  out.fill_bytes(0xFF);
  merge({3, 2, 5, 19, DType::kBf16}, {parts, lse_parts, sink, out, lse});
  EXPECT_EQ(out.bytes(), std::vector<uint8_t>(out.bytes().size(), 0));
  for (const float value : lse.values<float>()) EXPECT_EQ(value, -kInf);
}

TEST_P(MergeLseTest, AgreesWithTheReferenceForAnyThreadCount) {
  test::Rng rng(2);
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Tensor parts = dtype == DType::kF32
                             ? Tensor::f32({7, 3, 5, 77}, rng.normals(7 * 3 * 5 * 77))
                             : Tensor::bf16({7, 3, 5, 77}, rng.bf16_normals(7 * 3 * 5 * 77));
    std::vector<float> lse_values = rng.normals(7 * 3 * 5, 20.0f);
    for (size_t i = 0; i < lse_values.size(); i += 4) lse_values[i] = -kInf;
    const Tensor lse_parts = Tensor::f32({7, 3, 5}, lse_values);
    const Tensor sink = Tensor::f32({5}, {1.0f, kInf, -kInf, 1e38f, -30.0f});
    Tensor expected(dtype, {3, 5, 77}), expected_lse(DType::kF32, {3, 5});
    const MergeLseProblem problem{7, 3, 5, 77, dtype};
    test::run(MergeLse::plan(problem, Device::cpu(1), {"ref"}),
              {parts, lse_parts, sink, expected, expected_lse});
    Tensor first;
    for (const int threads : {1, 2, 3}) {
      Tensor out(dtype, {3, 5, 77}), lse(DType::kF32, {3, 5});
      merge(problem, {parts, lse_parts, sink, out, lse}, threads);
      EXPECT_TRUE(test::ExpectClose(out.view(), expected.view(), test::kBf16Output));
      EXPECT_TRUE(test::ExpectClose(lse.view(), expected_lse.view(), test::kLse));
      if (threads == 1) first = out;
      EXPECT_EQ(out.bytes(), first.bytes());
    }
  }
}

TEST(MergeLse, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  EXPECT_THROW(MergeLse::plan({0, 1, 1, 1, DType::kF32}, cpu), Error);
  EXPECT_THROW(MergeLse::plan({1, 1, 1, 1, DType::kU8}, cpu), Error);
  EXPECT_THROW(MergeLse::plan({1, 1, 1, 1, DType::kF32}, cpu, {"nonsense"}), Error);
  const MergeLse plan = MergeLse::plan({2, 4, 1, 8, DType::kF32}, cpu);
  Tensor parts(DType::kF32, {2, 5, 1, 8}), lse_parts(DType::kF32, {2, 5, 1}),
      out(DType::kF32, {5, 1, 8}), lse(DType::kF32, {5, 1});
  HostBuffer buffer(plan.workspace_bytes());
  // 5 rows, planned for 4
  EXPECT_THROW(plan.run({parts, lse_parts, {}, out, lse}, buffer.workspace()), Error);
}

}  // namespace
}  // namespace fovea
