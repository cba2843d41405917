#include "src/replay/engine.h"

#include <algorithm>
#include <bit>
#include <chrono>

#include "fovea/sparse_mla.h"
#include "src/core/parallel.h"
#include "src/core/tensor_generator.h"

namespace fovea::internal {
namespace {

constexpr int64_t kRowWidth = 576;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Of one forward call, padding included.
int64_t max_rows(const EngineConfig& config) {
  const int64_t round_rows = config.max_requests * (config.draft_tokens + 1);
  return std::max(config.max_rows, config.draft_tokens > 0 ? round_rows : int64_t{1});
}

DsaConfig backend_config(const EngineConfig& config, const RowInputs& inputs) {
  const ModelSpec& model = inputs.model();
  DsaConfig result;
  result.num_heads = inputs.num_heads();
  result.index_heads = model.index_heads;
  result.index_dim = model.index_dim;
  result.rope_dim = model.rope_dim;
  result.topk = config.topk;
  result.page_size = config.page_size;
  result.row_format = model.row_format;
  result.kv_scale_mode = model.kv_scale_mode;
  result.index_scale_mode = model.index_scale_mode;
  result.index_rope_style = model.index_rope_style;
  result.hadamard = model.hadamard;
  result.max_requests = config.max_requests;
  result.max_rows = max_rows(config);
  result.rows_per_request = config.draft_tokens + 1;
  result.table_width = config.table_width;
  result.deterministic = config.deterministic;
  result.implementation = config.implementation;
  return result;
}

KvPoolConfig pool_config(const EngineConfig& config, RowFormat format, int64_t width) {
  return {format, width, static_cast<int64_t>(config.layers.size()), config.num_pages + 1,
          config.page_size};
}

size_t bytes_of(int64_t rows, int64_t width, DType dtype) {
  return static_cast<size_t>(rows * width) * size_of(dtype);
}

template <class T>
std::span<T> row_of(HostBuffer& buffer, int64_t row, int64_t width) {
  return {static_cast<T*>(buffer.data()) + row * width, static_cast<size_t>(width)};
}

// Makes one entry of a request's page table point to a page with other tokens while it lives.
class WrongPage {
 public:
  WrongPage(const PageFault& fault, const StepBatch& batch, int64_t page_size, Scheduler* scheduler)
      : scheduler_(scheduler),
        request_(fault.request),
        page_size_(page_size),
        begin_(fault.page * page_size) {
    std::vector<int32_t> pages = scheduler->state(request_).pages;
    pages[static_cast<size_t>(fault.page)] = other_page(fault, batch);
    write(pages);
  }
  ~WrongPage() { write(scheduler_->state(request_).pages); }
  WrongPage(const WrongPage&) = delete;
  WrongPage& operator=(const WrongPage&) = delete;

 private:
  // A complete page that only another request of the step holds, or else the next complete one of
  // the request itself.
  int32_t other_page(const PageFault& fault, const StepBatch& batch) const {
    const std::vector<int32_t>& own = scheduler_->state(request_).pages;
    int64_t complete = 1;
    for (const StepEntry& entry : batch.entries) {
      if (entry.request == request_) complete = entry.begin / page_size_;
    }
    for (const StepEntry& entry : batch.entries) {
      const std::vector<int32_t>& pages = scheduler_->state(entry.request).pages;
      for (int64_t page = 0; page < entry.begin / page_size_; ++page) {
        const int32_t candidate = pages[static_cast<size_t>(page)];
        if (std::find(own.begin(), own.end(), candidate) == own.end()) return candidate;
      }
    }
    return own[static_cast<size_t>((fault.page + 1) % complete)];
  }

  void write(const std::vector<int32_t>& pages) {
    scheduler_->table().write(scheduler_->state(request_).pool_row, pages, page_size_, begin_,
                              begin_ + page_size_);
  }

  Scheduler* scheduler_;
  int64_t request_;
  int64_t page_size_;
  int64_t begin_;
};

void add_call(const OperatorCall& call, const std::string& layer_kind,
              const std::optional<ThroughputLimits>& ceilings,
              std::vector<ReplayOperator>* operators) {
  auto found = std::find_if(operators->begin(), operators->end(), [&](const ReplayOperator& op) {
    return op.name == call.name && op.layer_kind == layer_kind &&
           op.implementation == call.implementation;
  });
  if (found == operators->end()) {
    ReplayOperator op;
    op.name = call.name;
    op.layer_kind = layer_kind;
    op.implementation = call.implementation;
    found = operators->insert(operators->end(), op);
  }
  ++found->calls;
  found->ms += call.elapsed_ms;
  found->flops += call.flops;
  found->bytes += call.bytes;
  // Summed here as time; the run divides it by the measured time at its end.
  if (ceilings) {
    found->roofline_share =
        found->roofline_share.value_or(0) + roofline_ms(*ceilings, call.flops, call.bytes);
  }
}

}  // namespace

// What one step adds; merged only when all of it succeeded.
struct Engine::StepResult {
  EngineTotals totals;
  std::vector<CheckSample> samples;
  double attention_s = 0;

