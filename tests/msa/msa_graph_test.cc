#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "fovea/build_page_table.h"
#include "fovea/device_memory.h"
#include "fovea/msa_attend.h"
#include "fovea/msa_score_select.h"
#include "fovea/stream.h"
#include "tests/support/devices.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

// What a decode step of an engine runs, page table, selection, attention, captured once at a batch
// of 8 and replayed over contents of every kind. Device memory is the device's own here. A graph of
// the CPU calls what was captured: there the runs of plans over scratch memory that an earlier run
// has left are what is compared.
namespace fovea {
namespace {

using test::Tensor;

constexpr int64_t kRequests = 8, kRows = 20, kBlock = 64, kPages = 12, kWidth = kPages * kBlock;
constexpr int64_t kHeads = 8, kKvHeads = 2, kDim = 64, kTopk = 8, kPoolPages = 40;

// The caches that all steps read.
struct Pools {
  Pools() {
    test::Rng rng(2);
    constexpr int64_t kSlots = kPoolPages * kBlock;
    k = Tensor::bf16({kSlots, kKvHeads, kDim}, rng.bf16_normals(kSlots * kKvHeads * kDim));
    v = Tensor::bf16({kSlots, kKvHeads, kDim}, rng.bf16_normals(kSlots * kKvHeads * kDim));
    index = Tensor::bf16({kSlots, 1, kDim}, rng.bf16_normals(kSlots * kDim));
  }
  Tensor k, v, index;
};

// Lengths, rows, tables and lists that an engine, or a bug of it, could write between replays.
struct Contents {
  Tensor req_to_token{DType::kI32, {kRequests + 1, kWidth}}, pool_row{DType::kI32, {kRequests}};
  Tensor kv_len{DType::kI32, {kRequests}}, q_indptr{DType::kI32, {kRequests + 1}};
  Tensor lists{DType::kI32, {kKvHeads, kRows, kTopk}};
  Tensor q, iq;

  void change(int round, test::Rng& rng) {
    const int kind = round % 8;
    for (int64_t i = 0; i < (kRequests + 1) * kPages; ++i) {
      const auto page = static_cast<int32_t>(rng.integer(0, kPoolPages - 1));
      for (int64_t offset = 0; offset < kBlock; ++offset) {
        req_to_token.data<int32_t>()[i * kBlock + offset] =
            static_cast<int32_t>(page * kBlock + offset);
      }
    }
    int32_t row = 0;
    q_indptr.data<int32_t>()[0] = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      pool_row.data<int32_t>()[r] = static_cast<int32_t>(rng.integer(0, kRequests));
      const int32_t before = kv_len.data<int32_t>()[r];
      auto length = static_cast<int32_t>(rng.integer(0, kWidth));
      if (kind == 0) length = 0;  // all of them
      if (kind == 1 || rng.integer(0, 5) == 0) length = r % 2 == 0 ? 0 : length;
      if (kind == 2) length = std::min(length, before);      // shrinks
      if (kind == 3) length = static_cast<int32_t>(kWidth);  // grows to the bound
      kv_len.data<int32_t>()[r] = length;
      // No rows, one, or several, of which the last request has what is left or less.
      const auto left = static_cast<int32_t>(kRows) - row;
      row += static_cast<int32_t>(std::min<int64_t>(left, rng.integer(0, kind == 4 ? 1 : 4)));
      q_indptr.data<int32_t>()[r + 1] = row;
    }
    if (kind == 5) kv_len.data<int32_t>()[3] = 1 << 30, pool_row.data<int32_t>()[2] = -4;
    if (kind == 6) req_to_token.data<int32_t>()[2 * kWidth] = -1;
    for (int64_t i = 0; i < kKvHeads * kRows * kTopk; ++i) {
      lists.data<int32_t>()[i] = static_cast<int32_t>(rng.integer(-2, kPages + 1));
    }
    q = Tensor::bf16({kRows, kHeads, kDim}, rng.bf16_normals(kRows * kHeads * kDim));
    iq = Tensor::bf16({kRows, kKvHeads, kDim}, rng.bf16_normals(kRows * kKvHeads * kDim));
  }
};

// Plans and memory of one step.
class Step {
 public:
  Step(const Device& device, bool batch_invariant)
      : device_(device),
        table_(BuildPageTable::plan({kRequests, kPages, kBlock}, device)),
        select_(MsaScoreSelect::plan(select_problem(), device)),
        attend_(MsaAttend::plan(attend_problem(batch_invariant), device)) {
    workspace_.reserve(device,
                       std::max({table_.workspace_bytes(), select_.workspace_bytes(),
                                 attend_.workspace_bytes(), size_t{1}}),
                       {});
    contents.q = Tensor(DType::kBf16, {kRows, kHeads, kDim});
    contents.iq = Tensor(DType::kBf16, {kRows, kKvHeads, kDim});
  }

  // The addresses of a captured run stay.
  void set(const Contents& from) {
    const auto copy = [](const Tensor& source, Tensor& to) {
      std::copy(source.bytes().begin(), source.bytes().end(), to.data<uint8_t>());
    };
    copy(from.req_to_token, contents.req_to_token);
    copy(from.pool_row, contents.pool_row);
    copy(from.kv_len, contents.kv_len);
    copy(from.q_indptr, contents.q_indptr);
    copy(from.lists, contents.lists);
    copy(from.q, contents.q);
    copy(from.iq, contents.iq);
    for (Tensor* tensor : {&page_table_, &blocks_, &out_, &lse_, &given_out_, &given_lse_}) {
      tensor->fill_bytes(0x55);
    }
  }

