#include "fovea/kda_decode.h"

#include "fovea/error.h"
#include "tests/kda/kda_case.h"
#include "tests/support/guarded_tensors.h"

namespace fovea {
namespace {

using test::DecodeCase;
using test::entry_bytes;
using test::kda_layer;
using test::PrefillCase;
using test::Tensor;

class KdaDecodeTest : public test::TargetTest {
 public:
  Options options() const { return GetParam().options(); }
  test::KdaLimits limits() const { return test::kda_limits(GetParam().implementation); }
  void run(DecodeCase& call, int threads = 1) { call.run(options(), threads); }
  void expect_reference(const DecodeCase& call) { test::expect_kda_reference(call, options()); }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaDecodeTest, testing::ValuesIn(test::targets_of("kda_decode")),
                         test::target_name);

const KdaLayer kSmall = kda_layer(1, 2, 16, 8);

bool all_bytes(const std::vector<uint8_t>& bytes, uint8_t value) {
  return std::all_of(bytes.begin(), bytes.end(), [&](uint8_t byte) { return byte == value; });
}

TEST_P(KdaDecodeTest, OneRowIsAPrefillOfOneToken) {
  const KdaLayer layer = kda_layer(2, 4, 64, 64);
  DecodeCase call(layer, 5);
  PrefillCase prefill(layer, {1, 1, 1, 1, 1});
  prefill.inputs = call.inputs;
  prefill.state = call.state;
  prefill.run({"ref"});
  run(call);
  EXPECT_TRUE(test::within(call.out.view(), prefill.out.view(), limits().out));
  EXPECT_TRUE(test::within(call.state.view(), prefill.state.view(), 1e-5));
}

TEST_P(KdaDecodeTest, EveryKindOfGateBetaNormAndStateType) {
  uint64_t seed = 200;
  for (const GateKind gate : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
    for (const DType gate_dtype : {DType::kBf16, DType::kF32}) {
      for (const int beta : {0, 1, 2}) {
        for (const bool normalise : {false, true}) {
          for (const DType state_dtype : {DType::kF32, DType::kBf16}) {
            KdaLayer layer = kda_layer(2, 4, 40, 24);
            layer.gate = {.kind = gate, .dtype = gate_dtype};
            layer.beta_kind = beta == 0 ? BetaKind::kProb : BetaKind::kLogit;
            layer.allow_neg_eigval = beta == 2;
            layer.beta_dtype = gate_dtype == DType::kBf16 ? DType::kF32 : DType::kBf16;
            layer.normalise = normalise;
            layer.state_dtype = state_dtype;
            SCOPED_TRACE(testing::Message() << "seed " << ++seed);
            DecodeCase separate(layer, 3, seed);
            expect_reference(separate);
            DecodeCase packed = separate;
            expect_reference(packed.packed().with_pool(5, {4, 0, 2}));
          }
        }
      }
    }
  }
}

TEST_P(KdaDecodeTest, HeadDimensions) {
  for (const auto& [dim_k, dim_v] : std::vector<std::pair<int64_t, int64_t>>{{64, 64},
                                                                             {128, 128},
                                                                             {64, 128},
                                                                             {128, 64},
                                                                             {60, 60},
                                                                             {100, 100},
                                                                             {1, 1},
                                                                             {3, 256},
                                                                             {256, 5},
                                                                             {17, 33}}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(testing::Message() << "K " << dim_k << ", V " << dim_v);
      KdaLayer layer = kda_layer(1, 3, dim_k, dim_v);
      layer.normalise = true;
      layer.state_dtype = dtype;
      expect_reference(DecodeCase(layer, 2, 5));
    }
  }
}

TEST_P(KdaDecodeTest, ThePackedRowHoldsTheSameTensors) {
  DecodeCase separate(kda_layer(2, 4, 20, 12), 4, 6);
  DecodeCase packed = separate;
  packed.packed();
  run(separate);
  run(packed);
  EXPECT_EQ(packed.out.bytes(), separate.out.bytes());
  EXPECT_EQ(packed.state.bytes(), separate.state.bytes());
}

TEST_P(KdaDecodeTest, RowsOfPaddingGiveZerosAndTouchNothing) {
  for (const std::vector<int32_t>& slots : std::vector<std::vector<int32_t>>{
           {-1, 4, 2}, {0, -1, 4}, {4, 0, -1}, {-1, -1, -1}, {3, 1, 0}, {5, 4, INT32_MIN}}) {
    SCOPED_TRACE(testing::PrintToString(slots));
    DecodeCase call(kSmall, 3, 7);
    call.with_pool(5, slots);
    const Tensor before = call.state;
    expect_reference(call);
    // What padding rows hold is not read.
    for (int64_t t = 0; t < 3; ++t) {
      const int32_t slot = slots[static_cast<size_t>(t)];
      if (slot >= 0 && slot < 5) continue;
      for (Tensor* tensor :
           {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.inputs.g, &call.inputs.beta}) {
        const int64_t row = tensor->view().num_elements() / 3;
        test::fill_elements(*tensor, t * row, (t + 1) * row, std::nanf(""));
      }
    }
    run(call);
    for (int64_t t = 0; t < 3; ++t) {
      const int32_t slot = slots[static_cast<size_t>(t)];
      EXPECT_EQ(all_bytes(entry_bytes(call.out, t), 0), slot < 0 || slot >= 5) << "row " << t;
    }
    for (int32_t slot = 0; slot < 5; ++slot) {
      const bool used = std::count(slots.begin(), slots.end(), slot) > 0;
      EXPECT_EQ(entry_bytes(call.state, slot) == entry_bytes(before, slot), !used) << slot;
    }
  }
}

TEST_P(KdaDecodeTest, AFreshSlotMayHoldNan) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kSmall;
    layer.state_dtype = dtype;
    DecodeCase call(layer, 3, 8);
    call.with_pool(4, {2, 1, 3});
    call.has_initial_state = Tensor::from<uint8_t>(DType::kU8, {3}, {0, 1, 0});
    const int64_t block = call.state.view().num_elements() / 4;
    test::fill_elements(call.state, 2 * block, 4 * block, std::nanf(""));
    expect_reference(call);
    run(call);
    for (const double value : test::to_doubles(call.state.view())) {
      EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST_P(KdaDecodeTest, ClosedGatesForgetTheState) {
  KdaLayer layer = kSmall;
  layer.gate.kind = GateKind::kGiven;
  DecodeCase call(layer, 2, 9);
  test::fill_elements(call.inputs.g, 0, 2 * 16, -1000.0f);
  expect_reference(call);
  DecodeCase fresh = call;
  fresh.has_initial_state = Tensor::from<uint8_t>(DType::kU8, {2}, {0, 1});
  run(call);
  run(fresh);
  EXPECT_EQ(call.out.bytes(), fresh.out.bytes());
}

TEST_P(KdaDecodeTest, BetaZeroOneAndTwo) {
  KdaLayer layer = kda_layer(1, 1, 16, 8);
  layer.gate.kind = GateKind::kGiven;
  for (const float beta : {0.0f, 1.0f, 2.0f}) {
    DecodeCase call(layer, 1, 10);
    test::fill(call.inputs.beta, beta);
    test::fill(call.inputs.g, 0.0f);
    test::fill(call.inputs.k, 0.25f);  // length 1
    const std::vector<double> before = test::to_doubles(call.state.view());
    expect_reference(call);
    run(call);
    const std::vector<double> after = test::to_doubles(call.state.view());
    for (size_t d = 0; d < 8; ++d) {
      double recalled_before = 0, recalled = 0;
      for (size_t c = 0; c < 16; ++c) {
        recalled_before += 0.25 * before[d * 16 + c];
        recalled += 0.25 * after[d * 16 + c];
      }
      const double v = bf16_to_float(call.inputs.v.data<bf16_t>()[d]);
      const double b = static_cast<double>(beta);
      EXPECT_NEAR(recalled, (1 - b) * recalled_before + b * v, 1e-5);
    }
    if (beta == 0) {
      EXPECT_EQ(after, before);
    }
  }
}

TEST_P(KdaDecodeTest, ZeroVectors) {
  for (const bool normalise : {false, true}) {
    KdaLayer layer = kSmall;
    layer.normalise = normalise;
    DecodeCase call(layer, 2, 11);
    test::fill_elements(call.inputs.q, 0, 16, 0.0f);
    test::fill_elements(call.inputs.k, 16, 32, 0.0f);
    expect_reference(call);
    run(call);
    for (const uint8_t byte : entry_bytes(call.out, 0)) EXPECT_EQ(byte & 0x7F, 0);
  }
}

TEST_P(KdaDecodeTest, BatchMatesAndThreadsChangeNoBit) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kda_layer(2, 4, 64, 32);
    layer.state_dtype = dtype;
    DecodeCase batch(layer, 7, 12);
    const DecodeCase untouched = batch;
    run(batch);
    for (const int threads : {2, 3, 8}) {
      DecodeCase again = untouched;
      run(again, threads);
      EXPECT_EQ(again.out.bytes(), batch.out.bytes());
      EXPECT_EQ(again.state.bytes(), batch.state.bytes());
    }
    DecodeCase alone = untouched;
    alone.slot = Tensor::i32({7}, {-1, -1, -1, 3, -1, -1, -1});
    run(alone);
    EXPECT_EQ(entry_bytes(alone.out, 3), entry_bytes(batch.out, 3));
    EXPECT_EQ(entry_bytes(alone.state, 3), entry_bytes(batch.state, 3));
  }
}

