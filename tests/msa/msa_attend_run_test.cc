#include "fovea/msa_attend.h"

#include <gtest/gtest.h>

#include "fovea/stream.h"
#include "src/core/implementation_list.h"
#include "tests/msa/msa_attend_target.h"

// Plans, graphs, layouts and memory.
namespace fovea {
namespace {

using test::AttendCase;
using test::PagedBatch;
using test::Tensor;

class MsaAttendRunTest : public test::AttendTargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, MsaAttendRunTest,
                         testing::ValuesIn(test::targets_of("msa_attend")), test::target_name);

// Decodes of `requests` rows with 4 KV heads and lists of 16 blocks of 128, over one small cache.
AttendCase decode_case(int32_t requests, int64_t group) {
  constexpr int32_t kPages = 17, kBlock = 128;
  std::vector<int32_t> lengths(static_cast<size_t>(requests));
  for (int32_t r = 0; r < requests; ++r)
    lengths[static_cast<size_t>(r)] = kPages * kBlock - 61 * r % (2 * kBlock);
  PagedBatch batch(lengths, std::vector<int32_t>(lengths.size(), 1), kBlock, 3, 0);
  batch.num_pages = kPages;
  for (int64_t i = 0; i < requests * kPages; ++i) batch.page_table.data<int32_t>()[i] %= kPages;
  // The pages of the first request are all there are.
  for (int32_t i = 0; i < kPages; ++i) batch.page_table.data<int32_t>()[i] = (5 * i + 3) % kPages;
  batch.lengths.assign(lengths.size(), 0);
  batch.lengths[0] = kPages * kBlock;
  AttendCase attend(std::move(batch), 4 * group, 4, 128, 16);
  attend.batch.lengths = lengths;
  attend.random_lists(7);
  return attend;
}

// A row in 16, 8, 2 parts and one.
TEST_P(MsaAttendRunTest, DecodesOfEveryBatchFollowTheReference) {
  if (GetParam().kind != DeviceKind::kCuda) GTEST_SKIP() << "plans of a GPU";
  for (const int32_t requests : {1, 3, 16, 64}) {
    SCOPED_TRACE(requests);
    AttendCase attend = decode_case(requests, requests == 1 ? 16 : 1);
    expect_reference(attend, 2);
  }
}

TEST(MsaAttend, CudaDecodesChooseTheKernelForFewRows) {
  if (const std::string reason = internal::cuda_sm90_available(); !reason.empty())
    GTEST_SKIP() << reason;
  MsaAttendProblem problem = decode_case(1, 16).problem();
  const auto chosen = [&] {
    return MsaAttend::plan(problem, Device::cuda(0)).implementation().name;
  };
  for (const int64_t requests : {1, 16, 64, 128, 256}) {
    problem.max_rows = problem.max_requests = requests;
    EXPECT_EQ(chosen(), "cuda_sm90_decode") << requests;
  }
  problem.kv_mode = MsaKvMode::kKv8;
  EXPECT_EQ(chosen(), "cuda_portable");
}

TEST_P(MsaAttendRunTest, SmallCase9OnePlanForGrowingAndShrinkingLengths) {
  AttendCase attend(PagedBatch({4096, 4096, 4096}, {1, 1, 1}, 128, 5, 1), 16, 1, 64, 4);
  const MsaAttend plan =
      MsaAttend::plan(attend.problem(), GetParam().device(2), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{129, 513, 1024},
                                              {0, 0, 0},
                                              {1, 128, 257},
                                              {2048, 2049, 4096},
                                              {64, 4096, 0},
                                              {4096, 64, 0}}) {
    attend.batch.kv_len = test::i32_vector(lengths);
    attend.make_outputs();
    plan.run(attend.tensors(), workspace.workspace());
    AttendCase fresh = attend;
    fresh.make_outputs();
    fresh.run(GetParam().options(), 1);
    EXPECT_EQ(attend.out.bytes(), fresh.out.bytes());
    EXPECT_EQ(attend.lse.bytes(), fresh.lse.bytes());
  }
}

