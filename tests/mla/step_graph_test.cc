#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/index_select.h"
#include "fovea/metadata.h"
#include "fovea/numeric.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "fovea/stream.h"
#include "src/core/cuda_runtime.h"
#include "src/core/fault_injection.h"
#include "src/core/kernel_fault.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::Tensor;

// The decode step of a layer: metadata, selection, attention, over buffers that stay where they
// are.
class DecodeStep {
 public:
  static constexpr int64_t kRequests = 5, kWidth = 512, kPage = 16, kTopk = 64, kHeads = 8,
                           kIndexHeads = 64, kPages = 40;

  explicit DecodeStep(const Device& device)
      : device_(device),
        refresh_(MetadataRefresh::plan(metadata_problem(), device)),
        select_(IndexSelect::plan(select_problem(), device)),
        attend_(SparseMla::plan(attention_problem(), device)) {
    test::Rng rng(11);
    for (int32_t& slot : span_of(req_to_token_)) slot = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      for (int64_t p = 0; p < kWidth; ++p) {
        const int64_t page = 1 + (r * 7 + p / kPage) % (kPages - 1);
        req_to_token_.data<int32_t>()[r * kWidth + p] =
            static_cast<int32_t>(page * kPage + p % kPage);
      }
      pool_row_.data<int32_t>()[r] = static_cast<int32_t>(r);
    }
    const auto codes = [&](Tensor& tensor) {
      for (size_t i = 0; i < tensor.bytes().size(); ++i) {
        tensor.data<uint8_t>()[i] = e4m3_from_float(rng.normal());
      }
    };
    codes(q_fp8_);
    codes(index_pool_);
    for (int64_t page = 0; page < kPages; ++page) {
      for (int64_t j = 0; j < kPage; ++j) {
        const float scale = rng.uniform(0.01f, 0.02f);
        std::memcpy(index_pool_.data<uint8_t>() + page * kPage * 132 + kPage * 128 + 4 * j, &scale,
                    4);
      }
    }
    for (float& weight : std::span(head_weight_.data<float>(), kRequests * kIndexHeads)) {
      weight = rng.normal();
    }
    q_ = Tensor::bf16({kRequests, kHeads, 576}, rng.bf16_normals(kRequests * kHeads * 576));
    const Tensor rows = Tensor::bf16({kPages * kPage, 576}, rng.bf16_normals(kPages * kPage * 576));
    Tensor slots(DType::kI32, {kPages * kPage});
    for (int32_t i = 0; i < kPages * kPage; ++i) slots.data<int32_t>()[i] = i;
    PackRows::plan({kPages * kPage, RowFormat::kV32, kPage, 576}, Device::cpu(1))
        .run({rows, slots, kv_pool_}, {});
  }

  void set_lengths(const std::vector<int32_t>& lengths) {
    std::copy(lengths.begin(), lengths.end(), seq_len_.data<int32_t>());
  }

  void run(Stream stream) {
    MetadataTensors metadata;
    metadata.seq_len = seq_len_;
    metadata.pool_row = pool_row_;
    metadata.req_to_token = req_to_token_;
    MetadataFields& fields = metadata.steps[0];
    fields.kv_len = kv_len_;
    fields.kv_indptr = kv_indptr_;
    fields.max_kv_len = max_kv_len_;
    fields.q_indptr = q_indptr_;
    fields.max_q_len = max_q_len_;
    fields.page_table = page_table_;
    fields.row_to_request = row_to_request_;
    fields.row_len = row_len_;
    fields.topk_length = topk_length_;
    fields.topk_indptr = topk_indptr_;
    fields.ext_len = ext_len_;
    fields.schedule = schedule_;
    refresh_.run(metadata, refresh_memory_.workspace(), stream);
    IndexSelectTensors selection;
    selection.q_fp8 = q_fp8_;
    selection.head_weight = head_weight_;
    selection.index_pool = index_pool_;
    selection.page_table = page_table_;
    selection.row_to_request = row_to_request_;
    selection.row_len = row_len_;
    selection.indices = indices_;
    select_.run(selection, select_memory_.workspace(), stream);
    attend_.run({.q = q_,
                 .kv = kv_pool_,
                 .indices = indices_,
                 .topk_length = topk_length_,
                 .out = out_,
                 .lse = lse_},
                attend_memory_.workspace(), stream);
  }

  // Everything that the step has written.
  std::vector<uint8_t> results() const {
    std::vector<uint8_t> all;
    for (const Tensor* tensor : {&kv_len_, &kv_indptr_, &row_len_, &topk_length_, &topk_indptr_,
                                 &schedule_, &indices_, &out_, &lse_}) {
      all.insert(all.end(), tensor->bytes().begin(), tensor->bytes().end());
    }
    return all;
  }
  void forget_results() {
    for (Tensor* tensor : {&kv_len_, &kv_indptr_, &row_len_, &topk_length_, &topk_indptr_,
                           &schedule_, &indices_, &out_, &lse_, &page_table_, &row_to_request_}) {
      tensor->fill_bytes(0xA5);
    }
  }

 private:
  static std::span<int32_t> span_of(Tensor& tensor) {
    return {tensor.data<int32_t>(), tensor.bytes().size() / 4};
  }
  static MetadataProblem metadata_problem() {
    MetadataProblem problem;
    problem.max_requests = problem.max_rows = kRequests;
    problem.table_width = kWidth;
    problem.topk = kTopk;
    problem.page_size = kPage;
    return problem;
  }
  static IndexSelectProblem select_problem() {
    IndexSelectProblem problem;
    problem.max_rows = kRequests;
    problem.max_width = kWidth;
    problem.num_heads = kIndexHeads;
    problem.topk = kTopk;
    problem.transform = IndexTransform::kPaged;
    problem.page_size = kPage;
    return problem;
  }
  static SparseMlaProblem attention_problem() {
    return {.max_rows = kRequests,
            .num_heads = kHeads,
            .topk = kTopk,
            .softmax_scale = 0.07f,
            .row_format = RowFormat::kV32,
            .page_size = kPage};
  }

  Device device_;
  MetadataRefresh refresh_;
  IndexSelect select_;
  SparseMla attend_;
  HostBuffer refresh_memory_{refresh_.workspace_bytes()};
  HostBuffer select_memory_{select_.workspace_bytes()};
  HostBuffer attend_memory_{attend_.workspace_bytes()};
  Tensor seq_len_{DType::kI32, {kRequests}}, pool_row_{DType::kI32, {kRequests}};
  Tensor req_to_token_{DType::kI32, {kRequests, kWidth}};
  Tensor kv_len_{DType::kI32, {kRequests}}, kv_indptr_{DType::kI32, {kRequests + 1}};
  Tensor max_kv_len_{DType::kI32, {1}}, max_q_len_{DType::kI32, {1}};
  Tensor q_indptr_{DType::kI32, {kRequests + 1}};
  Tensor page_table_{DType::kI32, {kRequests, kWidth / kPage}};
  Tensor row_to_request_{DType::kI32, {kRequests}}, row_len_{DType::kI32, {kRequests}};
  Tensor topk_length_{DType::kI32, {kRequests}}, topk_indptr_{DType::kI32, {kRequests + 1}};
  Tensor ext_len_{DType::kI32, {kRequests}}, schedule_{DType::kI32, {65, 2}};
  Tensor q_fp8_{DType::kU8, {kRequests, kIndexHeads, 128}};
  Tensor head_weight_{DType::kF32, {kRequests, kIndexHeads}};
  Tensor index_pool_{DType::kU8, {kPages, kPage * 132}};
  Tensor q_, kv_pool_{DType::kU8, {kPages, kPage * 656}};
  Tensor indices_{DType::kI32, {kRequests, kTopk}};
  Tensor out_{DType::kBf16, {kRequests, kHeads, 512}}, lse_{DType::kF32, {kRequests, kHeads}};
};

