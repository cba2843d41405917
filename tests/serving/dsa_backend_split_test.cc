#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::RowResults;
using test::StepOptions;
using test::to_doubles;
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kMixed = ForwardMode::kMixed;

DsaConfig split_config(RowFormat format, int64_t page_size = 4) {
  DsaConfig config = DsaRig::small_config(page_size, format);
  config.context_parallel = true;
  return config;
}

void expect_equal_rows(const RowResults& actual, const RowResults& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [key, row] : actual) {
    ASSERT_TRUE(row == expected.at(key)) << "request " << key.first << " position " << key.second;
  }
}

class DsaContextSplit : public testing::TestWithParam<RowFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, DsaContextSplit,
                         testing::Values(RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576),
                         [](const auto& format) { return std::string(to_string(format.param)); });

TEST_P(DsaContextSplit, RanksTogetherEqualTheWholeForward) {
  DsaRig whole(split_config(GetParam()), 1);
  whole.step(kExtend, {{0, 13}, {1, 1}, {2, 7}});
  whole.step(kExtend, {{1, 3}});
  whole.step(kMixed, {{0, 1}, {1, 9}, {2, 2}});
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const bool host_lengths : {true, false}) {
      DsaRig rig(split_config(GetParam()), 1 + ranks % 2, static_cast<uint64_t>(ranks));
      const StepOptions options{.host_lengths = host_lengths, .context_ranks = ranks};
      rig.step(kExtend, {{0, 13}, {1, 1}, {2, 7}}, options);
      rig.step(kExtend, {{1, 3}}, options);  // some ranks have no row
      rig.step(kMixed, {{0, 1}, {1, 9}, {2, 2}}, options);
      expect_equal_rows(rig.results(), whole.results());
    }
  }
}

TEST_P(DsaContextSplit, ZigzagBlocksTogetherEqualTheWholeForward) {
  DsaRig whole(split_config(GetParam()), 1);
  whole.step(kExtend, {{0, 30}});
  whole.step(kExtend, {{0, 17}});
  for (int ranks = 1; ranks <= 8; ++ranks) {
    DsaRig rig(split_config(GetParam()), 2, static_cast<uint64_t>(ranks));
    const StepOptions options{.context_ranks = ranks, .context_scheme = ContextScheme::kZigzag};
    rig.step(kExtend, {{0, 30}}, options);
    rig.step(kExtend, {{0, 17}}, options);
    expect_equal_rows(rig.results(), whole.results());
  }
}

// Rank 0 of two holds the first of the two tokens: its positions may be the head of everybody's.
TEST(DsaContextSplitInputs, PositionsOfARankMayShareMemoryWithThoseOfTheBatch) {
  DsaRig whole(split_config(RowFormat::kBf16), 1);
  whole.step(kExtend, {{0, 2}});
  DsaRig rig(split_config(RowFormat::kBf16), 1);
  StepOptions options{.context_ranks = 2};
  options.adjust_rank = [](int rank, ForwardBatch& batch, DsaForwardTensors&) {
    if (rank == 0) batch.positions.data = batch.store_positions.data;
  };
  rig.step(kExtend, {{0, 2}}, options);
  expect_equal_rows(rig.results(), whole.results());
}

// ext_len [1, 1, 3] on four ranks, as in docs/context_split.md.
TEST(DsaContextSplitMetadata, IsThatOfTheSelectedRequests) {
  DsaRig rig(split_config(RowFormat::kBf16), 1);
  std::vector<std::vector<double>> kv_indptr, row_len, row_to_request, k_start, k_end, topk_indptr;
  StepOptions options{.context_ranks = 4};
  options.adjust_rank = [&](int, ForwardBatch& batch, DsaForwardTensors&) {
    rig.backend().begin_step(batch);
    const MetadataFields& fields = rig.backend().metadata();
    kv_indptr.push_back(to_doubles(fields.kv_indptr));
    row_len.push_back(to_doubles(fields.row_len));
    row_to_request.push_back(to_doubles(fields.row_to_request));
    k_start.push_back(to_doubles(fields.k_start));
    k_end.push_back(to_doubles(fields.k_end));
    topk_indptr.push_back(to_doubles(fields.topk_indptr));
    EXPECT_EQ(to_doubles(fields.topk_length), to_doubles(fields.row_len));
  };
  rig.step(kExtend, {{0, 1}, {1, 1}, {2, 3}}, options);
  using Values = std::vector<double>;
  EXPECT_EQ(kv_indptr[0], (Values{0, 1, 4}));
  EXPECT_EQ(row_len[0], (Values{1, 3}));
  EXPECT_EQ(row_to_request[0], (Values{0, 1}));
  EXPECT_EQ(k_start[0], (Values{0, 1}));
  EXPECT_EQ(k_end[0], (Values{1, 4}));
  EXPECT_EQ(topk_indptr[0], (Values{0, 1, 4}));
  EXPECT_EQ(row_len[3], (Values{2}));
  EXPECT_EQ(kv_indptr[3], (Values{0, 3}));
  EXPECT_EQ(k_start[3], (Values{0}));
}

