#include "src/replay/v4_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fovea/numeric.h"
#include "fovea/row_codec.h"
#include "fovea/v4_backend.h"
#include "src/core/parallel.h"
#include "tests/replay/tiny_v4.h"
#include "tests/support/memory.h"

namespace fovea::internal {
namespace {

using test::Tensor;
using testing::HasSubstr;

constexpr int64_t kTokens = 290, kPage = 128, kPages = 4, kHeads = 4, kIndexHeads = 8, kTopk = 12;

// What a layer computes from, changed by a mistake.
struct LayerRun {
  V4BackendConfig config;
  Tensor q, kv, gate, index_gate, index_q, head_gate, sink, ape, norm, index_ape, index_norm;
  Tensor cos_sin;
};
using Mistake = std::function<void(LayerRun&)>;

// One request, its rows computed by the backend in one prefill: what the checker must find right.
class V4CheckTest : public testing::Test {
 protected:
  V4CheckTest()
      : trace_(one_request()),
        model_(test::tiny_v4()),
        workload_(trace_, {}),
        inputs_(model_, workload_, kHeads, 5),
        checker_(inputs_, {0, 1, 2}, kTopk) {}

  static Trace one_request() {
    Trace trace;
    trace.requests = {{0, kTokens, 3, {7}}};
    return trace;
  }

  LayerRun inputs_of(int64_t layer) const {
    LayerRun run;
    const int64_t ratio = inputs_.ratio(layer);
    const int64_t channels = compressor_channels(ratio, kV4Width);
    run.config.num_heads = kHeads;
    run.config.window = inputs_.shape().window;
    run.config.index_heads = kIndexHeads;
    run.config.topk = kTopk;
    run.config.page_size = kPage;
    run.config.table_width = kPages * kPage;
    run.config.max_requests = 1;
    run.config.max_rows = kTokens;
    run.q = Tensor(DType::kBf16, {kTokens, kHeads, kV4Width});
    run.kv = Tensor(DType::kBf16, {kTokens, kV4Width});
    run.gate = Tensor(DType::kF32, {kTokens, 2 * channels});
    run.index_gate = Tensor(DType::kF32, {kTokens, 4 * kV4IndexDim});
    run.index_q = Tensor(DType::kBf16, {kTokens, kIndexHeads, kV4IndexDim});
    run.head_gate = Tensor(DType::kF32, {kTokens, kIndexHeads});
    run.sink = Tensor(DType::kF32, {kHeads});
    run.ape = Tensor(DType::kF32, {ratio, channels});
    run.norm = Tensor(DType::kF32, {kV4Width});
    run.index_ape = Tensor(DType::kF32, {kCsaRatio, 2 * kV4IndexDim});
    run.index_norm = Tensor(DType::kF32, {kV4IndexDim});
    run.cos_sin = Tensor(DType::kF32, {kTokens, kV4RopeDim});
    V4Inputs::cos_sin(ratio > 0, kTokens, run.cos_sin.data<float>());
    const auto all = [](Tensor& tensor, int64_t count) {
      return std::span(tensor.data<float>(), static_cast<size_t>(count));
    };
    V4LayerWeights weights;
    weights.sink = all(run.sink, kHeads);
    weights.ape = all(run.ape, ratio * channels);
    weights.norm_weight = all(run.norm, kV4Width);
    weights.index_ape = all(run.index_ape, kCsaRatio * 2 * kV4IndexDim);
    weights.index_norm_weight = all(run.index_norm, kV4IndexDim);
    inputs_.weights(layer, weights);
    for (int64_t p = 0; p < kTokens; ++p) {
      const uint64_t token = workload_.token_id(0, p);
      const auto bf16 = [&](Tensor& tensor, int64_t width) {
        return std::span(tensor.data<bf16_t>() + p * width, static_cast<size_t>(width));
      };
      const auto f32 = [&](Tensor& tensor, int64_t width) {
        return std::span(tensor.data<float>() + p * width, static_cast<size_t>(width));
      };
      inputs_.query(layer, {0, p, token}, bf16(run.q, kHeads * kV4Width));
      inputs_.window_key(layer, token, bf16(run.kv, kV4Width));
      if (ratio > 0) inputs_.gate(layer, token, f32(run.gate, 2 * channels));
      if (ratio != kCsaRatio) continue;
      inputs_.index_gate(layer, token, f32(run.index_gate, 4 * kV4IndexDim));
      inputs_.index_query(layer, {0, p, token}, bf16(run.index_q, kIndexHeads * kV4IndexDim));
      inputs_.head_gate(layer, token, f32(run.head_gate, kIndexHeads));
    }
    return run;
  }

