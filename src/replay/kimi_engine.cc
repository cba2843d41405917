#include "src/replay/kimi_engine.h"

#include <algorithm>

#include "fovea/sparse_mla.h"
#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/replay/digest.h"

namespace fovea::internal {
namespace {

KdaBackendConfig backend_config(const RunSetup& setup, const EngineConfig& config,
                                int64_t max_rows) {
  KdaBackendConfig result;
  result.layer = kimi_layer(kimi_shape(setup.model), setup.num_heads());
  result.num_layers = std::max<int64_t>(1, num_kda_layers(setup));
  result.num_mla_heads = setup.num_heads();
  result.page_size = setup.page_size;
  result.table_width = config.table_width;
  result.max_requests = config.max_requests;
  result.max_rows = max_rows;
  result.rows_per_request = setup.draft_tokens + 1;
  result.max_snapshots = StateSlots::max_snapshots(setup, config);
  result.deterministic = setup.deterministic;
  result.implementation = setup.implementation;
  return result;
}

}  // namespace

int64_t num_kda_layers(const RunSetup& setup) {
  return std::count_if(setup.layers.begin(), setup.layers.end(),
                       [&](int64_t layer) { return is_kda_layer(setup.model, layer); });
}

StatePoolConfig kimi_state_pool(const RunSetup& setup, int64_t num_slots) {
  const KimiShape& shape = kimi_shape(setup.model);
  StatePoolConfig config;
  config.num_layers = std::max<int64_t>(1, num_kda_layers(setup));
  config.num_slots = num_slots;
  config.num_value_heads = setup.num_heads();
  config.head_dim_k = shape.head_dim_k;
  config.head_dim_v = shape.head_dim_v;
  config.window_shape = {kConvHistory,
                         setup.num_heads() * (2 * shape.head_dim_k + shape.head_dim_v)};
  return config;
}

KimiEngine::KimiEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : StepEngine(setup, plan, std::move(config)),
      inputs_(setup.model, setup.workload, setup.num_heads(), setup.seed),
      kda_layers_(num_kda_layers(setup)),
      backend_(backend_config(setup, this->config(), backend_rows()), setup.device),
      states_(kimi_state_pool(setup, StateSlots::of_requests_and_pages(setup, this->config())),
              setup.device),
      state_slots_(setup, this->config()) {
  const Device& device = setup.device;
  int64_t mla_layers = 0, kda_layers = 0;
  for (const int64_t layer : setup.layers) {
    pool_layer_.push_back(is_kda_layer(setup.model, layer) ? kda_layers++ : mla_layers++);
  }
  if (mla_layers > 0) {
    kv_pool_.emplace(KvPoolConfig{RowFormat::kBf16, kKimiRowWidth, mla_layers,
                                  this->config().num_pages + 1, setup.page_size},
                     device);
  }
  const KimiShape& shape = inputs_.shape();
  const int64_t heads = inputs_.num_heads(), channels = inputs_.num_channels();
  for (const int64_t rows : slot_rows()) {
    Slot slot;
    slot.qkv = {device, DType::kBf16, {rows, channels}};
    slot.gate = {device, DType::kBf16, {rows, heads, shape.head_dim_k}};
    slot.beta = {device, DType::kF32, {rows, heads}};
    slot.out = {device, DType::kBf16, {rows, heads, shape.head_dim_v}};
    slot.q = {device, DType::kBf16, {rows, heads, kKimiRowWidth}};
    slot.k = {device, DType::kBf16, {rows, kKimiRowWidth}};
    slot.mla_out = {device, DType::kBf16, {rows, heads, kLatentDim}};
    slot.lse = {device, DType::kF32, {rows, heads}};
    slots_.push_back(std::move(slot));
  }
  const int64_t layers = std::max<int64_t>(1, kda_layers_);
  conv_weight_ = {device, DType::kBf16, {layers, channels, kConvWidth}};
  conv_bias_ = {device, DType::kBf16, {layers, channels}};
  a_log_ = {device, DType::kF32, {layers, heads}};
  dt_bias_ = {device, DType::kF32, {layers, heads, shape.head_dim_k}};
  for (size_t i = 0; i < setup.layers.size(); ++i) {
    if (!is_kda_layer(setup.model, setup.layers[i])) continue;
    const int64_t l = pool_layer_[i];
    inputs_.weights(setup.layers[i], {conv_weight_.row<bf16_t>(l), conv_bias_.row<bf16_t>(l),
                                      a_log_.row<float>(l), dt_bias_.row<float>(l)});
  }
  const int64_t requests = this->config().max_requests;
  accepted_ = {device, DType::kI32, {requests}};
  has_state_ = {device, DType::kU8, {requests}};
  for (StagedTensor* tensor : {&conv_weight_, &conv_bias_, &a_log_, &dt_bias_}) {
    tensor->upload(0, layers, {});
  }
  backend_.set_profile(profile());
  // The stream of the steps is not ordered behind the default one.
  synchronize(device);
}

void KimiEngine::collect_profile() {
  if (setup().device.kind == DeviceKind::kCuda) backend_.set_profile(profile());
}

int64_t KimiEngine::sample_bytes() const {
  return samples_.count() * inputs_.num_heads() * (2 * kLatentDim + 4);
}

void KimiEngine::start_step() { samples_.start_step(); }

void KimiEngine::make_plans(GroupKind kind, int64_t bucket) {
  const int64_t count = kind == GroupKind::kChain ? num_draft_steps() : 1;
  std::vector<KdaStepPlan> made;
  for (int64_t i = 0; i < count; ++i) {
    made.push_back(backend_.make_step_plan({plan_mode(kind), bucket, rows_per_request(kind)}));
  }
  plans_.insert_or_assign({kind, bucket}, std::move(made));
}

// The snapshot of the prefix that is one page shorter, which may be empty, where that of the page
// belongs.
void KimiEngine::file_wrong_snapshot(const StepGroup& group) {
  if (!fault_is_due() || fault().kind != "snapshot") return;
  const std::vector<int32_t>& pages = group.scheduler->state(fault().request).pages;
  const auto page = static_cast<size_t>(fault().page);
  if (page == 0) {
    states_.clear(state_slots_.of_page(pages[page]), stream());
  } else {
    states_.copy(state_slots_.of_page(pages[page - 1]), state_slots_.of_page(pages[page]),
                 stream());
  }
}

bool KimiEngine::decodes_in_place(const StepGroup& group) const {
  return !setup().deterministic &&
         (group.kind == GroupKind::kBatch || group.kind == GroupKind::kDecode) &&
         group.forward.front().mode == ForwardMode::kDecode;
}

void KimiEngine::fill_slots(const StepGroup& group) {
  auto* const has = static_cast<uint8_t*>(has_state_.host(1).data);
  auto* const accepted = static_cast<int32_t*>(accepted_.host(1).data);
  const int64_t requests = group.forward.front().seq_len.shape[0];
  std::fill_n(has, requests, uint8_t{0});
  std::fill_n(accepted, requests, 0);
  int64_t r = 0;
  const bool in_place = decodes_in_place(group);
  state_slots_.upload_slots(
      group, stream(), [&](const StepEntry& entry, int32_t* in, int32_t* out) {
        has[r] = entry.begin > 0 ? 1 : 0;
        accepted[r] = static_cast<int32_t>(entry.kept_rows());
        ++r;
        *in = state_slots_.before(group, entry);
        if (*in < 0) *in = state_slots_.current(entry.pool_row);  // no state yet, as `has` says
        *out = state_slots_.other(entry.pool_row);
        // The state before the step stays, so that the step can be run again.
        if (!in_place) return;
        states_.copy(*in, *out, stream());
        *in = *out;
      });
  for (StagedTensor* tensor : {&has_state_, &accepted_}) tensor->upload(0, requests, stream());
}

KdaBatch KimiEngine::batch_of(const StepGroup& group, size_t index) const {
  auto batch = state_slots_.batch_of<KdaBatch>(group, index, !decodes_in_place(group));
  if (StateSlots::are_used_by(group)) {
    batch.has_initial_state = has_state_.on_device(batch.forward.seq_len.shape[0]);
  }
  return batch;
}

// What changes from step to step lies in these arrays, so that a captured step can be replayed.
void KimiEngine::prepare(const StepGroup& group) {
  state_slots_.forget_snapshots();
  if (!StateSlots::are_used_by(group)) return;
  if (group.kind == GroupKind::kBatch) {
    file_wrong_snapshot(group);
    state_slots_.upload_snapshots(group, stream());
  }
  fill_slots(group);
}

void KimiEngine::begin(const StepGroup& group) {
  if (group.kind == GroupKind::kBatch) {
    backend_.begin_step(batch_of(group, 0), stream());
    return;
  }
  std::vector<KdaStepPlan>& plans = plans_.at({group.kind, group.bucket});
  for (size_t i = 0; i < plans.size(); ++i) {
    backend_.begin_step(batch_of(group, i), &plans[i], stream());
  }
}

// Rows of padding keep what an earlier call left there.
void KimiEngine::stage(const LayerCall& call) {
  Slot& in = slot(call);
  const bool kda = is_kda(call);
  for_each_row(call, [&](int64_t t, const RowToken& row) {
    if (kda) {
      inputs_.qkv(call.layer, row.token_id, in.qkv.row<bf16_t>(t));
      inputs_.gate(call.layer, row.token_id, in.gate.row<bf16_t>(t));
      inputs_.beta(call.layer, row.token_id, in.beta.row<float>(t));
    } else {
      inputs_.query(call.layer, row, in.q.row<bf16_t>(t));
      inputs_.latent_key(call.layer, row.token_id, in.k.row<bf16_t>(t));
    }
  });
  const auto rows = static_cast<int64_t>(call.rows().rows().size());
  if (kda) {
    for (StagedTensor* tensor : {&in.qkv, &in.gate, &in.beta}) tensor->upload(0, rows, stream());
  } else {
    for (StagedTensor* tensor : {&in.q, &in.k}) tensor->upload(0, rows, stream());
  }
}

void KimiEngine::forward(const LayerCall& call) {
  if (!is_kda(call)) return forward_mla(call);
  forward_kda(call);
  if (call.group.kind == GroupKind::kVerify && pool_layer(call) + 1 == kda_layers_) commit(call);
}

void KimiEngine::forward_kda(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const int64_t rows = call.rows().num_padded_rows(), layer = pool_layer(call);
  KdaForwardTensors tensors;
  tensors.qkv = slot.qkv.on_device(rows);
  tensors.g = slot.gate.on_device(rows);
  tensors.beta = slot.beta.on_device(rows);
  tensors.a_log = a_log_.row_on_device(layer);
  tensors.dt_bias = dt_bias_.row_on_device(layer);
  tensors.conv_weight = conv_weight_.row_on_device(layer);
  tensors.conv_bias = conv_bias_.row_on_device(layer);
  tensors.state = states_.state(layer);
  tensors.window = states_.window(layer);
  tensors.out = slot.out.on_device(rows);
  if (call.group.kind == GroupKind::kBatch) {
    backend_.forward_kda(layer, tensors, stream());
  } else {
    backend_.forward_kda(plans_.at({call.group.kind, call.group.bucket}).front(), layer, tensors,
                         stream());
  }
}

void KimiEngine::forward_mla(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const int64_t rows = call.rows().num_padded_rows();
  KdaMlaTensors tensors;
  tensors.q = slot.q.on_device(rows);
  tensors.k = slot.k.on_device(rows);
  tensors.kv_pool = kv_pool_->layer(pool_layer(call));
  tensors.softmax_scale = inputs_.shape().softmax_scale;
  tensors.out = slot.mla_out.on_device(rows);
  tensors.lse = slot.lse.on_device(rows);
  if (call.group.kind == GroupKind::kBatch) {
    backend_.forward_mla(tensors, stream());
  } else {
    backend_.forward_mla(
        plans_.at({call.group.kind, call.group.bucket})[static_cast<size_t>(call.batch_index)],
        tensors, stream());
  }
}

void KimiEngine::commit(const LayerCall& call) {
  const int64_t requests = call.group.forward.front().seq_len.shape[0];
  KdaCommitInputs inputs;
  inputs.accepted = accepted_.on_device(requests);
  inputs.state = states_.states();
  inputs.window = states_.windows();
  backend_.commit(plans_.at({call.group.kind, call.group.bucket}).front(), inputs, stream());
}

Digest KimiEngine::read(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const bool kda = is_kda(call);
  const std::vector<StepRow>& rows = call.rows().rows();
  StagedTensor& out = kda ? slot.out : slot.mla_out;
  const RowRange range = rows_to_read(call), sampled = sampled_rows(call);
  out.download(range.begin, range.end, stream());
  if (!kda) slot.lse.download(sampled.begin, sampled.end, stream());
  synchronize(setup().device, stream());
  for (size_t t = 0; t < rows.size(); ++t) {
    const CheckRow* const wanted =
        filter().sampled(call.entry(rows[t]), rows[t].position, call.layer_index);
    if (wanted == nullptr) continue;
    const auto index = static_cast<int64_t>(t);
    const std::span<const bf16_t> output = out.row<bf16_t>(index);
    KimiSample sample{*wanted, {output.begin(), output.end()}, {}};
    if (!kda) {
      const std::span<const float> lse = slot.lse.row<float>(index);
      sample.lse.assign(lse.begin(), lse.end());
    }
    samples_.of_step()->push_back(std::move(sample));
  }
  if (call.draft) return {};
  std::vector<Digest> sums(static_cast<size_t>(setup().device.num_threads));
  ParallelFor(static_cast<int64_t>(rows.size()), 16, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t t = begin; t < end; ++t) {
      const StepRow& row = rows[static_cast<size_t>(t)];
      const StepEntry& entry = call.entry(row);
      if (!filter().enters_digest(entry, row.position)) continue;
      const DigestRow name{setup().workload.request(entry.request).trace_row, row.position,
                           call.layer};
      sums[static_cast<size_t>(worker)] += {0, digest_output(name, out.row<bf16_t>(t)), 1};
    }
  });
  Digest total;
  for (const Digest& sum : sums) total += sum;
  return total;
}

void KimiEngine::commit_step(const StepBatch& batch) {
  for (const StepEntry& entry : batch.entries) state_slots_.swap(entry.pool_row);
  samples_.commit_step();
}

std::vector<CheckedRow> KimiEngine::check_samples() {
  const std::vector<KimiSample> samples = samples_.take();
  if (samples.empty()) return {};
  std::vector<CheckVerdict> verdicts = KimiChecker(inputs_, setup().layers).check(samples);
  std::vector<CheckedRow> rows;
  for (size_t i = 0; i < samples.size(); ++i) {
    rows.push_back({samples[i].row, std::move(verdicts[i])});
  }
  return rows;
}

}  // namespace fovea::internal
