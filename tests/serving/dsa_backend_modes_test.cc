#include <gtest/gtest.h>

#include <limits>
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
using test::Tensor;
using test::to_doubles;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kMixed = ForwardMode::kMixed;
constexpr ForwardMode kDecode = ForwardMode::kDecode;
constexpr ForwardMode kVerify = ForwardMode::kTargetVerify;
constexpr ForwardMode kDraft = ForwardMode::kDraftExtend;
constexpr ForwardMode kDraftV2 = ForwardMode::kDraftExtendV2;

DsaConfig speculative(int64_t page_size, RowFormat format, int64_t rows_per_request = 3) {
  DsaConfig config = DsaRig::small_config(page_size, format);
  config.rows_per_request = rows_per_request;
  return config;
}

// Requests 0, 1, 2 of 37, 21 and 5 tokens, decoded one by one.
RowResults one_by_one(RowFormat format) {
  DsaRig rig(DsaRig::small_config(64, format), 1);
  const int lengths[] = {37, 21, 5};
  for (int id = 0; id < 3; ++id) {
    for (int token = 0; token < lengths[id]; ++token) rig.step(kDecode, {{id, 1}});
  }
  return rig.results();
}

void expect_equal_rows(const RowResults& actual, const RowResults& expected) {
  ASSERT_FALSE(actual.empty());
  for (const auto& [key, row] : actual) {
    ASSERT_TRUE(row == expected.at(key)) << "request " << key.first << " position " << key.second;
  }
}

class DsaBackendModes : public test::RigTest {};
INSTANTIATE_TEST_SUITE_P(Formats, DsaBackendModes,
                         testing::Combine(testing::ValuesIn(test::kDevices),
                                          testing::Values(RowFormat::kBf16, RowFormat::kV32,
                                                          RowFormat::kF576)),
                         test::rig_test_name);

// Every way to append tokens, wrong guesses rolled back and their slots written again.
TEST_P(DsaBackendModes, AcceptedRowsEqualTheSameRowsDecodedOneByOne) {
  const RowResults expected = one_by_one(format());
  for (const int64_t page_size : {1, 4, 64}) {
    for (const int threads : {1, 2}) {
      DsaRig rig(speculative(page_size, format()), threads, static_cast<uint64_t>(page_size));
      const StepOptions options{.host_lengths = threads == 1};
      rig.step(kExtend, {{0, 7}, {1, 2}}, options);
      rig.step(kVerify, {{0, 1}, {1, 3}}, options);   // 8, 5
      rig.step(kVerify, {{1, 2}, {0, 1}}, options);   // 9, 7
      rig.step(kDraft, {{0, 3}, {1, 1}}, options);    // 12, 8
      rig.step(kDraftV2, {{1, 1}, {0, 2}}, options);  // 14, 9
      rig.step(kDraftV2, {{0, 3}, {1, 2}}, options);  // 17, 11
      rig.step(kDecode, {{0, 1}, {1, 1}}, options);
      rig.step(kMixed, {{0, 1}, {2, 5}, {1, 4}}, options);
      rig.step(kVerify, {{0, 3}}, options);
      rig.step(kVerify, {{1, 1}, {0, 2}}, options);
      rig.step(kExtend, {{0, 13}, {1, 4}}, options);
      ASSERT_EQ(rig.results().size(), 37u + 21u + 5u);
      expect_equal_rows(rig.results(), expected);
    }
  }
}

TEST_P(DsaBackendModes, PaddingFollowsTheRowsOfEveryMode) {
  const RowResults expected = one_by_one(format());
  DsaRig rig(speculative(4, format()), 2);
  const StepOptions padded{.padded_rows = 11};
  rig.step(kExtend, {{0, 9}, {1, 5}}, {.padded_rows = 16});
  for (const ForwardMode mode : {kVerify, kDraft, kDraftV2, kDecode}) {
    rig.step(mode, {{0, 1}, {1, 1}}, padded);
    const int64_t live = rig.backend().metadata().row_len.shape[0];
    const int64_t heads = rig.config().num_heads;
    for (int64_t row = live; row < 11; ++row) {
      for (int64_t i = 0; i < heads * 512; ++i) {
        ASSERT_EQ(rig.out.data<bf16_t>()[row * heads * 512 + i].bits, 0);
      }
      EXPECT_EQ(rig.lse.data<float>()[row * heads], -kInf);
      EXPECT_EQ(rig.indices.data<int32_t>()[row * 8], -1);
    }
  }
  expect_equal_rows(rig.results(), expected);
}

