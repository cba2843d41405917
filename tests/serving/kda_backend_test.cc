#include "fovea/kda_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/kv_pool.h"
#include "fovea/numeric.h"
#include "fovea/state_pool.h"
#include "fovea/stream.h"
#include "src/core/fault_injection.h"
#include "src/core/kernel_fault.h"
#include "tests/support/devices.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

constexpr int64_t kHeads = 2, kDim = 16, kChannels = 3 * kHeads * kDim;
constexpr int64_t kSlots = 12, kPage = 4, kPages = 16, kWidth = 128;
constexpr int64_t kMaxRows = 96, kRequests = 4, kDrafts = 3;

KdaBackendConfig small_config() {
  KdaBackendConfig config;
  config.layer.num_heads = config.layer.num_value_heads = kHeads;
  config.layer.head_dim_k = config.layer.head_dim_v = kDim;
  config.layer.beta_kind = BetaKind::kLogit;
  config.layer.normalise = true;
  config.num_layers = 2;
  config.num_mla_heads = 2;
  config.page_size = kPage;
  config.table_width = kWidth;
  config.max_requests = kRequests;
  config.max_rows = kMaxRows;
  config.rows_per_request = kDrafts;
  config.max_snapshots = 4;
  return config;
}

template <class T>
ConstTensorView list(const std::vector<T>& values) {
  return make_tensor(static_cast<const void*>(values.data()),
                     sizeof(T) == 1 ? DType::kU8 : DType::kI32,
                     {static_cast<int64_t>(values.size())});
}

// Where the rigs of a test run. Tests read and write its memory.
Device rig_device;

class KdaBackendTest : public test::DeviceSuite {
 protected:
  void SetUp() override {
    DeviceSuite::SetUp();
    if (IsSkipped()) return;
    rig_device = device_;
    readable_.emplace(device_);
  }

 private:
  std::optional<test::ReadableDeviceMemory> readable_;
};
INSTANTIATE_TEST_SUITE_P(Devices, KdaBackendTest, testing::ValuesIn(test::kDevices),
                         test::device_test_name);

// Tokens, weights, pools and batches of a small model; token t of the stream always has the same
// tensors.
struct Rig {
  explicit Rig(const KdaBackendConfig& config_in = small_config())
      : config(config_in), backend(config, rig_device), states(pool_config(config), rig_device) {
    synchronize(rig_device);  // the zeros of the pool
    test::Rng rng(7);
    const auto bf16s = [&](int64_t count) {
      std::vector<bf16_t> values(static_cast<size_t>(count));
      for (bf16_t& value : values) value = bf16_from_float(rng.normal());
      return values;
    };
    qkv = bf16s(kMaxRows * kChannels);
    gate = bf16s(kMaxRows * kHeads * kDim);
    weight = bf16s(kChannels * kConvWidth);
    bias = bf16s(kChannels);
    beta = rng.normals(kMaxRows * kHeads);
    a_log = rng.normals(kHeads);
    dt_bias = rng.normals(kHeads * kDim);
    out.resize(static_cast<size_t>(kMaxRows * kHeads * kDim));
    // What no call reads or writes: noise everywhere.
    for (int64_t layer = 0; layer < 2; ++layer) {
      for (int64_t i = 0; i < kSlots * kHeads * kDim * kDim; ++i) {
        static_cast<float*>(states.state(layer).data)[i] = rng.normal();
      }
      for (int64_t i = 0; i < kSlots * 3 * kChannels; ++i) {
        static_cast<bf16_t*>(states.window(layer).data)[i] = bf16_from_float(rng.normal());
      }
    }
    table.assign(static_cast<size_t>((kRequests + 1) * kWidth), 0);
    for (int64_t r = 1; r <= kRequests; ++r) {
      for (int64_t p = 0; p < kWidth; ++p) {
        table[static_cast<size_t>(r * kWidth + p)] = static_cast<int32_t>((r - 1) * 16 + p % 16);
      }
    }
  }

  static StatePoolConfig pool_config(const KdaBackendConfig& config) {
    StatePoolConfig pool;
    pool.num_layers = 2;
    pool.num_slots = kSlots;
    pool.num_value_heads = kHeads;
    pool.head_dim_k = pool.head_dim_v = kDim;
    pool.window_shape = {kConvHistory, kChannels};
    if (config.window_layout == WindowLayout::kDw) pool.window_shape = {kChannels, kConvHistory};
    return pool;
  }

