#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/log.h"
#include "fovea/numeric.h"
#include "src/core/fault_injection.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::StepOptions;
using test::Tensor;
using test::to_doubles;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;

DsaConfig tiny(RowFormat format = RowFormat::kV32) { return DsaRig::small_config(4, format); }

// Expects `act` to throw an Error of this code whose text contains every word.
template <class Act>
void expect_error(ErrorCode code, const std::vector<std::string>& words, Act act) {
  try {
    act();
    ADD_FAILURE() << "no error about " << words.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
    }
  }
}

TEST(DsaBackendConfig, RefusesFieldsByName) {
  const auto refuses = [](const std::string& field, auto change,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    DsaConfig config = tiny();
    change(config);
    expect_error(code, {"dsa_backend: " + field}, [&] { DsaBackend(config, Device::cpu(1)); });
  };
  refuses("num_heads", [](auto& c) { c.num_heads = 0; });
  refuses("index_heads", [](auto& c) { c.index_heads = -1; });
  refuses("index_dim", [](auto& c) { c.index_dim = 96; });  // hadamard needs a power of two
  refuses("rope_dim", [](auto& c) { c.rope_dim = 63; });
  refuses("rope_dim", [](auto& c) { c.rope_dim = 130; });
  refuses("topk", [](auto& c) { c.topk = 0; });
  refuses("page_size", [](auto& c) { c.page_size = 257; });
  refuses("row_format", [](auto& c) { c.row_format = RowFormat::kI132; });
  refuses("max_rows", [](auto& c) { c.max_rows = -1; });
  refuses("max_requests", [](auto& c) { c.max_requests = int64_t{1} << 31; });
  refuses("table_width", [](auto& c) { c.table_width = 0; });
  refuses("rows_per_request", [](auto& c) { c.rows_per_request = 0; });
  refuses(
      "draft_topk = 2", [](auto& c) { c.draft_topk = 2; }, ErrorCode::kUnsupported);
  refuses("logits_budget_bytes", [](auto& c) { c.logits_budget_bytes = 0; });
  refuses("mha_chunk_capacity", [](auto& c) { c.mha_chunk_capacity = -1; });
  refuses("implementation", [](auto& c) { c.implementation = "nonsense"; });
  refuses("prefill_implementation", [](auto& c) { c.prefill_implementation = "one_shot_mha"; });
  refuses(
      "prefill_implementation", [](auto& c) { c.prefill_implementation = "contiguous_bf16"; },
      ErrorCode::kUnsupported);  // with deterministic
}

TEST(DsaBackendConfig, OneNameForcesEveryOperatorThatHasIt) {
  DsaConfig config = tiny();
  config.implementation = "ref";
  DsaRig reference(config, 1), free_choice(tiny(), 1);
  std::vector<OperatorCall> calls;
  reference.backend().set_profile(&calls);
  for (DsaRig* rig : {&reference, &free_choice}) rig->step(kExtend, {{0, 20}});
  for (const OperatorCall& call : calls) EXPECT_EQ(call.implementation, "ref") << call.name;
  for (const auto& [key, row] : reference.results()) {
    EXPECT_EQ(row.positions, free_choice.results().at(key).positions);
  }
}

// What each kind of bad input must say, and that nothing is written before it is said.
class DsaBackendBadInput : public testing::Test {
 protected:
  using Adjust = std::function<void(ForwardBatch&, DsaForwardTensors&)>;
  void refuses(const std::vector<std::string>& words, Adjust change, ForwardMode mode = kExtend,
               ErrorCode code = ErrorCode::kInvalidArgument) {
    DsaRig rig(tiny(), 1);
    rig.step(kExtend, {{0, 9}, {1, 9}});
    Tensor pools[2];
    bool touched = false;
    StepOptions options;
    ConstTensorView kv, index;
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
      kv = tensors.kv_pool;
      index = tensors.index_pool;
      for (const auto& [pool, copy] : {std::pair{kv, &pools[0]}, {index, &pools[1]}}) {
        *copy = Tensor(DType::kU8, {pool.shape[0], pool.shape[1]});
        std::memcpy(copy->data<uint8_t>(), pool.data, copy->bytes().size());
      }
      change(batch, tensors);
      touched = true;
    };
    expect_error(code, words, [&] {
      rig.step(mode,
               mode == kExtend ? std::vector<std::pair<int, int>>{{0, 3}, {1, 2}}
                               : std::vector<std::pair<int, int>>{{0, 1}, {1, 1}},
               options);
    });
    ASSERT_TRUE(touched);
    EXPECT_EQ(std::memcmp(kv.data, pools[0].data<uint8_t>(), pools[0].bytes().size()), 0);
    EXPECT_EQ(std::memcmp(index.data, pools[1].data<uint8_t>(), pools[1].bytes().size()), 0);
    for (const uint8_t byte : rig.out.bytes()) ASSERT_EQ(byte, 0xFF);
    for (const uint8_t byte : rig.lse.bytes()) ASSERT_EQ(byte, 0xFF);
  }

  static inline const std::vector<int32_t> lengths_;
};

