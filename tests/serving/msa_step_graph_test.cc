#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/msa_backend.h"
#include "tests/serving/step_graphs.h"
#include "tests/support/memory.h"

// Whole steps, begin_step and the forwards of all layers: tests/serving/step_graphs.h.
namespace fovea {
namespace {

using test::Tensor;

enum class Kind { kDecode, kDecodeCut, kVerify, kDraftExtend, kDraftChain };
constexpr Kind kKinds[] = {Kind::kDecode, Kind::kDecodeCut, Kind::kVerify, Kind::kDraftExtend,
                           Kind::kDraftChain};
constexpr int64_t kRequests = 8, kRowsPerRequest = 3, kWidth = 96, kPage = 8, kDrafts = 3;
constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 64, kTopk = 4;
constexpr int64_t kSlots = (1 + kRequests * kWidth / kPage) * kPage;
// The first layer is dense.
constexpr size_t kLayers = 3;

ForwardMode mode_of(Kind kind) {
  if (kind == Kind::kVerify) return ForwardMode::kTargetVerify;
  return kind == Kind::kDraftExtend ? ForwardMode::kDraftExtend : ForwardMode::kDecode;
}

int64_t rows_of(Kind kind) {
  const bool many = kind == Kind::kVerify || kind == Kind::kDraftExtend;
  return many ? kRequests * kRowsPerRequest : kRequests;
}

class EngineStep {
 public:
  static constexpr int64_t kRequests = fovea::kRequests, kWidth = fovea::kWidth,
                           kRowsPerRequest = fovea::kRowsPerRequest;

  EngineStep(MsaBackend& backend, Kind kind, uint64_t seed) : backend_(backend), kind_(kind) {
    const int64_t rows = rows_of(kind), steps = kind == Kind::kDraftChain ? kDrafts : 1;
    for (int64_t i = 0; i < steps; ++i) {
      plans_.push_back(backend.make_step_plan({mode_of(kind), kRequests, rows / kRequests}));
      positions_.emplace_back(DType::kI32, std::initializer_list<int64_t>{rows});
      slots_.emplace_back(DType::kI32, std::initializer_list<int64_t>{rows});
    }
    test::Rng rng(seed);
    const auto bf16s = [&](std::initializer_list<int64_t> shape, int64_t count) {
      return Tensor::bf16(shape, rng.bf16_normals(count));
    };
    for (size_t i = 0; i < plans_.size() * kLayers; ++i) {
      Inputs in;
      in.q = bf16s({rows, kHeads, kDim}, rows * kHeads * kDim);
      in.k = bf16s({rows, kKvHeads, kDim}, rows * kKvHeads * kDim);
      in.v = bf16s({rows, kKvHeads, kDim}, rows * kKvHeads * kDim);
      in.index_q = bf16s({rows, kKvHeads, kDim}, rows * kKvHeads * kDim);
      in.index_k = bf16s({rows, kDim}, rows * kDim);
      in.blocks = Tensor(DType::kI32, {kKvHeads, rows, kTopk});
      in.out = Tensor(DType::kBf16, {rows, kHeads, kDim});
      in.lse = Tensor(DType::kF32, {rows, kHeads});
      inputs_.push_back(std::move(in));
    }
    for (Pools& pools : pools_) {
      pools.k = bf16s({kSlots, kKvHeads, kDim}, kSlots * kKvHeads * kDim);
      pools.v = bf16s({kSlots, kKvHeads, kDim}, kSlots * kKvHeads * kDim);
      pools.index = bf16s({kSlots, 1, kDim}, kSlots * kDim);
    }
  }

