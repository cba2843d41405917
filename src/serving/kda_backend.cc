#include "fovea/kda_backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "fovea/stream.h"
#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/core/parallel.h"
#include "src/serving/dsa_shapes.h"
#include "src/serving/kda_plans.h"
#include "src/serving/kda_step.h"
#include "src/serving/operator_caller.h"
#include "src/serving/operator_options.h"
#include "src/serving/step_rows.h"

namespace fovea {
namespace {

using internal::check_optional;
using internal::check_tensor;
using internal::first_rows;
using internal::kAnyExtent;
using internal::KdaStep;
using internal::kKdaOp;

bool follows_failures(const KdaBackendConfig& config) {
  return !config.strict && !config.deterministic && config.implementation.empty();
}

void check_slots(const KdaBackendConfig& config, const KdaBatch& batch) {
  const int64_t requests = batch.forward.seq_len.shape[0];
  check_optional(kKdaOp, "in_slot", batch.in_slot, DType::kI32, {requests});
  check_optional(kKdaOp, "out_slot", batch.out_slot, DType::kI32, {requests});
  check_optional(kKdaOp, "has_initial_state", batch.has_initial_state, DType::kU8, {requests});
  if (batch.out_slot.defined() && !batch.in_slot.defined()) {
    internal::invalid(kKdaOp, "out_slot is given without in_slot; -1 means no state");
  }
  if (!batch.snapshot_seq.defined()) return;
  if (!internal::is_extend(batch.forward.mode)) {
    internal::invalid(kKdaOp, "snapshot_seq in mode " + std::string(to_string(batch.forward.mode)) +
                                  "; snapshots belong to extend and mixed");
  }
  const int64_t snapshots = batch.snapshot_seq.rank == 1 ? batch.snapshot_seq.shape[0] : kAnyExtent;
  check_tensor(kKdaOp, "snapshot_seq", batch.snapshot_seq, DType::kI32, {kAnyExtent});
  check_tensor(kKdaOp, "snapshot_pos", batch.snapshot_pos, DType::kI32, {snapshots});
  check_tensor(kKdaOp, "snapshot_slot", batch.snapshot_slot, DType::kI32, {snapshots});
  internal::check_range(kKdaOp, "snapshot_seq.shape[0]", snapshots, 0, config.max_snapshots);
}

// q, k and v inside rows of q|k|v.
struct Parts {
  ConstTensorView q, k, v;
};
Parts parts_of(const KdaLayer& layer, const ConstTensorView& qkv) {
  const auto part = [&](int64_t first, int64_t heads, int64_t dim) {
    ConstTensorView view;
    view.dtype = DType::kBf16;
    view.rank = 3;
    view.shape = {qkv.shape[0], heads, dim};
    view.stride = {qkv.stride[0], dim, 1};
    view.data = static_cast<const bf16_t*>(qkv.data) + first;
    return view;
  };
  const int64_t width = layer.num_heads * layer.head_dim_k;
  return {part(0, layer.num_heads, layer.head_dim_k),
          part(width, layer.num_heads, layer.head_dim_k),
          part(2 * width, layer.num_value_heads, layer.head_dim_v)};
}

}  // namespace

struct KdaStepPlan::State {
  const void* owner;  // the backend's state
  KdaStep step;

  State(const void* owner_in, const KdaBackendConfig& config, const internal::StepHome& home,
        const StepBucket& bucket)
      : owner(owner_in), step(config, home, bucket) {}
};

struct KdaBackend::State {
  KdaBackendConfig config;
  Device device;
  // What fills new buffers does not queue behind the caller's work, and is done when the
  // constructor and make_step_plan return: then any stream may use them, also to capture.
  OwnedStream birth;
  internal::OperatorOptions options;
  internal::OperatorCaller caller;
  internal::KdaPlans plans;
  std::vector<std::pair<float, DenseMla>> dense;  // by softmax scale
  KdaStep own;                                    // of begin_step without a plan
  internal::VerifyScratch one;                    // of decodes that run as a verify
  internal::WindowBackup backup;
  DeviceBuffer convolved;  // bf16 [max rows, D]
  DeviceBuffer ones;       // i32 [max_requests], of decodes that run as a verify
  KdaRoutes routes;

  State(const KdaBackendConfig& config_in, const Device& device_in);
  internal::StepHome home() const { return {device, birth, kKdaOp}; }

