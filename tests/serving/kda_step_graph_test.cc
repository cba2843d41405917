#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/error.h"
#include "fovea/kda_backend.h"
#include "fovea/numeric.h"
#include "fovea/stream.h"
#include "src/core/fault_injection.h"
#include "src/core/kernel_fault.h"
#include "tests/support/devices.h"
#include "tests/support/limited_memory.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/spinner.h"

// Whole steps, begin_step, the forwards of all layers and the commit, submitted to a stream: by
// themselves and from graphs. Device memory is the device's own here.
namespace fovea {
namespace {

using test::Tensor;
using testing::HasSubstr;

constexpr int64_t kRequests = 4, kRowsPerRequest = 3, kWidth = 64, kPage = 4, kDrafts = 3;
constexpr int64_t kKdaLayers = 2, kHeads = 2, kDim = 64, kChannels = 3 * kHeads * kDim;
constexpr int64_t kMlaHeads = 2, kSlots = 2 * kRequests + 1;
constexpr int64_t kPages = 1 + kRequests * kWidth / kPage;

enum class Kind { kDecode, kDecodeInPlace, kVerify, kVerifyRecords, kDraftExtend, kDraftChain };
constexpr Kind kKinds[] = {Kind::kDecode,        Kind::kDecodeInPlace, Kind::kVerify,
                           Kind::kVerifyRecords, Kind::kDraftExtend,   Kind::kDraftChain};

bool is_verify(Kind kind) { return kind == Kind::kVerify || kind == Kind::kVerifyRecords; }
bool is_draft(Kind kind) { return kind == Kind::kDraftExtend || kind == Kind::kDraftChain; }

ForwardMode mode_of(Kind kind) {
  if (is_verify(kind)) return ForwardMode::kTargetVerify;
  return kind == Kind::kDraftExtend ? ForwardMode::kDraftExtend : ForwardMode::kDecode;
}

int64_t rows_of(Kind kind) {
  const bool many = is_verify(kind) || kind == Kind::kDraftExtend;
  return many ? kRequests * kRowsPerRequest : kRequests;
}

KdaBackendConfig config_of(Kind kind) {
  KdaBackendConfig config;
  config.layer.num_heads = config.layer.num_value_heads = kHeads;
  config.layer.head_dim_k = config.layer.head_dim_v = kDim;
  config.layer.beta_kind = BetaKind::kLogit;
  config.layer.normalise = true;
  config.num_layers = kKdaLayers;
  config.num_mla_heads = kMlaHeads;
  config.page_size = kPage;
  config.table_width = kWidth;
  config.max_requests = kRequests;
  config.max_rows = kRequests * kRowsPerRequest;
  config.rows_per_request = kRowsPerRequest;
  config.deterministic = kind != Kind::kDecodeInPlace;
  if (kind == Kind::kVerifyRecords) config.verify_mode = VerifyMode::kRecords;
  return config;
}

// The step of an engine whose buffers live on: the inputs of every forward are fixed; lengths,
// slots and counts are what a replay changes.
class EngineStep {
 public:
  EngineStep(KdaBackend& backend, Kind kind, uint64_t seed) : backend_(backend), kind_(kind) {
    const int64_t rows = rows_of(kind), steps = kind == Kind::kDraftChain ? kDrafts : 1;
    for (int64_t i = 0; i < steps; ++i) {
      plans_.push_back(backend.make_step_plan({mode_of(kind), kRequests, rows / kRequests}));
      positions_.emplace_back(DType::kI32, std::initializer_list<int64_t>{rows});
      slots_.emplace_back(DType::kI32, std::initializer_list<int64_t>{rows});
    }
    test::Rng rng(seed);
    for (int64_t r = 0; r < kRequests; ++r) {
      pool_row_.data<int32_t>()[r] = static_cast<int32_t>(r);
      for (int64_t p = 0; p < kWidth; ++p) table_.data<int32_t>()[r * kWidth + p] = slot(r, p);
    }
    const auto bf16s = [&](std::initializer_list<int64_t> shape, int64_t count) {
      return Tensor::bf16(shape, rng.bf16_normals(count));
    };
    for (KdaInputs& in : kda_) {
      in.qkv = bf16s({rows, kChannels}, rows * kChannels);
      in.gate = bf16s({rows, kHeads, kDim}, rows * kHeads * kDim);
      in.beta = Tensor::f32({rows, kHeads}, rng.normals(rows * kHeads));
      in.a_log = Tensor::f32({kHeads}, rng.normals(kHeads));
      in.weight = bf16s({kChannels, kConvWidth}, kChannels * kConvWidth);
      in.out = Tensor(DType::kBf16, {rows, kHeads, kDim});
    }
    for (int64_t i = 0; i < steps; ++i) {
      MlaInputs in;
      in.q = bf16s({rows, kMlaHeads, 576}, rows * kMlaHeads * 576);
      in.k = bf16s({rows, 576}, rows * 576);
      in.out = Tensor(DType::kBf16, {rows, kMlaHeads, 512});
      in.lse = Tensor(DType::kF32, {rows, kMlaHeads});
      mla_.push_back(std::move(in));
    }
    const int64_t state_elements = kKdaLayers * kSlots * kHeads * kDim * kDim;
    state_ = Tensor::f32({kKdaLayers, kSlots, kHeads, kDim, kDim}, rng.normals(state_elements));
    window_ = bf16s({kKdaLayers, kSlots, kConvHistory, kChannels},
                    kKdaLayers * kSlots * kConvHistory * kChannels);
    const Tensor rows_of_pool = bf16s({kPages, kPage * 576}, kPages * kPage * 576);
    kv_pool_ = Tensor::from(DType::kU8, {kPages, kPage * 576 * 2}, rows_of_pool.bytes());
  }

