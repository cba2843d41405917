#include "tests/serving/dsa_random_steps.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "tests/support/sanitizers.h"

namespace fovea {
namespace {

using test::check_contents;
using test::random_steps_config;
using test::RandomSteps;
using test::RandomStepsCounts;
using test::RandomStepsSetup;

struct Failure {
  uint64_t seed = 0;
  int64_t steps = 0;
  std::string text;
};

// At least `steps` forwards, then everything is released.
std::optional<Failure> run(const RandomStepsSetup& setup, uint64_t seed, int64_t steps,
                           RandomStepsCounts* counts) {
  RandomSteps engine(setup, seed);
  try {
    while (engine.counts().total_steps() < steps) engine.step();
    engine.finish();
  } catch (const std::exception& error) {
    Failure failure{seed, engine.counts().total_steps(),
                    "seed " + std::to_string(seed) + ": " + error.what()};
    failure.text += "\nthe last of " + std::to_string(failure.steps) + " steps:";
    for (const std::string& line : engine.log()) failure.text += "\n  " + line;
    return failure;
  }
  *counts = engine.counts();
  return std::nullopt;
}

// Other seeds may fail sooner: the shortest history says most.
Failure shortest(const RandomStepsSetup& setup, Failure failure) {
  for (uint64_t seed = 1; seed <= 40 && failure.steps > 1; ++seed) {
    RandomStepsCounts unused;
    if (auto sooner = run(setup, seed, failure.steps - 1, &unused)) failure = *sooner;
  }
  return failure;
}

class DsaRandomStepsTest : public testing::TestWithParam<RandomStepsSetup> {
 protected:
  static void expect_no_difference(const RandomStepsSetup& setup, uint64_t seed, int64_t steps) {
    RandomStepsCounts counts;
    const auto failure = run(setup, seed, steps, &counts);
    if (failure) FAIL() << shortest(setup, *failure).text;
    RecordProperty("steps", std::to_string(counts.total_steps()));
    RecordProperty("rows", std::to_string(counts.rows));
    // The run met what it is there for.
    EXPECT_GE(counts.total_steps(), steps);
    EXPECT_EQ(counts.steps.size(), 7u) << "some mode never ran";
    EXPECT_GT(counts.plan_steps, steps / 10);
    if (setup.config.rows_per_request > 2) {
      EXPECT_GT(counts.draft_chains, steps / 100);
    }
    EXPECT_GT(counts.prefix_hits, steps / 20);
    EXPECT_GT(counts.rejected_tokens, steps / 10);
    EXPECT_GT(counts.preemptions, steps / 100);
    EXPECT_LT(counts.unclear_rows * 1000, counts.rows);
    if (setup.bit_equal) {
      EXPECT_GT(counts.repeated_rows, steps / 10);
    }
  }
};

std::vector<RandomStepsSetup> setups() {
  std::vector<RandomStepsSetup> all;
  const auto add = [&](const char* name, int64_t page_size, RowFormat format) -> RandomStepsSetup& {
    all.push_back({name, random_steps_config(page_size, format)});
    return all.back();
  };
  add("v32_pages_of_4", 4, RowFormat::kV32);
  {
    RandomStepsSetup& setup = add("bf16_pages_of_1_checked", 1, RowFormat::kBf16);
    setup.threads = 2;
    check_contents(setup.config);
  }
  {
    DsaConfig& config = add("bf16_pages_of_7_checked", 7, RowFormat::kBf16).config;
    config.logits_budget_bytes = 200;
    check_contents(config);
  }
  {
    DsaConfig& config = add("v32_pages_of_16_pow2", 16, RowFormat::kV32).config;
    config.kv_scale_mode = config.index_scale_mode = ScaleMode::kPow2;
    config.index_rope_style = RopeStyle::kInterleaved;
    config.hadamard = false;
    config.topk = 9;
    config.rows_per_request = 2;
  }
  add("f576_pages_of_4", 4, RowFormat::kF576);
  {
    DsaConfig& config = add("v32_mapped_later_verified", 4, RowFormat::kV32).config;
    config.fuse_transform = false;
    config.verify_metadata = true;
  }
  {
    RandomStepsSetup& setup = add("v32_split_plan", 4, RowFormat::kV32);
    setup.config.deterministic = false;
    setup.config.split_parts = 5;
    setup.bit_equal = false;
  }
  {
    RandomStepsSetup& setup = add("v32_contiguous_checked", 4, RowFormat::kV32);
    setup.config.deterministic = false;
    setup.config.prefill_implementation = "contiguous_bf16";
    setup.bit_equal = false;
    check_contents(setup.config);
  }
  {
    RandomStepsSetup& setup = add("v32_contiguous_mapped_later", 3, RowFormat::kV32);
    setup.config.deterministic = false;
    setup.config.prefill_implementation = "contiguous_bf16";
    setup.config.fuse_transform = false;
    setup.bit_equal = false;
    setup.threads = 2;
  }
  {
    DsaConfig& config = add("v32_five_rows_checked", 4, RowFormat::kV32).config;
    config.rows_per_request = 5;
    check_contents(config);
    config.table_width = RandomSteps::kMaxContext + 5;
    config.num_heads = 3;
    config.index_heads = 5;
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Setups, DsaRandomStepsTest, testing::ValuesIn(setups()),
                         [](const auto& setup) { return setup.param.name; });

TEST_P(DsaRandomStepsTest, EveryByteFieldAndRowIsThatOfThePlainModel) {
  expect_no_difference(GetParam(), 20261, test::by_build(1300, 400));
}

class FullDsaRandomStepsTest : public DsaRandomStepsTest {};
INSTANTIATE_TEST_SUITE_P(Setups, FullDsaRandomStepsTest, testing::ValuesIn(setups()),
                         [](const auto& setup) { return setup.param.name; });

TEST_P(FullDsaRandomStepsTest, ManySeeds) {
  for (uint64_t seed = 1; seed <= 8; ++seed) expect_no_difference(GetParam(), seed, 3000);
}

}  // namespace
}  // namespace fovea
