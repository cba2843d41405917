#include "fovea/msa_backend.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "fovea/stream.h"
#include "src/batch/forward_modes.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/serving/msa_plans.h"
#include "src/serving/operator_caller.h"
#include "src/serving/operator_options.h"
#include "src/serving/row_step.h"

namespace fovea {
namespace {

using internal::kMsaBackendOp;
using internal::MsaPlans;
using internal::RowStep;

bool follows_failures(const MsaBackendConfig& config) {
  return !config.strict && !config.deterministic && config.implementation.empty();
}

// Rows of tokens [rows, heads, dim] as [rows, heads * dim]; `view.rank` 3 and heads side by side.
template <class View>
View joined_heads(View view) {
  view.rank = 2;
  view.shape[1] *= view.shape[2];
  view.stride[1] = 1;
  return view;
}

template <class View>
View one_head(View view, int64_t head) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, uint8_t, const uint8_t>;
  view.data = static_cast<Byte*>(view.data) +
              head * view.stride[1] * static_cast<int64_t>(size_of(view.dtype));
  view.rank = 2;
  view.shape[1] = view.shape[2];
  view.stride[1] = 1;
  return view;
}

bool heads_are_joined(const ConstTensorView& view) {
  return view.shape[1] <= 1 || view.stride[1] == view.shape[2];
}

}  // namespace

struct MsaStepPlan::State {
  const void* owner;  // the backend's state
  RowStep step;
  MsaPlans plans;
};

struct MsaBackend::State {
  MsaBackendConfig config;
  Device device;
  // What fills new buffers does not queue behind the caller's work, and is done when the
  // constructor and make_step_plan return: then any stream may use them, also to capture.
  OwnedStream birth;
  internal::OperatorOptions options;
  DsaConfig metadata;
  internal::OperatorCaller caller;
  std::vector<MetadataRefresh> refresh;
  MsaPlans many;            // of extend and mixed steps
  MsaPlans few;             // of the other modes, as far as rows are few
  RowStep own;              // of begin_step without a plan
  DeviceBuffer lists;       // i32 [Hkv, max rows, K]
  DeviceBuffer all_blocks;  // i32 [pages]: 0, 1, .., with dense layers
  MsaRoutes routes;
  bool has_logged[2][7] = {};  // [dense][mode]

  State(const MsaBackendConfig& config_in, const Device& device_in);
  internal::StepHome home() const { return {device, birth, kMsaBackendOp}; }

  MsaStepPlan::State* state_of(const std::unique_ptr<MsaStepPlan::State>& plan) const;
  void begin(const MsaBatch& batch, RowStep* step, Stream stream);
  const MsaPlans& own_plans() const;
  void forward(const RowStep& step, const MsaPlans& plans, bool dense,
               const MsaForwardTensors& tensors);
  void store(const RowStep& step, const PackRows& plan, const ConstTensorView& rows,
             const TensorView& pool);
  void store_heads(const RowStep& step, const MsaPlans& plans, const ConstTensorView& rows,
                   const TensorView& pool);
  ConstTensorView select(const RowStep& step, const MsaPlans& plans,
                         const MsaForwardTensors& tensors);
  void attend(const RowStep& step, const MsaPlans& plans, bool dense, const ConstTensorView& blocks,
              const MsaForwardTensors& tensors);
  ConstTensorView every_block(int64_t rows) const;
  void count(const RowStep& step, bool dense, bool given);
  void log_first(ForwardMode mode, bool dense);
};

MsaBackend::State::State(const MsaBackendConfig& config_in, const Device& device_in)
    : config(internal::check_msa_config(config_in)),
      device(device_in),
      birth(device_in),
      options(kMsaBackendOp, config.implementation),
      metadata(internal::metadata_config(config)),
      caller(device, options, follows_failures(config)),
      refresh(internal::refresh_plans(metadata, device, options)),
      many(config, config.max_requests, metadata.max_rows, device, options),
      few(config, config.max_requests, config.max_requests * config.rows_per_request, device,
          options),
      own(metadata, home()) {
  size_t bytes = std::max(many.workspace_bytes(), few.workspace_bytes());
  for (const MetadataRefresh& plan : refresh) bytes = std::max(bytes, plan.workspace_bytes());
  caller.reserve(bytes, birth);
  const int64_t entries =
      config.num_kv_heads * metadata.max_rows * internal::msa_list_columns(config);
  internal::reserve_memory("the lists of blocks", home(),
                           static_cast<size_t>(entries) * sizeof(int32_t), &lists);
  if (config.dense_layers) {
    std::vector<int32_t> ids(static_cast<size_t>(internal::msa_table_pages(config)));
    std::iota(ids.begin(), ids.end(), 0);
    const size_t id_bytes = ids.size() * sizeof(int32_t);
    internal::reserve_memory("the blocks of dense layers", home(), id_bytes, &all_blocks);
    copy_bytes(all_blocks.data(), device, ids.data(), Device::cpu(1), id_bytes, birth);
    birth.synchronize();  // `ids` ends here
  }
  birth.synchronize();
}

