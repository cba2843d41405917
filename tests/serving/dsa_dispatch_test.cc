#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "src/serving/dsa_dispatch.h"

namespace fovea {
namespace {

constexpr ForwardMode kModes[] = {ForwardMode::kExtend,       ForwardMode::kMixed,
                                  ForwardMode::kDecode,       ForwardMode::kIdle,
                                  ForwardMode::kTargetVerify, ForwardMode::kDraftExtend,
                                  ForwardMode::kDraftExtendV2};
constexpr RowFormat kFormats[] = {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576};
constexpr const char* kNames[] = {
    "auto",          "cache_direct", "contiguous_bf16", "flashmla_sparse", "flashmla_kv",
    "flashmla_auto", "fa3",          "tilelang",        "trtllm",          "aiter"};

bool is_extend(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
}

bool mentions(const DsaDispatch& dispatch, std::string_view text) {
  return std::any_of(
      dispatch.reasons.begin(), dispatch.reasons.end(),
      [&](std::string_view reason) { return reason.find(text) != std::string_view::npos; });
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

DsaDispatch dispatch_of(const DsaConfig& config, const DsaBatchFacts& facts) {
  return dsa_dispatch(config, Device::cpu(1), facts);
}

// One condition of a conjunction, and the change that breaks it alone.
struct Condition {
  const char* name;
  std::function<void(DsaConfig&, Device&, DsaBatchFacts&)> break_it;
};

std::vector<Condition> one_shot_conditions() {
  return {
      {"mode", [](auto&, auto&, auto& f) { f.mode = ForwardMode::kDecode; }},
      {"device", [](auto&, auto& d, auto&) { d.kind = static_cast<DeviceKind>(9); }},
      {"inputs", [](auto&, auto&, auto& f) { f.mha_inputs = false; }},
      {"deterministic", [](auto& c, auto&, auto&) { c.deterministic = true; }},
      {"absorbed", [](auto& c, auto&, auto&) { c.force_absorbed = true; }},
      {"parallel engine", [](auto& c, auto&, auto&) { c.context_parallel = true; }},
      {"lengths",
       [](auto&, auto&, auto& f) {
         f.has_host_lengths = false;
         f.max_kv_len = f.sum_kv_len = 0;
       }},
      {"topk", [](auto& c, auto&, auto&) { c.topk = 7; }},
      {"capacity", [](auto& c, auto&, auto&) { c.mha_chunk_capacity = 19; }},
  };
}

// Any set of broken conditions turns one-shot off, the empty set alone leaves it on: an "or" among
// them, or a missing one, fails.
TEST(DsaDispatch, OneShotIsOneConjunction) {
  const std::vector<Condition> conditions = one_shot_conditions();
  for (const bool mixed : {false, true}) {
    for (const RowFormat format : kFormats) {
      for (unsigned broken = 0; broken < 1u << conditions.size(); ++broken) {
        DsaConfig config = loose_config();
        config.row_format = format;
        Device device = Device::cpu(1);
        DsaBatchFacts facts = short_batch();
        if (mixed) facts.mode = ForwardMode::kMixed;
        std::string names;
        for (size_t i = 0; i < conditions.size(); ++i) {
          if ((broken >> i & 1) == 0) continue;
          conditions[i].break_it(config, device, facts);
          names += std::string(conditions[i].name) + " ";
        }
        const DsaDispatch dispatch = dsa_dispatch(config, device, facts);
        EXPECT_EQ(dispatch.one_shot, broken == 0) << names;
        EXPECT_EQ(dispatch.kernel == DsaKernel::kOneShotMha, broken == 0) << names;
        EXPECT_EQ(dispatch.transform, IndexTransform::kPaged) << names;
        EXPECT_EQ(mentions(dispatch, "one-shot is off"), broken != 0 && is_extend(facts.mode))
            << names;
        const bool fits = is_extend(facts.mode) && facts.has_host_lengths && config.topk == 8;
        EXPECT_EQ(dispatch.skip_selection, fits) << names;
      }
    }
  }
}

TEST(DsaDispatch, OneShotIsOffInEveryModeButExtendAndMixed) {
  for (const ForwardMode mode : kModes) {
    DsaBatchFacts facts = short_batch();
    facts.mode = mode;
    EXPECT_EQ(dispatch_of(loose_config(), facts).one_shot, is_extend(mode)) << to_string(mode);
  }
}

TEST(DsaDispatch, AContextSplitTurnsOneShotAndTheSkipOff) {
  DsaBatchFacts facts = short_batch();
  facts.context_parallel = true;
  const DsaDispatch split = dispatch_of(loose_config(), facts);
  EXPECT_FALSE(split.one_shot);
  EXPECT_FALSE(split.skip_selection);
  EXPECT_TRUE(mentions(split, "context parallelism"));
}

TEST(DsaDispatch, TheOneShotBoundOfARequestIsTheCapacityForTrtllm) {
  for (const bool trtllm : {false, true}) {
    for (const int64_t max_kv_len : {8, 9, 20, 21}) {
      for (const int64_t other : {0, 1}) {
        DsaConfig config = loose_config();
        config.row_format = RowFormat::kBf16;
        if (trtllm) config.prefill_implementation = "trtllm";
        DsaBatchFacts facts = short_batch();
        facts.max_kv_len = max_kv_len;
        facts.sum_kv_len = max_kv_len + other;
        const bool expected = max_kv_len + other <= 20 && (trtllm || max_kv_len <= 8);
        const DsaDispatch dispatch = dispatch_of(config, facts);
        EXPECT_EQ(dispatch.one_shot, expected) << trtllm << " " << max_kv_len << " " << other;
        EXPECT_EQ(dispatch.skip_selection, max_kv_len <= 8);
      }
    }
  }
}

// The documented table, written out a second time: what each name does with bf16, v32 and f576 in
// EXTEND and MIXED, then in the other modes. d: reads the pages, c: unpacks, -: refused.
const std::map<std::string, std::pair<std::string, std::string>> kTable = {
    {"auto", {"ddd", "ddd"}},
    {"cache_direct", {"ddd", "ddd"}},
    {"contiguous_bf16", {"dc-", "---"}},
    {"flashmla_sparse", {"dc-", "d--"}},
    {"flashmla_kv", {"-d-", "-d-"}},
    {"flashmla_auto", {"ddd", "ddd"}},
    {"fa3", {"d--", "d--"}},
    {"tilelang", {"d--", "d--"}},
    {"trtllm", {"d-d", "d-d"}},
    {"aiter", {"d--", "d--"}},
};

// Mode x cache x implementation x one-shot: RAGGED exactly for EXTEND and MIXED over a v32 cache
// whose chosen kernel reads contiguous rows; and what a name refuses.
TEST(DsaDispatch, TransformAndKernelFollowModeCacheAndImplementation) {
  for (const char* name : kNames) {
    for (size_t f = 0; f < std::size(kFormats); ++f) {
      for (const ForwardMode mode : kModes) {
        for (const bool one_shot : {false, true}) {
          for (const bool decode_field : {false, true}) {
            DsaConfig config = loose_config();
            config.row_format = kFormats[f];
            (decode_field ? config.decode_implementation : config.prefill_implementation) = name;
            DsaBatchFacts facts = short_batch();
            facts.mode = mode;
            facts.mha_inputs = one_shot;
            const char access = (decode_field ? kTable.at(name).second : kTable.at(name).first)[f];
            const std::string text = std::string(name) + " " + std::string(to_string(kFormats[f])) +
                                     " " + std::string(to_string(mode));
            if (access == '-') {
              EXPECT_THROW(dispatch_of(config, facts), Error) << text;
              continue;
            }
            const DsaDispatch dispatch = dispatch_of(config, facts);
            const bool dense = is_extend(mode) && one_shot;
            const bool ragged = is_extend(mode) && !dense && !decode_field && access == 'c';
            EXPECT_EQ(dispatch.one_shot, dense) << text;
            EXPECT_EQ(dispatch.transform, ragged ? IndexTransform::kRagged : IndexTransform::kPaged)
                << text;
            EXPECT_EQ(dispatch.kernel, dense    ? DsaKernel::kOneShotMha
                                       : ragged ? DsaKernel::kContiguousBf16
                                                : DsaKernel::kCacheDirect)
                << text;
            EXPECT_GE(dispatch.reasons.size(), 1u) << text;
          }
        }
      }
    }
  }
}

TEST(DsaDispatch, TheImplementationTableSaysWhatTheDispatchDoes) {
  const auto letter = [](const std::optional<DsaKernel>& kernel) {
    if (!kernel.has_value()) return '-';
    return *kernel == DsaKernel::kContiguousBf16 ? 'c' : 'd';
  };
  ASSERT_EQ(dsa_implementations().size(), kTable.size());
  for (const DsaImplementationInfo& info : dsa_implementations()) {
    std::string prefill, decode;
    for (const RowFormat format : kFormats) {
      ASSERT_NE(info.support(format), nullptr);
      prefill += letter(info.support(format)->prefill);
      decode += letter(info.support(format)->decode);
    }
    EXPECT_EQ(prefill, kTable.at(std::string(info.name)).first) << info.name;
    EXPECT_EQ(decode, kTable.at(std::string(info.name)).second) << info.name;
    EXPECT_EQ(info.long_one_shot, info.name == "trtllm");
    EXPECT_EQ(info.chooses_by_ratio, info.name == "auto" || info.name == "flashmla_auto");
    EXPECT_EQ(info.native,
              info.name == "auto" || info.name == "cache_direct" || info.name == "contiguous_bf16");
    EXPECT_FALSE(info.restriction.empty());
    EXPECT_EQ(info.support(RowFormat::kI132), nullptr);
  }
}

TEST(DsaDispatch, TheKernelTableAgreesWithTheDispatch) {
  for (const DsaKernelInfo& info : dsa_kernels()) {
    const bool contiguous = info.kernel == DsaKernel::kContiguousBf16;
    EXPECT_EQ(info.transform, contiguous ? IndexTransform::kRagged : IndexTransform::kPaged);
    EXPECT_TRUE(info.prefill);
    EXPECT_EQ(info.decode, info.kernel == DsaKernel::kCacheDirect);
    EXPECT_EQ(info.deterministic, info.kernel == DsaKernel::kCacheDirect);
    EXPECT_EQ(info.logit_cap, info.kernel != DsaKernel::kOneShotMha);
    EXPECT_EQ(info.op, info.kernel == DsaKernel::kOneShotMha ? "mha_varlen" : "sparse_mla");
  }
}

// Explicitly asked for, the contiguous kernel needs a known bound that fits, and nothing else.
TEST(DsaDispatch, TheContiguousKernelNeedsAKnownBound) {
  for (const char* name : {"contiguous_bf16", "flashmla_sparse"}) {
    for (const bool mixed : {false, true}) {
      DsaConfig config = loose_config();
      config.prefill_implementation = name;
      DsaBatchFacts facts = short_batch();
      if (mixed) facts.mode = ForwardMode::kMixed;
      facts.mha_inputs = false;
      facts.num_rows = 0;  // no ratio applies
      EXPECT_EQ(dispatch_of(config, facts).kernel, DsaKernel::kContiguousBf16);
      facts.sum_kv_len = 21;
      EXPECT_EQ(dispatch_of(config, facts).kernel, DsaKernel::kCacheDirect);
      facts.sum_kv_len = 0;
      facts.has_host_lengths = false;
      EXPECT_EQ(dispatch_of(config, facts).kernel, DsaKernel::kCacheDirect);
    }
  }
}

// Chosen by "auto": every condition is necessary, all of them suffice.
TEST(DsaDispatch, AutoUnpacksByOneConjunction) {
  const std::vector<Condition> conditions = {
      {"mixed", [](auto&, auto&, auto& f) { f.mode = ForwardMode::kMixed; }},
      {"lengths",
       [](auto&, auto&, auto& f) {
         f.has_host_lengths = false;
         f.sum_kv_len = f.max_kv_len = 0;
       }},
      {"ratio off", [](auto& c, auto&, auto&) { c.contiguous_kv_ratio = 0; }},
      {"rows", [](auto&, auto&, auto& f) { f.num_rows = 5; }},  // 20 < 4 * 5 is false
      {"capacity", [](auto& c, auto&, auto&) { c.mha_chunk_capacity = 19; }},
      {"bf16 cache", [](auto& c, auto&, auto&) { c.row_format = RowFormat::kBf16; }},
      {"f576 cache", [](auto& c, auto&, auto&) { c.row_format = RowFormat::kF576; }},
      {"direct", [](auto& c, auto&, auto&) { c.prefill_implementation = "cache_direct"; }},
  };
  for (const char* name : {"auto", "flashmla_auto"}) {
    for (unsigned broken = 0; broken < 1u << conditions.size(); ++broken) {
      DsaConfig config = loose_config();
      config.prefill_implementation = name;
      config.contiguous_kv_ratio = 4;
      Device device = Device::cpu(1);
      DsaBatchFacts facts = short_batch();
      facts.mha_inputs = false;
      facts.num_rows = 6;
      std::string names;
      for (size_t i = 0; i < conditions.size(); ++i) {
        if ((broken >> i & 1) == 0) continue;
        conditions[i].break_it(config, device, facts);
        names += std::string(conditions[i].name) + " ";
      }
      const DsaDispatch dispatch = dsa_dispatch(config, device, facts);
      EXPECT_EQ(dispatch.kernel == DsaKernel::kContiguousBf16, broken == 0) << names;
      EXPECT_EQ(dispatch.transform == IndexTransform::kRagged, broken == 0) << names;
      EXPECT_EQ(mentions(dispatch, "cache-direct: "), broken != 0) << names;
    }
  }
}

TEST(DsaDispatch, AutoStaysDirectInEveryOtherMode) {
  for (const ForwardMode mode : kModes) {
    DsaConfig config = loose_config();
    config.contiguous_kv_ratio = 1000;
    DsaBatchFacts facts = short_batch();
    facts.mha_inputs = false;
    facts.mode = mode;
    EXPECT_EQ(dispatch_of(config, facts).kernel == DsaKernel::kContiguousBf16,
              mode == ForwardMode::kExtend)
        << to_string(mode);
  }
}

TEST(DsaDispatch, FreshRowsNeedTheContiguousKernelAndNoPrefix) {
  for (unsigned bits = 0; bits < 1u << 3; ++bits) {
    const bool fresh = (bits & 1) != 0, contiguous = (bits & 2) != 0, prefix = (bits & 4) != 0;
    DsaConfig config = loose_config();
    if (fresh) config.extend_kv_source = ExtendKvSource::kFresh;
    if (contiguous) config.prefill_implementation = "contiguous_bf16";
    DsaBatchFacts facts = short_batch();
    facts.mha_inputs = false;
    facts.has_prefix = prefix;
    EXPECT_EQ(dispatch_of(config, facts).fresh_kv, fresh && contiguous && !prefix) << bits;
  }
}

// What the error says: field, found, names that would do, code.
struct Refused {
  const char* text;
  ErrorCode code;
  std::function<void(DsaConfig&)> change;
  std::vector<const char*> says;
};

TEST(DsaDispatch, NamesTheFieldWhatWasFoundAndWhatWouldDo) {
  const std::vector<Refused> cases = {
      {"unknown prefill name",
       ErrorCode::kInvalidArgument,
       [](auto& c) { c.prefill_implementation = "one_shot_mha"; },
       {"prefill_implementation = 'one_shot_mha'", "auto, cache_direct, contiguous_bf16",
        "flashmla_kv"}},
      {"empty decode name",
       ErrorCode::kInvalidArgument,
       [](auto& c) { c.decode_implementation = ""; },
       {"decode_implementation = ''", "flashmla_auto"}},
      {"bf16 reader over v32",
       ErrorCode::kUnsupported,
       [](auto& c) { c.prefill_implementation = "fa3"; },
       {"prefill_implementation = fa3", "row_format = v32", "expected auto, cache_direct"}},
      {"unpacking reader in decode",
       ErrorCode::kUnsupported,
       [](auto& c) { c.decode_implementation = "flashmla_sparse"; },
       {"decode_implementation = flashmla_sparse", "row_format = v32", "decode modes",
        "expected auto, cache_direct, flashmla_kv or flashmla_auto"}},
      {"contiguous in decode",
       ErrorCode::kUnsupported,
       [](auto& c) { c.decode_implementation = "contiguous_bf16"; },
       {"decode_implementation = contiguous_bf16", "expected auto"}},
      {"block reader over bf16",
       ErrorCode::kUnsupported,
       [](auto& c) {
         c.row_format = RowFormat::kBf16;
         c.decode_implementation = "flashmla_kv";
       },
       {"decode_implementation = flashmla_kv", "row_format = bf16",
        "fa3, tilelang, trtllm or aiter"}},
      {"bf16 reader over f576",
       ErrorCode::kUnsupported,
       [](auto& c) {
         c.row_format = RowFormat::kF576;
         c.prefill_implementation = "contiguous_bf16";
       },
       {"row_format = f576", "expected auto, cache_direct, flashmla_auto or trtllm"}},
      {"unpacking with deterministic",
       ErrorCode::kUnsupported,
       [](auto& c) {
         c.deterministic = true;
         c.prefill_implementation = "flashmla_sparse";
       },
       {"prefill_implementation = flashmla_sparse", "deterministic",
        "expected auto, cache_direct, flashmla_kv or flashmla_auto"}},
      {"ratio with deterministic",
       ErrorCode::kUnsupported,
       [](auto& c) {
         c.deterministic = true;
         c.contiguous_kv_ratio = 2;
       },
       {"contiguous_kv_ratio = 2", "deterministic", "expected 0"}},
      {"negative ratio",
       ErrorCode::kInvalidArgument,
       [](auto& c) { c.contiguous_kv_ratio = -1; },
       {"contiguous_kv_ratio = -1", ">= 0"}},
      {"NaN ratio",
       ErrorCode::kInvalidArgument,
       [](auto& c) { c.contiguous_kv_ratio = std::numeric_limits<double>::quiet_NaN(); },
       {"contiguous_kv_ratio = ", ">= 0"}},
      {"format of index keys",
       ErrorCode::kInvalidArgument,
       [](auto& c) { c.row_format = RowFormat::kI132; },
       {"row_format = i132", "bf16, v32 or f576"}},
  };
  for (const Refused& refused : cases) {
    for (const ForwardMode mode : {ForwardMode::kExtend, ForwardMode::kDecode}) {
      DsaConfig config = loose_config();
      refused.change(config);
      DsaBatchFacts facts = short_batch();
      facts.mode = mode;
      try {
        dispatch_of(config, facts);
        ADD_FAILURE() << refused.text;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), refused.code) << refused.text;
        for (const char* word : refused.says) {
          EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
              << refused.text << ": " << error.what();
        }
      }
    }
  }
}

// The same names are refused when a backend is made.
TEST(DsaDispatch, TheConstructorRefusesWhatTheDispatchRefuses) {
  for (const char* name : kNames) {
    for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32}) {
      for (const bool decode_field : {false, true}) {
        DsaConfig config = loose_config();
        config.row_format = format;
        config.num_heads = 1;
        config.index_heads = 1;
        config.max_requests = config.max_rows = 1;
        config.table_width = 4;
        (decode_field ? config.decode_implementation : config.prefill_implementation) = name;
        const auto& [prefill, decode] = kTable.at(name);
        const char access = (decode_field ? decode : prefill)[format == RowFormat::kV32 ? 1 : 0];
        if (access == '-') {
          EXPECT_THROW(DsaBackend(config, Device::cpu(1)), Error) << name;
        } else {
          EXPECT_NO_THROW(DsaBackend(config, Device::cpu(1))) << name;
        }
        EXPECT_EQ(access == 'c', access != '-' && internal::may_run_contiguous(config)) << name;
      }
    }
  }
}

