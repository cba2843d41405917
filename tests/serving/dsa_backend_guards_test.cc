#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/log.h"
#include "src/core/fault_injection.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::StepOptions;
using test::Tensor;
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;

DsaConfig guarded() {
  DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
  config.rows_per_request = 3;
  return config;
}

// With the fallback on: what was refreshed wrongly must not be taken for a failed operator.
TEST(DsaVerifyMetadata, ACorruptedRefreshIsAnErrorInEveryMode) {
  for (const bool in_plan : {false, true}) {
    for (const ForwardMode mode :
         {kExtend, ForwardMode::kMixed, kDecode, ForwardMode::kTargetVerify,
          ForwardMode::kDraftExtend, ForwardMode::kDraftExtendV2}) {
      const bool extend = mode == kExtend || mode == ForwardMode::kMixed;
      if (extend && in_plan) continue;
      DsaConfig config = guarded();
      config.verify_metadata = true;
      config.deterministic = false;
      DsaRig rig(config, 1);
      rig.step(kExtend, {{0, 20}, {1, 9}});
      std::vector<DsaStepPlan> plan;
      StepOptions options;
      if (in_plan) {
        plan.push_back(
            rig.backend().make_step_plan({mode, 2, mode == kDecode ? int64_t{1} : int64_t{3}}));
        options.plan = &plan.front();
      }
      rig.step(mode, {{0, 1}, {1, 1}}, options);
      const MetadataFields& fields = in_plan ? plan.front().metadata() : rig.backend().metadata();
      const internal::ResultFault fault(1, static_cast<int32_t*>(fields.topk_indptr.data) + 1, 77);
      try {
        rig.step(mode, {{0, 1}, {1, 1}}, options);
        ADD_FAILURE() << to_string(mode);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMismatch);
        EXPECT_NE(std::string(error.what()).find("topk_indptr[1] = 77"), std::string::npos)
            << error.what();
      }
      EXPECT_TRUE(fault.fired());
    }
  }
}

TEST(DsaVerifyMetadata, SoundStepsPassAndDoNotAllocate) {
  DsaConfig config = guarded();
  config.verify_metadata = true;
  config.context_parallel = true;
  DsaRig rig(config, 2);
  rig.step(kExtend, {{0, 20}, {1, 9}});
  rig.step(kExtend, {{0, 5}, {1, 6}}, {.context_ranks = 3});
  std::vector<DsaStepPlan> plans;
  for (int j = 0; j < 3; ++j) plans.push_back(rig.backend().make_step_plan({kDecode, 2, 1}));
  rig.draft_chain({0, 1}, {&plans[0], &plans[1], &plans[2]});
  StepOptions options;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
    rig.backend().begin_step(batch);
    const test::AllocationCounter counter;
    rig.backend().begin_step(batch);
    EXPECT_EQ(counter.count(), 0);
  };
  rig.step(ForwardMode::kTargetVerify, {{0, 1}, {1, 2}}, options);
}

TEST(DsaGuards, ConfigurationsThatCannotBe) {
  const auto refuses = [](const std::string& text, ErrorCode code, auto change) {
    DsaConfig config = guarded();
    change(config);
    try {
      DsaBackend backend(config, Device::cpu(1));
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refuses("check is on, but cache_slots = 0", ErrorCode::kInvalidArgument,
          [](auto& config) { config.check = true; });
  refuses("cache_slots = -1", ErrorCode::kInvalidArgument,
          [](auto& config) { config.cache_slots = -1; });
  refuses("split_parts = -1", ErrorCode::kInvalidArgument,
          [](auto& config) { config.split_parts = -1; });
  refuses("split_parts with deterministic", ErrorCode::kUnsupported,
          [](auto& config) { config.split_parts = 4; });
}

class DsaCheck : public testing::Test {
 protected:
  void SetUp() override {
    set_log_sink([this](LogLevel level, std::string_view message) {
      if (level == LogLevel::kWarning) log_ += std::string(message) + "\n";
    });
  }
  void TearDown() override { set_log_sink({}); }

  static DsaConfig config() {
    DsaConfig config = guarded();
    config.check = true;
    config.cache_slots = 1024;
    return config;
  }

  std::string log_;
};

TEST_F(DsaCheck, SoundStepsReportNothing) {
  DsaRig rig(config(), 1);
  rig.step(kExtend, {{0, 20}, {1, 9}});
  EXPECT_EQ(rig.backend().report().fault, MetadataFault::kNone);
  DsaStepPlan plan = rig.backend().make_step_plan({ForwardMode::kTargetVerify, 3, 3});
  EXPECT_EQ(plan.report().fault, MetadataFault::kNone);
  rig.step(ForwardMode::kTargetVerify, {{0, 2}, {1, 1}}, {.host_lengths = false, .plan = &plan});
  EXPECT_EQ(plan.report().fault, MetadataFault::kNone) << to_string(plan.report());
  EXPECT_EQ(log_, "");
}

TEST_F(DsaCheck, FaultsAreReportedAndLoggedOnce) {
  DsaRig rig(config(), 1);
  rig.step(kExtend, {{0, 20}, {1, 9}});
  DsaStepPlan plan = rig.backend().make_step_plan({kDecode, 2, 1});
  const Tensor pool_row = Tensor::i32({2}, {1, 99}), loc = Tensor::i32({2}, {-1, 4000});
  for (DsaStepPlan* const target : {static_cast<DsaStepPlan*>(nullptr), &plan}) {
    log_.clear();
    StepOptions options{.plan = target};
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) { batch.out_cache_loc = loc; };
    rig.step(kDecode, {{0, 1}, {1, 1}}, options);
    MetadataReport report = target != nullptr ? target->report() : rig.backend().report();
    EXPECT_EQ(report.fault, MetadataFault::kStoreSlot);
    EXPECT_EQ(report.request, 1);
    EXPECT_EQ(report.value, 4000);
    EXPECT_EQ(log_, "dsa_backend: " + to_string(report) + "\n");
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) { batch.pool_row = pool_row; };
    rig.step(kDecode, {{0, 1}, {1, 1}}, options);
    report = target != nullptr ? target->report() : rig.backend().report();
    EXPECT_EQ(report.fault, MetadataFault::kPoolRow);
  }
}

TEST_F(DsaCheck, ASuppliedSelectionIsLookedAt) {
  DsaRig rig(config(), 1);
  rig.step(kExtend, {{0, 20}});
  Tensor selection(DType::kI32, {1, 8});
  for (int64_t i = 0; i < 8; ++i) selection.data<int32_t>()[i] = i == 5 ? 5000 : 4;
  StepOptions options;
  options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
    tensors.topk_indices = selection;
    tensors.indices = {};
  };
  rig.step(kDecode, {{0, 1}}, options);
  const MetadataReport report = rig.backend().report();
  EXPECT_EQ(report.fault, MetadataFault::kIndexRange);
  EXPECT_EQ(report.position, 5);
  EXPECT_EQ(report.value, 5000);
}

}  // namespace
}  // namespace fovea
