#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/kda_backend.h"
#include "fovea/numeric.h"
#include "tests/serving/step_graphs.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

// Whole steps, begin_step, the forwards of all layers and the commit: tests/serving/step_graphs.h.
namespace fovea {
namespace {

using test::Tensor;

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
  static constexpr int64_t kRequests = fovea::kRequests, kWidth = fovea::kWidth,
                           kRowsPerRequest = fovea::kRowsPerRequest;

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

struct KdaModel {
  using Backend = KdaBackend;
  using Kind = fovea::Kind;
  using Step = EngineStep;

  static KdaBackend backend(Kind kind, const Device& device, bool strict = false) {
    KdaBackendConfig config = config_of(kind);
    config.strict = strict;
    return {config, device};
  }
};

class KdaStepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, KdaStepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(KdaStepGraph, AHundredReplaysEqualEagerSteps) {
  for (const Kind kind : kKinds) {
    test::expect_replays_equal_eager_steps<KdaModel>(kind, device_, 100);
  }
}

TEST_P(KdaStepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  test::expect_captured_steps_in_turn<KdaModel>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(KdaStepGraph, TwoBackendsOnTwoStreamsAtOnce) {
  test::expect_steps_on_two_streams<KdaModel>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(KdaStepGraph, NothingWaitsForTheDevice) {
  for (const Kind kind : {Kind::kDecode, Kind::kDecodeInPlace}) {
    // A refresh; convolve, verify, commit or convolve, decode; pack, attend, clear.
    const size_t calls = 1u + (kind == Kind::kDecode ? 3u : 2u) * kKdaLayers + 3u;
    test::expect_no_wait<KdaModel>(kind, {40, 3, 0, 50}, calls, device_);
  }
}

TEST_P(KdaStepGraph, AFailedLaunchLeavesTheNextStepAlone) {
  for (const Kind kind : kKinds) {
    if (kind == Kind::kDecodeInPlace) continue;  // its layers advance one by one
    test::expect_repeatable_steps<KdaModel>(kind, {40, 3, 7, 50},
                                            kind == Kind::kDraftExtend ? 5 : 9, device_);
  }
}

class KdaMemory : public test::LimitedDeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, KdaMemory, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(KdaMemory, ABackendOrStepPlanThatDoesNotFitSaysSoAndLeaksNothing) {
  expect_out_of_memory<KdaModel>("kda_backend", Kind::kVerify);
}

}  // namespace
}  // namespace fovea
