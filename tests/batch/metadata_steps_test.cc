#include <gtest/gtest.h>

#include <map>

#include "fovea/error.h"
#include "fovea/metadata.h"
#include "tests/batch/metadata_oracle.h"
#include "tests/batch/step_arrays.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

// metadata_refresh over whole batches: against an oracle, as a replay over older contents, for
// several steps in one call, at the limits of lengths.

namespace fovea {
namespace {

using test::Batch;
using test::kUntouched;
using test::metadata_oracle;
using test::StepArrays;
using test::Tensor;
using test::Values;
using Fields = std::map<std::string, Values>;

constexpr std::array kModes = {ForwardMode::kExtend,       ForwardMode::kMixed,
                               ForwardMode::kDecode,       ForwardMode::kIdle,
                               ForwardMode::kTargetVerify, ForwardMode::kDraftExtend,
                               ForwardMode::kDraftExtendV2};
constexpr int64_t kWidth = 90;
constexpr int64_t kMaxRequests = 6;
constexpr int64_t kMaxRows = 40;
constexpr int32_t kMostRows = 6;  // of one request

bool is_extend(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
}
bool is_decode(ForwardMode mode) {
  return mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
}

MetadataProblem problem_of(ForwardMode mode, int64_t page_size = 4) {
  MetadataProblem problem;
  problem.mode = mode;
  problem.max_requests = kMaxRequests;
  problem.max_rows = kMaxRows;
  problem.table_width = kWidth;
  problem.rows_per_request = 3;
  problem.topk = 20;
  problem.page_size = page_size;
  problem.workers = 5;
  problem.split_parts = 7;
  if (mode == ForwardMode::kExtend) problem.transform = IndexTransform::kRagged;
  return problem;
}

int64_t columns_of(const MetadataProblem& problem) {
  return (problem.table_width + problem.page_size - 1) / problem.page_size;
}

// The arrays of a bucket: sized for the largest batch.
StepArrays bucket(const MetadataProblem& problem) {
  return StepArrays(problem, kMaxRequests, kMaxRows, kMaxRows, columns_of(problem));
}

Batch random_batch(test::Rng& rng, const MetadataProblem& problem, int64_t requests,
                   int64_t longest = kWidth, int64_t most_rows = kMostRows) {
  Batch batch;
  batch.req_to_token.resize(kMaxRequests + 2);
  for (Values& row : batch.req_to_token) {
    for (int64_t i = 0; i < kWidth; ++i) {
      row.push_back(static_cast<int32_t>(rng.integer(0, 1 << 20)));
    }
  }
  if (problem.mode == ForwardMode::kTargetVerify) longest -= problem.rows_per_request;
  for (int64_t r = 0; r < requests; ++r) {
    batch.seq_len.push_back(static_cast<int32_t>(rng.integer(0, longest)));
    batch.pool_row.push_back(static_cast<int32_t>(rng.integer(0, kMaxRequests + 1)));
    batch.ext_len.push_back(static_cast<int32_t>(rng.integer(0, most_rows)));
  }
  return batch;
}

// A batch as tensors, and the call.
struct Call {
  Call(const MetadataProblem& problem, const Batch& batch)
      : seq_len(Tensor::i32({size(batch.seq_len)}, batch.seq_len)),
        pool_row(Tensor::i32({size(batch.pool_row)}, batch.pool_row)),
        ext_len(Tensor::i32({size(batch.ext_len)}, batch.ext_len)),
        req_to_token(DType::kI32, {size(batch.req_to_token), problem.table_width}) {
    for (size_t r = 0; r < batch.req_to_token.size(); ++r) {
      std::copy(batch.req_to_token[r].begin(), batch.req_to_token[r].end(),
                req_to_token.data<int32_t>() + static_cast<int64_t>(r) * problem.table_width);
    }
    tensors.seq_len = seq_len;
    tensors.pool_row = pool_row;
    tensors.req_to_token = req_to_token;
    if (is_extend(problem.mode) || problem.mode == ForwardMode::kDraftExtend) {
      tensors.ext_len = ext_len;
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  template <class List>
  static int64_t size(const List& list) {
    return static_cast<int64_t>(list.size());
  }

  Tensor seq_len, pool_row, ext_len, req_to_token;
  MetadataTensors tensors;
};

// What a refresh writes of the fields that the mode has; page_table as the pages of each request.
Fields written(const MetadataProblem& problem, const MetadataTensors& tensors, StepArrays& arrays) {
  const int64_t requests = tensors.seq_len.shape[0];
  Fields fields;
  for (const auto& [name, tensor] : arrays.named()) {
    Values values = tensor->values<int32_t>();
    if (name == "kv_len" || name == "ext_len") {
      values.resize(static_cast<size_t>(requests));
    } else if (name == "kv_indptr" || name == "q_indptr") {
      values.resize(static_cast<size_t>(requests + 1));
    } else if (name == "page_table") {
      Values pages;
      for (int64_t r = 0; r < requests; ++r) {
        const auto row = values.begin() + r * tensor->view().shape[1];
        const int64_t len = arrays.kv_len.data<int32_t>()[r];
        pages.insert(pages.end(), row, row + (len + problem.page_size - 1) / problem.page_size);
      }
      values = pages;
    } else if (tensors.padded_rows > 0 && name.find("schedule") == std::string::npos &&
               name.find("max_") == std::string::npos) {
      const bool is_indptr = name.find("indptr") != std::string::npos;
      values.resize(static_cast<size_t>(tensors.padded_rows + (is_indptr ? 1 : 0)));
    }
    if ((name == "k_start" || name == "k_end") && !is_extend(problem.mode)) continue;
    if (name == "row_offset" && problem.transform != IndexTransform::kRagged) continue;
    if (name == "schedule" && is_extend(problem.mode)) continue;
    fields[name] = values;
  }
  return fields;
}

void expect_equal(const Fields& actual, const Fields& expected, const std::string& where) {
  for (const auto& [name, values] : expected) {
    const auto found = actual.find(name);
    ASSERT_NE(found, actual.end()) << name << ", " << where;
    ASSERT_EQ(found->second, values) << name << ", " << where;
  }
}

class MetadataStepsTest : public test::TargetTest {
 protected:
  void run(const MetadataProblem& problem, const MetadataTensors& tensors, int threads = 1) {
    test::run(MetadataRefresh::plan(problem, GetParam().device(threads), GetParam().options()),
              tensors);
  }

  void run(const MetadataProblem& problem, const Batch& batch, StepArrays& arrays,
           int64_t padded_rows = 0, int32_t delta = 0) {
    Call call(problem, batch);
    call.tensors.padded_rows = padded_rows;
    call.tensors.kv_len_delta[0] = delta;
    call.tensors.steps[0] = arrays.fields();
    run(problem, call.tensors);
  }

  Fields refreshed(const MetadataProblem& problem, const Batch& batch, StepArrays& arrays,
                   int64_t padded_rows = 0, int32_t delta = 0) {
    run(problem, batch, arrays, padded_rows, delta);
    Call call(problem, batch);
    call.tensors.padded_rows = padded_rows;
    return written(problem, call.tensors, arrays);
  }
};

// ---- random batches

class RandomBatches : public MetadataStepsTest {};
INSTANTIATE_TEST_SUITE_P(Targets, RandomBatches,
                         testing::ValuesIn(test::targets_of("metadata_refresh")),
                         test::target_name);

TEST_P(RandomBatches, EqualTheOracleInEveryMode) {
  test::Rng rng(71);
  for (int repeat = 0; repeat < 25; ++repeat) {
    for (const ForwardMode mode : kModes) {
      const MetadataProblem p = problem_of(mode, std::vector<int64_t>{1, 3, 4, 64}[rng.next() % 4]);
      const int32_t delta = is_decode(mode) ? static_cast<int32_t>(rng.integer(0, 8)) : 0;
      const Batch batch = random_batch(rng, p, rng.integer(0, kMaxRequests), kWidth - delta);
      const int64_t padded_rows = rng.integer(0, 1) == 0 ? 0 : rng.integer(36, kMaxRows);
      StepArrays arrays = bucket(p);
      const Fields actual = refreshed(p, batch, arrays, padded_rows, delta);
      const int64_t rows = padded_rows > 0 ? padded_rows : kMaxRows;
      const Fields expected = metadata_oracle(p, batch, delta, static_cast<size_t>(rows));
      EXPECT_EQ(actual.size(), expected.size());
      expect_equal(actual, expected, std::string(to_string(mode)));
    }
  }
}

TEST_P(RandomBatches, LengthsAroundTopkInEveryMode) {
  for (const ForwardMode mode : kModes) {
    const MetadataProblem p = problem_of(mode);
    test::Rng rng(72);
    Batch batch = random_batch(rng, p, 3);
    const int32_t addend =
        mode == ForwardMode::kTargetVerify ? static_cast<int32_t>(p.rows_per_request) : 0;
    const auto topk = static_cast<int32_t>(p.topk);
    batch.seq_len = {topk - 1 - addend, topk - addend, topk + 1 - addend};
    batch.ext_len = {1, 1, 1};
    StepArrays arrays = bucket(p);
    const Fields fields = refreshed(p, batch, arrays);
    // The last row of each request sees all of its keys.
    const int64_t n = is_decode(mode) || is_extend(mode) || mode == ForwardMode::kDraftExtend
                          ? 1
                          : p.rows_per_request;
    const Values last = {topk - 1, topk, topk};
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(fields.at("topk_length")[static_cast<size_t>((r + 1) * n - 1)],
                last[static_cast<size_t>(r)])
          << to_string(mode);
    }
    expect_equal(fields, metadata_oracle(p, batch, 0, kMaxRows), std::string(to_string(mode)));
  }
}

// ---- replay

class ReplayAfterLarger : public MetadataStepsTest {};
INSTANTIATE_TEST_SUITE_P(Targets, ReplayAfterLarger,
                         testing::ValuesIn(test::targets_of("metadata_refresh")),
                         test::target_name);

TEST_P(ReplayAfterLarger, EveryFieldEqualsAFreshBuildInEveryMode) {
  test::Rng rng(73);
  for (const ForwardMode mode : kModes) {
    for (const int64_t padded_rows : {int64_t{0}, int64_t{36}}) {
      const MetadataProblem p = problem_of(mode);
      for (const int64_t requests : {int64_t{0}, int64_t{1}, int64_t{3}, kMaxRequests}) {
        const Batch large = random_batch(rng, p, kMaxRequests);
        const Batch small = random_batch(rng, p, requests, 10, 1);
        StepArrays replayed = bucket(p), fresh = bucket(p);
        run(p, large, replayed, padded_rows);
        const Fields actual = refreshed(p, small, replayed, padded_rows);
        expect_equal(actual, refreshed(p, small, fresh, padded_rows),
                     std::string(to_string(mode)) + " of " + std::to_string(requests));
      }
    }
  }
}

TEST_P(ReplayAfterLarger, TheLargerOneMayHaveHadAnotherMode) {
  test::Rng rng(74);
  for (const ForwardMode before : kModes) {
    for (const ForwardMode mode : kModes) {
      const MetadataProblem p = problem_of(mode);
      const Batch large = random_batch(rng, problem_of(before), kMaxRequests);
      const Batch small = random_batch(rng, p, 3, 10, 1);
      StepArrays replayed = bucket(p), fresh = bucket(p);
      run(problem_of(before), large, replayed);
      expect_equal(refreshed(p, small, replayed), refreshed(p, small, fresh),
                   std::string(to_string(mode)) + " after " + std::string(to_string(before)));
    }
  }
}

TEST_P(ReplayAfterLarger, DraftExtendWithFewerAcceptedRowsRewritesItsTail) {
  const MetadataProblem p = problem_of(ForwardMode::kDraftExtend);
  test::Rng rng(75);
  Batch batch = random_batch(rng, p, 2);
  StepArrays arrays(p, 2, 6, 6, columns_of(p));  // bs * N rows
  batch.seq_len = {80, 70};
  batch.ext_len = {3, 3};
  run(p, batch, arrays);
  EXPECT_EQ(arrays.row_len.values<int32_t>(), (Values{78, 79, 80, 68, 69, 70}));
  EXPECT_EQ(arrays.split_indptr.values<int32_t>(), (Values{0, 1, 2, 3, 4, 5, 6}));
  batch.seq_len = {10, 4};
  batch.ext_len = {3, 1};
  run(p, batch, arrays);
  EXPECT_EQ(arrays.row_to_request.values<int32_t>(), (Values{0, 0, 0, 1, -1, -1}));
  EXPECT_EQ(arrays.row_len.values<int32_t>(), (Values{8, 9, 10, 4, 0, 0}));
  EXPECT_EQ(arrays.topk_length.values<int32_t>(), (Values{8, 9, 10, 4, 0, 0}));
  EXPECT_EQ(arrays.topk_indptr.values<int32_t>(), (Values{0, 8, 17, 27, 31, 31, 31}));
  // The schedule of logits has the four live rows; split_schedule all six.
  EXPECT_EQ(arrays.schedule.values<int32_t>(), (Values{0, 0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0}));
  EXPECT_EQ(arrays.split_indptr.values<int32_t>(), (Values{0, 1, 2, 3, 4, 5, 6}));
}

TEST_P(ReplayAfterLarger, FixedRowsRewriteTheirTailToo) {
  for (const ForwardMode mode : {ForwardMode::kTargetVerify, ForwardMode::kDraftExtendV2}) {
    const MetadataProblem p = problem_of(mode);
    test::Rng rng(76);
    StepArrays arrays(p, 3, 9, 9, columns_of(p));
    run(p, random_batch(rng, p, 3), arrays);
    Batch batch = random_batch(rng, p, 1);
    batch.seq_len = {mode == ForwardMode::kTargetVerify ? 7 : 10};
    run(p, batch, arrays);
    EXPECT_EQ(arrays.row_to_request.values<int32_t>(), (Values{0, 0, 0, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(arrays.row_len.values<int32_t>(), (Values{8, 9, 10, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(arrays.topk_length.values<int32_t>(), (Values{8, 9, 10, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(arrays.topk_indptr.values<int32_t>(), (Values{0, 8, 17, 27, 27, 27, 27, 27, 27, 27}));
    EXPECT_EQ(arrays.schedule.values<int32_t>(), (Values{0, 0, 0, 0, 0, 0, 1, 0, 2, 0, 3, 0}));
  }
}

// ---- several steps

class OneCallForNSteps : public MetadataStepsTest {
 protected:
  // Runs n steps over buckets of different widths together and each alone.
  void compare(const MetadataProblem& p, const Batch& batch, const std::vector<int32_t>& deltas,
               int64_t padded_rows, int threads) {
    Call call(p, batch);
    call.tensors.padded_rows = padded_rows;
    call.tensors.num_steps = static_cast<int>(deltas.size());
    std::vector<StepArrays> together, alone;
    for (size_t step = 0; step < deltas.size(); ++step) {
      // Longer arrays and shorter tables from step to step: nothing may be taken for granted.
      const auto extra = static_cast<int64_t>(step);
      for (auto* list : {&together, &alone}) {
        list->emplace_back(p, kMaxRequests + extra, kMaxRows + extra, kMaxRows + extra,
                           columns_of(p) - extra % 3);
      }
    }
    for (size_t step = 0; step < deltas.size(); ++step) {
      call.tensors.kv_len_delta[step] = deltas[step];
      call.tensors.steps[step] = together[step].fields();
    }
    run(p, call.tensors, threads);
    for (size_t step = 0; step < deltas.size(); ++step) {
      call.tensors.num_steps = 1;
      call.tensors.kv_len_delta[0] = deltas[step];
      call.tensors.steps[0] = alone[step].fields();
      run(p, call.tensors);
      for (size_t i = 0; i < alone[step].named().size(); ++i) {
        // The whole arrays: what one call leaves alone the other must leave alone too.
        ASSERT_EQ(together[step].named()[i].second->values<int32_t>(),
                  alone[step].named()[i].second->values<int32_t>())
            << alone[step].named()[i].first << " of step " << step << ", " << to_string(p.mode);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, OneCallForNSteps,
                         testing::ValuesIn(test::targets_of("metadata_refresh")),
                         test::target_name);

TEST_P(OneCallForNSteps, EqualsSingleCallsInEveryMode) {
  test::Rng rng(77);
  for (const ForwardMode mode : kModes) {
    for (size_t steps = 1; steps <= kMaxRefreshSteps; ++steps) {
      for (const int threads : {1, 2, 3}) {
        const MetadataProblem p = problem_of(mode, threads == 2 ? 7 : 4);
        const Batch batch = random_batch(rng, p, rng.integer(0, kMaxRequests));
        compare(p, batch, std::vector<int32_t>(steps, 0), threads == 1 ? 0 : 36, threads);
      }
    }
  }
}

TEST_P(OneCallForNSteps, DraftStepsShiftTheirLengths) {
  test::Rng rng(78);
  for (const ForwardMode mode : {ForwardMode::kDecode, ForwardMode::kIdle}) {
    const MetadataProblem p = problem_of(mode);
    for (size_t steps = 1; steps <= kMaxRefreshSteps; ++steps) {
      std::vector<int32_t> growing, any;
      for (size_t step = 0; step < steps; ++step) {
        growing.push_back(static_cast<int32_t>(step) + 1);
        any.push_back(static_cast<int32_t>(rng.integer(-20, 20)));
      }
      // Lengths up to W: the last deltas reach past it.
      const Batch batch = random_batch(rng, p, kMaxRequests);
      compare(p, batch, growing, 0, 2);
      compare(p, batch, any, 36, 1);
    }
  }
}

TEST_P(OneCallForNSteps, DeltaZeroGivesEveryStepTheSameArraysAndStepPlusOneTheOracles) {
  test::Rng rng(79);
  const MetadataProblem p = problem_of(ForwardMode::kDecode);
  const Batch batch = random_batch(rng, p, kMaxRequests, kWidth - kMaxRefreshSteps);
  for (const int32_t slope : {0, 1}) {
    Call call(p, batch);
    std::vector<StepArrays> arrays;
    call.tensors.num_steps = kMaxRefreshSteps;
    for (int step = 0; step < kMaxRefreshSteps; ++step) arrays.push_back(bucket(p));
    for (size_t step = 0; step < kMaxRefreshSteps; ++step) {
      call.tensors.kv_len_delta[step] = slope * (static_cast<int32_t>(step) + 1);
      call.tensors.steps[step] = arrays[step].fields();
    }
    run(p, call.tensors, 2);
    for (size_t step = 0; step < kMaxRefreshSteps; ++step) {
      const int32_t delta = slope * (static_cast<int32_t>(step) + 1);
      expect_equal(written(p, call.tensors, arrays[step]),
                   metadata_oracle(p, batch, delta, kMaxRows), "step " + std::to_string(step));
    }
  }
}

TEST_P(OneCallForNSteps, OnlyDecodeShiftsLengths) {
  for (const ForwardMode mode : kModes) {
    if (is_decode(mode)) continue;
    const MetadataProblem p = problem_of(mode);
    test::Rng rng(80);
    Call call(p, random_batch(rng, p, 2));
    StepArrays first = bucket(p), second = bucket(p);
    call.tensors.num_steps = 2;
    call.tensors.steps = {first.fields(), second.fields()};
    call.tensors.kv_len_delta = {0, 1};
    EXPECT_THROW(run(p, call.tensors), Error) << to_string(mode);
    EXPECT_EQ(first.kv_len.values<int32_t>(), Values(kMaxRequests, kUntouched));
  }
}

// ---- limits

class LengthsReachingW : public MetadataStepsTest {};
INSTANTIATE_TEST_SUITE_P(Targets, LengthsReachingW,
                         testing::ValuesIn(test::targets_of("metadata_refresh")),
                         test::target_name);

TEST_P(LengthsReachingW, FillTheWholeTableAndReadNothingBehindIt) {
  for (const ForwardMode mode : kModes) {
    for (const int64_t page_size : {1, 4, 64}) {
      const MetadataProblem p = problem_of(mode, page_size);
      test::Rng rng(81);
      Batch batch = random_batch(rng, p, 2);
      const bool verify = mode == ForwardMode::kTargetVerify;
      const int32_t top = static_cast<int32_t>(kWidth) - (verify ? 3 : 0);
      batch.seq_len = {top, top - 1};
      batch.pool_row = {0, kMaxRequests + 1};  // the last row of the table ends at unmapped memory
      batch.ext_len = {2, 3};
      const int64_t table_rows = kMaxRequests + 2;
      test::GuardedMemory table(static_cast<size_t>(table_rows * kWidth) * 4);
      Call call(p, batch);
      std::copy_n(call.req_to_token.data<int32_t>(), table_rows * kWidth,
                  static_cast<int32_t*>(table.data()));
      call.tensors.req_to_token =
          make_tensor(static_cast<const void*>(table.data()), DType::kI32, {table_rows, kWidth});
      StepArrays arrays = bucket(p);
      call.tensors.steps[0] = arrays.fields();
      run(p, call.tensors);
      const Fields fields = written(p, call.tensors, arrays);
      EXPECT_EQ(fields.at("max_kv_len"), (Values{kWidth})) << to_string(mode);
      EXPECT_EQ(fields.at("kv_len"), (Values{kWidth, kWidth - 1})) << to_string(mode);
      expect_equal(fields, metadata_oracle(p, batch, 0, kMaxRows), std::string(to_string(mode)));
      // One token more is cut to the same length, in every field but row counts.
      batch.seq_len = {top + 1, top - 1};
      StepArrays longer = bucket(p);
      expect_equal(refreshed(p, batch, longer), fields, std::string(to_string(mode)));
    }
  }
}

// ---- the split plan

class SplitFields : public MetadataStepsTest {};
INSTANTIATE_TEST_SUITE_P(Targets, SplitFields,
                         testing::ValuesIn(test::targets_of("metadata_refresh")),
                         test::target_name);

TEST_P(SplitFields, CountPaddingRowsAsEmptyOnes) {
  // Two live rows and two of padding, one block each: cost 24, seven parts of 9: one row a part.
  const MetadataProblem p = problem_of(ForwardMode::kDecode);
  test::Rng rng(82);
  Batch batch = random_batch(rng, p, 2);
  batch.seq_len = {10, 4};
  StepArrays arrays = bucket(p);
  const Fields fields = refreshed(p, batch, arrays, 4);
  EXPECT_EQ(fields.at("split_indptr"), (Values{0, 1, 2, 3, 4}));
  const Values& parts = fields.at("split_schedule");
  for (size_t part = 0; part < 7; ++part) {
    EXPECT_EQ(parts[8 * part], part < 4 ? static_cast<int32_t>(part) : 4);
    EXPECT_EQ(parts[8 * part + 1], part < 4 ? static_cast<int32_t>(part) : 3);
  }
  EXPECT_EQ(arrays.split_indptr.values<int32_t>()[5], kUntouched) << "past padded_rows";
}

TEST_P(SplitFields, EqualTheOperatorOnTopkLength) {
  test::Rng rng(83);
  for (const ForwardMode mode : kModes) {
    MetadataProblem p = problem_of(mode);
    p.topk = 1 << 20;
    p.table_width = 9000;
    p.split_parts = 11;
    Batch batch = random_batch(rng, p, 4);
    for (int32_t& len : batch.seq_len) len = static_cast<int32_t>(rng.integer(0, 8000));
    for (Values& row : batch.req_to_token) row.resize(9000);
    StepArrays arrays = bucket(p);
    run(p, batch, arrays);
    Tensor parts(DType::kI32, {11, 8}), indptr(DType::kI32, {kMaxRows + 1});
    test::run(SplitSchedule::plan({kMaxRows, 11}, Device::cpu(1)),
              {arrays.topk_length, parts, indptr});
    EXPECT_EQ(arrays.split_schedule.values<int32_t>(), parts.values<int32_t>());
    EXPECT_EQ(arrays.split_indptr.values<int32_t>(), indptr.values<int32_t>());
  }
}

TEST_P(SplitFields, AreNotLookedAtWithoutParts) {
  for (const ForwardMode mode : kModes) {
    MetadataProblem p = problem_of(mode);
    StepArrays arrays = bucket(p);
    p.split_parts = 0;
    test::Rng rng(84);
    Call call(p, random_batch(rng, p, 2));
    call.tensors.steps[0] = arrays.fields();
    call.tensors.steps[0].split_schedule = {};
    run(p, call.tensors);
    EXPECT_EQ(arrays.split_indptr.values<int32_t>(), Values(kMaxRows + 1, kUntouched));
  }
}

TEST_P(SplitFields, MayBeShorterOrLongerThanTheOtherArraysOfRows) {
  for (const ForwardMode mode : {ForwardMode::kExtend, ForwardMode::kDraftExtend}) {
    const MetadataProblem p = problem_of(mode);
    test::Rng rng(85);
    Batch batch = random_batch(rng, p, 2);
    batch.ext_len = {4, 4};
    Call call(p, batch);
    StepArrays arrays = bucket(p);
    // Shorter: the rows of the batch are cut to it.
    call.tensors.steps[0] = arrays.fields();
    call.tensors.steps[0].split_indptr.shape[0] = 6;
    run(p, call.tensors);
    EXPECT_EQ(arrays.q_indptr.data<int32_t>()[2], 5);
    EXPECT_EQ(arrays.split_schedule.data<int32_t>()[6 * 8], 5) << "seven parts, five rows";
    EXPECT_EQ(arrays.split_indptr.values<int32_t>()[6], kUntouched);
    // Longer: rows that topk_length does not have own no piece.
    call.tensors.steps[0] = arrays.fields();
    call.tensors.steps[0].topk_length.shape[0] = 6;
    run(p, call.tensors);
    Values expected = {0, 1, 2, 3, 4, 5};
    expected.resize(kMaxRows + 1, 6);
    EXPECT_EQ(arrays.split_indptr.values<int32_t>(), expected);
  }
}

TEST_P(SplitFields, AreRefusedInAnotherShape) {
  for (const ForwardMode mode : kModes) {
    const MetadataProblem p = problem_of(mode);
    test::Rng rng(86);
    StepArrays arrays = bucket(p);
    Call call(p, random_batch(rng, p, 2));
    const auto refuses = [&](auto change, const std::string& name) {
      call.tensors.steps[0] = arrays.fields();
      change(call.tensors.steps[0]);
      try {
        run(p, call.tensors);
        ADD_FAILURE() << "accepted a bad " << name;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("metadata_refresh: " + name), std::string::npos)
            << error.what();
      }
    };
    refuses([](auto& fields) { fields.split_schedule = {}; }, "split_schedule");
    refuses([](auto& fields) { fields.split_schedule.shape[0] = 6; }, "split_schedule");
    refuses([](auto& fields) { fields.split_indptr = {}; }, "split_indptr");
    refuses([](auto& fields) { fields.split_indptr.shape[0] = 0; }, "split_indptr");
    EXPECT_EQ(arrays.kv_len.values<int32_t>(), Values(kMaxRequests, kUntouched));
  }
  MetadataProblem bad = problem_of(ForwardMode::kDecode);
  for (const int64_t parts : {int64_t{-1}, int64_t{1} << 31}) {
    bad.split_parts = parts;
    EXPECT_THROW(MetadataRefresh::plan(bad, Device::cpu(1)), Error);
  }
}

}  // namespace
}  // namespace fovea
