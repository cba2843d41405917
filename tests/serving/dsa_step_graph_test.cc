#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/index_cache.h"
#include "fovea/row_codec.h"
#include "fovea/stream.h"
#include "tests/serving/dsa_rig.h"
#include "tests/serving/step_graphs.h"
#include "tests/support/rng.h"

// Whole steps, begin_step and the forwards of all layers: tests/serving/step_graphs.h.
namespace fovea {
namespace {

using test::DsaRig;
using test::Tensor;
constexpr int64_t kRequests = 4, kRowsPerRequest = 3, kLayers = 2, kWidth = 128, kPage = 4;
constexpr int64_t kDrafts = 3;

enum class Kind { kDecode, kVerify, kDraftExtend, kDraftChain };
constexpr Kind kKinds[] = {Kind::kDecode, Kind::kVerify, Kind::kDraftExtend, Kind::kDraftChain};

ForwardMode mode_of(Kind kind) {
  if (kind == Kind::kVerify) return ForwardMode::kTargetVerify;
  if (kind == Kind::kDraftExtend) return ForwardMode::kDraftExtend;
  return ForwardMode::kDecode;
}

int64_t rows_of(Kind kind) {
  const bool many = kind == Kind::kVerify || kind == Kind::kDraftExtend;
  return many ? kRequests * kRowsPerRequest : kRequests;
}

DsaConfig step_config() {
  DsaConfig config = DsaRig::small_config(kPage, RowFormat::kV32);
  config.max_requests = kRequests;
  config.max_rows = kRequests * kRowsPerRequest;
  config.rows_per_request = kRowsPerRequest;
  config.table_width = kWidth;
  return config;
}

// The step of an engine whose buffers live on: the inputs of every forward are fixed, lengths,
// positions and slots are what a replay changes.
class EngineStep {
 public:
  static constexpr int64_t kRequests = fovea::kRequests, kWidth = fovea::kWidth,
                           kRowsPerRequest = fovea::kRowsPerRequest;

  EngineStep(DsaBackend& backend, Kind kind, uint64_t seed) : backend_(backend), kind_(kind) {
    const int64_t steps = kind == Kind::kDraftChain ? kDrafts : 1;
    for (int64_t i = 0; i < steps; ++i) {
      plans_.push_back(
          backend.make_step_plan({mode_of(kind), kRequests, rows_of(kind) / kRequests}));
      positions_.emplace_back(DType::kI32, std::initializer_list<int64_t>{rows_of(kind)});
      slots_.emplace_back(DType::kI32, std::initializer_list<int64_t>{rows_of(kind)});
    }
    test::Rng rng(seed);
    for (int64_t r = 0; r < kRequests; ++r) {
      pool_row_.data<int32_t>()[r] = static_cast<int32_t>(r);
      for (int64_t p = 0; p < kWidth; ++p) {
        table_.data<int32_t>()[r * kWidth + p] = slot(r, p);
      }
    }
    const int64_t rows = rows_of(kind);
    for (int64_t i = 0; i < steps * kLayers; ++i) {
      Layer layer;
      layer.q = Tensor::bf16({rows, 4, 576}, rng.bf16_normals(rows * 4 * 576));
      layer.k = Tensor::bf16({rows, 576}, rng.bf16_normals(rows * 576));
      layer.index_q = Tensor::bf16({rows, 4, 128}, rng.bf16_normals(rows * 4 * 128));
      layer.index_k = Tensor::bf16({rows, 128}, rng.bf16_normals(rows * 128));
      layer.gate = Tensor::f32({rows, 4}, rng.normals(rows * 4));
      layer.out = Tensor(DType::kBf16, {rows, 4, 512});
      layer.lse = Tensor(DType::kF32, {rows, 4});
      layer.indices = Tensor(DType::kI32, {rows, 8});
      layers_.push_back(layer);
    }
    for (Tensor& pool : kv_pool_) pool = random_pool(rng, 656);
    for (Tensor& pool : index_pool_) pool = random_pool(rng, 132);
  }

