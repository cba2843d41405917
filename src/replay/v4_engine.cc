#include "src/replay/v4_engine.h"

#include <algorithm>
#include <unordered_map>

#include "fovea/sparse_mla.h"
#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/replay/digest.h"

namespace fovea::internal {
namespace {

// Of a ring: a verify may keep none of its rows, because its step may be run again.
int64_t state_tokens(const RunSetup& setup, int64_t ratio) {
  const int64_t span = ratio == kCsaRatio ? 2 * ratio : ratio;
  return span + setup.draft_tokens;
}

StatePoolConfig ring_config(const RunSetup& setup, int64_t ratio, int64_t width, int64_t slots) {
  // A slot is [S, 2, c * d], whatever the pool calls its axes.
  constexpr int64_t kAxis = 256;
  StatePoolConfig config;
  config.num_layers = std::max<int64_t>(1, count_layers(setup, ratio));
  config.num_slots = slots;
  config.num_value_heads =
      state_tokens(setup, ratio) * 2 * compressor_channels(ratio, width) / kAxis;
  config.head_dim_v = 1;
  config.head_dim_k = kAxis;
  return config;
}

TensorView ring_view(const StatePool& pool, int64_t layer, int64_t tokens, int64_t channels) {
  return make_tensor(pool.state(layer).data, DType::kF32,
                     {pool.config().num_slots, tokens, 2, channels});
}

V4BackendConfig backend_config(const RunSetup& setup, const EngineConfig& config,
                               int64_t max_rows) {
  const V4Shape& shape = v4_shape(setup.model);
  V4BackendConfig result;
  result.num_heads = setup.num_heads();
  result.softmax_scale = shape.softmax_scale;
  result.window = shape.window;
  result.csa = count_layers(setup, kCsaRatio) > 0;
  result.hca = count_layers(setup, kHcaRatio) > 0;
  result.csa_state_tokens = state_tokens(setup, kCsaRatio);
  result.hca_state_tokens = state_tokens(setup, kHcaRatio);
  result.index_heads = shape.index_heads;
  result.topk = setup.topk;
  result.page_size = setup.page_size;
  result.table_width = config.table_width;
  result.max_requests = config.max_requests;
  result.max_rows = max_rows;
  result.rows_per_request = setup.draft_tokens + 1;
  result.deterministic = setup.deterministic;
  result.implementation = setup.implementation;
  return result;
}

}  // namespace

int64_t count_layers(const RunSetup& setup, int64_t ratio) {
  return std::count_if(setup.layers.begin(), setup.layers.end(),
                       [&](int64_t layer) { return v4_ratio(setup.model, layer) == ratio; });
}

V4StateConfigs v4_states(const RunSetup& setup, int64_t csa_slots, int64_t hca_slots) {
  return {ring_config(setup, kCsaRatio, kV4Width, csa_slots),
          ring_config(setup, kCsaRatio, kV4IndexDim, csa_slots),
          ring_config(setup, kHcaRatio, kV4Width, hca_slots)};
}

V4Engine::V4Engine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : StepEngine(setup, plan, std::move(config)),
      inputs_(setup.model, setup.workload, setup.num_heads(), setup.seed),
      states_(v4_states(setup, StateSlots::of_requests_and_pages(setup, this->config()),
                        StateSlots::of_requests(setup))),
      backend_(backend_config(setup, this->config(), backend_rows()), setup.device),
      window_pool_(
          {RowFormat::kV4, kV4Width, num_layers(), this->config().num_pages + 1, setup.page_size},
          setup.device),
      state_slots_(setup, this->config()) {
  std::map<int64_t, int64_t> count;
  for (const int64_t layer : setup.layers) pool_layer_.push_back(count[inputs_.ratio(layer)]++);
  const Device& device = setup.device;
  const auto make_pool = [&](std::optional<KvPool>* pool, RowFormat format, int64_t width,
                             int64_t ratio) {
    pool->emplace(KvPoolConfig{format, width, count[ratio], this->config().num_pages + 1,
                               setup.page_size / ratio},
                  device);
  };
  if (count[kCsaRatio] > 0) {
    make_pool(&csa_pool_, RowFormat::kV4, kV4Width, kCsaRatio);
    make_pool(&index_pool_, RowFormat::kI132, kV4IndexDim, kCsaRatio);
    csa_states_.emplace(states_.csa, device);
    index_states_.emplace(states_.indexer, device);
  }
  if (count[kHcaRatio] > 0) {
    make_pool(&hca_pool_, RowFormat::kV4, kV4Width, kHcaRatio);
    hca_states_.emplace(states_.hca, device);
  }
  make_slots();
  make_weights();
  backend_.set_profile(profile());
  // The stream of the steps is not ordered behind the default one.
  synchronize(device);
}

void V4Engine::make_slots() {
  const Device& device = setup().device;
  const int64_t heads = inputs_.num_heads(), index_heads = inputs_.shape().index_heads;
  for (const int64_t rows : slot_rows()) {
    Slot slot;
    slot.q = {device, DType::kBf16, {rows, heads, kV4Width}};
    slot.kv = {device, DType::kBf16, {rows, kV4Width}};
    slot.out = {device, DType::kBf16, {rows, heads, kV4Width}};
    slot.lse = {device, DType::kF32, {rows, heads}};
    if (csa_pool_) {
      slot.csa_gate = {device, DType::kF32, {rows, 2 * compressor_channels(kCsaRatio, kV4Width)}};
      slot.index_gate = {
          device, DType::kF32, {rows, 2 * compressor_channels(kCsaRatio, kV4IndexDim)}};
      slot.index_q = {device, DType::kBf16, {rows, index_heads, kV4IndexDim}};
      slot.head_gate = {device, DType::kF32, {rows, index_heads}};
      slot.indices = {device, DType::kI32, {rows, setup().topk}};
    }
    if (hca_pool_) {
      slot.hca_gate = {device, DType::kF32, {rows, 2 * compressor_channels(kHcaRatio, kV4Width)}};
    }
    slots_.push_back(std::move(slot));
  }
}

void V4Engine::make_weights() {
  const Device& device = setup().device;
  const int64_t csa = std::max<int64_t>(1, count_layers(setup(), kCsaRatio));
  const int64_t hca = std::max<int64_t>(1, count_layers(setup(), kHcaRatio));
  sink_ = {device, DType::kF32, {num_layers(), inputs_.num_heads()}};
  csa_ape_ = {device, DType::kF32, {csa, kCsaRatio, compressor_channels(kCsaRatio, kV4Width)}};
  csa_norm_ = {device, DType::kF32, {csa, kV4Width}};
  index_ape_ = {device, DType::kF32, {csa, kCsaRatio, compressor_channels(kCsaRatio, kV4IndexDim)}};
  index_norm_ = {device, DType::kF32, {csa, kV4IndexDim}};
  hca_ape_ = {device, DType::kF32, {hca, kHcaRatio, kV4Width}};
  hca_norm_ = {device, DType::kF32, {hca, kV4Width}};
  for (int64_t i = 0; i < num_layers(); ++i) {
    const int64_t layer = setup().layers[static_cast<size_t>(i)], ratio = inputs_.ratio(layer);
    const int64_t l = pool_layer_[static_cast<size_t>(i)];
    V4LayerWeights weights;
    weights.sink = sink_.row<float>(i);
    if (ratio == kCsaRatio) {
      weights.ape = csa_ape_.row<float>(l);
      weights.norm_weight = csa_norm_.row<float>(l);
      weights.index_ape = index_ape_.row<float>(l);
      weights.index_norm_weight = index_norm_.row<float>(l);
    } else if (ratio == kHcaRatio) {
      weights.ape = hca_ape_.row<float>(l);
      weights.norm_weight = hca_norm_.row<float>(l);
    }
    inputs_.weights(layer, weights);
  }
  sink_.upload(0, num_layers(), {});
  for (StagedTensor* tensor : {&csa_ape_, &csa_norm_, &index_ape_, &index_norm_}) {
    tensor->upload(0, csa, {});
  }
  for (StagedTensor* tensor : {&hca_ape_, &hca_norm_}) tensor->upload(0, hca, {});
  const int64_t positions = config().table_width;
  for (const bool compresses : {false, true}) {
    StagedTensor& table = compresses ? entry_cos_sin_ : swa_cos_sin_;
    table = {device, DType::kF32, {positions, kV4RopeDim}};
    V4Inputs::cos_sin(compresses, positions, static_cast<float*>(table.host(positions).data));
    table.upload(0, positions, {});
  }
}

int64_t V4Engine::cache_bytes() const {
  int64_t bytes = window_pool_.bytes();
  for (const auto* const pool : {&csa_pool_, &index_pool_, &hca_pool_}) {
    if (*pool) bytes += (*pool)->bytes();
  }
  for (const auto* const pool : {&csa_states_, &index_states_, &hca_states_}) {
    if (*pool) bytes += (*pool)->bytes();
  }
  return bytes;
}

void V4Engine::collect_profile() {
  if (setup().device.kind == DeviceKind::kCuda) backend_.set_profile(profile());
}

int64_t V4Engine::sample_bytes() const {
  return samples_.count() * (inputs_.num_heads() * (2 * kV4Width + 4) + setup().topk * 4);
}

void V4Engine::make_plans(GroupKind kind, int64_t bucket) {
  const int64_t count = kind == GroupKind::kChain ? num_draft_steps() : 1;
  std::vector<V4StepPlan> made;
  for (int64_t i = 0; i < count; ++i) {
    made.push_back(backend_.make_step_plan({plan_mode(kind), bucket, rows_per_request(kind)}));
  }
  plans_.insert_or_assign({kind, bucket}, std::move(made));
}

// The window rows of a shared page are those of another page, in every layer: of the page before
// it, or zeros.
void V4Engine::make_window_stale(const StepGroup& group) {
  if (!fault_is_due() || fault().kind != "window") return;
  const std::vector<int32_t>& pages = group.scheduler->state(fault().request).pages;
  const auto page = static_cast<size_t>(fault().page);
  const Device& device = setup().device;
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    const TensorView pool = window_pool_.layer(layer);
    const auto bytes_of = [&](int32_t number) {
      return static_cast<uint8_t*>(pool.data) + number * pool.stride[0];
    };
    const auto bytes = static_cast<size_t>(pool.shape[1]);
    if (page == 0) {
      fill_bytes(bytes_of(pages[page]), device, 0, bytes, stream());
    } else {
      copy_bytes(bytes_of(pages[page]), device, bytes_of(pages[page - 1]), device, bytes, stream());
    }
  }
}

