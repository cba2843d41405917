#include "fovea/v4_backend.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "fovea/stream.h"
#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/core/workspace.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/operator_caller.h"
#include "src/serving/operator_options.h"
#include "src/serving/selection_map.h"
#include "src/serving/v4_plans.h"
#include "src/serving/v4_rows.h"
#include "src/serving/v4_step.h"

namespace fovea {
namespace {

using internal::first_rows;
using internal::kCsaRatio;
using internal::kHcaRatio;
using internal::kV4Op;
using internal::V4Step;

bool follows_failures(const V4BackendConfig& config) {
  return !config.strict && !config.deterministic && config.implementation.empty();
}

// Bytes that a small kernel moves: `count` elements of `bytes`.
internal::OperatorWork moved(int64_t count, int64_t bytes) {
  return {0, static_cast<double>(count * bytes)};
}

int64_t state_elements(const TensorView& state) {
  return state.shape[0] == 0 ? 0 : state.num_elements() / state.shape[0];
}

}  // namespace

struct V4StepPlan::State {
  const void* owner;  // the backend's state
  V4Step step;

  State(const void* owner_in, const V4BackendConfig& config, const internal::StepHome& home,
        const StepBucket& bucket)
      : owner(owner_in), step(config, home, bucket) {}
};

struct V4Backend::State {
  V4BackendConfig config;
  Device device;
  // What fills new buffers does not queue behind the caller's work, and is done when the
  // constructor and make_step_plan return: then any stream may use them, also to capture.
  OwnedStream birth;
  internal::OperatorOptions options;
  internal::OperatorCaller caller;
  internal::V4Plans plans;
  V4Step own;  // of begin_step without a plan
  // Scratch of a layer's forward.
  DeviceBuffer memory, verify_state;
  TensorView q_fp8, q_scale, head_weight;
  V4Routes routes;
  std::array<uint8_t, 7> logged{};  // by mode, a bit for each ratio

  State(const V4BackendConfig& config_in, const Device& device_in);
  internal::StepHome home() const { return {device, birth, kV4Op}; }
  void cut(Workspace memory_in, size_t* bytes);

  V4Step* step_of(const std::unique_ptr<V4StepPlan::State>& plan) const;
  void begin(const V4Batch& batch, V4Step* step, Stream stream);
  void find_windows(V4Step* step);
  void forward(const V4Step& step, int64_t ratio, const V4ForwardTensors& tensors);
  void store_window(const V4Step& step, const V4ForwardTensors& tensors);
  void compress(const V4Step& step, const V4Compress& plan, const V4Compressor& compressor,
                const ConstTensorView& cos_sin);
  void run_compressor(const V4Step& step, const V4Compress& plan, const V4Compressor& compressor,
                      const ConstTensorView& cos_sin, const internal::StateCopy& slots,
                      const ConstTensorView& row_to_request);
  void move_states(const internal::StateCopy& copy);
  void take_snapshots(const V4Step& step, const V4Compressor& compressor);
  TensorView select(const V4Step& step, const V4ForwardTensors& tensors);
  void attend(const V4Step& step, int64_t ratio, const V4ForwardTensors& tensors,
              const TensorView& selection);
  void commit(const V4Step& step, int64_t ratio, const V4ForwardTensors& tensors,
              const ConstTensorView& accepted);

