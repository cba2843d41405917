#include "fovea/dsa_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "fovea/error.h"
#include "fovea/index_quantize.h"
#include "fovea/numeric.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::make_token;
using test::RowResult;
using test::RowResults;
using test::StepOptions;
using test::Tensor;
using test::to_doubles;
using test::Token;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kMixed = ForwardMode::kMixed;
constexpr ForwardMode kDecode = ForwardMode::kDecode;

// Requests 0, 1, 2 of 37, 21 and 5 tokens, each row's result as one big EXTEND gives it.
RowResults whole_prompt(RowFormat format) {
  DsaRig rig(DsaRig::small_config(64, format), 1);
  rig.step(kExtend, {{0, 37}, {1, 21}, {2, 5}});
  return rig.results();
}

void expect_equal_rows(const RowResults& actual, const RowResults& expected) {
  for (const auto& [key, row] : actual) {
    const auto found = expected.find(key);
    ASSERT_NE(found, expected.end());
    EXPECT_EQ(row.positions, found->second.positions)
        << "selection of request " << key.first << " position " << key.second;
    ASSERT_TRUE(row == found->second) << "request " << key.first << " position " << key.second;
  }
}

class DsaBackendTest : public testing::TestWithParam<RowFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, DsaBackendTest,
                         testing::Values(RowFormat::kBf16, RowFormat::kV32),
                         [](const auto& format) { return std::string(to_string(format.param)); });

TEST_P(DsaBackendTest, ChunksDecodesPagesAndThreadsChangeNoBit) {
  const RowResults expected = whole_prompt(GetParam());
  for (const int64_t page_size : {1, 4, 64}) {
    for (const int threads : {1, 2, 3}) {
      DsaRig rig(DsaRig::small_config(page_size, GetParam()), threads,
                 static_cast<uint64_t>(page_size + threads));
      const StepOptions lengths{.host_lengths = threads != 2};
      rig.step(kExtend, {{0, 10}}, lengths);
      rig.step(kExtend, {{2, 4}, {0, 17}}, lengths);
      rig.step(kMixed, {{0, 1}, {1, 13}, {2, 1}}, lengths);
      for (int token = 0; token < 4; ++token) rig.step(kDecode, {{1, 1}, {0, 1}}, lengths);
      rig.step(kMixed, {{0, 1}, {1, 2}}, lengths);
      rig.step(kDecode, {{1, 1}}, lengths);
      rig.step(kExtend, {{1, 1}, {0, 4}}, lengths);
      ASSERT_EQ(rig.results().size(), 37u + 21u + 5u);
      expect_equal_rows(rig.results(), expected);
    }
  }
}

TEST_P(DsaBackendTest, ARowIsTheSameAloneAndAmongMates) {
  const RowResults expected = whole_prompt(GetParam());
  DsaRig rig(DsaRig::small_config(4, GetParam()), 2, 9);
  rig.step(kExtend, {{1, 21}});
  expect_equal_rows(rig.results(), expected);
}

TEST_P(DsaBackendTest, BatchesWithoutSelectionStillStoreTheirIndexKeys) {
  const RowResults expected = whole_prompt(GetParam());
  DsaRig rig(DsaRig::small_config(4, GetParam()), 1);
  rig.step(kExtend, {{0, 8}, {1, 5}});  // all lengths within topk = 8
  EXPECT_TRUE(rig.backend().dispatch().skip_selection);
  rig.step(kExtend, {{0, 1}});
  EXPECT_FALSE(rig.backend().dispatch().skip_selection);
  rig.step(kExtend, {{0, 28}, {1, 16}});
  expect_equal_rows(rig.results(), expected);
}

TEST_P(DsaBackendTest, LocalSelectionsMappedLaterGiveTheSameRows) {
  const RowResults expected = whole_prompt(GetParam());
  DsaConfig config = DsaRig::small_config(4, GetParam());
  config.fuse_transform = false;
  DsaRig rig(config, 2);
  rig.step(kExtend, {{0, 30}, {2, 5}});
  rig.step(kDecode, {{0, 1}});
  rig.step(kExtend, {{0, 6}, {1, 21}}, {.padded_rows = 40, .host_lengths = false});
  expect_equal_rows(rig.results(), expected);
}

