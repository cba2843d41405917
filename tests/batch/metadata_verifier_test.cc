#include <gtest/gtest.h>

#include <map>

#include "fovea/error.h"
#include "fovea/metadata.h"
#include "tests/batch/step_arrays.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

namespace fovea {
namespace {

using test::kUntouched;
using test::StepArrays;
using test::Tensor;

constexpr std::array kModes = {ForwardMode::kExtend,       ForwardMode::kMixed,
                               ForwardMode::kDecode,       ForwardMode::kIdle,
                               ForwardMode::kTargetVerify, ForwardMode::kDraftExtend,
                               ForwardMode::kDraftExtendV2};
constexpr int kSteps = 5;
constexpr int64_t kRequests = 3;
constexpr int64_t kRows = 16;
constexpr int64_t kWidth = 50;

MetadataProblem problem_of(ForwardMode mode) {
  MetadataProblem problem;
  problem.mode = mode;
  problem.max_requests = kRequests;
  problem.max_rows = kRows;
  problem.table_width = kWidth;
  problem.rows_per_request = 2;
  problem.topk = 9;
  problem.page_size = 4;
  problem.workers = 3;
  problem.split_parts = 2;
  if (mode == ForwardMode::kExtend) problem.transform = IndexTransform::kRagged;
  return problem;
}

bool is_extend(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
}

// Five refreshed steps of three requests.
struct Refreshed {
  Refreshed(ForwardMode mode, const Options& options, int64_t padded_rows, uint64_t seed,
            bool hostile = false)
      : problem(problem_of(mode)),
        seq_len(DType::kI32, {kRequests}),
        pool_row(DType::kI32, {kRequests}),
        ext_len(DType::kI32, {kRequests}),
        req_to_token(DType::kI32, {4, kWidth}) {
    test::Rng rng(seed);
    for (int64_t r = 0; r < kRequests; ++r) {
      seq_len.data<int32_t>()[r] = static_cast<int32_t>(rng.integer(hostile ? -5 : 5, 40));
      pool_row.data<int32_t>()[r] = static_cast<int32_t>(rng.integer(0, hostile ? 9 : 3));
      ext_len.data<int32_t>()[r] = static_cast<int32_t>(rng.integer(hostile ? -2 : 1, 4));
    }
    for (int64_t i = 0; i < 4 * kWidth; ++i) {
      req_to_token.data<int32_t>()[i] = static_cast<int32_t>(rng.integer(hostile ? -9 : 0, 9999));
    }
    tensors.seq_len = seq_len;
    tensors.pool_row = pool_row;
    tensors.req_to_token = req_to_token;
    if (is_extend(mode) || mode == ForwardMode::kDraftExtend) tensors.ext_len = ext_len;
    tensors.padded_rows = padded_rows;
    tensors.num_steps = kSteps;
    for (int step = 0; step < kSteps; ++step) steps.emplace_back(problem, 4, kRows, kRows, 13);
    for (size_t step = 0; step < kSteps; ++step) {
      tensors.steps[step] = steps[step].fields();
      const bool decode = mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
      if (decode) tensors.kv_len_delta[step] = static_cast<int32_t>(step) + 1;
    }
    test::run(MetadataRefresh::plan(problem, test::device_of(options, 2), options), tensors);
  }
  Refreshed(const Refreshed&) = delete;
  Refreshed& operator=(const Refreshed&) = delete;

