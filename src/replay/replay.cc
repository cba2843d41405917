#include "fovea/replay.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>

#include "fovea/device_memory.h"
#include "fovea/version.h"
#include "src/core/check.h"
#include "src/core/fault_injection.h"
#include "src/core/parallel.h"
#include "src/replay/acceptance.h"
#include "src/replay/model_presets.h"
#include "src/replay/run_replay.h"

namespace fovea {
namespace internal {
namespace {

constexpr char kOp[] = "replay";
constexpr int64_t kScaleUnit = 512;
constexpr int64_t kMaxDefaultCacheBytes = int64_t{4} << 30;
constexpr double kDefaultCacheShare = 0.6;
// Samples are checked when they hold this much memory, else at the end.
constexpr int64_t kMaxSampleBytes = int64_t{256} << 20;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A fault of the family's, or "launch:N".
struct Injection {
  std::string fault;
  int64_t launch = 0;  // 0: none
};

Injection parse_injection(const std::string& text, const ModelSpec& model) {
  Injection result;
  const std::string_view launch = "launch:";
  const auto& faults = model.injections;
  if (std::find(faults.begin(), faults.end(), text) != faults.end()) {
    result.fault = text;
  } else if (text.starts_with(launch)) {
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + launch.size(), end, result.launch);
    if (parsed.ec != std::errc() || parsed.ptr != end || result.launch < 1) {
      invalid(kOp, "inject = '" + text + "', expected launch:N with N >= 1");
    }
  } else if (!text.empty()) {
    std::string expected;
    for (const std::string& fault : faults) expected += fault + " or ";
    invalid(kOp, "inject = '" + text + "', expected " + expected + "launch:N");
  }
  return result;
}

void check_options(const ReplayOptions& options, const ModelSpec& model) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check_range(kOp, "tp", options.tp, 1, model.num_heads);
  if (model.num_heads % options.tp != 0) {
    invalid(kOp, "tp = " + std::to_string(options.tp) + " does not divide the " +
                     std::to_string(model.num_heads) + " heads of " + model.name);
  }
  check_range(kOp, "topk", options.topk, 0, kMax);
  check_range(kOp, "page", options.page, 0, 256);
  if (options.page > 0 && !model.page.allows(options.page)) {
    invalid(kOp, "page = " + std::to_string(options.page) + ", but " + model.name +
                     " has pages of " + model.page.expected);
  }
  check_range(kOp, "chunk", options.chunk, model.scheduling.prefill_alignment, kMax);
  check_range(kOp, "max_batch", options.max_batch, 1, kMax);
  check_range(kOp, "cache_tokens", options.cache_tokens, 0, kMax);
  check_range(kOp, "check_rows", options.check_rows, 0, kMax);
  check_range(kOp, "draft_tokens", options.draft_tokens, 0, kMaxDraftTokens);
  if (options.draft_tokens > 0 && !model.has_draft_layer) {
    invalid(kOp, "draft_tokens = " + std::to_string(options.draft_tokens) + ", but " + model.name +
                     " has no draft model");
  }
  if (!(options.accept >= 0 && options.accept <= 1)) {
    invalid(kOp, "accept = " + std::to_string(options.accept) + ", expected a chance in 0..1");
  }
  if (options.seed > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    invalid(kOp, "seed = " + std::to_string(options.seed) + ", expected below 2^63");
  }
  const VirtualCostModel& cost = options.virtual_cost;
  for (const double value : {cost.prefill_ms_per_row, cost.decode_step_ms, cost.decode_ms_per_row,
                             cost.draft_forward_ms}) {
    if (!std::isfinite(value) || value < 0) {
      invalid(kOp, "virtual_cost holds " + std::to_string(value) + ", expected finite and >= 0");
    }
  }
  model.family->check_options(options);
}

// Page size, and whether prefixes are shared. A page of 512/S tokens or a divisor of it never holds
// tokens of two trace blocks.
struct Paging {
  int64_t page_size = 0;
  bool sharing = true;
};

// The largest size up to the model's own that divides `block`; the model's own where none does.
int64_t default_page(const PageRule& rule, int64_t block) {
  for (int64_t page = rule.preferred; page > 0; --page) {
    if (block % page == 0 && rule.allows(page)) return page;
  }
  return rule.preferred;
}

Paging choose_page(const ReplayOptions& options, const ModelSpec& model, const Trace& trace,
                   std::vector<std::string>* notes) {
  const int64_t block = kScaleUnit / options.token_scale;
  Paging paging{options.page, options.prefix_sharing};
  if (options.page == 0) paging.page_size = default_page(model.page, block);
  if (block % paging.page_size != 0 && options.prefix_sharing && trace.has_hashes) {
    paging.sharing = false;
    notes->push_back("page " + std::to_string(paging.page_size) + " does not divide the " +
                     std::to_string(block) + " tokens of a trace block at scale " +
                     std::to_string(options.token_scale) + ": nothing is shared");
  }
  if (!trace.has_hashes) {
    paging.sharing = false;
    if (options.prefix_sharing) notes->push_back("the trace has no block ids: nothing is shared");
  }
  return paging;
}

// Most bytes of a cache whose size was not given.
struct DefaultCapacity {
  int64_t bytes = 0;
  std::string words;
};

// Of a GPU's free memory the cache gets a share: backend and tensors need the rest.
DefaultCapacity default_capacity(const Device& device) {
  if (device.kind == DeviceKind::kCpu) return {kMaxDefaultCacheBytes, "4 GiB"};
  const auto free_bytes = static_cast<double>(memory_info(device).free_bytes);
  return {static_cast<int64_t>(kDefaultCacheShare * free_bytes),
          "60 % of the free memory of " + to_string(device)};
}

class ReplayRun {
 public:
  ReplayRun(const Trace& trace, const ReplayOptions& options, const ModelSpec& model,
            const ReplayProgressCallback& progress);
  ReplayResult run();