TEST_P(KdaDecodeTest, ManyStepsKeepTheLimits) {
  KdaLayer layer = kda_layer(1, 2, 64, 64);
  layer.normalise = true;
  DecodeCase actual(layer, 2, 13);
  DecodeCase expected = actual;
  for (uint64_t step = 0; step < 60; ++step) {
    actual.inputs = expected.inputs = test::KdaInputs(layer, 2, 300 + step);
    run(actual);
    expected.run({"ref"});
    EXPECT_TRUE(test::within(actual.out.view(), expected.out.view(), limits().out));
  }
  EXPECT_TRUE(test::within(actual.state.view(), expected.state.view(), 1e-5));
}

TEST_P(KdaDecodeTest, StridesAreHonouredAndGapsNotRead) {
  for (const bool packed_row : {false, true}) {
    KdaLayer layer = kda_layer(2, 4, 20, 12);
    DecodeCase call(layer, 3, 14);
    if (packed_row) call.packed();
    call.with_pool(5, {4, 0, 2});
    DecodeCase packed = call;
    run(packed);
    const test::Spread q(call.inputs.q, 8), k(call.inputs.k, 24), v(call.inputs.v, 3);
    const test::Spread g(call.inputs.g, 5), beta(call.inputs.beta, 7), state(call.state, 16);
    const test::Spread out(call.out, 9);
    KdaDecodeTensors tensors = call.tensors();
    tensors.g = g.view();
    tensors.beta = beta.view();
    tensors.state = state.view();
    tensors.out = out.view();
    const test::Spread qkv(packed_row ? call.qkv : call.inputs.q, 11);
    if (packed_row) {
      tensors.qkv = qkv.view();
    } else {
      tensors.q = q.view();
      tensors.k = k.view();
      tensors.v = v.view();
    }
    call.run(options(), tensors);
    EXPECT_EQ(test::to_doubles(out.view()), test::to_doubles(packed.out.view()));
    EXPECT_EQ(test::to_doubles(state.view()), test::to_doubles(packed.state.view()));
    for (int64_t i = 0; i < 5; ++i) {
      const std::vector<uint8_t> bytes = entry_bytes(state.storage(), i);
      EXPECT_TRUE(all_bytes({bytes.end() - 64, bytes.end()}, 0xFF));
    }
  }
}

