#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::StepOptions;
using test::Tensor;

constexpr int64_t kHeads = 4, kLatent = 512, kNope = 128, kRope = 64;

// The projections of a layer and one request of `tokens` tokens, as the model sees them before
// either form of attention: latent and shared rope per token, q_nope and q_rope per row and head.
struct MhaModel {
  int64_t tokens;
  std::vector<double> w_uk, w_uv;  // [H, 128, 512]
  std::vector<bf16_t> latent;      // [tokens, 512]
  std::vector<bf16_t> k_rope;      // [tokens, 64]
  std::vector<bf16_t> q_nope;      // [tokens, H, 128]
  std::vector<bf16_t> q_rope;      // [tokens, H, 64]

  explicit MhaModel(int64_t count) : tokens(count) {
    test::Rng rng(21);
    for (int64_t i = 0; i < kHeads * kNope * kLatent; ++i) {
      w_uk.push_back(0.04 * double{rng.normal()});
      w_uv.push_back(0.04 * double{rng.normal()});
    }
    latent = rng.bf16_normals(tokens * kLatent);
    k_rope = rng.bf16_normals(tokens * kRope);
    q_nope = rng.bf16_normals(tokens * kHeads * kNope);
    q_rope = rng.bf16_normals(tokens * kHeads * kRope);
  }

  // W x of one head, rounded to bf16: per-head keys or values of a token.
  std::vector<bf16_t> expand(const std::vector<double>& w, int64_t token, int64_t head) const {
    std::vector<bf16_t> result;
    for (int64_t i = 0; i < kNope; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < kLatent; ++c) {
        sum += w[static_cast<size_t>((head * kNope + i) * kLatent + c)] *
               double{bf16_to_float(latent[static_cast<size_t>(token * kLatent + c)])};
      }
      result.push_back(bf16_from_float(static_cast<float>(sum)));
    }
    return result;
  }

  // q_nope W_uk of one head: the latent part of the absorbed query.
  std::vector<bf16_t> absorb(int64_t row, int64_t head) const {
    std::vector<bf16_t> result;
    for (int64_t c = 0; c < kLatent; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < kNope; ++i) {
        sum +=
            w_uk[static_cast<size_t>((head * kNope + i) * kLatent + c)] *
            double{bf16_to_float(q_nope[static_cast<size_t>((row * kHeads + head) * kNope + i)])};
      }
      result.push_back(bf16_from_float(static_cast<float>(sum)));
    }
    return result;
  }
};

void append(std::vector<bf16_t>* to, const std::vector<bf16_t>& from, int64_t begin,
            int64_t count) {
  to->insert(to->end(), from.begin() + begin, from.begin() + begin + count);
}

// The inputs of rows [first, tokens): absorbed q and k rows; expanded q rows, keys and values of
// every token.
struct Inputs {
  Tensor q, k, q_mha, k_mha, v_mha;
  Inputs(const MhaModel& model, int64_t first) {
    std::vector<bf16_t> absorbed, rows, expanded, keys, values;
    for (int64_t t = first; t < model.tokens; ++t) {
      append(&rows, model.latent, t * kLatent, kLatent);
      append(&rows, model.k_rope, t * kRope, kRope);
      for (int64_t h = 0; h < kHeads; ++h) {
        append(&absorbed, model.absorb(t, h), 0, kLatent);
        append(&absorbed, model.q_rope, (t * kHeads + h) * kRope, kRope);
        append(&expanded, model.q_nope, (t * kHeads + h) * kNope, kNope);
        append(&expanded, model.q_rope, (t * kHeads + h) * kRope, kRope);
      }
    }
    for (int64_t t = 0; t < model.tokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        append(&keys, model.expand(model.w_uk, t, h), 0, kNope);
        append(&keys, model.k_rope, t * kRope, kRope);
        append(&values, model.expand(model.w_uv, t, h), 0, kNope);
      }
    }
    const int64_t count = model.tokens - first;
    q = Tensor::bf16({count, kHeads, 576}, absorbed);
    k = Tensor::bf16({count, 576}, rows);
    q_mha = Tensor::bf16({count, kHeads, 192}, expanded);
    k_mha = Tensor::bf16({model.tokens, kHeads, 192}, keys);
    v_mha = Tensor::bf16({model.tokens, kHeads, 128}, values);
  }
};