  // Committed tokens of each request; 0: no request, nothing is stored. Every `turn` reads other
  // slots and accepts other counts.
  void set(const std::vector<int32_t>& lengths, int turn) {
    int64_t row = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      const int32_t committed = lengths[static_cast<size_t>(r)];
      const bool live = committed > 0;
      const auto extend = static_cast<int32_t>(live ? 1 + committed % kRowsPerRequest : 0);
      int32_t given = committed;
      if (mode_of(kind_) == ForwardMode::kDecode && !is_draft(kind_) && live) given += 1;
      if (kind_ == Kind::kDraftExtend) given += extend;
      seq_len_.data<int32_t>()[r] = given;
      ext_len_.data<int32_t>()[r] = extend;
      const auto own = static_cast<int32_t>(2 * r);
      in_slot_.data<int32_t>()[r] = live ? own + turn % 2 : -1;
      out_slot_.data<int32_t>()[r] = live ? own + (turn + 1) % 2 : -1;
      has_state_.data<uint8_t>()[r] = (turn + r) % 5 == 0 ? 0 : 1;
      accepted_.data<int32_t>()[r] = static_cast<int32_t>((turn + r) % (kRowsPerRequest + 1));
      const int64_t rows =
          kind_ == Kind::kDraftExtend ? int64_t{extend} : rows_of(kind_) / kRequests;
      for (int64_t i = 0; i < rows; ++i, ++row) {
        for (size_t j = 0; j < plans_.size(); ++j) {
          const auto at = static_cast<int32_t>(committed + i + static_cast<int64_t>(j));
          positions_[j].data<int32_t>()[row] = live ? at : 0;
          slots_[j].data<int32_t>()[row] = live ? slot(r, at) : -1;
        }
      }
    }
    for (; row < rows_of(kind_); ++row) slots_[0].data<int32_t>()[row] = 5;  // must not be stored
  }

  void run(Stream stream) {
    for (size_t j = 0; j < plans_.size(); ++j) {
      backend_.begin_step(batch(j), &plans_[j], stream);
    }
    for (size_t j = 0; j < plans_.size(); ++j) {
      for (int64_t l = 0; !is_draft(kind_) && l < kKdaLayers; ++l) forward_kda(l, stream);
      forward_mla(j, stream);
    }
    if (!is_verify(kind_)) return;
    KdaCommitInputs inputs;
    inputs.accepted = accepted_;
    inputs.state = state_;
    inputs.window = window_;
    backend_.commit(plans_[0], inputs, stream);
  }

