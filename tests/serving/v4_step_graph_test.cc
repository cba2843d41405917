#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string_view>
#include <vector>

#include "fovea/row_codec.h"
#include "fovea/stream.h"
#include "fovea/v4_backend.h"
#include "src/core/row_layout.h"
#include "tests/serving/step_graphs.h"
#include "tests/serving/v4_rig.h"
#include "tests/support/devices.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

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
  static constexpr int64_t kRequests = fovea::kRequests, kRowsPerRequest = kRows;
  static constexpr int64_t kWidth = fovea::kWidth;

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

  // Hashes of all that a step writes and a caller sees.
  std::vector<uint8_t> results(const Device& /*device*/) const {
    std::vector<uint8_t> all = pools();
    for (const Layer& in : layers_) {
      for (const Tensor* tensor : {&in.out, &in.lse, &in.indices}) add_hash(*tensor, &all);
    }
    return all;
  }

  std::vector<uint8_t> pools() const {
    std::vector<uint8_t> all;
    for (const Layer& in : layers_) {
      for (const Tensor* pool :
           {&in.window, &in.compressed, &in.index, &in.state, &in.index_state}) {
        add_hash(*pool, &all);
      }
    }
    return all;
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
  };

  static void add_hash(const Tensor& tensor, std::vector<uint8_t>* all) {
    const std::string_view bytes(reinterpret_cast<const char*>(tensor.bytes().data()),
                                 tensor.bytes().size());
    const size_t hash = std::hash<std::string_view>()(bytes);
    const auto* const data = reinterpret_cast<const uint8_t*>(&hash);
    all->insert(all->end(), data, data + sizeof(hash));
  }

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

struct V4Model {
  using Backend = V4Backend;
  using Kind = fovea::Kind;
  using Step = EngineStep;

  static V4Backend backend(Kind kind, const Device& device, bool strict = false) {
    V4BackendConfig config = config_of(kind);
    config.strict = strict;
    return {config, device};
  }
};

const std::vector<int32_t> kLengths = {40, 3, 127, 400};

class V4StepGraph : public test::DeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, V4StepGraph, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

// Case 19 of the specification.
TEST_P(V4StepGraph, ReplaysEqualEagerSteps) {
  // A graph of the CPU calls what was captured.
  const int turns = device_.kind == DeviceKind::kCuda ? 100 : 20;
  for (const Kind kind : kKinds) {
    test::expect_replays_equal_eager_steps<V4Model>(kind, device_, turns);
  }
}

TEST_P(V4StepGraph, TwoCapturedStepsOfOneBackendInTurn) {
  test::expect_captured_steps_in_turn<V4Model>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(V4StepGraph, TwoBackendsOnTwoStreamsAtOnce) {
  test::expect_steps_on_two_streams<V4Model>(Kind::kDecode, Kind::kVerify, device_);
}

TEST_P(V4StepGraph, NothingWaitsForTheDevice) {
  // Refresh, windows, facts; stores and attention; moves and compressors; queries, selection.
  test::expect_no_wait<V4Model>(Kind::kDecode, kLengths, 3 + 2 + 8 + 4, device_);
  // And whose states are verified; which rows stay, their states moved, their compressor.
  test::expect_no_wait<V4Model>(Kind::kVerifyOnline, kLengths, 4 + 2 + 8 + 4 + 3, device_);
}

TEST_P(V4StepGraph, AFailedLaunchLeavesTheNextStepAlone) {
  for (const Kind kind : kKinds) {
    test::expect_repeatable_steps<V4Model>(kind, kLengths, 6, device_);
  }
}

class V4Memory : public test::LimitedDeviceSuite {};
INSTANTIATE_TEST_SUITE_P(Devices, V4Memory, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

TEST_P(V4Memory, ABackendOrStepPlanThatDoesNotFitSaysSoAndLeaksNothing) {
  for (const Kind kind : {Kind::kVerify, Kind::kVerifyOnline}) {
    expect_out_of_memory<V4Model>("v4_backend", kind);
  }
}

}  // namespace
}  // namespace fovea