DsaConfig config_for(bool deterministic) {
  DsaConfig config = DsaRig::small_config(4, RowFormat::kBf16);
  config.topk = 16;
  config.deterministic = deterministic;
  return config;
}

// W_uv applied to the latent output of each row and head.
std::vector<double> expand_output(const MhaModel& model, const Tensor& out, int64_t rows) {
  std::vector<double> result;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const bf16_t* const latent = out.data<bf16_t>() + (t * kHeads + h) * kLatent;
      for (int64_t i = 0; i < kNope; ++i) {
        double sum = 0;
        for (int64_t c = 0; c < kLatent; ++c) {
          sum += model.w_uv[static_cast<size_t>((h * kNope + i) * kLatent + c)] *
                 double{bf16_to_float(latent[c])};
        }
        result.push_back(sum);
      }
    }
  }
  return result;
}

TEST(DsaOneShot, EqualsTheAbsorbedFormWithinTolerance) {
  // 14 tokens in two chunks, 9 and 5, so that the second has a prefix; padded to 7 rows.
  const MhaModel model(14);
  const Inputs inputs(model, 9);
  MhaModel prefix = model;
  prefix.tokens = 9;
  const Inputs prefix_inputs(prefix, 0);
  DsaRig absorbed(config_for(true), 1), one_shot(config_for(false), 2);
  const auto give = [](const Inputs& from) {
    return [&from](ForwardBatch&, DsaForwardTensors& tensors) {
      tensors.q = from.q;
      tensors.k = from.k;
    };
  };
  StepOptions options;
  options.adjust = give(prefix_inputs);
  absorbed.step(ForwardMode::kExtend, {{0, 9}}, options);
  one_shot.step(ForwardMode::kExtend, {{0, 9}}, options);
  EXPECT_FALSE(one_shot.backend().dispatch().one_shot);  // this call offers no expanded inputs
  options.adjust = give(inputs);
  absorbed.step(ForwardMode::kExtend, {{0, 5}}, options);
  Tensor q_mha(DType::kBf16, {7, kHeads, 192}), out_mha(DType::kBf16, {7, kHeads, 128}),
      rows(DType::kBf16, {7, 576});
  q_mha.fill_bytes(0xFF);
  out_mha.fill_bytes(0xFF);
  std::copy_n(inputs.q_mha.bytes().begin(), inputs.q_mha.bytes().size(), q_mha.data<uint8_t>());
  std::copy_n(inputs.k.bytes().begin(), inputs.k.bytes().size(), rows.data<uint8_t>());
  options.padded_rows = 7;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
    batch.mha_inputs = true;
    tensors.q = {};
    tensors.out = {};
    tensors.index_q = tensors.head_gate = {};
    tensors.k = rows;
    tensors.q_mha = q_mha;
    tensors.k_mha = inputs.k_mha;
    tensors.v_mha = inputs.v_mha;
    tensors.out_mha = out_mha;
  };
  one_shot.step(ForwardMode::kExtend, {{0, 5}}, options);
  EXPECT_TRUE(one_shot.backend().dispatch().one_shot);

  const std::vector<double> actual = test::to_doubles(slice_rows(TensorView(out_mha), 0, 5));
  const std::vector<double> expected = expand_output(model, absorbed.out, 5);
  // Both forms round q, k and v once to bf16: a handful of half-ulps of 2^-9.
  EXPECT_LT(test::relative_rms(actual, expected), 1e-2);
  const std::vector<double> lse = test::to_doubles(slice_rows(TensorView(one_shot.lse), 0, 5));
  const std::vector<double> lse_expected = test::to_doubles(absorbed.lse);
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], lse_expected[i], 2e-2);
  // Padding, and the selection that the absorbed form used.
  for (int64_t i = 5 * kHeads * 128; i < 7 * kHeads * 128; ++i) {
    EXPECT_EQ(out_mha.data<bf16_t>()[i].bits, 0);
  }
  for (int64_t i = 5 * kHeads; i < 7 * kHeads; ++i) {
    EXPECT_EQ(one_shot.lse.data<float>()[i], -std::numeric_limits<float>::infinity());
  }
  for (int64_t i = 5 * 16; i < 7 * 16; ++i) EXPECT_EQ(one_shot.indices.data<int32_t>()[i], -1);

  // The index keys of the one-shot rows were stored: a later selection sees them.
  options = {};
  for (DsaRig* rig : {&absorbed, &one_shot}) rig->step(ForwardMode::kExtend, {{0, 12}});
  for (const auto& [key, row] : one_shot.results()) {
    EXPECT_EQ(row.positions, absorbed.results().at(key).positions);
    EXPECT_EQ(row.out, absorbed.results().at(key).out);
  }
}