  // A batch whose lengths start at zero: `lens` rows per request.
  KdaBatch batch(ForwardMode mode, const std::vector<int32_t>& lens) {
    ext_len = lens;
    seq_len.clear();
    pool_row.clear();
    int32_t rows = 0;
    for (size_t r = 0; r < lens.size(); ++r) {
      const bool verify = mode == ForwardMode::kTargetVerify;
      seq_len.push_back(verify ? 5 : mode == ForwardMode::kDecode ? 6 : lens[r]);
      pool_row.push_back(static_cast<int32_t>(r) + 1);
      rows += lens[r];
    }
    positions.assign(static_cast<size_t>(rows), 0);
    cache_loc.assign(static_cast<size_t>(rows), 0);
    KdaBatch result;
    result.forward.mode = mode;
    result.forward.seq_len = list(seq_len);
    result.forward.pool_row = list(pool_row);
    if (mode == ForwardMode::kExtend || mode == ForwardMode::kMixed) {
      result.forward.ext_len = list(ext_len);
    }
    result.forward.req_to_token =
        make_tensor(static_cast<const void*>(table.data()), DType::kI32, {kRequests + 1, kWidth});
    result.forward.positions = list(positions);
    result.forward.out_cache_loc = list(cache_loc);
    result.forward.num_rows = rows;
    return result;
  }

  // Rows first.. of the stream.
  KdaForwardTensors tensors(int64_t layer, int64_t first, int64_t rows) {
    KdaForwardTensors t;
    t.qkv = make_tensor(static_cast<const void*>(qkv.data() + first * kChannels), DType::kBf16,
                        {rows, kChannels});
    t.g = make_tensor(static_cast<const void*>(gate.data() + first * kHeads * kDim), DType::kBf16,
                      {rows, kHeads, kDim});
    t.beta = make_tensor(static_cast<const void*>(beta.data() + first * kHeads), DType::kF32,
                         {rows, kHeads});
    t.a_log = make_tensor(static_cast<const void*>(a_log.data()), DType::kF32, {kHeads});
    t.dt_bias = make_tensor(static_cast<const void*>(dt_bias.data()), DType::kF32, {kHeads, kDim});
    t.conv_weight =
        make_tensor(static_cast<const void*>(weight.data()), DType::kBf16, {kChannels, kConvWidth});
    t.conv_bias = make_tensor(static_cast<const void*>(bias.data()), DType::kBf16, {kChannels});
    t.state = states.state(layer);
    t.window = states.window(layer);
    t.out = make_tensor(static_cast<void*>(out.data() + first * kHeads * kDim), DType::kBf16,
                        {rows, kHeads, kDim});
    return t;
  }

  std::vector<uint8_t> pool_bytes() const {
    synchronize(rig_device);
    const auto* data = static_cast<const uint8_t*>(states.states().data);
    return {data, data + states.bytes()};
  }
  std::vector<uint8_t> slot_bytes(int64_t slot) const {
    std::vector<uint8_t> bytes;
    synchronize(rig_device);
    for (int64_t layer = 0; layer < 2; ++layer) {
      const TensorView state = states.state(layer), window = states.window(layer);
      const auto* s = static_cast<const uint8_t*>(state.data) + slot * state.stride[0] * 4;
      const auto* w = static_cast<const uint8_t*>(window.data) + slot * window.stride[0] * 2;
      bytes.insert(bytes.end(), s, s + state.stride[0] * 4);
      bytes.insert(bytes.end(), w, w + window.stride[0] * 2);
    }
    return bytes;
  }

  KdaBackendConfig config;
  KdaBackend backend;
  StatePool states;
  std::vector<bf16_t> qkv, gate, weight, bias, out;
  std::vector<float> beta, a_log, dt_bias;
  std::vector<int32_t> table, seq_len, pool_row, ext_len, positions, cache_loc;
};

// A prefill of 5 tokens into slot 2, from nothing.
void prefill_five(Rig& rig, int32_t slot = 2) {
  const std::vector<int32_t> slots = {slot};
  const std::vector<uint8_t> fresh = {0};
  KdaBatch batch = rig.batch(ForwardMode::kExtend, {5});
  batch.in_slot = list(slots);
  batch.has_initial_state = list(fresh);
  rig.backend.begin_step(batch);
  for (int64_t layer = 0; layer < 2; ++layer)
    rig.backend.forward_kda(layer, rig.tensors(layer, 0, 5));
}

