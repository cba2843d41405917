#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/mla_inputs.h"
#include "fovea/numeric.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::RowResults;
using test::StepOptions;
using test::Tensor;
using test::to_doubles;
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;

// The channels [begin, end) of every vector.
ConstTensorView channels(const ConstTensorView& whole, int64_t begin, int64_t end) {
  ConstTensorView part = whole;
  part.shape[static_cast<size_t>(whole.rank) - 1] = end - begin;
  part.data = static_cast<const bf16_t*>(whole.data) + begin;
  return part;
}

// Queries and keys as a projection leaves them: columns of wider buffers.
void take_apart(DsaForwardTensors& tensors) {
  tensors.q_nope = channels(tensors.q, 0, 512);
  tensors.q_rope = channels(tensors.q, 512, 576);
  tensors.k_latent = channels(tensors.k, 0, 512);
  tensors.k_rope = channels(tensors.k, 512, 576);
  tensors.q = tensors.k = {};
}

template <class Act>
void expect_error(ErrorCode code, const std::string& text, Act act) {
  try {
    act();
    ADD_FAILURE() << "no error about " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

class DsaBackendInputs : public testing::TestWithParam<RowFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, DsaBackendInputs,
                         testing::Values(RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576),
                         [](const auto& format) { return std::string(to_string(format.param)); });

TEST_P(DsaBackendInputs, PartsGiveTheBitsOfTheWhole) {
  const DsaConfig config = DsaRig::small_config(4, GetParam());
  DsaRig whole(config, 2), parts(config, 2);
  StepOptions apart;
  apart.adjust = [](ForwardBatch&, DsaForwardTensors& tensors) { take_apart(tensors); };
  const auto both = [&](ForwardMode mode, const std::vector<std::pair<int, int>>& work,
                        int64_t padded_rows) {
    apart.padded_rows = padded_rows;
    whole.step(mode, work, {.padded_rows = padded_rows});
    parts.step(mode, work, apart);
    EXPECT_EQ(whole.out.bytes(), parts.out.bytes());
    EXPECT_EQ(whole.lse.bytes(), parts.lse.bytes());
    EXPECT_EQ(whole.indices.bytes(), parts.indices.bytes());
  };
  both(kExtend, {{0, 100}, {1, 40}}, 150);  // more rows than are joined at a time
  both(kDecode, {{0, 1}, {1, 1}}, 4);
  both(kExtend, {{0, 3}}, 0);
}

// Only attention over this call's keys needs them joined; a store takes the parts.
TEST(DsaBackendKeysInParts, AreJoinedOnlyWhenAttentionReadsThem) {
  for (const ExtendKvSource source : {ExtendKvSource::kCache, ExtendKvSource::kFresh}) {
    DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
    config.deterministic = false;
    config.prefill_implementation = "contiguous_bf16";
    config.extend_kv_source = source;
    DsaRig whole(config, 1), parts(config, 1);
    StepOptions apart;
    apart.adjust = [](ForwardBatch&, DsaForwardTensors& tensors) { take_apart(tensors); };
    std::vector<OperatorCall> calls;
    parts.backend().set_profile(&calls);
    whole.step(kExtend, {{0, 20}, {1, 9}});
    parts.step(kExtend, {{0, 20}, {1, 9}}, apart);
    const bool fresh = source == ExtendKvSource::kFresh;
    EXPECT_EQ(parts.backend().dispatch().fresh_kv, fresh);
    EXPECT_EQ(whole.out.bytes(), parts.out.bytes());
    int64_t joins = 0;
    for (const OperatorCall& call : calls) joins += call.name == "concat_absorbed_q" ? 1 : 0;
    EXPECT_EQ(joins, fresh ? 2 : 1);        // the queries take one
    whole.step(kDecode, {{0, 1}, {1, 1}});  // what was stored
    parts.step(kDecode, {{0, 1}, {1, 1}});
    EXPECT_EQ(whole.results().at({0, 20}), parts.results().at({0, 20}));
  }
}

TEST_P(DsaBackendInputs, NothingIsStoredWithoutSaveKv) {
  const DsaConfig config = DsaRig::small_config(4, GetParam());
  DsaRig rig(config, 1);
  rig.step(kExtend, {{0, 20}});
  const RowResults first = rig.results();
  StepOptions options;
  options.adjust = [](ForwardBatch&, DsaForwardTensors& tensors) { tensors.save_kv = false; };
  std::vector<OperatorCall> calls;
  rig.backend().set_profile(&calls);
  rig.step(kDecode, {{0, 1}}, options);
  for (const OperatorCall& call : calls) {
    EXPECT_NE(call.name, "pack_rows");
    EXPECT_NE(call.name, "index_store");
  }
}

TEST(DsaBackendF576, TheScaleOfALayerIsThatOfItsCache) {
  for (const float k_scale : {0.5f, 2.0f}) {
    const DsaConfig config = DsaRig::small_config(4, RowFormat::kF576);
    DsaRig rig(config, 1), exact(DsaRig::small_config(4, RowFormat::kBf16), 1);
    rig.layer.k_scale = k_scale;
    rig.step(kExtend, {{0, 30}});
    // The same keys, rounded to what the cache holds: code * k_scale is a bf16 number.
    StepOptions rounded;
    Tensor keys;
    rounded.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
      keys = Tensor(DType::kBf16, {tensors.k.shape[0], 576});
      for (int64_t i = 0; i < tensors.k.shape[0] * 576; ++i) {
        const float value = bf16_to_float(static_cast<const bf16_t*>(tensors.k.data)[i]);
        keys.data<bf16_t>()[i] =
            bf16_from_float(e4m3_to_float(e4m3_from_float(value / k_scale)) * k_scale);
      }
      tensors.k = keys;
    };
    exact.step(kExtend, {{0, 30}}, rounded);
    EXPECT_LT(test::relative_rms(to_doubles(rig.out.view()), to_doubles(exact.out.view())), 5e-3);
    EXPECT_TRUE(
        test::ExpectClose(to_doubles(rig.lse.view()), to_doubles(exact.lse.view()), test::kLse));
  }
}