std::vector<int32_t> lengths_of(int replay, test::Rng& rng) {
  if (replay % 10 == 9) return {0, 0, 0, 0, 0};
  std::vector<int32_t> lengths;
  for (int64_t r = 0; r < DecodeStep::kRequests; ++r) {
    lengths.push_back(static_cast<int32_t>(rng.integer(0, DecodeStep::kWidth)));
  }
  if (replay % 3 == 0) lengths[0] = 1;
  if (replay % 3 == 1) lengths[4] = 64 + replay % 2;
  return lengths;
}

class StepGraphTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) != "cpu" && cuda_device_count() == 0) {
      GTEST_SKIP() << internal::cuda::unavailable_reason();
    }
    device_ = parse_device(GetParam(), 1);
  }
  Device device_;
};
INSTANTIATE_TEST_SUITE_P(Devices, StepGraphTest, testing::Values("cpu", "cuda:0"),
                         [](const auto& param_info) {
                           return std::string(param_info.param) == "cpu" ? "cpu" : "cuda";
                         });

// Captured on its very first call and replayed with other lengths, a step gives the bits of the
// step run by itself.
TEST_P(StepGraphTest, AHundredReplaysEqualEagerSteps) {
  const OwnedStream stream(device_);
  DecodeStep captured(device_), eager(device_);
  captured.set_lengths({1, 1, 1, 1, 1});
  const Graph graph = Graph::capture(device_, stream, [&](Stream on) { captured.run(on); });
  test::Rng rng(3);
  for (int replay = 0; replay < 100; ++replay) {
    const std::vector<int32_t> lengths = lengths_of(replay, rng);
    captured.set_lengths(lengths);
    eager.set_lengths(lengths);
    captured.forget_results();
    eager.forget_results();
    graph.launch(stream);
    stream.synchronize();
    eager.run(stream);
    stream.synchronize();
    ASSERT_TRUE(captured.results() == eager.results()) << "replay " << replay;
  }
}

