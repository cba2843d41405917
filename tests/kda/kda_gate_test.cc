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

}  // namespace
}  // namespace fovea