TEST_P(DsaBackendTest, PaddedRowsAreEmptyAndChangeNothing) {
  const RowResults expected = whole_prompt(GetParam());
  DsaRig rig(DsaRig::small_config(4, GetParam()), 2);
  const auto expect_empty_tail = [&](int64_t live, int64_t padded) {
    const int64_t heads = rig.config().num_heads;
    for (int64_t i = live * heads * 512; i < padded * heads * 512; ++i) {
      ASSERT_EQ(rig.out.data<bf16_t>()[i].bits, 0);
    }
    for (int64_t i = live * heads; i < padded * heads; ++i) {
      ASSERT_EQ(rig.lse.data<float>()[i], -kInf);
    }
    for (int64_t i = live * 8; i < padded * 8; ++i) ASSERT_EQ(rig.indices.data<int32_t>()[i], -1);
  };
  rig.step(kExtend, {{0, 20}, {1, 19}}, {.padded_rows = 64, .host_lengths = true});
  expect_empty_tail(39, 64);
  rig.step(kDecode, {{0, 1}, {1, 1}}, {.padded_rows = 5, .host_lengths = true});
  expect_empty_tail(2, 5);
  EXPECT_EQ(to_doubles(rig.backend().metadata().row_to_request),
            (std::vector<double>{0, 1, -1, -1, -1}));
  rig.step(kExtend, {{2, 5}}, {.padded_rows = 9, .host_lengths = true});  // selection skipped
  expect_empty_tail(5, 9);
  expect_equal_rows(rig.results(), expected);
}

TEST_P(DsaBackendTest, IdleWithoutRequestsGivesEmptyRows) {
  DsaRig rig(DsaRig::small_config(4, GetParam()), 1);
  rig.step(ForwardMode::kIdle, {}, {.padded_rows = 3, .host_lengths = true});
  for (const double value : to_doubles(rig.out)) EXPECT_EQ(value, 0);
  for (const double value : to_doubles(rig.lse)) EXPECT_EQ(value, -kInf);
  EXPECT_EQ(rig.indices.values<int32_t>(), std::vector<int32_t>(24, -1));
  rig.step(ForwardMode::kIdle, {}, {.padded_rows = 0, .host_lengths = true});
  rig.step(kDecode, {}, {.padded_rows = 0, .host_lengths = false});
  rig.step(kExtend, {}, {.padded_rows = 2, .host_lengths = true});
  EXPECT_EQ(rig.indices.values<int32_t>(), std::vector<int32_t>(16, -1));
}

TEST_P(DsaBackendTest, AReusedTableRowAndItsPagesLeaveNoTrace) {
  const RowResults expected = whole_prompt(GetParam());
  DsaRig rig(DsaRig::small_config(4, GetParam()), 1);
  rig.step(kExtend, {{5, 60}, {6, 50}});
  rig.step(kDecode, {{5, 1}, {6, 1}});
  rig.release(5);
  rig.release(6);
  rig.step(kExtend, {{0, 30}, {1, 21}});
  rig.step(kExtend, {{0, 7}, {2, 5}});
  for (const auto& [key, row] : expected) {
    ASSERT_TRUE(rig.results().at(key) == row) << key.first << " " << key.second;
  }
}

// The keys of one request as attention sees them, [tokens][576].
std::vector<std::vector<double>> decoded_keys(const DsaConfig& config, int request, int64_t len) {
  std::vector<std::vector<double>> keys;
  for (int64_t p = 0; p < len; ++p) {
    const Token token = make_token(config, request, p);
    std::vector<double> key;
    for (const bf16_t value : token.k) key.push_back(bf16_to_float(value));
    for (size_t tile = 0; config.row_format == RowFormat::kV32 && tile < 4; ++tile) {
      float amax = 0;
      for (size_t i = 128 * tile; i < 128 * tile + 128; ++i) {
        amax = std::max(amax, std::fabs(bf16_to_float(token.k[i])));
      }
      const float scale = amax / 448.0f;
      for (size_t i = 128 * tile; i < 128 * tile + 128; ++i) {
        const uint8_t code = e4m3_from_float(bf16_to_float(token.k[i]) / scale);
        key[i] = bf16_to_float(bf16_from_float(e4m3_to_float(code) * scale));
      }
    }
    keys.push_back(key);
  }
  return keys;
}

