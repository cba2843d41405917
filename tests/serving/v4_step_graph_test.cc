#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string_view>
#include <vector>

#include "fovea/row_codec.h"
#include "fovea/stream.h"
#include "fovea/v4_backend.h"
#include "src/core/row_layout.h"
#include "tests/serving/v4_rig.h"
#include "tests/support/devices.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"
#include "tests/support/spinner.h"

// Whole steps, begin_step, the forwards of all layers and the commits, submitted to a stream: by
// themselves and from graphs. Device memory is the device's own here.
namespace fovea {
namespace {

using test::Tensor;

constexpr int64_t kRequests = 4, kRows = 3, kWidth = 512, kPage = 128, kDim = 512;
constexpr int64_t kPages = 1 + kRequests * kWidth / kPage, kSlots = 2 * kRequests + 1;

enum class Kind { kDecode, kDecodeInPlace, kVerify, kVerifyOnline, kVerifyRing, kDraftExtend };
constexpr Kind kKinds[] = {Kind::kDecode,       Kind::kDecodeInPlace, Kind::kVerify,
                           Kind::kVerifyOnline, Kind::kVerifyRing,    Kind::kDraftExtend};

bool is_verify(Kind kind) {
  return kind == Kind::kVerify || kind == Kind::kVerifyOnline || kind == Kind::kVerifyRing;
}
ForwardMode mode_of(Kind kind) {
  if (is_verify(kind)) return ForwardMode::kTargetVerify;
  return kind == Kind::kDraftExtend ? ForwardMode::kDraftExtend : ForwardMode::kDecode;
}
int64_t rows_of(Kind kind) {
  return kRequests * (mode_of(kind) == ForwardMode::kDecode ? 1 : kRows);
}

V4BackendConfig config_of(Kind kind) {
  V4BackendConfig config = test::v4_config();
  config.max_requests = kRequests;
  config.max_rows = kRequests * kRows;
  config.rows_per_request = kRows;
  config.csa_state_tokens = 9;
  config.hca_state_tokens = 129;
  if (kind == Kind::kVerifyOnline) config.hca_form = CompressorForm::kOnline;
  if (kind == Kind::kVerifyRing) {
    config.window_storage = V4WindowStorage::kRing;
    config.max_request_rows = kRows;
    config.window_page_size = config.window + kRows - 1;
  }
  return config;
}

// A pool of v4 or i132 rows, none of them a NaN.
Tensor random_pool(RowFormat format, int64_t pages, int64_t rows, test::Rng& rng) {
  const int64_t width = format == RowFormat::kI132 ? 128 : kDim;
  const int64_t bytes = page_bytes(format, rows, width);
  const int64_t codes = rows * internal::first_region_bytes(format, width);
  std::vector<uint8_t> values(static_cast<size_t>(pages * bytes));
  for (int64_t i = 0; i < pages * bytes; ++i) {
    const bool scale = i % bytes >= codes;
    const int64_t byte =
        scale && format == RowFormat::kV4 ? rng.integer(0x7C, 0x80) : rng.integer(0x30, 0x3E);
    values[static_cast<size_t>(i)] = static_cast<uint8_t>(byte);
  }
  return Tensor::from(DType::kU8, {pages, bytes}, values);
}

// The step of an engine whose buffers live on: the inputs of every forward are fixed; lengths,
// slots and counts are what a replay changes.
class EngineStep {
 public:
  EngineStep(V4Backend& backend, Kind kind, uint64_t seed)
      : backend_(backend),
        kind_(kind),
        plan_(backend.make_step_plan({mode_of(kind), kRequests, rows_of(kind) / kRequests})) {
    const int64_t rows = rows_of(kind);
    const V4BackendConfig& config = backend.config();
    test::Rng rng(seed);
    positions_ = Tensor(DType::kI32, {rows});
    cache_loc_ = Tensor(DType::kI32, {rows});
    for (int64_t r = 0; r < kRequests; ++r) {
      pool_row_.data<int32_t>()[r] = static_cast<int32_t>(r);
      for (int64_t p = 0; p < kWidth; ++p) table_.data<int32_t>()[r * kWidth + p] = slot(r, p);
    }
    const bool ring = config.window_storage == V4WindowStorage::kRing;
    for (int64_t layer = 0; layer < test::kV4Layers; ++layer) {
      Layer& in = layers_[static_cast<size_t>(layer)];
      const int64_t ratio = test::kV4Ratios[static_cast<size_t>(layer)];
      const auto bf16s = [&](std::initializer_list<int64_t> shape, int64_t count) {
        return Tensor::bf16(shape, rng.bf16_normals(count));
      };
      const auto floats = [&](std::initializer_list<int64_t> shape, int64_t count) {
        return Tensor::f32(shape, rng.normals(count));
      };
      in.q = bf16s({rows, test::kV4Heads, kDim}, rows * test::kV4Heads * kDim);
      in.kv = bf16s({rows, kDim}, rows * kDim);
      in.out = Tensor(DType::kBf16, {rows, test::kV4Heads, kDim});
      in.lse = Tensor(DType::kF32, {rows, test::kV4Heads});
      in.window = random_pool(RowFormat::kV4, ring ? kRequests + 1 : kPages,
                              ring ? config.window_page_size : kPage, rng);
      if (ratio == 0) continue;
      const int64_t channels = ratio == 4 ? 2 * kDim : kDim;
      in.gate = floats({rows, 2 * channels}, rows * 2 * channels);
      in.compressed = random_pool(RowFormat::kV4, kPages, kPage / ratio, rng);
      const bool online = ratio == 128 && config.hca_form == CompressorForm::kOnline;
      const int64_t tokens = ratio == 4 ? config.csa_state_tokens : config.hca_state_tokens;
      in.state = online ? floats({kSlots, 3, kDim}, kSlots * 3 * kDim)
                        : floats({kSlots, tokens, 2, channels}, kSlots * tokens * 2 * channels);
      if (ratio != 4) continue;
      in.index_gate = floats({rows, 512}, rows * 512);
      in.index_q = bf16s({rows, test::kV4IndexHeads, 128}, rows * test::kV4IndexHeads * 128);
      in.head_gate = floats({rows, test::kV4IndexHeads}, rows * test::kV4IndexHeads);
      in.index = random_pool(RowFormat::kI132, kPages, kPage / 4, rng);
      in.index_state = floats({kSlots, tokens, 2, 256}, kSlots * tokens * 512);
      in.indices = Tensor(DType::kI32, {rows, config.topk});
    }
  }

