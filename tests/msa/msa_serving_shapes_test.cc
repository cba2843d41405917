#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <string>
#include <tuple>

#include "fovea/device_memory.h"
#include "fovea/device_tensors.h"
#include "fovea/msa_attend.h"
#include "tests/msa/paged_batch.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"
#include "tests/support/sanitizers.h"
#include "tests/support/targets.h"

// Prefill with the shapes of real traffic: a few thousand new tokens behind a long prefix, every
// row with its own block and others in no order, pages shuffled. The reference computes a few of
// the rows.
namespace fovea {
namespace {

using test::PagedBatch;
using test::Tensor;

constexpr int64_t kDim = 128;
constexpr int64_t kPage = 128;
constexpr int64_t kTopk = 16;

struct Shape {
  int32_t rows, length;
  int64_t heads, kv_heads;
};

// Normals, repeated with a period that divides neither a row nor a page.
void fill_normals(Tensor* tensor, int64_t count, uint64_t seed) {
  constexpr int64_t kPeriod = 65521;
  test::Rng rng(seed);
  const std::vector<bf16_t> normals = rng.bf16_normals(kPeriod);
  for (int64_t i = 0; i < count; i += kPeriod) {
    std::copy_n(normals.begin(), std::min(kPeriod, count - i), tensor->data<bf16_t>() + i);
  }
}

// Everything of a call; a problem of fewer rows shares the pools.
struct Call {
  MsaAttendProblem problem;
  Tensor q, blocks, kv_len, q_indptr, page_table, out, lse;