// Decode rows work in place.
V4Batch V4Engine::batch_of(const StepGroup& group, size_t index) const {
  const bool moves =
      group.kind == GroupKind::kBatch && group.forward[index].mode != ForwardMode::kDecode;
  return state_slots_.batch_of<V4Batch>(group, index, moves);
}

// What changes from step to step lies in these arrays, so that a captured step can be replayed.
void V4Engine::prepare(const StepGroup& group) {
  state_slots_.forget_snapshots();
  if (!StateSlots::are_used_by(group)) return;
  if (group.kind == GroupKind::kBatch) {
    make_window_stale(group);
    state_slots_.upload_snapshots(group, stream());
  }
  state_slots_.upload_slots(group, stream(),
                            [&](const StepEntry& entry, int32_t* in, int32_t* out) {
                              *in = state_slots_.before(group, entry);
                              *out = entry.decode ? state_slots_.current(entry.pool_row)
                                                  : state_slots_.other(entry.pool_row);
                            });
}

void V4Engine::begin(const StepGroup& group) {
  if (group.kind == GroupKind::kBatch) {
    backend_.begin_step(batch_of(group, 0), stream());
    return;
  }
  std::vector<V4StepPlan>& plans = plans_.at({group.kind, group.bucket});
  for (size_t i = 0; i < plans.size(); ++i) {
    backend_.begin_step(batch_of(group, i), &plans[i], stream());
  }
}

