#include "src/replay/msa_engine.h"

#include <algorithm>

#include "src/core/parallel.h"
#include "src/replay/digest.h"

namespace fovea::internal {
namespace {

MsaBackendConfig backend_config(const RunSetup& setup, const EngineConfig& bounds,
                                int64_t max_rows) {
  const MsaShape& shape = msa_shape(setup.model);
  MsaBackendConfig result;
  result.num_heads = setup.num_heads();
  result.num_kv_heads = msa_kv_heads(setup);
  result.head_dim = shape.head_dim;
  result.index_dim = shape.index_dim;
  result.block_size = msa_block_size(setup);
  result.topk = setup.topk;
  result.init_blocks = shape.init_blocks;
  result.local_blocks = shape.local_blocks;
  result.dense_layers = std::any_of(setup.layers.begin(), setup.layers.end(), [&](int64_t layer) {
    return is_dense_layer(setup.model, layer);
  });
  result.max_requests = bounds.max_requests;
  result.max_rows = max_rows;
  result.rows_per_request = setup.draft_tokens + 1;
  result.table_width = bounds.table_width;
  result.deterministic = setup.deterministic;
  result.implementation = setup.implementation;
  return result;
}

KvPoolConfig pool_config(const RunSetup& setup, const EngineConfig& bounds, int64_t width,
                         int64_t num_layers) {
  return {RowFormat::kBf16, width, num_layers, bounds.num_pages + 1, setup.page_size};
}

KvPoolConfig kv_pool_config(const RunSetup& setup, const EngineConfig& bounds) {
  return pool_config(setup, bounds, msa_kv_heads(setup) * msa_shape(setup.model).head_dim,
                     static_cast<int64_t>(setup.layers.size()));
}

// The rows of a layer's pages, which lie one after the other: bf16 [slots, heads, dim].
TensorView rows_of(KvPool& pool, int64_t layer, int64_t heads) {
  const KvPoolConfig& config = pool.config();
  return make_tensor(pool.layer(layer).data, DType::kBf16,
                     {config.num_pages * config.page_size, heads, config.width / heads});
}

}  // namespace

MsaEngine::MsaEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : StepEngine(setup, plan, std::move(config)),
      inputs_(setup),
      backend_(backend_config(setup, this->config(), backend_rows()), setup.device),
      k_pool_(kv_pool_config(setup, this->config()), setup.device),
      v_pool_(kv_pool_config(setup, this->config()), setup.device) {
  const MsaShape& shape = inputs_.shape();
  const Device& device = setup.device;
  int64_t sparse_layers = 0;
  for (const int64_t layer : setup.layers) {
    index_layer_.push_back(is_dense_layer(setup.model, layer) ? -1 : sparse_layers++);
  }
  if (sparse_layers > 0) {
    index_pool_.emplace(pool_config(setup, this->config(), shape.index_dim, sparse_layers), device);
  }
  const int64_t heads = inputs_.num_heads(), kv_heads = inputs_.num_kv_heads();
  for (const int64_t rows : slot_rows()) {
    Slot slot;
    slot.q = {device, DType::kBf16, {rows, heads, shape.head_dim}};
    slot.k = {device, DType::kBf16, {rows, kv_heads, shape.head_dim}};
    slot.v = {device, DType::kBf16, {rows, kv_heads, shape.head_dim}};
    slot.index_q = {device, DType::kBf16, {rows, kv_heads, shape.index_dim}};
    slot.index_k = {device, DType::kBf16, {rows, shape.index_dim}};
    slot.out = {device, DType::kBf16, {rows, heads, shape.head_dim}};
    slot.lse = {device, DType::kF32, {rows, heads}};
    slot.blocks = {device, DType::kI32, {rows, kv_heads, setup.topk}};
    slots_.push_back(std::move(slot));
  }
  backend_.set_profile(profile());
  // The stream of the steps is not ordered behind the default one.
  synchronize(device);
}

void MsaEngine::collect_profile() {
  if (setup().device.kind == DeviceKind::kCuda) backend_.set_profile(profile());
}

int64_t MsaEngine::cache_bytes() const {
  return k_pool_.bytes() + v_pool_.bytes() + (index_pool_ ? index_pool_->bytes() : 0);
}

int64_t MsaEngine::sample_bytes() const {
  return samples_.count() * (inputs_.num_heads() * (2 * inputs_.shape().head_dim + 4) +
                             inputs_.num_kv_heads() * setup().topk * 4);
}

void MsaEngine::make_plans(GroupKind kind, int64_t bucket) {
  const int64_t count = kind == GroupKind::kChain ? num_draft_steps() : 1;
  std::vector<MsaStepPlan> made;
  for (int64_t i = 0; i < count; ++i) {
    made.push_back(backend_.make_step_plan({plan_mode(kind), bucket, rows_per_request(kind)}));
  }
  plans_.insert_or_assign({kind, bucket}, std::move(made));
}

void MsaEngine::begin(const StepGroup& group) {
  if (group.kind == GroupKind::kBatch) {
    backend_.begin_step({group.forward.front()}, stream());
    return;
  }
  std::vector<MsaStepPlan>& plans = plans_.at({group.kind, group.bucket});
  for (size_t i = 0; i < plans.size(); ++i) {
    const bool is_chain = group.kind == GroupKind::kChain;
    backend_.begin_step({group.forward[i], is_chain ? static_cast<int32_t>(i) + 1 : 0}, &plans[i],
                        stream());
  }
}

// Rows of padding keep what an earlier call left there.
void MsaEngine::stage(const LayerCall& call) {
  Slot& in = slot(call);
  const bool dense = is_dense(call);
  for_each_row(call, [&](int64_t t, const RowToken& row) {
    inputs_.query(call.layer, row, in.q.row<bf16_t>(t));
    inputs_.key(call.layer, row.token_id, in.k.row<bf16_t>(t));
    inputs_.value(call.layer, row.token_id, in.v.row<bf16_t>(t));
    if (dense) return;
    inputs_.index_query(call.layer, row, in.index_q.row<bf16_t>(t));
    inputs_.index_key(call.layer, row.token_id, in.index_k.row<bf16_t>(t));
  });
  const auto rows = static_cast<int64_t>(call.rows().rows().size());
  for (StagedTensor* tensor : {&in.q, &in.k, &in.v}) tensor->upload(0, rows, stream());
  if (dense) return;
  for (StagedTensor* tensor : {&in.index_q, &in.index_k}) tensor->upload(0, rows, stream());
}

MsaForwardTensors MsaEngine::tensors(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const int64_t rows = call.rows().num_padded_rows();
  MsaForwardTensors result;
  result.q = slot.q.on_device(rows);
  result.k = slot.k.on_device(rows);
  result.v = slot.v.on_device(rows);
  result.k_pool = rows_of(k_pool_, call.layer_index, inputs_.num_kv_heads());
  result.v_pool = rows_of(v_pool_, call.layer_index, inputs_.num_kv_heads());
  result.out = slot.out.on_device(rows);
  result.lse = slot.lse.on_device(rows);
  if (is_dense(call)) return result;
  result.index_q = slot.index_q.on_device(rows);
  result.index_k = slot.index_k.on_device(rows);
  result.index_pool = rows_of(*index_pool_, index_layer_[static_cast<size_t>(call.layer_index)], 1);
  // Lists of a row side by side, to be read back by rows.
  result.blocks = slot.blocks.on_device(rows);
  std::swap(result.blocks.shape[0], result.blocks.shape[1]);
  std::swap(result.blocks.stride[0], result.blocks.stride[1]);
  return result;
}

void MsaEngine::forward(const LayerCall& call) {
  const MsaForwardTensors layer = tensors(call);
  const bool dense = is_dense(call);
  if (call.group.kind == GroupKind::kBatch) {
    dense ? backend_.forward_dense(layer, stream()) : backend_.forward(layer, stream());
    return;
  }
  const MsaStepPlan& plan =
      plans_.at({call.group.kind, call.group.bucket})[static_cast<size_t>(call.batch_index)];
  dense ? backend_.forward_dense(plan, layer, stream()) : backend_.forward(plan, layer, stream());
}

void MsaEngine::take_samples(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const std::vector<StepRow>& rows = call.rows().rows();
  for (size_t t = 0; t < rows.size(); ++t) {
    const CheckRow* const wanted =
        filter().sampled(call.entry(rows[t]), rows[t].position, call.layer_index);
    if (wanted == nullptr) continue;
    const auto index = static_cast<int64_t>(t);
    MsaSample sample;
    sample.row = *wanted;
    const std::span<const bf16_t> out = slot.out.row<bf16_t>(index);
    const std::span<const float> lse = slot.lse.row<float>(index);
    sample.output.assign(out.begin(), out.end());
    sample.lse.assign(lse.begin(), lse.end());
    if (!is_dense(call)) {
      const std::span<const int32_t> blocks = slot.blocks.row<int32_t>(index);
      sample.blocks.assign(blocks.begin(), blocks.end());
    }
    samples_.of_step()->push_back(std::move(sample));
  }
}

Digest MsaEngine::read(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const bool dense = is_dense(call);
  const RowRange range = rows_to_read(call), sampled = sampled_rows(call);
  slot.out.download(range.begin, range.end, stream());
  if (!dense) slot.blocks.download(range.begin, range.end, stream());
  slot.lse.download(sampled.begin, sampled.end, stream());
  synchronize(setup().device, stream());
  take_samples(call);
  if (call.draft) return {};
  const std::vector<StepRow>& rows = call.rows().rows();
  std::vector<Digest> sums(static_cast<size_t>(setup().device.num_threads));
  ParallelFor(static_cast<int64_t>(rows.size()), 16, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t t = begin; t < end; ++t) {
      const StepRow& row = rows[static_cast<size_t>(t)];
      const StepEntry& entry = call.entry(row);
      if (!filter().enters_digest(entry, row.position)) continue;
      const DigestRow name{setup().workload.request(entry.request).trace_row, row.position,
                           call.layer};
      const uint64_t selection = dense ? 0 : digest_selection(name, slot.blocks.row<int32_t>(t));
      sums[static_cast<size_t>(worker)] +=
          {selection, digest_output(name, slot.out.row<bf16_t>(t)), 1};
    }
  });
  Digest total;
  for (const Digest& sum : sums) total += sum;
  return total;
}

std::vector<CheckedRow> MsaEngine::check_samples() {
  const std::vector<MsaSample> samples = samples_.take();
  if (samples.empty()) return {};
  std::vector<CheckVerdict> verdicts = MsaChecker(inputs_, setup().layers).check(samples);
  std::vector<CheckedRow> rows;
  for (size_t i = 0; i < samples.size(); ++i) {
    rows.push_back({samples[i].row, std::move(verdicts[i])});
  }
  return rows;
}

}  // namespace fovea::internal
