#include "src/replay/msa_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/msa_backend.h"
#include "fovea/numeric.h"
#include "tests/replay/tiny_msa.h"
#include "tests/support/memory.h"

namespace fovea::internal {
namespace {

using test::Tensor;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kTokens = 150, kBlock = 16, kTopk = 3, kHeads = 4, kKvHeads = 2, kDim = 32;
constexpr int64_t kDense = 0, kSparse = 1;  // layers

// One request, its rows computed by the references behind the backend: what the checker must find
// right, until something is changed.
class MsaCheckTest : public testing::Test {
 protected:
  MsaCheckTest()
      : trace_(one_request()),
        model_(test::tiny_msa()),
        workload_(trace_, {}),
        setup_{model_, workload_, {kDense, kSparse}},
        inputs_(make_inputs()),
        checker_(inputs_, {kDense, kSparse}) {}

  static Trace one_request() {
    Trace trace;
    trace.requests = {{0, kTokens, 3, {7}}};
    return trace;
  }

  MsaInputs make_inputs() {
    setup_.tp = 2;
    setup_.topk = kTopk;
    setup_.page_size = kBlock;
    setup_.seed = 5;
    return MsaInputs(setup_);
  }

  MsaSample sample_of(int64_t layer, int64_t position) const {
    const bool dense = layer == kDense;
    const int64_t rows = position + 1, slots = (rows + kBlock - 1) / kBlock * kBlock;
    MsaBackendConfig config;
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = config.index_dim = kDim;
    config.block_size = kBlock;
    config.topk = kTopk;
    config.init_blocks = 1;
    config.dense_layers = dense;
    config.table_width = slots;
    config.max_requests = 1;
    config.max_rows = rows;
    config.implementation = "ref";
    MsaBackend backend(config, Device::cpu(1));
    Tensor q(DType::kBf16, {rows, kHeads, kDim}), k(DType::kBf16, {rows, kKvHeads, kDim}), v = k;
    Tensor index_q = k, index_k(DType::kBf16, {rows, kDim});
    std::vector<int32_t> each;
    const auto row_of = [](Tensor& tensor, int64_t t, int64_t width) {
      return std::span(tensor.data<bf16_t>() + t * width, static_cast<size_t>(width));
    };
    for (int64_t t = 0; t < rows; ++t) {
      const uint64_t token = workload_.token_id(0, t);
      inputs_.query(layer, {0, t, token}, row_of(q, t, kHeads * kDim));
      inputs_.key(layer, token, row_of(k, t, kKvHeads * kDim));
      inputs_.value(layer, token, row_of(v, t, kKvHeads * kDim));
      inputs_.index_query(layer, {0, t, token}, row_of(index_q, t, kKvHeads * kDim));
      inputs_.index_key(layer, token, row_of(index_k, t, kDim));
      each.push_back(static_cast<int32_t>(t));
    }
    each.resize(static_cast<size_t>(slots));
    for (size_t t = 0; t < each.size(); ++t) each[t] = static_cast<int32_t>(t);
    const Tensor table = Tensor::i32({1, slots}, each);
    each.resize(static_cast<size_t>(rows));
    const Tensor positions = Tensor::i32({rows}, each);
    const Tensor length = Tensor::i32({1}, {static_cast<int32_t>(rows)}),
                 zero = Tensor::i32({1}, {0});
    MsaBatch batch;
    batch.forward.mode = ForwardMode::kExtend;
    batch.forward.seq_len = batch.forward.ext_len = length;
    batch.forward.pool_row = zero;
    batch.forward.req_to_token = table;
    batch.forward.positions = batch.forward.out_cache_loc = positions;
    batch.forward.num_rows = rows;
    backend.begin_step(batch);
    Tensor k_pool(DType::kBf16, {slots, kKvHeads, kDim}), v_pool = k_pool;
    Tensor index_pool(DType::kBf16, {slots, 1, kDim}), out = q;
    Tensor blocks(DType::kI32, {kKvHeads, rows, kTopk}), lse(DType::kF32, {rows, kHeads});
    MsaForwardTensors tensors;
    tensors.q = q;
    tensors.k = k;
    tensors.v = v;
    tensors.k_pool = k_pool;
    tensors.v_pool = v_pool;
    tensors.out = out;
    tensors.lse = lse;
    if (!dense) {
      tensors.index_q = index_q;
      tensors.index_k = index_k;
      tensors.index_pool = index_pool;
      tensors.blocks = blocks;
    }
    dense ? backend.forward_dense(tensors) : backend.forward(tensors);
    MsaSample sample;
    sample.row = {0, position, layer, false};
    const bf16_t* const last = out.data<bf16_t>() + position * kHeads * kDim;
    sample.output.assign(last, last + kHeads * kDim);
    const float* const last_lse = lse.data<float>() + position * kHeads;
    sample.lse.assign(last_lse, last_lse + kHeads);
    for (int64_t g = 0; !dense && g < kKvHeads; ++g) {
      const int32_t* const list = blocks.data<int32_t>() + (g * rows + position) * kTopk;
      sample.blocks.insert(sample.blocks.end(), list, list + kTopk);
    }
    return sample;
  }

