#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "fovea/numeric.h"
#include "tests/serving/dsa_random_steps.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

// What the specification of the backend asks of whole forwards and no other suite states;
// docs/testing.md lists where each item of its acceptance list is tested.
namespace fovea {
namespace {

using test::DsaRig;
using test::RowResult;
using test::RowResults;
using test::StepOptions;

constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;

class DsaAcceptanceTest : public test::RigTest {};
INSTANTIATE_TEST_SUITE_P(Formats, DsaAcceptanceTest,
                         testing::Combine(testing::ValuesIn(test::kDevices),
                                          testing::Values(RowFormat::kBf16, RowFormat::kV32)),
                         test::rig_test_name);

RowResults prompt(const DsaConfig& config, const StepOptions& options = {}, int threads = 1) {
  DsaRig rig(config, threads);
  rig.step(kExtend, {{0, 45}, {1, 9}}, options);
  rig.step(kDecode, {{1, 1}, {0, 1}}, {.padded_rows = 0, .host_lengths = options.host_lengths});
  return rig.results();
}

std::vector<double> values(const RowResult& row) {
  std::vector<double> result;
  for (const uint16_t bits : row.out) result.push_back(double{bf16_to_float(bf16_t{bits})});
  return result;
}

// The wrong style is invisible until a row has to choose.
TEST_P(DsaAcceptanceTest, TheRopeStyleShowsOnlyInRowsLongerThanTopk) {
  DsaConfig config = DsaRig::small_config(4, format());
  const RowResults half = prompt(config);
  config.index_rope_style = RopeStyle::kInterleaved;
  const RowResults interleaved = prompt(config);
  ASSERT_EQ(half.size(), 56u);
  int other = 0, longer = 0;
  for (const auto& [key, row] : half) {
    const bool differs = row.positions != interleaved.at(key).positions;
    if (key.second + 1 > config.topk) {
      ++longer;
      other += differs ? 1 : 0;
    } else {
      EXPECT_TRUE(row == interleaved.at(key)) << key.first << " " << key.second;
    }
  }
  EXPECT_GT(other, longer / 2);
}

TEST_P(DsaAcceptanceTest, ChunksOfAPromptAndOfItsLogitsChangeNoBit) {
  DsaConfig config = DsaRig::small_config(4, format());
  const RowResults whole = prompt(config);
  for (const int64_t budget : {int64_t{1}, int64_t{700}, int64_t{1} << 20}) {
    config.logits_budget_bytes = budget;
    for (const int chunk : {1, 7, 16, 45}) {
      DsaRig rig(config, 1 + chunk % 2, static_cast<uint64_t>(chunk));
      for (int first = 0; first < 45; first += chunk) {
        rig.step(kExtend, {{0, std::min(chunk, 45 - first)}});
      }
      rig.step(kExtend, {{1, 9}});
      ASSERT_EQ(rig.results().size(), 54u);
      for (const auto& [key, row] : rig.results()) {
        ASSERT_TRUE(row == whole.at(key))
            << key.first << " " << key.second << ", chunks of " << chunk << ", budget " << budget;
      }
    }
  }
}

TEST_P(DsaAcceptanceTest, TwentyRepeatsAreBitEqual) {
  const DsaConfig config = DsaRig::small_config(4, format());
  const RowResults first = prompt(config);
  for (int repeat = 0; repeat < 20; ++repeat) {
    ASSERT_TRUE(prompt(config, {}, 1 + repeat % 3) == first) << "repeat " << repeat;
  }
}

TEST_P(DsaAcceptanceTest, WithoutHostLengthsRowsStayWithinTolerance) {
  DsaConfig config = DsaRig::small_config(4, format());
  const StepOptions none{.padded_rows = 0, .host_lengths = false};
  EXPECT_TRUE(prompt(config, none) == prompt(config));  // deterministic: no bit changes
  config.deterministic = false;
  config.prefill_implementation = "contiguous_bf16";  // which needs host lengths
  const RowResults with = prompt(config), without = prompt(config, none);
  for (const auto& [key, row] : with) {
    EXPECT_EQ(row.positions, without.at(key).positions);
    // On a GPU two kernels, which round weights that differ by a factor (docs/sparse_mla.md).
    if (test::RigDevice::get(1).kind == DeviceKind::kCuda) {
      EXPECT_LT(test::relative_rms(values(without.at(key)), values(row)), 5e-3);
    } else {
      EXPECT_TRUE(test::ExpectClose(values(without.at(key)), values(row), test::kBf16Output));
    }
  }
}

TEST(DsaAcceptance, EveryLocalHeadCountFollowsTheModel) {
  for (const int64_t heads : {8, 16, 32, 96, 128}) {
    test::RandomStepsSetup setup{"heads", test::random_steps_config(4, RowFormat::kV32)};
    setup.config.num_heads = heads;
    test::RandomSteps engine(setup, 3);
    while (engine.counts().total_steps() < 40) ASSERT_NO_THROW(engine.step()) << heads;
    engine.finish();
    EXPECT_GT(engine.counts().rows, 40);
  }
}

}  // namespace
}  // namespace fovea