// A batch of few rows may have much padding.
const MsaPlans& MsaBackend::State::own_plans() const {
  const bool fits = own.padded_rows <= config.max_requests * config.rows_per_request;
  return internal::is_extend(own.mode) || !fits ? many : few;
}

MsaStepPlan::State* MsaBackend::State::state_of(
    const std::unique_ptr<MsaStepPlan::State>& plan) const {
  if (plan == nullptr || plan->owner != this) {
    internal::invalid(kMsaBackendOp, "the step plan belongs to another backend or was moved from");
  }
  return plan.get();
}

void MsaBackend::State::begin(const MsaBatch& batch, RowStep* step, Stream stream) {
  internal::check_row_batch(kMsaBackendOp, "rows of all ranks would need one cache", metadata,
                            batch.forward, step->bucket, batch.kv_len_delta);
  caller.enter(stream);
  internal::begin_rows(metadata, refresh, batch.forward, batch.kv_len_delta, caller, step);
}

// Rows of padding have no slot.
void MsaBackend::State::store(const RowStep& step, const PackRows& plan,
                              const ConstTensorView& rows, const TensorView& pool) {
  PackRowsTensors tensors;
  tensors.src = internal::first_rows(rows, step.num_rows);
  tensors.slots = step.store_slots;
  tensors.pool = pool;
  caller.call("pack_rows", plan, tensors,
              [&] { return internal::msa_store_work(step.num_rows, rows.shape[1]); });
}

void MsaBackend::State::store_heads(const RowStep& step, const MsaPlans& plans,
                                    const ConstTensorView& rows, const TensorView& pool) {
  if (heads_are_joined(rows) && heads_are_joined(pool)) {
    return store(step, plans.store_row, joined_heads(rows), joined_heads(pool));
  }
  for (int64_t head = 0; head < config.num_kv_heads; ++head) {
    store(step, plans.store_head, one_head(rows, head), one_head(pool, head));
  }
}

ConstTensorView MsaBackend::State::select(const RowStep& step, const MsaPlans& plans,
                                          const MsaForwardTensors& tensors) {
  TensorView blocks = tensors.blocks;
  if (!blocks.defined()) {
    blocks =
        make_tensor(lists.data(), DType::kI32,
                    {config.num_kv_heads, step.padded_rows, internal::msa_list_columns(config)});
  }
  MsaScoreSelectTensors select;
  select.iq = tensors.index_q;
  select.index_k = tensors.index_pool;
  select.page_table = step.fields.page_table;
  select.kv_len = step.fields.kv_len;
  select.q_indptr = step.fields.q_indptr;
  select.blocks = blocks;
  caller.call("msa_score_select", plans.select, select,
              [&] { return internal::msa_select_work(config, step.host_fields()); });
  return blocks;
}

// One list for every row and head: what a row does not see contributes nothing.
ConstTensorView MsaBackend::State::every_block(int64_t rows) const {
  ConstTensorView view = make_tensor(const_cast<const void*>(all_blocks.data()), DType::kI32,
                                     {1, 1, internal::msa_table_pages(config)});
  view.shape[0] = config.num_kv_heads;
  view.shape[1] = rows;
  view.stride[0] = view.stride[1] = 0;
  return view;
}

void MsaBackend::State::attend(const RowStep& step, const MsaPlans& plans, bool dense,
                               const ConstTensorView& blocks, const MsaForwardTensors& tensors) {
  MsaAttendTensors attend;
  attend.q = tensors.q;
  attend.k_pool = tensors.k_pool;
  attend.v_pool = tensors.v_pool;
  attend.page_table = step.fields.page_table;
  attend.kv_len = step.fields.kv_len;
  attend.q_indptr = step.fields.q_indptr;
  attend.blocks = blocks;
  attend.out = tensors.out;
  attend.lse = tensors.lse;
  caller.call("msa_attend", dense ? *plans.attend_all : plans.attend, attend,
              [&] { return internal::msa_attend_work(config, dense, step.host_fields()); });
}

void MsaBackend::State::count(const RowStep& step, bool dense, bool given) {
  if (step.mode == ForwardMode::kIdle || step.num_requests == 0) {
    ++routes.idle;
  } else if (internal::is_extend(step.mode)) {
    ++routes.extend;
  } else if (step.mode == ForwardMode::kDecode) {
    ++routes.decode;
  } else if (step.mode == ForwardMode::kTargetVerify) {
    ++routes.verify;
  } else {
    ++routes.draft;
  }
  if (dense) ++routes.dense;
  if (given) ++routes.given;
}

