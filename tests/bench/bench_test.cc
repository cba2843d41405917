#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bench/case.h"
#include "bench/cases.h"
#include "bench/check.h"
#include "bench/inputs.h"
#include "bench/machine.h"
#include "bench/perf_suite.h"
#include "bench/report.h"
#include "bench/runner.h"
#include "bench/targets.h"
#include "fovea/error.h"
#include "fovea/implementation.h"

namespace fovea::bench {
namespace {

using testing::HasSubstr;

ThroughputLimits limits_for_tests() {
  ThroughputLimits limits;
  limits.num_threads = 2;
  limits.fp32_fma_gflops = 100;
  limits.l2_read_gb_per_s = 200;
  limits.l3_read_gb_per_s = 100.0;
  limits.dram_read_gb_per_s = 20;
  limits.copy_gb_per_s = 25;
  limits.gather_1152_gb_per_s = 16;
  limits.gather_656_gb_per_s = 12;
  return limits;
}

CpuFacts cpu_for_tests() { return {"test", 2, 1 << 20, 32 << 20}; }

// A case whose implementations are made up: "right" and "also_right" are correct, "wrong" is not,
// everything else refuses. It records who ran.
struct FakeInputs : CaseInputs {
  explicit FakeInputs(std::vector<std::string>* journal_) : journal(journal_) {}
  Work work() const override { return {1e6, 1e6, 0, Traffic::kStream}; }
  PreparedRun prepare(const Device&, const Options& options) override {
    const std::string name =
        options.implementation.empty() ? std::string("right") : options.implementation;
    if (name != "right" && name != "also_right" && name != "wrong")
      throw Error(ErrorCode::kUnsupported, "fake: " + name + " refuses");
    return {name, [this, name](Stream) { journal->push_back(name); },
            [name] { return name == "wrong" ? std::string("all of it") : std::string(); }};
  }
  std::vector<std::string>* journal;
};

BenchCase fake_case(std::vector<std::string>* journal) {
  BenchCase entry;
  entry.op = "fake";
  entry.name = "case";
  entry.make = [journal] { return std::make_unique<FakeInputs>(journal); };
  return entry;
}

TEST(BenchRunner, TimesWarmAndColdWithAtLeastTwentySamples) {
  std::vector<std::string> journal;
  const CaseOutcome outcome =
      run_case(fake_case(&journal), {1, {}, /*quick=*/true}, limits_for_tests());
  ASSERT_EQ(outcome.measurements.size(), 2u);
  EXPECT_FALSE(outcome.measurements[0].cold);
  EXPECT_TRUE(outcome.measurements[1].cold);
  for (const Measurement& measurement : outcome.measurements) {
    EXPECT_EQ(measurement.implementation, "right");
    EXPECT_GE(measurement.time.num_samples, 20);
    EXPECT_LE(measurement.time.min_ms, measurement.time.median_ms);
  }
  EXPECT_TRUE(outcome.rejections.empty());
}

TEST(BenchRunner, AWrongResultIsReportedAndNeverTimed) {
  std::vector<std::string> journal;
  const CaseOutcome outcome =
      run_case(fake_case(&journal), {1, {"wrong"}, true}, limits_for_tests());
  EXPECT_TRUE(outcome.measurements.empty());
  ASSERT_EQ(outcome.rejections.size(), 1u);
  EXPECT_TRUE(outcome.rejections[0].wrong);
  EXPECT_EQ(outcome.rejections[0].reason, "all of it");
  EXPECT_EQ(journal.size(), 1u);  // the run that was checked
}

TEST(BenchRunner, ARefusalIsReportedBesideTheOthers) {
  std::vector<std::string> journal;
  const CaseOutcome outcome =
      run_case(fake_case(&journal), {1, {"shy", "right"}, true}, limits_for_tests());
  EXPECT_EQ(outcome.measurements.size(), 2u);
  ASSERT_EQ(outcome.rejections.size(), 1u);
  EXPECT_FALSE(outcome.rejections[0].wrong);
  EXPECT_THAT(outcome.rejections[0].reason, HasSubstr("shy refuses"));
}

TEST(BenchRunner, ComparedImplementationsAreInterleaved) {
  std::vector<std::string> journal;
  run_case(fake_case(&journal), {1, {"right", "also_right"}, true}, limits_for_tests());
  // The last 40 entries are 20 rounds of both.
  ASSERT_GE(journal.size(), 40u);
  for (size_t i = journal.size() - 40; i < journal.size(); ++i)
    EXPECT_EQ(journal[i], (journal.size() - i) % 2 == 0 ? "right" : "also_right");
}

TEST(BenchStatistics, AreQuantilesOfTheSortedSamples) {
  const Statistics statistics = statistics_of({5, 1, 2, 4, 3});
  EXPECT_EQ(statistics.num_samples, 5);
  EXPECT_DOUBLE_EQ(statistics.min_ms, 1);
  EXPECT_DOUBLE_EQ(statistics.p25_ms, 2);
  EXPECT_DOUBLE_EQ(statistics.median_ms, 3);
  EXPECT_DOUBLE_EQ(statistics.p75_ms, 4);
  EXPECT_DOUBLE_EQ(statistics.spread(), 2.0 / 3);
  EXPECT_DOUBLE_EQ(statistics_of({1, 2}).median_ms, 1.5);
}

TEST(BenchFloor, IsTheSlowerOfArithmeticAndTheMatchingBandwidth) {
  const ThroughputLimits limits = limits_for_tests();
  const CpuFacts cpu = cpu_for_tests();
  const auto floor = [&](double flops, double bytes, Traffic traffic, bool cold) {
    return floor_of({flops, bytes, 0, traffic}, limits, cpu, cold);
  };
  // 1e9 flops at 100 GFLOP/s are 10 ms.
  EXPECT_DOUBLE_EQ(floor(1e9, 1e3, Traffic::kStream, true).milliseconds, 10);
  EXPECT_EQ(floor(1e9, 1e3, Traffic::kStream, true).limit, "fp32_fma");
  EXPECT_TRUE(floor(1e9, 1e3, Traffic::kStream, true).arithmetic);
  // 3/4 of the L2 of two threads are 1.5 MiB, of the L3 24 MiB.
  EXPECT_EQ(floor(0, 1e6, Traffic::kStream, false).limit, "l2_read");
  EXPECT_DOUBLE_EQ(floor(0, 1e6, Traffic::kStream, false).milliseconds, 0.005);
  EXPECT_EQ(floor(0, 1e7, Traffic::kGather656, false).limit, "l3_read");
  EXPECT_EQ(floor(0, 1e8, Traffic::kGather656, false).limit, "gather_656");
  // 17 MB read and written in place fit, 34 MB do not.
  EXPECT_EQ(floor_of({0, 17e6, 17e6, Traffic::kCopy, 17e6}, limits, cpu, false).limit, "l3_read");
  EXPECT_EQ(floor_of({0, 17e6, 17e6, Traffic::kCopy}, limits, cpu, false).limit, "copy");
  EXPECT_EQ(floor(0, 1e6, Traffic::kGather1152, true).limit, "gather_1152");
  EXPECT_EQ(floor(0, 1e6, Traffic::kCopy, true).limit, "copy");
  EXPECT_DOUBLE_EQ(floor(0, 1e6, Traffic::kStream, true).milliseconds, 0.05);

  ThroughputLimits with_bf16 = limits;
  with_bf16.bf16_dot_gflops = 400;
  EXPECT_EQ(floor_of({1e9, 0, 0, Traffic::kStream}, with_bf16, cpu, true).limit, "bf16_dot");
  EXPECT_DOUBLE_EQ(floor_of({1e9, 0, 0, Traffic::kStream}, with_bf16, cpu, true).milliseconds, 2.5);
}

TEST(BenchTargets, KeepTheRatioToTheFloorOfTheReferenceMachine) {
  const CpuFacts cpu = cpu_for_tests();
  const ThroughputLimits limits = limits_for_tests();
  // Arithmetic: 1090 GFLOP/s there, 100 here.
  const Work dense{1e9, 1e3, 0, Traffic::kStream};
  EXPECT_NEAR(scaled_target_ms({2.0}, dense, limits, cpu, CpuIsa::kAvx2, true), 2.0 * 10.9, 1e-9);
  // A time of its own for AVX2: 271.5 GFLOP/s there.
  EXPECT_NEAR(scaled_target_ms({2.0, 3.0, 5.0}, dense, limits, cpu, CpuIsa::kAvx2, true),
              5.0 * 2.715, 1e-9);
  EXPECT_NEAR(scaled_target_ms({2.0, 3.0, 5.0}, dense, limits, cpu, CpuIsa::kAvx3, true),
              3.0 * 5.43, 1e-9);
  EXPECT_NEAR(scaled_target_ms({2.0, 3.0, 5.0}, dense, limits, cpu, CpuIsa::kAvx512Bf16, true),
              2.0 * 10.9, 1e-9);
  // Memory: rows of 656 bytes at 33 GB/s there, 12 here.
  const Work rows{1e3, 1e6, 0, Traffic::kGather656};
  EXPECT_NEAR(scaled_target_ms({1.0}, rows, limits, cpu, CpuIsa::kAvx2, true), 33.0 / 12, 1e-9);
  // In the L2: both sides by the L3 rate, 215 there and 100 here.
  const Work small{0, 1e5, 0, Traffic::kStream};
  EXPECT_NEAR(scaled_target_ms({1.0}, small, limits, cpu, CpuIsa::kAvx2, false), 2.15, 1e-9);
}

TEST(BenchTargets, ATimeBelowTheFloorOfItsMachineIsOneOfDataInTheL3) {
  const CpuFacts cpu = cpu_for_tests();
  const ThroughputLimits limits = limits_for_tests();
  // 4.3 MB copied take 78 us there at 55 GB/s and 20 us in the L3: 28 us are 1.4 times that.
  const Work copied{0, 2.15e6, 2.15e6, Traffic::kCopy};
  EXPECT_NEAR(scaled_target_ms({0.028}, copied, limits, cpu, CpuIsa::kAvx2, false),
              1.4 * 4.3e6 / 100e6, 1e-9);
  EXPECT_NEAR(scaled_target_ms({0.028}, copied, limits, cpu, CpuIsa::kAvx2, true),
              1.4 * 4.3e6 / 25e6, 1e-9);
  // Arithmetic bounds it in the L3, there and here: 0.0545 ms there, 0.594 ms here.
  const Work both{59.4e6, 8.4e6, 0, Traffic::kGather656};
  EXPECT_NEAR(scaled_target_ms({0.109}, both, limits, cpu, CpuIsa::kAvx2, true),
              2 * std::max(0.594, 8.4 / 12), 1e-3);
}

TEST(BenchTargets, NoneIsBelowTheFloor) {
  const CpuFacts cpu = cpu_for_tests();
  const ThroughputLimits limits = limits_for_tests();
  for (const Traffic traffic :
       {Traffic::kStream, Traffic::kCopy, Traffic::kGather1152, Traffic::kGather656}) {
    for (const double flops : {0.0, 1e6, 1e8, 1e10}) {
      for (const double bytes : {1e4, 1e6, 1e7, 1e9}) {
        for (const CpuIsa isa : {CpuIsa::kAvx2, CpuIsa::kAvx3, CpuIsa::kAvx512Bf16}) {
          for (const bool cold : {false, true}) {
            const Work work{flops, bytes, bytes / 4, traffic};
            const double l2_as_l3 = std::max(work.bytes() / 100e6, flops / 100e6);
            const double floor = std::max(l2_as_l3, floor_of(work, limits, cpu, cold).milliseconds);
            double last = 0;
            for (double published = 1e-4; published < 1e4; published *= 10) {
              const double target = scaled_target_ms({published}, work, limits, cpu, isa, cold);
              EXPECT_GE(target, floor * (1 - 1e-9)) << flops << " flops, " << bytes << " bytes";
              last = target;
            }
            EXPECT_GT(last, floor);
          }
        }
      }
    }
  }
}

TEST(BenchTargets, GeneralOnesAreSharesOfTheFloor) {
  EXPECT_DOUBLE_EQ(general_target_ms({}, {1.0, "fp32_fma", true}), 2.0);
  EXPECT_DOUBLE_EQ(general_target_ms({0, 1, 0, Traffic::kGather656}, {0.6, "gather_656", false}),
                   1.0);
  EXPECT_DOUBLE_EQ(general_target_ms({0, 1, 1, Traffic::kCopy}, {0.85, "copy", false}), 1.0);
}

TEST(BenchCompare, FindsWrongElements) {
  Generator generator(3);
  const OwnedTensor reference = normal_f32(&generator, {4, 100});
  OwnedTensor actual(DType::kF32, {4, 100});
  std::copy_n(reference.data<float>(), 400, actual.data<float>());
  EXPECT_EQ(difference_text("x", actual, reference, kExact), "");

  actual.data<float>()[123] *= 1.5f;
  EXPECT_THAT(difference_text("x", actual, reference, kFp32Output),
              HasSubstr("x: 1 of 400 elements differ; worst at [1, 23]"));
  actual.data<float>()[123] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(difference_text("x", actual, reference, kBf16Output), HasSubstr("[1, 23]"));
  EXPECT_THAT(difference_text("x", slice_rows(actual.view(), 0, 2), reference, kExact),
              HasSubstr("expected f32 [4, 100]"));
}

TEST(BenchCompare, InfinitiesAndNanMustCoincide) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  OwnedTensor a(DType::kF32, {2}), b(DType::kF32, {2});
  a.data<float>()[0] = b.data<float>()[0] = -kInf;
  a.data<float>()[1] = b.data<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(difference_text("x", a, b, kExact), "");
  a.data<float>()[0] = kInf;
  EXPECT_NE(difference_text("x", a, b, kBf16Output), "");
  a.data<float>()[0] = 1e30f;
  EXPECT_NE(difference_text("x", a, b, kBf16Output), "");
}

TEST(BenchCompare, ManySmallErrorsAreFoundTogether) {
  Generator generator(4);
  const OwnedTensor reference = normal_f32(&generator, {1000});
  OwnedTensor actual(DType::kF32, {1000});
  for (int i = 0; i < 1000; ++i) actual.data<float>()[i] = reference.data<float>()[i] * 1.01f;
  EXPECT_THAT(difference_text("x", actual, reference, {0, 0.02, 5e-3}), HasSubstr("relative rms"));
  EXPECT_EQ(difference_text("x", actual, reference, {0, 0.02, 2e-2}), "");
}

TEST(BenchInputs, AreSeededNormalAndDistinct) {
  Generator first(5), second(5);
  const OwnedTensor a = normal_bf16(&first, {64, 64}), b = normal_bf16(&second, {64, 64});
  EXPECT_EQ(difference_text("a", a, b, kExact), "");
  const OwnedTensor values = normal_f32(&first, {10000});
  double sum = 0, square = 0;
  for (int i = 0; i < 10000; ++i) {
    sum += values.data<float>()[i];
    square += values.data<float>()[i] * values.data<float>()[i];
  }
  EXPECT_NEAR(sum / 10000, 0, 0.05);
  EXPECT_NEAR(square / 10000, 1, 0.05);

  const std::vector<int32_t> chosen = distinct(&first, 100, 1000);
  EXPECT_EQ(std::set<int32_t>(chosen.begin(), chosen.end()).size(), 100u);
  EXPECT_TRUE(std::all_of(chosen.begin(), chosen.end(), [](int32_t v) { return v < 1000; }));
  EXPECT_FALSE(std::is_sorted(chosen.begin(), chosen.end()));
}

TEST(BenchMachine, SharesAreSharesOrUnknown) {
  const DisturbanceProbe probe;
  const Disturbance at_once = probe.read();
  EXPECT_LT(at_once.others, 0);  // too short to tell
  EXPECT_FALSE(at_once.matters());
  EXPECT_THAT(at_once.describe(), HasSubstr("unknown"));
  EXPECT_TRUE((Disturbance{0.03, 0}.matters()));
  EXPECT_TRUE((Disturbance{0, 0.06}.matters()));
  EXPECT_FALSE((Disturbance{0.01, 0.04}.matters()));
}

TEST(BenchReport, JsonCarriesEverythingThatANumberNeeds) {
  Session session = make_session("fovea bench fake");
  session.ceilings.all_threads = limits_for_tests();
  session.ceilings.one_thread = limits_for_tests();
  std::vector<std::string> journal;
  CaseOutcome outcome =
      run_case(fake_case(&journal), {1, {"right", "wrong"}, true}, limits_for_tests());
  const Json json =
      Json::parse(to_json(session, outcome.measurements, outcome.rejections).dump(2), "test");
  for (const char* name : {"version", "commit", "command", "date_utc", "cpu", "ceilings"})
    EXPECT_NE(json.find(name), nullptr) << name;
  EXPECT_EQ(json.find("command")->as_string(), "fovea bench fake");
  ASSERT_EQ(json.find("results")->items().size(), 2u);
  const Json& result = json.find("results")->items()[0];
  for (const char* name :
       {"op",        "case",        "implementation",  "isa",          "threads",
        "cache",     "samples",     "median_ms",       "min_ms",       "spread",
        "flops",     "bytes_read",  "bytes_written",   "limit",        "roofline_share",
        "target_ms", "target_kind", "min_over_target", "others_share", "stolen_share"})
    EXPECT_NE(result.find(name), nullptr) << name;
  EXPECT_EQ(result.find("cache")->as_string(), "warm");
  EXPECT_EQ(result.find("target_kind")->as_string(), "general");
  ASSERT_EQ(json.find("rejections")->items().size(), 1u);
  EXPECT_TRUE(json.find("rejections")->items()[0].find("wrong")->as_bool());
  EXPECT_TRUE(json.find("ceilings")->find("all_threads")->find("bf16_dot_gflops")->kind() ==
              Json::Kind::kNull);
}

TEST(BenchReport, TheTableNamesCaseImplementationAndLimit) {
  std::vector<std::string> journal;
  const CaseOutcome outcome = run_case(fake_case(&journal), {1, {}, true}, limits_for_tests());
  const std::string row = table_row(outcome.measurements[1]);
  for (const char* part : {"fake/case", "right", "cold", "dram_read", "*"})
    EXPECT_THAT(row, HasSubstr(part));
  Session session = make_session("fovea bench fake");
  session.ceilings.all_threads = session.ceilings.one_thread = limits_for_tests();
  EXPECT_THAT(describe_session(session), HasSubstr("command: fovea bench fake"));
  EXPECT_THAT(describe_ceilings(session.ceilings), HasSubstr("gather_656"));
}

TEST(BenchCases, NameOperatorsOfThisBuildAndAreUnique) {
  std::set<std::string> operators_of_build;
  for (const OperatorInfo& info : operators()) operators_of_build.insert(info.name);
  std::set<std::string> names;
  for (const BenchCase& entry : all_cases()) {
    EXPECT_TRUE(operators_of_build.contains(entry.op)) << entry.op;
    EXPECT_TRUE(names.insert(entry.op + "/" + entry.name).second) << entry.name;
    EXPECT_FALSE(entry.description.empty()) << entry.name;
  }
  EXPECT_FALSE(names.empty());
}

// The preferred implementation is right on the inputs of the case, and what was not yet computed is
// wrong.
void expect_right(const BenchCase& entry) {
  SCOPED_TRACE(entry.op + "/" + entry.name);
  const std::unique_ptr<CaseInputs> inputs = entry.make();
  const PreparedRun prepared = inputs->prepare(Device::cpu(2), {});
  EXPECT_NE(prepared.mismatch(), "");
  prepared.run({});
  EXPECT_EQ(prepared.mismatch(), "");
  EXPECT_GT(inputs->work().bytes_read, 0);
  EXPECT_GT(inputs->work().bytes_written, 0);
}

TEST(BenchPerfSuite, EveryRowHasACaseAndANameOfItsOwn) {
  std::set<std::string> names;
  for (const PerfRow& row : perf_rows()) {
    EXPECT_TRUE(names.insert(row.section + "/" + row.name).second) << row.name;
    EXPECT_TRUE(row.bench_case.make != nullptr) << row.name;
    EXPECT_GT(row.target_us, 0) << row.name;
  }
}

TEST(BenchCases, WindowsMayHaveCompressedEntries) {
  expect_right(v4_attention_case({5, 3, RowFormat::kV4, 70}));
  expect_right(v4_attention_case({5, 2, RowFormat::kR512, 0}));
  for (const RowFormat format : {RowFormat::kV4, RowFormat::kR512})
    expect_right(swa_decode_case({5, 3, format}));
}

TEST(BenchCases, Bf16RowsMayHave512Channels) {
  SparseMlaProblem problem{.max_rows = 3, .num_heads = 5, .head_dim_qk = 512, .topk = 70};
  problem.softmax_scale = 0.05f;
  expect_right(sparse_mla_case(problem, {1, 128, 3}));
}

TEST(BenchCases, RequestsMayShareRegionsAndRowsTheirLists) {
  expect_right(msa_attend_case({3, 1, 4096, 16, 1, MsaKvMode::kBf16, BlockLists::kRandom, 2}));
  expect_right(msa_attend_case({1, 64, 4096, 16, 1, MsaKvMode::kBf16, BlockLists::kClustered}));
}

// Blocks that lists have in common are read once.
TEST(BenchCases, ClusteredListsReadFewerBlocks) {
  const auto bytes_of = [](BlockLists lists) {
    const AttendShape shape{1, 16, 65536, 16, 1, MsaKvMode::kBf16, lists};
    return msa_attend_case(shape).make()->work().bytes_read;
  };
  // Of the 16 rows' 16 blocks each: 12 together and 4 each, against the own block and 15 each.
  EXPECT_LT(bytes_of(BlockLists::kClustered), 0.6 * bytes_of(BlockLists::kRandom));
}

KdaPrefillProblem kda_problem(int64_t heads) {
  KdaPrefillProblem problem;
  problem.layer.num_heads = problem.layer.num_value_heads = heads;
  problem.layer.gate.kind = GateKind::kLowerBound;
  problem.layer.beta_kind = BetaKind::kLogit;
  problem.layer.beta_dtype = DType::kBf16;
  problem.layer.normalise = true;
  return problem;
}

TEST(BenchCases, SequencesMayHaveDifferentLengths) {
  expect_right(kda_prefill_case(kda_problem(2), {13, 70, 1, 64}));
}

TEST(FullBenchCases, LargePrefillsAreCheckedByPairsOfSequenceAndHead) {
  expect_right(kda_prefill_case(kda_problem(64), {300, 548, 271}));
}

// Every case on its real inputs: the preferred implementation agrees with the reference, the work
// is counted, and a damaged result is noticed.
TEST(FullBenchCases, AreRightAndCounted) {
  for (const BenchCase& entry : all_cases()) expect_right(entry);
}

}  // namespace
}  // namespace fovea::bench