// Rows of padding keep what an earlier call left there.
void V4Engine::stage(const LayerCall& call) {
  Slot& in = slot(call);
  const int64_t ratio = this->ratio(call);
  StagedTensor& gate = ratio == kCsaRatio ? in.csa_gate : in.hca_gate;
  for_each_row(call, [&](int64_t t, const RowToken& row) {
    inputs_.query(call.layer, row, in.q.row<bf16_t>(t));
    inputs_.window_key(call.layer, row.token_id, in.kv.row<bf16_t>(t));
    if (ratio > 0) inputs_.gate(call.layer, row.token_id, gate.row<float>(t));
    if (ratio != kCsaRatio) return;
    inputs_.index_gate(call.layer, row.token_id, in.index_gate.row<float>(t));
    inputs_.index_query(call.layer, row, in.index_q.row<bf16_t>(t));
    inputs_.head_gate(call.layer, row.token_id, in.head_gate.row<float>(t));
  });
  const auto rows = static_cast<int64_t>(call.rows().rows().size());
  for (StagedTensor* tensor : {&in.q, &in.kv}) tensor->upload(0, rows, stream());
  if (ratio > 0) gate.upload(0, rows, stream());
  if (ratio != kCsaRatio) return;
  for (StagedTensor* tensor : {&in.index_gate, &in.index_q, &in.head_gate}) {
    tensor->upload(0, rows, stream());
  }
}