  CheckVerdict check(const MsaSample& sample) const {
    return std::move(checker_.check({&sample, 1}).front());
  }

  void expect_failure(const MsaSample& sample, const char* kind, const char* fragment) const {
    const CheckVerdict verdict = check(sample);
    ASSERT_FALSE(verdict.failures.empty()) << fragment;
    EXPECT_EQ(verdict.failures.front().kind, kind);
    EXPECT_EQ(verdict.failures.front().position, sample.row.position);
    EXPECT_THAT(verdict.failures.front().message(), HasSubstr(fragment));
  }

  Trace trace_;
  ModelSpec model_;
  Workload workload_;
  RunSetup setup_;
  MsaInputs inputs_;
  MsaChecker checker_;
};

TEST_F(MsaCheckTest, RightRowsPass) {
  for (const int64_t layer : {kDense, kSparse}) {
    for (const int64_t position : {0, 15, 16, 47, 48, 100, 149}) {
      const CheckVerdict verdict = check(sample_of(layer, position));
      EXPECT_THAT(verdict.failures, IsEmpty()) << "layer " << layer << ", position " << position;
      EXPECT_EQ(verdict.selecting, layer == kSparse && position >= 48);
      EXPECT_LT(verdict.worst_rms, 4e-3);
      EXPECT_EQ(verdict.worst_rms > 0, position > 0);  // one token: its value itself
      EXPECT_LT(verdict.worst_lse, 1e-4);
      EXPECT_EQ(verdict.selection_slack, 0);
    }
  }
}

TEST_F(MsaCheckTest, AnotherBlockIsFound) {
  const MsaSample right = sample_of(kSparse, 140);
  for (size_t g = 0; g < 2; ++g) {
    // First and own block are forced: the one between them is chosen by score.
    const int32_t chosen = right.blocks[g * kTopk + 1];
    for (int32_t other = 1; other < 8; ++other) {
      if (other == chosen) continue;
      MsaSample wrong = right;
      wrong.blocks[g * kTopk + 1] = other;
      expect_failure(wrong, "selection",
                     ("msa_score_select: selection: KV head " + std::to_string(g)).c_str());
    }
  }
}

TEST_F(MsaCheckTest, AListThatIsNoneIsFound) {
  const MsaSample right = sample_of(kSparse, 140);
  const auto with = [&](std::vector<int32_t> list) {
    MsaSample wrong = right;
    std::copy(list.begin(), list.end(), wrong.blocks.begin());
    return wrong;
  };
  const int32_t chosen = right.blocks[1];
  expect_failure(with({0, 8, chosen}), "selection", "does not ascend");
  expect_failure(with({0, 0, 8}), "selection", "does not ascend");
  expect_failure(with({0, chosen, 9}), "selection", "does not see");
  expect_failure(with({-5, chosen, 8}), "selection", "does not see");
  expect_failure(with({0, 8, -1}), "selection", "2 blocks are selected, expected 3");
  expect_failure(with({-1, -1, -1}), "selection", "0 blocks are selected, expected 3");
  expect_failure(with({chosen == 1 ? 2 : 1, std::max(chosen, 3), 8}), "selection",
                 "block 0 is always chosen");
  expect_failure(with({0, 1, 7}), "selection", "block 8 is always chosen");
  MsaSample short_row = sample_of(kSparse, 20);
  short_row.blocks[1] = -1;
  expect_failure(short_row, "selection", "1 blocks are selected, expected 2");
}

TEST_F(MsaCheckTest, WrongOutputsAndLsesAreFound) {
  for (const int64_t layer : {kDense, kSparse}) {
    const MsaSample right = sample_of(layer, 140);
    MsaSample wrong = right;
    for (size_t c = 0; c < kDim; ++c) {  // of head 2
      bf16_t& value = wrong.output[2 * kDim + c];
      value = bf16_from_float(bf16_to_float(value) * 1.01f);
    }
    expect_failure(wrong, "output", "msa_attend: output: head 2 is off by");
    wrong = right;
    wrong.output[3 * kDim + 5] = bf16_from_float(std::numeric_limits<float>::quiet_NaN());
    expect_failure(wrong, "output", "head 3");
    wrong = right;
    wrong.lse[1] += 2e-3f;
    expect_failure(wrong, "lse", "head 1 is off by");
    wrong = right;
    wrong.lse[0] = -std::numeric_limits<float>::infinity();
    expect_failure(wrong, "lse", "head 0");
    // The row before it.
    MsaSample other = sample_of(layer, 139);
    other.row.position = 140;
    EXPECT_FALSE(check(other).failures.empty());
  }
}

// Attention over other tokens than those of the list.
TEST_F(MsaCheckTest, ADenseOutputIsNotThatOfAList) {
  const MsaSample sparse = sample_of(kSparse, 140);
  MsaSample mixed_up = sparse;
  mixed_up.output = sample_of(kDense, 140).output;
  EXPECT_FALSE(check(mixed_up).failures.empty());
}

}  // namespace
}  // namespace fovea::internal