  // The rows at `positions`.
  std::vector<V4Sample> samples(int64_t layer, const std::vector<int64_t>& positions,
                                const Mistake& mistake = {}) const {
    LayerRun run = inputs_of(layer);
    if (mistake) mistake(run);
    const int64_t ratio = inputs_.ratio(layer);
    const int64_t channels = compressor_channels(ratio, kV4Width);
    const auto pool = [](RowFormat format, int64_t rows, int64_t width) {
      return Tensor(DType::kU8, {kPages, page_bytes(format, rows, width)});
    };
    Tensor window = pool(RowFormat::kV4, kPage, kV4Width);
    Tensor entries = pool(RowFormat::kV4, kPage / std::max<int64_t>(ratio, 1), kV4Width);
    Tensor keys = pool(RowFormat::kI132, kPage / kCsaRatio, kV4IndexDim);
    const int64_t tokens = ratio == kCsaRatio ? 8 : 128;
    Tensor state(DType::kF32, {1, tokens, 2, channels});
    Tensor index_state(DType::kF32, {1, 8, 2, 2 * kV4IndexDim});
    Tensor out(DType::kBf16, {kTokens, kHeads, kV4Width}), lse(DType::kF32, {kTokens, kHeads});
    Tensor indices(DType::kI32, {kTokens, kTopk});
    V4ForwardTensors tensors;
    tensors.q = run.q;
    tensors.kv = run.kv;
    tensors.sink = run.sink;
    tensors.cos_sin = run.cos_sin;
    tensors.window_pool = window;
    tensors.compressor = {run.gate, run.ape, run.norm, state, entries};
    tensors.indexer = {run.index_gate, run.index_ape, run.index_norm, index_state, keys};
    tensors.index_q = run.index_q;
    tensors.head_gate = run.head_gate;
    tensors.indices = indices;
    tensors.out = out;
    tensors.lse = lse;
    std::vector<int32_t> places(static_cast<size_t>(kPages * kPage));
    std::iota(places.begin(), places.end(), 0);
    const Tensor table = Tensor::i32({1, kPages * kPage}, places);
    places.resize(static_cast<size_t>(kTokens));
    const Tensor rows = Tensor::i32({kTokens}, places), zero = Tensor::i32({1}, {0});
    const Tensor count = Tensor::i32({1}, {static_cast<int32_t>(kTokens)});
    V4Batch batch;
    batch.forward.mode = ForwardMode::kExtend;
    batch.forward.seq_len = batch.forward.ext_len = count;
    batch.forward.pool_row = batch.in_slot = zero;
    batch.forward.req_to_token = table;
    batch.forward.positions = batch.forward.out_cache_loc = rows;
    batch.forward.num_rows = kTokens;
    V4Backend backend(run.config, Device::cpu(1));
    backend.begin_step(batch);
    backend.forward(ratio, tensors);
    std::vector<V4Sample> result;
    for (const int64_t p : positions) {
      V4Sample sample;
      sample.row = {0, p, layer, false};
      const auto* const row = out.data<bf16_t>() + p * kHeads * kV4Width;
      sample.output.assign(row, row + kHeads * kV4Width);
      const auto* const sums = lse.data<float>() + p * kHeads;
      sample.lse.assign(sums, sums + kHeads);
      const auto* const chosen = indices.data<int32_t>() + p * kTopk;
      if (ratio == kCsaRatio) {
        sample.entries.assign(chosen, std::find(chosen, chosen + kTopk, -1));
      }
      result.push_back(std::move(sample));
    }
    return result;
  }

  std::vector<CheckVerdict> check(const std::vector<V4Sample>& samples) const {
    const ThreadScope threads(1);
    return checker_.check(samples);
  }
  // Kind and operator of the first failure; empty when there is none.
  std::string verdict_of(const V4Sample& sample) const {
    const CheckVerdict verdict = check({sample}).front();
    if (verdict.failures.empty()) return "";
    return verdict.failures.front().op + " " + verdict.failures.front().kind;
  }