TEST_F(DsaBackendBadInput, ModesOutsideTheBackendAreNamed) {
  refuses(
      {"dsa_backend: mode = 7", "seven forward modes"},
      [](auto& batch, auto&) { batch.mode = static_cast<ForwardMode>(7); }, kExtend,
      ErrorCode::kUnsupported);
}

TEST_F(DsaBackendBadInput, HostLengthsNameRequestAndField) {
  static constexpr int32_t kShort[] = {12, 1}, kNegative[] = {12, -3}, kLong[] = {129, 11},
                           kOne[] = {12}, kRows[] = {3, -1}, kSum[] = {3, 3};
  refuses({"request 1", "host_seq_len = 1", "2 new rows"},
          [](auto& batch, auto&) { batch.host_seq_len = kShort; });
  refuses({"request 1", "host_seq_len = -3"},
          [](auto& batch, auto&) { batch.host_seq_len = kNegative; });
  refuses({"request 0", "host_seq_len = 129", "table_width = 128"},
          [](auto& batch, auto&) { batch.host_seq_len = kLong; });
  refuses({"host_seq_len has 1"}, [](auto& batch, auto&) { batch.host_seq_len = kOne; });
  refuses({"host_ext_len has 1"}, [](auto& batch, auto&) { batch.host_ext_len = kOne; });
  refuses({"host_ext_len has 0"}, [](auto& batch, auto&) { batch.host_ext_len = {}; });
  refuses({"request 1", "host_ext_len = -1"},
          [](auto& batch, auto&) { batch.host_ext_len = kRows; });
  refuses({"host_ext_len sums to 6", "num_rows = 5"},
          [](auto& batch, auto&) { batch.host_ext_len = kSum; });
  refuses(
      {"request 0", "host_ext_len = 3", "mode decode"},
      [](auto& batch, auto&) { batch.host_ext_len = kSum; }, kDecode);
  // N = 1 in these modes; seq_len counts the row of the drafts and not that of verify.
  static constexpr int32_t kZero[] = {9, 0}, kTwo[] = {1, 2};
  const auto zero_length = [](auto& batch, auto&) { batch.host_seq_len = kZero; };
  refuses({"request 1", "host_seq_len = 0", "1 new rows", "draft_extend_v2"}, zero_length,
          ForwardMode::kDraftExtendV2);
  refuses({"request 1", "host_seq_len = 0", "1 new rows"}, zero_length, ForwardMode::kDraftExtend);
  refuses(
      {"request 1", "host_seq_len = -3"},
      [](auto& batch, auto&) { batch.host_seq_len = kNegative; }, ForwardMode::kTargetVerify);
  refuses(
      {"request 1", "host_ext_len = 2", "at most 1"},
      [](auto& batch, auto&) { batch.host_ext_len = kTwo; }, ForwardMode::kDraftExtend);
}

