// The kernel of topk_select for compute capability 9.0, run by a model of a GPU, against the
// reference.

#include "tests/gpu_model/topk_select_model.h"

#include <gtest/gtest.h>

#include "src/index/topk_select_impl.h"
#include "tests/gpu_model/gpu_model.h"
#include "tests/index/topk_rows.h"
#include "tests/support/memory.h"

namespace fovea {
namespace {

using test::Tensor;

class TopkSelectSm90Model : public testing::Test {
 protected:
  void TearDown() override { test::gpu::settings() = {}; }

  // Returns the blocks of a row.
  static int64_t expect_reference(const TopkSelectProblem& problem, TopkSelectTensors tensors) {
    const int64_t rows = problem.max_rows;
    Tensor expected(DType::kI32, {rows, problem.topk}), actual(DType::kI32, {rows, problem.topk});
    actual.fill_bytes(0x55);
    tensors.indices = expected;
    HostBuffer scratch(internal::topk_select_ref_workspace(problem, Device{}));
    internal::topk_select_ref(problem, Device{}, tensors, scratch.workspace());
    tensors.indices = actual;
    const int64_t blocks = test::gpu::run_topk_select_sm90(problem, tensors);
    EXPECT_EQ(actual.values<int32_t>(), expected.values<int32_t>());
    return blocks;
  }

  static int64_t expect_reference(const std::vector<float>& row, int64_t topk) {
    const auto width = static_cast<int64_t>(row.size());
    const Tensor logits = Tensor::f32({1, width}, row);
    const Tensor row_len = Tensor::i32({1}, {static_cast<int32_t>(width)});
    TopkSelectTensors tensors;
    tensors.logits = logits;
    tensors.row_len = row_len;
    return expect_reference({1, width, topk}, tensors);
  }

  // Of a row at no multiple of 16 bytes, of which four blocks hold parts.
  static int64_t expect_hostile(const test::HostileRow& kind, uint64_t seed) {
    test::gpu::settings().seed = static_cast<unsigned>(seed);
    test::gpu::settings().num_sms = 5;
    return expect_reference(test::make_row(kind, 49155, seed), 700);
  }