TEST_P(MsaAttendRunTest, SmallCase8ReplaysOfAGraphEqualEagerRuns) {
  // Two plans of one shape with a workspace each, captured once, replayed on other contents.
  const Device device = GetParam().device(2);
  AttendCase base(
      PagedBatch({300, 300, 300, 300, 300, 300, 300, 300}, {1, 1, 1, 1, 1, 1, 1, 1}, 16, 5, 1), 4,
      2, 32, 4);
  AttendCase other = base;
  const MsaAttend plan = MsaAttend::plan(base.problem(), device, GetParam().options());
  const MsaAttend second = MsaAttend::plan(base.problem(), device, GetParam().options());
  HostBuffer workspace(plan.workspace_bytes()), second_workspace(second.workspace_bytes());
  const OwnedStream stream(device);
  const MsaAttendTensors tensors = base.tensors(), other_tensors = other.tensors();
  const Graph graph = Graph::capture(device, stream, [&](Stream s) {
    plan.run(tensors, workspace.workspace(), s);
    second.run(other_tensors, second_workspace.workspace(), s);
    plan.run(tensors, workspace.workspace(), s);
  });
  test::Rng rng(9);
  for (int replay = 0; replay < 100; ++replay) {
    for (AttendCase* each : {&base, &other}) {
      for (int64_t r = 0; r < 8; ++r) {
        const int64_t kind = rng.integer(0, 5);
        each->batch.kv_len.data<int32_t>()[r] =
            replay % 10 == 0 || kind == 0 ? 0 : static_cast<int32_t>(rng.integer(1, 300));
        for (int64_t p = 0; p < base.batch.max_pages; ++p)
          each->batch.page_table.data<int32_t>()[r * base.batch.max_pages + p] =
              static_cast<int32_t>(rng.integer(-1, base.batch.num_pages));
      }
      for (int64_t i = 0; i < 2 * 8 * 4; ++i)
        each->blocks.data<int32_t>()[i] = static_cast<int32_t>(rng.integer(-1, 20));
      each->out.fill_bytes(0x55);
      each->lse.fill_bytes(0x55);
    }
    graph.launch(stream);
    stream.synchronize();
    for (AttendCase* each : {&base, &other}) {
      AttendCase eager = *each;
      eager.make_outputs();
      eager.run(GetParam().options());
      ASSERT_EQ(eager.out.bytes(), each->out.bytes()) << replay;
      ASSERT_EQ(eager.lse.bytes(), each->lse.bytes()) << replay;
    }
  }
}

TEST_P(MsaAttendRunTest, SmallCase10LayoutsWithEqualExtentsAndThreeHeads) {
  for (const int64_t group : {4, 8, 16}) {
    AttendCase attend(PagedBatch({100, 80, 120}, {1, 1, 1}, 16, 3), 3 * group, 3, 64, 3);
    run(attend);
    AttendCase row_major = attend;
    row_major.layout = BlocksLayout::kRowMajor;
    for (int64_t g = 0; g < 3; ++g) {
      for (int64_t t = 0; t < 3; ++t)
        std::copy_n(attend.list(g, t), 3, row_major.blocks.data<int32_t>() + (t * 3 + g) * 3);
    }
    row_major.make_outputs();
    run(row_major);
    EXPECT_EQ(row_major.out.bytes(), attend.out.bytes());
    EXPECT_EQ(row_major.lse.bytes(), attend.lse.bytes());
    expect_reference(attend);
  }
}

