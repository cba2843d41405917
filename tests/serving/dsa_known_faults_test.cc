#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "fovea/dsa_backend.h"
#include "fovea/numeric.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/compare.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::StepOptions;
using test::Tensor;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ForwardMode kExtend = ForwardMode::kExtend;
constexpr ForwardMode kDecode = ForwardMode::kDecode;

TEST(DsaKnownFaults, KnownFault8DegenerateLengthsOfPaddedRows) {
  DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
  config.table_width = 512;
  DsaRig rig(config, 2), alone(config, 1);
  // Request 1 has 100 tokens; request 0 says that 6 rows see a KV length of 1.
  rig.step(kExtend, {{1, 99}});
  alone.step(kExtend, {{1, 99}});
  alone.step(kDecode, {{1, 1}});
  const Tensor seq_len = Tensor::i32({2}, {1, 100});
  StepOptions options;
  options.host_lengths = false;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) { batch.seq_len = seq_len; };
  rig.step(kExtend, {{0, 6}, {1, 1}}, options);
  for (int64_t row = 0; row < 5; ++row) {
    for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(rig.indices.data<int32_t>()[row * 8 + i], -1);
    for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(rig.lse.data<float>()[row * 4 + h], -kInf);
    for (int64_t i = 0; i < 4 * 512; ++i) {
      ASSERT_EQ(rig.out.data<bf16_t>()[row * 4 * 512 + i].bits, 0);
    }
  }
  EXPECT_GT(rig.lse.data<float>()[5 * 4], -kInf);  // the sixth row sees one key
  EXPECT_EQ(std::memcmp(rig.out.data<bf16_t>() + 6 * 4 * 512, alone.out.data<bf16_t>(), 4096), 0);

  // 8 rows of length 0, and lengths 0, 0, 100, 0.
  const std::vector<std::pair<int, int>> eight = {{0, 1}, {2, 1}, {3, 1}, {4, 1},
                                                  {5, 1}, {6, 1}, {7, 1}, {1, 1}};
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>(8, 0), std::vector<int32_t>{0, 0, 0, 0, 0, 0, -3, 101}}) {
    const Tensor seq = Tensor::i32({8}, lengths);
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors&) { batch.seq_len = seq; };
    rig.step(kDecode, eight, options);
    for (size_t row = 0; row < 8; ++row) {
      EXPECT_EQ(rig.lse.data<float>()[row * 4] == -kInf, lengths[row] <= 0);
    }
  }
}

TEST(DsaKnownFaults, KnownFault9StepsOfOtherSizesLeaveNothingBehind) {
  const DsaConfig config = DsaRig::small_config(4, RowFormat::kV32);
  DsaRig rig(config, 1);
  rig.step(kExtend, {{0, 1}, {1, 40}, {2, 7}, {3, 25}, {4, 9}, {5, 8}});
  // Each step also runs on a backend that has never seen another one.
  int compared = 0;
  StepOptions options;
  options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
    DsaBackend fresh(config, Device::cpu(1));
    fresh.begin_step(batch);
    fresh.forward({0, DsaRig::kSoftmaxScale}, tensors);
    const Tensor out = rig.out, lse = rig.lse, indices = rig.indices;
    rig.backend().begin_step(batch);
    rig.backend().forward({0, DsaRig::kSoftmaxScale}, tensors);
    EXPECT_EQ(rig.out.bytes(), out.bytes());
    EXPECT_EQ(rig.lse.bytes(), lse.bytes());
    EXPECT_EQ(rig.indices.bytes(), indices.bytes());
    ++compared;
  };
  rig.step(kDecode, {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}}, options);
  options.padded_rows = 6;
  rig.step(kDecode, {{1, 1}, {5, 1}}, options);
  rig.step(kExtend, {{3, 1}}, options);
  options.padded_rows = 0;
  rig.step(kExtend, {{5, 30}, {2, 40}}, options);
  rig.step(kDecode, {{5, 1}, {4, 1}, {3, 1}, {2, 1}, {1, 1}, {0, 1}}, options);
  EXPECT_EQ(compared, 5);
}