  // Everything that a step writes and a caller sees, of device memory after its stream is done.
  std::vector<uint8_t> results(const Device& device) const {
    std::vector<uint8_t> all = pools();
    const auto add = [&](const Tensor& tensor) {
      all.insert(all.end(), tensor.bytes().begin(), tensor.bytes().end());
    };
    for (const KdaInputs& in : kda_) add(in.out);
    for (const MlaInputs& in : mla_) add(in.out), add(in.lse);
    for (const KdaStepPlan& plan : plans_) {
      const MetadataFields& fields = plan.metadata();
      for (const TensorView* field : {&fields.kv_len, &fields.q_indptr, &fields.row_to_request}) {
        std::vector<uint8_t> bytes(static_cast<size_t>(field->num_elements()) * 4);
        copy_bytes(bytes.data(), Device::cpu(1), field->data, device, bytes.size());
        synchronize(device);
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    }
    return all;
  }

  std::vector<uint8_t> pools() const {
    std::vector<uint8_t> all;
    for (const Tensor* pool : {&state_, &window_, &kv_pool_}) {
      all.insert(all.end(), pool->bytes().begin(), pool->bytes().end());
    }
    return all;
  }

  void forget_results() {
    for (KdaInputs& in : kda_) in.out.fill_bytes(0xA5);
    for (MlaInputs& in : mla_) in.out.fill_bytes(0xA5), in.lse.fill_bytes(0xA5);
  }

 private:
  struct KdaInputs {
    Tensor qkv, gate, beta, a_log, weight, out;
  };
  struct MlaInputs {
    Tensor q, k, out, lse;
  };

  // Pages of the requests interleave; page 0 is the dummy.
  static int32_t slot(int64_t request, int64_t position) {
    const int64_t page = 1 + position / kPage * kRequests + request;
    return static_cast<int32_t>(page * kPage + position % kPage);
  }

  KdaBatch batch(size_t j) {
    KdaBatch batch;
    batch.forward.mode = mode_of(kind_);
    batch.forward.seq_len = seq_len_;
    batch.forward.pool_row = pool_row_;
    if (kind_ == Kind::kDraftExtend) batch.forward.ext_len = ext_len_;
    batch.forward.req_to_token = table_;
    batch.forward.positions = positions_[j];
    batch.forward.out_cache_loc = slots_[j];
    batch.forward.num_rows = rows_of(kind_);
    if (kind_ == Kind::kDraftChain) batch.kv_len_delta = static_cast<int32_t>(j) + 1;
    if (is_draft(kind_)) return batch;
    batch.in_slot = in_slot_;
    if (kind_ != Kind::kDecodeInPlace) batch.out_slot = out_slot_;
    batch.has_initial_state = has_state_;
    return batch;
  }

  void forward_kda(int64_t l, Stream stream) {
    KdaInputs& in = kda_[static_cast<size_t>(l)];
    const auto layer_of = [&](Tensor& pool) {
      TensorView view = pool;
      const auto layer_bytes = static_cast<int64_t>(pool.bytes().size()) / kKdaLayers;
      view.data = static_cast<uint8_t*>(view.data) + l * layer_bytes;
      for (int axis = 1; axis < view.rank; ++axis) {
        view.shape[axis - 1] = view.shape[axis];
        view.stride[axis - 1] = view.stride[axis];
      }
      --view.rank;
      return view;
    };
    KdaForwardTensors tensors;
    tensors.qkv = in.qkv;
    tensors.g = in.gate;
    tensors.beta = in.beta;
    tensors.a_log = in.a_log;
    tensors.conv_weight = in.weight;
    tensors.state = layer_of(state_);
    tensors.window = layer_of(window_);
    tensors.out = in.out;
    backend_.forward_kda(plans_[0], l, tensors, stream);
  }

  void forward_mla(size_t j, Stream stream) {
    KdaMlaTensors tensors;
    tensors.q = mla_[j].q;
    tensors.k = mla_[j].k;
    tensors.kv_pool = kv_pool_;
    // The first forward of a scale makes its plan, also while it is being captured.
    tensors.softmax_scale = 0.07f;
    tensors.out = mla_[j].out;
    tensors.lse = mla_[j].lse;
    backend_.forward_mla(plans_[j], tensors, stream);
  }

  KdaBackend& backend_;
  Kind kind_;
  std::vector<KdaStepPlan> plans_;
  std::vector<Tensor> positions_, slots_;
  std::array<KdaInputs, kKdaLayers> kda_;
  std::vector<MlaInputs> mla_;
  Tensor seq_len_{DType::kI32, {kRequests}}, ext_len_{DType::kI32, {kRequests}};
  Tensor pool_row_{DType::kI32, {kRequests}}, table_{DType::kI32, {kRequests, kWidth}};
  Tensor in_slot_{DType::kI32, {kRequests}}, out_slot_{DType::kI32, {kRequests}};
  Tensor has_state_{DType::kU8, {kRequests}}, accepted_{DType::kI32, {kRequests}};
  Tensor state_, window_, kv_pool_;
};

std::vector<int32_t> lengths_of(int turn, test::Rng& rng) {
  if (turn % 10 == 9) return {0, 0, 0, 0};
  std::vector<int32_t> lengths;
  for (int64_t r = 0; r < kRequests; ++r) {
    lengths.push_back(static_cast<int32_t>(rng.integer(0, kWidth - kRowsPerRequest - 1)));
  }
  if (turn % 4 == 1) std::sort(lengths.begin(), lengths.end());  // and shrinking afterwards
  return lengths;
}

class KdaStepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, KdaStepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(KdaStepGraph, AHundredReplaysEqualEagerSteps) {
  for (const Kind kind : kKinds) {
    KdaBackend captured_backend(config_of(kind), device_), eager_backend(config_of(kind), device_);
    EngineStep captured(captured_backend, kind, 7), eager(eager_backend, kind, 7);
    const OwnedStream stream(device_);
    captured.set({1, 1, 1, 1}, 0);
    const Graph graph =
        Graph::capture(device_, stream, [&](Stream on) { captured.run(on); });  // the first call
    test::Rng rng(3);
    for (int turn = 0; turn < 100; ++turn) {
      const std::vector<int32_t> lengths = lengths_of(turn, rng);
      for (EngineStep* const step : {&captured, &eager}) {
        step->set(lengths, turn);
        step->forget_results();
      }
      const std::vector<uint8_t> before = captured.pools();
      graph.launch(stream);
      stream.synchronize();
      eager.run(stream);
      stream.synchronize();
      ASSERT_TRUE(captured.results(device_) == eager.results(device_))
          << "kind " << static_cast<int>(kind) << ", turn " << turn;
      ASSERT_EQ(captured.pools() == before, turn % 10 == 9) << "turn " << turn;
    }
  }
}

TEST_P(KdaStepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  KdaBackend backend(config_of(Kind::kVerify), device_), other(config_of(Kind::kVerify), device_);
  EngineStep decode(backend, Kind::kDecode, 1), verify(backend, Kind::kVerify, 2);
  EngineStep alone_decode(other, Kind::kDecode, 1), alone_verify(other, Kind::kVerify, 2);
  const OwnedStream stream(device_);
  const Graph graphs[] = {Graph::capture(device_, stream, [&](Stream on) { decode.run(on); }),
                          Graph::capture(device_, stream, [&](Stream on) { verify.run(on); })};
  test::Rng rng(4);
  for (int round = 0; round < 10; ++round) {
    const std::vector<int32_t> first = lengths_of(2 * round, rng);
    const std::vector<int32_t> second = lengths_of(2 * round + 1, rng);
    for (EngineStep* const step : {&decode, &alone_decode}) step->set(first, round);
    for (EngineStep* const step : {&verify, &alone_verify}) step->set(second, round);
    graphs[0].launch(stream);
    graphs[1].launch(stream);
    stream.synchronize();
    alone_verify.run({});
    alone_decode.run({});
    synchronize(device_);
    ASSERT_TRUE(decode.results(device_) == alone_decode.results(device_)) << round;
    ASSERT_TRUE(verify.results(device_) == alone_verify.results(device_)) << round;
  }
}

TEST_P(KdaStepGraph, TwoBackendsOnTwoStreamsAtOnce) {
  KdaBackend backends[2] = {{config_of(Kind::kDecode), device_},
                            {config_of(Kind::kVerify), device_}};
  KdaBackend other(config_of(Kind::kVerify), device_);
  EngineStep steps[2] = {{backends[0], Kind::kDecode, 5}, {backends[1], Kind::kVerify, 6}};
  EngineStep alone[2] = {{other, Kind::kDecode, 5}, {other, Kind::kVerify, 6}};
  const OwnedStream streams[2] = {OwnedStream(device_), OwnedStream(device_)};
  const auto capture = [&](int i) {
    return Graph::capture(device_, streams[i], [&steps, i](Stream on) { steps[i].run(on); });
  };
  const Graph graphs[2] = {capture(0), capture(1)};
  test::Rng rng(5);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 2; ++i) {
      const std::vector<int32_t> lengths = lengths_of(2 * round + i, rng);
      steps[i].set(lengths, round);
      alone[i].set(lengths, round);
    }
    for (int i = 0; i < 2; ++i) {
      if (round % 2 == 0) graphs[i].launch(streams[i]);
      if (round % 2 == 1) steps[i].run(streams[i]);
    }
    for (int i = 0; i < 2; ++i) {
      streams[i].synchronize();
      alone[i].run({});
      synchronize(device_);
      ASSERT_TRUE(steps[i].results(device_) == alone[i].results(device_))
          << "round " << round << ", step " << i;
    }
  }
}