TEST_P(MsaAttendRunTest, KnownFault14AnyStridesOfTheCache) {
  AttendCase attend(PagedBatch({100, 61}, {3, 20}, 16, 3), 8, 2, 64, 4);
  run(attend);
  const int64_t pages = attend.batch.num_pages;
  // Rank-4 forms: slot-major seen as pages of heads; pages of heads of tokens; interleaved K|V
  // rows.
  struct Form {
    int64_t page, head, token, value_offset;
  };
  for (const Form& form : {Form{16 * 128, 64, 128, 0}, Form{2 * 16 * 64, 16 * 64, 64, 0},
                           Form{16 * 256, 128, 256, 64}, Form{2 * 16 * 72 + 8, 16 * 72, 72, 0}}) {
    const int64_t total = pages * form.page + 64;
    Tensor k_memory(DType::kBf16, {total}), v_memory(DType::kBf16, {total});
    k_memory.fill_bytes(0xFF);
    v_memory.fill_bytes(0xFF);
    Tensor& values = form.value_offset > 0 ? k_memory : v_memory;
    for (int64_t page = 0; page < pages; ++page) {
      for (int64_t g = 0; g < 2; ++g) {
        for (int64_t token = 0; token < 16; ++token) {
          const int64_t from = ((page * 16 + token) * 2 + g) * 64;
          const int64_t to = page * form.page + g * form.head + token * form.token;
          std::copy_n(attend.k.data<bf16_t>() + from, 64, k_memory.data<bf16_t>() + to);
          std::copy_n(attend.v.data<bf16_t>() + from, 64,
                      values.data<bf16_t>() + to + form.value_offset);
        }
      }
    }
    AttendCase other = attend;
    other.make_outputs();
    MsaAttendTensors tensors = other.tensors();
    tensors.k_pool = make_tensor(static_cast<const void*>(k_memory.data<bf16_t>()), DType::kBf16,
                                 {pages, 2, 16, 64});
    tensors.k_pool.stride = {form.page, form.head, form.token, 1};
    tensors.v_pool = tensors.k_pool;
    tensors.v_pool.data = values.data<bf16_t>() + form.value_offset;
    test::run(MsaAttend::plan(other.problem(), GetParam().device(2), GetParam().options()),
              tensors);
    EXPECT_EQ(other.out.bytes(), attend.out.bytes());
    EXPECT_EQ(other.lse.bytes(), attend.lse.bytes());
  }
}

TEST_P(MsaAttendRunTest, KnownFault14StridedQueriesListsTablesAndOutputsWithGuards) {
  AttendCase attend(PagedBatch({45, 33}, {3, 2}, 16, 3, 0), 4, 2, 64, 3);
  run(attend);
  const int64_t rows = 5, pages = attend.batch.max_pages, slots = attend.batch.slots();
  const int64_t pitch = 4 * 64 + 24;
  test::GuardedMemory q(static_cast<size_t>(2 * (rows * pitch - 24)));
  test::GuardedMemory out(static_cast<size_t>(2 * (rows * pitch - 24)));
  test::GuardedMemory k(static_cast<size_t>(2 * slots * 128)),
      v(static_cast<size_t>(2 * slots * 128));
  test::GuardedMemory lists(static_cast<size_t>(4 * (rows * 2 * 5 - 2)));
  test::GuardedMemory table(static_cast<size_t>(4 * (2 * (pages + 1) - 1))), lengths(8),
      offsets(12);
  test::GuardedMemory lse(static_cast<size_t>(4 * (rows * 5 - 1)));
  for (int64_t t = 0; t < rows; ++t) {
    std::copy_n(attend.q.data<bf16_t>() + t * 256, 256, static_cast<bf16_t*>(q.data()) + t * pitch);
    for (int64_t g = 0; g < 2; ++g)
      std::copy_n(attend.list(g, t), 3, static_cast<int32_t*>(lists.data()) + (t * 2 + g) * 5);
  }
  std::copy_n(attend.k.data<bf16_t>(), slots * 128, static_cast<bf16_t*>(k.data()));
  std::copy_n(attend.v.data<bf16_t>(), slots * 128, static_cast<bf16_t*>(v.data()));
  for (int64_t r = 0; r < 2; ++r)
    std::copy_n(attend.batch.page_table.data<int32_t>() + r * pages, pages,
                static_cast<int32_t*>(table.data()) + r * (pages + 1));
  std::copy_n(attend.batch.kv_len.data<int32_t>(), 2, static_cast<int32_t*>(lengths.data()));
  std::copy_n(attend.batch.q_indptr.data<int32_t>(), 3, static_cast<int32_t*>(offsets.data()));
  MsaAttendTensors tensors = attend.tensors();
  tensors.q.data = q.data();
  tensors.q.stride[0] = pitch;
  tensors.out.data = out.data();
  tensors.out.stride[0] = pitch;
  tensors.k_pool.data = k.data();
  tensors.v_pool.data = v.data();
  tensors.blocks.data = lists.data();  // [row][head][entry], viewed as [head][row][entry]
  tensors.blocks.stride = {5, 10, 1};
  tensors.page_table.data = table.data();
  tensors.page_table.stride[0] = pages + 1;
  tensors.kv_len.data = lengths.data();
  tensors.q_indptr.data = offsets.data();
  tensors.lse.data = lse.data();
  tensors.lse.stride[0] = 5;
  const MsaAttend plan =
      MsaAttend::plan(attend.problem(), GetParam().device(2), GetParam().options());
  test::GuardedMemory scratch((plan.workspace_bytes() + 63) / 64 * 64);
  plan.run(tensors, {scratch.data(), plan.workspace_bytes()});
  for (int64_t t = 0; t < rows; ++t) {
    EXPECT_TRUE(std::equal(attend.out.data<uint16_t>() + t * 256,
                           attend.out.data<uint16_t>() + (t + 1) * 256,
                           static_cast<uint16_t*>(out.data()) + t * pitch));
    for (int64_t h = 0; h < 4; ++h)
      EXPECT_EQ(static_cast<float*>(lse.data())[t * 5 + h], attend.lse_at(t, h));
  }
}