  ReplayMode& mode(ForwardMode mode, bool draft) {
    for (ReplayMode& known : totals.modes) {
      if (known.mode == mode && known.draft == draft) return known;
    }
    return totals.modes.emplace_back(ReplayMode{mode, draft});
  }
};

Engine::Engine(const EngineConfig& config, const RowInputs& inputs, const RunPlan& plan,
               std::vector<int64_t> digest_from)
    : config_(config),
      inputs_(inputs),
      plan_(plan),
      digest_from_(std::move(digest_from)),
      num_target_layers_(static_cast<int64_t>(config.layers.size()) -
                         (config.draft_tokens > 0 ? 1 : 0)),
      backend_(backend_config(config, inputs), config.device),
      kv_pool_(pool_config(config, inputs.model().row_format, kRowWidth), config.device),
      index_pool_(pool_config(config, RowFormat::kI132, inputs.model().index_dim), config.device),
      reader_(config.num_pages, config.page_size, config.device.num_threads),
      rows_(inputs.workload(), config.page_size),
      chain_rows_(static_cast<size_t>(std::max<int64_t>(config.draft_tokens - 1, 0)), rows_) {
  const ModelSpec& model = inputs.model();
  const int64_t rows = max_rows(config);
  const int64_t heads = inputs.num_heads();
  q_.reserve(bytes_of(rows, heads * kRowWidth, DType::kBf16));
  k_.reserve(bytes_of(rows, kRowWidth, DType::kBf16));
  index_q_.reserve(bytes_of(rows, model.index_heads * model.index_dim, DType::kBf16));
  index_k_.reserve(bytes_of(rows, model.index_dim, DType::kBf16));
  head_gate_.reserve(bytes_of(rows, model.index_heads, DType::kF32));
  out_.reserve(bytes_of(rows, heads * kLatentDim, DType::kBf16));
  lse_.reserve(bytes_of(rows, heads, DType::kF32));
  indices_.reserve(bytes_of(rows, config.topk, DType::kI32));
  cos_sin_.resize(static_cast<size_t>(config.table_width * model.rope_dim));
  generate_cos_sin(config.table_width, model.rope_dim, cos_sin_.data());
  for (const int64_t layer : config.layers) {
    norm_weight_.emplace_back(static_cast<size_t>(model.index_dim));
    norm_bias_.emplace_back(static_cast<size_t>(model.index_dim));
    inputs.norm(layer, norm_weight_.back(), norm_bias_.back());
  }
  totals_.layer_ms.assign(config.layers.size(), 0.0);
  backend_.set_profile(&calls_);
}

// Rows of padding keep what an earlier call left there.
void Engine::generate(int64_t layer, const StepBatch& batch, const std::vector<StepRow>& rows) {
  const ModelSpec& model = inputs_.model();
  ParallelFor(static_cast<int64_t>(rows.size()), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const StepRow& row = rows[static_cast<size_t>(t)];
      const RowToken token{batch.entries[static_cast<size_t>(row.entry)].request, row.position,
                           row.token_id};
      inputs_.query(layer, token, row_of<bf16_t>(q_, t, inputs_.num_heads() * kRowWidth));
      inputs_.latent_key(layer, row.token_id, row_of<bf16_t>(k_, t, kRowWidth));
      inputs_.index_query(layer, token,
                          row_of<bf16_t>(index_q_, t, model.index_heads * model.index_dim));
      inputs_.index_key(layer, row.token_id, row_of<bf16_t>(index_k_, t, model.index_dim));
      inputs_.head_gate(layer, row.token_id, row_of<float>(head_gate_, t, model.index_heads));
    }
  });
}