TEST(DsaOneShot, NamesTheExpandedInputsThatAreMissing) {
  for (const std::string name : {"q_mha", "k_mha", "v_mha", "out_mha"}) {
    DsaRig rig(config_for(false), 1);
    Tensor q(DType::kBf16, {5, kHeads, 192}), k(DType::kBf16, {5, kHeads, 192}),
        v(DType::kBf16, {5, kHeads, 128}), out(DType::kBf16, {5, kHeads, 128});
    StepOptions options;
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
      batch.mha_inputs = true;
      tensors.q_mha = name == "q_mha" ? ConstTensorView() : q;
      tensors.k_mha = name == "k_mha" ? ConstTensorView() : k;
      tensors.v_mha = name == "v_mha" ? ConstTensorView() : v;
      if (name != "out_mha") tensors.out_mha = out;
    };
    try {
      rig.step(ForwardMode::kExtend, {{0, 5}}, options);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(name + " is missing"), std::string::npos)
          << error.what();
    }
  }
}

TEST(DsaOneShot, HasNoSoftCap) {
  DsaRig rig(config_for(false), 1);
  rig.layer.logit_cap = 30;
  StepOptions options;
  options.adjust = [](ForwardBatch& batch, DsaForwardTensors&) { batch.mha_inputs = true; };
  try {
    rig.step(ForwardMode::kExtend, {{0, 5}}, options);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    for (const std::string text : {"logit_cap = 30", "one-shot", "force_absorbed"}) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
}

// A request longer than topk is scored only for a caller that asks for its selection.
TEST(DsaOneShot, WantsIndexQueriesOnlyForASelectionOfLongRequests) {
  DsaConfig config = config_for(false);
  config.prefill_implementation = config.decode_implementation = "trtllm";
  for (const bool asks : {false, true}) {
    DsaRig rig(config, 1);
    Tensor q(DType::kBf16, {20, kHeads, 192}), k(DType::kBf16, {20, kHeads, 192}),
        v(DType::kBf16, {20, kHeads, 128}), out(DType::kBf16, {20, kHeads, 128});
    StepOptions options;
    options.give_indices = asks;
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
      batch.mha_inputs = true;
      tensors.q = {};
      tensors.out = {};
      tensors.index_q = tensors.head_gate = {};
      tensors.q_mha = q;
      tensors.k_mha = k;
      tensors.v_mha = v;
      tensors.out_mha = out;
    };
    try {
      rig.step(ForwardMode::kExtend, {{0, 20}}, options);
      EXPECT_FALSE(asks);
      EXPECT_TRUE(rig.backend().dispatch().one_shot);
      EXPECT_FALSE(rig.backend().dispatch().skip_selection);
      // Its keys are stored all the same: the next row selects among them.
      rig.step(ForwardMode::kDecode, {{0, 1}});
      EXPECT_EQ(rig.results().at({0, 20}).positions.size(), 16u);
      EXPECT_GE(rig.results().at({0, 20}).positions.back(), 15);  // sixteen keys
    } catch (const Error& error) {
      EXPECT_TRUE(asks) << error.what();
      EXPECT_NE(std::string(error.what()).find("index_q is missing"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fovea
