#include "fovea/msa_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "src/core/fault_injection.h"
#include "src/core/kernel_fault.h"
#include "tests/serving/msa_rig.h"
#include "tests/support/devices.h"

namespace fovea {
namespace {

using test::kMsaDrafts;
using test::MsaRig;
using test::MsaRows;
using test::PoolForm;
using test::small_msa_config;
using testing::HasSubstr;

// Tests read and write the memory of the rigs.
class MsaBackendTest : public test::DeviceSuite {
 protected:
  void SetUp() override {
    DeviceSuite::SetUp();
    if (!IsSkipped()) readable_.emplace(device_);
  }

 private:
  std::optional<test::ReadableDeviceMemory> readable_;
};
INSTANTIATE_TEST_SUITE_P(Devices, MsaBackendTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

// Prefills in chunks, with and behind a prefix, a mixed step, decode, a verify, a decode behind it.
void serve(MsaRig& rig) {
  const auto step = [&](ForwardMode mode, const std::vector<MsaRows>& entries, int64_t padded = 0) {
    SCOPED_TRACE(to_string(mode));
    rig.step(mode, entries, padded);
    rig.expect_recomputed();
  };
  step(ForwardMode::kExtend, {{0, 0, 33}, {1, 0, 5}}, 2);
  step(ForwardMode::kExtend, {{1, 5, 18}, {0, 33, 7}, {2, 0, 1}});
  step(ForwardMode::kMixed, {{0, 40, 1}, {3, 0, 9}, {1, 23, 1}}, 1);
  step(ForwardMode::kDecode, {{0, 41, 1}, {1, 24, 1}, {2, 1, 1}, {3, 9, 1}});
  step(ForwardMode::kTargetVerify, {{0, 42, kMsaDrafts}, {3, 10, kMsaDrafts}}, 2);
  step(ForwardMode::kDecode, {{3, 11, 1}, {0, 44, 1}}, 1);
  step(ForwardMode::kDraftExtendV2, {{1, 25, kMsaDrafts}});
  step(ForwardMode::kDraftExtend, {{1, 28, 2}, {2, 2, 1}});
}

TEST_P(MsaBackendTest, EveryModeEqualsTheRecomputation) {
  for (const PoolForm form : {PoolForm::kSlots, PoolForm::kHeads, PoolForm::kInterleaved}) {
    SCOPED_TRACE(static_cast<int>(form));
    MsaRig rig(device_, small_msa_config(), form);
    serve(rig);
    EXPECT_EQ(rig.backend.routes().extend, 6);
    EXPECT_EQ(rig.backend.routes().decode, 4);
    EXPECT_EQ(rig.backend.routes().verify, 2);
    EXPECT_EQ(rig.backend.routes().draft, 4);
    EXPECT_EQ(rig.backend.routes().dense, 8);
  }
}

TEST_P(MsaBackendTest, EverySelectionEqualsTheRecomputation) {
  std::vector<MsaBackendConfig> configs(4, small_msa_config());
  configs[0].score = BlockScore::kLse;
  configs[0].index_scale = 0.25f;
  configs[0].softmax_scale = 0.5f;
  configs[1].index_reduce = IndexReduce::kMaxAll;
  configs[1].index_heads = 3;
  configs[1].local_blocks = 2;
  configs[2].index_reduce = IndexReduce::kUnion;
  configs[2].index_heads = 4;
  configs[2].topk = 3;
  configs[3].init_blocks = configs[3].local_blocks = 0;
  configs[3].deterministic = false;
  for (const MsaBackendConfig& config : configs) {
    SCOPED_TRACE(static_cast<int>(&config - configs.data()));
    MsaRig rig(device_, config);
    serve(rig);
  }
}

TEST_P(MsaBackendTest, AChunkedPrefillHasTheBitsOfAWholeOne) {
  MsaRig whole(device_), chunked(device_);
  whole.step(ForwardMode::kExtend, {{0, 0, 61}});
  int64_t begin = 0;
  for (const int64_t rows : {1, 7, 20, 4, 29}) {
    chunked.step(ForwardMode::kExtend, {{1, begin, 3}, {0, begin, rows}});
    for (int64_t i = 0; i < rows; ++i) {
      ASSERT_EQ(chunked.row_bits(3 + i), whole.row_bits(begin + i)) << "position " << begin + i;
    }
    begin += rows;
  }
  ASSERT_EQ(begin, 61);
}

// Decoded, verified, extended: in a plan, padded or not.
TEST_P(MsaBackendTest, ARowHasTheSameBitsInEveryMode) {
  MsaRig extended(device_), decoded(device_), verified(device_);
  for (MsaRig* rig : {&extended, &decoded, &verified}) {
    rig->step(ForwardMode::kExtend, {{0, 0, 30}, {1, 0, 11}});
  }
  MsaStepPlan decode = decoded.backend.make_step_plan({ForwardMode::kDecode, 2, 1});
  MsaStepPlan verify = verified.backend.make_step_plan({ForwardMode::kTargetVerify, 1, kMsaDrafts});
  extended.step(ForwardMode::kExtend, {{0, 30, 12}});
  for (int64_t p = 30; p < 42; p += kMsaDrafts) {
    verified.step(ForwardMode::kTargetVerify, {{0, p, kMsaDrafts}}, 0, &verify);
    for (int64_t i = 0; i < kMsaDrafts; ++i) {
      decoded.step(ForwardMode::kDecode, {{0, p + i, 1}, {1, p - 19 + i, 1}}, 0, &decode);
      ASSERT_EQ(verified.row_bits(i), extended.row_bits(p - 30 + i)) << p + i;
      ASSERT_EQ(decoded.row_bits(0), extended.row_bits(p - 30 + i)) << p + i;
    }
  }
}

TEST_P(MsaBackendTest, RejectedDraftsLeaveNothingVisible) {
  MsaRig drafted(device_), plain(device_);
  for (MsaRig* rig : {&drafted, &plain}) {
    rig->step(ForwardMode::kExtend, {{0, 0, 22}, {1, 0, 5}});
  }
  // Two of three rows are wrong, and reach into another block; one is right each round.
  for (int64_t p = 22; p < 34; ++p) {
    drafted.redraft(0, p + 1, p + kMsaDrafts, 1 + static_cast<int>(p % 3));
    drafted.step(ForwardMode::kTargetVerify, {{0, p, kMsaDrafts}});
    drafted.expect_recomputed();
    drafted.redraft(0, p + 1, p + kMsaDrafts, 0);
    plain.step(ForwardMode::kDecode, {{0, p, 1}});
    ASSERT_EQ(drafted.row_bits(0), plain.row_bits(0)) << p;
  }
  // A chain of drafts: rows behind the committed length, at their own slots.
  plain.step(ForwardMode::kDecode, {{0, 34, 1}}, 0, nullptr, 1);
  plain.expect_recomputed();
  const std::vector<uint8_t> chained = plain.row_bits(0);
  drafted.step(ForwardMode::kDecode, {{0, 34, 1}});
  EXPECT_EQ(drafted.row_bits(0), chained);
}

TEST_P(MsaBackendTest, AForwardWritesTheSlotsOfItsRowsAndNothingElse) {
  MsaRig rig(device_);
  rig.step(ForwardMode::kExtend, {{0, 0, 20}, {1, 0, 9}});
  const std::vector<MsaRows> rows = {{0, 20, kMsaDrafts}, {1, 9, kMsaDrafts}};
  const std::vector<uint8_t> before = rig.pools_without(rows), all = rig.pools();
  rig.step(ForwardMode::kTargetVerify, rows, 3);
  EXPECT_EQ(rig.pools_without(rows), before);
  EXPECT_NE(rig.pools(), all);
  rig.expect_recomputed();  // padding among it
  const std::vector<uint8_t> after = rig.pools();
  rig.step(ForwardMode::kIdle, {}, 4);
  rig.expect_recomputed();
  rig.step(ForwardMode::kIdle, {}, test::kMsaMaxRows);
  rig.expect_recomputed();
  rig.step(ForwardMode::kExtend, {}, 1);
  rig.expect_recomputed();
  EXPECT_EQ(rig.pools(), after);
  EXPECT_EQ(rig.backend.routes().idle, 6);
  rig.step(ForwardMode::kDecode, {{1, 12, 1}}, test::kMsaMaxRows - 1);
  rig.expect_recomputed();
}

// num_rows of a draft extension may be a bound: what lies behind the last request is padding.
TEST_P(MsaBackendTest, ADraftExtensionStoresItsOwnRowsAlone) {
  MsaRig rig(device_);
  rig.step(ForwardMode::kExtend, {{0, 0, 20}, {1, 0, 9}});
  MsaStepPlan plan = rig.backend.make_step_plan({ForwardMode::kDraftExtend, 2, kMsaDrafts});
  MsaBatch batch = rig.batch(ForwardMode::kDraftExtend, {{0, 20, 2}, {1, 9, 1}}, 3);
  const std::vector<MsaRows> live = {{0, 20, 2}, {1, 9, 1}};
  for (int64_t t = 3; t < 6; ++t) rig.cache_loc().data<int32_t>()[t] = rig.slot(0, 3);
  batch.forward.num_rows = 6;
  const std::vector<uint8_t> before = rig.pools_without(live);
  rig.backend.begin_step(batch, &plan);
  rig.run_layers(&plan);
  EXPECT_EQ(rig.pools_without(live), before);
  rig.expect_recomputed();
}

TEST_P(MsaBackendTest, PaddedRequestsOfABucketDisturbNobody) {
  MsaRig rig(device_), alone(device_);
  for (MsaRig* each : {&rig, &alone}) each->step(ForwardMode::kExtend, {{0, 0, 20}, {1, 0, 9}});
  MsaStepPlan plan = rig.backend.make_step_plan({ForwardMode::kTargetVerify, 4, kMsaDrafts});
  rig.batch(ForwardMode::kTargetVerify, {{0, 20, kMsaDrafts}, {1, 9, kMsaDrafts}}, 6);
  alone.step(ForwardMode::kTargetVerify, {{0, 20, kMsaDrafts}, {1, 9, kMsaDrafts}});
  const std::vector<int32_t> lengths = {20, 9, kPaddedSeqLen, kPaddedSeqLen};
  const std::vector<int32_t> rows = {1, 2, kPaddedPoolRow, kPaddedPoolRow};
  MsaBatch batch =
      rig.batch(ForwardMode::kTargetVerify, {{0, 20, kMsaDrafts}, {1, 9, kMsaDrafts}}, 6);
  const auto view = [](const std::vector<int32_t>& values) {
    return make_tensor(static_cast<const void*>(values.data()), DType::kI32, {4});
  };
  batch.forward.seq_len = view(lengths);
  batch.forward.pool_row = view(rows);
  batch.forward.num_rows = 4 * kMsaDrafts;
  const std::vector<MsaRows> live = {{0, 20, kMsaDrafts}, {1, 9, kMsaDrafts}};
  const std::vector<uint8_t> before = rig.pools_without(live);
  rig.backend.begin_step(batch, &plan);
  rig.run_layers(&plan);
  EXPECT_EQ(rig.pools_without(live), before);
  for (int64_t t = 0; t < 2 * kMsaDrafts; ++t) EXPECT_EQ(rig.row_bits(t), alone.row_bits(t)) << t;
}

// An engine's own indexer: any order, repeats, ids that nobody sees.
TEST_P(MsaBackendTest, AGivenSelectionReplacesTheIndexBranch) {
  MsaRig rig(device_);
  rig.step(ForwardMode::kExtend, {{0, 0, 30}});
  rig.step(ForwardMode::kTargetVerify, {{0, 30, kMsaDrafts}}, 1);
  std::vector<std::vector<uint8_t>> expected;
  for (int64_t t = 0; t < 4; ++t) expected.push_back(rig.row_bits(t));
  test::Tensor given = rig.blocks();
  const int64_t width = rig.backend.list_width();
  for (int64_t list = 0; list < 2 * 4; ++list) {
    int32_t* const ids = given.data<int32_t>() + list * width;
    std::reverse(ids, ids + width);
  }
  const std::vector<uint8_t> lists = rig.blocks().bytes();
  rig.forget_results();
  MsaForwardTensors tensors = rig.tensors(false);
  tensors.index_q = tensors.index_k = {};
  tensors.index_pool = tensors.blocks = {};
  tensors.topk_blocks = given;
  rig.backend.forward(tensors);
  synchronize(device_);
  const size_t list_bytes = static_cast<size_t>(2 * width) * 4;
  for (int64_t t = 0; t < 4; ++t) {
    std::vector<uint8_t> found = rig.row_bits(t), wanted = expected[static_cast<size_t>(t)];
    found.resize(found.size() - list_bytes);
    wanted.resize(wanted.size() - list_bytes);
    EXPECT_EQ(found, wanted) << t;
  }
  EXPECT_EQ(rig.backend.routes().given, 1);
}

// Rows that are in the pools already.
TEST_P(MsaBackendTest, WithoutNewRowsNothingIsStored) {
  MsaRig rig(device_);
  rig.step(ForwardMode::kExtend, {{0, 0, 30}});
  std::vector<std::vector<uint8_t>> expected;
  for (int64_t t = 0; t < 30; ++t) expected.push_back(rig.row_bits(t));
  const std::vector<uint8_t> before = rig.pools();
  rig.forget_results();
  MsaForwardTensors tensors = rig.tensors(false);
  tensors.k = tensors.v = tensors.index_k = {};
  rig.backend.forward(tensors);
  synchronize(device_);
  EXPECT_EQ(rig.pools(), before);
  for (int64_t t = 0; t < 30; ++t) EXPECT_EQ(rig.row_bits(t), expected[static_cast<size_t>(t)]);
}

// Slots, rows of the table and lengths that nobody has.
TEST_P(MsaBackendTest, HostileContentsAreMasked) {
  MsaRig rig(device_);
  rig.step(ForwardMode::kExtend, {{0, 0, 30}, {1, 0, 10}});
  MsaBatch batch = rig.batch(ForwardMode::kDecode, {{0, 30, 1}, {1, 10, 1}, {2, 0, 1}});
  const std::vector<uint8_t> before = rig.pools();
  for (const int32_t bad : {-1, 1 << 30}) {
    std::fill_n(rig.cache_loc().data<int32_t>(), 3, bad);
    rig.seq_len().data<int32_t>()[0] = bad;
    rig.seq_len().data<int32_t>()[1] = bad == -1 ? 0 : -5;
    rig.req_to_token().data<int32_t>()[3 * test::kMsaWidth] = bad;  // request 2
    rig.backend.begin_step(batch);
    rig.run_layers();
    EXPECT_EQ(rig.pools(), before);
  }
}

// Every launch of a step fails once: the cache of earlier tokens is as it was, and the step that is
// run again is right.
template <class Fault>
int64_t expect_repeatable(MsaRig& rig, MsaRig& plain, ForwardMode mode,
                          const std::vector<MsaRows>& rows, int64_t padded) {
  const std::vector<uint8_t> before = rig.pools_without(rows);
  int64_t failures = 0;
  for (int64_t nth = 1;; ++nth) {
    const Fault fault(nth);
    try {
      rig.step(mode, rows, padded);
    } catch (const Error& error) {
      ++failures;
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_EQ(rig.pools_without(rows), before) << "launch " << nth;
      continue;
    }
    EXPECT_FALSE(fault.fired());
    break;
  }
  plain.step(mode, rows, padded);
  for (int64_t t = 0; t < rig.total_rows(); ++t) EXPECT_EQ(rig.row_bits(t), plain.row_bits(t));
  EXPECT_EQ(rig.pools(), plain.pools());
  return failures;
}

TEST_P(MsaBackendTest, AFailedOperatorLeavesTheCacheConsistent) {
  MsaRig rig(device_), plain(device_);
  const auto repeat = [&](ForwardMode mode, const std::vector<MsaRows>& rows, int64_t padded) {
    // A refresh; three stores, a selection, attention; of the dense layer two stores, attention.
    EXPECT_EQ(expect_repeatable<internal::LaunchFault>(rig, plain, mode, rows, padded), 9);
    if (device_.kind == DeviceKind::kCuda) {
      EXPECT_GE(expect_repeatable<internal::KernelFault>(rig, plain, mode, rows, padded), 9);
    }
  };
  repeat(ForwardMode::kExtend, {{0, 0, 20}, {1, 0, 9}}, 1);
  repeat(ForwardMode::kDecode, {{1, 9, 1}, {0, 20, 1}}, 0);
  repeat(ForwardMode::kTargetVerify, {{0, 21, kMsaDrafts}}, 2);
}

TEST_P(MsaBackendTest, AFailedOperatorIsFollowedByTheNext) {
  if (device_.kind == DeviceKind::kCuda) GTEST_SKIP() << "most operators have one on a GPU";
  MsaBackendConfig config = small_msa_config();
  config.deterministic = false;
  for (int64_t nth = 1; nth <= 9; ++nth) {
    MsaRig rig(device_, config);
    const internal::LaunchFault fault(nth);
    rig.step(ForwardMode::kExtend, {{0, 0, 20}, {1, 0, 9}}, 1);
    rig.expect_recomputed();
    EXPECT_EQ(rig.backend.routes().fallback, 1) << nth;
  }
  config.strict = true;
  MsaRig strict(device_, config);
  const internal::LaunchFault fault(5);
  EXPECT_THROW(strict.step(ForwardMode::kExtend, {{0, 0, 20}}), Error);
  EXPECT_EQ(strict.backend.routes().fallback, 0);
}

TEST_P(MsaBackendTest, AForcedImplementationRunsEverywhere) {
  if (device_.kind == DeviceKind::kCuda) GTEST_SKIP() << "the references run on the CPU";
  MsaBackendConfig config = small_msa_config();
  config.implementation = "ref";
  MsaRig rig(device_, config);
  std::vector<OperatorCall> calls;
  rig.backend.set_profile(&calls);
  rig.step(ForwardMode::kExtend, {{0, 0, 30}});
  rig.expect_recomputed();
  rig.backend.set_profile(nullptr);
  ASSERT_EQ(calls.size(), 9u);
  for (const OperatorCall& call : calls) EXPECT_EQ(call.implementation, "ref") << call.name;
}

TEST_P(MsaBackendTest, TheProfileCountsWhatHasToBeDone) {
  MsaRig rig(device_);
  rig.step(ForwardMode::kExtend, {{0, 0, 29}});
  std::vector<OperatorCall> calls;
  rig.backend.set_profile(&calls);
  MsaBatch batch = rig.batch(ForwardMode::kDecode, {{0, 29, 1}});
  const std::vector<int32_t> host = {30};
  batch.forward.host_seq_len = host;
  rig.backend.begin_step(batch);
  rig.run_layers();
  rig.backend.set_profile(nullptr);
  const std::vector<std::string> names = {"metadata_refresh", "pack_rows",        "pack_rows",
                                          "msa_attend",       "pack_rows",        "pack_rows",
                                          "pack_rows",        "msa_score_select", "msa_attend"};
  ASSERT_EQ(calls.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(calls[i].name, names[i]);
  // 30 tokens of 4 heads of 16 channels, twice 2 flops; 3 whole blocks and 2 tokens of the own one.
  EXPECT_EQ(calls[3].flops, 30 * 4 * 16 * 4);
  EXPECT_EQ(calls[8].flops, 14 * 4 * 16 * 4);
  EXPECT_EQ(calls[8].bytes, 14 * 2 * 16 * 4 + 4 * 16 * 4);
  EXPECT_EQ(calls[7].flops, 30 * 2 * 16 * 2);
  EXPECT_EQ(calls[7].bytes, 2 * 4 * 4 + 2 * (30 * 16 + 2 * 16));
  EXPECT_EQ(calls[1].bytes, 2 * 16 * 4);
}

TEST_P(MsaBackendTest, RefusesAConfigurationNamingTheField) {
  const auto refused = [&](const char* fragment,
                           const std::function<void(MsaBackendConfig&)>& spoil) {
    MsaBackendConfig config = small_msa_config();
    spoil(config);
    try {
      const MsaBackend backend(config, device_);
      ADD_FAILURE() << "expected a refusal: " << fragment;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(std::string("msa_backend: ") + fragment));
    }
  };
  refused("page_size = 8, expected block_size = 4", [](auto& c) { c.page_size = 8; });
  refused("topk = 4, expected at least init_blocks + local_blocks = 5",
          [](auto& c) { c.local_blocks = 4; });
  refused("num_heads = 5", [](auto& c) { c.num_heads = 5; });
  refused("num_kv_heads", [](auto& c) { c.num_kv_heads = 0; });
  refused("num_heads = 3 with num_kv_heads = 2", [](auto& c) { c.index_heads = 3; });
  refused("head_dim", [](auto& c) { c.index_dim = 12; });
  refused("block_size", [](auto& c) { c.block_size = 512; });
  refused("topk", [](auto& c) { c.topk = c.init_blocks = c.local_blocks = 0; });
  refused("table_width", [](auto& c) { c.table_width = 0; });
  refused("max_requests", [](auto& c) { c.max_requests = 0; });
  refused("max_rows", [](auto& c) { c.max_rows = 0; });
  refused("rows_per_request", [](auto& c) { c.rows_per_request = 0; });
  refused("index_scale", [](auto& c) { c.index_scale = std::numeric_limits<float>::infinity(); });
  refused("implementation = 'none'", [](auto& c) { c.implementation = "none"; });
}

TEST_P(MsaBackendTest, RefusesTensorsBeforeAnythingIsWritten) {
  MsaRig rig(device_);
  const std::vector<uint8_t> before = rig.pools();
  const auto refused = [&](const char* fragment, const std::function<void()>& work) {
    try {
      work();
      ADD_FAILURE() << "expected a refusal: " << fragment;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("msa_backend: ") + fragment));
    }
    EXPECT_EQ(rig.pools(), before);
  };
  MsaBatch batch = rig.batch(ForwardMode::kExtend, {{0, 0, 5}});
  refused("no step has begun", [&] { rig.backend.forward(rig.tensors(false)); });
  refused("pool_row", [&] {
    MsaBatch bad = batch;
    bad.forward.pool_row = {};
    rig.backend.begin_step(bad);
  });
  refused("context_split", [&] {
    MsaBatch bad = batch;
    const ContextSplit split{};
    bad.forward.context_split = &split;
    bad.forward.store_positions = bad.forward.positions;
    rig.backend.begin_step(bad);
  });
  refused("bucket.mode", [&] { rig.backend.make_step_plan({ForwardMode::kExtend, 1, 1}); });
  refused("plan is null", [&] { rig.backend.begin_step(batch, nullptr); });
  rig.backend.begin_step(batch);
  const auto spoiled = [&](bool dense, const std::function<void(MsaForwardTensors&)>& spoil) {
    MsaForwardTensors bad = rig.tensors(dense);
    spoil(bad);
    dense ? rig.backend.forward_dense(bad) : rig.backend.forward(bad);
  };
  const auto sparse = [&](const char* fragment, auto spoil) {
    refused(fragment, [&] { spoiled(false, spoil); });
  };
  const auto dense = [&](const char* fragment, auto spoil) {
    refused(fragment, [&] { spoiled(true, spoil); });
  };
  sparse("q = ", [](auto& t) { t.q.shape[0] = 4; });
  sparse("q ", [](auto& t) { t.q = {}; });
  sparse("k ", [](auto& t) { t.k = {}; });
  sparse("v = ", [](auto& t) { t.v.dtype = DType::kF32; });
  sparse("index_q ", [](auto& t) { t.index_q = {}; });
  sparse("index_k ", [](auto& t) { t.index_k = {}; });
  sparse("index_pool ", [](auto& t) { t.index_pool = {}; });
  sparse("out = ", [](auto& t) { t.out.shape[1] = 2; });
  sparse("lse = ", [](auto& t) { t.lse.shape[0] = 1; });
  sparse("blocks = ", [](auto& t) { t.blocks.shape[2] = 3; });
  sparse("k_pool has 258 slots, expected a multiple of block_size = 4",
         [](auto& t) { t.k_pool.shape[0] = t.v_pool.shape[0] = 258; });
  sparse("index_pool has 257 slots", [](auto& t) { t.index_pool.shape[0] = 257; });
  sparse("v_pool = ", [](auto& t) { t.v_pool.shape[0] -= 4; });
  sparse("v_pool = ", [](auto& t) {
    t.v_pool.stride[0] *= 2;
    t.v_pool.shape[0] = t.k_pool.shape[0] = 128;
  });
  sparse("k_pool = ", [](auto& t) { t.k_pool.stride[1] = 8; });
  sparse("k_pool = ", [](auto& t) { t.k_pool.stride[0] = 16; });
  sparse("q = ", [](auto& t) { t.q.data = static_cast<const uint8_t*>(t.q.data) + 2; });
  sparse("index_q is given", [&](auto& t) { t.topk_blocks = rig.blocks(); });
  sparse("topk_blocks = ", [&](auto& t) {
    t.topk_blocks = rig.blocks();
    t.topk_blocks.shape[2] = 3;
    t.index_q = t.index_k = {};
    t.index_pool = t.blocks = {};
  });
  dense("index_q is given", [&](auto& t) { t.index_q = rig.tensors(false).index_q; });
  dense("topk_blocks is given", [&](auto& t) { t.topk_blocks = rig.blocks(); });
  dense("v_pool ", [](auto& t) { t.v_pool = {}; });
  MsaRig other(device_);
  MsaStepPlan plan = other.backend.make_step_plan({ForwardMode::kDecode, 1, 1});
  refused("the step plan belongs to another backend",
          [&] { rig.backend.begin_step(batch, &plan); });
  refused("the step plan belongs to another backend",
          [&] { rig.backend.forward(plan, rig.tensors(false)); });
  MsaBackendConfig config = small_msa_config();
  config.dense_layers = false;
  MsaRig sparse_only(device_, config);
  sparse_only.backend.begin_step(sparse_only.batch(ForwardMode::kExtend, {{0, 0, 5}}));
  refused("forward_dense, but dense_layers is off",
          [&] { sparse_only.backend.forward_dense(sparse_only.tensors(true)); });
}

TEST_P(MsaBackendTest, AStepAllocatesNothing) {
  if (device_.kind == DeviceKind::kCuda) GTEST_SKIP() << "counted on the CPU";
  MsaRig rig(parse_device("cpu", 1));
  MsaStepPlan plan = rig.backend.make_step_plan({ForwardMode::kTargetVerify, 2, kMsaDrafts});
  rig.step(ForwardMode::kExtend, {{0, 0, 20}, {1, 0, 9}});
  rig.step(ForwardMode::kTargetVerify, {{0, 20, kMsaDrafts}, {1, 9, kMsaDrafts}}, 0, &plan);
  const MsaBatch batch =
      rig.batch(ForwardMode::kTargetVerify, {{0, 22, kMsaDrafts}, {1, 10, kMsaDrafts}});
  const MsaForwardTensors dense = rig.tensors(true), sparse = rig.tensors(false);
  const test::AllocationCounter counter;
  rig.backend.begin_step(batch, &plan);
  rig.backend.forward_dense(plan, dense);
  rig.backend.forward(plan, sparse);
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace fovea