V4ForwardTensors V4Engine::tensors(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const int64_t rows = call.rows().num_padded_rows(), layer = pool_layer(call);
  const int64_t ratio = this->ratio(call);
  V4ForwardTensors result;
  result.q = slot.q.on_device(rows);
  result.kv = slot.kv.on_device(rows);
  result.sink = sink_.row_on_device(call.layer_index);
  result.cos_sin = (ratio > 0 ? entry_cos_sin_ : swa_cos_sin_).on_device(config().table_width);
  result.window_pool = window_pool_.layer(call.layer_index);
  result.out = slot.out.on_device(rows);
  result.lse = slot.lse.on_device(rows);
  const int64_t tokens = state_tokens(setup(), ratio);
  if (ratio == kHcaRatio) {
    result.compressor = {slot.hca_gate.on_device(rows), hca_ape_.row_on_device(layer),
                         hca_norm_.row_on_device(layer),
                         ring_view(*hca_states_, layer, tokens, kV4Width), hca_pool_->layer(layer)};
  }
  if (ratio != kCsaRatio) return result;
  result.compressor = {slot.csa_gate.on_device(rows), csa_ape_.row_on_device(layer),
                       csa_norm_.row_on_device(layer),
                       ring_view(*csa_states_, layer, tokens, compressor_channels(ratio, kV4Width)),
                       csa_pool_->layer(layer)};
  result.indexer = {
      slot.index_gate.on_device(rows), index_ape_.row_on_device(layer),
      index_norm_.row_on_device(layer),
      ring_view(*index_states_, layer, tokens, compressor_channels(ratio, kV4IndexDim)),
      index_pool_->layer(layer)};
  result.index_q = slot.index_q.on_device(rows);
  result.head_gate = slot.head_gate.on_device(rows);
  result.indices = slot.indices.on_device(rows);
  return result;
}

// A verify needs no commit: its rings go on from whatever row the next step begins at.
void V4Engine::forward(const LayerCall& call) {
  const int64_t ratio = this->ratio(call);
  if (call.group.kind == GroupKind::kBatch) {
    backend_.forward(ratio, tensors(call), stream());
  } else {
    backend_.forward(
        plans_.at({call.group.kind, call.group.bucket})[static_cast<size_t>(call.batch_index)],
        ratio, tensors(call), stream());
  }
}

namespace {

// The entries that rows have selected, from the slots of their pool.
class EntryReader {
 public:
  // `rows_of_page`: entries of a page; `tokens_of_page`: its tokens.
  EntryReader(const LayerCall& call, const TensorView& indices, int64_t tokens_of_page)
      : indices_(access<const int32_t, 2>(indices)), rows_of_page_(tokens_of_page / kCsaRatio) {
    // As the backend saw it.
    const auto table = access<const int32_t, 2>(call.group.scheduler->table().view());
    for (const StepEntry& entry : call.group.step->entries) {
      std::unordered_map<int32_t, int32_t>& places = place_of_page_.emplace_back();
      for (int64_t begin = 0; begin < entry.end; begin += tokens_of_page) {
        const auto page = table(entry.pool_row, begin) / static_cast<int32_t>(tokens_of_page);
        places.emplace(page, static_cast<int32_t>(begin / tokens_of_page));
      }
    }
  }

