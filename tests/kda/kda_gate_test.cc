#include "fovea/kda_gate.h"

#include "fovea/error.h"
#include "tests/kda/kda_case.h"

namespace fovea {
namespace {

using test::kda_layer;
using test::Tensor;

class KdaGateTest : public test::TargetTest {
 public:
  Tensor run(const KdaGateProblem& problem, const KdaGateTensors& inputs, int threads = 1) {
    Tensor out(DType::kF32, {inputs.g.shape[0], problem.num_value_heads, problem.head_dim_k});
    KdaGateTensors tensors = inputs;
    tensors.log_decay = out;
    const Options options = GetParam().options();
    test::run(KdaGateActivation::plan(problem, GetParam().device(threads), options), tensors);
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, KdaGateTest, testing::ValuesIn(test::targets_of("kda_gate")),
                         test::target_name);

// The formulas of the header, once more.
double expected_log_decay(const KdaGate& gate, double g, double bias, double a_log) {
  const double a = static_cast<double>(static_cast<float>(g) + static_cast<float>(bias));
  if (gate.kind == GateKind::kGiven) return a;
  if (gate.kind == GateKind::kSoftplus) {
    return -std::exp(a_log) * (a > 20 ? a : std::log(1 + std::exp(a)));
  }
  return static_cast<double>(gate.lower_bound) / (1 + std::exp(-std::exp(a_log) * a));
}

TEST_P(KdaGateTest, EveryKindFollowsItsFormula) {
  constexpr int64_t kRows = 37, kHeads = 3, kDim = 60;
  for (const GateKind kind : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      KdaLayer layer = kda_layer(1, kHeads, kDim, 1);
      layer.gate = {.kind = kind, .lower_bound = -3.5f, .dtype = dtype};
      test::KdaInputs inputs(layer, kRows, 5);
      KdaGateTensors tensors{.g = inputs.g};
      if (kind != GateKind::kGiven) {
        tensors.a_log = inputs.a_log;
        tensors.dt_bias = inputs.dt_bias;
      }
      const Tensor actual = run(
          {.max_rows = kRows, .num_value_heads = kHeads, .head_dim_k = kDim, .gate = layer.gate},
          tensors);
      const std::vector<double> raw = test::to_doubles(inputs.g.view());
      std::vector<float> expected;
      for (int64_t i = 0; i < kRows * kHeads * kDim; ++i) {
        const int64_t h = i / kDim % kHeads;
        const bool given = kind == GateKind::kGiven;
        expected.push_back(static_cast<float>(expected_log_decay(
            layer.gate, raw[static_cast<size_t>(i)],
            given ? 0.0 : static_cast<double>(inputs.dt_bias.data<float>()[h * kDim + i % kDim]),
            given ? 0.0 : static_cast<double>(inputs.a_log.data<float>()[h]))));
      }
      EXPECT_TRUE(
          test::within(actual.view(), Tensor::f32({kRows, kHeads, kDim}, expected).view(), 1e-5));
    }
  }
}

// One channel.
KdaGateProblem one_channel(const KdaGate& gate, int64_t rows) {
  return {.max_rows = rows, .num_value_heads = 1, .head_dim_k = 1, .gate = gate};
}

TEST_P(KdaGateTest, ARawGateOfMinusThousandIsNeutralForLargeRatesOnly) {
  const KdaGate gate{.kind = GateKind::kLowerBound, .dtype = DType::kF32};
  const Tensor g = Tensor::f32({1, 1, 1}, {-1000.0f});
  for (const auto& [a_log, expected] :
       std::vector<std::pair<float, double>>{{0, 0}, {-4, -5.6e-8}, {-5, -0.0059}, {-6, -0.386}}) {
    const Tensor rate = Tensor::f32({1}, {a_log});
    const Tensor out = run(one_channel(gate, 1), {.g = g, .a_log = rate});
    EXPECT_NEAR(out.data<float>()[0], expected, 0.02 * std::fabs(expected));
  }
}

TEST_P(KdaGateTest, ExtremesStayInTheirRange) {
  const std::vector<float> raw = {-3e38f, -1000, -100, -20, 0, 20, 20.00001f, 100, 1000, 3e38f};
  const Tensor g = Tensor::f32({10, 1, 1}, raw);
  for (const float a_log : {-8.0f, 0.0f, 4.0f}) {
    const Tensor rate = Tensor::f32({1}, {a_log});
    const Tensor bounded =
        run(one_channel({.kind = GateKind::kLowerBound, .dtype = DType::kF32}, 10),
            {.g = g, .a_log = rate});
    const Tensor unbounded =
        run(one_channel({.kind = GateKind::kSoftplus, .dtype = DType::kF32}, 10),
            {.g = g, .a_log = rate});
    for (size_t i = 0; i < 10; ++i) {
      EXPECT_GE(bounded.values<float>()[i], -5.0f);
      EXPECT_LE(bounded.values<float>()[i], 0.0f);
      EXPECT_LE(unbounded.values<float>()[i], 0.0f);
    }
    EXPECT_NEAR(unbounded.values<float>()[8], -1000 * std::exp(static_cast<double>(a_log)),
                1e-5 * 1000 * std::exp(static_cast<double>(a_log)));
  }
  const Tensor given =
      run(one_channel({.kind = GateKind::kGiven, .dtype = DType::kF32}, 10), {.g = g});
  EXPECT_EQ(given.values<float>(), raw);  // not clamped
}

TEST_P(KdaGateTest, ARateBeyondFp32GivesNoNan) {
  const Tensor rate = Tensor::f32({1}, {100});
  const Tensor closed = Tensor::f32({1, 1, 1}, {-1000});
  const Tensor zero = Tensor::f32({1, 1, 1}, {0});
  const KdaGate softplus{.kind = GateKind::kSoftplus, .dtype = DType::kF32};
  EXPECT_EQ(run(one_channel(softplus, 1), {.g = closed, .a_log = rate}).data<float>()[0], 0.0f);
  const KdaGate bounded{.kind = GateKind::kLowerBound, .lower_bound = -4, .dtype = DType::kF32};
  EXPECT_EQ(run(one_channel(bounded, 1), {.g = zero, .a_log = rate}).data<float>()[0], -2.0f);
}

TEST_P(KdaGateTest, WithoutARateTheLowerBoundGateHasRateOne) {
  const KdaGate gate{.kind = GateKind::kLowerBound, .lower_bound = -2, .dtype = DType::kF32};
  const Tensor g = Tensor::f32({3, 1, 1}, {-1, 0, 2});
  const Tensor zero = Tensor::f32({1}, {0});
  const Tensor absent = run(one_channel(gate, 3), {.g = g});
  EXPECT_EQ(absent.bytes(), run(one_channel(gate, 3), {.g = g, .a_log = zero}).bytes());
  EXPECT_EQ(absent.data<float>()[1], -1.0f);
}

TEST_P(KdaGateTest, NanStaysInItsElement) {
  for (const GateKind kind : {GateKind::kSoftplus, GateKind::kLowerBound, GateKind::kGiven}) {
    KdaLayer layer = kda_layer(1, 2, 70, 1);
    layer.gate.kind = kind;
    test::KdaInputs inputs(layer, 3, 6);
    KdaGateTensors tensors{.g = inputs.g};
    if (kind != GateKind::kGiven) tensors.a_log = inputs.a_log;
    const KdaGateProblem problem{
        .max_rows = 3, .num_value_heads = 2, .head_dim_k = 70, .gate = layer.gate};
    const std::vector<float> clean = run(problem, tensors).values<float>();
    test::fill_elements(inputs.g, 200, 201, std::nanf(""));
    tensors.g = inputs.g;
    const std::vector<float> actual = run(problem, tensors).values<float>();
    for (size_t i = 0; i < clean.size(); ++i) {
      if (i == 200) {
        EXPECT_TRUE(std::isnan(actual[i]));
      } else {
        EXPECT_EQ(actual[i], clean[i]);
      }
    }
  }
}

TEST_P(KdaGateTest, NeighboursStridesAndThreadsChangeNoBit) {
  KdaLayer layer = kda_layer(1, 5, 60, 1);
  layer.gate.dtype = DType::kF32;
  const test::KdaInputs inputs(layer, 33, 7);
  const KdaGateProblem problem{
      .max_rows = 33, .num_value_heads = 5, .head_dim_k = 60, .gate = layer.gate};
  KdaGateTensors tensors{.g = inputs.g, .a_log = inputs.a_log, .dt_bias = inputs.dt_bias};
  const Tensor packed = run(problem, tensors);
  for (const int threads : {2, 3, 8})
    EXPECT_EQ(run(problem, tensors, threads).bytes(), packed.bytes());
  const test::Spread g(inputs.g, 7), bias(inputs.dt_bias, 3);
  tensors.g = g.view();
  tensors.dt_bias = bias.view();
  EXPECT_EQ(run(problem, tensors).bytes(), packed.bytes());
  // The last row alone.
  tensors.g = slice_rows(inputs.g.view(), 32, 33);
  EXPECT_EQ(run(problem, tensors).bytes(), test::entry_bytes(packed, 32));
  tensors.g = slice_rows(inputs.g.view(), 0, 0);
  EXPECT_TRUE(run(problem, tensors).bytes().empty());
}

TEST_P(KdaGateTest, RunDoesNotAllocate) {
  KdaLayer layer = kda_layer(1, 5, 60, 1);
  test::KdaInputs inputs(layer, 33, 8);
  const KdaGateProblem problem{
      .max_rows = 33, .num_value_heads = 5, .head_dim_k = 60, .gate = layer.gate};
  Tensor out(DType::kF32, {33, 5, 60});
  const KdaGateTensors tensors{
      .g = inputs.g, .a_log = inputs.a_log, .dt_bias = inputs.dt_bias, .log_decay = out};
  for (const int threads : {1, 2}) {
    const KdaGateActivation plan =
        KdaGateActivation::plan(problem, GetParam().device(threads), GetParam().options());
    HostBuffer scratch(plan.workspace_bytes());
    for (int warm_up = 0; warm_up < 5; ++warm_up) plan.run(tensors, scratch.workspace());
    const test::AllocationCounter counter;
    plan.run(tensors, scratch.workspace());
    EXPECT_EQ(counter.count(), 0);
  }
}

TEST(KdaGate, RefusesWhatItsTablesDoNotList) {
  const Device cpu = Device::cpu(1);
  const KdaLayer layer = kda_layer(1, 2, 4, 1);
  test::KdaInputs inputs(layer, 3, 9);
  const KdaGateProblem good{
      .max_rows = 3, .num_value_heads = 2, .head_dim_k = 4, .gate = layer.gate};
  const auto refuse_plan = [&](auto&& change) {
    KdaGateProblem problem = good;
    change(problem);
    EXPECT_THROW(KdaGateActivation::plan(problem, cpu), Error);
  };
  refuse_plan([](KdaGateProblem& p) { p.max_rows = -1; });
  refuse_plan([](KdaGateProblem& p) { p.num_value_heads = 0; });
  refuse_plan([](KdaGateProblem& p) { p.head_dim_k = 257; });
  refuse_plan([](KdaGateProblem& p) { p.gate.dtype = DType::kU8; });
  refuse_plan([](KdaGateProblem& p) { p.gate = {GateKind::kLowerBound, -6.0f, DType::kF32}; });
  Tensor out(DType::kF32, {3, 2, 4});
  out.fill_bytes(0x55);
  const auto refuse_run = [&](const KdaGateProblem& problem, auto&& change) {
    KdaGateTensors tensors{
        .g = inputs.g, .a_log = inputs.a_log, .dt_bias = inputs.dt_bias, .log_decay = out};
    change(tensors);
    EXPECT_THROW(test::run(KdaGateActivation::plan(problem, cpu), tensors), Error);
    EXPECT_EQ(out.bytes(), std::vector<uint8_t>(out.bytes().size(), 0x55));
  };
  refuse_run(good, [](KdaGateTensors& t) { t.a_log = {}; });
  refuse_run(good, [](KdaGateTensors& t) { t.a_log.shape[0] = 1; });
  refuse_run(good, [](KdaGateTensors& t) { t.dt_bias.shape[1] = 3; });
  refuse_run(good, [](KdaGateTensors& t) { t.g.shape[0] = 2; });
  refuse_run(good, [](KdaGateTensors& t) { t.log_decay.dtype = DType::kBf16; });
  refuse_run(good, [](KdaGateTensors& t) { t.log_decay.stride[0] = 4; });  // rows that overlap
  KdaGateProblem given = good;
  given.gate.kind = GateKind::kGiven;
  refuse_run(given, [](KdaGateTensors& t) { t.dt_bias = {}; });  // a_log is left
  refuse_run(given, [](KdaGateTensors& t) { t.a_log = {}; });    // dt_bias is left
}

}  // namespace
}  // namespace fovea
