#include <gtest/gtest.h>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"

namespace fovea {
namespace {

bool mentions(const DsaDispatch& dispatch, std::string_view text) {
  for (const std::string_view reason : dispatch.reasons) {
    if (reason.find(text) != std::string_view::npos) return true;
  }
  return false;
}

DsaConfig loose_config() {
  DsaConfig config;
  config.topk = 8;
  config.mha_chunk_capacity = 20;
  config.deterministic = false;
  return config;
}

DsaBatchFacts short_batch() {
  DsaBatchFacts facts;
  facts.mode = ForwardMode::kExtend;
  facts.has_host_lengths = true;
  facts.max_kv_len = 8;
  facts.sum_kv_len = 20;
  facts.num_rows = 5;
  facts.mha_inputs = true;
  return facts;
}

// Every combination of the conditions, against the conjunction written out once more.
TEST(DsaDispatch, OneShotIsOneConjunction) {
  for (int bits = 0; bits < 1 << 8; ++bits) {
    const auto on = [bits](int bit) { return (bits >> bit & 1) != 0; };
    DsaConfig config = loose_config();
    DsaBatchFacts facts = short_batch();
    const bool extend = on(0), lengths = on(1), inputs = on(2), fits_topk = on(3),
               fits_capacity = on(4), absorbed = on(5), deterministic = on(6), mixed = on(7);
    facts.mode = extend ? (mixed ? ForwardMode::kMixed : ForwardMode::kExtend)
                        : (mixed ? ForwardMode::kIdle : ForwardMode::kDecode);
    facts.has_host_lengths = lengths;
    facts.mha_inputs = inputs;
    facts.max_kv_len = lengths ? (fits_topk ? 8 : 9) : 0;
    facts.sum_kv_len = lengths ? (fits_capacity ? 20 : 21) : 0;
    config.force_absorbed = absorbed;
    config.deterministic = deterministic;
    const DsaDispatch dispatch = dsa_dispatch(config, Device::cpu(1), facts);
    const bool expected =
        extend && lengths && inputs && fits_topk && fits_capacity && !absorbed && !deterministic;
    EXPECT_EQ(dispatch.one_shot, expected) << bits;
    EXPECT_EQ(dispatch.kernel == DsaKernel::kOneShotMha, expected) << bits;
    EXPECT_EQ(dispatch.skip_selection, extend && lengths && fits_topk) << bits;
    EXPECT_EQ(dispatch.transform, IndexTransform::kPaged) << bits;
    EXPECT_GE(dispatch.reasons.size(), 1u) << bits;
    if (extend && !expected) {
      EXPECT_TRUE(mentions(dispatch, "one-shot is off")) << bits;
    }
  }
}

// Mode x cache x kernel x one-shot: RAGGED exactly for EXTEND over an fp8 cache whose chosen
// kernel reads contiguous rows.
TEST(DsaDispatch, TransformFollowsModeCacheAndKernel) {
  for (const ForwardMode mode :
       {ForwardMode::kExtend, ForwardMode::kMixed, ForwardMode::kDecode, ForwardMode::kIdle}) {
    for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32}) {
      for (const DsaKernel preferred : {DsaKernel::kCacheDirect, DsaKernel::kContiguousBf16}) {
        for (const bool one_shot : {false, true}) {
          DsaConfig config = loose_config();
          config.row_format = format;
          config.prefill_implementation = to_string(preferred);
          DsaBatchFacts facts = short_batch();
          facts.mode = mode;
          facts.mha_inputs = one_shot;
          const DsaDispatch dispatch = dsa_dispatch(config, Device::cpu(1), facts);
          const bool extend = mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
          const bool ragged = extend && format == RowFormat::kV32 &&
                              preferred == DsaKernel::kContiguousBf16 && !one_shot;
          EXPECT_EQ(dispatch.transform, ragged ? IndexTransform::kRagged : IndexTransform::kPaged);
          EXPECT_EQ(dispatch.kernel == DsaKernel::kContiguousBf16, ragged);
        }
      }
    }
  }
}

TEST(DsaDispatch, TheContiguousKernelNeedsAKnownBound) {
  DsaConfig config = loose_config();
  config.prefill_implementation = "contiguous_bf16";
  DsaBatchFacts facts = short_batch();
  facts.mha_inputs = false;
  facts.sum_kv_len = 21;
  EXPECT_EQ(dsa_dispatch(config, Device::cpu(1), facts).kernel, DsaKernel::kCacheDirect);
  facts.sum_kv_len = 20;
  EXPECT_EQ(dsa_dispatch(config, Device::cpu(1), facts).kernel, DsaKernel::kContiguousBf16);
  facts.has_host_lengths = false;
  EXPECT_EQ(dsa_dispatch(config, Device::cpu(1), facts).kernel, DsaKernel::kCacheDirect);
}

TEST(DsaDispatch, FreshRowsNeedTheContiguousKernelAndNoPrefix) {
  DsaConfig config = loose_config();
  config.extend_kv_source = ExtendKvSource::kFresh;
  DsaBatchFacts facts = short_batch();
  facts.mha_inputs = false;
  EXPECT_FALSE(dsa_dispatch(config, Device::cpu(1), facts).fresh_kv);
  config.prefill_implementation = "contiguous_bf16";
  EXPECT_TRUE(dsa_dispatch(config, Device::cpu(1), facts).fresh_kv);
  facts.has_prefix = true;
  EXPECT_FALSE(dsa_dispatch(config, Device::cpu(1), facts).fresh_kv);
}

TEST(DsaDispatch, NamesAModeThatItDoesNotHave) {
  DsaBatchFacts facts = short_batch();
  facts.mode = static_cast<ForwardMode>(7);
  try {
    dsa_dispatch(loose_config(), Device::cpu(1), facts);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("mode = 7"), std::string::npos);
  }
}

TEST(DsaDispatch, IsAPureFunction) {
  const DsaDispatch first = dsa_dispatch(loose_config(), Device::cpu(1), short_batch());
  DsaBatchFacts other = short_batch();
  other.max_kv_len = 1000;
  dsa_dispatch(loose_config(), Device::cpu(1), other);
  const DsaDispatch second = dsa_dispatch(loose_config(), Device::cpu(1), short_batch());
  EXPECT_TRUE(first.one_shot);
  EXPECT_EQ(first.one_shot, second.one_shot);
  ASSERT_EQ(first.reasons.size(), second.reasons.size());
  EXPECT_TRUE(std::equal(first.reasons.begin(), first.reasons.end(), second.reasons.begin()));
}

}  // namespace
}  // namespace fovea