// A message costs an allocation: made once.
void MsaBackend::State::log_first(ForwardMode mode, bool dense) {
  bool& logged = has_logged[dense ? 1 : 0][static_cast<size_t>(mode)];
  if (logged) return;
  logged = true;
  internal::log_once(LogLevel::kDispatch, std::string(kMsaBackendOp) +
                                              (dense ? ": dense" : ": sparse") +
                                              " layers in mode " + std::string(to_string(mode)));
}

void MsaBackend::State::forward(const RowStep& step, const MsaPlans& plans, bool dense,
                                const MsaForwardTensors& tensors) {
  if (!step.begun) internal::invalid(kMsaBackendOp, "no step has begun");
  if (dense && !config.dense_layers) {
    internal::invalid(kMsaBackendOp, "forward_dense, but dense_layers is off");
  }
  internal::check_msa_forward(config, step.padded_rows, dense, tensors);
  log_first(step.mode, dense);
  if (tensors.k.defined()) {
    store_heads(step, plans, tensors.k, tensors.k_pool);
    store_heads(step, plans, tensors.v, tensors.v_pool);
  }
  const bool given = tensors.topk_blocks.defined();
  if (!dense && !given && tensors.index_k.defined()) {
    store(step, plans.store_index, tensors.index_k, joined_heads(tensors.index_pool));
  }
  const ConstTensorView blocks = dense   ? every_block(step.padded_rows)
                                 : given ? tensors.topk_blocks
                                         : select(step, plans, tensors);
  attend(step, plans, dense, blocks, tensors);
  count(step, dense, given);
}

MsaStepPlan::MsaStepPlan(std::unique_ptr<State> state) : state_(std::move(state)) {}
MsaStepPlan::MsaStepPlan(MsaStepPlan&&) noexcept = default;
MsaStepPlan& MsaStepPlan::operator=(MsaStepPlan&&) noexcept = default;
MsaStepPlan::~MsaStepPlan() = default;
const StepBucket& MsaStepPlan::bucket() const noexcept { return *state_->step.bucket; }
const MetadataFields& MsaStepPlan::metadata() const noexcept { return state_->step.fields; }

MsaBackend::MsaBackend(const MsaBackendConfig& config, const Device& device)
    : state_(std::make_unique<State>(config, device)) {}
MsaBackend::~MsaBackend() = default;
MsaBackend::MsaBackend(MsaBackend&&) noexcept = default;
MsaBackend& MsaBackend::operator=(MsaBackend&&) noexcept = default;

MsaStepPlan MsaBackend::make_step_plan(const StepBucket& bucket) {
  State& state = *state_;
  internal::check_row_bucket(kMsaBackendOp, state.metadata, bucket);
  const int64_t rows = bucket.num_requests * bucket.rows_per_request;
  MsaStepPlan plan(std::make_unique<MsaStepPlan::State>(MsaStepPlan::State{
      &state, RowStep(state.metadata, state.home(), bucket),
      MsaPlans(state.config, bucket.num_requests, rows, state.device, state.options)}));
  state.caller.reserve(plan.state_->plans.workspace_bytes(), state.birth);
  state.birth.synchronize();
  return plan;
}

void MsaBackend::begin_step(const MsaBatch& batch, Stream stream) {
  state_->begin(batch, &state_->own, stream);
}

void MsaBackend::begin_step(const MsaBatch& batch, MsaStepPlan* plan, Stream stream) {
  if (plan == nullptr) internal::invalid(kMsaBackendOp, "plan is null; leave it out");
  state_->begin(batch, &state_->state_of(plan->state_)->step, stream);
}

void MsaBackend::forward(const MsaForwardTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward(state_->own, state_->own_plans(), false, tensors);
}

void MsaBackend::forward(const MsaStepPlan& plan, const MsaForwardTensors& tensors, Stream stream) {
  const MsaStepPlan::State& of_plan = *state_->state_of(plan.state_);
  state_->caller.enter(stream);
  state_->forward(of_plan.step, of_plan.plans, false, tensors);
}

void MsaBackend::forward_dense(const MsaForwardTensors& tensors, Stream stream) {
  state_->caller.enter(stream);
  state_->forward(state_->own, state_->own_plans(), true, tensors);
}

void MsaBackend::forward_dense(const MsaStepPlan& plan, const MsaForwardTensors& tensors,
                               Stream stream) {
  const MsaStepPlan::State& of_plan = *state_->state_of(plan.state_);
  state_->caller.enter(stream);
  state_->forward(of_plan.step, of_plan.plans, true, tensors);
}

const MsaBackendConfig& MsaBackend::config() const noexcept { return state_->config; }
const MsaRoutes& MsaBackend::routes() const noexcept {
  state_->routes.fallback = state_->caller.fallbacks();
  return state_->routes;
}
const MetadataFields& MsaBackend::metadata() const noexcept { return state_->own.fields; }
int64_t MsaBackend::list_width() const noexcept {
  return internal::msa_list_columns(state_->config);
}
void MsaBackend::set_profile(std::vector<OperatorCall>* calls) {
  state_->caller.set_profile(calls);
}

}  // namespace fovea