// fp64 logits of the last row of a request of `len` tokens, over quantised inputs.
std::vector<double> reference_logits(const DsaConfig& config, int request, int64_t len) {
  const int64_t heads = config.index_heads, dim = config.index_dim;
  const Token last = make_token(config, request, len - 1);
  std::vector<bf16_t> k;
  std::vector<int32_t> positions;
  for (int64_t p = 0; p < len; ++p) {
    const Token token = make_token(config, request, p);
    k.insert(k.end(), token.index_k.begin(), token.index_k.end());
    positions.push_back(static_cast<int32_t>(p));
  }
  IndexQuantizeProblem problem;
  problem.max_rows = len;
  problem.num_heads = heads;
  problem.hadamard = true;
  const auto plan = IndexQuantize::plan(problem, Device::cpu(1), {"ref"});
  HostBuffer workspace(plan.workspace_bytes());
  const Tensor cos_sin = test::make_cos_sin(config.table_width, 64);
  const Tensor k_in = Tensor::bf16({len, dim}, k), k_positions = Tensor::i32({len}, positions),
               weight = test::make_norm_weight(dim), bias = test::make_norm_bias(dim);
  Tensor k_fp8(DType::kU8, {len, dim}), k_scale(DType::kF32, {len});
  IndexQuantizeTensors keys;
  keys.k = k_in;
  keys.norm_weight = weight;
  keys.norm_bias = bias;
  keys.positions = k_positions;
  keys.cos_sin = cos_sin;
  keys.k_fp8 = k_fp8;
  keys.k_scale = k_scale;
  plan.run(keys, workspace.workspace());
  const Tensor q_in = Tensor::bf16({1, heads, dim}, last.index_q),
               gate_in = Tensor::f32({1, heads}, last.gate),
               q_positions = Tensor::i32({1}, {static_cast<int32_t>(len - 1)});
  Tensor q_fp8(DType::kU8, {1, heads, dim}), q_scale(DType::kF32, {1, heads}),
      head_weight(DType::kF32, {1, heads});
  IndexQuantizeTensors query;
  query.q = q_in;
  query.head_gate = gate_in;
  query.positions = q_positions;
  query.cos_sin = cos_sin;
  query.q_fp8 = q_fp8;
  query.q_scale = q_scale;
  query.head_weight = head_weight;
  plan.run(query, workspace.workspace());
  std::vector<double> logits;
  for (int64_t j = 0; j < len; ++j) {
    double logit = 0;
    for (int64_t h = 0; h < heads; ++h) {
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) {
        dot += double{e4m3_to_float(q_fp8.data<uint8_t>()[h * dim + d])} *
               double{e4m3_to_float(k_fp8.data<uint8_t>()[j * dim + d])};
      }
      logit += double{head_weight.data<float>()[h]} * std::max(0.0, dot);
    }
    logits.push_back(logit * double{k_scale.data<float>()[j]});
  }
  return logits;
}

void expect_legal_selection(const std::vector<double>& logits, const RowResult& row, int64_t topk) {
  const auto len = static_cast<int64_t>(logits.size());
  std::vector<int32_t> selected;
  for (const int32_t position : row.positions) {
    if (position >= 0) selected.push_back(position);
  }
  ASSERT_EQ(static_cast<int64_t>(selected.size()), std::min(len, topk));
  ASSERT_TRUE(std::is_sorted(selected.begin(), selected.end()));
  ASSERT_TRUE(std::adjacent_find(selected.begin(), selected.end()) == selected.end());
  if (len <= topk) return;
  std::vector<double> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  const double kth = sorted[static_cast<size_t>(topk - 1)];
  double largest = 0;
  for (const double logit : logits) largest = std::max(largest, std::fabs(logit));
  const double slack = 0x1p-16 * largest;
  for (int64_t j = 0; j < len; ++j) {
    const bool chosen = std::binary_search(selected.begin(), selected.end(), j);
    const double logit = logits[static_cast<size_t>(j)];
    EXPECT_TRUE(chosen ? logit >= kth - slack : logit <= kth + slack) << j;
  }
}

// One row in fp64: its selection against the logits, its output and lse over what it selected.
void expect_row_agrees(const DsaConfig& config, const RowResult& row, int request,
                       int64_t position) {
  expect_legal_selection(reference_logits(config, request, position + 1), row, config.topk);
  const auto keys = decoded_keys(config, request, position + 1);
  const Token token = make_token(config, request, position);
  std::vector<double> out, lse, actual_out, actual_lse;
  for (size_t h = 0; h < static_cast<size_t>(config.num_heads); ++h) {
    std::vector<double> scores;
    for (const int32_t j : row.positions) {
      if (j < 0) continue;
      double dot = 0;
      for (size_t d = 0; d < 576; ++d) {
        dot += double{bf16_to_float(token.q[h * 576 + d])} * keys[static_cast<size_t>(j)][d];
      }
      scores.push_back(dot * double{DsaRig::kSoftmaxScale});
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - largest);
    lse.push_back(largest + std::log(sum));
    std::vector<double> value(512, 0.0);
    for (size_t i = 0; i < scores.size(); ++i) {
      const double weight = std::exp(scores[i] - lse.back());
      const auto& key = keys[static_cast<size_t>(row.positions[i])];
      for (size_t d = 0; d < 512; ++d) value[d] += weight * key[d];
    }
    out.insert(out.end(), value.begin(), value.end());
    actual_lse.push_back(double{row.lse[h]});
  }
  for (const uint16_t bits : row.out) actual_out.push_back(bf16_to_float(bf16_t{bits}));
  EXPECT_LT(test::relative_rms(actual_out, out), 5e-3);
  EXPECT_TRUE(test::ExpectClose(actual_lse, lse, test::kLse));
}