TEST_F(DsaBackendBadInput, BatchTensorsAndCounts) {
  refuses({"seq_len is missing"}, [](auto& batch, auto&) { batch.seq_len = {}; });
  refuses({"pool_row"}, [](auto& batch, auto&) { batch.pool_row.shape[0] = 1; });
  refuses({"ext_len is missing"}, [](auto& batch, auto&) { batch.ext_len = {}; });
  refuses(
      {"ext_len is given"}, [](auto& batch, auto&) { batch.ext_len = batch.seq_len; }, kDecode);
  refuses({"req_to_token"}, [](auto& batch, auto&) { batch.req_to_token.shape[1] = 127; });
  refuses({"positions"}, [](auto& batch, auto&) { batch.positions.shape[0] = 4; });
  refuses({"out_cache_loc"}, [](auto& batch, auto&) { batch.out_cache_loc = {}; });
  refuses({"padded_rows = 4", "num_rows = 5"}, [](auto& batch, auto&) { batch.padded_rows = 4; });
  refuses({"padded_rows = 161"}, [](auto& batch, auto&) { batch.padded_rows = 161; });
  refuses({"num_rows = 161"}, [](auto& batch, auto&) { batch.num_rows = 161; });
  refuses(
      {"num_rows = 1", "2 requests"}, [](auto& batch, auto&) { batch.num_rows = 1; }, kDecode);
  refuses(
      {"num_rows = 3", "expected 1 for each of the 2 requests in mode target_verify"},
      [](auto& batch, auto&) { batch.num_rows = 3; }, ForwardMode::kTargetVerify);
  refuses(
      {"num_rows = 3", "at most 2 requests * rows_per_request = 2"},
      [](auto& batch, auto&) {
        batch.num_rows = 3;
        batch.host_seq_len = batch.host_ext_len = {};
      },
      ForwardMode::kDraftExtend);
}

TEST_F(DsaBackendBadInput, ForwardTensors) {
  refuses({"q is missing"}, [](auto&, auto& t) { t.q = {}; });
  refuses({"q = bf16"}, [](auto&, auto& t) { t.q.shape[2] = 512; });
  refuses({"out = bf16"}, [](auto&, auto& t) { t.out.shape[0] = 4; });
  refuses({"lse"}, [](auto&, auto& t) { t.lse.dtype = DType::kBf16; });
  refuses({"k = bf16"}, [](auto&, auto& t) { t.k.shape[1] = 512; });
  refuses({"index_q is missing"}, [](auto&, auto& t) { t.index_q = {}; });
  refuses({"index_k is missing"}, [](auto&, auto& t) { t.index_k = {}; });
  refuses({"head_gate"}, [](auto&, auto& t) { t.head_gate.shape[1] = 3; });
  refuses({"norm_weight"}, [](auto&, auto& t) { t.norm_weight = {}; });
  refuses({"cos_sin"}, [](auto&, auto& t) { t.cos_sin.shape[1] = 32; });
  refuses({"cos_sin.shape[0] = 0"}, [](auto&, auto& t) { t.cos_sin.shape[0] = 0; });
  refuses({"kv_pool"}, [](auto&, auto& t) { t.kv_pool.shape[1] = 2623; });
  refuses({"index_pool"}, [](auto&, auto& t) { t.index_pool.shape[1] = 527; });
  refuses({"indices"}, [](auto&, auto& t) { t.indices.shape[1] = 7; });
  refuses({"topk_indices"}, [](auto&, auto& t) {
    t.topk_indices = t.indices;
    t.topk_indices.shape[1] = 9;
    t.indices = {};
  });
  refuses({"indices is given beside topk_indices"},
          [](auto&, auto& t) { t.topk_indices = t.indices; });
}

TEST_F(DsaBackendBadInput, AFailedStepLeavesThePreviousOne) {
  DsaRig rig(tiny(), 1);
  rig.step(kExtend, {{0, 9}});
  const std::vector<double> before = to_doubles(rig.backend().metadata().row_len);
  StepOptions options;
  options.adjust = [](ForwardBatch& batch, DsaForwardTensors&) { batch.pool_row = {}; };
  EXPECT_THROW(rig.step(kDecode, {{0, 1}}, options), Error);
  EXPECT_EQ(to_doubles(rig.backend().metadata().row_len), before);
}

TEST(DsaBackend, ForwardNeedsAStepAndASaneScale) {
  DsaBackend backend(tiny(), Device::cpu(1));
  expect_error(ErrorCode::kInvalidArgument, {"begin_step"}, [&] {
    backend.forward({0, 1.0f}, {});
  });
  DsaRig rig(tiny(), 1);
  rig.step(kExtend, {{0, 1}});
  for (const float scale : {0.0f, -1.0f, kInf, std::nanf("")}) {
    expect_error(ErrorCode::kInvalidArgument, {"softmax_scale"}, [&] {
      rig.backend().forward({0, scale}, {});
    });
  }
}