// A kernel that does not end is in front of everything; plans of steps and whole steps must come
// back all the same.
TEST_P(KdaStepGraph, NothingWaitsForTheDevice) {
  if (device_.kind == DeviceKind::kCuda && test::launches_block()) {
    EXPECT_TRUE(test::passes_without_blocking());
    return;
  }
  for (const Kind kind : {Kind::kDecode, Kind::kDecodeInPlace}) {
    KdaBackend backend(config_of(kind), device_), other(config_of(kind), device_);
    EngineStep step(backend, kind, 8), alone(other, kind, 8);
    for (EngineStep* const each : {&step, &alone}) each->set({40, 3, 0, 50}, 1);
    // A kernel is loaded at its first launch, which may wait for those that run.
    const StepBucket verify{ForwardMode::kTargetVerify, kRequests, 3};
    other.make_step_plan(verify);
    alone.run({});
    synchronize(device_);
    const OwnedStream stream(device_);
    std::vector<OperatorCall> calls;
    backend.set_profile(&calls);
    {
      test::Spinner spinner(device_, stream);
      step.run(stream);
      const KdaStepPlan more = backend.make_step_plan(verify);
      EXPECT_EQ(more.bucket().mode, ForwardMode::kTargetVerify);
      EXPECT_FALSE(spinner.has_ended()) << "something waited until the time was up";
      EXPECT_EQ(calls.empty(), device_.kind == DeviceKind::kCuda);
    }
    stream.synchronize();
    EXPECT_TRUE(step.results(device_) == alone.results(device_));
    backend.set_profile(nullptr);
    // A refresh; convolve, verify, commit or convolve, decode; pack, attend, clear.
    ASSERT_EQ(calls.size(), 1u + (kind == Kind::kDecode ? 3u : 2u) * kKdaLayers + 3u);
    for (const OperatorCall& call : calls) EXPECT_GE(call.elapsed_ms, 0) << call.name;
  }
}