// One pass that ropes and quantises, against the same codes given as bf16 numbers.
TEST(DsaBackendF576, FusedRopeEqualsTheCodesItMakes) {
  for (const RopeStyle style : {RopeStyle::kInterleaved, RopeStyle::kHalfSplit}) {
    DsaConfig config = DsaRig::small_config(4, RowFormat::kF576);
    DsaRig plain(config, 1);
    config.fuse_rope = true;
    config.rope_style = style;
    DsaRig fused(config, 2);
    plain.layer.k_scale = fused.layer.k_scale = 0.5f;
    fused.layer.q_scale = 2.0f;
    const Tensor cos_sin = test::make_cos_sin(config.table_width, 64);
    StepOptions fuse;
    fuse.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
      take_apart(tensors);
      tensors.mla_cos_sin = cos_sin;
    };
    Tensor q, k;
    StepOptions compose;
    compose.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
      const int64_t rows = tensors.q.shape[0], heads = config.num_heads;
      MlaRopeQuantizeProblem problem{rows, heads, style, 2.0f, 0.5f};
      const auto plan = MlaRopeQuantize::plan(problem, Device::cpu(1), {"ref"});
      HostBuffer workspace(plan.workspace_bytes());
      Tensor q_codes(DType::kU8, {rows, heads, 576}), k_codes(DType::kU8, {rows, 576});
      DsaForwardTensors parts = tensors;
      take_apart(parts);
      plan.run({parts.q_nope, parts.q_rope, parts.k_latent, parts.k_rope, batch.positions, cos_sin,
                q_codes, k_codes},
               workspace.workspace());
      const auto numbers = [](const Tensor& codes, Tensor& out, float scale) {
        for (size_t i = 0; i < codes.bytes().size(); ++i) {
          out.data<bf16_t>()[i] = bf16_from_float(e4m3_to_float(codes.bytes()[i]) * scale);
        }
      };
      q = Tensor(DType::kBf16, {rows, heads, 576});
      k = Tensor(DType::kBf16, {rows, 576});
      numbers(q_codes, q, 2.0f);
      numbers(k_codes, k, 0.5f);
      tensors.q = q;
      tensors.k = k;
    };
    const auto both = [&](ForwardMode mode, const std::vector<std::pair<int, int>>& work) {
      fused.step(mode, work, fuse);
      plain.step(mode, work, compose);
      EXPECT_EQ(fused.indices.bytes(), plain.indices.bytes());
      EXPECT_LT(test::relative_rms(to_doubles(fused.out.view()), to_doubles(plain.out.view())),
                5e-3);
      EXPECT_TRUE(test::ExpectClose(to_doubles(fused.lse.view()), to_doubles(plain.lse.view()),
                                    test::kLse));
    };
    both(kExtend, {{0, 20}, {1, 9}});
    both(kDecode, {{0, 1}, {1, 1}});
    both(ForwardMode::kTargetVerify, {{1, 1}});
  }
}