TEST_P(MsaAttendRunTest, KnownFault6AddressesBeyondFourGigabytes) {
  if (GetParam().kind == DeviceKind::kCuda) GTEST_SKIP() << test::kNoSparseMapping;
  AttendCase attend(PagedBatch({60}, {2}, 16, 5, 0), 4, 1, 64, 4);
  run(attend);
  const int64_t pitch = int64_t{1} << 26;
  const int64_t slots = attend.batch.slots();
  test::SparseMapping k(static_cast<size_t>(2 * slots * pitch)),
      v(static_cast<size_t>(2 * slots * pitch));
  for (int64_t j = 0; j < 60; ++j) {
    const int64_t slot = attend.batch.slot(0, j);
    std::copy_n(attend.k.data<bf16_t>() + slot * 64, 64,
                static_cast<bf16_t*>(k.data()) + slot * pitch);
    std::copy_n(attend.v.data<bf16_t>() + slot * 64, 64,
                static_cast<bf16_t*>(v.data()) + slot * pitch);
  }
  AttendCase far = attend;
  far.make_outputs();
  MsaAttendTensors tensors = far.tensors();
  tensors.k_pool.data = k.data();
  tensors.v_pool.data = v.data();
  tensors.k_pool.stride[0] = tensors.v_pool.stride[0] = pitch;
  test::run(MsaAttend::plan(far.problem(), GetParam().device(1), GetParam().options()), tensors);
  EXPECT_EQ(far.out.bytes(), attend.out.bytes());
}

TEST_P(MsaAttendRunTest, RunDoesNotAllocateAndLseIsOptional) {
  AttendCase attend(PagedBatch({200, 90}, {5, 3}, 16, 2), 8, 2, 64, 4);
  MsaAttendTensors tensors = attend.tensors();
  const MsaAttend plan =
      MsaAttend::plan(attend.problem(), GetParam().device(1), GetParam().options());
  HostBuffer workspace(plan.workspace_bytes());
  plan.run(tensors, workspace.workspace());
  const std::vector<uint8_t> expected = attend.out.bytes();
  attend.make_outputs();
  tensors = attend.tensors();
  tensors.lse = {};
  const test::AllocationCounter counter;
  plan.run(tensors, workspace.workspace());
  EXPECT_EQ(counter.count(), 0);
  EXPECT_EQ(attend.out.bytes(), expected);
  EXPECT_EQ(attend.lse.bytes(), std::vector<uint8_t>(attend.lse.bytes().size(), 0x55));
}

}  // namespace
}  // namespace fovea