// Device contents without host lengths: masked or clamped, never out of bounds, never an error.
// Scores within 1e-3 of 0 weigh every selected key alike.
TEST(DsaBackend, ASoftCapReachesTheKernelOfEveryFormat) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    for (const std::string prefill : {"cache_direct", "contiguous_bf16"}) {
      DsaConfig config = tiny(format);
      config.deterministic = false;
      if (format != RowFormat::kF576) config.prefill_implementation = prefill;
      DsaRig rig(config, 1);
      rig.layer.logit_cap = 1e-3f;
      rig.step(kExtend, {{0, 20}});
      rig.step(kDecode, {{0, 1}});
      for (const auto& [key, row] : rig.results()) {
        const auto kept = static_cast<double>(std::min(key.second + 1, config.topk));
        for (const float lse : row.lse) EXPECT_NEAR(lse, std::log(kept), 2e-3);
      }
      EXPECT_EQ(rig.results().size(), 21u);
    }
  }
}

TEST(DsaBackend, HostileDeviceContentsAreMasked) {
  test::Rng rng(3);
  const int32_t low = std::numeric_limits<int32_t>::min(), high = -(low + 1);
  for (int repeat = 0; repeat < 60; ++repeat) {
    DsaRig rig(tiny(repeat % 2 == 0 ? RowFormat::kV32 : RowFormat::kBf16), 1 + repeat % 2);
    rig.step(kExtend, {{0, 30}, {1, 9}});
    const auto hostile = [&](int64_t count) {
      std::vector<int32_t> values(static_cast<size_t>(count));
      for (int32_t& value : values) {
        const int32_t choices[] = {low, -1, 0, 1, 5, 30, 129, high};
        value = choices[rng.integer(0, 7)];
      }
      return Tensor::i32({count}, values);
    };
    const bool decode = repeat % 3 == 0;
    const int64_t rows = decode ? 2 : 9;
    const Tensor seq = hostile(2), ext = hostile(2), pool_row = hostile(2), loc = hostile(rows),
                 positions = hostile(rows);
    Tensor table = Tensor(DType::kI32, {3, 128});
    for (int64_t i = 0; i < 3 * 128; ++i) {
      const int32_t choices[] = {low, -1, 0, 8, 100, 100000, high};
      table.data<int32_t>()[i] = choices[rng.integer(0, 6)];
    }
    StepOptions options;
    options.host_lengths = false;
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) {
      batch.seq_len = seq;
      batch.pool_row = pool_row;
      if (!decode) batch.ext_len = ext;
      batch.out_cache_loc = loc;
      batch.positions = positions;
      batch.req_to_token = table;
    };
    rig.step(decode ? kDecode : kExtend,
             decode ? std::vector<std::pair<int, int>>{{0, 1}, {1, 1}}
                    : std::vector<std::pair<int, int>>{{0, 4}, {1, 5}},
             options);
    const auto row_len = to_doubles(rig.backend().metadata().row_len);
    for (size_t row = 0; row < row_len.size(); ++row) {
      if (row_len[row] > 0) continue;
      for (size_t h = 0; h < 4; ++h) EXPECT_EQ(rig.lse.data<float>()[row * 4 + h], -kInf);
    }
  }
}

TEST(DsaBackend, StepsAndForwardsDoNotAllocate) {
  for (const bool fuse : {true, false}) {
    for (const int threads : {1, 2}) {
      DsaConfig config = tiny();
      config.fuse_transform = fuse;
      DsaRig rig(config, threads);
      rig.step(kExtend, {{0, 20}, {1, 12}});
      rig.step(kDecode, {{0, 1}, {1, 1}});
      // The same step again, on tensors that exist already.
      StepOptions options;
      options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
        rig.backend().begin_step(batch);
        rig.backend().forward({0, DsaRig::kSoftmaxScale}, tensors);
        const test::AllocationCounter counter;
        rig.backend().begin_step(batch);
        rig.backend().forward({0, DsaRig::kSoftmaxScale}, tensors);
        EXPECT_EQ(counter.count(), 0) << "threads " << threads << " fused " << fuse;
      };
      rig.step(kDecode, {{0, 1}, {1, 1}}, options);
      rig.step(kExtend, {{0, 5}, {1, 6}}, options);
      rig.step(kExtend, {{2, 3}}, options);
    }
  }
}