  void spoil_workspace() { fill_bytes(workspace_.data(), device_, 0xFF, workspace_.bytes(), {}); }

  void run(const Pools& pools, Stream stream) {
    const Workspace workspace = workspace_.workspace();
    table_.run({.req_to_token = contents.req_to_token,
                .pool_row = contents.pool_row,
                .kv_len = contents.kv_len,
                .page_table = page_table_},
               workspace, stream);
    select_.run({.iq = contents.iq,
                 .index_k = pools.index,
                 .page_table = page_table_,
                 .kv_len = contents.kv_len,
                 .q_indptr = contents.q_indptr,
                 .blocks = blocks_},
                workspace, stream);
    attend(pools, blocks_, out_, lse_, stream);
    attend(pools, contents.lists, given_out_, given_lse_, stream);
  }

  bool equals(const Step& other) const {
    return page_table_.bytes() == other.page_table_.bytes() &&
           blocks_.bytes() == other.blocks_.bytes() && out_.bytes() == other.out_.bytes() &&
           lse_.bytes() == other.lse_.bytes() && given_out_.bytes() == other.given_out_.bytes() &&
           given_lse_.bytes() == other.given_lse_.bytes();
  }

  Contents contents;

 private:
  static MsaScoreSelectProblem select_problem() {
    MsaScoreSelectProblem problem;
    problem.max_rows = kRows;
    problem.max_requests = kRequests;
    problem.max_pages = kPages;
    problem.num_heads = kKvHeads;
    problem.head_dim = kDim;
    problem.block_size = kBlock;
    problem.topk = kTopk;
    problem.init_blocks = 1;
    return problem;
  }
  static MsaAttendProblem attend_problem(bool batch_invariant) {
    MsaAttendProblem problem;
    problem.max_rows = kRows;
    problem.max_requests = kRequests;
    problem.max_pages = kPages;
    problem.num_heads = kHeads;
    problem.num_kv_heads = kKvHeads;
    problem.head_dim = kDim;
    problem.block_size = kBlock;
    problem.topk = kTopk;
    problem.batch_invariant = batch_invariant;
    return problem;
  }

  void attend(const Pools& pools, const Tensor& blocks, Tensor& out, Tensor& lse, Stream stream) {
    MsaAttendTensors tensors;
    tensors.q = contents.q;
    tensors.k_pool = pools.k;
    tensors.v_pool = pools.v;
    tensors.page_table = page_table_;
    tensors.kv_len = contents.kv_len;
    tensors.q_indptr = contents.q_indptr;
    tensors.blocks = blocks;
    tensors.out = out;
    tensors.lse = lse;
    attend_.run(tensors, workspace_.workspace(), stream);
  }

  Device device_;
  BuildPageTable table_;
  MsaScoreSelect select_;
  MsaAttend attend_;
  DeviceBuffer workspace_;
  Tensor page_table_{DType::kI32, {kRequests, kPages}};
  Tensor blocks_{DType::kI32, {kKvHeads, kRows, kTopk}};
  Tensor out_{DType::kBf16, {kRows, kHeads, kDim}}, lse_{DType::kF32, {kRows, kHeads}};
  Tensor given_out_{DType::kBf16, {kRows, kHeads, kDim}}, given_lse_{DType::kF32, {kRows, kHeads}};
};

void expect_replays_equal_eager_runs(const Device& device, bool batch_invariant, int rounds) {
  const Pools pools;
  Step first(device, batch_invariant), second(device, batch_invariant);
  const OwnedStream stream(device);
  const auto capture = [&](Step& step) {
    return Graph::capture(device, stream, [&](Stream on) { step.run(pools, on); });
  };
  const Graph graphs[] = {capture(first), capture(second)};  // their first runs
  test::Rng rng(6);
  Contents one, two;
  std::optional<Step> eager;
  for (int round = 0; round < rounds; ++round) {
    one.change(round, rng);
    two.change(round + 3, rng);
    first.set(one);
    second.set(two);
    graphs[round % 2].launch(stream);
    graphs[(round + 1) % 2].launch(stream);
    stream.synchronize();
    if (round % 50 == 0) eager.emplace(device, batch_invariant);
    for (Step* const replayed : {&first, &second}) {
      eager->set(replayed == &first ? one : two);
      eager->spoil_workspace();
      eager->run(pools, {});
      synchronize(device);
      ASSERT_TRUE(replayed->equals(*eager))
          << "round " << round << (replayed == &first ? ", first" : ", second");
    }
  }
}

class MsaGraphTest : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, MsaGraphTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

// The rounds of a GPU cost little; those of the CPU are in the suite below.
TEST_P(MsaGraphTest, ReplaysEqualEagerRuns) {
  const int rounds = device_.kind == DeviceKind::kCuda ? 1000 : 64;
  for (const bool batch_invariant : {false, true}) {
    expect_replays_equal_eager_runs(device_, batch_invariant, rounds);
  }
}

TEST(FullMsaGraphTest, AThousandReplaysEqualEagerRuns) {
  expect_replays_equal_eager_runs(Device::cpu(2), false, 1000);
}

}  // namespace
}  // namespace fovea