TEST(DsaBackendInputErrors, NameTheTensor) {
  const auto refuses = [](const DsaConfig& config, const std::string& text,
                          const std::function<void(DsaForwardTensors&)>& change) {
    DsaRig rig(config, 1);
    StepOptions options;
    options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) { change(tensors); };
    expect_error(ErrorCode::kInvalidArgument, text, [&] { rig.step(kExtend, {{0, 9}}, options); });
  };
  const DsaConfig plain = DsaRig::small_config(4, RowFormat::kV32);
  refuses(plain, "without q_rope, expected 576 channels", [](auto& t) { t.q.shape[2] = 512; });
  refuses(plain, "q_rope is missing, but q_nope holds 512 channels", [](auto& t) {
    take_apart(t);
    t.q_rope = {};
  });
  refuses(plain, "q_nope is missing", [](auto& t) {
    take_apart(t);
    t.q_nope = {};
  });
  refuses(plain, "q_rope", [](auto& t) {
    take_apart(t);
    t.q_rope.shape[2] = 32;
  });
  refuses(plain, "q is given beside q_nope and q_rope", [](auto& t) {
    const ConstTensorView q = t.q;
    take_apart(t);
    t.q = q;
  });
  refuses(plain, "k_rope is missing, but k_latent holds 512 channels", [](auto& t) {
    take_apart(t);
    t.k_rope = {};
  });
  refuses(plain, "k is given beside k_latent and k_rope", [](auto& t) {
    const ConstTensorView k = t.k;
    take_apart(t);
    t.k = k;
  });
  refuses(plain, "index_k is missing", [](auto& t) {
    take_apart(t);
    t.index_k = {};
  });
  DsaConfig fused = DsaRig::small_config(4, RowFormat::kF576);
  fused.fuse_rope = true;
  refuses(fused, "mla_cos_sin is missing", [](auto& t) { take_apart(t); });
  refuses(fused, "q is given, but fuse_rope takes q_nope and q_rope before rope", [](auto&) {});
  refuses(fused, "q_nope and q_rope are missing", [](auto& t) { t.q = {}; });
  refuses(fused, "k is given, but fuse_rope takes k_latent and k_rope before rope", [](auto& t) {
    const ConstTensorView k = t.k;
    take_apart(t);
    t.k_latent = t.k_rope = {};
    t.k = k;
  });
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32}) {
    fused.row_format = format;
    expect_error(ErrorCode::kInvalidArgument, "fuse_rope with row_format",
                 [&] { DsaBackend(fused, Device::cpu(1)); });
  }
}

TEST(DsaBackendInputErrors, OneShotTakesNoAbsorbedParts) {
  DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
  config.deterministic = false;
  DsaRig rig(config, 1);
  StepOptions options;
  options.adjust = [](ForwardBatch& batch, DsaForwardTensors& tensors) {
    batch.mha_inputs = true;
    take_apart(tensors);
    tensors.q_nope = {};
  };
  expect_error(ErrorCode::kInvalidArgument, "q_rope is given under one-shot", [&] {
    rig.step(kExtend, {{0, 5}}, options);
  });
}

TEST(DsaBackendInputErrors, ScalesOfALayer) {
  DsaRig rig(DsaRig::small_config(4, RowFormat::kF576), 1);
  for (const float scale : {0.0f, -1.0f}) {
    rig.layer.k_scale = scale;
    expect_error(ErrorCode::kInvalidArgument, "k_scale", [&] { rig.step(kExtend, {{0, 1}}); });
    rig.layer.k_scale = 1;
    rig.layer.q_scale = scale;
    expect_error(ErrorCode::kInvalidArgument, "q_scale", [&] { rig.step(kExtend, {{0, 1}}); });
    rig.layer.q_scale = 1;
  }
}

// A scale that nothing applies would be a wrong result without a word.
TEST(DsaBackendInputErrors, ScalesThatNothingApplies) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    DsaRig rig(DsaRig::small_config(4, format), 1);
    rig.layer.q_scale = 2;  // without fuse_rope
    expect_error(ErrorCode::kInvalidArgument, "q_scale = 2", [&] { rig.step(kExtend, {{0, 1}}); });
    rig.layer.q_scale = 1;
    if (format == RowFormat::kF576) continue;
    rig.layer.k_scale = 0.5f;
    expect_error(ErrorCode::kInvalidArgument, "k_scale = 0.5", [&] {
      rig.step(kExtend, {{0, 1}});
    });
  }
}

}  // namespace
}  // namespace fovea