TEST_P(DsaBackendTest, RowsAgreeWithAnIndependentRecomputation) {
  const DsaConfig config = DsaRig::small_config(4, GetParam());
  DsaRig rig(config, 2);
  rig.step(kExtend, {{0, 30}, {1, 12}});
  rig.step(kMixed, {{0, 1}, {1, 5}});
  rig.step(kDecode, {{0, 1}, {1, 1}});
  for (const auto& [request, position] : {std::pair<int, int64_t>{0, 3},
                                          {0, 7},
                                          {0, 8},
                                          {0, 29},
                                          {0, 30},
                                          {0, 31},
                                          {1, 11},
                                          {1, 14},
                                          {1, 17}}) {
    expect_row_agrees(config, rig.results().at({request, position}), request, position);
  }
}

// The widths of DeepSeek-V3.2 on one of eight tensor-parallel ranks, past topk.
TEST(DsaBackendFull, ModelWidthsInChunksAndDecode) {
  DsaConfig config = DsaRig::small_config(64, RowFormat::kV32);
  config.num_heads = 16;
  config.index_heads = 64;
  config.topk = 2048;
  config.max_rows = 2200;
  config.table_width = 2400;
  DsaRig whole(config, 2), parts(config, 2, 5);
  whole.step(kExtend, {{0, 2110}, {1, 60}});
  parts.step(kExtend, {{0, 1500}});
  parts.step(kExtend, {{1, 59}, {0, 609}});
  parts.step(kDecode, {{0, 1}, {1, 1}});
  expect_equal_rows(parts.results(), whole.results());
  for (const int64_t position : {2047, 2048, 2109}) {
    expect_row_agrees(config, whole.results().at({0, position}), 0, position);
  }
}

TEST(DsaBackendKernels, ContiguousRowsEqualTheCacheReadDirectly) {
  DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
  config.deterministic = false;
  DsaRig direct(config, 1);
  config.prefill_implementation = "contiguous_bf16";
  for (const bool fuse : {true, false}) {
    config.fuse_transform = fuse;
    DsaRig contiguous(config, 2);
    for (DsaRig* rig : {&direct, &contiguous}) {
      rig->step(kExtend, {{0, 5}, {1, 7}});  // selection skipped
      rig->step(kExtend, {{0, 20}, {1, 13}}, {.padded_rows = 40, .host_lengths = true});
      rig->step(kMixed, {{1, 1}, {0, 4}});
    }
    EXPECT_EQ(contiguous.backend().dispatch().kernel, DsaKernel::kContiguousBf16);
    EXPECT_EQ(contiguous.backend().dispatch().transform, IndexTransform::kRagged);
    EXPECT_EQ(to_doubles(contiguous.backend().metadata().row_offset),
              (std::vector<double>{0, 21, 21, 21, 21}));
    // The unpacked row is bf16(code * scale), which is also what the direct form multiplies.
    for (const auto& [key, row] : contiguous.results()) {
      const RowResult& expected = direct.results().at(key);
      EXPECT_EQ(row.positions, expected.positions);
      std::vector<double> a, b;
      for (const uint16_t bits : row.out) a.push_back(bf16_to_float(bf16_t{bits}));
      for (const uint16_t bits : expected.out) b.push_back(bf16_to_float(bf16_t{bits}));
      EXPECT_TRUE(test::ExpectClose(a, b, test::kBf16Output));
    }
    contiguous.step(kDecode, {{0, 1}});
    EXPECT_EQ(contiguous.backend().dispatch().kernel, DsaKernel::kCacheDirect);
    direct = DsaRig(direct.config(), 1);
  }
}

TEST(DsaBackendKernels, FreshRowsAreNotQuantised) {
  DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
  config.deterministic = false;
  config.prefill_implementation = "contiguous_bf16";
  config.extend_kv_source = ExtendKvSource::kFresh;
  DsaRig fresh(config, 1);
  fresh.step(kExtend, {{0, 20}, {1, 9}});
  EXPECT_TRUE(fresh.backend().dispatch().fresh_kv);
  // A bf16 cache stores the same unquantised rows.
  DsaRig exact(DsaRig::small_config(4, RowFormat::kBf16), 1);
  exact.step(kExtend, {{0, 20}, {1, 9}});
  for (const auto& [key, row] : fresh.results()) {
    const RowResult& expected = exact.results().at(key);
    EXPECT_EQ(row.positions, expected.positions);
    std::vector<double> a, b;
    for (const uint16_t bits : row.out) a.push_back(bf16_to_float(bf16_t{bits}));
    for (const uint16_t bits : expected.out) b.push_back(bf16_to_float(bf16_t{bits}));
    EXPECT_TRUE(test::ExpectClose(a, b, test::kBf16Output));
  }
  fresh.step(kExtend, {{0, 3}});
  EXPECT_FALSE(fresh.backend().dispatch().fresh_kv);
}

}  // namespace
}  // namespace fovea