DsaForwardTensors Engine::tensors(int64_t layer_index, int64_t rows) {
  const ModelSpec& model = inputs_.model();
  const int64_t heads = inputs_.num_heads();
  const auto l = static_cast<size_t>(layer_index);
  DsaForwardTensors result;
  result.q = make_tensor(q_.data(), DType::kBf16, {rows, heads, kRowWidth});
  result.k = make_tensor(k_.data(), DType::kBf16, {rows, kRowWidth});
  result.index_q =
      make_tensor(index_q_.data(), DType::kBf16, {rows, model.index_heads, model.index_dim});
  result.index_k = make_tensor(index_k_.data(), DType::kBf16, {rows, model.index_dim});
  result.norm_weight = make_tensor(norm_weight_[l].data(), DType::kF32, {model.index_dim});
  result.norm_bias = make_tensor(norm_bias_[l].data(), DType::kF32, {model.index_dim});
  result.head_gate = make_tensor(head_gate_.data(), DType::kF32, {rows, model.index_heads});
  result.cos_sin = make_tensor(cos_sin_.data(), DType::kF32, {config_.table_width, model.rope_dim});
  result.kv_pool = kv_pool_.layer(layer_index);
  result.index_pool = index_pool_.layer(layer_index);
  result.indices = make_tensor(indices_.data(), DType::kI32, {rows, config_.topk});
  result.out = make_tensor(out_.data(), DType::kBf16, {rows, heads, kLatentDim});
  result.lse = make_tensor(lse_.data(), DType::kF32, {rows, heads});
  return result;
}

void Engine::add_calls(const std::string& layer_kind, StepResult* result) {
  for (const OperatorCall& call : calls_) {
    add_call(call, layer_kind, config_.ceilings, &result->totals.operators);
  }
  calls_.clear();
}

void Engine::read_layer(const LayerCall& call, const StepBatch& batch, const RequestTable& table,
                        StepResult* result) {
  const DsaForwardTensors outputs = tensors(call.layer_index, call.rows->num_padded_rows());
  LayerRows layer;
  layer.layer_index = call.layer_index;
  layer.layer = config_.layers[static_cast<size_t>(call.layer_index)];
  layer.indices = outputs.indices;
  layer.out = outputs.out;
  layer.lse = outputs.lse;
  layer.rows = call.rows->rows();
  layer.batch = &batch;
  layer.req_to_token = table.view();
  if (!is_draft(call.layer_index)) {
    result->totals.digest += reader_.digest(layer, digest_from_, inputs_.workload());
  }
  reader_.take_samples(layer, plan_, &result->samples);
}

// Times `begin`, which makes `rows` the current step. What it runs serves every layer.
template <class Begin>
void Engine::begin(const BatchArrays& rows, bool draft, const Begin& begin, StepResult* result) {
  const Clock::time_point start = Clock::now();
  begin();
  const double elapsed_s = seconds_since(start);
  result->attention_s += elapsed_s;
  result->mode(rows.mode(), draft).ms += 1e3 * elapsed_s;
  add_calls("all", result);
}

void Engine::run_layer(const LayerCall& call, const StepBatch& batch, const RequestTable& table,
                       StepResult* result) {
  const auto l = static_cast<size_t>(call.layer_index);
  const int64_t layer = config_.layers[l];
  Clock::time_point start = Clock::now();
  generate(layer, batch, call.rows->rows());
  result->totals.generate_s += seconds_since(start);
  const DsaForwardTensors in_out = tensors(call.layer_index, call.rows->num_padded_rows());
  const DsaLayer dsa_layer{layer, inputs_.model().softmax_scale};
  start = Clock::now();
  if (call.plan != nullptr) {
    backend_.forward(*call.plan, dsa_layer, in_out);
  } else {
    backend_.forward(dsa_layer, in_out);
  }
  const double forward_s = seconds_since(start);
  const bool draft = is_draft(call.layer_index);
  ReplayMode& mode = result->mode(call.rows->mode(), draft);
  mode.ms += 1e3 * forward_s;
  if (draft || call.layer_index == 0) {
    ++mode.steps;
    mode.rows += static_cast<int64_t>(call.rows->rows().size());
  }
  result->attention_s += forward_s;
  result->totals.layer_ms[l] += 1e3 * forward_s;
  add_calls(inputs_.model().layer_kind(layer), result);
  if (!call.read) return;
  start = Clock::now();
  read_layer(call, batch, table, result);
  result->totals.read_s += seconds_since(start);
}

void Engine::run_batch(const Scheduler& scheduler, const StepBatch& batch,
                       const RequestTable& table, StepResult* result) {
  const StepKind kind = batch.facts.kind;
  rows_.build(kind == StepKind::kDecode    ? ForwardMode::kDecode
              : kind == StepKind::kPrefill ? ForwardMode::kExtend
              : kind == StepKind::kIdle    ? ForwardMode::kIdle
                                           : ForwardMode::kMixed,
              scheduler, batch);
  if (kind == StepKind::kIdle) rows_.pad_rows(1);
  begin(
      rows_, false, [&] { backend_.begin_step(rows_.batch(table)); }, result);
  for (int64_t l = 0; l < static_cast<int64_t>(config_.layers.size()); ++l) {
    run_layer({&rows_, nullptr, l}, batch, table, result);
  }
}