  Trace trace_;
  ModelSpec model_;
  Workload workload_;
  V4Inputs inputs_;
  V4Checker checker_;
};

TEST_F(V4CheckTest, RightRowsPass) {
  const std::vector<int64_t> positions = {0, 2, 3, 23, 24, 47, 51, 127, 128, 255, 289};
  for (int64_t layer = 0; layer < 3; ++layer) {
    const std::vector<V4Sample> right = samples(layer, positions);
    const std::vector<CheckVerdict> verdicts = check(right);
    for (size_t i = 0; i < verdicts.size(); ++i) {
      EXPECT_TRUE(verdicts[i].failures.empty())
          << "layer " << layer << ": " << verdicts[i].failures.front().message();
      EXPECT_LT(verdicts[i].worst_rms, 4e-3);
      EXPECT_EQ(verdicts[i].selecting, layer == 1 && positions[i] + 1 >= 4 * (kTopk + 1));
    }
  }
}

TEST_F(V4CheckTest, WrongOutputsAndSumsAreNamed) {
  for (int64_t layer = 0; layer < 3; ++layer) {
    const V4Sample right = samples(layer, {200}).front();
    V4Sample wrong = right;
    for (int64_t c = 0; c < kV4Width; ++c) {
      bf16_t& value = wrong.output[static_cast<size_t>(2 * kV4Width + c)];
      value = bf16_from_float(bf16_to_float(value) * 1.02f);
    }
    EXPECT_EQ(verdict_of(wrong), "sparse_mla output");
    EXPECT_THAT(check({wrong}).front().failures.front().message(), HasSubstr("head 2"));
    wrong = right;
    wrong.lse[1] += 2e-3f;
    EXPECT_EQ(verdict_of(wrong), "sparse_mla lse");
    wrong = right;
    wrong.output[7] = bf16_from_float(std::nanf(""));
    EXPECT_EQ(verdict_of(wrong), "sparse_mla output");
  }
}

TEST_F(V4CheckTest, WrongSelectionsAreNamed) {
  const V4Sample right = samples(1, {289}).front();
  ASSERT_EQ(right.entries.size(), 12u);
  const auto selection = [&](const std::function<void(std::vector<int32_t>&)>& change) {
    V4Sample wrong = right;
    change(wrong.entries);
    return verdict_of(wrong);
  };
  EXPECT_EQ(selection([](auto& e) { e.pop_back(); }), "index_select selection");
  EXPECT_EQ(selection([](auto& e) { e[3] = e[2]; }), "index_select selection");
  EXPECT_EQ(selection([](auto& e) { e[3] = -1; }), "index_select selection");
  EXPECT_EQ(selection([](auto& e) { e.back() = 72; }), "index_select selection");
  // An entry that is none of the best in place of one that is.
  const int32_t other = [&] {
    for (int32_t g = 0;; ++g) {
      if (std::find(right.entries.begin(), right.entries.end(), g) == right.entries.end()) return g;
    }
  }();
  EXPECT_EQ(selection([&](auto& e) { e[6] = other; }), "index_select selection");
}

// What a serving mistake would do to whole rows.
TEST_F(V4CheckTest, MistakesOfAServerAreFound) {
  const auto finds = [&](const char* name, int64_t layer, int64_t position,
                         const Mistake& mistake) {
    EXPECT_NE(verdict_of(samples(layer, {position}, mistake).front()), "")
        << name << ", layer " << layer;
  };
  for (int64_t layer = 0; layer < 3; ++layer) {
    finds("a window of one token less", layer, 255, [](auto& run) { --run.config.window; });
    finds("no sink", layer, 255,
          [](auto& run) { std::fill_n(run.sink.template data<float>(), kHeads, -HUGE_VALF); });
    finds("angles of the next position", layer, 255, [](auto& run) {
      auto* const table = run.cos_sin.template data<float>();
      std::copy(table + kV4RopeDim, table + kTokens * kV4RopeDim, table);
    });
    finds("one wrong key of the window", layer, 255, [](auto& run) {
      auto* const row = run.kv.template data<bf16_t>() + 250 * kV4Width;
      std::reverse(row, row + kV4Width);
    });
  }
  for (const int64_t layer : {1, 2}) {
    finds("no position embedding in a compressor", layer, 255,
          [](auto& run) { run.ape.fill_bytes(0); });
  }
  finds("a token missing in an entry of 128", 2, 255, [&](auto& run) {
    auto* const gate = run.gate.template data<float>() + 192 * 2 * kV4Width;
    std::fill_n(gate + kV4Width, kV4Width, -HUGE_VALF);
  });
  finds("the table of the other ratio", 2, 255,
        [](auto& run) { V4Inputs::cos_sin(false, kTokens, run.cos_sin.template data<float>()); });
  finds("index weights without their sign", 1, 289, [](auto& run) {
    auto* const gate = run.head_gate.template data<float>();
    for (int64_t i = 0; i < kTokens * kIndexHeads; ++i) gate[i] = 1 - gate[i];
  });
}

// Case 20 of the specification: the tables of ratio 0 and of the others differ at large positions.
TEST(V4Inputs, TablesDifferByRatioAndFollowYarn) {
  constexpr int64_t kPositions = 4097, kPairs = kV4RopeDim / 2;
  std::vector<float> swa(kPositions * kV4RopeDim), entries(swa.size());
  V4Inputs::cos_sin(false, kPositions, swa.data());
  V4Inputs::cos_sin(true, kPositions, entries.data());
  const int64_t row = 4096 * kV4RopeDim;
  for (int64_t i = 0; i < kPairs; ++i) {
    const double exponent = static_cast<double>(i) / kPairs;
    const double ramp = std::clamp((static_cast<double>(i) - 15) / 10, 0.0, 1.0);
    const double base = std::pow(160000.0, -exponent);
    const double frequency = base * (1 - ramp) + base / 16 * ramp;
    const auto at = static_cast<size_t>(row + i);
    EXPECT_NEAR(swa[at], std::cos(4096 * std::pow(10000.0, -exponent)), 1e-6) << i;
    EXPECT_NEAR(entries[at], std::cos(4096 * frequency), 1e-6) << i;
    EXPECT_NEAR(entries[at + kPairs], std::sin(4096 * frequency), 1e-6) << i;
  }
  EXPECT_NE(std::vector<float>(swa.begin() + row, swa.end()),
            std::vector<float>(entries.begin() + row, entries.end()));
}

}  // namespace
}  // namespace fovea::internal