  MetadataProblem problem;
  Tensor seq_len, pool_row, ext_len, req_to_token;
  std::vector<StepArrays> steps;
  MetadataTensors tensors;
};

// The text of the mismatch; empty when there is none.
std::string mismatch_of(MetadataVerifier& verifier, const MetadataTensors& tensors) {
  try {
    verifier.verify(tensors);
    return {};
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    return error.what();
  }
}

class MetadataVerifierTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, MetadataVerifierTest,
                         testing::ValuesIn(test::targets_of("metadata_refresh")),
                         test::target_name);

TEST_P(MetadataVerifierTest, AnUntouchedRefreshPasses) {
  for (const ForwardMode mode : kModes) {
    for (const int64_t padded_rows : {0, 14}) {
      for (uint64_t seed = 1; seed <= 8; ++seed) {
        Refreshed refreshed(mode, GetParam().options(), padded_rows, seed, seed % 2 == 0);
        MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
        EXPECT_EQ(mismatch_of(verifier, refreshed.tensors), "") << to_string(mode);
      }
    }
  }
}

// Every written entry of every field, changed alone, in the first step and in the fourth of five.
TEST_P(MetadataVerifierTest, EveryWrittenEntryIsComparedInEveryModeAndStep) {
  for (const ForwardMode mode : kModes) {
    for (const int64_t padded_rows : {0, 14}) {
      Refreshed refreshed(mode, GetParam().options(), padded_rows, 3);
      MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
      std::map<std::string, int> caught, fields;
      for (const size_t step : {size_t{0}, size_t{3}}) {
        for (const auto& [name, tensor] : refreshed.steps[step].named()) {
          auto* const values = tensor->data<int32_t>();
          for (int64_t i = 0; i < tensor->view().num_elements(); ++i) {
            const int32_t right = values[i];
            // What the refresh has not written: the arrays started with this value.
            const bool written = right != kUntouched;
            values[i] = right ^ 64;
            const std::string text = mismatch_of(verifier, refreshed.tensors);
            values[i] = right;
            ASSERT_EQ(text.empty(), !written) << name << "[" << i << "], " << to_string(mode);
            if (!written) continue;
            const bool is_table = tensor->view().rank == 2;
            const int64_t columns = is_table ? tensor->view().shape[1] : 0;
            const std::string index =
                is_table ? "[" + std::to_string(i / columns) + "][" + std::to_string(i % columns)
                         : "[" + std::to_string(i);
            ASSERT_EQ(text.find("mismatch: metadata_refresh: step " + std::to_string(step) + ": " +
                                name + index + "] = " + std::to_string(right ^ 64) + ", expected " +
                                std::to_string(right) + "; 1 of "),
                      0u)
                << text;
            ++caught[name];
          }
        }
      }
      // kUntouched stands for "not written" only where a mode lacks a field.
      for (const char* name : {"kv_len", "kv_indptr", "max_kv_len", "q_indptr", "max_q_len",
                               "page_table", "row_to_request", "row_len", "topk_length",
                               "topk_indptr", "ext_len", "split_schedule", "split_indptr"}) {
        EXPECT_GT(caught[name], 0) << name << ", " << to_string(mode);
      }
      EXPECT_EQ(caught["k_start"] > 0, is_extend(mode));
      EXPECT_EQ(caught["k_end"] > 0, is_extend(mode));
      EXPECT_EQ(caught["row_offset"] > 0, mode == ForwardMode::kExtend);
      EXPECT_EQ(caught["schedule"] > 0, !is_extend(mode));
      const int rows = padded_rows == 0 ? kRows : static_cast<int>(padded_rows);
      EXPECT_EQ(caught["topk_length"], 2 * rows) << "padding is compared too";
      EXPECT_EQ(caught["split_indptr"], 2 * (rows + 1));
      EXPECT_EQ(mismatch_of(verifier, refreshed.tensors), "");
    }
  }
}

TEST_P(MetadataVerifierTest, TheMessageNamesTheFirstDifferenceAndCountsAll) {
  Refreshed refreshed(ForwardMode::kDecode, GetParam().options(), 14, 5);
  MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
  auto* const topk_indptr = refreshed.steps[1].topk_indptr.data<int32_t>();
  const int32_t right = topk_indptr[7];
  for (const int i : {7, 9, 14}) topk_indptr[i] += 1;
  refreshed.steps[1].ext_len.data<int32_t>()[0] = 5;    // a later field
  refreshed.steps[4].kv_len.data<int32_t>()[0] = -123;  // a later step
  EXPECT_EQ(mismatch_of(verifier, refreshed.tensors),
            "mismatch: metadata_refresh: step 1: topk_indptr[7] = " + std::to_string(right + 1) +
                ", expected " + std::to_string(right) + "; 3 of 15 entries differ");
}

TEST_P(MetadataVerifierTest, StaleArraysOfALargerBatchAreFound) {
  for (const ForwardMode mode : kModes) {
    Refreshed refreshed(mode, GetParam().options(), 0, 6);
    MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
    refreshed.seq_len.data<int32_t>()[1] -= 3;  // lengths moved on, nobody refreshed
    EXPECT_NE(mismatch_of(verifier, refreshed.tensors).find("step 0: kv_len[1]"),
              std::string::npos);
  }
}

TEST_P(MetadataVerifierTest, StridedTablesAndSharedKvLenAreUnderstood) {
  Refreshed refreshed(ForwardMode::kDecode, GetParam().options(), 0, 7);
  MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
  Tensor wide(DType::kI32, {4, 20});
  refreshed.tensors.num_steps = 1;
  MetadataFields& fields = refreshed.tensors.steps[0];
  fields.page_table = wide;
  fields.page_table.shape[1] = 13;
  fields.kv_len.shape[0] = fields.row_to_request.shape[0] = kRequests;
  fields.row_len = fields.kv_len;
  test::run(MetadataRefresh::plan(refreshed.problem, GetParam().device(1), GetParam().options()),
            refreshed.tensors);
  EXPECT_EQ(mismatch_of(verifier, refreshed.tensors), "");
  wide.data<int32_t>()[2 * 20] += 1;
  EXPECT_NE(mismatch_of(verifier, refreshed.tensors).find("step 0: page_table[2][0]"),
            std::string::npos);
}

TEST_P(MetadataVerifierTest, ArraysBeyondTheBoundsOfThePlanAreVerified) {
  MetadataProblem problem = problem_of(ForwardMode::kDecode);
  StepArrays arrays(problem, 4, 500, 700, 40);
  Refreshed refreshed(ForwardMode::kDecode, GetParam().options(), 0, 8);
  refreshed.tensors.num_steps = 1;
  refreshed.tensors.steps[0] = arrays.fields();
  test::run(MetadataRefresh::plan(problem, GetParam().device(1), GetParam().options()),
            refreshed.tensors);
  MetadataVerifier verifier(problem, Device::cpu(1));
  EXPECT_EQ(mismatch_of(verifier, refreshed.tensors), "");
  arrays.topk_indptr.data<int32_t>()[700] += 1;
  EXPECT_NE(mismatch_of(verifier, refreshed.tensors).find("topk_indptr[700]"), std::string::npos);
}

TEST_P(MetadataVerifierTest, ChangesNothingAndAllocatesNothingWhenAllIsRight) {
  Refreshed refreshed(ForwardMode::kTargetVerify, GetParam().options(), 14, 9);
  MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
  std::vector<std::vector<uint8_t>> before;
  for (StepArrays& step : refreshed.steps) {
    for (const auto& [name, tensor] : step.named()) before.push_back(tensor->bytes());
  }
  {
    const test::AllocationCounter counter;
    verifier.verify(refreshed.tensors);
    EXPECT_EQ(counter.count(), 0);
  }
  size_t i = 0;
  for (StepArrays& step : refreshed.steps) {
    for (const auto& [name, tensor] : step.named()) EXPECT_EQ(tensor->bytes(), before[i++]) << name;
  }
}

TEST(MetadataVerifier, RefusesWhatMetadataRefreshRefuses) {
  MetadataProblem bad = problem_of(ForwardMode::kDecode);
  bad.page_size = 0;
  EXPECT_THROW(MetadataVerifier(bad, Device::cpu(1)), Error);
  Refreshed refreshed(ForwardMode::kDecode, {}, 0, 10);
  MetadataVerifier verifier(refreshed.problem, Device::cpu(1));
  refreshed.tensors.steps[2].topk_length = {};
  try {
    verifier.verify(refreshed.tensors);
    ADD_FAILURE() << "accepted a missing field";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
  // Scratch at bounds that no memory holds.
  MetadataProblem huge = problem_of(ForwardMode::kDecode);
  huge.max_requests = huge.table_width = (int64_t{1} << 31) - 2;
  huge.page_size = 1;
  try {
    const MetadataVerifier impossible(huge, Device::cpu(1));
    ADD_FAILURE() << "accepted bounds of 2^62 entries";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

}  // namespace
}  // namespace fovea