  // Committed tokens of each request; 0: no request, nothing is stored.
  void set(const std::vector<int32_t>& lengths, int turn) {
    int64_t row = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      const int32_t committed = lengths[static_cast<size_t>(r)];
      const bool live = committed > 0;
      const auto extend = static_cast<int32_t>(live ? 1 + committed % kRows : 0);
      int32_t given = committed;
      if (mode_of(kind_) == ForwardMode::kDecode && live) given += 1;
      if (kind_ == Kind::kDraftExtend) given += extend;
      seq_len_.data<int32_t>()[r] = given;
      ext_len_.data<int32_t>()[r] = extend;
      // A request that is none has a row of the table without slots.
      pool_row_.data<int32_t>()[r] = live ? static_cast<int32_t>(r) : -1;
      const auto own = static_cast<int32_t>(2 * r);
      in_slot_.data<int32_t>()[r] = live ? own + turn % 2 : -1;
      out_slot_.data<int32_t>()[r] = live ? own + (turn + 1) % 2 : -1;
      ring_.data<int32_t>()[r] = live ? static_cast<int32_t>(r) + 1 : -1;
      accepted_.data<int32_t>()[r] = static_cast<int32_t>((turn + r) % (kRows + 1));
      const int64_t rows =
          kind_ == Kind::kDraftExtend ? int64_t{extend} : rows_of(kind_) / kRequests;
      for (int64_t i = 0; i < rows; ++i, ++row) {
        positions_.data<int32_t>()[row] = live ? static_cast<int32_t>(committed + i) : 0;
        cache_loc_.data<int32_t>()[row] = live ? slot(r, committed + i) : -1;
      }
    }
  }