// Every launch of a step fails once, operators and kernels: the step that is run again is right.
template <class Fault>
void expect_repeatable(Kind kind, const Device& device) {
  KdaBackendConfig config = config_of(kind);
  config.strict = true;
  KdaBackend backend(config, device), other(config, device);
  EngineStep step(backend, kind, 9), alone(other, kind, 9);
  for (EngineStep* const each : {&step, &alone}) each->set({40, 3, 7, 50}, 1);
  const std::vector<uint8_t> before = alone.pools();
  alone.run({});
  synchronize(device);
  int failures = 0;
  for (int64_t nth = 1;; ++nth) {
    const Fault fault(nth);
    try {
      step.run({});
      synchronize(device);
      break;
    } catch (const Error& error) {
      synchronize(device);
      ++failures;
      EXPECT_TRUE(fault.fired());
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_THAT(error.what(), HasSubstr("failed"));
      if (nth == 1) {
        EXPECT_TRUE(step.pools() == before) << error.what();
      }
    }
  }
  EXPECT_GE(failures, kind == Kind::kDraftExtend ? 5 : 9);
  EXPECT_TRUE(step.results(device) == alone.results(device)) << static_cast<int>(kind);
}

TEST_P(KdaStepGraph, AFailedLaunchLeavesTheNextStepAlone) {
  for (const Kind kind : kKinds) {
    if (kind == Kind::kDecodeInPlace) continue;  // its layers advance one by one
    expect_repeatable<internal::LaunchFault>(kind, device_);
    if (device_.kind == DeviceKind::kCuda) expect_repeatable<internal::KernelFault>(kind, device_);
  }
}