  // Every `turn` gives the requests other pages, and other rows of the table.
  void set(const std::vector<int32_t>& lengths, int turn) {
    int64_t row = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      const int64_t owner = (r + turn) % kRequests;
      pool_row_.data<int32_t>()[r] = static_cast<int32_t>(owner);
      for (int64_t p = 0; p < kWidth; ++p) {
        table_.data<int32_t>()[owner * kWidth + p] = slot(owner, p, turn);
      }
      const int32_t committed = lengths[static_cast<size_t>(r)];
      const bool live = committed > 0;
      const auto extend = static_cast<int32_t>(live ? 1 + committed % kRowsPerRequest : 0);
      const bool decodes = kind_ == Kind::kDecode || kind_ == Kind::kDecodeCut;
      int32_t given = committed;
      if (decodes && live) given += 1;
      if (kind_ == Kind::kDraftExtend) given += extend;
      seq_len_.data<int32_t>()[r] = given;
      ext_len_.data<int32_t>()[r] = extend;
      const int64_t rows =
          kind_ == Kind::kDraftExtend ? int64_t{extend} : rows_of(kind_) / kRequests;
      for (int64_t i = 0; i < rows; ++i, ++row) {
        for (size_t j = 0; j < plans_.size(); ++j) {
          const auto at = static_cast<int32_t>(committed + i + static_cast<int64_t>(j));
          positions_[j].data<int32_t>()[row] = live ? at : 0;
          slots_[j].data<int32_t>()[row] = live ? slot(owner, at, turn) : -1;
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
      for (size_t l = 0; l < kLayers; ++l) {
        const MsaForwardTensors layer = tensors(j, l);
        l == 0 ? backend_.forward_dense(plans_[j], layer, stream)
               : backend_.forward(plans_[j], layer, stream);
      }
    }
  }

  // Of device memory after its stream is done.
  std::vector<uint8_t> results(const Device& device) const {
    std::vector<uint8_t> all = pools();
    for (const Inputs& in : inputs_) {
      for (const Tensor* tensor : {&in.blocks, &in.out, &in.lse}) add(*tensor, &all);
    }
    for (const MsaStepPlan& plan : plans_) {
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
    for (const Pools& pools : pools_) {
      for (const Tensor* pool : {&pools.k, &pools.v, &pools.index}) add(*pool, &all);
    }
    return all;
  }

  void forget_results() {
    for (Inputs& in : inputs_) {
      for (Tensor* tensor : {&in.blocks, &in.out, &in.lse}) tensor->fill_bytes(0xA5);
    }
  }

 private:
  struct Inputs {
    Tensor q, k, v, index_q, index_k, blocks, out, lse;
  };
  struct Pools {
    Tensor k, v, index;
  };

  static void add(const Tensor& tensor, std::vector<uint8_t>* all) {
    all->insert(all->end(), tensor.bytes().begin(), tensor.bytes().end());
  }

  // Pages of the requests interleave, and change places; page 0 is the dummy.
  static int32_t slot(int64_t owner, int64_t position, int turn) {
    const int64_t page = 1 + position / kPage * kRequests + (owner * 3 + turn) % kRequests;
    return static_cast<int32_t>(page * kPage + position % kPage);
  }

  MsaBatch batch(size_t j) {
    MsaBatch batch;
    batch.forward.mode = mode_of(kind_);
    batch.forward.seq_len = seq_len_;
    batch.forward.pool_row = pool_row_;
    if (kind_ == Kind::kDraftExtend) batch.forward.ext_len = ext_len_;
    batch.forward.req_to_token = table_;
    batch.forward.positions = positions_[j];
    batch.forward.out_cache_loc = slots_[j];
    batch.forward.num_rows = rows_of(kind_);
    if (kind_ == Kind::kDraftChain) batch.kv_len_delta = static_cast<int32_t>(j) + 1;
    return batch;
  }

  MsaForwardTensors tensors(size_t step, size_t layer) {
    Inputs& in = inputs_[step * kLayers + layer];
    Pools& pools = pools_[layer];
    MsaForwardTensors tensors;
    tensors.q = in.q;
    tensors.k = in.k;
    tensors.v = in.v;
    tensors.k_pool = pools.k;
    tensors.v_pool = pools.v;
    tensors.out = in.out;
    tensors.lse = in.lse;
    if (layer == 0) return tensors;
    tensors.index_q = in.index_q;
    tensors.index_k = in.index_k;
    tensors.index_pool = pools.index;
    // The last layer's lists stay in the backend.
    if (layer + 1 < kLayers) tensors.blocks = in.blocks;
    return tensors;
  }

  MsaBackend& backend_;
  Kind kind_;
  std::vector<MsaStepPlan> plans_;
  std::vector<Tensor> positions_, slots_;
  std::vector<Inputs> inputs_;  // [step][layer]
  std::array<Pools, kLayers> pools_;
  Tensor seq_len_{DType::kI32, {kRequests}}, ext_len_{DType::kI32, {kRequests}};
  Tensor pool_row_{DType::kI32, {kRequests}}, table_{DType::kI32, {kRequests, kWidth}};
};

struct MsaModel {
  using Backend = MsaBackend;
  using Kind = fovea::Kind;
  using Step = EngineStep;

  static MsaBackend backend(Kind kind, const Device& device, bool strict = false) {
    MsaBackendConfig config;
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = config.index_dim = kDim;
    config.block_size = kPage;
    config.topk = kTopk;
    config.init_blocks = 1;
    config.dense_layers = true;
    config.table_width = kWidth;
    config.max_requests = kRequests;
    config.max_rows = kRequests * kRowsPerRequest;
    config.rows_per_request = kRowsPerRequest;
    config.deterministic = kind != Kind::kDecodeCut;
    config.strict = strict;
    return {config, device};
  }
};

const std::vector<int32_t> kLengths = {40, 3, 7, 91, 0, 8, 64, 31};

class MsaStepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, MsaStepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(MsaStepGraph, ReplaysEqualEagerSteps) {
  // A graph of the CPU calls what was captured.
  const int turns = device_.kind == DeviceKind::kCuda ? 100 : 30;
  for (const Kind kind : kKinds) {
    test::expect_replays_equal_eager_steps<MsaModel>(kind, device_, turns);
  }
}

TEST_P(MsaStepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  test::expect_captured_steps_in_turn<MsaModel>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(MsaStepGraph, TwoBackendsOnTwoStreamsAtOnce) {
  test::expect_steps_on_two_streams<MsaModel>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(MsaStepGraph, NothingWaitsForTheDevice) {
  // A refresh; k, v, attention of every layer; index keys and a selection of the sparse ones.
  constexpr size_t kCalls = 1 + 3 * kLayers + 2 * (kLayers - 1);
  for (const Kind kind : {Kind::kDecode, Kind::kDecodeCut}) {
    test::expect_no_wait<MsaModel>(kind, kLengths, kCalls, device_);
  }
}

TEST_P(MsaStepGraph, AFailedLaunchLeavesTheNextStepAlone) {
  for (const Kind kind : kKinds) {
    test::expect_repeatable_steps<MsaModel>(kind, kLengths, 14, device_);
  }
}

class MsaMemory : public test::LimitedDeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, MsaMemory, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(MsaMemory, ABackendOrStepPlanThatDoesNotFitSaysSoAndLeaksNothing) {
  for (const Kind kind : {Kind::kVerify, Kind::kDecodeCut}) {
    expect_out_of_memory<MsaModel>("msa_backend", kind);
  }
}

}  // namespace
}  // namespace fovea