  static std::vector<float> normal_row(int64_t length) {
    return test::make_row(test::hostile_rows().front(), length, 5);
  }
};

class FullTopkSelectSm90Model : public TopkSelectSm90Model {};

TEST_F(TopkSelectSm90Model, PlateausAndMisleadingRowsEqualTheReference) {
  uint64_t seed = 1;
  for (const test::HostileRow& kind : test::hostile_rows()) {
    if (kind.name != "all_equal" && kind.name != "relu" && kind.name != "winners_in_one_run" &&
        kind.name != "mostly_nan") {
      continue;
    }
    SCOPED_TRACE(kind.name);
    EXPECT_EQ(expect_hostile(kind, ++seed), 4);
  }
}

TEST_F(FullTopkSelectSm90Model, HostileRowsEqualTheReference) {
  uint64_t seed = 1;
  for (const test::HostileRow& kind : test::hostile_rows()) {
    SCOPED_TRACE(kind.name);
    EXPECT_EQ(expect_hostile(kind, ++seed), 4);
  }
}

// The rows of a call bound the blocks; the largest part takes two steps.
TEST_F(TopkSelectSm90Model, EveryClusterEqualsTheReference) {
  for (const auto& [num_sms, blocks] : {std::pair{3, 2}, {5, 4}, {9, 8}, {18, 16}}) {
    test::gpu::settings().num_sms = num_sms;
    EXPECT_EQ(expect_reference(normal_row(60001), 2048), blocks);
  }
  test::gpu::settings().num_sms = 1;
  EXPECT_EQ(expect_reference(normal_row(16001), 2048), 1);
}

// Windows at any address, of any length, rows without entries and rows of padding.
TEST_F(TopkSelectSm90Model, WindowsAndTransformsEqualTheReference) {
  const int64_t width = 50000;
  const std::vector<int32_t> lengths = {50000, 0, 5000, 2049, 2048, 49996, -3};
  const auto rows = static_cast<int64_t>(lengths.size());
  const Tensor row_len = Tensor::i32({rows}, lengths);
  const Tensor row_start = Tensor::i32({rows}, {0, 7, 44999, 3, 2, 3, 0});
  Tensor logits(DType::kF32, {rows, width + 1});
  test::Rng rng(9);
  for (int64_t t = 0; t < rows; ++t) {
    const std::vector<float> values = rng.normals(width + 1);
    std::copy(values.begin(), values.end(), logits.data<float>() + t * (width + 1));
  }
  std::vector<int32_t> pages(2 * 790);
  for (int32_t& page : pages) page = static_cast<int32_t>(rng.integer(-1, 4000));
  const Tensor table = Tensor::i32({2, 790}, pages);
  TopkSelectTensors tensors;
  tensors.logits = logits;
  tensors.logits.shape[1] = width;
  tensors.row_len = row_len;
  tensors.row_start = row_start;
  for (const IndexTransform transform :
       {IndexTransform::kLocal, IndexTransform::kPaged, IndexTransform::kRagged}) {
    TopkSelectProblem problem{rows + 1, width, 2048, transform, 64};
    const Tensor requests = Tensor::i32({rows + 1}, {0, 1, 1, 0, 0, 1, 5, 0});
    const Tensor offsets = Tensor::i32({rows + 1}, std::vector<int32_t>(rows + 1, 11));
    tensors.page_table = table;
    tensors.row_to_request = requests;
    tensors.row_offset = offsets;
    test::gpu::settings().num_sms = 40;
    EXPECT_EQ(expect_reference(problem, tensors), 4);
  }
}

// More rows than multiprocessors, several of a block, or rows too long for a block's memory: each
// read chunk by chunk.
TEST_F(TopkSelectSm90Model, RowsOfOneBlockEqualTheReference) {
  const int64_t width = 20011, topk = 701;
  std::vector<test::HostileRow> kinds = test::hostile_rows();
  const auto rows = static_cast<int64_t>(kinds.size());
  std::vector<int32_t> lengths, starts;
  Tensor logits(DType::kF32, {rows, width});
  test::Rng rng(3);
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t len = t % 7 == 3 ? rng.integer(0, 3000) : rng.integer(15000, 20000);
    const std::vector<float> row = test::make_row(kinds[static_cast<size_t>(t)], len, 5);
    lengths.push_back(static_cast<int32_t>(len));
    starts.push_back(static_cast<int32_t>(rng.integer(0, width - len)));
    std::copy(row.begin(), row.end(), logits.data<float>() + t * width + starts.back());
  }
  TopkSelectTensors tensors;
  tensors.logits = logits;
  const Tensor row_len = Tensor::i32({rows}, lengths), row_start = Tensor::i32({rows}, starts);
  tensors.row_len = row_len;
  tensors.row_start = row_start;
  for (const int num_sms : {1, 40}) {
    test::gpu::settings().num_sms = num_sms;
    EXPECT_EQ(expect_reference({rows, width, topk}, tensors), 0);
  }
}

// The largest entries, or the smallest, stand exactly where the sample looks.
TEST_F(TopkSelectSm90Model, AMisleadingSampleCostsNoEntry) {
  const int64_t width = 20003, topk = 700;
  Tensor logits(DType::kF32, {4, width});
  test::Rng rng(4);
  for (int64_t t = 0; t < 4; ++t) {
    float* const row = logits.data<float>() + t * width;
    std::vector<float> values = rng.normals(width);
    const float sign = t % 2 == 0 ? 1.0f : -1.0f;
    for (const size_t at : test::gpu::topk_select_sm90_sample(row, width)) {
      values[at] += 100.0f * sign;
    }
    std::copy(values.begin(), values.end(), row);
  }
  const Tensor row_len = Tensor::i32({4}, std::vector<int32_t>(4, width));
  TopkSelectTensors tensors;
  tensors.logits = logits;
  tensors.row_len = row_len;
  for (const int num_sms : {1, 4}) {
    test::gpu::settings().num_sms = num_sms;
    EXPECT_EQ(expect_reference({4, width, topk}, tensors), 0);
  }
}

TEST_F(TopkSelectSm90Model, RowsThatAreTooLongOrTooManyAreLeftToThePortableKernels) {
  const Tensor row_len = Tensor::i32({1}, {1});
  Tensor indices(DType::kI32, {133, 2048});
  TopkSelectTensors tensors;
  tensors.row_len = row_len;
  const auto blocks = [&](int64_t rows, int64_t width, int64_t topk) {
    static float anywhere[8];
    tensors.logits = make_tensor(anywhere, DType::kF32, {1, width});
    tensors.indices = make_tensor(indices.data<int32_t>(), DType::kI32, {rows, topk});
    return test::gpu::run_topk_select_sm90({rows, width, topk}, tensors);
  };
  EXPECT_EQ(blocks(1, 524289, 2048), -1);
  EXPECT_EQ(blocks(16, 131073, 2048), -1);
  EXPECT_EQ(blocks(16, 131072, 2048), 4);
  EXPECT_EQ(blocks(128, 16384, 2048), 1);
  EXPECT_EQ(blocks(128, 16385, 2048), 0);
  EXPECT_EQ(blocks(133, 16384, 2048), 0);
  EXPECT_EQ(blocks(133, 131073, 2048), -1);
  EXPECT_EQ(blocks(1, 2048, 2048), -1);
}

}  // namespace
}  // namespace fovea