  MsaAttendTensors tensors(const Tensor& k, const Tensor& v) {
    MsaAttendTensors result;
    result.q = q;
    result.k_pool = k;
    result.v_pool = v;
    result.page_table = page_table;
    result.kv_len = kv_len;
    result.q_indptr = q_indptr;
    result.blocks = blocks;
    result.out = out;
    result.lse = lse;
    return result;
  }
};

Call make_call(const Shape& shape, int64_t rows, int64_t requests, int64_t max_pages) {
  Call call;
  call.problem.max_rows = rows;
  call.problem.max_requests = requests;
  call.problem.max_pages = max_pages;
  call.problem.num_heads = shape.heads;
  call.problem.num_kv_heads = shape.kv_heads;
  call.problem.head_dim = kDim;
  call.problem.block_size = kPage;
  call.problem.topk = kTopk;
  call.q = Tensor(DType::kBf16, {rows, shape.heads, kDim});
  call.blocks = Tensor(DType::kI32, {shape.kv_heads, rows, kTopk});
  call.out = Tensor(DType::kBf16, {rows, shape.heads, kDim});
  call.lse = Tensor(DType::kF32, {rows, shape.heads});
  call.out.fill_bytes(0x55);
  call.lse.fill_bytes(0x55);
  return call;
}

// The own block and 15 others of the history, or all that there are, in no order.
void fill_list(test::Rng* rng, int64_t own, int32_t* list) {
  std::fill_n(list, kTopk, -1);
  int64_t count = 0;
  const int64_t wanted = std::min(kTopk, own + 1);
  list[count++] = static_cast<int32_t>(own);
  while (count < wanted) {
    const auto block = static_cast<int32_t>(rng->integer(0, own - 1));
    if (std::find(list, list + count, block) == list + count) list[count++] = block;
  }
  std::swap(list[0], list[rng->integer(0, count - 1)]);
}

// The tensors of the largest shapes do not fit the heap that tests share with a GPU.
void run_in_device_memory(const MsaAttend& plan, MsaAttendTensors tensors) {
  DeviceTensors there(plan.device());
  for (ConstTensorView* view : {&tensors.q, &tensors.k_pool, &tensors.v_pool, &tensors.page_table,
                                &tensors.kv_len, &tensors.q_indptr, &tensors.blocks}) {
    *view = there.input(*view);
  }
  tensors.out = there.output(tensors.out);
  tensors.lse = there.output(tensors.lse);
  DeviceBuffer workspace(plan.device(), plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  there.fetch();
}

void expect_sampled_rows_equal_the_reference(const Device& device, const Shape& shape) {
  const PagedBatch batch({shape.length}, {shape.rows}, kPage);
  Tensor k(DType::kBf16, {batch.slots(), shape.kv_heads, kDim});
  Tensor v(DType::kBf16, {batch.slots(), shape.kv_heads, kDim});
  fill_normals(&k, batch.slots() * shape.kv_heads * kDim, 1);
  fill_normals(&v, batch.slots() * shape.kv_heads * kDim, 2);

  Call call = make_call(shape, shape.rows, 1, batch.max_pages);
  fill_normals(&call.q, shape.rows * shape.heads * kDim, 3);
  call.kv_len = batch.kv_len;
  call.q_indptr = batch.q_indptr;
  call.page_table = batch.page_table;
  test::Rng rng(4);
  for (int64_t g = 0; g < shape.kv_heads; ++g) {
    for (int64_t t = 0; t < shape.rows; ++t) {
      fill_list(&rng, batch.position(0, t) / kPage,
                call.blocks.data<int32_t>() + (g * shape.rows + t) * kTopk);
    }
  }
  const MsaAttend plan = MsaAttend::plan(call.problem, device);
  run_in_device_memory(plan, call.tensors(k, v));

  // The same rows, each a request of its own that ends with it.
  std::vector<int64_t> sampled = {0, shape.rows / 3, shape.rows / 2, shape.rows - 2,
                                  shape.rows - 1};
  if (shape.rows < 5) sampled = {shape.rows - 1};
  const auto count = static_cast<int64_t>(sampled.size());
  Call expected = make_call(shape, count, count, batch.max_pages);
  Call seen = make_call(shape, count, count, batch.max_pages);
  std::vector<int32_t> lengths, table;
  std::vector<int32_t> offsets(static_cast<size_t>(count + 1));
  std::iota(offsets.begin(), offsets.end(), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = sampled[static_cast<size_t>(i)];
    lengths.push_back(static_cast<int32_t>(batch.position(0, t) + 1));
    const auto* pages = batch.page_table.data<int32_t>();
    table.insert(table.end(), pages, pages + batch.max_pages);
    const int64_t row = shape.heads * kDim;
    std::copy_n(call.q.data<bf16_t>() + t * row, row, expected.q.data<bf16_t>() + i * row);
    std::copy_n(call.out.data<bf16_t>() + t * row, row, seen.out.data<bf16_t>() + i * row);
    std::copy_n(call.lse.data<float>() + t * shape.heads, shape.heads,
                seen.lse.data<float>() + i * shape.heads);
    for (int64_t g = 0; g < shape.kv_heads; ++g) {
      std::copy_n(call.blocks.data<int32_t>() + (g * shape.rows + t) * kTopk, kTopk,
                  expected.blocks.data<int32_t>() + (g * count + i) * kTopk);
    }
  }
  expected.kv_len = test::i32_vector(lengths);
  expected.q_indptr = test::i32_vector(offsets);
  expected.page_table = Tensor::i32({count, batch.max_pages}, table);
  const MsaAttend reference = MsaAttend::plan(expected.problem, Device::cpu(2), {"ref"});
  test::run(reference, expected.tensors(k, v));
  EXPECT_TRUE(test::ExpectClose(seen.lse.view(), expected.lse.view(), test::kLse));
  const std::vector<double> out = test::to_doubles(expected.out.view());
  const int num_rounded = test::rounds_weights(plan.implementation().name) ? 1 : 0;
  if (num_rounded > 0) {
    for (int64_t i = 0; i < batch.slots() * shape.kv_heads * kDim; ++i)
      v.data<bf16_t>()[i].bits &= 0x7FFF;
    test::run(reference, expected.tensors(k, v));
  }
  EXPECT_TRUE(test::ExpectCloseOutputs(test::to_doubles(seen.out.view()), out,
                                       test::to_doubles(expected.out.view()), num_rounded,
                                       test::kBf16Output));
}

class MsaServingShapesTest : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, MsaServingShapesTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(MsaServingShapesTest, ShortOnesOfOneRank) {
  for (const Shape& shape :
       {Shape{1, 1, 16, 1}, Shape{7, 20487, 16, 1}, Shape{test::by_build(171, 17), 55339, 16, 1}}) {
    SCOPED_TRACE(std::to_string(shape.rows) + " of " + std::to_string(shape.length));
    expect_sampled_rows_equal_the_reference(device_, shape);
  }
}

using RowsOf = std::array<int32_t, 2>;
constexpr RowsOf kSpecification[] = {
    {171, 55339},  {338, 74578},   {347, 131547},  {182, 17718},    {9844, 48884},
    {1404, 46844}, {16384, 47744}, {16384, 84480}, {16384, 173824}, {16384, 27136},
    {1, 1},        {7, 20487},     {50, 100914}};

class FullMsaServingShapesTest : public testing::TestWithParam<std::tuple<const char*, RowsOf>> {
 protected:
  void SetUp() override {
    const char* const device = std::get<0>(GetParam());
    if (const std::string reason = test::why_skipped(device); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    device_ = parse_device(device, 2);
  }
  Device device_;
};
std::string full_name(const testing::TestParamInfo<std::tuple<const char*, RowsOf>>& info) {
  const auto [rows, length] = std::get<1>(info.param);
  return test::device_name(std::get<0>(info.param)) + "_" + std::to_string(rows) + "_of_" +
         std::to_string(length);
}
INSTANTIATE_TEST_SUITE_P(Devices, FullMsaServingShapesTest,
                         testing::Combine(testing::ValuesIn(test::kDevices),
                                          testing::ValuesIn(kSpecification)),
                         full_name);

TEST_P(FullMsaServingShapesTest, ThoseOfTheSpecification) {
  const auto [rows, length] = std::get<1>(GetParam());
  expect_sampled_rows_equal_the_reference(device_, {rows, length, 64, 4});
}

}  // namespace
}  // namespace fovea
