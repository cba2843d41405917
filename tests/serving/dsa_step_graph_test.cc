#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/index_cache.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "fovea/stream.h"
#include "src/core/fault_injection.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/rng.h"
#include "tests/support/spinner.h"

// Whole steps, begin_step and the forwards of all layers, submitted to a stream: by themselves and
// from graphs. Device memory is the device's own here.
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
  void set_lengths(const std::vector<int32_t>& lengths) {
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

std::vector<int32_t> lengths_of(int replay, test::Rng& rng) {
  if (replay % 10 == 9) return {0, 0, 0, 0};
  std::vector<int32_t> lengths;
  for (int64_t r = 0; r < kRequests; ++r) {
    lengths.push_back(static_cast<int32_t>(rng.integer(0, kWidth - kRowsPerRequest - 1)));
  }
  if (replay % 4 == 1) std::sort(lengths.begin(), lengths.end());  // and shrinking afterwards
  if (replay % 3 == 0) lengths[1] = 8;                             // topk
  return lengths;
}

class DsaStepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, DsaStepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(DsaStepGraph, AHundredReplaysEqualEagerSteps) {
  for (const Kind kind : kKinds) {
    DsaBackend captured_backend(step_config(), device_), eager_backend(step_config(), device_);
    EngineStep captured(captured_backend, kind, 7), eager(eager_backend, kind, 7);
    const OwnedStream stream(device_);
    captured.set_lengths({1, 1, 1, 1});
    const Graph graph =
        Graph::capture(device_, stream, [&](Stream on) { captured.run(on); });  // the first call
    test::Rng rng(3);
    for (int replay = 0; replay < 100; ++replay) {
      const std::vector<int32_t> lengths = lengths_of(replay, rng);
      for (EngineStep* const step : {&captured, &eager}) {
        step->set_lengths(lengths);
        step->forget_results();
      }
      graph.launch(stream);
      stream.synchronize();
      eager.run(stream);
      stream.synchronize();
      ASSERT_TRUE(captured.results(device_) == eager.results(device_))
          << "kind " << static_cast<int>(kind) << ", replay " << replay;
    }
  }
}

TEST_P(DsaStepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  DsaBackend backend(step_config(), device_), other(step_config(), device_);
  EngineStep decode(backend, Kind::kDecode, 1), verify(backend, Kind::kVerify, 2);
  EngineStep alone_decode(other, Kind::kDecode, 1), alone_verify(other, Kind::kVerify, 2);
  const OwnedStream stream(device_);
  const Graph graphs[] = {Graph::capture(device_, stream, [&](Stream on) { decode.run(on); }),
                          Graph::capture(device_, stream, [&](Stream on) { verify.run(on); })};
  test::Rng rng(4);
  for (int round = 0; round < 10; ++round) {
    const std::vector<int32_t> lengths[] = {lengths_of(2 * round, rng),
                                            lengths_of(2 * round + 1, rng)};
    decode.set_lengths(lengths[0]);
    verify.set_lengths(lengths[1]);
    alone_decode.set_lengths(lengths[0]);
    alone_verify.set_lengths(lengths[1]);
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

TEST_P(DsaStepGraph, TwoBackendsOnTwoStreamsAtOnce) {
  DsaBackend backends[2] = {{step_config(), device_}, {step_config(), device_}};
  DsaBackend other(step_config(), device_);
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
      steps[i].set_lengths(lengths);
      alone[i].set_lengths(lengths);
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

// A kernel that does not end is in front of everything; plans, plans of steps and whole steps must
// come back all the same.
TEST_P(DsaStepGraph, NothingWaitsForTheDevice) {
  if (device_.kind == DeviceKind::kCuda && test::launches_block()) {
    EXPECT_TRUE(test::passes_without_blocking());
    return;
  }
  DsaBackend backend(step_config(), device_), other(step_config(), device_);
  EngineStep step(backend, Kind::kDecode, 8), alone(other, Kind::kDecode, 8);
  step.set_lengths({40, 3, 0, 99});
  alone.set_lengths({40, 3, 0, 99});
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
    const DsaStepPlan more = backend.make_step_plan(verify);
    const SparseMla plan = SparseMla::plan({.max_rows = 4,
                                            .num_heads = 4,
                                            .topk = 8,
                                            .softmax_scale = 1,
                                            .row_format = RowFormat::kV32,
                                            .page_size = kPage},
                                           device_);
    EXPECT_EQ(more.bucket().mode, ForwardMode::kTargetVerify);
    EXPECT_EQ(plan.problem().topk, 8);
    EXPECT_FALSE(spinner.has_ended()) << "something waited until the time was up";
    EXPECT_EQ(calls.empty(), device_.kind == DeviceKind::kCuda);
  }
  stream.synchronize();
  EXPECT_TRUE(step.results(device_) == alone.results(device_));
  backend.set_profile(nullptr);
  // A refresh, and quantise, pack, store, select, attend of every layer.
  ASSERT_EQ(calls.size(), 1u + 5u * kLayers);
  for (const OperatorCall& call : calls) EXPECT_GE(call.elapsed_ms, 0) << call.name;
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
  verified.set_lengths({40, 3, 0, 99});
  verified.run(stream);  // the stream is usable, the metadata are right
  stream.synchronize();
}

// Every launch of a step fails once: the error names an operator, the pools hold what they held or
// what a whole operator wrote, and the next step is right.
TEST_P(DsaStepGraph, AFailedLaunchLeavesThePoolsAndTheNextStepAlone) {
  for (const Kind kind : kKinds) {
    DsaConfig config = step_config();
    config.strict = true;
    DsaBackend backend(config, device_), other(config, device_);
    EngineStep step(backend, kind, 9), alone(other, kind, 9);
    alone.set_lengths({40, 3, 7, 99});
    const std::vector<uint8_t> before = alone.pools();
    alone.run({});
    synchronize(device_);
    step.set_lengths({40, 3, 7, 99});
    int failures = 0;
    for (int64_t nth = 1;; ++nth) {
      const internal::LaunchFault fault(nth);
      try {
        step.run({});
        synchronize(device_);
        break;
      } catch (const Error& error) {
        synchronize(device_);
        ++failures;
        EXPECT_TRUE(fault.fired());
        EXPECT_EQ(error.code(), ErrorCode::kDevice);
        EXPECT_NE(std::string(error.what()).find("launch failed"), std::string::npos);
        // Before anything is stored.
        if (nth <= 2) {
          EXPECT_TRUE(step.pools() == before) << error.what();
        }
      }
    }
    EXPECT_GT(failures, 10);
    EXPECT_TRUE(step.results(device_) == alone.results(device_)) << static_cast<int>(kind);
  }
}

}  // namespace
}  // namespace fovea
