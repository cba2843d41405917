#include "fovea/kda_verify.h"

#include <gmock/gmock.h>

#include <cstring>

#include "fovea/error.h"
#include "src/core/fault_injection.h"
#include "tests/kda/verify_case.h"

namespace fovea {
namespace {

using test::DecodeCase;
using test::draft_bytes;
using test::flags_of;
using test::kda_layer;
using test::list_of;
using test::Tensor;
using test::VerifyCase;

constexpr VerifyMode kModes[] = {VerifyMode::kStates, VerifyMode::kRecords};

class KdaVerifyTest : public test::TargetTest {
 protected:
  Options options() const { return GetParam().options(); }
  test::KdaLimits limits() const { return test::kda_limits(GetParam().implementation); }
  void run(VerifyCase& call, int threads = 1) { call.run(options(), threads); }

  void expect_reference(const VerifyCase& call) {
    VerifyCase expected = call;
    expected.run({"ref"});
    VerifyCase first = call;
    for (const int threads : {1, 3}) {
      VerifyCase actual = call;
      run(actual, threads);
      EXPECT_TRUE(test::within(actual.out.view(), expected.out.view(), limits().out));
      EXPECT_TRUE(
          test::within(actual.scratch.view(), expected.scratch.view(), limits().state_fp32));
      EXPECT_EQ(actual.state.bytes(), call.state.bytes());
      if (threads == 1) first = actual;
      EXPECT_EQ(actual.out.bytes(), first.out.bytes());
      EXPECT_EQ(actual.scratch.bytes(), first.scratch.bytes());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaVerifyTest, testing::ValuesIn(test::targets_of("kda_verify")),
                         test::target_name);

TEST_P(KdaVerifyTest, AgreesWithTheReferenceForEveryKindAndSize) {
  uint64_t seed = 1;
  for (const VerifyMode mode : kModes) {
    for (const auto& [dim_k, dim_v] : std::vector<std::pair<int64_t, int64_t>>{
             {128, 128}, {64, 64}, {60, 100}, {100, 60}, {1, 3}, {256, 5}}) {
      SCOPED_TRACE(std::to_string(dim_k) + " x " + std::to_string(dim_v));
      KdaLayer layer = kda_layer(1, 2, dim_k, dim_v);
      layer.normalise = seed % 2 == 0;
      layer.gate.kind = static_cast<GateKind>(seed % 3);
      layer.gate.dtype = seed % 2 == 0 ? DType::kF32 : DType::kBf16;
      layer.beta_kind = seed % 4 < 2 ? BetaKind::kProb : BetaKind::kLogit;
      layer.allow_neg_eigval = layer.beta_kind == BetaKind::kLogit;
      layer.beta_dtype = seed % 3 == 0 ? DType::kBf16 : DType::kF32;
      layer.state_dtype = seed % 3 == 1 ? DType::kBf16 : DType::kF32;
      VerifyCase call(layer, mode, 4, 3, seed);
      call.with_pool(6, {5, -1, 2, 6});
      call.has_initial_state = flags_of({1, 1, 0, 1});
      expect_reference(call);
      call.parent = list_of({-1, 0, 0});
      expect_reference(call);
      ++seed;
    }
  }
}

TEST_P(KdaVerifyTest, StatesEqualRecordsEqualADecodeLoop) {
  constexpr int64_t kRequests = 3, kDrafts = 5;
  for (const DType pool_dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kda_layer(2, 4, 64, 64);
    layer.state_dtype = pool_dtype;
    VerifyCase states(layer, VerifyMode::kStates, kRequests, kDrafts);
    states.with_pool(5, {4, 0, 2});
    VerifyCase records = states.in_mode(VerifyMode::kRecords);
    run(states);
    run(records);
    EXPECT_EQ(states.out.bytes(), records.out.bytes());
    // The loop keeps its state in fp32: a verify rounds once, when it is committed.
    KdaLayer wide = layer;
    wide.state_dtype = DType::kF32;
    DecodeCase step(wide, kRequests);
    const std::vector<double> start = test::to_doubles(states.state.view());
    step.state = Tensor::f32({5, 4, 64, 64}, std::vector<float>(start.begin(), start.end()));
    step.slot = states.slot;
    for (int64_t t = 0; t < kDrafts; ++t) {
      std::vector<std::vector<int64_t>> rows(kRequests, {t});
      step.inputs = states.rows_of(rows).inputs;
      step.inputs.layer = wide;
      step.run({"ref"});
      for (int64_t r = 0; r < kRequests; ++r) {
        const int64_t row = r * kDrafts + t;
        const int32_t slot = states.slot.data<int32_t>()[r];
        EXPECT_TRUE(test::within(slice_rows(states.out.view(), row, row + 1),
                                 slice_rows(step.out.view(), r, r + 1), limits().out))
            << "request " << r << ", draft " << t;
        TensorView kept = states.scratch.view();
        kept.data = states.scratch.data<float>() + row * 4 * 64 * 64;
        kept.rank = 3;
        kept.shape = {4, 64, 64, 0, 0};
        kept.stride = {64 * 64, 64, 1, 0, 0};
        TensorView stepped = kept;
        stepped.data = step.state.data<float>() + slot * 4 * 64 * 64;
        EXPECT_TRUE(test::within(kept, stepped, limits().state_fp32));
      }
    }
  }
}

TEST_P(KdaVerifyTest, RecordsHoldTheKeyAsUsedTheLogDecayAndTheCorrection) {
  // One channel, one value: everything by hand. Softplus gate, normalised key, logit beta.
  KdaLayer layer = kda_layer(1, 1, 1, 1);
  layer.normalise = true;
  layer.beta_kind = BetaKind::kLogit;
  layer.gate.dtype = DType::kF32;
  layer.scale = 2;
  VerifyCase call(layer, VerifyMode::kRecords, 1, 2);
  const auto bf16 = [](std::vector<float> values) {
    return test::float_tensor(DType::kBf16, {2, 1, 1}, values);
  };
  call.inputs.q = bf16({3, 3});
  call.inputs.k = bf16({-4, 5});
  call.inputs.v = bf16({1.5, -2});
  call.inputs.g = Tensor::f32({2, 1, 1}, {0.5f, -1});
  call.inputs.beta = Tensor::f32({2, 1}, {0, 1});
  call.inputs.a_log = Tensor::f32({1}, {0.25f});
  call.inputs.dt_bias = Tensor::f32({1, 1}, {0.125f});
  call.state = Tensor::f32({1, 1, 1, 1}, {0.75f});
  run(call);
  double state = 0.75;
  for (int t = 0; t < 2; ++t) {
    const double key = t == 0 ? -4 / std::sqrt(16 + 1e-6) : 5 / std::sqrt(25 + 1e-6);
    const double gate = -std::exp(0.25) * std::log1p(std::exp(t == 0 ? 0.625 : -0.875));
    const double beta = t == 0 ? 0.5 : 1 / (1 + std::exp(-1.0));
    state *= std::exp(gate);
    const double u = beta * ((t == 0 ? 1.5 : -2) - key * state);
    state += key * u;
    const float* record = call.scratch.data<float>() + 3 * t;
    EXPECT_NEAR(record[0], key, 1e-6);
    EXPECT_NEAR(record[1], gate, 1e-6);
    EXPECT_NEAR(record[2], u, 1e-6);
    const double out = 2 * 3 / std::sqrt(9 + 1e-6) * state;
    EXPECT_NEAR(bf16_to_float(call.out.data<bf16_t>()[t]), out, 0.005 * std::abs(out));
  }
}

TEST_P(KdaVerifyTest, EveryPathOfATreeIsAChainOfItsOwn) {
  // Illegal parents count as -1: the row itself, a later one, one beyond the tree, -2.
  const std::vector<int32_t> parent{-1, 0, 0, 1, 3, 2, -1, 7, 9, 2000000000, -2, 6};
  const std::vector<std::vector<int64_t>> paths{
      {0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 2, 5}, {6}, {7}, {8}, {9}, {10}, {6, 11}};
  const auto rows = static_cast<int64_t>(parent.size());
  for (const VerifyMode mode : kModes) {
    for (const int64_t dim_k : {64, 36}) {
      VerifyCase tree(kda_layer(1, 2, dim_k, 20), mode, 2, rows);
      tree.parent = list_of(parent);
      run(tree);
      for (int64_t t = 0; t < rows; ++t) {
        const auto& path = paths[static_cast<size_t>(t)];
        const auto length = static_cast<int64_t>(path.size());
        VerifyCase chain = tree.rows_of({path, path});
        run(chain);
        for (int64_t r = 0; r < 2; ++r) {
          const int64_t from = r * rows + t, to = r * length + length - 1;
          EXPECT_EQ(draft_bytes(tree.out, 2 * rows, from), draft_bytes(chain.out, 2 * length, to))
              << "row " << t;
          EXPECT_EQ(draft_bytes(tree.scratch, 2 * rows, from),
                    draft_bytes(chain.scratch, 2 * length, to))
              << "row " << t;
        }
      }
    }
  }
}

TEST_P(KdaVerifyTest, ARowDoesNotDependOnTheRowsBehindItOrOnItsMates) {
  for (const VerifyMode mode : kModes) {
    VerifyCase call(kda_layer(1, 3, 64, 23), mode, 3, 4);
    run(call);
    VerifyCase changed = call;
    for (int64_t i = 0; i < 3 * 23; ++i) {
      changed.inputs.v.data<bf16_t>()[(4 + 2) * 3 * 23 + i] = bf16_t{0x7FC0};
    }
    run(changed);
    for (int64_t row = 0; row < 12; ++row) {
      const bool is_changed = row == 6 || row == 7;
      EXPECT_EQ(draft_bytes(changed.out, 12, row) == draft_bytes(call.out, 12, row), !is_changed);
      EXPECT_EQ(draft_bytes(changed.scratch, 12, row) == draft_bytes(call.scratch, 12, row),
                !is_changed);
    }
    VerifyCase alone = call.rows_of({{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}});
    EXPECT_EQ(alone.inputs.k.bytes(), call.inputs.k.bytes());
    VerifyCase shorter = call.rows_of({{0, 1}, {0, 1}, {0, 1}});
    run(shorter);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t t = 0; t < 2; ++t) {
        EXPECT_EQ(draft_bytes(shorter.out, 6, 2 * r + t), draft_bytes(call.out, 12, 4 * r + t));
      }
    }
  }
}

TEST_P(KdaVerifyTest, PoolIsOnlyReadAndPaddingIsZero) {
  for (const VerifyMode mode : kModes) {
    KdaLayer layer = kda_layer(1, 2, 32, 16);
    VerifyCase call(layer, mode, 4, 2);
    call.with_pool(4, {-1, 3, 4, 1});
    // Slots that nobody names, and the one of a fresh request, may hold NaN.
    call.has_initial_state = flags_of({1, 1, 1, 0});
    for (const int64_t slot : {0, 1, 2}) {
      test::fill_elements(call.state, slot * 1024, (slot + 1) * 1024, std::nanf(""));
    }
    const Tensor before = call.state;
    run(call);
    EXPECT_EQ(call.state.bytes(), before.bytes());
    for (const int64_t r : {0, 2}) {
      for (int64_t t = 0; t < 2; ++t) {
        for (const uint8_t byte : draft_bytes(call.out, 8, 2 * r + t)) ASSERT_EQ(byte, 0);
        for (const uint8_t byte : draft_bytes(call.scratch, 8, 2 * r + t)) ASSERT_EQ(byte, 0);
      }
    }
    VerifyCase fresh = call;
    test::fill(fresh.state, 0);
    run(fresh);
    for (const int64_t row : {6, 7}) {
      EXPECT_EQ(draft_bytes(call.out, 8, row), draft_bytes(fresh.out, 8, row));
    }
    for (const double value : test::to_doubles(call.out.view())) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_P(KdaVerifyTest, PackedRowsAndStridesGiveTheSameBits) {
  for (const VerifyMode mode : kModes) {
    KdaLayer layer = kda_layer(2, 4, 32, 24);
    VerifyCase call(layer, mode, 2, 3);
    DecodeCase packed(layer, 6);
    packed.inputs = call.inputs;
    packed.packed();
    VerifyCase joined = call;
    joined.qkv = packed.qkv;
    run(call);
    run(joined);
    EXPECT_EQ(joined.out.bytes(), call.out.bytes());
    EXPECT_EQ(joined.scratch.bytes(), call.scratch.bytes());
    // Rows and slots further apart, with NaN between and behind them.
    VerifyCase apart = call;
    apart.out.fill_bytes(0x55);
    const test::Spread q(call.inputs.q, 8, 1), k(call.inputs.k, 5), v(call.inputs.v, 3, 2),
        g(call.inputs.g, 16, 1), beta(call.inputs.beta, 3, 2), state(call.state, 64, 1),
        out(apart.out, 9), scratch(apart.scratch, 31);
    KdaVerifyTensors tensors = apart.tensors();
    tensors.q = q.view();
    tensors.k = k.view();
    tensors.v = v.view();
    tensors.g = g.view();
    tensors.beta = beta.view();
    tensors.state = state.view();
    tensors.state.shape[0] = 2;
    tensors.out = out.view();
    tensors.scratch = scratch.view();
    apart.run(options(), tensors);
    EXPECT_EQ(test::to_doubles(out.view()), test::to_doubles(call.out.view()));
    EXPECT_EQ(test::to_doubles(scratch.view()), test::to_doubles(call.scratch.view()));
  }
}

TEST_P(KdaVerifyTest, ChannelsThatForgetEverythingAndKeepEverything) {
  for (const VerifyMode mode : kModes) {
    KdaLayer layer = kda_layer(1, 1, 64, 64);
    layer.gate.kind = GateKind::kGiven;
    layer.gate.dtype = DType::kF32;
    VerifyCase call(layer, mode, 2, 4);
    for (int64_t i = 0; i < 2 * 4 * 64; ++i) {
      call.inputs.g.data<float>()[i] = i % 10 == 0 ? -1000.0f : i % 10 == 1 ? 0.0f : -0.1f;
    }
    expect_reference(call);
    // All channels of one token: the state starts again there.
    for (int64_t i = 0; i < 64; ++i) call.inputs.g.data<float>()[2 * 64 + i] = -1000.0f;
    expect_reference(call);
    VerifyCase other = call;
    test::fill_elements(other.state, 0, 64 * 64, 3);
    run(call);
    run(other);
    for (const int64_t row : {2, 3}) {
      EXPECT_EQ(draft_bytes(call.out, 8, row), draft_bytes(other.out, 8, row));
    }
    EXPECT_NE(draft_bytes(call.out, 8, 1), draft_bytes(other.out, 8, 1));
  }
}

TEST_P(KdaVerifyTest, NoRequestsAndAFailedLaunchWriteNothing) {
  for (const VerifyMode mode : kModes) {
    VerifyCase none(kda_layer(1, 1, 32, 16), mode, 0, 3);
    run(none);
    VerifyCase call(kda_layer(1, 1, 32, 16), mode, 2, 3);
    const VerifyCase before = call;
    const internal::LaunchFault fault(1);
    EXPECT_THROW(run(call), Error);
    EXPECT_TRUE(fault.fired());
    EXPECT_EQ(call.out.bytes(), before.out.bytes());
    EXPECT_EQ(call.scratch.bytes(), before.scratch.bytes());
    EXPECT_EQ(call.state.bytes(), before.state.bytes());
  }
}

TEST_P(KdaVerifyTest, RunsWithoutAllocations) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << "counts allocations of the host";
  VerifyCase call(kda_layer(1, 2, 64, 32), VerifyMode::kRecords, 2, 3);
  call.problem.check = true;
  const KdaVerify plan = KdaVerify::plan(call.problem, GetParam().device(2), options());
  HostBuffer workspace(plan.workspace_bytes());
  const KdaVerifyTensors tensors = call.tensors();
  plan.run(tensors, workspace.workspace());
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
}

TEST_P(KdaVerifyTest, CheckReportsSlotsOutOfRange) {
  VerifyCase call(kda_layer(1, 1, 32, 16), VerifyMode::kStates, 3, 2);
  call.with_pool(4, {3, 3, -1});
  call.problem.check = true;
  call.report = Tensor(DType::kI32, {2});
  run(call);
  EXPECT_EQ(call.report.data<int32_t>()[0], 0);
  call.slot = list_of({3, 4, -1});
  call.out.fill_bytes(0x55);
  const Tensor before = call.out;
  if (GetParam().kind == DeviceKind::kCuda) {
    run(call);
  } else {
    EXPECT_THROW(run(call), Error);
  }
  EXPECT_EQ(call.report.values<int32_t>(),
            (std::vector<int32_t>{static_cast<int32_t>(KdaFault::kOutSlot), 1}));
  EXPECT_EQ(call.out.bytes(), before.bytes());
}

TEST(KdaVerify, RefusesWhatItsContractDoesNotList) {
  const VerifyCase good(kda_layer(1, 2, 32, 16), VerifyMode::kStates, 3, 2);
  const auto refusal = [&](const auto& change) {
    VerifyCase call = good;
    change(call);
    const Tensor before = call.out;
    try {
      call.run({});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(call.out.bytes(), before.bytes());
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal([](VerifyCase&) {}), "");
  const auto expect = [&](const char* word, const auto& change) {
    EXPECT_THAT(refusal(change), testing::HasSubstr(word));
  };
  expect("rows_per_request", [](VerifyCase& call) { call.problem.rows_per_request = 0; });
  expect("max_requests", [](VerifyCase& call) { call.problem.max_requests = -1; });
  expect("rows_per_request", [](VerifyCase& call) { call.problem.max_requests = 2; });
  expect("multiple", [](VerifyCase& call) { call.problem.rows_per_request = 4; });
  expect("scratch", [](VerifyCase& call) { call.problem.mode = VerifyMode::kRecords; });
  expect("scratch", [](VerifyCase& call) { call.scratch = {}; });
  expect("state", [](VerifyCase& call) { call.state = {}; });
  expect("state", [](VerifyCase& call) { call.problem.layer.state_dtype = DType::kBf16; });
  expect("state.shape[0]",
         [](VerifyCase& call) { call.state = test::random_states(call.problem.layer, 2, 1); });
  expect("slot", [](VerifyCase& call) { call.slot = list_of({0, 1}); });
  expect("parent", [](VerifyCase& call) { call.parent = list_of({-1}); });
  expect("a_log", [](VerifyCase& call) { call.inputs.a_log = {}; });
  expect("qkv", [](VerifyCase& call) { call.qkv = Tensor(DType::kBf16, {6, 5}); });
  expect("report", [](VerifyCase& call) { call.report = Tensor(DType::kI32, {2}); });
  VerifyCase call = good;
  KdaVerifyTensors tensors = call.tensors();
  tensors.scratch.stride[1] = 32 * 16;
  EXPECT_THROW(call.run({}, tensors), Error);
}

}  // namespace
}  // namespace fovea
