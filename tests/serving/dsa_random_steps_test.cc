#include "tests/serving/dsa_random_steps.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace fovea {
namespace {

using test::random_steps_config;
using test::RandomSteps;
using test::RandomStepsCounts;
using test::RandomStepsSetup;

struct Failure {
  uint64_t seed = 0;
  int64_t call = 0;
  std::string text;
};

// Runs `calls` calls of step(), then releases everything.
std::optional<Failure> run(const RandomStepsSetup& setup, uint64_t seed, int64_t calls,
                           RandomStepsCounts* counts) {
  RandomSteps steps(setup, seed);
  int64_t call = 0;
  try {
    for (; call < calls; ++call) steps.step();
    steps.finish();
  } catch (const std::exception& error) {
    Failure failure{seed, call,
                    "seed " + std::to_string(seed) + ", after " + std::to_string(call) +
                        " calls: " + error.what()};
    for (const std::string& line : steps.log()) failure.text += "\n  " + line;
    return failure;
  }
  counts->add(steps.counts());
  return std::nullopt;
}

// Other seeds may fail the same way sooner: the shortest history says most.
Failure shortest(const RandomStepsSetup& setup, Failure failure) {
  for (uint64_t seed = 1; seed <= 40 && failure.call > 1; ++seed) {
    RandomStepsCounts unused;
    if (auto sooner = run(setup, seed, failure.call, &unused)) failure = *sooner;
  }
  return failure;
}

class DsaRandomStepsTest : public testing::Test {
 protected:
  void expect_no_difference(const RandomStepsSetup& setup, uint64_t seed, int64_t calls) {
    RandomStepsCounts counts;
    const auto failure = run(setup, seed, calls, &counts);
    if (failure) FAIL() << shortest(setup, *failure).text;
    RecordProperty("steps", std::to_string(counts.total_steps()));
    RecordProperty("rows", std::to_string(counts.rows));
    EXPECT_GE(counts.total_steps(), calls);
    EXPECT_EQ(counts.steps.size(), 7u) << "some mode never ran";
    EXPECT_GT(counts.plan_steps, calls / 10);
    EXPECT_GT(counts.draft_chains, 0);
    EXPECT_GT(counts.prefix_hits, calls / 10);
    EXPECT_GT(counts.rejected_tokens, calls / 10);
    EXPECT_GT(counts.preemptions, 0);
    EXPECT_LT(counts.unclear_rows * 1000, counts.rows);
    if (setup.bit_equal) {
      EXPECT_GT(counts.repeated_rows, calls / 10);
    }
  }
};

TEST_F(DsaRandomStepsTest, V32Pages4) {
  expect_no_difference({random_steps_config(4, RowFormat::kV32)}, 1, 1300);
}

}  // namespace
}  // namespace fovea