TEST_P(KdaBackendTest, DecodesVerifiesAndCommitsToTheSameBits) {
  for (const WindowLayout layout : {WindowLayout::kWd, WindowLayout::kDw}) {
    KdaBackendConfig config = small_config();
    config.window_layout = layout;
    Rig decoded(config), verified(config);
    prefill_five(decoded);
    prefill_five(verified);
    EXPECT_EQ(decoded.pool_bytes(), verified.pool_bytes());
    const std::vector<int32_t> in = {2}, to = {3}, back = {2};
    for (int64_t t = 5; t < 7; ++t) {  // slot 2 to 3 and back
      KdaBatch batch = decoded.batch(ForwardMode::kDecode, {1});
      batch.in_slot = list(t == 5 ? in : to);
      batch.out_slot = list(t == 5 ? to : back);
      decoded.backend.begin_step(batch);
      for (int64_t layer = 0; layer < 2; ++layer) {
        decoded.backend.forward_kda(layer, decoded.tensors(layer, t, 1));
      }
    }
    KdaStepPlan plan = verified.backend.make_step_plan({ForwardMode::kTargetVerify, 1, kDrafts});
    KdaBatch batch = verified.batch(ForwardMode::kTargetVerify, {kDrafts});
    batch.in_slot = list(in);
    verified.backend.begin_step(batch, &plan);
    const std::vector<uint8_t> before = verified.pool_bytes();
    for (int64_t layer = 0; layer < 2; ++layer) {
      verified.backend.forward_kda(plan, layer, verified.tensors(layer, 5, kDrafts));
    }
    EXPECT_EQ(verified.pool_bytes(), before) << "a verify only reads";
    const std::vector<int32_t> accepted = {2};
    KdaCommitInputs inputs;
    inputs.accepted = list(accepted);
    inputs.state = verified.states.states();
    inputs.window = verified.states.windows();
    verified.backend.commit(plan, inputs);
    EXPECT_EQ(verified.slot_bytes(2), decoded.slot_bytes(2));
    EXPECT_EQ(std::memcmp(verified.out.data(), decoded.out.data(), 7 * kHeads * kDim * 2), 0);
    EXPECT_EQ(verified.backend.routes().speculative, 2);
    EXPECT_EQ(verified.backend.routes().commits, 1);
    EXPECT_EQ(decoded.backend.routes().verified, 4);
    EXPECT_EQ(decoded.backend.routes().single, 2);
  }
}

TEST_P(KdaBackendTest, ADecodeInPlaceIsCloseToAVerifiedOne) {
  KdaBackendConfig config = small_config();
  config.deterministic = false;
  Rig decoded(config), verified;
  prefill_five(decoded);
  prefill_five(verified);
  const std::vector<int32_t> slot = {2};
  for (Rig* rig : {&decoded, &verified}) {
    KdaBatch batch = rig->batch(ForwardMode::kDecode, {1});
    batch.in_slot = list(slot);
    rig->backend.begin_step(batch);
    rig->backend.forward_kda(0, rig->tensors(0, 5, 1));
  }
  EXPECT_EQ(decoded.backend.routes().decode, 1);
  for (int64_t i = 5 * kHeads * kDim; i < 6 * kHeads * kDim; ++i) {
    const auto at = static_cast<size_t>(i);
    EXPECT_NEAR(bf16_to_float(decoded.out[at]), bf16_to_float(verified.out[at]), 2e-2);
  }
  for (int64_t i = 0; i < kHeads * kDim * kDim; ++i) {
    EXPECT_NEAR(static_cast<float*>(slice_rows(decoded.states.state(0), 2, 3).data)[i],
                static_cast<float*>(slice_rows(verified.states.state(0), 2, 3).data)[i], 1e-4);
  }
}

