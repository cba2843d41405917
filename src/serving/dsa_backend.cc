#include "fovea/dsa_backend.h"

#include <algorithm>
#include <array>

#include "fovea/stream.h"
#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/dsa_forward.h"
#include "src/serving/dsa_plans.h"
#include "src/serving/dsa_split.h"
#include "src/serving/dsa_step.h"
#include "src/serving/operator_caller.h"
#include "src/serving/operator_options.h"
#include "src/serving/selection_map.h"

namespace fovea {
namespace {

using internal::DsaStep;
using internal::StepShape;

// A step that passed its checks and is not yet anyone's current one.
struct NextStep {
  DsaStep* step = nullptr;
  ForwardBatch batch;
  int32_t kv_len_delta = 0;
  DsaDispatch dispatch;
  StepShape shape;
  MetadataFields fields;  // what a refresh writes
  bool check = false;
};

DsaConfig followed_config(const DsaConfig& given, const Device& device,
                          const internal::OperatorOptions& options) {
  DsaConfig config = given;
  config.split_parts = internal::followed_split_parts(given, device, options);
  return config;
}

bool follows_failures(const DsaConfig& config) {
  return !config.strict && !config.deterministic && config.implementation.empty();
}

StepShape shape_of(const ForwardBatch& batch, const DsaBatchFacts& facts) {
  StepShape shape;
  shape.num_requests = batch.seq_len.shape[0];
  shape.num_rows = batch.num_rows;
  shape.padded_rows = std::max(batch.num_rows, batch.padded_rows);
  shape.num_tokens = batch.num_rows;
  shape.padded_tokens = shape.padded_rows;
  shape.sum_kv_len = facts.sum_kv_len;
  if (batch.context_split != nullptr) {
    shape.num_requests = internal::selected_requests(*batch.context_split);
    shape.num_tokens = shape.padded_tokens = internal::stored_tokens(batch);
    shape.sum_kv_len = internal::selected_kv_len(*batch.context_split);
  }
  return shape;
}

MetadataTensors refresh_inputs(const ForwardBatch& batch, const DsaStep& step,
                               const internal::SplitWriter& writer) {
  if (batch.context_split != nullptr) {
    return internal::select_requests(batch, step.arrays, writer);
  }
  MetadataTensors tensors;
  tensors.seq_len = batch.seq_len;
  tensors.pool_row = batch.pool_row;
  tensors.req_to_token = batch.req_to_token;
  tensors.ext_len = batch.ext_len;
  return tensors;
}

// What a refresh writes. A bucket is written over all of its rows, so that a smaller batch leaves
// no trace of a larger one; but no row past E becomes a live one, whatever device lengths say, and
// the split plan is that of the T rows which forward has.
MetadataFields refreshed_fields(const DsaStep& step, ForwardMode mode, const StepShape& shape) {
  if (!step.bucket) {
    return step.arrays.views(mode, shape.num_requests, shape.num_rows, shape.padded_rows);
  }
  const int64_t rows = step.arrays.max_rows();
  MetadataFields fields = step.arrays.views(mode, shape.num_requests, rows, rows);
  fields.row_len = slice_rows(fields.row_len, 0, shape.num_rows);
  if (fields.split_indptr.defined()) {
    fields.split_indptr = slice_rows(fields.split_indptr, 0, shape.padded_rows + 1);
  }
  return fields;
}

// What refreshed_fields holds back: rows of a bucket past E have no keys.
void clear_row_tail(const NextStep& next, Stream stream) {
  const DsaStep& step = *next.step;
  const int64_t rows = step.arrays.max_rows();
  const TensorView row_len =
      step.arrays.views(next.batch.mode, next.shape.num_requests, rows, rows).row_len;
  const TensorView tail = slice_rows(row_len, next.shape.num_rows, row_len.shape[0]);
  fill_bytes(tail.data, step.device, 0, static_cast<size_t>(tail.num_elements()) * sizeof(int32_t),
             stream);
}

// num_rows of a draft extension may be a bound: what lies behind the last request must not be
// stored.
TensorView masked_slots(const NextStep& next, internal::OperatorCaller& caller) {
  const DsaStep& step = *next.step;
  const int64_t rows = next.shape.num_rows;
  const TensorView slots = slice_rows(step.arrays.store_slots(), 0, rows);
  const auto run = [&] {
    internal::mask_slots(next.fields.row_to_request, next.batch.out_cache_loc, slots, step.device,
                         caller.stream());
  };
  caller.call_own("mask_slots", run, [&] { return internal::mask_slots_work(rows); });
  return slots;
}

// The step becomes what its forwards read.
void make_current(const NextStep& next, internal::OperatorCaller& caller) {
  DsaStep& step = *next.step;
  const ForwardBatch& batch = next.batch;
  if (step.bucket) clear_row_tail(next, caller.stream());
  step.out_cache_loc = batch.mode == ForwardMode::kDraftExtend
                           ? ConstTensorView(masked_slots(next, caller))
                           : batch.out_cache_loc;
  step.dispatch = next.dispatch;
  step.shape = next.shape;
  step.mode = batch.mode;
  step.stream = caller.stream();
  step.fields = step.arrays.views(batch.mode, next.shape.num_requests, next.shape.num_rows,
                                  next.shape.padded_rows);
  if (next.dispatch.transform != IndexTransform::kRagged) step.fields.row_offset = {};
  step.positions = batch.positions;
  step.store_positions = batch.context_split != nullptr ? batch.store_positions : batch.positions;
  step.begun = true;
}

}  // namespace

struct DsaStepPlan::State {
  const void* owner;  // the backend's state
  DsaStep step;
  DeviceBuffer padding;  // positions and slots of the step that the plan holds at birth

