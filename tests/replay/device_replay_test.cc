// Runs of the replayer on every device, with and without graphs: what must not depend on them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "fovea/error.h"
#include "fovea/stream.h"
#include "src/core/cuda_runtime.h"
#include "src/replay/device_batch.h"
#include "src/replay/run_replay.h"
#include "src/replay/staged_tensor.h"
#include "tests/replay/tiny_model.h"

namespace fovea::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class DeviceReplay : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) != "cpu" && cuda_device_count() == 0) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
    device_ = parse_device(GetParam());
    device_.num_threads = 2;
  }

  // Long enough outputs that a small cache runs full while they grow.
  static Trace trace() {
    TraceGeneratorOptions options;
    options.num_requests = 6;
    options.mean_input_length = 1200;
    options.mean_output_length = 2500;
    return generate_trace(options);
  }

  ReplayResult run(const std::function<void(ReplayOptions&)>& change) const {
    ReplayOptions options;
    options.device = device_;
    options.token_scale = 64;
    options.topk = 6;
    options.tp = 2;
    options.max_batch = 5;
    options.check_rows = 20;
    change(options);
    return run_replay(trace(), options, test::tiny_model());
  }

  // Runs `change` with and without graphs.
  void expect_graphs_change_nothing(const char* name,
                                    const std::function<void(ReplayOptions&)>& change) const {
    const ReplayResult eager = run(change);
    const ReplayResult graphs = run([&](ReplayOptions& o) {
      change(o);
      o.graph = true;
    });
    EXPECT_FALSE(eager.graphs) << name;
    ASSERT_TRUE(graphs.graphs) << name;
    EXPECT_GT(graphs.graphs->captures, 0) << name;
    EXPECT_GT(graphs.graphs->replays, graphs.graphs->captures) << name;
    EXPECT_EQ(graphs.graphs->nodes > 0, device_.kind == DeviceKind::kCuda) << name;
    EXPECT_EQ(graphs.digest_rows, eager.digest_rows) << name;
    EXPECT_EQ(graphs.digest_selection, eager.digest_selection) << name;
    EXPECT_EQ(graphs.digest_output, eager.digest_output) << name;
    EXPECT_EQ(graphs.check.mismatches, 0) << name;
    EXPECT_EQ(eager.check.mismatches, 0) << name;
    EXPECT_EQ(graphs.check.rows, eager.check.rows) << name;
    EXPECT_EQ(graphs.steps.size(), eager.steps.size()) << name;
    ASSERT_EQ(graphs.modes.size(), eager.modes.size()) << name;
    for (size_t i = 0; i < graphs.modes.size(); ++i) {
      EXPECT_EQ(graphs.modes[i].steps, eager.modes[i].steps) << name;
      EXPECT_EQ(graphs.modes[i].rows, eager.modes[i].rows) << name;
    }
  }

  Device device_;
};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceReplay, testing::Values("cpu", "cuda:0"),
                         [](const auto& param_info) {
                           return std::string(param_info.param) == "cpu" ? "cpu" : "cuda";
                         });

TEST_P(DeviceReplay, GraphsChangeNoRow) {
  expect_graphs_change_nothing("decode", [](auto&) {});
  expect_graphs_change_nothing("three layers", [](auto& o) { o.layers = "all"; });
  expect_graphs_change_nothing("mixed", [](auto& o) { o.mixed = true, o.chunk = 9; });
  expect_graphs_change_nothing("one request at a time", [](auto& o) { o.max_batch = 1; });
  expect_graphs_change_nothing("no sharing", [](auto& o) { o.prefix_sharing = false, o.page = 1; });
  expect_graphs_change_nothing("arrivals", [](auto& o) { o.arrivals = Arrivals::kTrace; });
}

TEST_P(DeviceReplay, GraphsOfRoundsChangeNoRow) {
  using Way = std::pair<DraftMode, int64_t>;
  for (const auto& [mode, drafts] :
       {Way(DraftMode::kV1, 1), Way(DraftMode::kV1, 4), Way(DraftMode::kV2, 3)}) {
    expect_graphs_change_nothing("drafts", [&, mode = mode, drafts = drafts](auto& o) {
      o.draft_mode = mode;
      o.draft_tokens = drafts;
      o.layers = "2";
      o.mixed = drafts == 4;
      o.chunk = 40;
    });
  }
}