// The engine knows only that no request has more than N rows.
TEST_P(DsaBackendModes, DraftExtendTakesABoundForItsRows) {
  const RowResults expected = one_by_one(format());
  DsaRig rig(speculative(4, format()), 1);
  rig.step(kExtend, {{0, 20}, {1, 6}});
  const StepOptions bound{.padded_rows = 8, .rows_bound = 6, .host_lengths = false};
  rig.step(kDraft, {{0, 2}, {1, 1}}, bound);
  EXPECT_EQ(to_doubles(rig.backend().metadata().row_to_request),
            (std::vector<double>{0, 0, 1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(to_doubles(rig.backend().metadata().topk_length),
            (std::vector<double>{8, 8, 7, 0, 0, 0, 0, 0}));
  for (int64_t i = 3 * 4; i < 8 * 4; ++i) EXPECT_EQ(rig.lse.data<float>()[i], -kInf);
  for (int64_t i = 3 * 8; i < 8 * 8; ++i) EXPECT_EQ(rig.indices.data<int32_t>()[i], -1);
  // The rows behind the last request held NaN and the slot of request 0's first new token.
  rig.step(kDraft, {{0, 1}, {1, 3}}, bound);
  rig.step(kDecode, {{0, 1}, {1, 1}});
  expect_equal_rows(rig.results(), expected);
}

TEST(DsaBackendModesMetadata, FollowTheRulesOfTheirMode) {
  DsaRig rig(speculative(4, RowFormat::kBf16), 1);
  const auto values = [&](const TensorView& field) { return to_doubles(field); };
  using Values = std::vector<double>;
  rig.step(kExtend, {{0, 7}, {1, 2}});
  rig.step(kVerify, {{0, 3}, {1, 3}});
  const MetadataFields& fields = rig.backend().metadata();
  EXPECT_EQ(values(fields.kv_len), (Values{10, 5}));
  EXPECT_EQ(values(fields.kv_indptr), (Values{0, 10, 15}));
  EXPECT_EQ(values(fields.q_indptr), (Values{0, 3, 6}));
  EXPECT_EQ(values(fields.row_len), (Values{8, 9, 10, 3, 4, 5}));
  EXPECT_EQ(values(fields.row_to_request), (Values{0, 0, 0, 1, 1, 1}));
  EXPECT_TRUE(fields.schedule.defined());
  EXPECT_FALSE(fields.k_start.defined());
  rig.step(kDraftV2, {{0, 3}, {1, 3}});  // N is not added to seq_len
  EXPECT_EQ(values(fields.kv_len), (Values{13, 8}));
  EXPECT_EQ(values(fields.row_len), (Values{11, 12, 13, 6, 7, 8}));
  rig.step(kDraft, {{0, 3}, {1, 1}});
  EXPECT_EQ(values(fields.kv_len), (Values{16, 9}));
  EXPECT_EQ(values(fields.row_len), (Values{14, 15, 16, 9}));
  EXPECT_EQ(values(fields.ext_len), (Values{3, 1}));
  for (const std::string_view reason : rig.backend().dispatch().reasons) {
    EXPECT_FALSE(reason.empty());
  }
  EXPECT_EQ(rig.backend().dispatch().kernel, DsaKernel::kCacheDirect);
  EXPECT_EQ(rig.backend().dispatch().transform, IndexTransform::kPaged);
}

TEST(DsaBackendModesMetadata, VerifyNeedsItsHeadroomInTheTable) {
  DsaRig rig(speculative(4, RowFormat::kBf16), 1);
  rig.step(kExtend, {{0, 125}});
  rig.step(kVerify, {{0, 0}});  // 125 + 3 = 128 = table_width
  DsaRig longer(speculative(4, RowFormat::kBf16), 1);
  longer.step(kExtend, {{0, 124}});
  static constexpr int32_t kLength[] = {126};
  StepOptions options;
  options.adjust = [](ForwardBatch& batch, DsaForwardTensors&) { batch.host_seq_len = kLength; };
  try {
    longer.step(kVerify, {{0, 1}}, options);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what())
                  .find("request 0: host_seq_len = 126 plus 3 rows to verify, expected at most "
                        "table_width = 128"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace fovea