TEST_P(KdaDecodeTest, TensorsMayEndAtAnUnreadablePage) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kda_layer(1, 2, 60, 20);
    layer.normalise = true;
    layer.state_dtype = dtype;
    DecodeCase call(layer, 1, 15);
    DecodeCase plain = call;
    run(plain);
    KdaDecodeTensors tensors = call.tensors();
    test::GuardedTensors memory;
    memory.guard(tensors.q);
    memory.guard(tensors.k);
    memory.guard(tensors.v);
    memory.guard(tensors.g);
    memory.guard(tensors.beta);
    memory.guard(tensors.a_log);
    memory.guard(tensors.dt_bias);
    memory.guard(tensors.state);
    memory.guard(tensors.out);
    const KdaDecode plan = KdaDecode::plan(call.problem, GetParam().device(), options());
    test::GuardedMemory scratch((plan.workspace_bytes() + 63) / 64 * 64);
    plan.run(tensors, {scratch.data(), plan.workspace_bytes()});
    EXPECT_EQ(test::to_doubles(tensors.out), test::to_doubles(plain.out.view()));
    EXPECT_EQ(test::to_doubles(tensors.state), test::to_doubles(plain.state.view()));
  }
}

TEST_P(KdaDecodeTest, TheLastSlotMayEndAtAnUnreadablePageBesidePadding) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    KdaLayer layer = kda_layer(1, 2, 20, 12);
    layer.state_dtype = dtype;
    DecodeCase call(layer, 3, 23);
    call.with_pool(3, {-1, 2, -1});
    DecodeCase plain = call;
    run(plain);
    test::GuardedTensors memory;
    KdaDecodeTensors tensors = call.tensors();
    memory.guard(tensors.state);
    call.run(options(), tensors);
    EXPECT_EQ(test::to_doubles(tensors.state), test::to_doubles(plain.state.view()));
    EXPECT_EQ(call.out.bytes(), plain.out.bytes());
  }
}