// Keys unpacked for the selected requests, or this call's own of the whole batch.
TEST(DsaContextSplitKernels, ContiguousKeysGiveTheSameOutputs) {
  for (const ExtendKvSource source : {ExtendKvSource::kCache, ExtendKvSource::kFresh}) {
    DsaConfig config = split_config(RowFormat::kV32);
    config.deterministic = false;
    config.prefill_implementation = "contiguous_bf16";
    config.extend_kv_source = source;
    DsaRig whole(config, 1);
    whole.step(kExtend, {{0, 13}, {1, 1}, {2, 20}});
    EXPECT_EQ(whole.backend().dispatch().kernel, DsaKernel::kContiguousBf16);
    EXPECT_EQ(whole.backend().dispatch().fresh_kv, source == ExtendKvSource::kFresh);
    for (const int ranks : {2, 5}) {
      DsaRig rig(config, 1);
      rig.step(kExtend, {{0, 13}, {1, 1}, {2, 20}},
               {.give_indices = false, .context_ranks = ranks});
      EXPECT_EQ(rig.backend().dispatch().kernel, DsaKernel::kContiguousBf16);
      EXPECT_EQ(rig.out.bytes(), whole.out.bytes());
      EXPECT_EQ(rig.lse.bytes(), whole.lse.bytes());
    }
  }
}

TEST(DsaContextSplitErrors, NameWhatContradictsTheBatch) {
  const auto refuses = [](const std::string& text,
                          const std::function<void(ForwardBatch&, ContextSplit&)>& change,
                          ErrorCode code = ErrorCode::kInvalidArgument, bool parallel = true) {
    DsaConfig config = split_config(RowFormat::kBf16);
    config.context_parallel = parallel;
    DsaRig rig(config, 1);
    ContextSplit split;
    StepOptions options{.context_ranks = 2};
    options.adjust_rank = [&](int, ForwardBatch& batch, DsaForwardTensors&) {
      split = *batch.context_split;
      batch.context_split = &split;
      change(batch, split);
    };
    try {
      rig.step(kExtend, {{0, 5}, {1, 3}}, options);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refuses(
      "context_parallel = false", [](auto&, auto&) {}, ErrorCode::kInvalidArgument, false);
  refuses(
      "mode target_verify",
      [](auto& batch, auto&) {
        batch.mode = ForwardMode::kTargetVerify;
        batch.ext_len = {};
        batch.num_rows = 2;
        batch.positions.shape[0] = 2;
        batch.host_seq_len = batch.host_ext_len = {};
      },
      ErrorCode::kUnsupported);
  refuses("padded_rows = 6", [](auto& batch, auto&) {
    batch.padded_rows = 6;
    batch.positions = batch.store_positions;
    batch.positions.shape[0] = 6;
  });
  refuses("store_positions", [](auto& batch, auto&) { batch.store_positions = {}; });
  refuses("store_positions is given without a context_split", [](auto& batch, auto&) {
    batch.context_split = nullptr;
    batch.out_cache_loc.shape[0] = batch.num_rows;
  });
  refuses("context_split.row_len has 3", [](auto&, auto& split) { split.row_len.pop_back(); });
  refuses("context_split.row_len[0] = 6, expected 1..5",
          [](auto&, auto& split) { split.row_len[0] = 6; });
  refuses("context_split.row_to_request[3] = 0, expected 1",
          [](auto&, auto& split) { split.row_to_request[3] = 0; });
  refuses("context_split.selected[1] = 2", [](auto&, auto& split) { split.selected[1] = 2; });
  refuses("context_split.selected[1] = 0", [](auto&, auto& split) { split.selected[1] = 0; });
  refuses("context_split.kv_len[0] = 6, expected at most 5",
          [](auto&, auto& split) { split.kv_len[0] = 6; });
  refuses("context_split.ext_len[0] = 5", [](auto&, auto& split) { split.ext_len[0] = 5; });
  refuses("host_ext_len sums to 8, expected out_cache_loc.shape[0] = 7", [](auto& batch, auto&) {
    batch.out_cache_loc.shape[0] = batch.store_positions.shape[0] = 7;
  });
}

}  // namespace
}  // namespace fovea