TEST_P(DeviceReplay, PreemptionChangesNoRow) {
  const ReplayResult roomy = run([](auto&) {});
  int64_t tokens = 0;
  for (const ReplayRequest& request : roomy.requests) {
    tokens = std::max(tokens, request.prompt_tokens + request.output_tokens + 8);
  }
  const auto tighten = [&](ReplayOptions& o) { o.cache_tokens = tokens, o.max_batch = 4; };
  const ReplayResult tight = run(tighten);
  EXPECT_GT(tight.preempted, 0);
  EXPECT_EQ(tight.digest_output, roomy.digest_output);
  expect_graphs_change_nothing("preempted", tighten);
  expect_graphs_change_nothing("preempted with drafts",
                               [&](auto& o) { tighten(o), o.draft_tokens = 3; });
}

TEST_P(DeviceReplay, AWrongPageIsFoundAndGoneAfterItsStep) {
  const ReplayResult right = run([](auto&) {});
  for (const bool graph : {false, true}) {
    const ReplayResult wrong = run([&](auto& o) { o.inject = "page", o.graph = graph; });
    EXPECT_EQ(wrong.check.mismatches, 1) << graph;
    EXPECT_EQ(wrong.digest_rows, right.digest_rows);
  }
}

TEST_P(DeviceReplay, AFailedLaunchEndsTheRunWithItsStep) {
  for (const bool graph : {false, true}) {
    try {
      run([&](auto& o) { o.inject = "launch:20", o.graph = graph; });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_THAT(error.what(), HasSubstr("replay: step "));
    }
  }
  EXPECT_TRUE(run([](auto&) {}).ok());
}

TEST_P(DeviceReplay, ATensorGoesThereAndBack) {
  StagedTensor tensor(device_, DType::kI32, {5, 2, 3});
  for (int32_t row = 0; row < 5; ++row) {
    for (int32_t& value : tensor.row<int32_t>(row)) value = row;
  }
  tensor.upload(0, 5, {});
  synchronize(device_);
  EXPECT_EQ(tensor.on_device(3).shape[0], 3);
  const TensorView row = tensor.row_on_device(2);
  EXPECT_EQ(row.rank, 2);
  EXPECT_EQ(row.shape[0], 2);
  EXPECT_EQ(row.stride[0], 3);
  fill_bytes(row.data, device_, 0, 6 * sizeof(int32_t));
  tensor.download(1, 4, {});
  synchronize(device_);
  EXPECT_THAT(tensor.row<int32_t>(1), ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_THAT(tensor.row<int32_t>(2), ElementsAre(0, 0, 0, 0, 0, 0));
  EXPECT_THAT(tensor.row<int32_t>(4), ElementsAre(4, 4, 4, 4, 4, 4));
}

// After every step the device has the columns that the step's requests use.
TEST_P(DeviceReplay, TheTableOfTheDeviceFollowsThatOfTheScheduler) {
  SchedulerConfig config;
  config.page_size = 3;
  config.num_pages = 14;
  config.chunk = 7;
  config.max_batch = 3;
  Scheduler scheduler(config, {{4, 24}, {5, 24}, {4, 24}, {9, 2}},
                      [](int64_t) { return std::vector<uint64_t>(); });
  DeviceTable table(device_);
  StepBatch batch;
  int64_t steps = 0;
  for (; scheduler.next(&batch); scheduler.commit(), ++steps) {
    table.update(scheduler, batch, {});
    if (steps % 5 == 4) {
      table.forget();
      table.update(scheduler, batch, {});
    }
    const ConstTensorView expected = scheduler.table().view();
    ASSERT_EQ(table.view().shape, expected.shape);
    std::vector<int32_t> found(static_cast<size_t>(expected.num_elements()));
    copy_bytes(found.data(), Device{}, table.view().data, device_, found.size() * sizeof(int32_t));
    synchronize(device_);
    for (const StepEntry& entry : batch.entries) {
      const auto begin = static_cast<size_t>(entry.pool_row * expected.stride[0]);
      for (size_t p = begin; p < begin + static_cast<size_t>(entry.end); ++p) {
        ASSERT_EQ(found[p], static_cast<const int32_t*>(expected.data)[p]);
      }
    }
  }
  EXPECT_GT(scheduler.preempted(), 0);
  EXPECT_GT(steps, 10);
}

}  // namespace
}  // namespace fovea::internal