// Every operator of a step fails once in turn.
TEST(DsaBackend, AFailedImplementationIsFollowedByTheNext) {
  DsaConfig config = tiny();
  config.deterministic = false;
  DsaRig expected(config, 1);
  expected.step(kExtend, {{0, 20}});
  std::vector<OperatorCall> calls;
  expected.backend().set_profile(&calls);
  expected.step(kExtend, {{0, 9}});
  for (size_t nth = 0; nth < calls.size(); ++nth) {
    DsaRig rig(config, 1);
    rig.step(kExtend, {{0, 20}});
    if (calls[nth].implementation == "ref") {  // the last one: nothing follows it
      const internal::LaunchFault fault(static_cast<int64_t>(nth) + 1);
      expect_error(ErrorCode::kDevice, {calls[nth].name}, [&] { rig.step(kExtend, {{0, 9}}); });
      continue;
    }
    std::string log;
    set_log_sink([&](LogLevel level, std::string_view message) {
      if (level == LogLevel::kError) log += message;
    });
    std::vector<OperatorCall> actual;
    rig.backend().set_profile(&actual);
    {
      const internal::LaunchFault fault(static_cast<int64_t>(nth) + 1);
      rig.step(kExtend, {{0, 9}});
      EXPECT_TRUE(fault.fired());
    }
    set_log_sink({});
    EXPECT_NE(log.find(calls[nth].name + ": " + calls[nth].implementation + " failed"),
              std::string::npos)
        << log;
    ASSERT_EQ(actual.size(), calls.size());
    EXPECT_NE(actual[nth].implementation, calls[nth].implementation);
    for (const auto& [key, row] : rig.results()) {
      EXPECT_EQ(row.positions, expected.results().at(key).positions);
    }
    // Two implementations, one of which may round its probabilities to bf16.
    EXPECT_LT(
        test::relative_rms(test::to_doubles(rig.out.view()), test::to_doubles(expected.out.view())),
        5e-3);
  }
}

TEST(DsaBackend, NothingFollowsAFailureWhereBitsOrANameWerePromised) {
  for (const int promise : {0, 1, 2}) {
    DsaConfig config = tiny();
    config.deterministic = promise == 0;
    config.strict = promise == 1;
    if (promise == 2) config.implementation = "cpu";
    DsaRig rig(config, 1);
    rig.step(kExtend, {{0, 20}});
    const internal::LaunchFault fault(4);
    expect_error(ErrorCode::kDevice, {"index_store"}, [&] { rig.step(kExtend, {{0, 9}}); });
  }
}

TEST(DsaBackend, ASuppliedSelectionSkipsTheIndexer) {
  for (const bool fuse : {true, false}) {
    DsaConfig config = tiny();
    config.fuse_transform = fuse;
    DsaRig first(config, 1), second(config, 1);
    for (DsaRig* rig : {&first, &second}) rig->step(kExtend, {{0, 30}, {1, 6}});
    first.step(kDecode, {{0, 1}, {1, 1}});
    const Tensor selection = first.indices;
    std::vector<OperatorCall> calls;
    second.backend().set_profile(&calls);
    StepOptions options;
    options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
      tensors.topk_indices = selection;
      tensors.index_q = tensors.index_k = tensors.head_gate = {};
      tensors.norm_weight = tensors.norm_bias = tensors.cos_sin = {};
      tensors.index_pool = {};
      tensors.indices = {};
    };
    second.step(kDecode, {{0, 1}, {1, 1}}, options);
    EXPECT_EQ(first.out.bytes(), second.out.bytes());
    EXPECT_EQ(first.lse.bytes(), second.lse.bytes());
    for (const OperatorCall& call : calls) EXPECT_EQ(call.name.find("index_"), std::string::npos);
  }
}