class KdaMemory : public test::DeviceSuite {
 protected:
  void TearDown() override { set_memory_resource(device_, nullptr); }

  std::shared_ptr<test::LimitedMemory> limit(size_t bytes) {
    const auto memory = std::make_shared<test::LimitedMemory>(device_, bytes);
    set_memory_resource(device_, memory);
    return memory;
  }

  // Tries `make` with 16 limits below what it needs.
  template <class Make>
  void expect_refusals(test::LimitedMemory* memory, size_t needed, const Make& make) {
    ASSERT_GT(needed, 0u);
    for (size_t bytes = 0; bytes < needed; bytes += needed / 16 + 1) {
      memory->left = bytes;
      try {
        make();
        ADD_FAILURE() << bytes << " of " << needed;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("kda_backend: "));
        EXPECT_THAT(error.what(), HasSubstr("bytes asked"));
        if (device_.kind == DeviceKind::kCuda) {
          EXPECT_THAT(error.what(), HasSubstr("free"));
        }
      }
      EXPECT_EQ(memory->left, bytes);
    }
    memory->left = needed;
    make();
    EXPECT_EQ(memory->left, needed);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, KdaMemory, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(KdaMemory, ABackendOrStepPlanThatDoesNotFitSaysSoAndLeaksNothing) {
  constexpr size_t kPlenty = size_t{1} << 30;
  const auto memory = limit(kPlenty);
  const auto make_backend = [&] { const KdaBackend made(config_of(Kind::kVerify), device_); };
  {
    std::optional<KdaBackend> backend(std::in_place, config_of(Kind::kVerify), device_);
    const size_t before = memory->left, needed = kPlenty - before;
    const auto make_plan = [&] {
      const KdaStepPlan plan = backend->make_step_plan({ForwardMode::kTargetVerify, 4, 3});
    };
    size_t plan_bytes = 0;
    {
      const KdaStepPlan plan = backend->make_step_plan({ForwardMode::kTargetVerify, 4, 3});
      plan_bytes = before - memory->left;
    }
    EXPECT_EQ(memory->left, before);
    expect_refusals(memory.get(), plan_bytes, make_plan);
    memory->left = before;
    backend.reset();
    EXPECT_EQ(memory->left, kPlenty);
    expect_refusals(memory.get(), needed, make_backend);
  }
}

}  // namespace
}  // namespace fovea