TEST_P(KdaBackendTest, SnapshotsResumeToTheBitsOfAnUncutPrefill) {
  Rig whole, resumed;
  const std::vector<uint8_t> fresh = {0};
  const std::vector<int32_t> slot = {1}, other = {6}, seq = {0}, pos = {64}, snapshot = {9};
  const auto extend = [&](Rig& rig, int64_t first, int32_t rows, const std::vector<int32_t>& in,
                          const std::vector<int32_t>& to, bool starts, bool keeps) {
    KdaBatch batch = rig.batch(ForwardMode::kExtend, {rows});
    batch.in_slot = list(in);
    batch.out_slot = list(to);
    if (starts) batch.has_initial_state = list(fresh);
    if (keeps) {
      batch.snapshot_seq = list(seq);
      batch.snapshot_pos = list(pos);
      batch.snapshot_slot = list(snapshot);
    }
    rig.backend.begin_step(batch);
    rig.backend.forward_kda(0, rig.tensors(0, first, rows));
  };
  extend(whole, 0, 90, slot, slot, true, true);
  extend(resumed, 0, 70, slot, slot, true, true);
  EXPECT_EQ(whole.slot_bytes(9), resumed.slot_bytes(9));
  extend(resumed, 64, 26, snapshot, other, false, false);
  const auto state = [](const Rig& rig, int64_t at) {
    const TensorView view = slice_rows(rig.states.state(0), at, at + 1);
    const auto* data = static_cast<const float*>(view.data);
    return std::vector<float>(data, data + kHeads * kDim * kDim);
  };
  EXPECT_EQ(state(whole, 1), state(resumed, 6));
  EXPECT_EQ(std::memcmp(whole.out.data(), resumed.out.data(), 90 * kHeads * kDim * 2), 0);
  EXPECT_EQ(whole.backend.routes().snapshot, 1);
}

// Runs `work` with the fault at every place that it has, and once without; a run that throws
// changes no pool. The places where it failed.
template <class Fault = internal::LaunchFault>
int64_t fails_without_a_trace(Rig& rig, const std::function<void()>& work) {
  for (int64_t nth = 1;; ++nth) {
    const std::vector<uint8_t> before = rig.pool_bytes();
    const Fault fault(nth);
    try {
      work();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_EQ(rig.pool_bytes(), before) << "stage " << nth;
      continue;
    }
    EXPECT_FALSE(fault.fired());
    EXPECT_NE(rig.pool_bytes(), before);
    return nth - 1;
  }
}

TEST_P(KdaBackendTest, AFailureAtAnyStageLeavesThePoolsAsTheyWere) {
  const std::vector<int32_t> slots = {1, 2}, to = {1, 3}, seq = {0}, pos = {3}, snapshot = {9};
  for (const CommitMode commit : {CommitMode::kDirect, CommitMode::kStaged}) {
    for (const bool deterministic : {true, false}) {
      KdaBackendConfig config = small_config();
      config.commit = commit;
      config.deterministic = deterministic;
      config.strict = true;
      Rig rig(config);
      KdaBatch batch = rig.batch(ForwardMode::kMixed, {3, 1});
      batch.in_slot = list(slots);
      batch.out_slot = list(to);
      batch.snapshot_seq = list(seq);
      batch.snapshot_pos = list(pos);
      batch.snapshot_slot = list(snapshot);
      rig.backend.begin_step(batch);
      // The convolution, the recurrence, and its commit where it is staged.
      const int64_t stages = commit == CommitMode::kStaged ? 3 : 2;
      EXPECT_EQ(
          fails_without_a_trace(rig, [&] { rig.backend.forward_kda(0, rig.tensors(0, 0, 4)); }),
          stages);
      EXPECT_EQ(rig.backend.routes().restored, stages);
      batch = rig.batch(ForwardMode::kDecode, {1, 1});
      batch.in_slot = list(slots);
      rig.backend.begin_step(batch);
      EXPECT_EQ(
          fails_without_a_trace(rig, [&] { rig.backend.forward_kda(1, rig.tensors(1, 4, 2)); }),
          deterministic ? 3 : 2);
    }
  }
}

TEST_P(KdaBackendTest, AFailedVerifyOrCommitLeavesThePoolsAsTheyWere) {
  for (const VerifyMode mode : {VerifyMode::kStates, VerifyMode::kRecords}) {
    KdaBackendConfig config = small_config();
    config.verify_mode = mode;
    Rig rig(config);
    KdaStepPlan plan = rig.backend.make_step_plan({ForwardMode::kTargetVerify, 2, kDrafts});
    const std::vector<int32_t> slots = {1, 2}, accepted = {3, 1};
    KdaBatch batch = rig.batch(ForwardMode::kTargetVerify, {kDrafts, kDrafts});
    batch.in_slot = list(slots);
    rig.backend.begin_step(batch, &plan);
    KdaCommitInputs inputs;
    inputs.accepted = list(accepted);
    inputs.state = rig.states.states();
    inputs.window = rig.states.windows();
    EXPECT_THROW(rig.backend.commit(plan, inputs), Error) << "nothing has been verified";
    const auto work = [&] {
      for (int64_t layer = 0; layer < 2; ++layer) {
        rig.backend.forward_kda(plan, layer, rig.tensors(layer, 0, 2 * kDrafts));
      }
      rig.backend.commit(plan, inputs);
    };
    EXPECT_EQ(fails_without_a_trace(rig, work), 5);
  }
}

