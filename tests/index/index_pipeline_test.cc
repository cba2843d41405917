#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "fovea/index_logits.h"
#include "fovea/index_quantize.h"
#include "fovea/numeric.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/targets.h"

// index_quantize and index_logits in turn, against the formula of the lightning indexer.
namespace fovea {
namespace {

using test::Tensor;

constexpr int64_t kRows = 5, kHeads = 64, kDim = 128, kKeys = 200;

// The same implementation of a part, or "cpu" where the part has no such name.
Options part_options(const std::string& op, const std::string& implementation) {
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      if (entry.name == implementation) return {implementation};
    }
  }
  return {"cpu"};
}

// Queries of kRows rows and keys of kKeys tokens, without rope.
struct Scores {
  std::vector<bf16_t> q, k;
  std::vector<float> gate, norm_weight, norm_bias;
  Tensor q_fp8{DType::kU8, {kRows, kHeads, kDim}}, q_scale{DType::kF32, {kRows, kHeads}},
      head_weight{DType::kF32, {kRows, kHeads}}, k_fp8{DType::kU8, {kKeys, kDim}},
      k_scale{DType::kF32, {kKeys}}, logits{DType::kF32, {kRows, kKeys}};

  explicit Scores(uint64_t seed) {
    test::Rng rng(seed);
    q = rng.bf16_normals(kRows * kHeads * kDim, 2.0f);
    k = rng.bf16_normals(kKeys * kDim, 0.5f);
    gate = rng.normals(kRows * kHeads);  // of both signs
    for (int64_t d = 0; d < kDim; ++d) norm_weight.push_back(rng.uniform(0.5f, 1.5f));
    norm_bias = rng.normals(kDim, 0.3f);
  }

  void run(const std::string& implementation, ScaleMode mode, bool hadamard, int threads = 1) {
    IndexQuantizeProblem problem;
    problem.max_rows = std::max(kRows, kKeys);
    problem.num_heads = kHeads;
    problem.head_dim = kDim;
    problem.rope_dim = 0;
    problem.hadamard = hadamard;
    problem.scale_mode = mode;
    const IndexQuantize quantize = IndexQuantize::plan(
        problem, test::device_of(part_options("index_quantize", implementation), threads),
        part_options("index_quantize", implementation));
    HostBuffer buffer(quantize.workspace_bytes());
    IndexQuantizeTensors queries;
    const Tensor q_in = Tensor::bf16({kRows, kHeads, kDim}, q),
                 k_in = Tensor::bf16({kKeys, kDim}, k),
                 gate_in = Tensor::f32({kRows, kHeads}, gate),
                 weight_in = Tensor::f32({kDim}, norm_weight),
                 bias_in = Tensor::f32({kDim}, norm_bias);
    queries.q = q_in;
    queries.head_gate = gate_in;
    queries.q_fp8 = q_fp8;
    queries.q_scale = q_scale;
    queries.head_weight = head_weight;
    quantize.run(queries, buffer.workspace());
    IndexQuantizeTensors keys;
    keys.k = k_in;
    keys.norm_weight = weight_in;
    keys.norm_bias = bias_in;
    keys.k_fp8 = k_fp8;
    keys.k_scale = k_scale;
    quantize.run(keys, buffer.workspace());

    IndexLogitsTensors tensors;
    const Tensor start = Tensor::i32({kRows}, std::vector<int32_t>(kRows, 0)),
                 end = Tensor::i32({kRows}, std::vector<int32_t>(kRows, kKeys));
    tensors.q_fp8 = q_fp8;
    tensors.head_weight = head_weight;
    tensors.k_fp8 = k_fp8;
    tensors.k_scale = k_scale;
    tensors.k_start = start;
    tensors.k_end = end;
    tensors.logits = logits;
    const IndexLogits score =
        IndexLogits::plan({IndexLayout::kRagged, kRows, kHeads, kDim},
                          test::device_of(part_options("index_logits", implementation), threads),
                          part_options("index_logits", implementation));
    buffer.reserve(score.workspace_bytes());
    score.run(tensors, buffer.workspace());
  }