  // -1 for a slot that is not the request's.
  void read(int64_t t, const StepRow& row, std::vector<int32_t>* entries) const {
    const auto& places = place_of_page_[static_cast<size_t>(row.entry)];
    const auto per_page = static_cast<int32_t>(rows_of_page_);
    entries->clear();
    for (int64_t k = 0; k < indices_.shape[1] && indices_(t, k) >= 0; ++k) {
      const int32_t slot = indices_(t, k);
      const auto found = places.find(slot / per_page);
      entries->push_back(found == places.end() ? -1 : found->second * per_page + slot % per_page);
    }
  }

 private:
  Accessor<const int32_t, 2> indices_;
  int64_t rows_of_page_;
  std::vector<std::unordered_map<int32_t, int32_t>> place_of_page_;  // per entry of the step
};

}  // namespace

Digest V4Engine::read(const LayerCall& call) {
  Slot& slot = this->slot(call);
  const bool selects = ratio(call) == kCsaRatio;
  const std::vector<StepRow>& rows = call.rows().rows();
  const RowRange range = rows_to_read(call), sampled = sampled_rows(call);
  slot.out.download(range.begin, range.end, stream());
  if (selects) slot.indices.download(range.begin, range.end, stream());
  slot.lse.download(sampled.begin, sampled.end, stream());
  synchronize(setup().device, stream());
  std::optional<EntryReader> reader;
  if (selects) {
    reader.emplace(call, slot.indices.host(call.rows().num_padded_rows()), setup().page_size);
  }
  for (size_t t = 0; t < rows.size(); ++t) {
    const CheckRow* const wanted =
        filter().sampled(call.entry(rows[t]), rows[t].position, call.layer_index);
    if (wanted == nullptr) continue;
    const auto index = static_cast<int64_t>(t);
    const std::span<const bf16_t> output = slot.out.row<bf16_t>(index);
    const std::span<const float> lse = slot.lse.row<float>(index);
    V4Sample sample{*wanted, {}, {output.begin(), output.end()}, {lse.begin(), lse.end()}};
    if (selects) reader->read(index, rows[t], &sample.entries);
    samples_.of_step()->push_back(std::move(sample));
  }
  if (call.draft) return {};
  std::vector<Digest> sums(static_cast<size_t>(setup().device.num_threads));
  ParallelFor(static_cast<int64_t>(rows.size()), 16, [&](int64_t begin, int64_t end, int worker) {
    std::vector<int32_t> entries;
    for (int64_t t = begin; t < end; ++t) {
      const StepRow& row = rows[static_cast<size_t>(t)];
      const StepEntry& entry = call.entry(row);
      if (!filter().enters_digest(entry, row.position)) continue;
      const DigestRow name{setup().workload.request(entry.request).trace_row, row.position,
                           call.layer};
      if (selects) reader->read(t, row, &entries);
      sums[static_cast<size_t>(worker)] += {selects ? digest_selection(name, entries) : 0,
                                            digest_output(name, slot.out.row<bf16_t>(t)), 1};
    }
  });
  Digest total;
  for (const Digest& sum : sums) total += sum;
  return total;
}

void V4Engine::commit_step(const StepBatch& batch) {
  for (const StepEntry& entry : batch.entries) {
    if (!entry.decode) state_slots_.swap(entry.pool_row);
  }
  samples_.commit_step();
}

std::vector<CheckedRow> V4Engine::check_samples() {
  const std::vector<V4Sample> samples = samples_.take();
  if (samples.empty()) return {};
  const V4Checker checker(inputs_, setup().layers, setup().topk,
                          {setup().implementation, setup().device});
  std::vector<CheckVerdict> verdicts = checker.check(samples);
  std::vector<CheckedRow> rows;
  for (size_t i = 0; i < samples.size(); ++i) {
    rows.push_back({samples[i].row, std::move(verdicts[i])});
  }
  return rows;
}

}  // namespace fovea::internal