TEST_P(KdaDecodeTest, MoreThan65535RowsTimesHeads) {
  expect_reference(DecodeCase(kda_layer(4, 64, 2, 3), 1030, 16));
}

TEST_P(KdaDecodeTest, PoolsBeyond32Bits) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  DecodeCase call(kSmall, 2, 17);
  call.with_pool(3, {2, 1});
  DecodeCase expected = call;
  run(expected);
  const int64_t pitch = (int64_t{1} << 31) + 16;
  const int64_t block = call.state.view().num_elements() / 3;
  test::SparseMapping pool(static_cast<size_t>(2 * pitch + block) * sizeof(float));
  for (int64_t slot = 0; slot < 3; ++slot) {
    std::copy_n(call.state.data<float>() + slot * block, block,
                static_cast<float*>(pool.data()) + slot * pitch);
  }
  KdaDecodeTensors tensors = call.tensors();
  tensors.state.data = pool.data();
  tensors.state.stride[0] = pitch;
  call.run(options(), tensors);
  for (int64_t slot = 0; slot < 3; ++slot) {
    EXPECT_TRUE(std::equal(expected.state.data<float>() + slot * block,
                           expected.state.data<float>() + (slot + 1) * block,
                           static_cast<const float*>(pool.data()) + slot * pitch));
  }
  EXPECT_EQ(call.out.bytes(), expected.out.bytes());
}

TEST_P(KdaDecodeTest, CheckFindsFaultsBeforeAnythingIsWritten) {
  for (const auto& [slots, fault, entry] :
       std::vector<std::tuple<std::vector<int32_t>, KdaFault, int32_t>>{
           {{0, 5, 2}, KdaFault::kOutSlot, 1},
           {{3, 1, 3}, KdaFault::kDuplicateOutSlot, 2},
           {{-1, 4, -1}, KdaFault::kNone, -1}}) {
    DecodeCase call(kSmall, 3, 18);
    call.problem.check = true;
    call.with_pool(5, slots);
    call.report = Tensor(DType::kI32, {2});
    const std::vector<uint8_t> before = call.state.bytes();
    if (GetParam().kind == DeviceKind::kCpu && fault != KdaFault::kNone) {
      EXPECT_THROW(run(call), Error);
    } else {
      run(call);
    }
    EXPECT_EQ(call.report.values<int32_t>(),
              (std::vector<int32_t>{static_cast<int32_t>(fault), entry}));
    EXPECT_EQ(call.state.bytes() == before, fault != KdaFault::kNone);
    EXPECT_EQ(all_bytes(call.out.bytes(), 0x55), fault != KdaFault::kNone);
  }
}

