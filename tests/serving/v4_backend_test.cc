#include "fovea/v4_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "src/core/fault_injection.h"
#include "tests/serving/v4_rig.h"
#include "tests/support/devices.h"
#include "tests/support/rng.h"

// Cases of the specification (section 8 of the DeepSeek-V4 document) are named in the tests.
namespace fovea {
namespace {

using test::V4History;
using test::V4Rig;
using test::V4Rows;
using test::V4StepOptions;
using testing::HasSubstr;

class V4BackendTest : public test::DeviceSuite {
 protected:
  void SetUp() override {
    DeviceSuite::SetUp();
    if (!IsSkipped()) readable_.emplace(device_);
  }

 private:
  std::optional<test::ReadableDeviceMemory> readable_;
};
INSTANTIATE_TEST_SUITE_P(Devices, V4BackendTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

V4History part(const V4History& history, int64_t begin, int64_t end) {
  return {history.begin() + begin, history.begin() + end};
}

V4BackendConfig config_of(V4WindowStorage storage) {
  V4BackendConfig config = test::v4_config();
  config.window_storage = storage;
  if (storage == V4WindowStorage::kPaged) config.window_page_size = 7;
  if (storage == V4WindowStorage::kRing) {
    config.max_request_rows = 100;
    config.window_page_size = config.window + config.max_request_rows - 1;
  }
  return config;
}

// Rows [begin, end) of the request are those of the definition.
void expect_defined(const V4Rig& rig, int64_t request, const V4History& history, int64_t begin,
                    int64_t step = 1) {
  for (int64_t layer = 0; layer < test::kV4Layers; ++layer) {
    for (int64_t p = begin; p < static_cast<int64_t>(history.size()); p += step) {
      EXPECT_EQ(test::v4_difference(rig.config, layer, part(history, 0, p + 1),
                                    rig.row(layer, request, p)),
                "")
          << "ratio " << test::kV4Ratios[static_cast<size_t>(layer)] << ", position " << p;
    }
  }
}

// Rows [begin, end) of two runs have the same bits.
void expect_same(const V4Rig& a, const V4Rig& b, int64_t request, int64_t begin, int64_t end) {
  for (int64_t layer = 0; layer < test::kV4Layers; ++layer) {
    for (int64_t p = begin; p < end; ++p) {
      ASSERT_TRUE(a.row(layer, request, p) == b.row(layer, request, p))
          << "ratio " << test::kV4Ratios[static_cast<size_t>(layer)] << ", position " << p;
    }
  }
}

TEST_P(V4BackendTest, RowsFollowTheDefinitionWhereverTheWindowIs) {
  const V4History history = test::v4_history(1, 264), other = test::v4_history(2, 40);
  for (const V4WindowStorage storage :
       {V4WindowStorage::kTokenPages, V4WindowStorage::kPaged, V4WindowStorage::kRing}) {
    V4Rig rig(config_of(storage), device_);
    rig.prefill(0, part(history, 0, 250), 97);
    rig.run(ForwardMode::kExtend, {{1, 0, other}});
    // A prefill and a decode row in one batch, then decode rows of both.
    rig.run(ForwardMode::kMixed, {{0, 250, part(history, 250, 258)}, {1, 40, {77}}});
    V4History longer = other;
    longer.push_back(77);
    for (int64_t p = 258; p < 264; ++p) {
      longer.push_back(static_cast<uint64_t>(p));
      rig.run(ForwardMode::kDecode,
              {{0, p, part(history, p, p + 1)},
               {1, static_cast<int64_t>(longer.size()) - 1, {longer.back()}}});
    }
    expect_defined(rig, 0, history, 0, 23);
    expect_defined(rig, 0, history, 250);
    expect_defined(rig, 1, longer, 36);
    EXPECT_EQ(rig.backend.routes().pages, 3 + 1 + 1 + 6);
  }
}

// Cases 15 and 22: no bit depends on the cut of a prompt, on the batch, on padding, on the storage.
TEST_P(V4BackendTest, CutBatchPaddingAndStorageChangeNoBit) {
  const V4History history = test::v4_history(3, 270);
  V4Rig whole(test::v4_config(), device_);
  whole.prefill(0, history, 270);
  for (const int64_t chunk : {1, 4, 13, 128, 129}) {
    V4Rig cut(config_of(chunk < 100 ? V4WindowStorage::kRing : V4WindowStorage::kPaged), device_);
    cut.prefill(0, history, chunk);
    expect_same(whole, cut, 0, 0, 270);
  }
  V4Rig mates(test::v4_config(), device_);
  const V4History mate = test::v4_history(4, 30);
  mates.run(ForwardMode::kExtend,
            {{1, 0, part(mate, 0, 17)}, {0, 0, part(history, 0, 130)}, {2, 0, mate}},
            {.padded_rows = 200, .host_lengths = true});
  V4StepOptions in_place;
  in_place.in_place = true;
  for (int64_t p = 130; p < 140; ++p) {
    mates.run(ForwardMode::kDecode, {{1, p - 113, {mate[0]}}, {0, p, part(history, p, p + 1)}},
              in_place);
  }
  expect_same(whole, mates, 0, 0, 140);
}

// Case 15: the first entry of a prompt of exactly one group, and entries around the first ones.
TEST_P(V4BackendTest, EveryCutOfThirteenTokens) {
  const V4History history = test::v4_history(5, 13);
  V4Rig whole(test::v4_config(), device_);
  whole.prefill(0, history, 13);
  expect_defined(whole, 0, history, 0);
  EXPECT_EQ(whole.row(1, 0, 2).entries, std::vector<int64_t>{});
  EXPECT_EQ(whole.row(1, 0, 3).entries, std::vector<int64_t>{0});
  V4Rig cut(test::v4_config(), device_);
  for (int64_t first = 1; first < 13; ++first) {
    cut.prefill(0, part(history, 0, first), 13);
    cut.prefill(0, history, 13, first);
    expect_same(whole, cut, 0, 0, 13);
  }
}

// Case 14: below topk a row of ratio 4 sees every entry, through the indexer or past it.
TEST_P(V4BackendTest, Case14BelowTopkEveryEntryIsSeen) {
  V4BackendConfig config = test::v4_config();
  config.topk = 12;
  const V4History history = test::v4_history(6, 51);
  V4Rig scored(config, device_), skipped(config, device_);
  scored.prefill(0, history, 20);
  skipped.run(ForwardMode::kExtend, {{0, 0, history}}, {.host_lengths = true});
  EXPECT_EQ(scored.backend.routes().selected, 3);
  EXPECT_EQ(skipped.backend.routes().all, 1);
  expect_same(scored, skipped, 0, 0, 51);
  for (int64_t p = 0; p < 51; ++p) {
    std::vector<int64_t> all;
    for (int64_t g = 0; g < (p + 1) / 4; ++g) all.push_back(g);
    EXPECT_EQ(scored.row(1, 0, p).entries, all) << p;
  }
}

// Case 17: the entry of a row's own token is visible, at the first entries and where topk
// saturates.
TEST_P(V4BackendTest, Case17EntriesAreVisibleFromTheirLastTokenOn) {
  V4BackendConfig config = test::v4_config();
  config.topk = 33;  // saturates behind position 131
  const V4History history = test::v4_history(7, 140);
  V4Rig rig(config, device_);
  rig.prefill(0, part(history, 0, 100), 100);
  for (int64_t p = 100; p < 140; ++p) {
    rig.run(ForwardMode::kDecode, {{0, p, part(history, p, p + 1)}});
  }
  for (const int64_t p : {2, 3, 4, 126, 127, 128, 130, 131, 134, 135, 136}) {
    expect_defined(rig, 0, part(history, 0, p + 1), p);
    EXPECT_EQ(static_cast<int64_t>(rig.row(1, 0, p).entries.size()),
              std::min<int64_t>((p + 1) / 4, 33));
  }
}

// Case 16: n rows are verified, some stay, the request goes on as if nothing had been drafted.
TEST_P(V4BackendTest, Case16TakenBackDraftsLeaveNothingBehind) {
  const V4History history = test::v4_history(8, 160), wrong = test::v4_history(9, 160);
  for (const CompressorForm form : {CompressorForm::kStored, CompressorForm::kOnline}) {
    for (const int64_t n : {2, 3, 10}) {
      V4BackendConfig config = test::v4_config();
      config.hca_form = form;
      V4Rig plain(config, device_);
      plain.prefill(0, history, 160);
      for (const V4WindowStorage storage :
           {V4WindowStorage::kTokenPages, V4WindowStorage::kPaged, V4WindowStorage::kRing}) {
        config = config_of(storage);
        config.hca_form = form;
        config.rows_per_request = n;
        config.csa_state_tokens = 8 - 2 + n;
        config.hca_state_tokens = 128 - 2 + n;
        V4Rig rig(config, device_);
        V4StepPlan plan = rig.backend.make_step_plan({ForwardMode::kTargetVerify, 2, n});
        rig.prefill(0, part(history, 0, 121), 60);
        rig.prefill(2, part(wrong, 0, 9), 60);
        int64_t next = 121, round = 0, mate = 9;
        while (next + n < 150) {
          const int64_t accepted = round % n + 1;
          V4History drafted = part(history, next, next + accepted);
          for (int64_t i = accepted; i < n; ++i) {
            drafted.push_back(wrong[static_cast<size_t>(next + i)]);
          }
          V4StepOptions options;
          options.plan = &plan;
          options.in_place = round % 2 == 0;
          rig.run(ForwardMode::kTargetVerify,
                  {{2, mate, part(wrong, mate, mate + n)}, {0, next, drafted}}, options);
          rig.commit({static_cast<int32_t>(n), static_cast<int32_t>(accepted)});
          mate += n;
          next += accepted;
          ++round;
        }
        for (; next < 156; ++next) {
          rig.run(ForwardMode::kDecode, {{0, next, part(history, next, next + 1)}});
        }
        // Rows that were drafted wrong have been computed again.
        expect_same(plain, rig, 0, 0, 156);
        EXPECT_EQ(rig.backend.routes().commits, 3 * round);
      }
    }
  }
}

// Case 18: the ring holds a whole step beside a window; one row less is refused.
TEST_P(V4BackendTest, Case18ARingIsAsLongAsWindowAndStep) {
  V4BackendConfig config = config_of(V4WindowStorage::kRing);
  config.max_request_rows = 5;
  config.window_page_size = config.window + 4;
  const V4History history = test::v4_history(10, 61);
  V4Rig ring(config, device_), pages(test::v4_config(), device_);
  ring.prefill(0, history, 5);
  pages.prefill(0, history, 61);
  expect_same(pages, ring, 0, 0, 61);
  ring.stage(ForwardMode::kExtend, {{1, 0, part(history, 0, 6)}}, {.host_lengths = true});
  EXPECT_THROW(ring.submit({}), Error) << "six rows in a ring for five";
  --config.window_page_size;
  try {
    const V4Backend refused(config, device_);
    FAIL() << "the ring is too short";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("window_page_size"));
  }
  config.window_page_size = config.window;  // R = W: one row a step
  EXPECT_THROW(V4Backend(config, device_), Error);
  config.max_request_rows = 1;
  EXPECT_NO_THROW(V4Backend(config, device_));
}

// Case 18: pages behind the window are freed and handed to others.
TEST_P(V4BackendTest, Case18FreedPagesAreNotMissed) {
  const V4History history = test::v4_history(11, 120), other = test::v4_history(12, 120);
  V4Rig rig(config_of(V4WindowStorage::kPaged), device_);
  for (int64_t p = 0; p < 120; p += 10) {
    rig.run(ForwardMode::kExtend,
            {{0, p, part(history, p, p + 10)}, {1, p, part(other, p, p + 10)}});
    EXPECT_LE(rig.window_pages->counts().referenced, 2 * 4);
  }
  expect_defined(rig, 0, history, 60, 7);
  expect_defined(rig, 1, other, 60, 7);
}

TEST_P(V4BackendTest, SnapshotsResumeToTheBitsOfAnUncutPrefill) {
  const V4History history = test::v4_history(13, 300);
  V4Rig whole(test::v4_config(), device_), resumed(test::v4_config(), device_);
  constexpr int32_t kFirst = 2 * test::kV4Requests, kSecond = kFirst + 1, kThird = kFirst + 2;
  for (V4Rig* const rig : {&whole, &resumed}) {
    V4StepOptions options;
    options.snapshots = {{0, 256, kSecond}, {0, 128, kFirst}, {0, 131, kThird}};
    rig->run(ForwardMode::kExtend, {{0, 0, part(history, 0, 126)}});
    rig->run(ForwardMode::kExtend, {{0, 126, part(history, 126, rig == &whole ? 300 : 257)}},
             options);
  }
  EXPECT_EQ(whole.backend.routes().snapshot, 1);
  // The pages of the request stay; its states start anew from a snapshot. At a multiple of 128 a
  // layer of that ratio needs none.
  for (const auto& [slot, begin] : {std::pair{kSecond, int64_t{256}}, {kFirst, int64_t{128}}}) {
    resumed.pools[2].state.fill_bytes(0xFF);
    V4StepOptions options;
    options.resume_from = {{0, slot}};
    resumed.run(ForwardMode::kExtend, {{0, begin, part(history, begin, 300)}}, options);
    expect_same(whole, resumed, 0, begin, 300);
  }
  // Ratio 4 resumes anywhere.
  V4StepOptions options;
  options.resume_from = {{0, kThird}};
  resumed.run(ForwardMode::kExtend, {{0, 131, part(history, 131, 300)}}, options);
  for (int64_t p = 131; p < 300; ++p) {
    ASSERT_TRUE(whole.row(1, 0, p) == resumed.row(1, 0, p)) << p;
  }
}

// Runs a step with the fault at every place that it has: what throws can be run again, and the
// rows are those of a run that never failed. Returns the places.
int64_t fails_and_runs_again(V4Rig& rig, ForwardMode mode, const std::vector<V4Rows>& rows,
                             const V4StepOptions& options) {
  for (int64_t nth = 1;; ++nth) {
    rig.stage(mode, rows, options);
    const internal::LaunchFault fault(nth);
    try {
      rig.submit(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      continue;
    }
    EXPECT_FALSE(fault.fired());
    rig.collect();
    return nth - 1;
  }
}

TEST_P(V4BackendTest, AStepThatFailedAtAnyStageCanBeRunAgain) {
  const V4History history = test::v4_history(14, 160), mate = test::v4_history(15, 60);
  for (const V4WindowStorage storage : {V4WindowStorage::kTokenPages, V4WindowStorage::kRing}) {
    V4BackendConfig config = config_of(storage);
    config.strict = true;
    config.rows_per_request = 3;
    config.csa_state_tokens = 8 - 1 + 3;
    config.hca_state_tokens = 128 - 1 + 3;
    V4Rig failing(config, device_), plain(config, device_);
    V4StepPlan plan = failing.backend.make_step_plan({ForwardMode::kTargetVerify, 1, 3});
    for (V4Rig* const rig : {&failing, &plain}) {
      const auto step = [&](ForwardMode mode, const std::vector<V4Rows>& rows,
                            const V4StepOptions& options) {
        if (rig == &plain) return rig->run(mode, rows, options);
        // Refresh, windows, facts; per layer: store, (move, compress) once or twice, select,
        // attend.
        EXPECT_GE(fails_and_runs_again(*rig, mode, rows, options), 3 + 2 + 4 + 3);
      };
      V4StepOptions apart, in_place;
      apart.snapshots = {{0, 80, 2 * test::kV4Requests}};
      in_place.in_place = true;
      step(ForwardMode::kExtend, {{0, 0, part(history, 0, 99)}, {1, 0, part(mate, 0, 41)}}, apart);
      step(ForwardMode::kMixed, {{0, 99, part(history, 99, 158)}, {1, 41, {mate[41]}}}, {});
      // In place: the ring is long enough for the rows of the step.
      step(ForwardMode::kDecode, {{1, 42, {mate[42]}}}, in_place);
      if (rig == &plain) {
        rig->run(ForwardMode::kExtend, {{1, 43, part(mate, 43, 46)}});
      } else {
        in_place.plan = &plan;
        step(ForwardMode::kTargetVerify, {{1, 43, part(mate, 43, 46)}}, in_place);
        in_place.plan = nullptr;
      }
      step(ForwardMode::kDecode, {{0, 158, {history[158]}}, {1, 46, {mate[46]}}}, in_place);
    }
    expect_same(plain, failing, 0, 0, 159);
    expect_same(plain, failing, 1, 0, 47);
    EXPECT_EQ(failing.backend.routes().fallback, 0);
  }
}

// What a failed step of rows apart leaves in the slots that it reads, and in rows that are not its
// own.
TEST_P(V4BackendTest, AFailureLeavesStatesAndOtherRowsBitIdentical) {
  const V4History history = test::v4_history(16, 140);
  V4BackendConfig config = test::v4_config();
  config.strict = true;
  V4Rig rig(config, device_);
  rig.prefill(0, part(history, 0, 134), 134);
  const std::vector<V4Rows> rows = {{1, 0, part(history, 0, 130)}};
  const auto state_of_request_0 = [&] {
    synchronize(device_);
    std::vector<uint8_t> bytes;
    for (const auto& pool : rig.pools) {
      for (const test::Tensor* state : {&pool.state, &pool.index_state}) {
        const size_t slot = state->bytes().size() / (2 * test::kV4Requests + 4);
        const auto first = state->bytes().begin();
        bytes.insert(bytes.end(), first, first + static_cast<std::ptrdiff_t>(2 * slot));
      }
    }
    return bytes;
  };
  const std::vector<uint8_t> before = state_of_request_0();
  fails_and_runs_again(rig, ForwardMode::kExtend, rows, {});
  EXPECT_EQ(state_of_request_0(), before);
  V4Rig alone(config, device_);
  alone.prefill(0, history, 134);
  rig.prefill(0, history, 6, 134);
  expect_same(alone, rig, 0, 0, 140);
}

TEST_P(V4BackendTest, AFailedOperatorIsFollowedByTheNext) {
  if (device_.kind == DeviceKind::kCuda) GTEST_SKIP() << "a GPU has one implementation of each";
  V4BackendConfig config = test::v4_config();
  config.deterministic = false;
  const V4History history = test::v4_history(17, 60);
  V4Rig rig(config, device_), plain(config, device_);
  plain.prefill(0, history, 60);
  rig.stage(ForwardMode::kExtend, {{0, 0, history}}, {});
  int64_t followed = 0;
  for (int64_t nth = 1; nth < 30; ++nth) {
    const internal::LaunchFault fault(nth);
    try {
      rig.submit({});
    } catch (const Error&) {  // an operator of this room has no other implementation
      continue;
    }
    if (fault.fired()) ++followed;
  }
  rig.collect();
  // Refresh, windows, four stores and compressors of each layer, queries, selection, attention.
  EXPECT_EQ(rig.backend.routes().fallback, followed);
  EXPECT_GE(followed, 10);
  expect_defined(rig, 0, history, 0, 9);
}

TEST_P(V4BackendTest, PaddingAndIdleStepsAreZero) {
  V4Rig rig(test::v4_config(), device_);
  const V4History history = test::v4_history(18, 40);
  rig.stage(ForwardMode::kExtend, {{0, 0, history}}, {.padded_rows = 43});
  rig.submit({});
  synchronize(device_);
  const auto expect_padding = [&](int64_t begin, int64_t end) {
    for (int64_t layer = 0; layer < test::kV4Layers; ++layer) {
      const V4ForwardTensors tensors = rig.tensors(layer);
      const auto* const out = static_cast<const bf16_t*>(tensors.out.data);
      const auto* const lse = static_cast<const float*>(tensors.lse.data);
      for (int64_t i = begin * test::kV4Heads * 512; i < end * test::kV4Heads * 512; ++i) {
        ASSERT_EQ(out[i], bf16_t{0});
      }
      for (int64_t i = begin * test::kV4Heads; i < end * test::kV4Heads; ++i) {
        ASSERT_EQ(lse[i], -std::numeric_limits<float>::infinity());
      }
    }
  };
  expect_padding(40, 43);
  const std::vector<uint8_t> before = rig.pool_bytes();
  rig.stage(ForwardMode::kIdle, {}, {.padded_rows = 3});
  rig.submit({});
  synchronize(device_);
  expect_padding(0, 3);
  EXPECT_EQ(rig.pool_bytes(), before);
  EXPECT_EQ(rig.backend.routes().idle, 3);
}

TEST_P(V4BackendTest, DraftLayersHaveNoCompressor) {
  V4BackendConfig config = test::v4_config();
  config.rows_per_request = 2;
  V4Rig rig(config, device_);
  const V4History history = test::v4_history(19, 30);
  rig.prefill(0, part(history, 0, 28), 28);
  V4StepPlan plan = rig.backend.make_step_plan({ForwardMode::kDraftExtend, 1, 2});
  V4StepOptions options;
  options.plan = &plan;
  rig.stage(ForwardMode::kDraftExtend, {{0, 28, part(history, 28, 30)}}, options);
  rig.submit(options);
  rig.collect();
  for (const int64_t p : {28, 29}) {
    EXPECT_EQ(test::v4_difference(config, 0, part(history, 0, p + 1), rig.row(0, 0, p)), "");
  }
  try {
    rig.backend.forward(plan, 4, rig.tensors(1));
    FAIL() << "a compressor would advance over drafted rows";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
}

TEST_P(V4BackendTest, ProfilesNameWhatRan) {
  V4Rig rig(test::v4_config(), device_);
  std::vector<OperatorCall> calls;
  rig.backend.set_profile(&calls);
  rig.prefill(0, test::v4_history(20, 50), 50);
  rig.backend.set_profile(nullptr);
  std::vector<std::string> names;
  for (const OperatorCall& call : calls) {
    names.push_back(call.name);
    EXPECT_GT(call.bytes, 0) << call.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "metadata_refresh", "build_swa_indices", "v4_row_facts", "pack_rows",
                       "sparse_mla", "pack_rows", "v4_copy_states", "v4_compress", "v4_copy_states",
                       "v4_compress", "index_quantize", "index_select", "sparse_mla", "pack_rows",
                       "v4_copy_states", "v4_compress", "sparse_mla"}));
}

TEST_P(V4BackendTest, StepsAllocateNothing) {
  if (device_.kind == DeviceKind::kCuda) GTEST_SKIP() << "counts allocations of the host";
  device_.num_threads = 1;  // a pool of threads allocates when it starts
  V4BackendConfig config = test::v4_config();
  config.rows_per_request = 2;
  V4Rig rig(config, device_);
  const V4History history = test::v4_history(21, 40);
  rig.prefill(0, history, 40);
  V4StepPlan plan = rig.backend.make_step_plan({ForwardMode::kTargetVerify, 1, 2});
  V4StepOptions options;
  options.plan = &plan;
  rig.stage(ForwardMode::kTargetVerify, {{0, 38, part(history, 38, 40)}}, options);
  rig.submit(options);
  const test::AllocationCounter counter;
  rig.submit(options);
  EXPECT_EQ(counter.count(), 0);
}

TEST(V4Backend, RefusesWhatItsTableDoesNotList) {
  const Device cpu = Device::cpu(1);
  using Change = void (*)(V4BackendConfig&);
  const std::pair<const char*, Change> changes[] = {
      {"num_heads", [](V4BackendConfig& c) { c.num_heads = 0; }},
      {"softmax_scale", [](V4BackendConfig& c) { c.softmax_scale = 0; }},
      {"window", [](V4BackendConfig& c) { c.window = 0; }},
      {"window_page_size", [](V4BackendConfig& c) { c.window_storage = V4WindowStorage::kPaged; }},
      {"window_format", [](V4BackendConfig& c) { c.window_format = RowFormat::kV32; }},
      {"compressed_format", [](V4BackendConfig& c) { c.compressed_format = RowFormat::kR512; }},
      {"csa_state_tokens", [](V4BackendConfig& c) { c.csa_state_tokens = 7; }},
      {"csa_state_tokens", [](V4BackendConfig& c) { c.rows_per_request = 3; }},
      {"hca_state_tokens",
       [](V4BackendConfig& c) { c.rows_per_request = 4, c.csa_state_tokens = 10; }},
      {"index_heads", [](V4BackendConfig& c) { c.index_heads = 0; }},
      {"topk", [](V4BackendConfig& c) { c.topk = 0; }},
      {"page_size", [](V4BackendConfig& c) { c.page_size = 64; }},
      {"page_size", [](V4BackendConfig& c) { c.page_size = 130, c.hca = false; }},
      {"page_size", [](V4BackendConfig& c) { c.page_size = 512; }},
      {"table_width", [](V4BackendConfig& c) { c.table_width = 0; }},
      {"max_requests", [](V4BackendConfig& c) { c.max_requests = 0; }},
      {"max_rows", [](V4BackendConfig& c) { c.max_rows = 0; }},
      {"rows_per_request", [](V4BackendConfig& c) { c.rows_per_request = 0; }},
      {"eps", [](V4BackendConfig& c) { c.eps = -1; }},
      {"implementation", [](V4BackendConfig& c) { c.implementation = "nobody"; }},
  };
  for (const auto& [field, change] : changes) {
    V4BackendConfig config = test::v4_config();
    change(config);
    try {
      const V4Backend backend(config, cpu);
      FAIL() << field;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(field));
    }
  }
  V4BackendConfig config = test::v4_config();
  config.hca = false;
  config.page_size = 12;
  EXPECT_NO_THROW(V4Backend(config, cpu));
  config = test::v4_config();
  config.hca_form = CompressorForm::kOnline;  // needs no ring
  config.hca_state_tokens = 0;
  EXPECT_NO_THROW(V4Backend(config, cpu));
}

TEST(V4Backend, RefusesTensorsThatDoNotFitBeforeItWrites) {
  V4Rig rig(test::v4_config(), Device::cpu(1));
  EXPECT_THROW(rig.backend.forward(0, {}), Error) << "no step has begun";
  const V4History history = test::v4_history(22, 10);
  rig.stage(ForwardMode::kExtend, {{0, 0, history}}, {});
  const auto refuses_batch = [&](const char* name, auto&& change) {
    V4Batch batch = rig.batch();
    change(batch);
    try {
      rig.backend.begin_step(batch);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(name));
      EXPECT_THAT(error.what(), HasSubstr("v4_backend"));
    }
  };
  refuses_batch("seq_len", [](V4Batch& b) { b.forward.seq_len = {}; });
  refuses_batch("in_slot", [](V4Batch& b) { b.in_slot.shape[0] = 2; });
  refuses_batch("out_slot", [](V4Batch& b) { b.in_slot = {}; });
  refuses_batch("window_table", [](V4Batch& b) { b.window_table = b.forward.req_to_token; });
  refuses_batch("snapshot_pos", [](V4Batch& b) { b.snapshot_seq = b.in_slot; });
  refuses_batch("snapshot_seq", [](V4Batch& b) {
    b.snapshot_seq = b.snapshot_pos = b.snapshot_slot = b.in_slot;
    b.forward.mode = ForwardMode::kIdle;
    b.forward.ext_len = {};
    b.forward.num_rows = 0;
    b.forward.padded_rows = 10;
    b.forward.seq_len.shape[0] = b.forward.pool_row.shape[0] = 0;
    b.in_slot.shape[0] = b.out_slot.shape[0] = 0;
  });
  rig.backend.begin_step(rig.batch());
  const std::vector<uint8_t> before = rig.pool_bytes();
  const auto refuses = [&](const char* name, int64_t layer, auto&& change) {
    V4ForwardTensors tensors = rig.tensors(layer);
    change(tensors);
    try {
      rig.backend.forward(test::kV4Ratios[static_cast<size_t>(layer)], tensors);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(name));
    }
  };
  using T = V4ForwardTensors;
  refuses("q", 0, [](T& t) { t.q = {}; });
  refuses("kv", 0, [](T& t) { t.kv.shape[1] = 511; });
  refuses("sink", 0, [](T& t) { t.sink.shape[0] = 1; });
  refuses("cos_sin", 0, [](T& t) { t.cos_sin = {}; });
  refuses("window_pool", 0, [](T& t) { t.window_pool = {}; });
  refuses("lse", 0, [](T& t) { t.lse = {}; });
  refuses("compressor.kv_gate", 1, [](T& t) { t.compressor.kv_gate = {}; });
  refuses("compressor.state", 2, [](T& t) { t.compressor.state.shape[1] = 127; });
  refuses("compressor.state", 2, [](T& t) { t.compressor.state.stride[1] += 2; });
  refuses("compressor.pool", 2, [](T& t) { t.compressor.pool = {}; });
  refuses("indexer.ape", 1, [](T& t) { t.indexer.ape = {}; });
  refuses("index_q", 1, [](T& t) { t.index_q = {}; });
  refuses("head_gate", 1, [](T& t) { t.head_gate = {}; });
  refuses("indices", 1, [](T& t) { t.indices.shape[1] = 5; });
  EXPECT_THROW(rig.backend.forward(2, rig.tensors(1)), Error);
  EXPECT_EQ(rig.pool_bytes(), before);
  V4StepPlan decode = rig.backend.make_step_plan({ForwardMode::kDecode, 1, 1});
  EXPECT_THROW(rig.backend.commit(decode, 0, rig.tensors(0), rig.batch().in_slot), Error);
  EXPECT_THROW(rig.backend.make_step_plan({ForwardMode::kExtend, 1, 1}), Error);
  V4Backend other(test::v4_config(), Device::cpu(1));
  EXPECT_THROW(other.begin_step(rig.batch(), &decode), Error);
  EXPECT_THROW(other.begin_step(rig.batch(), nullptr), Error);
}

}  // namespace
}  // namespace fovea