TEST(DsaBackend, AStaleLocalSelectionIsRebuiltWhereTheRowFits) {
  DsaConfig config = tiny();
  config.fuse_transform = false;
  DsaRig fresh(config, 1), stale(config, 1);
  for (DsaRig* rig : {&fresh, &stale}) rig->step(kExtend, {{0, 5}, {1, 6}});
  stale.step(kDecode, {{0, 1}, {1, 1}});
  fresh.step(kDecode, {{0, 1}, {1, 1}});
  const Tensor selection = stale.indices;  // lacks the token that the next step adds
  StepOptions options;
  options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
    tensors.topk_indices = selection;
    tensors.indices = {};
  };
  stale.step(kDecode, {{0, 1}, {1, 1}}, options);
  fresh.step(kDecode, {{0, 1}, {1, 1}});
  EXPECT_EQ(fresh.out.bytes(), stale.out.bytes());
}

TEST(DsaBackend, RowsAlreadyInThePoolNeedNoK) {
  DsaRig rig(tiny(), 1);
  rig.step(kExtend, {{0, 30}});
  const Tensor stored_out = rig.out;
  // Ask again about the last five rows without storing anything.
  Tensor q(DType::kBf16, {5, 4, 576}), index_q(DType::kBf16, {5, 4, 128}),
      gate(DType::kF32, {5, 4}), positions(DType::kI32, {5});
  for (int64_t i = 0; i < 5; ++i) {
    const test::Token token = test::make_token(rig.config(), 0, 25 + i);
    std::memcpy(q.data<bf16_t>() + i * 4 * 576, token.q.data(), 4 * 576 * 2);
    std::memcpy(index_q.data<bf16_t>() + i * 4 * 128, token.index_q.data(), 4 * 128 * 2);
    std::memcpy(gate.data<float>() + i * 4, token.gate.data(), 16);
    positions.data<int32_t>()[i] = static_cast<int32_t>(25 + i);
  }
  const Tensor seq = Tensor::i32({1}, {30}), ext = Tensor::i32({1}, {5});
  StepOptions options;
  options.host_lengths = false;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
    batch.seq_len = seq;
    batch.ext_len = ext;
    batch.positions = positions;
    tensors.q = q;
    tensors.k = tensors.index_k = {};
    tensors.index_q = index_q;
    tensors.head_gate = gate;
  };
  rig.step(kExtend, {{0, 5}}, options);
  EXPECT_EQ(std::memcmp(rig.out.data<bf16_t>(), stored_out.data<bf16_t>() + 25 * 4 * 512,
                        5 * 4 * 512 * 2),
            0);
}

TEST(DsaBackend, ProfilesCountTheWorkOfTheLiveRows) {
  DsaRig rig(tiny(), 1);
  rig.step(kExtend, {{0, 30}, {1, 5}});
  std::vector<OperatorCall> calls;
  rig.backend().set_profile(&calls);
  rig.step(kDecode, {{0, 1}, {1, 1}}, {.padded_rows = 4});  // lengths 31 and 6, topk 8
  rig.backend().set_profile(nullptr);
  rig.step(kDecode, {{0, 1}});
  std::vector<std::string> names;
  for (const OperatorCall& call : calls) {
    names.push_back(call.name);
    EXPECT_GE(call.elapsed_ms, 0);
    EXPECT_FALSE(call.implementation.empty());
    EXPECT_GT(call.bytes, 0);
    if (call.name == "sparse_mla") {
      // 8 and 6 slots; 14 distinct tokens of 656 bytes, q and out of two rows.
      EXPECT_EQ(call.flops, 2.0 * 4 * 14 * (576 + 512));
      EXPECT_EQ(call.bytes, 14.0 * 656 + 2 * 4 * (576 + 512) * 2);
    } else if (call.name == "index_select") {
      // Only the first row is longer than topk: 31 keys in 8 pages of 4.
      EXPECT_EQ(call.flops, 31.0 * (2 * 4 * 128 + 2 * 4));
      EXPECT_EQ(call.bytes, 8.0 * 4 * 132 + 4 * 132 + 8 * 31 + 4 * 2 * 8);
    } else if (call.name == "pack_rows") {
      EXPECT_EQ(call.bytes, 2.0 * (1152 + 656));
    } else if (call.name == "index_store") {
      EXPECT_EQ(call.bytes, 2.0 * (132 + 132));
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"metadata_refresh", "index_quantize", "pack_rows",
                                             "index_store", "index_select", "sparse_mla"}));
}

}  // namespace
}  // namespace fovea