TEST_P(KdaDecodeTest, NoRows) {
  DecodeCase call(kSmall, 0, 19);
  run(call);
  call.with_pool(4, {});
  const std::vector<uint8_t> before = call.state.bytes();
  run(call);
  EXPECT_EQ(call.state.bytes(), before);
}

TEST_P(KdaDecodeTest, RunDoesNotAllocate) {
  DecodeCase call(kSmall, 5, 20);
  call.problem.check = true;
  call.with_pool(9, {1, 5, -1, 8, 0});
  for (const int threads : {1, 2}) {
    const KdaDecode plan = KdaDecode::plan(call.problem, GetParam().device(threads), options());
    HostBuffer scratch(plan.workspace_bytes());
    const KdaDecodeTensors tensors = call.tensors();
    for (int warm_up = 0; warm_up < 5; ++warm_up) plan.run(tensors, scratch.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, scratch.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST(KdaDecode, RefusesWhatItsTablesDoNotList) {
  const Device cpu = Device::cpu(1);
  DecodeCase good(kSmall, 3, 1);
  good.with_pool(4, {0, 2, -1});
  const auto refuse_plan = [&](auto&& change) {
    KdaDecodeProblem problem = good.problem;
    change(problem);
    EXPECT_THROW(KdaDecode::plan(problem, cpu), Error);
  };
  refuse_plan([](KdaDecodeProblem& p) { p.max_rows = -1; });
  refuse_plan([](KdaDecodeProblem& p) { p.layer.num_value_heads = 0; });
  refuse_plan([](KdaDecodeProblem& p) { p.layer.head_dim_k = 0; });
  refuse_plan([](KdaDecodeProblem& p) { p.layer.state_dtype = DType::kI32; });

  const KdaDecode plan = KdaDecode::plan(good.problem, cpu);
  const auto refuse_run = [&](auto&& change) {
    DecodeCase call = good;
    const std::vector<uint8_t> before = call.state.bytes();
    KdaDecodeTensors tensors = call.tensors();
    change(tensors);
    EXPECT_THROW(test::run(plan, tensors), Error);
    EXPECT_TRUE(all_bytes(call.out.bytes(), 0x55));
    EXPECT_EQ(call.state.bytes(), before);
  };
  Tensor qkv(DType::kBf16, {3, 2 * 16 + 2 * 8});
  Tensor report(DType::kI32, {2});
  refuse_run([](KdaDecodeTensors& t) { t.q = {}; });
  refuse_run([&](KdaDecodeTensors& t) { t.qkv = qkv; });  // beside q, k, v
  refuse_run([&](KdaDecodeTensors& t) {
    t.q = t.k = t.v = {};
    t.qkv = qkv;
    t.qkv.shape[1] -= 1;
  });
  refuse_run([](KdaDecodeTensors& t) { t.state = {}; });
  refuse_run([](KdaDecodeTensors& t) { t.state.shape[3] = 8; });
  refuse_run([](KdaDecodeTensors& t) { t.state.stride[1] = 0; });  // heads that overlap
  refuse_run([](KdaDecodeTensors& t) { t.out.stride[0] = 8; });
  refuse_run([](KdaDecodeTensors& t) { t.slot.shape[0] = 2; });
  refuse_run([](KdaDecodeTensors& t) {
    t.slot = {};
    t.state.shape[0] = 2;  // fewer entries than rows
  });
  refuse_run([](KdaDecodeTensors& t) { t.out.shape[0] = 4; });
  refuse_run([&](KdaDecodeTensors& t) { t.report = report; });
}

}  // namespace
}  // namespace fovea
