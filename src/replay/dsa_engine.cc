#include "src/replay/dsa_engine.h"

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

size_t bytes_of(int64_t rows, int64_t width, DType dtype) {
  return static_cast<size_t>(rows * width) * size_of(dtype);
}

template <class T>
std::span<T> row_of(HostBuffer& buffer, int64_t row, int64_t width) {
  return {static_cast<T*>(buffer.data()) + row * width, static_cast<size_t>(width)};
}

}  // namespace

DsaEngine::DsaEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : StepEngine(setup, plan, std::move(config)),
      inputs_(setup.model, setup.workload, setup.num_heads(), setup.seed),
      backend_(backend_config(setup, this->config(), max_rows()), setup.device),
      kv_pool_(pool_config(setup, this->config(), inputs_.shape().row_format, kDsaRowWidth),
               setup.device),
      index_pool_(pool_config(setup, this->config(), RowFormat::kI132, inputs_.shape().index_dim),
                  setup.device),
      reader_(this->config().num_pages, setup.page_size, setup.device.num_threads) {
  const DsaShape& shape = inputs_.shape();
  const int64_t rows = max_rows();
  const int64_t heads = inputs_.num_heads();
  const int64_t positions = this->config().table_width;
  q_.reserve(bytes_of(rows, heads * kDsaRowWidth, DType::kBf16));
  k_.reserve(bytes_of(rows, kDsaRowWidth, DType::kBf16));
  index_q_.reserve(bytes_of(rows, shape.index_heads * shape.index_dim, DType::kBf16));
  index_k_.reserve(bytes_of(rows, shape.index_dim, DType::kBf16));
  head_gate_.reserve(bytes_of(rows, shape.index_heads, DType::kF32));
  out_.reserve(bytes_of(rows, heads * kLatentDim, DType::kBf16));
  lse_.reserve(bytes_of(rows, heads, DType::kF32));
  indices_.reserve(bytes_of(rows, setup.topk, DType::kI32));
  cos_sin_.resize(static_cast<size_t>(positions * shape.rope_dim));
  generate_cos_sin(positions, shape.rope_dim, cos_sin_.data());
  for (const int64_t layer : setup.layers) {
    norm_weight_.emplace_back(static_cast<size_t>(shape.index_dim));
    norm_bias_.emplace_back(static_cast<size_t>(shape.index_dim));
    inputs_.norm(layer, norm_weight_.back(), norm_bias_.back());
  }
  backend_.set_profile(profile());
}

int64_t DsaEngine::sample_bytes() const {
  return samples_.count() * (inputs_.num_heads() * (2 * kLatentDim + 4) + setup().topk * 4);
}

void DsaEngine::make_plans(GroupKind kind, int64_t bucket) {
  const int64_t rows = setup().draft_tokens + 1;
  std::vector<DsaStepPlan> made;
  if (kind == GroupKind::kChain) {
    for (int64_t j = 0; j < num_draft_steps(); ++j) {
      made.push_back(backend_.make_step_plan({ForwardMode::kDecode, bucket, 1}));
    }
  } else {
    const ForwardMode mode = kind == GroupKind::kVerify             ? ForwardMode::kTargetVerify
                             : setup().draft_mode == DraftMode::kV1 ? ForwardMode::kDraftExtend
                                                                    : ForwardMode::kDraftExtendV2;
    made.push_back(backend_.make_step_plan({mode, bucket, rows}));
  }
  plans_.insert_or_assign({kind, bucket}, std::move(made));
}

void DsaEngine::begin(const StepGroup& group) {
  const BatchArrays& first = group.batches.front();
  if (group.kind == GroupKind::kBatch) {
    backend_.begin_step(first.batch(group.req_to_token));
    return;
  }
  std::vector<DsaStepPlan>& plans = this->plans(group);
  ForwardBatch batch = first.device_batch(group.req_to_token);
  if (group.kind != GroupKind::kChain) {
    backend_.begin_step(batch, &plans.front());
    return;
  }
  std::vector<DraftStep> steps;
  for (size_t j = 0; j < plans.size(); ++j) {
    const BatchArrays& rows = group.batches[j];
    steps.push_back({&plans[j], rows.positions(), rows.out_cache_loc(), std::nullopt});
  }
  batch.positions = {};
  batch.out_cache_loc = {};
  backend_.begin_draft_steps(batch, steps);
}