// Whichever launch of a step is refused: the error says which operator failed (on a GPU with which
// grid), and the step is right when it runs again.
TEST_P(StepGraphTest, AFailedLaunchIsNamedAndTheNextStepIsRight) {
  const bool on_gpu = device_.kind == DeviceKind::kCuda;
  DecodeStep step(device_), untouched(device_);
  for (DecodeStep* const one : {&step, &untouched}) one->set_lengths({512, 65, 64, 1, 300});
  untouched.forget_results();
  untouched.run({});
  synchronize(device_);
  int64_t failures = 0;
  for (int64_t nth = 1;; ++nth) {
    std::optional<internal::LaunchFault> run_fault;
    std::optional<internal::KernelFault> kernel_fault;
    if (on_gpu) {
      kernel_fault.emplace(nth);
    } else {
      run_fault.emplace(nth);
    }
    step.forget_results();
    bool failed = false;
    try {
      step.run({});
    } catch (const Error& error) {
      failed = true;
      const std::string text = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      const auto names = [&](std::string_view op) {
        return text.starts_with("device: " + std::string(op));
      };
      EXPECT_TRUE(names("metadata_refresh: ") || names("index_") || names("topk_select: ") ||
                  names("sparse_mla: "))
          << text;
      if (on_gpu) {
        EXPECT_NE(text.find(" blocks of "), std::string::npos) << text;
      }
    }
    synchronize(device_);
    if (!failed) break;
    ++failures;
    kernel_fault.reset();
    run_fault.reset();
    step.forget_results();
    step.run({});
    synchronize(device_);
    ASSERT_TRUE(step.results() == untouched.results()) << "after launch " << nth;
  }
  EXPECT_GE(failures, 3) << "one launch an operator at least";
}

// Two captured steps in turn, on streams of their own.
TEST_P(StepGraphTest, TwoStepsInTurnDoNotDisturbEachOther) {
  const OwnedStream streams[2] = {OwnedStream(device_), OwnedStream(device_)};
  DecodeStep steps[2] = {DecodeStep(device_), DecodeStep(device_)}, alone(device_);
  const auto capture = [&](int i) {
    return Graph::capture(device_, streams[i], [&steps, i](Stream on) { steps[i].run(on); });
  };
  const Graph graphs[2] = {capture(0), capture(1)};
  test::Rng rng(4);
  for (int round = 0; round < 10; ++round) {
    const std::vector<int32_t> lengths[2] = {lengths_of(2 * round, rng),
                                             lengths_of(2 * round + 1, rng)};
    for (int i = 0; i < 2; ++i) {
      steps[i].set_lengths(lengths[i]);
      steps[i].forget_results();
      graphs[i].launch(streams[i]);
    }
    for (int i = 0; i < 2; ++i) {
      streams[i].synchronize();
      alone.set_lengths(lengths[i]);
      alone.forget_results();
      alone.run({});
      synchronize(device_);
      ASSERT_TRUE(steps[i].results() == alone.results()) << "round " << round << ", step " << i;
    }
  }
}

// A decode step selects what the CPU selects, and attends alike.
TEST_P(StepGraphTest, AStepAgreesWithTheCpu) {
  DecodeStep here(device_), cpu(Device::cpu(1));
  for (DecodeStep* step : {&here, &cpu}) {
    step->set_lengths({512, 65, 64, 1, 300});
    step->forget_results();
    step->run({});
  }
  synchronize(device_);
  // All but out and lse are integers.
  const std::vector<uint8_t> a = here.results(), b = cpu.results();
  const size_t integers = a.size() - DecodeStep::kRequests * DecodeStep::kHeads * (1024 + 4);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + static_cast<ptrdiff_t>(integers), b.begin()));
}

}  // namespace
}  // namespace fovea