  KdaStep* step_of(const std::unique_ptr<KdaStepPlan::State>& plan) const;
  void begin(const KdaBatch& batch, KdaStep* step, Stream stream);
  void fill_ones();
  void clear_rows(const TensorView& out, int64_t begin);
  void check_kda(const KdaStep& step, int64_t layer, const KdaForwardTensors& tensors) const;
  void forward_kda(KdaStep* step, int64_t layer, const KdaForwardTensors& tensors);
  void extend(const KdaStep& step, const KdaForwardTensors& tensors);
  void decode(const KdaStep& step, const KdaForwardTensors& tensors);
  void verify(const KdaStep& step, const internal::KdaVerifyPlans& by,
              const internal::VerifyScratch& scratch, int64_t layer,
              const KdaForwardTensors& tensors);
  void decode_verified(const KdaStep& step, const KdaForwardTensors& tensors);
  void forward_mla(const KdaStep& step, const KdaMlaTensors& tensors);
  const DenseMla& dense_of(float softmax_scale);
  void commit(KdaStep* step, const KdaCommitInputs& inputs);

  ConstTensorView out_slot(const KdaStep& step) const {
    return step.batch.out_slot.defined() ? step.batch.out_slot : step.batch.in_slot;
  }
  TensorView convolved_rows(int64_t rows) {
    return make_tensor(convolved.data(), DType::kBf16,
                       {rows, internal::kda_channels(config.layer)});
  }
  CausalConv1dTensors convolution(const KdaForwardTensors& tensors, int64_t rows);
  // Runs `work`, which starts with the convolution; when it fails the windows are as before.
  void with_windows(const KdaStep& step, const KdaForwardTensors& tensors,
                    internal::FunctionRef<void()> work);
};

KdaBackend::State::State(const KdaBackendConfig& config_in, const Device& device_in)
    : config((internal::check_kda_config(config_in), config_in)),
      device(device_in),
      birth(device_in),
      options(kKdaOp, config.implementation),
      caller(device, options, follows_failures(config)),
      plans(config, device, options),
      own(config, home()),
      one(config, config.deterministic ? config.max_requests : 0, 1, 1, home()),
      backup(config, home()) {
  size_t bytes = plans.workspace_bytes();
  if (config.num_mla_heads > 0) {
    // Refuses now what the first forward would refuse; scales do not change the size.
    const DenseMla any = internal::dense_plan(config, 1.0f, device, options);
    bytes = std::max(bytes, any.workspace_bytes());
  }
  caller.reserve(bytes, birth);
  dense.reserve(8);  // layers usually share one scale
  if (config.deterministic) fill_ones();
  const int64_t rows = internal::metadata_config(config).max_rows;
  if (config.convolution) {
    const auto elements = static_cast<size_t>(rows * internal::kda_channels(config.layer));
    internal::reserve_memory("the convolved rows", home(), elements * sizeof(bf16_t), &convolved);
  }
  birth.synchronize();
}

void KdaBackend::State::fill_ones() {
  const std::vector<int32_t> values(static_cast<size_t>(config.max_requests), 1);
  const size_t bytes = values.size() * sizeof(int32_t);
  internal::reserve_memory("the counts of a decode", home(), bytes, &ones);
  copy_bytes(ones.data(), device, values.data(), Device::cpu(1), bytes, birth);
  birth.synchronize();  // `values` ends here
}

KdaStep* KdaBackend::State::step_of(const std::unique_ptr<KdaStepPlan::State>& plan) const {
  if (plan == nullptr || plan->owner != this) {
    internal::invalid(kKdaOp, "the step plan belongs to another backend or was moved from");
  }
  return &plan->step;
}

void KdaBackend::State::begin(const KdaBatch& batch, KdaStep* step, Stream stream) {
  const DsaConfig metadata = internal::metadata_config(config);
  internal::check_row_batch(kKdaOp, "a recurrence cannot be cut over ranks", metadata,
                            batch.forward, step->bucket, batch.kv_len_delta);
  check_slots(config, batch);
  caller.enter(stream);
  internal::begin_rows(metadata, plans.refresh, batch.forward, batch.kv_len_delta, caller, step);
  step->batch = batch;
  step->verified.assign(step->verified.size(), false);
}

void KdaBackend::State::check_kda(const KdaStep& step, int64_t layer,
                                  const KdaForwardTensors& tensors) const {
  const KdaLayer& shape = config.layer;
  internal::check_range(kKdaOp, "layer", layer, 0, config.num_layers - 1);
  if (!step.begun) internal::invalid(kKdaOp, "no step has begun");
  const ForwardMode mode = step.batch.forward.mode;
  if (mode == ForwardMode::kDraftExtend || mode == ForwardMode::kDraftExtendV2) {
    internal::unsupported(kKdaOp, "a KDA layer in mode " + std::string(to_string(mode)) +
                                      ": its states would advance over drafted rows; verify them");
  }
  if (mode == ForwardMode::kTargetVerify && !step.bucket) {
    internal::invalid(kKdaOp, "target_verify without a step plan, which keeps what commit needs");
  }
  const int64_t rows = step.padded_rows, channels = internal::kda_channels(shape);
  check_tensor(kKdaOp, "qkv", tensors.qkv, DType::kBf16, {rows, channels});
  check_tensor(kKdaOp, "g", tensors.g, shape.gate.dtype,
               {rows, shape.num_value_heads, shape.head_dim_k});
  check_tensor(kKdaOp, "beta", tensors.beta, shape.beta_dtype, {rows, shape.num_value_heads});
  check_tensor(kKdaOp, "out", tensors.out, DType::kBf16,
               {rows, shape.num_value_heads, shape.head_dim_v});
  check_tensor(kKdaOp, "state", tensors.state, shape.state_dtype,
               {kAnyExtent, shape.num_value_heads, shape.head_dim_v, shape.head_dim_k});
  if (mode != ForwardMode::kIdle && !step.batch.in_slot.defined()) {
    internal::invalid(kKdaOp, "the batch has no in_slot, which KDA layers need");
  }
  if (!config.convolution) return;
  const int64_t slots = tensors.state.shape[0];
  if (config.window_layout == WindowLayout::kWd) {
    check_tensor(kKdaOp, "window", tensors.window, DType::kBf16, {slots, kConvHistory, channels});
  } else {
    check_tensor(kKdaOp, "window", tensors.window, DType::kBf16, {slots, channels, kConvHistory});
  }
  check_tensor(kKdaOp, "conv_weight", tensors.conv_weight, config.conv_weight_dtype,
               {channels, kConvWidth});
}

CausalConv1dTensors KdaBackend::State::convolution(const KdaForwardTensors& tensors, int64_t rows) {
  CausalConv1dTensors conv;
  conv.x = first_rows(tensors.qkv, rows);
  conv.weight = tensors.conv_weight;
  conv.bias = tensors.conv_bias;
  conv.window_state = tensors.window;
  conv.out = convolved_rows(rows);
  return conv;
}

void KdaBackend::State::with_windows(const KdaStep& step, const KdaForwardTensors& tensors,
                                     internal::FunctionRef<void()> work) {
  // What is captured has changed nothing when its capture fails.
  if (!config.convolution || caller.is_capturing()) return work();
  backup.save(tensors.window, out_slot(step), step.batch.snapshot_slot, caller.stream());
  try {
    work();
  } catch (...) {
    backup.restore(caller.stream());
    ++routes.restored;
    throw;
  }
}

void KdaBackend::State::extend(const KdaStep& step, const KdaForwardTensors& tensors) {
  const KdaBatch& batch = step.batch;
  const int64_t rows = step.num_rows;
  KdaPrefillTensors prefill;
  prefill.g = first_rows(tensors.g, rows);
  prefill.beta = first_rows(tensors.beta, rows);
  prefill.q_indptr = step.fields.q_indptr;
  prefill.a_log = tensors.a_log;
  prefill.dt_bias = tensors.dt_bias;
  prefill.state = tensors.state;
  prefill.in_slot = batch.in_slot;
  prefill.out_slot = out_slot(step);
  prefill.has_initial_state = batch.has_initial_state;
  prefill.snapshot_seq = batch.snapshot_seq;
  prefill.snapshot_pos = batch.snapshot_pos;
  prefill.snapshot_slot = batch.snapshot_slot;
  prefill.out = slice_rows(tensors.out, 0, rows);
  with_windows(step, tensors, [&] {
    ConstTensorView qkv = first_rows(tensors.qkv, rows);
    if (config.convolution) {
      CausalConv1dTensors conv = convolution(tensors, rows);
      conv.q_indptr = prefill.q_indptr;
      conv.in_slot = prefill.in_slot;
      conv.out_slot = prefill.out_slot;
      conv.has_initial_state = prefill.has_initial_state;
      conv.snapshot_seq = prefill.snapshot_seq;
      conv.snapshot_pos = prefill.snapshot_pos;
      conv.snapshot_slot = prefill.snapshot_slot;
      caller.call("causal_conv1d", plans.prefill_convolution, conv,
                  [&] { return internal::convolution_work(config, rows); });
      qkv = conv.out;
    }
    const Parts parts = parts_of(config.layer, qkv);
    prefill.q = parts.q;
    prefill.k = parts.k;
    prefill.v = parts.v;
    caller.call("kda_prefill", plans.prefill, prefill,
                [&] { return internal::kda_work(config, rows, step.num_requests); });
  });
  ++(step.num_requests == 1 ? routes.single : routes.packed);
  const ConstTensorView& snapshots = batch.snapshot_seq;
  if (snapshots.defined() && snapshots.shape[0] > 0) ++routes.snapshot;
}

void KdaBackend::State::decode(const KdaStep& step, const KdaForwardTensors& tensors) {
  const KdaBatch& batch = step.batch;
  const int64_t rows = step.num_rows;
  if (batch.out_slot.defined() && batch.out_slot.data != batch.in_slot.data) {
    internal::invalid(kKdaOp,
                      "decode with an out_slot besides in_slot; it is in place unless the backend "
                      "is deterministic");
  }
  KdaDecodeTensors decode;
  decode.g = first_rows(tensors.g, rows);
  decode.beta = first_rows(tensors.beta, rows);
  decode.a_log = tensors.a_log;
  decode.dt_bias = tensors.dt_bias;
  decode.state = tensors.state;
  decode.slot = batch.in_slot;
  decode.has_initial_state = batch.has_initial_state;
  decode.out = slice_rows(tensors.out, 0, rows);
  with_windows(step, tensors, [&] {
    decode.qkv = first_rows(tensors.qkv, rows);
    if (config.convolution) {
      CausalConv1dTensors conv = convolution(tensors, rows);
      conv.slot = batch.in_slot;
      conv.has_initial_state = batch.has_initial_state;
      caller.call("causal_conv1d", plans.update_convolution, conv,
                  [&] { return internal::convolution_work(config, rows); });
      decode.qkv = conv.out;
    }
    caller.call("kda_decode", plans.decode, decode,
                [&] { return internal::kda_work(config, rows, rows); });
  });
  ++routes.decode;
}

void KdaBackend::State::verify(const KdaStep& step, const internal::KdaVerifyPlans& by,
                               const internal::VerifyScratch& scratch, int64_t layer,
                               const KdaForwardTensors& tensors) {
  const KdaBatch& batch = step.batch;
  const int64_t rows = step.num_rows, requests = step.num_requests;
  KdaVerifyTensors verify;
  verify.qkv = first_rows(tensors.qkv, rows);
  if (config.convolution) {
    CausalConv1dTensors conv = convolution(tensors, rows);
    conv.slot = batch.in_slot;
    conv.has_initial_state = batch.has_initial_state;
    conv.window_scratch = slice_rows(scratch.window(layer), 0, requests);
    caller.call("causal_conv1d", by.convolution, conv,
                [&] { return internal::convolution_work(config, rows); });
    verify.qkv = conv.out;
  }
  verify.g = first_rows(tensors.g, rows);
  verify.beta = first_rows(tensors.beta, rows);
  verify.a_log = tensors.a_log;
  verify.dt_bias = tensors.dt_bias;
  verify.state = tensors.state;
  verify.slot = batch.in_slot;
  verify.has_initial_state = batch.has_initial_state;
  verify.out = slice_rows(tensors.out, 0, rows);
  verify.scratch = slice_rows(scratch.layer(layer), 0, requests);
  caller.call("kda_verify", by.verify, verify,
              [&] { return internal::kda_work(config, rows, requests + rows); });
}

// Rows of padding, before anything else: what follows leaves them alone, and ends with the pools.
void KdaBackend::State::clear_rows(const TensorView& out, int64_t begin) {
  const int64_t end = out.shape[0];
  if (begin >= end) return;
  const internal::PaddingRows rows{{}, slice_rows(out, begin, end)};
  caller.call_own(
      "clear_padding", [&] { internal::clear_padding(rows, device, caller.stream()); },
      [&] { return internal::padding_work(end - begin, 2 * out.shape[1] * out.shape[2]); });
}

// The pools are only read until the commit, which is one launch.
void KdaBackend::State::decode_verified(const KdaStep& step, const KdaForwardTensors& tensors) {
  verify(step, plans.verify_one, one, 0, tensors);
  KdaCommitTensors commit;
  commit.scratch = one.first_requests(step.num_requests);
  commit.accepted =
      make_tensor(const_cast<const void*>(ones.data()), DType::kI32, {step.num_requests});
  commit.slot = out_slot(step);
  commit.in_slot = step.batch.in_slot;
  commit.has_initial_state = step.batch.has_initial_state;
  commit.state = tensors.state;
  if (config.convolution) {
    commit.window_scratch = slice_rows(one.window(0), 0, step.num_requests);
    commit.window_state = tensors.window;
  }
  caller.call("kda_commit", plans.verify_one.commit, commit,
              [&] { return internal::commit_work(config, step.num_requests, 1); });
  ++routes.verified;
}

void KdaBackend::State::forward_kda(KdaStep* step, int64_t layer,
                                    const KdaForwardTensors& tensors) {
  check_kda(*step, layer, tensors);
  const ForwardMode mode = step->batch.forward.mode;
  internal::log_once(LogLevel::kDispatch,
                     std::string(kKdaOp) + ": KDA layers in mode " + std::string(to_string(mode)));
  clear_rows(tensors.out, mode == ForwardMode::kIdle ? 0 : step->num_rows);
  if (mode == ForwardMode::kIdle || step->num_requests == 0) {
    ++routes.idle;
  } else if (internal::is_extend(mode)) {
    extend(*step, tensors);
  } else if (mode == ForwardMode::kTargetVerify) {
    verify(*step, plans.verify, step->scratch, layer, tensors);
    step->verified[static_cast<size_t>(layer)] = true;
    ++routes.speculative;
  } else if (config.deterministic) {
    decode_verified(*step, tensors);
  } else {
    decode(*step, tensors);
  }
}

const DenseMla& KdaBackend::State::dense_of(float softmax_scale) {
  for (const auto& [scale, plan] : dense) {
    if (scale == softmax_scale) return plan;
  }
  dense.emplace_back(softmax_scale, internal::dense_plan(config, softmax_scale, device, options));
  caller.reserve(dense.back().second.workspace_bytes(), caller.stream());
  return dense.back().second;
}

void KdaBackend::State::forward_mla(const KdaStep& step, const KdaMlaTensors& tensors) {
  const int64_t rows = step.padded_rows;
  if (!step.begun) internal::invalid(kKdaOp, "no step has begun");
  if (config.num_mla_heads == 0) {
    internal::invalid(kKdaOp, "num_mla_heads = 0: the backend has no full-attention layers");
  }
  check_tensor(kKdaOp, "q", tensors.q, DType::kBf16,
               {rows, config.num_mla_heads, internal::kLatentWidth});
  check_optional(kKdaOp, "k", tensors.k, DType::kBf16, {rows, internal::kLatentWidth});
  check_tensor(kKdaOp, "kv_pool", tensors.kv_pool, DType::kU8, {kAnyExtent, kAnyExtent});
  check_tensor(kKdaOp, "out", tensors.out, DType::kBf16, {rows, config.num_mla_heads, kLatentDim});
  check_tensor(kKdaOp, "lse", tensors.lse, DType::kF32, {rows, config.num_mla_heads});
  const DenseMla& plan = dense_of(tensors.softmax_scale);
  if (tensors.k.defined()) {
    PackRowsTensors pack;
    pack.src = first_rows(tensors.k, step.num_rows);
    pack.slots = step.store_slots;
    pack.pool = tensors.kv_pool;
    caller.call("pack_rows", *plans.pack, pack, [&] {
      return internal::pack_rows_work(internal::metadata_config(config), step.num_rows);
    });
  }
  DenseMlaTensors mla;
  mla.q = tensors.q;
  mla.kv = tensors.kv_pool;
  mla.page_table = step.fields.page_table;
  mla.kv_len = step.fields.kv_len;
  mla.q_indptr = step.fields.q_indptr;
  mla.out = tensors.out;
  mla.lse = tensors.lse;
  caller.call("dense_mla", plan, mla,
              [&] { return internal::dense_work(config, step.host_fields()); });
  const internal::PaddingRows padding{step.fields.q_indptr, tensors.out, tensors.lse};
  caller.call_own(
      "clear_padding", [&] { internal::clear_padding(padding, device, caller.stream()); },
      [&] {
        return internal::padding_work(rows - step.num_rows,
                                      config.num_mla_heads * (2 * kLatentDim + 4));
      });
}

void KdaBackend::State::commit(KdaStep* step, const KdaCommitInputs& inputs) {
  if (step->verified.empty() || !step->begun) {
    internal::invalid(kKdaOp, "commit of a step plan without a verify");
  }
  for (size_t layer = 0; layer < step->verified.size(); ++layer) {
    if (step->verified[layer]) continue;
    internal::invalid(kKdaOp, "commit, but layer " + std::to_string(layer) +
                                  " has not been verified since begin_step");
  }
  KdaCommitTensors commit;
  commit.scratch = step->scratch.layers();
  commit.accepted = inputs.accepted;
  commit.slot = out_slot(*step);
  commit.in_slot = step->batch.in_slot;
  commit.has_initial_state = step->batch.has_initial_state;
  commit.state = inputs.state;
  commit.track_slot = inputs.track_slot;
  commit.track_accepted = inputs.track_accepted;
  if (config.convolution) {
    commit.window_scratch = step->scratch.windows();
    commit.window_state = inputs.window;
  }
  caller.call("kda_commit", plans.verify.commit, commit,
              [&] { return internal::commit_work(config, step->num_requests, config.num_layers); });
  ++routes.commits;
}

KdaStepPlan::KdaStepPlan(std::unique_ptr<State> state) : state_(std::move(state)) {}
KdaStepPlan::KdaStepPlan(KdaStepPlan&&) noexcept = default;
KdaStepPlan& KdaStepPlan::operator=(KdaStepPlan&&) noexcept = default;
KdaStepPlan::~KdaStepPlan() = default;
const StepBucket& KdaStepPlan::bucket() const noexcept { return *state_->step.bucket; }
const MetadataFields& KdaStepPlan::metadata() const noexcept { return state_->step.fields; }

KdaBackend::KdaBackend(const KdaBackendConfig& config, const Device& device)
    : state_(std::make_unique<State>(config, device)) {}
KdaBackend::~KdaBackend() = default;
KdaBackend::KdaBackend(KdaBackend&&) noexcept = default;
KdaBackend& KdaBackend::operator=(KdaBackend&&) noexcept = default;

KdaStepPlan KdaBackend::make_step_plan(const StepBucket& bucket) const {
  internal::check_row_bucket(kKdaOp, internal::metadata_config(state_->config), bucket);
  KdaStepPlan plan(
      std::make_unique<KdaStepPlan::State>(state_.get(), state_->config, state_->home(), bucket));
  state_->birth.synchronize();
  return plan;
}

void KdaBackend::begin_step(const KdaBatch& batch, Stream stream) {
  state_->begin(batch, &state_->own, stream);
}

void KdaBackend::begin_step(const KdaBatch& batch, KdaStepPlan* plan, Stream stream) {
  if (plan == nullptr) internal::invalid(kKdaOp, "plan is null; leave it out");
  state_->begin(batch, state_->step_of(plan->state_), stream);
}

void KdaBackend::forward_kda(int64_t layer, const KdaForwardTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward_kda(&state_->own, layer, tensors);
}

void KdaBackend::forward_kda(const KdaStepPlan& plan, int64_t layer,
                             const KdaForwardTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward_kda(state_->step_of(plan.state_), layer, tensors);
}

void KdaBackend::forward_mla(const KdaMlaTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward_mla(state_->own, tensors);
}

void KdaBackend::forward_mla(const KdaStepPlan& plan, const KdaMlaTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward_mla(*state_->step_of(plan.state_), tensors);
}

void KdaBackend::commit(const KdaStepPlan& plan, const KdaCommitInputs& inputs, Stream stream) {
  state_->caller.enter(stream);
  state_->commit(state_->step_of(plan.state_), inputs);
}

const KdaBackendConfig& KdaBackend::config() const noexcept { return state_->config; }
const KdaRoutes& KdaBackend::routes() const noexcept {
  state_->routes.fallback = state_->caller.fallbacks();
  return state_->routes;
}
const MetadataFields& KdaBackend::metadata() const noexcept { return state_->own.fields; }
void KdaBackend::set_profile(std::vector<OperatorCall>* calls) {
  state_->caller.set_profile(calls);
}

}  // namespace fovea
