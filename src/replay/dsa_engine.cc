#include "src/replay/dsa_engine.h"

#include <algorithm>
#include <utility>

#include "fovea/sparse_mla.h"
#include "src/core/tensor_generator.h"

namespace fovea::internal {
namespace {

DsaConfig backend_config(const RunSetup& setup, const EngineConfig& bounds, int64_t max_rows) {
  const DsaShape& shape = dsa_shape(setup.model);
  DsaConfig result;
  result.num_heads = setup.num_heads();
  result.index_heads = shape.index_heads;
  result.index_dim = shape.index_dim;
  result.rope_dim = shape.rope_dim;
  result.topk = setup.topk;
  result.page_size = setup.page_size;
  result.row_format = shape.row_format;
  result.kv_scale_mode = shape.kv_scale_mode;
  result.index_scale_mode = shape.index_scale_mode;
  result.index_rope_style = shape.index_rope_style;
  result.hadamard = shape.hadamard;
  result.max_requests = bounds.max_requests;
  result.max_rows = max_rows;
  result.rows_per_request = setup.draft_tokens + 1;
  result.table_width = bounds.table_width;
  result.deterministic = setup.deterministic;
  result.implementation = setup.implementation;
  return result;
}

KvPoolConfig pool_config(const RunSetup& setup, const EngineConfig& bounds, RowFormat format,
                         int64_t width) {
  return {format, width, static_cast<int64_t>(setup.layers.size()), bounds.num_pages + 1,
          setup.page_size};
}

}  // namespace

DsaEngine::DsaEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : StepEngine(setup, plan, std::move(config)),
      inputs_(setup.model, setup.workload, setup.num_heads(), setup.seed),
      backend_(backend_config(setup, this->config(), backend_rows()), setup.device),
      kv_pool_(pool_config(setup, this->config(), inputs_.shape().row_format, kDsaRowWidth),
               setup.device),
      index_pool_(pool_config(setup, this->config(), RowFormat::kI132, inputs_.shape().index_dim),
                  setup.device),
      reader_(this->config().num_pages, setup.page_size, setup.device.num_threads) {
  const DsaShape& shape = inputs_.shape();
  const Device& device = setup.device;
  const int64_t heads = inputs_.num_heads();
  for (const int64_t rows : slot_rows()) {
    Slot slot;
    slot.q = {device, DType::kBf16, {rows, heads, kDsaRowWidth}};
    slot.k = {device, DType::kBf16, {rows, kDsaRowWidth}};
    slot.index_q = {device, DType::kBf16, {rows, shape.index_heads, shape.index_dim}};
    slot.index_k = {device, DType::kBf16, {rows, shape.index_dim}};
    slot.head_gate = {device, DType::kF32, {rows, shape.index_heads}};
    slot.out = {device, DType::kBf16, {rows, heads, kLatentDim}};
    slot.lse = {device, DType::kF32, {rows, heads}};
    slot.indices = {device, DType::kI32, {rows, setup.topk}};
    slots_.push_back(std::move(slot));
  }
  const int64_t positions = this->config().table_width;
  cos_sin_ = {device, DType::kF32, {positions, shape.rope_dim}};
  generate_cos_sin(positions, shape.rope_dim, static_cast<float*>(cos_sin_.host(positions).data));
  cos_sin_.upload(0, positions, {});
  norm_weight_ = {device, DType::kF32, {num_layers(), shape.index_dim}};
  norm_bias_ = {device, DType::kF32, {num_layers(), shape.index_dim}};
  for (int64_t l = 0; l < num_layers(); ++l) {
    inputs_.norm(setup.layers[static_cast<size_t>(l)], norm_weight_.row<float>(l),
                 norm_bias_.row<float>(l));
  }
  norm_weight_.upload(0, num_layers(), {});
  norm_bias_.upload(0, num_layers(), {});
  backend_.set_profile(profile());
  // The stream of the steps is not ordered behind the default one.
  synchronize(device);
}

void DsaEngine::collect_profile() {
  if (setup().device.kind == DeviceKind::kCuda) backend_.set_profile(profile());
}

int64_t DsaEngine::sample_bytes() const {
  return samples_.count() * (inputs_.num_heads() * (2 * kLatentDim + 4) + setup().topk * 4);
}

void DsaEngine::make_plans(GroupKind kind, int64_t bucket) {
  const int64_t count = kind == GroupKind::kChain ? num_draft_steps() : 1;
  std::vector<DsaStepPlan> made;
  for (int64_t i = 0; i < count; ++i) {
    made.push_back(backend_.make_step_plan({plan_mode(kind), bucket, rows_per_request(kind)}));
  }
  plans_.insert_or_assign({kind, bucket}, std::move(made));
}

void DsaEngine::begin(const StepGroup& group) {
  ForwardBatch batch = group.forward.front();
  if (group.kind == GroupKind::kBatch) {
    backend_.begin_step(batch, stream());
    return;
  }
  std::vector<DsaStepPlan>& plans = this->plans(group);
  if (group.kind != GroupKind::kChain) {
    backend_.begin_step(batch, &plans.front(), stream());
    return;
  }
  std::vector<DraftStep> steps;
  for (size_t j = 0; j < plans.size(); ++j) {
    const ForwardBatch& step = group.forward[j];
    steps.push_back({&plans[j], step.positions, step.out_cache_loc, std::nullopt});
  }
  batch.positions = {};
  batch.out_cache_loc = {};
  backend_.begin_draft_steps(batch, steps, stream());
}

// Rows of padding keep what an earlier call left there.
void DsaEngine::stage(const LayerCall& call) {
  Slot& in = slot(call);
  for_each_row(call, [&](int64_t t, const RowToken& row) {
    inputs_.query(call.layer, row, in.q.row<bf16_t>(t));
    inputs_.latent_key(call.layer, row.token_id, in.k.row<bf16_t>(t));
    inputs_.index_query(call.layer, row, in.index_q.row<bf16_t>(t));
    inputs_.index_key(call.layer, row.token_id, in.index_k.row<bf16_t>(t));
    inputs_.head_gate(call.layer, row.token_id, in.head_gate.row<float>(t));
  });
  const auto rows = static_cast<int64_t>(call.rows().rows().size());
  for (StagedTensor* tensor : {&in.q, &in.k, &in.index_q, &in.index_k, &in.head_gate}) {
    tensor->upload(0, rows, stream());
  }
}

DsaForwardTensors DsaEngine::tensors(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const int64_t rows = call.rows().num_padded_rows();
  DsaForwardTensors result;
  result.q = slot.q.on_device(rows);
  result.k = slot.k.on_device(rows);
  result.index_q = slot.index_q.on_device(rows);
  result.index_k = slot.index_k.on_device(rows);
  result.norm_weight = norm_weight_.row_on_device(call.layer_index);
  result.norm_bias = norm_bias_.row_on_device(call.layer_index);
  result.head_gate = slot.head_gate.on_device(rows);
  result.cos_sin = cos_sin_.on_device(config().table_width);
  result.kv_pool = kv_pool_.layer(call.layer_index);
  result.index_pool = index_pool_.layer(call.layer_index);
  result.indices = slot.indices.on_device(rows);
  result.out = slot.out.on_device(rows);
  result.lse = slot.lse.on_device(rows);
  return result;
}

void DsaEngine::forward(const LayerCall& call) {
  const DsaLayer layer{call.layer, inputs_.shape().softmax_scale};
  if (call.group.kind == GroupKind::kBatch) {
    backend_.forward(layer, tensors(call), stream());
  } else {
    backend_.forward(plans(call.group)[static_cast<size_t>(call.batch_index)], layer, tensors(call),
                     stream());
  }
}

Digest DsaEngine::read(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const RowRange range = rows_to_read(call);
  const RowRange sampled = sampled_rows(call);
  slot.indices.download(range.begin, range.end, stream());
  slot.out.download(range.begin, range.end, stream());
  slot.lse.download(sampled.begin, sampled.end, stream());
  synchronize(setup().device, stream());
  const int64_t rows = call.rows().num_padded_rows();
  DsaLayerRows layer;
  layer.layer_index = call.layer_index;
  layer.layer = call.layer;
  layer.indices = slot.indices.host(rows);
  layer.out = slot.out.host(rows);
  layer.lse = slot.lse.host(rows);
  layer.rows = call.rows().rows();
  layer.batch = call.group.step;
  layer.req_to_token = call.group.scheduler->table().view();
  reader_.take_samples(layer, filter(), samples_.of_step());
  return call.draft ? Digest{} : reader_.digest(layer, filter(), inputs_.workload());
}

std::vector<CheckedRow> DsaEngine::check_samples() {
  const std::vector<DsaSample> samples = samples_.take();
  if (samples.empty()) return {};
  const DsaChecker checker(inputs_, setup().layers, setup().topk,
                           {setup().implementation, setup().device});
  std::vector<CheckVerdict> verdicts = checker.check(samples);
  std::vector<CheckedRow> rows;
  for (size_t i = 0; i < samples.size(); ++i) {
    rows.push_back({samples[i].row, std::move(verdicts[i])});
  }
  return rows;
}

}  // namespace fovea::internal