TEST(DsaDispatch, ContiguousBuffersAreThereExactlyWhereABatchMayNeedThem) {
  DsaConfig config = loose_config();
  EXPECT_FALSE(internal::may_run_contiguous(config));
  config.contiguous_kv_ratio = 0.5;
  EXPECT_TRUE(internal::may_run_contiguous(config));
  config.row_format = RowFormat::kF576;
  EXPECT_FALSE(internal::may_run_contiguous(config));
  config.row_format = RowFormat::kV32;
  config.prefill_implementation = "cache_direct";
  EXPECT_FALSE(internal::may_run_contiguous(config));
}

TEST(DsaDispatch, NamesAModeThatDoesNotExist) {
  DsaBatchFacts facts = short_batch();
  facts.mode = static_cast<ForwardMode>(77);
  try {
    dispatch_of(loose_config(), facts);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("mode = 77"), std::string::npos);
  }
}

TEST(DsaDispatch, RefusesAContextSplitOfASpeculativeOrDecodeStep) {
  for (const ForwardMode mode : kModes) {
    DsaBatchFacts facts = short_batch();
    facts.mode = mode;
    facts.context_parallel = true;
    if (is_extend(mode)) {
      EXPECT_NO_THROW(dispatch_of(loose_config(), facts));
      continue;
    }
    try {
      dispatch_of(loose_config(), facts);
      ADD_FAILURE() << to_string(mode);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(to_string(mode)), std::string::npos);
    }
  }
}

TEST(DsaDispatch, IsAPureFunction) {
  const DsaDispatch first = dispatch_of(loose_config(), short_batch());
  DsaBatchFacts other = short_batch();
  other.max_kv_len = 1000;
  dispatch_of(loose_config(), other);
  const DsaDispatch second = dispatch_of(loose_config(), short_batch());
  EXPECT_TRUE(first.one_shot);
  EXPECT_EQ(first.one_shot, second.one_shot);
  ASSERT_EQ(first.reasons.size(), second.reasons.size());
  EXPECT_TRUE(std::equal(first.reasons.begin(), first.reasons.end(), second.reasons.begin()));
}

}  // namespace
}  // namespace fovea