  // The formula over what was quantised.
  std::vector<double> of_codes() const {
    std::vector<double> expected;
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t j = 0; j < kKeys; ++j) {
        double sum = 0;
        for (int64_t h = 0; h < kHeads; ++h) {
          double dot = 0;
          for (int64_t d = 0; d < kDim; ++d) {
            dot += double{e4m3_to_float(q_fp8.data<uint8_t>()[(t * kHeads + h) * kDim + d])} *
                   double{e4m3_to_float(k_fp8.data<uint8_t>()[j * kDim + d])};
          }
          sum += double{head_weight.data<float>()[t * kHeads + h]} * std::max(0.0, dot);
        }
        expected.push_back(double{k_scale.data<float>()[j]} * sum);
      }
    }
    return expected;
  }

  // The formula over the inputs themselves: neither rotation nor quantisation.
  std::vector<double> of_inputs() const {
    std::vector<double> keys;
    for (int64_t j = 0; j < kKeys; ++j) {
      double mean = 0, variance = 0;
      for (int64_t d = 0; d < kDim; ++d) mean += key(j, d) / kDim;
      for (int64_t d = 0; d < kDim; ++d) {
        variance += (key(j, d) - mean) * (key(j, d) - mean) / kDim;
      }
      for (int64_t d = 0; d < kDim; ++d) {
        const auto at = static_cast<size_t>(d);
        keys.push_back((key(j, d) - mean) / std::sqrt(variance + 1e-6) * double{norm_weight[at]} +
                       double{norm_bias[at]});
      }
    }
    std::vector<double> expected;
    for (size_t t = 0; t < kRows; ++t) {
      for (size_t j = 0; j < kKeys; ++j) {
        double sum = 0;
        for (size_t h = 0; h < kHeads; ++h) {
          double dot = 0;
          for (size_t d = 0; d < kDim; ++d) {
            dot += double{bf16_to_float(q[(t * kHeads + h) * kDim + d])} * keys[j * kDim + d];
          }
          sum += double{gate[t * kHeads + h]} * std::max(0.0, dot);
        }
        expected.push_back(sum / std::sqrt(static_cast<double>(kHeads * kDim)));
      }
    }
    return expected;
  }

  std::vector<double> actual() const {
    const std::vector<float> values = logits.values<float>();
    return {values.begin(), values.end()};
  }

 private:
  double key(int64_t j, int64_t d) const {
    return double{bf16_to_float(k[static_cast<size_t>(j * kDim + d)])};
  }
};

// 1 - 2 <x, y> / (<x, x> + <y, y>)
double distance(const std::vector<double>& x, const std::vector<double>& y) {
  const double xy = std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  const double xx = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
  const double yy = std::inner_product(y.begin(), y.end(), y.begin(), 0.0);
  return 1 - 2 * xy / (xx + yy);
}

class IndexPipelineTest : public test::TargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, IndexPipelineTest,
                         testing::ValuesIn(test::targets_of("index_logits")), test::target_name);

TEST_P(IndexPipelineTest, LogitsMeetTheAccuracyBarInBothScaleModesAndWithNegativeWeights) {
  for (const ScaleMode mode : {ScaleMode::kFp32, ScaleMode::kPow2}) {
    for (const bool hadamard : {false, true}) {
      Scores scores(21);
      scores.run(GetParam().implementation, mode, hadamard);
      EXPECT_LT(distance(scores.actual(), scores.of_codes()), 5e-6);
      EXPECT_LT(distance(scores.actual(), scores.of_inputs()), 1e-3);
    }
  }
}

TEST_P(IndexPipelineTest, TwentyRepeatsHaveTheSameBits) {
  Scores first(22);
  first.run(GetParam().implementation, ScaleMode::kFp32, true);
  for (int repeat = 0; repeat < 20; ++repeat) {
    Scores again(22);
    again.run(GetParam().implementation, ScaleMode::kFp32, true, 1 + repeat % 3);
    ASSERT_EQ(again.logits.bytes(), first.logits.bytes()) << "repeat " << repeat;
  }
}

TEST_P(IndexPipelineTest, ExactPowersOfTwoAndZeroRows) {
  Scores scores(23);
  // Magnitudes whose largest is 448 * 2^-3 have the scale 2^-3 in both modes, and exact codes.
  for (bf16_t& value : scores.q) {
    value = bf16_from_float(bf16_to_float(value) < 0 ? -56.0f : 28.0f);
  }
  std::fill_n(scores.q.begin(), kHeads * kDim, bf16_t{0});  // row 0
  std::fill(scores.gate.begin(), scores.gate.end(), -1.0f);
  std::fill(scores.norm_bias.begin(), scores.norm_bias.end(), 0.0f);
  std::fill_n(scores.k.begin(), kDim, bf16_from_float(3.0f));  // key 0: no variance
  for (const ScaleMode mode : {ScaleMode::kFp32, ScaleMode::kPow2}) {
    scores.run(GetParam().implementation, mode, false);
    const std::vector<float> scales = scores.q_scale.values<float>();
    EXPECT_TRUE(std::all_of(scales.begin() + kHeads, scales.end(),
                            [](float scale) { return scale == 0.125f; }));
    for (int64_t j = 0; j < kKeys; ++j) ASSERT_EQ(scores.logits.data<float>()[j], 0) << j;
    for (int64_t t = 0; t < kRows; ++t) {
      ASSERT_EQ(scores.logits.data<float>()[t * kKeys], 0) << t;
    }
    for (const double logit : scores.actual()) ASSERT_LE(logit, 0);
    EXPECT_LT(distance(scores.actual(), scores.of_codes()), 5e-6);
  }
}

}  // namespace
}  // namespace fovea