  void run(Stream stream) {
    V4Batch batch;
    batch.forward.mode = mode_of(kind_);
    batch.forward.seq_len = seq_len_;
    batch.forward.pool_row = pool_row_;
    if (kind_ == Kind::kDraftExtend) batch.forward.ext_len = ext_len_;
    batch.forward.req_to_token = table_;
    batch.forward.positions = positions_;
    batch.forward.out_cache_loc = cache_loc_;
    batch.forward.num_rows = rows_of(kind_);
    batch.in_slot = in_slot_;
    if (kind_ != Kind::kDecodeInPlace) batch.out_slot = out_slot_;
    if (kind_ == Kind::kVerifyRing) batch.window_table = ring_;
    backend_.begin_step(batch, &plan_, stream);
    for (int64_t layer = 0; layer < test::kV4Layers; ++layer) {
      const int64_t ratio = test::kV4Ratios[static_cast<size_t>(layer)];
      if (ratio > 0 && kind_ == Kind::kDraftExtend) continue;
      backend_.forward(plan_, ratio, tensors(layer), stream);
      if (is_verify(kind_)) backend_.commit(plan_, ratio, tensors(layer), accepted_, stream);
    }
  }

  // Whether everything that a step writes and a caller sees is the same.
  bool same_results(const EngineStep& other) const {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      const auto mine = layers_[layer].written(), theirs = other.layers_[layer].written();
      for (size_t i = 0; i < mine.size(); ++i) {
        if (mine[i]->bytes() != theirs[i]->bytes()) return false;
      }
    }
    return true;
  }