  State(const void* owner_in, const DsaConfig& config, const internal::StepHome& home,
        const StepBucket& bucket)
      : owner(owner_in), step(config, home, bucket) {}
};

struct DsaBackend::State {
  DsaConfig given;
  Device device;
  // What fills new buffers does not queue behind the caller's work, and is done when the
  // constructor and make_step_plan return: then any stream may use them, also to capture.
  OwnedStream birth;
  internal::OperatorOptions options;
  DsaConfig config;  // what runs: split_parts only where a plan is followed
  internal::OperatorCaller caller;
  internal::DsaPlans plans;
  std::vector<internal::LayerPlans> layers;
  internal::ForwardScratch scratch;
  DsaStep own;  // of begin_step without a plan
  std::vector<int32_t> split_entries;

  State(const DsaConfig& config_in, const Device& device_in);

  internal::StepHome home() const { return {device, birth}; }
  const internal::LayerPlans& layer_plans(const DsaLayer& layer);
  NextStep prepare(const ForwardBatch& batch, DsaStep* step, int32_t kv_len_delta = 0) const;
  void begin(std::span<const NextStep> steps, internal::OperatorCaller& by);
  void begin(const NextStep& step) { begin({&step, 1}, caller); }
  void begin_padding(DsaStepPlan::State* plan);
  void check_contents(const NextStep& next);
  void check_selection(const DsaStep& step, const ConstTensorView& topk_indices);
  void run_check(const DsaStep& step, const MetadataCheckTensors& tensors);
  DsaStep* step_of(const std::unique_ptr<DsaStepPlan::State>& plan) const;
  void enter(Stream stream);
  void forward(const DsaStep& step, const DsaLayer& layer, const DsaForwardTensors& tensors);
};

DsaBackend::State::State(const DsaConfig& config_in, const Device& device_in)
    : given((internal::check_dsa_config(config_in), config_in)),
      device(device_in),
      birth(device_in),
      options(internal::kDsaOp, given.implementation),
      config(followed_config(given, device, options)),
      caller(device, options, follows_failures(config)),
      plans(config, device, options),
      scratch(config, home()),
      own(config, home()) {
  // Refuses now what attention would refuse at the first forward. Layers usually share one scale.
  const internal::LayerPlans any(config, {0, 1.0f}, device, options);
  caller.reserve(std::max(plans.workspace_bytes(), any.workspace_bytes()), birth);
  layers.reserve(8);
  if (config.context_parallel) {
    split_entries.resize(static_cast<size_t>(std::max(config.max_rows + 1, config.max_requests)));
  }
  birth.synchronize();
}

const internal::LayerPlans& DsaBackend::State::layer_plans(const DsaLayer& layer) {
  for (const internal::LayerPlans& known : layers) {
    if (known.layer.softmax_scale == layer.softmax_scale &&
        known.layer.logit_cap == layer.logit_cap && known.layer.q_scale == layer.q_scale &&
        known.layer.k_scale == layer.k_scale) {
      return known;
    }
  }
  internal::LayerPlans fresh(config, layer, device, options);
  caller.reserve(fresh.workspace_bytes(), caller.stream());  // no more than any other layer's
  layers.push_back(std::move(fresh));
  return layers.back();
}

NextStep DsaBackend::State::prepare(const ForwardBatch& batch, DsaStep* step,
                                    int32_t kv_len_delta) const {
  internal::check_forward_batch(config, batch, step->bucket, kv_len_delta);
  const DsaBatchFacts facts = internal::batch_facts(config, batch, kv_len_delta);
  NextStep next;
  next.step = step;
  next.batch = batch;
  next.kv_len_delta = kv_len_delta;
  next.dispatch = dsa_dispatch(config, device, facts);
  next.shape = shape_of(batch, facts);
  next.check = config.check;
  next.fields = refreshed_fields(*step, batch.mode, next.shape);
  return next;
}

// Steps of one batch, refreshed in one call.
void DsaBackend::State::begin(std::span<const NextStep> steps, internal::OperatorCaller& by) {
  const ForwardBatch& batch = steps.front().batch;
  const internal::SplitWriter writer{device, by.stream(), &split_entries};
  MetadataTensors tensors = refresh_inputs(batch, *steps.front().step, writer);
  const auto mode = static_cast<size_t>(batch.mode);
  tensors.num_steps = static_cast<int>(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    tensors.kv_len_delta[i] = steps[i].kv_len_delta;
    tensors.steps[i] = steps[i].fields;
    if (device.kind != DeviceKind::kCpu) {
      const NextStep& next = steps[i];
      next.step->lengths.fill(config, batch, next.shape, next.kv_len_delta);
    }
  }
  by.call("metadata_refresh", plans.refresh[mode], tensors, [&] {
    internal::OperatorWork work;
    for (const NextStep& next : steps) {
      const MetadataFields& fields =
          device.kind == DeviceKind::kCpu ? next.fields : next.step->lengths.fields();
      work.bytes += internal::metadata_work(config, fields).bytes;
    }
    return work;
  });
  // Not an operator call: a mismatch is never followed by another implementation.
  if (config.verify_metadata) plans.verify[mode].verify(tensors, by.stream());
  if (batch.context_split != nullptr) {
    const NextStep& next = steps.front();
    internal::fill_split_rows(batch, next.dispatch.fresh_kv, config.topk, next.fields, writer);
  }
  for (const NextStep& next : steps) {
    make_current(next, by);
    if (next.check) check_contents(next);
  }
}

void DsaBackend::State::check_contents(const NextStep& next) {
  const ForwardBatch& batch = next.batch;
  MetadataCheckTensors tensors;
  tensors.seq_len = batch.seq_len;
  tensors.pool_row = batch.pool_row;
  tensors.req_to_token = batch.req_to_token;
  tensors.ext_len = batch.ext_len;
  // Without the padding, which is not stored; so that rows past E are more than there is room for.
  tensors.out_cache_loc = slice_rows(batch.out_cache_loc, 0, next.shape.num_tokens);
  tensors.kv_len_delta = next.kv_len_delta;
  tensors.error_word = next.step->arrays.error_word();
  next.step->checked = tensors;
  run_check(*next.step, tensors);
}

// Slots that a caller selected. Positions and rows of contiguous keys have no capacity, and the
// rows of a rank are not those of the batch.
void DsaBackend::State::check_selection(const DsaStep& step, const ConstTensorView& topk_indices) {
  const bool are_slots = config.fuse_transform && step.dispatch.transform == IndexTransform::kPaged;
  const bool are_all_rows = step.shape.num_rows == step.shape.num_tokens;
  if (!step.checked.error_word.defined() || !topk_indices.defined()) return;
  if (!are_slots || !are_all_rows) return;
  MetadataCheckTensors tensors = step.checked;
  tensors.topk_indices = topk_indices;
  run_check(step, tensors);
}

void DsaBackend::State::run_check(const DsaStep& step, const MetadataCheckTensors& tensors) {
  caller.call("metadata_check", plans.check[static_cast<size_t>(step.mode)], tensors,
              [&] { return internal::metadata_work(config, step.host_fields()); });
  // What is captured tells nothing before it is replayed; report() does then.
  if (caller.is_capturing()) return;
  const MetadataReport report = internal::report_of(step);
  if (report.fault == MetadataFault::kNone) return;
  internal::log(LogLevel::kWarning, std::string(internal::kDsaOp) + ": " + to_string(report));
}

// What an engine pads a batch with, before any batch.
void DsaBackend::State::begin_padding(DsaStepPlan::State* plan) {
  const StepBucket& bucket = *plan->step.bucket;
  const int64_t requests = bucket.num_requests, rows = plan->step.arrays.max_rows();
  const auto bytes_of = [](int64_t entries) { return static_cast<size_t>(entries) * 4; };
  // Positions 0, then slots -1. What only this begin reads: lengths and pool rows, a table of slots
  // of the dummy page.
  internal::reserve_memory("the padding of a step plan", home(), bytes_of(2 * rows + 1),
                           &plan->padding);
  DeviceBuffer inputs;
  internal::reserve_memory("the padding of a step plan", home(),
                           bytes_of(2 * requests + config.table_width), &inputs);
  const auto view = [](DeviceBuffer& buffer, int64_t first, int64_t count) {
    return make_tensor(static_cast<void*>(static_cast<int32_t*>(buffer.data()) + first),
                       DType::kI32, {count});
  };
  const TensorView lengths = view(inputs, 0, requests);
  const std::vector<int32_t> host_lengths(static_cast<size_t>(requests), kPaddedSeqLen);
  static_assert(kPaddedPoolRow == 0);
  ForwardBatch batch;
  batch.mode = bucket.mode;
  batch.seq_len = lengths;
  batch.pool_row = view(inputs, requests, requests);  // 0, as the table behind them
  if (internal::reads_ext_len(bucket.mode)) batch.ext_len = lengths;
  batch.req_to_token =
      make_tensor(static_cast<const void*>(static_cast<int32_t*>(inputs.data()) + 2 * requests),
                  DType::kI32, {1, config.table_width});
  batch.positions = view(plan->padding, 0, rows);
  batch.out_cache_loc = view(plan->padding, rows, rows);
  batch.num_rows = rows;
  NextStep padding = prepare(batch, &plan->step);
  padding.check = false;

  fill_bytes(inputs.data(), device, 0, inputs.bytes(), birth);
  copy_bytes(lengths.data, device, host_lengths.data(), Device::cpu(1), bytes_of(requests), birth);
  fill_bytes(plan->padding.data(), device, 0, bytes_of(rows), birth);
  fill_bytes(const_cast<void*>(batch.out_cache_loc.data), device, 0xFF, bytes_of(rows), birth);
  // A workspace of its own: that of the steps may be in use.
  internal::OperatorCaller by(device, options, follows_failures(config));
  by.reserve(plans.refresh[static_cast<size_t>(bucket.mode)].workspace_bytes(), birth);
  by.enter(birth);
  begin({&padding, 1}, by);
  birth.synchronize();
}

DsaStep* DsaBackend::State::step_of(const std::unique_ptr<DsaStepPlan::State>& plan) const {
  if (plan != nullptr && plan->owner == this) return &plan->step;
  internal::invalid(internal::kDsaOp, plan == nullptr ? "the step plan was moved from"
                                                      : "the step plan belongs to another backend");
}

// Everything that follows goes to `stream`.
void DsaBackend::State::enter(Stream stream) {
  caller.enter(stream);
  if (!config.verify_metadata || !caller.is_capturing()) return;
  internal::unsupported(internal::kDsaOp,
                        "verify_metadata while the stream is being captured: the comparison waits "
                        "for the device; turn it off, or run steps without a graph");
}

void DsaBackend::State::forward(const DsaStep& step, const DsaLayer& layer,
                                const DsaForwardTensors& tensors) {
  if (!step.begun) internal::invalid(internal::kDsaOp, "forward without begin_step");
  internal::check_forward_tensors(config, step.dispatch, step.shape, layer, tensors);
  check_selection(step, tensors.topk_indices);
  internal::DsaForward(config, device, plans, layer_plans(layer), step, scratch, caller)
      .run(tensors);
}

DsaStepPlan::DsaStepPlan(std::unique_ptr<State> state) : state_(std::move(state)) {}
DsaStepPlan::DsaStepPlan(DsaStepPlan&&) noexcept = default;
DsaStepPlan& DsaStepPlan::operator=(DsaStepPlan&&) noexcept = default;
DsaStepPlan::~DsaStepPlan() = default;
const StepBucket& DsaStepPlan::bucket() const noexcept { return *state_->step.bucket; }
const DsaDispatch& DsaStepPlan::dispatch() const noexcept { return state_->step.dispatch; }
const MetadataFields& DsaStepPlan::metadata() const noexcept { return state_->step.fields; }
MetadataReport DsaStepPlan::report() const { return internal::report_of(state_->step); }

DsaBackend::DsaBackend(const DsaConfig& config, const Device& device)
    : state_(std::make_unique<State>(config, device)) {}
DsaBackend::~DsaBackend() = default;
DsaBackend::DsaBackend(DsaBackend&&) noexcept = default;
DsaBackend& DsaBackend::operator=(DsaBackend&&) noexcept = default;

DsaStepPlan DsaBackend::make_step_plan(const StepBucket& bucket) const {
  internal::check_bucket(state_->config, bucket);
  auto plan =
      std::make_unique<DsaStepPlan::State>(state_.get(), state_->config, state_->home(), bucket);
  state_->begin_padding(plan.get());
  return DsaStepPlan(std::move(plan));
}

void DsaBackend::begin_step(const ForwardBatch& batch, Stream stream) {
  state_->enter(stream);
  state_->begin(state_->prepare(batch, &state_->own));
}

void DsaBackend::begin_step(const ForwardBatch& batch, DsaStepPlan* plan, Stream stream) {
  state_->enter(stream);
  if (plan == nullptr) internal::invalid(internal::kDsaOp, "plan is null");
  state_->begin(state_->prepare(batch, state_->step_of(plan->state_)));
}

void DsaBackend::begin_draft_steps(const ForwardBatch& batch, std::span<const DraftStep> steps,
                                   Stream stream) {
  state_->enter(stream);
  internal::check_draft_steps(batch, steps);
  std::array<NextStep, kMaxRefreshSteps> next;
  for (size_t i = 0; i < steps.size(); ++i) {
    ForwardBatch draft = batch;
    draft.positions = steps[i].positions;
    draft.out_cache_loc = steps[i].out_cache_loc;
    next[i] = state_->prepare(draft, state_->step_of(steps[i].plan->state_),
                              steps[i].kv_len_delta.value_or(static_cast<int32_t>(i) + 1));
  }
  if (!steps.empty()) state_->begin({next.data(), steps.size()}, state_->caller);
}

void DsaBackend::forward(const DsaLayer& layer, const DsaForwardTensors& tensors, Stream stream) {
  state_->enter(stream);
  state_->forward(state_->own, layer, tensors);
}

void DsaBackend::forward(const DsaStepPlan& plan, const DsaLayer& layer,
                         const DsaForwardTensors& tensors, Stream stream) {
  state_->enter(stream);
  state_->forward(*state_->step_of(plan.state_), layer, tensors);
}

const DsaConfig& DsaBackend::config() const noexcept { return state_->given; }
const DsaDispatch& DsaBackend::dispatch() const noexcept { return state_->own.dispatch; }
const MetadataFields& DsaBackend::metadata() const noexcept { return state_->own.fields; }
MetadataReport DsaBackend::report() const { return internal::report_of(state_->own); }
void DsaBackend::set_profile(std::vector<OperatorCall>* calls) {
  state_->caller.set_profile(calls);
}

}  // namespace fovea