// An operator that got as far as some of its kernels, and the copies of windows around it.
TEST_P(KdaBackendTest, AFailedKernelLeavesThePoolsAsTheyWere) {
  if (device_.kind == DeviceKind::kCpu) GTEST_SKIP() << "the CPU launches no kernel";
  const std::vector<int32_t> slots = {1, 2}, to = {1, 3}, seq = {0}, pos = {3}, snapshot = {9};
  const std::vector<int32_t> none(5, 0);
  for (const CommitMode commit : {CommitMode::kDirect, CommitMode::kStaged}) {
    for (const bool deterministic : {true, false}) {
      KdaBackendConfig config = small_config();
      config.commit = commit;
      config.deterministic = deterministic;
      config.strict = true;
      Rig rig(config);
      KdaBatch batch = rig.batch(ForwardMode::kMixed, {3, 1});
      batch.forward.positions = batch.forward.out_cache_loc = list(none);
      batch.forward.padded_rows = 5;
      batch.in_slot = list(slots);
      batch.out_slot = list(to);
      batch.snapshot_seq = list(seq);
      batch.snapshot_pos = list(pos);
      batch.snapshot_slot = list(snapshot);
      rig.backend.begin_step(batch);
      // Padding, windows aside, the convolution, the recurrence.
      EXPECT_GE(fails_without_a_trace<internal::KernelFault>(
                    rig, [&] { rig.backend.forward_kda(0, rig.tensors(0, 0, 5)); }),
                4);
      batch = rig.batch(ForwardMode::kDecode, {1, 1});
      batch.in_slot = list(slots);
      rig.backend.begin_step(batch);
      EXPECT_GE(fails_without_a_trace<internal::KernelFault>(
                    rig, [&] { rig.backend.forward_kda(1, rig.tensors(1, 4, 2)); }),
                3);
    }
  }
}

TEST_P(KdaBackendTest, AFailedOperatorIsFollowedByTheNextFromTheUnchangedPool) {
  if (device_.kind == DeviceKind::kCuda) GTEST_SKIP() << "a GPU has one implementation of each";
  KdaBackendConfig config = small_config();
  config.deterministic = false;
  for (int64_t nth = 1; nth <= 2; ++nth) {
    Rig followed(config), plain(config);
    const std::vector<int32_t> slot = {2};
    for (Rig* rig : {&followed, &plain}) {
      KdaBatch batch = rig->batch(ForwardMode::kExtend, {5});
      batch.in_slot = list(slot);
      rig->backend.begin_step(batch);
      std::optional<internal::LaunchFault> fault;
      if (rig == &followed) fault.emplace(nth);
      rig->backend.forward_kda(0, rig->tensors(0, 0, 5));
    }
    EXPECT_EQ(followed.backend.routes().fallback, 1);
    EXPECT_EQ(followed.backend.routes().restored, 0);
    for (size_t i = 0; i < static_cast<size_t>(5 * kHeads * kDim); ++i) {
      EXPECT_NEAR(bf16_to_float(followed.out[i]), bf16_to_float(plain.out[i]), 2e-2);
    }
    EXPECT_EQ(followed.slot_bytes(5), plain.slot_bytes(5));
  }
}

TEST_P(KdaBackendTest, PaddingTouchesNoSlotAndGivesZeros) {
  Rig rig;
  const std::vector<int32_t> slots = {-1, 99};
  for (const ForwardMode mode : {ForwardMode::kDecode, ForwardMode::kIdle}) {
    KdaBatch batch = rig.batch(
        mode, mode == ForwardMode::kIdle ? std::vector<int32_t>{} : std::vector<int32_t>{1, 1});
    const std::vector<int32_t> none(3, 0);
    batch.forward.positions = list(none);
    batch.forward.out_cache_loc = list(none);
    batch.forward.padded_rows = 3;
    if (mode == ForwardMode::kDecode) batch.in_slot = list(slots);
    rig.backend.begin_step(batch);
    const std::vector<uint8_t> before = rig.pool_bytes();
    std::fill(rig.out.begin(), rig.out.end(), bf16_from_float(1.0f));
    rig.backend.forward_kda(0, rig.tensors(0, 0, 3));
    EXPECT_EQ(rig.pool_bytes(), before);
    for (int64_t i = 0; i < 3 * kHeads * kDim; ++i) {
      EXPECT_EQ(bf16_to_float(rig.out[static_cast<size_t>(i)]), 0.0f);
    }
  }
  EXPECT_EQ(rig.backend.routes().idle, 1);
}

