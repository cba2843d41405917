#include "src/replay/engine.h"

#include <algorithm>
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
  result.max_rows = config.max_rows;
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

ConstTensorView i32_view(const std::vector<int32_t>& values) {
  return make_tensor(values.data(), DType::kI32, {static_cast<int64_t>(values.size())});
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
};

Engine::Engine(const EngineConfig& config, const RowInputs& inputs, const RunPlan& plan,
               std::vector<int64_t> digest_from)
    : config_(config),
      inputs_(inputs),
      plan_(plan),
      digest_from_(std::move(digest_from)),
      backend_(backend_config(config, inputs), config.device),
      kv_pool_(pool_config(config, inputs.model().row_format, kRowWidth), config.device),
      index_pool_(pool_config(config, RowFormat::kI132, inputs.model().index_dim), config.device),
      reader_(config.num_pages, config.page_size, config.device.num_threads) {
  const ModelSpec& model = inputs.model();
  const int64_t rows = config.max_rows;
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

void Engine::list_rows(const Scheduler& scheduler, const StepBatch& batch) {
  rows_.clear();
  seq_len_.clear();
  pool_row_.clear();
  ext_len_.clear();
  positions_.clear();
  out_cache_loc_.clear();
  for (size_t e = 0; e < batch.entries.size(); ++e) {
    const StepEntry& entry = batch.entries[e];
    const std::vector<int32_t>& pages = scheduler.state(entry.request).pages;
    seq_len_.push_back(static_cast<int32_t>(entry.end));
    pool_row_.push_back(entry.pool_row);
    ext_len_.push_back(static_cast<int32_t>(entry.end - entry.begin));
    for (int64_t p = entry.begin; p < entry.end; ++p) {
      rows_.push_back({static_cast<int64_t>(e), p});
      positions_.push_back(static_cast<int32_t>(p));
      const int64_t page = pages[static_cast<size_t>(p / config_.page_size)];
      out_cache_loc_.push_back(
          static_cast<int32_t>(page * config_.page_size + p % config_.page_size));
    }
  }
}

void Engine::begin_step(const RequestTable& table, const StepBatch& batch) {
  ForwardBatch forward;
  const bool decode = batch.facts.kind == StepKind::kDecode;
  forward.mode = decode                                   ? ForwardMode::kDecode
                 : batch.facts.kind == StepKind::kPrefill ? ForwardMode::kExtend
                                                          : ForwardMode::kMixed;
  forward.seq_len = i32_view(seq_len_);
  forward.pool_row = i32_view(pool_row_);
  forward.req_to_token = table.view();
  forward.positions = i32_view(positions_);
  forward.out_cache_loc = i32_view(out_cache_loc_);
  forward.num_rows = static_cast<int64_t>(rows_.size());
  forward.host_seq_len = seq_len_;
  if (!decode) {
    forward.ext_len = i32_view(ext_len_);
    forward.host_ext_len = ext_len_;
  }
  backend_.begin_step(forward);
}

void Engine::generate(int64_t layer, const StepBatch& batch) {
  const ModelSpec& model = inputs_.model();
  const Workload& workload = inputs_.workload();
  ParallelFor(static_cast<int64_t>(rows_.size()), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const StepRow& row = rows_[static_cast<size_t>(t)];
      const int64_t request = batch.entries[static_cast<size_t>(row.entry)].request;
      const uint64_t token = workload.token_id(request, row.position);
      inputs_.query(layer, request, row.position,
                    row_of<bf16_t>(q_, t, inputs_.num_heads() * kRowWidth));
      inputs_.latent_key(layer, token, row_of<bf16_t>(k_, t, kRowWidth));
      inputs_.index_query(layer, request, row.position,
                          row_of<bf16_t>(index_q_, t, model.index_heads * model.index_dim));
      inputs_.index_key(layer, token, row_of<bf16_t>(index_k_, t, model.index_dim));
      inputs_.head_gate(layer, token, row_of<float>(head_gate_, t, model.index_heads));
    }
  });
}

DsaForwardTensors Engine::tensors(int64_t layer_index) {
  const ModelSpec& model = inputs_.model();
  const auto rows = static_cast<int64_t>(rows_.size());
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

void Engine::read_layer(int64_t layer_index, const StepBatch& batch, const RequestTable& table,
                        StepResult* result) {
  const DsaForwardTensors outputs = tensors(layer_index);
  LayerRows layer;
  layer.layer_index = layer_index;
  layer.layer = config_.layers[static_cast<size_t>(layer_index)];
  layer.indices = outputs.indices;
  layer.out = outputs.out;
  layer.lse = outputs.lse;
  layer.rows = rows_;
  layer.batch = &batch;
  layer.req_to_token = table.view();
  result->totals.digest += reader_.digest(layer, digest_from_, inputs_.workload());
  reader_.take_samples(layer, plan_, &result->samples);
}

void Engine::run_step(int64_t step, Scheduler* scheduler, StepBatch* batch) {
  const ThreadScope threads(config_.device.num_threads);
  std::optional<WrongPage> wrong_page;
  if (step == plan_.page_fault.step) {
    wrong_page.emplace(plan_.page_fault, *batch, config_.page_size, scheduler);
  }
  list_rows(*scheduler, *batch);
  StepResult result;
  result.totals = totals_;
  calls_.clear();
  Clock::time_point start = Clock::now();
  begin_step(scheduler->table(), *batch);
  double attention_s = seconds_since(start);
  // What begin_step runs serves every layer.
  const auto add_calls = [&](const std::string& layer_kind) {
    for (const OperatorCall& call : calls_) {
      add_call(call, layer_kind, config_.ceilings, &result.totals.operators);
    }
    calls_.clear();
  };
  add_calls("all");
  for (size_t l = 0; l < config_.layers.size(); ++l) {
    const int64_t layer = config_.layers[l];
    start = Clock::now();
    generate(layer, *batch);
    result.totals.generate_s += seconds_since(start);
    start = Clock::now();
    backend_.forward({layer, inputs_.model().softmax_scale}, tensors(static_cast<int64_t>(l)));
    const double forward_s = seconds_since(start);
    attention_s += forward_s;
    result.totals.layer_ms[l] += 1e3 * forward_s;
    add_calls(inputs_.model().layer_kinds[static_cast<size_t>(layer)]);
    start = Clock::now();
    read_layer(static_cast<int64_t>(l), *batch, scheduler->table(), &result);
    result.totals.read_s += seconds_since(start);
  }
  result.totals.attention_s += attention_s;
  totals_ = std::move(result.totals);
  std::move(result.samples.begin(), result.samples.end(), std::back_inserter(samples_));
  batch->facts.step_ms = 1e3 * attention_s;
}

}  // namespace fovea::internal