// Rows of padding keep what an earlier call left there.
void DsaEngine::stage(const LayerCall& call) {
  const DsaShape& shape = inputs_.shape();
  for_each_row(call, [&](int64_t t, const RowToken& row) {
    inputs_.query(call.layer, row, row_of<bf16_t>(q_, t, inputs_.num_heads() * kDsaRowWidth));
    inputs_.latent_key(call.layer, row.token_id, row_of<bf16_t>(k_, t, kDsaRowWidth));
    inputs_.index_query(call.layer, row,
                        row_of<bf16_t>(index_q_, t, shape.index_heads * shape.index_dim));
    inputs_.index_key(call.layer, row.token_id, row_of<bf16_t>(index_k_, t, shape.index_dim));
    inputs_.head_gate(call.layer, row.token_id, row_of<float>(head_gate_, t, shape.index_heads));
  });
}

DsaForwardTensors DsaEngine::tensors(const LayerCall& call) {
  const DsaShape& shape = inputs_.shape();
  const int64_t rows = call.rows().num_padded_rows();
  const int64_t heads = inputs_.num_heads();
  const auto l = static_cast<size_t>(call.layer_index);
  DsaForwardTensors result;
  result.q = make_tensor(q_.data(), DType::kBf16, {rows, heads, kDsaRowWidth});
  result.k = make_tensor(k_.data(), DType::kBf16, {rows, kDsaRowWidth});
  result.index_q =
      make_tensor(index_q_.data(), DType::kBf16, {rows, shape.index_heads, shape.index_dim});
  result.index_k = make_tensor(index_k_.data(), DType::kBf16, {rows, shape.index_dim});
  result.norm_weight = make_tensor(norm_weight_[l].data(), DType::kF32, {shape.index_dim});
  result.norm_bias = make_tensor(norm_bias_[l].data(), DType::kF32, {shape.index_dim});
  result.head_gate = make_tensor(head_gate_.data(), DType::kF32, {rows, shape.index_heads});
  result.cos_sin =
      make_tensor(cos_sin_.data(), DType::kF32, {config().table_width, shape.rope_dim});
  result.kv_pool = kv_pool_.layer(call.layer_index);
  result.index_pool = index_pool_.layer(call.layer_index);
  result.indices = make_tensor(indices_.data(), DType::kI32, {rows, setup().topk});
  result.out = make_tensor(out_.data(), DType::kBf16, {rows, heads, kLatentDim});
  result.lse = make_tensor(lse_.data(), DType::kF32, {rows, heads});
  return result;
}

void DsaEngine::forward(const LayerCall& call) {
  const DsaLayer layer{call.layer, inputs_.shape().softmax_scale};
  if (call.group.kind == GroupKind::kBatch) {
    backend_.forward(layer, tensors(call));
  } else {
    backend_.forward(plans(call.group)[static_cast<size_t>(call.batch_index)], layer,
                     tensors(call));
  }
}

Digest DsaEngine::read(const LayerCall& call) {
  const DsaForwardTensors outputs = tensors(call);
  DsaLayerRows layer;
  layer.layer_index = call.layer_index;
  layer.layer = call.layer;
  layer.indices = outputs.indices;
  layer.out = outputs.out;
  layer.lse = outputs.lse;
  layer.rows = call.rows().rows();
  layer.batch = call.group.step;
  layer.req_to_token = call.group.req_to_token;
  reader_.take_samples(layer, filter(), samples_.of_step());
  return call.draft ? Digest{} : reader_.digest(layer, filter(), inputs_.workload());
}

std::vector<CheckedRow> DsaEngine::check_samples() {
  const std::vector<DsaSample> samples = samples_.take();
  if (samples.empty()) return {};
  const DsaChecker checker(inputs_, setup().layers, setup().topk, setup().implementation);
  std::vector<CheckVerdict> verdicts = checker.check(samples);
  std::vector<CheckedRow> rows;
  for (size_t i = 0; i < samples.size(); ++i) {
    rows.push_back({samples[i].row, std::move(verdicts[i])});
  }
  return rows;
}

}  // namespace fovea::internal