  // Of every byte of the pools and states.
  uint64_t pools_hash() const {
    uint64_t hash = 0;
    for (const Layer& in : layers_) {
      for (const Tensor* pool :
           {&in.window, &in.compressed, &in.index, &in.state, &in.index_state}) {
        const auto& bytes = pool->bytes();
        hash = hash * 31 + std::hash<std::string_view>()(
                               {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      }
    }
    return hash;
  }

  void forget_results() {
    for (Layer& in : layers_) {
      for (Tensor* tensor : {&in.out, &in.lse, &in.indices}) tensor->fill_bytes(0xA5);
    }
  }

 private:
  struct Layer {
    Tensor q, kv, gate, index_gate, index_q, head_gate, indices, out, lse;
    Tensor window, compressed, index, state, index_state;

    std::array<const Tensor*, 8> written() const {
      return {&window, &compressed, &index, &state, &index_state, &out, &lse, &indices};
    }
  };

  // Pages of the requests interleave; page 0 is the dummy.
  static int32_t slot(int64_t request, int64_t position) {
    const int64_t page = 1 + position / kPage * kRequests + request;
    return static_cast<int32_t>(page * kPage + position % kPage);
  }

  V4ForwardTensors tensors(int64_t layer) {
    Layer& in = layers_[static_cast<size_t>(layer)];
    const test::V4Layer& weights = test::v4_layer(layer);
    const int64_t ratio = test::kV4Ratios[static_cast<size_t>(layer)];
    V4ForwardTensors t;
    t.q = in.q;
    t.kv = in.kv;
    t.sink = weights.sink;
    t.cos_sin = weights.cos_sin;
    t.window_pool = in.window;
    t.out = in.out;
    t.lse = in.lse;
    if (ratio == 0) return t;
    t.compressor = {in.gate, weights.ape, weights.norm_weight, in.state, in.compressed};
    if (ratio != 4) return t;
    t.indexer = {in.index_gate, weights.index_ape, weights.index_norm_weight, in.index_state,
                 in.index};
    t.index_q = in.index_q;
    t.head_gate = in.head_gate;
    t.indices = in.indices;
    return t;
  }

  V4Backend& backend_;
  Kind kind_;
  V4StepPlan plan_;
  std::array<Layer, test::kV4Layers> layers_;
  Tensor positions_, cache_loc_;
  Tensor seq_len_{DType::kI32, {kRequests}}, ext_len_{DType::kI32, {kRequests}};
  Tensor pool_row_{DType::kI32, {kRequests}}, table_{DType::kI32, {kRequests, kWidth}};
  Tensor in_slot_{DType::kI32, {kRequests}}, out_slot_{DType::kI32, {kRequests}};
  Tensor ring_{DType::kI32, {kRequests, 1}}, accepted_{DType::kI32, {kRequests}};
};

std::vector<int32_t> lengths_of(int turn, test::Rng& rng) {
  if (turn % 10 == 9) return {0, 0, 0, 0};
  std::vector<int32_t> lengths;
  for (int64_t r = 0; r < kRequests; ++r) {
    lengths.push_back(static_cast<int32_t>(rng.integer(0, kWidth - kRows - 1)));
  }
  if (turn % 4 == 1) std::sort(lengths.begin(), lengths.end());  // and shrinking afterwards
  return lengths;
}

class V4StepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, V4StepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

// Case 19.
TEST_P(V4StepGraph, TwentyReplaysEqualEagerSteps) {
  for (const Kind kind : kKinds) {
    V4Backend captured_backend(config_of(kind), device_), eager_backend(config_of(kind), device_);
    EngineStep captured(captured_backend, kind, 7), eager(eager_backend, kind, 7);
    const OwnedStream stream(device_);
    captured.set({1, 1, 1, 1}, 0);
    const Graph graph =
        Graph::capture(device_, stream, [&](Stream on) { captured.run(on); });  // the first call
    test::Rng rng(3);
    for (int turn = 0; turn < 20; ++turn) {
      const std::vector<int32_t> lengths = lengths_of(turn, rng);
      for (EngineStep* const step : {&captured, &eager}) {
        step->set(lengths, turn);
        step->forget_results();
      }
      const uint64_t before = captured.pools_hash();
      graph.launch(stream);
      stream.synchronize();
      eager.run(stream);
      stream.synchronize();
      ASSERT_TRUE(captured.same_results(eager))
          << "kind " << static_cast<int>(kind) << ", turn " << turn;
      // Without a live request nothing is stored: all-zero lengths are accepted.
      ASSERT_EQ(captured.pools_hash() == before, turn % 10 == 9)
          << "kind " << static_cast<int>(kind) << ", turn " << turn;
    }
  }
}

TEST_P(V4StepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  V4Backend backend(config_of(Kind::kVerify), device_), other(config_of(Kind::kVerify), device_);
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
    ASSERT_TRUE(decode.same_results(alone_decode)) << round;
    ASSERT_TRUE(verify.same_results(alone_verify)) << round;
  }
}

// A kernel that does not end is in front of everything; plans of steps and whole steps must come
// back all the same.
TEST_P(V4StepGraph, NothingWaitsForTheDevice) {
  if (device_.kind == DeviceKind::kCuda && test::launches_block()) {
    EXPECT_TRUE(test::passes_without_blocking());
    return;
  }
  for (const Kind kind : {Kind::kDecode, Kind::kVerifyOnline}) {
    V4Backend backend(config_of(kind), device_), other(config_of(kind), device_);
    EngineStep step(backend, kind, 8), alone(other, kind, 8);
    for (EngineStep* const each : {&step, &alone}) each->set({40, 3, 0, 50}, 1);
    // A kernel is loaded at its first launch, which may wait for those that run.
    const StepBucket verify{ForwardMode::kTargetVerify, kRequests, kRows};
    other.make_step_plan(verify);
    alone.run({});
    synchronize(device_);
    const OwnedStream stream(device_);
    {
      test::Spinner spinner(device_, stream);
      step.run(stream);
      const V4StepPlan more = backend.make_step_plan(verify);
      EXPECT_EQ(more.bucket().mode, ForwardMode::kTargetVerify);
      EXPECT_FALSE(spinner.has_ended()) << "something waited until the time was up";
    }
    stream.synchronize();
    EXPECT_TRUE(step.same_results(alone));
  }
}

}  // namespace
}  // namespace fovea