  // Committed tokens of each request; 0: no request, nothing is stored.
  void set(std::vector<int32_t> lengths, int turn) {
    if (turn % 3 == 0 && lengths[1] > 0) lengths[1] = 8;  // topk
    for (int64_t r = 0; r < kRequests; ++r) {
      const int32_t committed = lengths[static_cast<size_t>(r)];
      const bool live = committed > 0;
      ext_len_.data<int32_t>()[r] =
          live ? static_cast<int32_t>(1 + committed % kRowsPerRequest) : 0;
      int32_t given = committed;
      if (kind_ == Kind::kDecode && live) given += 1;
      if (kind_ == Kind::kDraftExtend) given += ext_len_.data<int32_t>()[r];
      seq_len_.data<int32_t>()[r] = given;
    }
    int64_t row = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      const int32_t committed = lengths[static_cast<size_t>(r)];
      int64_t rows = rows_of(kind_) / kRequests;
      if (kind_ == Kind::kDraftExtend) rows = ext_len_.data<int32_t>()[r];
      for (int64_t i = 0; i < rows; ++i, ++row) {
        for (size_t j = 0; j < plans_.size(); ++j) {
          const auto at = static_cast<int32_t>(committed + i + static_cast<int64_t>(j));
          positions_[j].data<int32_t>()[row] = committed > 0 ? at : 0;
          slots_[j].data<int32_t>()[row] = committed > 0 ? slot(r, at) : -1;
        }
      }
    }
    for (; row < rows_of(kind_); ++row) slots_[0].data<int32_t>()[row] = 5;  // must not be stored
  }

  void run(Stream stream) {
    ForwardBatch batch;
    batch.mode = mode_of(kind_);
    batch.seq_len = seq_len_;
    batch.pool_row = pool_row_;
    if (kind_ == Kind::kDraftExtend) batch.ext_len = ext_len_;
    batch.req_to_token = table_;
    batch.num_rows = rows_of(kind_);
    if (kind_ == Kind::kDraftChain) {
      std::array<DraftStep, kDrafts> drafts;
      for (size_t j = 0; j < kDrafts; ++j) drafts[j] = {&plans_[j], positions_[j], slots_[j]};
      backend_.begin_draft_steps(batch, drafts, stream);
    } else {
      batch.positions = positions_[0];
      batch.out_cache_loc = slots_[0];
      backend_.begin_step(batch, &plans_[0], stream);
    }
    for (size_t j = 0; j < plans_.size(); ++j) {
      for (size_t l = 0; l < kLayers; ++l) forward(j, l, stream);
    }
  }