  void log_first(ForwardMode mode, int64_t ratio);
  bool is_online(const V4Compress& plan) const {
    return plan.problem().form == CompressorForm::kOnline;
  }
};

V4Backend::State::State(const V4BackendConfig& config_in, const Device& device_in)
    : config((internal::check_v4_config(config_in), config_in)),
      device(device_in),
      birth(device_in),
      options(kV4Op, config.implementation),
      caller(device, options, follows_failures(config)),
      plans(config, device, options),
      own(config, home()) {
  caller.reserve(plans.workspace_bytes(), birth);
  size_t bytes = 0;
  cut({}, &bytes);
  internal::reserve_memory("the scratch arrays of a forward", home(), bytes, &memory);
  cut(memory.workspace(), &bytes);
  if (config.hca && config.hca_form == CompressorForm::kOnline && config.rows_per_request > 1) {
    const auto floats = static_cast<size_t>(config.max_requests * 3 * kLatentDim);
    internal::reserve_memory("the states of a verify", home(), floats * sizeof(float),
                             &verify_state);
  }
  birth.synchronize();
}

void V4Backend::State::cut(Workspace memory_in, size_t* bytes) {
  internal::WorkspaceCutter cutter(memory_in);
  const int64_t rows = config.csa ? internal::metadata_config(config).max_rows : 0;
  const auto array = [&](DType dtype, std::initializer_list<int64_t> shape) {
    TensorView view = make_tensor(static_cast<void*>(nullptr), dtype, shape);
    view.data = cutter.take<uint8_t>(view.num_elements() * static_cast<int64_t>(size_of(dtype)));
    return view;
  };
  q_fp8 = array(DType::kU8, {rows, config.index_heads, internal::kV4IndexDim});
  q_scale = array(DType::kF32, {rows, config.index_heads});
  head_weight = array(DType::kF32, {rows, config.index_heads});
  *bytes = cutter.used_bytes();
}

V4Step* V4Backend::State::step_of(const std::unique_ptr<V4StepPlan::State>& plan) const {
  if (plan == nullptr || plan->owner != this) {
    internal::invalid(kV4Op, "the step plan belongs to another backend or was moved from");
  }
  return &plan->step;
}

void V4Backend::State::begin(const V4Batch& batch, V4Step* step, Stream stream) {
  internal::check_v4_batch(config, batch, step->bucket);
  caller.enter(stream);
  const ForwardBatch& forward = batch.forward;
  const DsaConfig metadata = internal::metadata_config(config);
  step->batch = batch;
  // A captured step may be replayed with longer requests.
  step->sees_all = internal::sees_all(config, config.table_width);
  if (!step->bucket && !forward.host_seq_len.empty()) {
    const int32_t longest =
        *std::max_element(forward.host_seq_len.begin(), forward.host_seq_len.end());
    step->sees_all |= internal::sees_all(
        config, longest + internal::length_addend(metadata, forward.mode, batch.kv_len_delta));
  }
  internal::begin_rows(metadata, plans.refresh, forward, batch.kv_len_delta, caller, step);
  step->begun = false;  // not yet
  find_windows(step);
  step->begun = true;
}

void V4Backend::State::find_windows(V4Step* step) {
  step->v4 = step->row_arrays.views(step->num_requests, step->padded_rows);
  SwaIndicesTensors tensors;
  tensors.q_indptr = step->fields.q_indptr;
  tensors.kv_len = step->fields.kv_len;
  tensors.page_table = config.window_storage == V4WindowStorage::kTokenPages
                           ? ConstTensorView(step->fields.page_table)
                           : step->batch.window_table;
  tensors.indices = step->v4.window_indices;
  tensors.row_len = step->v4.window_len;
  caller.call("build_swa_indices", plans.window, tensors,
              [&] { return internal::swa_indices_work(config, step->num_rows); });
  internal::V4RowFacts facts;
  facts.row_len = step->fields.row_len;
  facts.row_to_request = step->fields.row_to_request;
  facts.window_indices = step->v4.window_indices;
  facts.window_len = step->v4.window_len;
  facts.topk = config.topk;
  facts.positions = step->v4.positions;
  facts.window_slots = step->v4.window_slots;
  facts.csa_len = step->v4.csa_len;
  facts.selected_len = step->v4.selected_len;
  facts.hca_len = step->v4.hca_len;
  caller.call_own(
      "v4_row_facts", [&] { internal::fill_row_facts(facts, device, caller.stream()); },
      [&] { return moved(step->num_rows, 9 * 4); });
  const bool has_scratch = verify_state.bytes() > 0 && step->batch.in_slot.defined();
  if (!has_scratch || step->mode != ForwardMode::kTargetVerify) return;
  caller.call_own(
      "v4_own_slots",
      [&] {
        internal::own_slots(step->batch.in_slot, step->v4.own_slots, device, caller.stream());
      },
      [&] { return moved(step->num_requests, 8); });
}

void V4Backend::State::store_window(const V4Step& step, const V4ForwardTensors& tensors) {
  if (!tensors.kv.defined()) return;
  PackRowsTensors pack;
  pack.src = first_rows(tensors.kv, step.num_rows);
  pack.slots = slice_rows(step.v4.window_slots, 0, step.num_rows);
  pack.pool = tensors.window_pool;
  caller.call("pack_rows", plans.pack, pack,
              [&] { return internal::pack_window_work(config, step.num_rows); });
}

void V4Backend::State::move_states(const internal::StateCopy& copy) {
  caller.call_own(
      "v4_copy_states", [&] { internal::copy_states(copy, device, caller.stream()); },
      [&] { return moved(copy.to.shape[0], 8 * state_elements(copy.target)); });
}

void V4Backend::State::take_snapshots(const V4Step& step, const V4Compressor& compressor) {
  const V4Batch& batch = step.batch;
  if (!batch.snapshot_seq.defined() || batch.snapshot_seq.shape[0] == 0) return;
  internal::StateSnapshots snapshots;
  snapshots.kv_gate = first_rows(compressor.kv_gate, step.num_rows);
  snapshots.ape = compressor.ape;
  snapshots.kv_len = step.fields.kv_len;
  snapshots.q_indptr = step.fields.q_indptr;
  snapshots.slot = step.out_slot();
  snapshots.seq = batch.snapshot_seq;
  snapshots.pos = batch.snapshot_pos;
  snapshots.to = batch.snapshot_slot;
  snapshots.state = compressor.state;
  caller.call_own(
      "v4_snapshot_states", [&] { internal::snapshot_states(snapshots, device, caller.stream()); },
      [&] { return moved(batch.snapshot_seq.shape[0], 8 * state_elements(compressor.state)); });
}

// `slots`: the states that the compressor advances, and which.
void V4Backend::State::run_compressor(const V4Step& step, const V4Compress& plan,
                                      const V4Compressor& compressor,
                                      const ConstTensorView& cos_sin,
                                      const internal::StateCopy& slots,
                                      const ConstTensorView& row_to_request) {
  V4CompressTensors in;
  in.kv_gate = first_rows(compressor.kv_gate, step.num_rows);
  in.ape = compressor.ape;
  in.norm_weight = compressor.norm_weight;
  in.positions = slice_rows(step.v4.positions, 0, step.num_rows);
  in.row_to_request = first_rows(row_to_request, step.num_rows);
  in.cos_sin = cos_sin;
  in.state = slots.target;
  in.state_slot = slots.to;
  in.page_table = step.fields.page_table;
  in.pool = compressor.pool;
  in.emitted = slice_rows(step.v4.emitted, 0, step.num_rows);
  const V4CompressProblem& problem = plan.problem();
  caller.call("v4_compress", plan, in, [&] {
    return internal::compress_work(config, problem.ratio, problem.head_dim, step.num_rows,
                                   step.num_requests);
  });
}

void V4Backend::State::compress(const V4Step& step, const V4Compress& plan,
                                const V4Compressor& compressor, const ConstTensorView& cos_sin) {
  internal::StateCopy states{compressor.state, step.batch.in_slot, compressor.state,
                             step.out_slot()};
  const bool verifies = step.mode == ForwardMode::kTargetVerify;
  if (is_online(plan) && verifies && verify_state.bytes() > 0) {
    states.target =
        make_tensor(verify_state.data(), DType::kF32, {config.max_requests, 3, kLatentDim});
    states.to = step.v4.own_slots;
    move_states(states);
  } else {
    if (step.batch.out_slot.defined()) move_states(states);
    if (plan.problem().ratio == kCsaRatio) take_snapshots(step, compressor);
  }
  run_compressor(step, plan, compressor, cos_sin, states, step.fields.row_to_request);
}

// Slots of the entries that the rows see, [T, topk].
TensorView V4Backend::State::select(const V4Step& step, const V4ForwardTensors& tensors) {
  const TensorView selection = tensors.indices.defined() ? tensors.indices : step.v4.selection;
  const int64_t rows = step.num_rows;
  if (step.sees_all || step.num_requests == 0) {
    internal::SelectionMap map;
    map.page_size = internal::compressed_page(config, kCsaRatio);
    map.row_len = slice_rows(step.v4.csa_len, 0, rows);
    map.page_table = step.fields.page_table;
    map.row_to_request = step.fields.row_to_request;
    map.indices = selection;
    caller.call_own(
        "map_selection", [&] { internal::map_selection(map, device, caller.stream()); },
        [&] { return moved(rows * config.topk, 8); });
    return selection;
  }
  IndexQuantizeTensors quantize;
  quantize.q = first_rows(tensors.index_q, rows);
  quantize.head_gate = first_rows(tensors.head_gate, rows);
  quantize.positions = slice_rows(step.v4.positions, 0, rows);
  quantize.q_fp8 = slice_rows(q_fp8, 0, rows);
  quantize.q_scale = slice_rows(q_scale, 0, rows);
  quantize.head_weight = slice_rows(head_weight, 0, rows);
  caller.call("index_quantize", *plans.quantize, quantize,
              [&] { return internal::index_query_work(config, rows); });
  IndexSelectTensors in;
  in.q_fp8 = quantize.q_fp8;
  in.head_weight = quantize.head_weight;
  in.index_pool = tensors.indexer.pool;
  in.page_table = step.fields.page_table;
  in.row_to_request = slice_rows(step.fields.row_to_request, 0, rows);
  in.row_len = slice_rows(step.v4.csa_len, 0, rows);
  in.indices = selection;
  caller.call("index_select", *plans.select, in,
              [&] { return internal::entry_select_work(config, step.host_fields()); });
  return selection;
}

void V4Backend::State::attend(const V4Step& step, int64_t ratio, const V4ForwardTensors& tensors,
                              const TensorView& selection) {
  SparseMlaTensors in;
  in.q = tensors.q;
  in.kv = tensors.window_pool;
  in.indices = step.v4.window_indices;
  in.topk_length = step.v4.window_len;
  in.sink = tensors.sink;
  in.inverse_rope = tensors.cos_sin;
  in.positions = step.v4.positions;
  in.out = tensors.out;
  in.lse = tensors.lse;
  const SparseMla* plan = &plans.attend_window;
  if (ratio == kCsaRatio) {
    plan = &*plans.attend_csa;
    in.extra_kv = tensors.compressor.pool;
    in.extra_indices = selection;
    in.extra_topk_length = step.v4.selected_len;
  } else if (ratio == kHcaRatio && plans.attend_hca->problem().extra_topk > 0) {
    plan = &*plans.attend_hca;
    in.extra_kv = tensors.compressor.pool;
    in.extra_page_table = step.fields.page_table;
    in.extra_len = step.v4.hca_len;
    in.row_to_request = step.fields.row_to_request;
  }
  caller.call("sparse_mla", *plan, in,
              [&] { return internal::attend_work(config, ratio, step.host_fields()); });
}

void V4Backend::State::log_first(ForwardMode mode, int64_t ratio) {
  uint8_t& known = logged[static_cast<size_t>(mode)];
  const auto bit = static_cast<uint8_t>(ratio == 0 ? 1 : ratio == kCsaRatio ? 2 : 4);
  if ((known & bit) != 0) return;
  known |= bit;
  internal::log_once(LogLevel::kDispatch, std::string(kV4Op) + ": layers of ratio " +
                                              std::to_string(ratio) + " in mode " +
                                              std::string(to_string(mode)));
}

void V4Backend::State::forward(const V4Step& step, int64_t ratio, const V4ForwardTensors& tensors) {
  internal::check_v4_tensors(config, step, ratio, tensors);
  log_first(step.mode, ratio);
  const bool idle = step.mode == ForwardMode::kIdle || step.num_requests == 0;
  if (!idle) {
    store_window(step, tensors);
    if (ratio == kCsaRatio) {
      compress(step, *plans.compress_csa, tensors.compressor, tensors.cos_sin);
      compress(step, *plans.compress_index, tensors.indexer, tensors.cos_sin);
    } else if (ratio == kHcaRatio) {
      compress(step, *plans.compress_hca, tensors.compressor, tensors.cos_sin);
    }
  }
  TensorView selection;
  if (ratio == kCsaRatio) selection = select(step, tensors);
  attend(step, ratio, tensors, selection);
  ++(idle                 ? routes.idle
     : ratio == 0         ? routes.window
     : ratio == kHcaRatio ? routes.pages
     : step.sees_all      ? routes.all
                          : routes.selected);
  const ConstTensorView& snapshots = step.batch.snapshot_seq;
  if (ratio == kCsaRatio && snapshots.defined() && snapshots.shape[0] > 0) ++routes.snapshot;
}

void V4Backend::State::commit(const V4Step& step, int64_t ratio, const V4ForwardTensors& tensors,
                              const ConstTensorView& accepted) {
  if (!step.begun || step.mode != ForwardMode::kTargetVerify) {
    internal::invalid(kV4Op, "commit of a step plan without a verify");
  }
  internal::check_v4_tensors(config, step, ratio, tensors);
  internal::check_tensor(kV4Op, "accepted", accepted, DType::kI32, {step.num_requests});
  ++routes.commits;
  if (ratio != kHcaRatio || !is_online(*plans.compress_hca) || verify_state.bytes() == 0) return;
  const internal::AcceptedRows rows{slice_rows(step.fields.row_to_request, 0, step.num_rows),
                                    accepted, step.bucket->rows_per_request,
                                    slice_rows(step.v4.kept, 0, step.num_rows)};
  caller.call_own(
      "v4_keep_accepted", [&] { internal::keep_accepted(rows, device, caller.stream()); },
      [&] { return moved(step.num_rows, 8); });
  const internal::StateCopy states{tensors.compressor.state, step.batch.in_slot,
                                   tensors.compressor.state, step.out_slot()};
  if (step.batch.out_slot.defined()) move_states(states);
  run_compressor(step, *plans.compress_hca, tensors.compressor, tensors.cos_sin, states,
                 step.v4.kept);
}

V4StepPlan::V4StepPlan(std::unique_ptr<State> state) : state_(std::move(state)) {}
V4StepPlan::V4StepPlan(V4StepPlan&&) noexcept = default;
V4StepPlan& V4StepPlan::operator=(V4StepPlan&&) noexcept = default;
V4StepPlan::~V4StepPlan() = default;
const StepBucket& V4StepPlan::bucket() const noexcept { return *state_->step.bucket; }
const MetadataFields& V4StepPlan::metadata() const noexcept { return state_->step.fields; }

V4Backend::V4Backend(const V4BackendConfig& config, const Device& device)
    : state_(std::make_unique<State>(config, device)) {}
V4Backend::~V4Backend() = default;
V4Backend::V4Backend(V4Backend&&) noexcept = default;
V4Backend& V4Backend::operator=(V4Backend&&) noexcept = default;

V4StepPlan V4Backend::make_step_plan(const StepBucket& bucket) const {
  internal::check_row_bucket(kV4Op, internal::metadata_config(state_->config), bucket);
  V4StepPlan plan(
      std::make_unique<V4StepPlan::State>(state_.get(), state_->config, state_->home(), bucket));
  state_->birth.synchronize();
  return plan;
}

void V4Backend::begin_step(const V4Batch& batch, Stream stream) {
  state_->begin(batch, &state_->own, stream);
}

void V4Backend::begin_step(const V4Batch& batch, V4StepPlan* plan, Stream stream) {
  if (plan == nullptr) internal::invalid(kV4Op, "plan is null; leave it out");
  state_->begin(batch, state_->step_of(plan->state_), stream);
}

void V4Backend::forward(int64_t ratio, const V4ForwardTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward(state_->own, ratio, tensors);
}

void V4Backend::forward(const V4StepPlan& plan, int64_t ratio, const V4ForwardTensors& tensors,
                        Stream stream) {
  state_->caller.enter(stream);
  state_->forward(*state_->step_of(plan.state_), ratio, tensors);
}

void V4Backend::commit(const V4StepPlan& plan, int64_t ratio, const V4ForwardTensors& tensors,
                       const ConstTensorView& accepted, Stream stream) {
  state_->caller.enter(stream);
  state_->commit(*state_->step_of(plan.state_), ratio, tensors, accepted);
}

const V4BackendConfig& V4Backend::config() const noexcept { return state_->config; }
const V4Routes& V4Backend::routes() const noexcept {
  state_->routes.fallback = state_->caller.fallbacks();
  return state_->routes;
}
const MetadataFields& V4Backend::metadata() const noexcept { return state_->own.fields; }
void V4Backend::set_profile(std::vector<OperatorCall>* calls) { state_->caller.set_profile(calls); }

}  // namespace fovea