 private:
  void choose_capacity();
  SchedulerRequest scheduler_request(int64_t r) const;
  SchedulerConfig scheduler_config() const;
  Scheduler make_scheduler() const;
  RunPlan make_plan() const;
  std::unique_ptr<ModelEngine> make_engine(const Scheduler& scheduler) const;
  void run_steps(Scheduler* scheduler, ModelEngine* engine);
  void run_one_step(Scheduler* scheduler, ModelEngine* engine, StepBatch* batch);
  void check_samples(ModelEngine* engine);
  void report_progress(std::string_view phase, const Scheduler& scheduler, int64_t running);
  void finish(const Scheduler& scheduler, const ModelEngine& engine);
  void finish_requests(const Scheduler& scheduler);
  void finish_times(const ModelEngine& engine);

  const ReplayOptions& options_;
  const ModelSpec& model_;
  const ReplayProgressCallback& progress_;
  Injection injection_;
  Workload workload_;
  RunSetup setup_;
  int64_t num_pages_ = 0;
  RunPlan plan_;
  ReplayResult result_;
  std::vector<CheckedRow> checked_;
  int64_t rows_done_ = 0;
};

const ReplayOptions& checked(const ReplayOptions& options, const ModelSpec& model) {
  check_options(options, model);
  return options;
}

ReplayRun::ReplayRun(const Trace& trace, const ReplayOptions& options, const ModelSpec& model,
                     const ReplayProgressCallback& progress)
    : options_(checked(options, model)),
      model_(model),
      progress_(progress),
      injection_(parse_injection(options.inject, model)),
      workload_(trace, {options.skip, options.max_requests, options.token_scale,
                        options.spread_arrivals, options.seed}),
      setup_{model_, workload_, parse_layers(model, options.layers)} {
  if (options.draft_tokens > 0) setup_.layers.push_back(model.draft_layer());
  const Paging paging = choose_page(options, model, trace, &result_.notes);
  setup_.draft_tokens = options.draft_tokens;
  setup_.draft_mode = options.draft_mode;
  setup_.tp = options.tp;
  setup_.topk = options.topk == 0 ? model.topk : options.topk;
  setup_.page_size = paging.page_size;
  setup_.max_batch = options.max_batch;
  setup_.sharing = paging.sharing;
  setup_.deterministic = options.deterministic;
  setup_.graph = options.graph;
  setup_.seed = options.seed;
  setup_.implementation = options.implementation;
  setup_.device = options.device;
  setup_.ceilings = options.ceilings;
  result_.version = version();
  result_.device = to_string(options.device);
  result_.threads = options.device.num_threads;
  result_.trace_source = trace.source;
  result_.options = options;
  result_.page = setup_.page_size;
  result_.topk = setup_.topk;
  result_.num_heads = setup_.num_heads();
  result_.sharing = setup_.sharing;
  choose_capacity();
}

void ReplayRun::choose_capacity() {
  const int64_t page = setup_.page_size;
  const CacheCost cost = model_.family->cache_cost(setup_);
  if (options_.cache_tokens > 0) {
    num_pages_ = options_.cache_tokens / page;
    if (num_pages_ == 0) {
      invalid(kOp, "cache_tokens = " + std::to_string(options_.cache_tokens) +
                       " is smaller than one page of " + std::to_string(page));
    }
  } else {
    const DefaultCapacity capacity = default_capacity(setup_.device);
    const int64_t room =
        std::max<int64_t>(0, capacity.bytes - cost.bytes_per_request * setup_.max_batch);
    int64_t all = 0, largest = 0;
    for (int64_t r = 0; r < workload_.num_requests(); ++r) {
      const int64_t rows = max_request_rows(scheduler_request(r), options_.draft_tokens);
      const int64_t pages = (rows + page - 1) / page;
      all += pages;
      largest = std::max(largest, pages);
    }
    num_pages_ = std::min(all, std::max(largest, room / cost.bytes_per_page));
    if (num_pages_ < all) {
      result_.notes.push_back("the cache is limited to " + capacity.words +
                              ": pages may be evicted or requests preempted; cache_tokens sets "
                              "another size");
    }
  }
  result_.cache_pages = num_pages_;
}

SchedulerRequest ReplayRun::scheduler_request(int64_t r) const {
  const WorkloadRequest& request = workload_.request(r);
  return {request.prompt_tokens, request.output_tokens, request.arrival_ms};
}

SchedulerConfig ReplayRun::scheduler_config() const {
  SchedulerConfig config;
  config.page_size = setup_.page_size;
  config.num_pages = num_pages_;
  config.chunk = options_.chunk;
  config.max_batch = options_.max_batch;
  config.token_scale = options_.token_scale;
  config.mixed = options_.mixed;
  config.arrivals = options_.arrivals;
  config.cost = options_.virtual_cost;
  config.rules = model_.scheduling;
  config.draft_tokens = options_.draft_tokens;
  config.accepted = [this, model = AcceptanceModel(options_.accept, options_.seed)](
                        int64_t r, int64_t first, int64_t count) {
    return model.accepted(workload_.request(r).trace_row, first, count);
  };
  return config;
}

Scheduler ReplayRun::make_scheduler() const {
  std::vector<SchedulerRequest> requests;
  for (int64_t r = 0; r < workload_.num_requests(); ++r) {
    requests.push_back(scheduler_request(r));
  }
  PageHashFunction hashes = [](int64_t) { return std::vector<uint64_t>(); };
  if (setup_.sharing) {
    hashes = [this](int64_t r) { return workload_.page_hashes(r, setup_.page_size); };
  }
  return Scheduler(scheduler_config(), std::move(requests), std::move(hashes));
}

RunPlan ReplayRun::make_plan() const {
  RunPlanOptions options;
  options.check_rows = options_.check_rows;
  options.selecting_length = model_.family->selecting_length(setup_);
  options.num_layers = static_cast<int64_t>(setup_.layers.size());
  options.seed = options_.seed;
  options.inject = injection_.fault;
  options.find_fault = [this](const StepEntry& entry) {
    return model_.family->find_fault(setup_, injection_.fault, entry);
  };
  Scheduler dry_run = make_scheduler();
  return plan_run(options, workload_, &dry_run);
}

std::unique_ptr<ModelEngine> ReplayRun::make_engine(const Scheduler& scheduler) const {
  std::vector<bool> runs;
  for (int64_t r = 0; r < workload_.num_requests(); ++r) {
    runs.push_back(!scheduler.state(r).finished);
  }
  EngineConfig config;
  config.num_pages = num_pages_;
  config.table_width = scheduler.table().width();
  config.max_requests = std::max<int64_t>(1, plan_.max_step_requests);
  config.max_rows = std::max<int64_t>(1, plan_.max_step_rows);
  config.digest_from = workload_.shared_prefixes(runs);
  return model_.family->make_engine(setup_, plan_, std::move(config));
}

ReplayResult ReplayRun::run() {
  const Clock::time_point start = Clock::now();
  plan_ = make_plan();
  Scheduler scheduler = make_scheduler();
  const std::unique_ptr<ModelEngine> engine = make_engine(scheduler);
  {
    std::optional<LaunchFault> fault;
    if (injection_.launch > 0) fault.emplace(injection_.launch);
    run_steps(&scheduler, engine.get());
    if (fault) {
      result_.notes.push_back("inject " + options_.inject +
                              (fault->fired()
                                   ? ": the launch failed and another implementation took its place"
                                   : ": the run made fewer launches"));
    }
  }
  check_samples(engine.get());
  if (checked_.size() != plan_.check_rows.size()) {
    throw Error(ErrorCode::kInternal, "replay: " + std::to_string(plan_.check_rows.size()) +
                                          " rows were to be checked, but only " +
                                          std::to_string(checked_.size()) + " were computed");
  }
  summarize_check(checked_, &result_.check);
  finish(scheduler, *engine);
  result_.phases.total_s = seconds_since(start);
  const ReplayPhases& phases = result_.phases;
  result_.phases.schedule_s =
      std::max(0.0, phases.total_s - phases.generate_s - phases.attention_s - phases.digest_s -
                        phases.check_s);
  return std::move(result_);
}

void ReplayRun::run_steps(Scheduler* scheduler, ModelEngine* engine) {
  const Clock::time_point start = Clock::now();
  StepBatch batch;
  while (scheduler->next(&batch)) {
    batch.facts.real_ms = 1e3 * seconds_since(start);
    run_one_step(scheduler, engine, &batch);
    scheduler->commit();
    result_.steps.push_back(batch.facts);
    result_.prefill_rows += batch.facts.prefill_tokens;
    result_.decode_rows += batch.facts.decode_tokens;
    for (const StepEntry& entry : batch.entries) {
      result_.recomputed_rows +=
          std::max<int64_t>(0, std::min(entry.kept_end, entry.first_new) - entry.begin);
    }
    rows_done_ += batch.num_rows();
    report_progress("replay", *scheduler, batch.facts.running);
    if (engine->sample_bytes() > kMaxSampleBytes) check_samples(engine);
  }
}

void ReplayRun::run_one_step(Scheduler* scheduler, ModelEngine* engine, StepBatch* batch) {
  const auto step = static_cast<int64_t>(result_.steps.size());
  try {
    engine->run_step(step, scheduler, batch);
  } catch (const Error& error) {
    // what() starts with the word of the code, which the new error adds again.
    std::string_view text = error.what();
    text.remove_prefix(to_string(error.code()).size() + 2);
    throw Error(error.code(), "replay: step " + std::to_string(step) + " (" +
                                  std::string(to_string(batch->facts.kind)) + ", " +
                                  std::to_string(batch->num_computed()) +
                                  " rows): " + std::string(text));
  }
}

void ReplayRun::check_samples(ModelEngine* engine) {
  const Clock::time_point start = Clock::now();
  const ThreadScope threads(options_.device.num_threads);
  std::vector<CheckedRow> rows = engine->check_samples();
  std::move(rows.begin(), rows.end(), std::back_inserter(checked_));
  result_.phases.check_s += seconds_since(start);
}

void ReplayRun::report_progress(std::string_view phase, const Scheduler& scheduler,
                                int64_t running) {
  if (!progress_) return;
  ReplayProgress progress;
  progress.phase = phase;
  progress.steps_done = static_cast<int64_t>(result_.steps.size());
  progress.steps_total = plan_.num_steps;
  progress.rows_done = rows_done_;
  progress.rows_total = plan_.num_rows;
  progress.requests_completed = scheduler.completed();
  progress.requests_total = workload_.num_requests();
  progress.running = running;
  progress_(progress);
}

void ReplayRun::finish(const Scheduler& scheduler, const ModelEngine& engine) {
  const EngineTotals& totals = engine.totals();
  result_.completed = scheduler.completed();
  result_.rejected = scheduler.rejected();
  result_.preempted = scheduler.preempted();
  result_.pages_peak = scheduler.pages_peak();
  result_.evictions = scheduler.allocator().counts().evictions;
  result_.cache_bytes = engine.cache_bytes();
  result_.digest_selection = totals.digest.selection;
  result_.digest_output = totals.digest.output;
  result_.digest_rows = totals.digest.rows;
  for (size_t l = 0; l < setup_.layers.size(); ++l) {
    ReplayLayer layer;
    layer.id = setup_.layers[l];
    layer.kind = model_.layer_kind(layer.id);
    layer.ms = totals.layer_ms[l];
    layer.checked_rows = std::count_if(
        checked_.begin(), checked_.end(),
        [&](const CheckedRow& checked) { return checked.row.layer == static_cast<int64_t>(l); });
    result_.layers.push_back(layer);
  }
  if (options_.draft_tokens > 0) {
    ReplayDrafts drafts = scheduler.drafts();
    drafts.rate = drafts.decided > 0
                      ? static_cast<double>(drafts.accepted) / static_cast<double>(drafts.decided)
                      : 0;
    result_.drafts = std::move(drafts);
  }
  if (options_.graph) result_.graphs = totals.graphs;
  finish_requests(scheduler);
  finish_times(engine);
}

void ReplayRun::finish_requests(const Scheduler& scheduler) {
  for (int64_t r = 0; r < workload_.num_requests(); ++r) {
    const WorkloadRequest& source = workload_.request(r);
    const RequestState& state = scheduler.state(r);
    ReplayRequest request;
    request.id = source.trace_row;
    request.outcome = state.outcome;
    request.arrival_ms = source.arrival_ms;
    request.first_token_virtual_ms = state.first_token_virtual_ms;
    request.finish_virtual_ms = state.finish_virtual_ms;
    request.prompt_tokens = source.prompt_tokens;
    request.output_tokens = source.output_tokens;
    request.hit_tokens = state.hit_tokens;
    request.preemptions = state.preemptions;
    request.message = state.message;
    result_.prompt_tokens += request.prompt_tokens;
    result_.output_tokens += request.output_tokens;
    result_.reusable_tokens += source.reusable_tokens;
    result_.hit_tokens += request.hit_tokens;
    result_.requests.push_back(std::move(request));
  }
}

void ReplayRun::finish_times(const ModelEngine& engine) {
  const EngineTotals& totals = engine.totals();
  result_.phases.generate_s = totals.generate_s;
  result_.phases.attention_s = totals.attention_s;
  result_.phases.digest_s = totals.read_s;
  std::vector<double> step_ms;
  double prefill_ms = 0, decode_ms = 0;
  for (const ReplayStep& step : result_.steps) {
    if (step.kind == StepKind::kIdle) continue;
    step_ms.push_back(step.step_ms);
    // The time of a mixed step counts for both, by rows; that of a round for decode.
    const auto rows = static_cast<double>(step.prefill_tokens + step.decode_tokens);
    prefill_ms += step.step_ms * static_cast<double>(step.prefill_tokens) / rows;
    decode_ms += step.step_ms * static_cast<double>(step.decode_tokens) / rows;
  }
  std::sort(step_ms.begin(), step_ms.end());
  result_.step_p50_ms = percentile(step_ms, 0.50);
  result_.step_p90_ms = percentile(step_ms, 0.90);
  result_.step_p99_ms = percentile(step_ms, 0.99);
  const auto per_second = [](int64_t rows, double ms) {
    return ms > 0 ? 1e3 * static_cast<double>(rows) / ms : 0.0;
  };
  result_.prefill_tokens_per_s = per_second(result_.prefill_rows, prefill_ms);
  result_.decode_tokens_per_s = per_second(result_.decode_rows, decode_ms);
  const double total_ms = prefill_ms + decode_ms;
  result_.ops = totals.operators;
  result_.modes = totals.modes;
  for (ReplayOperator& op : result_.ops) {
    op.time_share = total_ms > 0 ? op.ms / total_ms : 0;
    if (op.roofline_share) *op.roofline_share = op.ms > 0 ? *op.roofline_share / op.ms : 0;
  }
}

}  // namespace