int64_t Engine::bucket_of(int64_t requests) const {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(requests)));
  return std::min(power, config_.max_requests);
}

Engine::RoundPlans& Engine::round_plans(int64_t bucket) {
  const auto found = round_plans_.find(bucket);
  if (found != round_plans_.end()) return found->second;
  RoundPlans plans;
  const ForwardMode extend = config_.draft_mode == DraftMode::kV1 ? ForwardMode::kDraftExtend
                                                                  : ForwardMode::kDraftExtendV2;
  for (size_t j = 0; j < chain_rows_.size(); ++j) {
    plans.chain.push_back(backend_.make_step_plan({ForwardMode::kDecode, bucket, 1}));
  }
  const int64_t rows = config_.draft_tokens + 1;
  plans.extend.push_back(backend_.make_step_plan({extend, bucket, rows}));
  plans.verify.push_back(backend_.make_step_plan({ForwardMode::kTargetVerify, bucket, rows}));
  calls_.clear();  // what a new plan is filled with belongs to no step
  return round_plans_.emplace(bucket, std::move(plans)).first->second;
}

void Engine::run_chain(int64_t bucket, const Scheduler& scheduler, const StepBatch& batch,
                       const RequestTable& table, StepResult* result) {
  RoundPlans& plans = round_plans(bucket);
  std::vector<DraftStep> steps;
  for (size_t j = 0; j < chain_rows_.size(); ++j) {
    BatchArrays& rows = chain_rows_[j];
    rows.build_draft_step(static_cast<int64_t>(j), scheduler, batch);
    rows.pad_requests(bucket, 1);
    steps.push_back({&plans.chain[j], rows.positions(), rows.out_cache_loc(), std::nullopt});
  }
  if (steps.empty()) return;
  ForwardBatch committed = chain_rows_.front().device_batch(table);
  committed.positions = {};
  committed.out_cache_loc = {};
  begin(
      chain_rows_.front(), true, [&] { backend_.begin_draft_steps(committed, steps); }, result);
  for (size_t j = 0; j < steps.size(); ++j) {
    run_layer({&chain_rows_[j], steps[j].plan, num_target_layers_, false}, batch, table, result);
  }
}

void Engine::run_round(const Scheduler& scheduler, const StepBatch& batch,
                       const RequestTable& table, StepResult* result) {
  const int64_t bucket = bucket_of(static_cast<int64_t>(batch.entries.size()));
  run_chain(bucket, scheduler, batch, table, result);
  const auto begin_plan = [&](DsaStepPlan* plan, bool draft) {
    rows_.build(plan->bucket().mode, scheduler, batch);
    rows_.pad_requests(bucket, config_.draft_tokens + 1);
    begin(
        rows_, draft, [&] { backend_.begin_step(rows_.device_batch(table), plan); }, result);
  };
  RoundPlans& plans = round_plans(bucket);
  begin_plan(&plans.verify.front(), false);
  for (int64_t l = 0; l < num_target_layers_; ++l) {
    run_layer({&rows_, &plans.verify.front(), l}, batch, table, result);
  }
  begin_plan(&plans.extend.front(), true);
  run_layer({&rows_, &plans.extend.front(), num_target_layers_}, batch, table, result);
}

void Engine::run_step(int64_t step, Scheduler* scheduler, StepBatch* batch) {
  const ThreadScope threads(config_.device.num_threads);
  std::optional<WrongPage> wrong_page;
  if (step == plan_.page_fault.step) {
    wrong_page.emplace(plan_.page_fault, *batch, config_.page_size, scheduler);
  }
  StepResult result;
  result.totals = totals_;
  calls_.clear();
  if (batch->facts.kind == StepKind::kVerify) {
    run_round(*scheduler, *batch, scheduler->table(), &result);
  } else {
    run_batch(*scheduler, *batch, scheduler->table(), &result);
  }
  result.totals.attention_s += result.attention_s;
  totals_ = std::move(result.totals);
  std::move(result.samples.begin(), result.samples.end(), std::back_inserter(samples_));
  batch->facts.step_ms = 1e3 * result.attention_s;
}

}  // namespace fovea::internal