TEST_P(KdaBackendTest, FullAttentionOverOneKeyIsThatKey) {
  Rig rig;
  KvPool pool({RowFormat::kBf16, 576, 1, kPages, kPage}, rig_device);
  synchronize(rig_device);
  const KdaBatch batch = rig.batch(ForwardMode::kExtend, {1});
  rig.cache_loc[0] = 0;
  rig.backend.begin_step(batch);
  test::Rng rng(3);
  std::vector<bf16_t> q(2 * 576), k(576), out(2 * 512);
  for (bf16_t& value : q) value = bf16_from_float(rng.normal());
  for (bf16_t& value : k) value = bf16_from_float(rng.normal());
  std::vector<float> lse(2);
  KdaMlaTensors tensors;
  tensors.q = make_tensor(static_cast<const void*>(q.data()), DType::kBf16, {1, 2, 576});
  tensors.k = make_tensor(static_cast<const void*>(k.data()), DType::kBf16, {1, 576});
  tensors.kv_pool = pool.layer(0);
  tensors.softmax_scale = 0.1f;
  tensors.out = make_tensor(static_cast<void*>(out.data()), DType::kBf16, {1, 2, 512});
  tensors.lse = make_tensor(static_cast<void*>(lse.data()), DType::kF32, {1, 2});
  rig.backend.forward_mla(tensors);
  for (int64_t h = 0; h < 2; ++h) {
    double score = 0;
    for (size_t c = 0; c < 576; ++c) {
      score += static_cast<double>(bf16_to_float(q[static_cast<size_t>(h) * 576 + c])) *
               bf16_to_float(k[c]);
    }
    EXPECT_NEAR(lse[static_cast<size_t>(h)], 0.1 * score, 1e-3 + 1e-3 * std::fabs(score));
    for (size_t c = 0; c < 512; ++c) {
      EXPECT_EQ(bf16_to_float(out[static_cast<size_t>(h) * 512 + c]), bf16_to_float(k[c]));
    }
  }
}

TEST_P(KdaBackendTest, RefusesBeforeAnythingIsWritten) {
  Rig rig;
  const std::vector<uint8_t> before = rig.pool_bytes();
  const auto refused = [&](const char* fragment, const std::function<void()>& work) {
    try {
      work();
      ADD_FAILURE() << "expected a refusal: " << fragment;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what();
    }
    EXPECT_EQ(rig.pool_bytes(), before);
  };
  const std::vector<int32_t> slot = {2}, two = {2, 3};
  refused("no step", [&] { rig.backend.forward_kda(0, rig.tensors(0, 0, 1)); });
  KdaBatch batch = rig.batch(ForwardMode::kExtend, {5});
  refused("kda_backend", [&] {
    KdaBatch bad = batch;
    bad.forward.pool_row = {};
    rig.backend.begin_step(bad);
  });
  refused("in_slot", [&] {
    KdaBatch bad = batch;
    bad.in_slot = list(two);
    rig.backend.begin_step(bad);
  });
  rig.backend.begin_step(batch);
  refused("in_slot", [&] { rig.backend.forward_kda(0, rig.tensors(0, 0, 5)); });
  batch.in_slot = list(slot);
  rig.backend.begin_step(batch);
  refused("layer", [&] { rig.backend.forward_kda(2, rig.tensors(0, 0, 5)); });
  refused("qkv", [&] { rig.backend.forward_kda(0, rig.tensors(0, 0, 4)); });
  refused("causal_conv1d: bias", [&] {
    KdaForwardTensors bad = rig.tensors(0, 0, 5);
    bad.conv_bias.shape[0] = 3;
    rig.backend.forward_kda(0, bad);
  });
  refused("dt_bias", [&] {  // found by the second operator, when windows are already written
    KdaForwardTensors bad = rig.tensors(0, 0, 5);
    bad.dt_bias.shape[0] = 1;
    rig.backend.forward_kda(0, bad);
  });
  batch = rig.batch(ForwardMode::kTargetVerify, {kDrafts});
  batch.in_slot = list(slot);
  rig.backend.begin_step(batch);
  refused("step plan", [&] { rig.backend.forward_kda(0, rig.tensors(0, 0, kDrafts)); });
}

}  // namespace
}  // namespace fovea