double percentile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0;
  const auto rank = static_cast<int64_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[static_cast<size_t>(std::max<int64_t>(rank, 1) - 1)];
}

ReplayResult run_replay(const Trace& trace, const ReplayOptions& options, const ModelSpec& model,
                        const ReplayProgressCallback& progress) {
  return ReplayRun(trace, options, model, progress).run();
}

}  // namespace internal

std::vector<StepKindTotals> step_kind_totals(const ReplayResult& result) {
  std::vector<StepKindTotals> all;
  for (const StepKind kind : {StepKind::kPrefill, StepKind::kDecode, StepKind::kMixed,
                              StepKind::kVerify, StepKind::kIdle}) {
    StepKindTotals totals;
    totals.kind = kind;
    std::vector<double> step_ms;
    for (const ReplayStep& step : result.steps) {
      if (step.kind != kind) continue;
      ++totals.count;
      totals.rows += step.prefill_tokens + step.decode_tokens;
      totals.ms += step.step_ms;
      step_ms.push_back(step.step_ms);
    }
    std::sort(step_ms.begin(), step_ms.end());
    totals.p50_ms = internal::percentile(step_ms, 0.50);
    totals.p90_ms = internal::percentile(step_ms, 0.90);
    totals.p99_ms = internal::percentile(step_ms, 0.99);
    if (totals.count > 0) all.push_back(totals);
  }
  return all;
}

ReplayResult replay(const Trace& trace, const ReplayOptions& options,
                    const ReplayProgressCallback& progress) {
  return internal::run_replay(trace, options, internal::find_model(options.model), progress);
}

}  // namespace fovea