// Index keys whose best 16 positions are known: v (mean 0, variance 1, so that LayerNorm keeps it)
// scores Hi * 128 * 128 against queries v, random keys far less.
TEST(DsaKnownFaults, KnownFault20LaterChunksSelectInTheWholePrefix) {
  DsaConfig config = DsaRig::small_config(64, RowFormat::kBf16);
  config.num_heads = 1;
  config.index_heads = 1;
  config.topk = 16;
  config.table_width = 5120;
  config.max_rows = 5400;
  DsaRig rig(config, 2);
  const int64_t dim = config.index_dim;
  std::vector<bf16_t> v;
  for (int64_t d = 0; d < dim; ++d) v.push_back(bf16_from_float(d * 37 % dim % 2 == 0 ? 1 : -1));
  const std::pair<int, int> prefixes[] = {{0, 300}, {1, 5000}};
  const auto is_best = [](int request, int64_t position) {
    return request == 0 ? position >= 100 && position < 260 && position % 10 == 3
                        : position >= 1000 && position < 4520 && position % 220 == 7;
  };
  Tensor index_k(DType::kBf16, {5300, dim}), plain_cos_sin(DType::kF32, {1, 64}),
      weight(DType::kF32, {dim}), bias(DType::kF32, {dim}), no_selection(DType::kI32, {5300, 16});
  no_selection.fill_bytes(0xFF);
  std::fill_n(plain_cos_sin.data<float>(), 32, 1.0f);
  std::fill_n(weight.data<float>(), dim, 1.0f);
  test::Rng rng(5);
  int64_t row = 0;
  for (const auto& [request, length] : prefixes) {
    for (int64_t p = 0; p < length; ++p, ++row) {
      const std::vector<bf16_t> key = is_best(request, p) ? v : rng.bf16_normals(dim);
      std::memcpy(index_k.data<bf16_t>() + row * dim, key.data(), static_cast<size_t>(2 * dim));
    }
  }
  StepOptions options;
  options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
    tensors.topk_indices = no_selection;  // only the keys of these rows matter
    tensors.indices = {};
    tensors.index_k = index_k;
    tensors.norm_weight = weight;
    tensors.norm_bias = bias;
    tensors.cos_sin = plain_cos_sin;
  };
  rig.step(kExtend, {prefixes[0], prefixes[1]}, options);

  Tensor queries(DType::kBf16, {128, 1, dim}), gate(DType::kF32, {128, 1});
  for (int64_t t = 0; t < 128; ++t) {
    std::memcpy(queries.data<bf16_t>() + t * dim, v.data(), static_cast<size_t>(2 * dim));
    gate.data<float>()[t] = 1.0f;
  }
  options.adjust = [&](ForwardBatch&, DsaForwardTensors& tensors) {
    tensors.index_q = queries;
    tensors.head_gate = gate;
    tensors.norm_weight = weight;
    tensors.norm_bias = bias;
    tensors.cos_sin = plain_cos_sin;
  };
  rig.step(kExtend, {{0, 64}, {1, 64}}, options);
  const auto page_table = test::to_doubles(rig.backend().metadata().page_table);
  const auto columns = static_cast<size_t>(rig.backend().metadata().page_table.shape[1]);
  for (size_t t = 0; t < 128; ++t) {
    const size_t request = t / 64;
    std::vector<int32_t> expected;
    for (int64_t p = 0; p < prefixes[request].second; ++p) {
      if (!is_best(static_cast<int>(request), p)) continue;
      const auto page =
          static_cast<int32_t>(page_table[request * columns + static_cast<size_t>(p / 64)]);
      expected.push_back(page * 64 + static_cast<int32_t>(p % 64));
    }
    ASSERT_EQ(expected.size(), 16u);
    const int32_t* const actual = rig.indices.data<int32_t>() + t * 16;
    EXPECT_EQ(std::vector<int32_t>(actual, actual + 16), expected) << "row " << t;
  }
}

}  // namespace
}  // namespace fovea