  // Everything that a step writes and a caller sees, of device memory after its stream is done.
  std::vector<uint8_t> results(const Device& device) const {
    std::vector<uint8_t> all;
    for (const Layer& layer : layers_) {
      for (const Tensor* tensor : {&layer.out, &layer.lse, &layer.indices}) {
        all.insert(all.end(), tensor->bytes().begin(), tensor->bytes().end());
      }
    }
    for (size_t l = 0; l < kLayers; ++l) {
      for (const Tensor* pool : {&kv_pool_[l], &index_pool_[l]}) {
        all.insert(all.end(), pool->bytes().begin(), pool->bytes().end());
      }
    }
    for (const DsaStepPlan& plan : plans_) {
      const MetadataFields& fields = plan.metadata();
      for (const TensorView* field : {&fields.kv_len, &fields.kv_indptr, &fields.q_indptr,
                                      &fields.row_len, &fields.topk_length, &fields.schedule}) {
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
    for (size_t l = 0; l < kLayers; ++l) {
      for (const Tensor* pool : {&kv_pool_[l], &index_pool_[l]}) {
        all.insert(all.end(), pool->bytes().begin(), pool->bytes().end());
      }
    }
    return all;
  }

  void forget_results() {
    for (Layer& layer : layers_) {
      for (Tensor* tensor : {&layer.out, &layer.lse, &layer.indices}) tensor->fill_bytes(0xA5);
    }
  }

 private:
  struct Layer {
    Tensor q, k, index_q, index_k, gate, out, lse, indices;
  };

  // Pages of the requests interleave; page 0 is the dummy.
  static int32_t slot(int64_t request, int64_t position) {
    const int64_t page = 1 + position / kPage * kRequests + request;
    return static_cast<int32_t>(page * kPage + position % kPage);
  }
  static constexpr int64_t kPages = 1 + kRequests * kWidth / kPage;

  // Rows that codecs can read: the rows of a prompt.
  Tensor random_pool(test::Rng& rng, int64_t row_bytes) {
    Tensor pool(DType::kU8, {kPages, kPage * row_bytes});
    const bool is_latent = row_bytes == 656;
    const int64_t rows = kPages * kPage;
    std::vector<int32_t> all(static_cast<size_t>(rows));
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
    const Tensor slots = Tensor::i32({rows}, all);
    if (is_latent) {
      const Tensor values = Tensor::bf16({rows, 576}, rng.bf16_normals(rows * 576));
      const PackRows plan = PackRows::plan({rows, RowFormat::kV32, kPage, 576}, Device::cpu(1));
      plan.run({values, slots, pool}, {});
      return pool;
    }
    Tensor codes(DType::kU8, {rows, 128});
    for (int64_t i = 0; i < rows * 128; ++i) {
      // e4m3 below NaN, of both signs
      codes.data<uint8_t>()[i] = static_cast<uint8_t>(rng.integer(0, 0x7E) | (rng.next() & 0x80));
    }
    const Tensor scales = Tensor::f32({rows}, std::vector<float>(static_cast<size_t>(rows), 0.01f));
    IndexStore::plan({rows, 128, kPage}, Device::cpu(1)).run({codes, scales, slots, pool}, {});
    return pool;
  }

  void forward(size_t step, size_t l, Stream stream) {
    Layer& layer = layers_[step * kLayers + l];
    DsaForwardTensors tensors;
    tensors.q = layer.q;
    tensors.k = layer.k;
    tensors.index_q = layer.index_q;
    tensors.index_k = layer.index_k;
    tensors.norm_weight = norm_weight_;
    tensors.norm_bias = norm_bias_;
    tensors.head_gate = layer.gate;
    tensors.cos_sin = cos_sin_;
    tensors.kv_pool = kv_pool_[l];
    tensors.index_pool = index_pool_[l];
    tensors.indices = layer.indices;
    tensors.out = layer.out;
    tensors.lse = layer.lse;
    // The first forward of a scale makes its plans, also while it is being captured.
    const DsaLayer what{static_cast<int64_t>(l), DsaRig::kSoftmaxScale * (l == 0 ? 1.0f : 0.5f)};
    backend_.forward(plans_[step], what, tensors, stream);
  }

  DsaBackend& backend_;
  Kind kind_;
  std::vector<DsaStepPlan> plans_;
  std::vector<Tensor> positions_, slots_;
  std::vector<Layer> layers_;
  Tensor seq_len_{DType::kI32, {kRequests}}, ext_len_{DType::kI32, {kRequests}};
  Tensor pool_row_{DType::kI32, {kRequests}}, table_{DType::kI32, {kRequests, kWidth}};
  std::array<Tensor, kLayers> kv_pool_, index_pool_;
  Tensor cos_sin_ = test::make_cos_sin(kWidth, 64);
  Tensor norm_weight_ = test::make_norm_weight(128), norm_bias_ = test::make_norm_bias(128);
};

struct DsaModel {
  using Backend = DsaBackend;
  using Kind = fovea::Kind;
  using Step = EngineStep;

  static DsaBackend backend(Kind /*kind*/, const Device& device, bool strict = false) {
    DsaConfig config = step_config();
    config.strict = strict;
    return {config, device};
  }
};

class DsaStepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, DsaStepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(DsaStepGraph, AHundredReplaysEqualEagerSteps) {
  for (const Kind kind : kKinds) {
    test::expect_replays_equal_eager_steps<DsaModel>(kind, device_, 100);
  }
}

TEST_P(DsaStepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  test::expect_captured_steps_in_turn<DsaModel>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(DsaStepGraph, TwoBackendsOnTwoStreamsAtOnce) {
  test::expect_steps_on_two_streams<DsaModel>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(DsaStepGraph, NothingWaitsForTheDevice) {
  // A refresh, and quantise, pack, store, select, attend of every layer.
  test::expect_no_wait<DsaModel>(Kind::kDecode, {40, 3, 0, 99}, 1u + 5u * kLayers, device_);
}

// What is captured is not timed, and what waits for the device is refused.
TEST_P(DsaStepGraph, CapturesAreNotProfiledAndVerifiedMetadataIsRefused) {
  if (device_.kind == DeviceKind::kCpu) return;  // a graph of the CPU captures nothing
  const OwnedStream stream(device_);
  DsaBackend backend(step_config(), device_);
  EngineStep step(backend, Kind::kDecode, 8);
  std::vector<OperatorCall> calls;
  backend.set_profile(&calls);
  const Graph graph = Graph::capture(device_, stream, [&](Stream on) { step.run(on); });
  graph.launch(stream);
  stream.synchronize();
  backend.set_profile(nullptr);
  EXPECT_TRUE(calls.empty());
  DsaConfig config = step_config();
  config.verify_metadata = true;
  DsaBackend verifying(config, device_);
  EngineStep verified(verifying, Kind::kDecode, 8);
  try {
    Graph::capture(device_, stream, [&](Stream on) { verified.run(on); });
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("verify_metadata while the stream is being captured"),
              std::string::npos)
        << error.what();
  }
  verified.set({40, 3, 0, 99}, 1);
  verified.run(stream);  // the stream is usable, the metadata are right
  stream.synchronize();
}

TEST_P(DsaStepGraph, AFailedLaunchLeavesTheNextStepAlone) {
  for (const Kind kind : kKinds) {
    test::expect_repeatable_steps<DsaModel>(kind, {40, 3, 7, 99}, 11, device_);
  }
}

}  // namespace
}  // namespace fovea
