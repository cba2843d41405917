#include "src/replay/step_engine.h"

#include <bit>
#include <chrono>

#include "fovea/error.h"
#include "src/core/parallel.h"
#include "src/replay/wrong_page.h"

namespace fovea::internal {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

ForwardMode mode_of(StepKind kind) {
  return kind == StepKind::kDecode    ? ForwardMode::kDecode
         : kind == StepKind::kPrefill ? ForwardMode::kExtend
         : kind == StepKind::kIdle    ? ForwardMode::kIdle
                                      : ForwardMode::kMixed;
}

bool is_draft(GroupKind kind) {
  return kind == GroupKind::kChain || kind == GroupKind::kDraftExtend;
}

// The smallest range that holds every row for which wanted(row) holds.
template <class Wanted>
RowRange range_of(const std::vector<StepRow>& rows, const Wanted& wanted) {
  RowRange range;
  for (size_t t = 0; t < rows.size(); ++t) {
    if (!wanted(rows[t])) continue;
    if (range.end == 0) range.begin = static_cast<int64_t>(t);
    range.end = static_cast<int64_t>(t) + 1;
  }
  return range;
}

}  // namespace

// What one step adds; merged only when all of it succeeded.
struct StepEngine::StepResult {
  EngineTotals totals;
  double attention_ms = 0;
};

StepEngine::StepEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : setup_(setup),
      plan_(plan),
      config_(std::move(config)),
      filter_(plan, config_.digest_from),
      begin_(setup.device),
      end_(setup.device),
      table_(setup.device) {
  if (setup.device.kind == DeviceKind::kCuda) stream_.emplace(setup.device);
  totals_.layer_ms.assign(setup.layers.size(), 0.0);
}

int64_t StepEngine::max_rows() const {
  const int64_t round_rows = config_.max_requests * (setup_.draft_tokens + 1);
  return std::max(config_.max_rows, setup_.draft_tokens > 0 ? round_rows : int64_t{1});
}

ForwardMode StepEngine::plan_mode(GroupKind kind) const {
  switch (kind) {
    case GroupKind::kBatch:
    case GroupKind::kDecode:
    case GroupKind::kChain:
      return ForwardMode::kDecode;
    case GroupKind::kVerify:
      return ForwardMode::kTargetVerify;
    case GroupKind::kDraftExtend:
      break;
  }
  return setup_.draft_mode == DraftMode::kV1 ? ForwardMode::kDraftExtend
                                             : ForwardMode::kDraftExtendV2;
}

int64_t StepEngine::backend_rows() const {
  // From here on no operator cuts.
  constexpr int64_t kUncutRows = 512;
  const bool may_cut = setup_.device.kind == DeviceKind::kCpu || !setup_.deterministic;
  return may_cut ? max_rows() : std::max(max_rows(), kUncutRows);
}

std::vector<int64_t> StepEngine::slot_rows() const {
  // On a GPU the inputs of a layer are made while the layer before it runs.
  const bool overlaps = setup_.device.kind == DeviceKind::kCuda && num_layers() > 1;
  std::vector<int64_t> rows(overlaps ? 2 : 1, max_rows());
  if (setup_.graph) {
    const auto calls = static_cast<size_t>(std::max(num_target_layers(), num_draft_steps()));
    if (rows.size() < calls) rows.resize(calls, config_.max_requests * (setup_.draft_tokens + 1));
  }
  return rows;
}

void StepEngine::for_each_row(
    const LayerCall& call,
    const std::function<void(int64_t t, const RowToken& token)>& make) const {
  const std::vector<StepRow>& rows = call.rows().rows();
  ParallelFor(static_cast<int64_t>(rows.size()), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const StepRow& row = rows[static_cast<size_t>(t)];
      make(t, {call.entry(row).request, row.position, row.token_id});
    }
  });
}

RowRange StepEngine::rows_to_read(const LayerCall& call) const {
  return range_of(call.rows().rows(), [&](const StepRow& row) {
    const StepEntry& entry = call.entry(row);
    return (!call.draft && filter_.enters_digest(entry, row.position)) ||
           filter_.sampled(entry, row.position, call.layer_index) != nullptr;
  });
}

RowRange StepEngine::sampled_rows(const LayerCall& call) const {
  return range_of(call.rows().rows(), [&](const StepRow& row) {
    return filter_.sampled(call.entry(row), row.position, call.layer_index) != nullptr;
  });
}

int64_t StepEngine::bucket_of(int64_t requests) const {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(requests)));
  return std::min(power, config_.max_requests);
}

StepEngine::PlannedGroup& StepEngine::planned(GroupKind kind, int64_t bucket) {
  const auto found = groups_.find({kind, bucket});
  if (found != groups_.end()) return found->second;
  PlannedGroup made;
  made.group.kind = kind;
  made.group.bucket = bucket;
  const int64_t requests = kind == GroupKind::kBatch ? config_.max_requests : bucket;
  const int64_t rows = kind == GroupKind::kBatch ? max_rows() : bucket * rows_per_request(kind);
  const int64_t count = kind == GroupKind::kChain ? num_draft_steps() : 1;
  for (int64_t i = 0; i < count; ++i) {
    made.group.batches.emplace_back(setup_.workload, setup_.page_size);
    made.arrays.emplace_back(setup_.device, requests, rows);
  }
  made.group.forward.resize(static_cast<size_t>(count));
  if (kind != GroupKind::kBatch && count > 0) make_plans(kind, bucket);
  // New memory is filled in the order of the default stream.
  synchronize(setup_.device);
  collect_profile();
  calls_.clear();  // what a new plan is filled with belongs to no step
  return groups_.emplace(std::pair(kind, bucket), std::move(made)).first->second;
}

void StepEngine::build(const StepBatch& batch, const Scheduler& scheduler,
                       PlannedGroup* planned) const {
  StepGroup& group = planned->group;
  const int64_t bucket = group.bucket;
  const int64_t rows = rows_per_request(group.kind);
  BatchArrays* const first = group.batches.data();
  switch (group.kind) {
    case GroupKind::kBatch:
      first->build(mode_of(batch.facts.kind), scheduler, batch);
      if (batch.facts.kind == StepKind::kIdle) first->pad_rows(1);
      break;
    case GroupKind::kDecode:
      first->build(plan_mode(group.kind), scheduler, batch);
      first->pad_requests(bucket, rows);
      break;
    case GroupKind::kChain:
      for (size_t j = 0; j < group.batches.size(); ++j) {
        group.batches[j].build_draft_step(static_cast<int64_t>(j), scheduler, batch);
        group.batches[j].pad_requests(bucket, rows);
      }
      break;
    case GroupKind::kVerify:
      first->build(plan_mode(group.kind), scheduler, batch);
      first->pad_requests(bucket, rows);
      break;
    case GroupKind::kDraftExtend:
      first->build(plan_mode(group.kind), scheduler, batch);
      first->pad_requests(bucket, rows);
      // A graph has one number of rows, whatever was accepted.
      if (setup_.graph) first->bound_rows(bucket * rows);
      break;
  }
}

std::vector<LayerCall> StepEngine::calls_of(const StepGroup& group) const {
  int64_t begin = 0, end = num_layers();
  if (group.kind == GroupKind::kVerify) end = num_target_layers();
  if (is_draft(group.kind)) begin = num_target_layers();
  std::vector<LayerCall> calls;
  for (size_t i = 0; i < group.batches.size(); ++i) {
    for (int64_t l = begin; l < end; ++l) {
      calls.push_back({group, static_cast<int64_t>(i), l, setup_.layers[static_cast<size_t>(l)],
                       setup_.is_draft(l), 0});
    }
  }
  return calls;
}

// Milliseconds that the device took for `work`; `meanwhile` runs on the host.
template <class Work>
double StepEngine::timed(const Work& work, const std::function<void()>& meanwhile) {
  begin_.record(stream());
  work();
  end_.record(stream());
  if (meanwhile) meanwhile();
  const double elapsed_ms = Event::elapsed_ms(begin_, end_);
  collect_profile();
  return elapsed_ms;
}

void StepEngine::timed_stage(const LayerCall& call, StepResult* result) {
  const Clock::time_point start = Clock::now();
  stage(call);
  result->totals.generate_s += seconds_since(start);
}

void StepEngine::timed_read(const LayerCall& call, StepResult* result) {
  if (call.group.kind == GroupKind::kChain) return;
  const Clock::time_point start = Clock::now();
  result->totals.digest += read(call);
  result->totals.read_s += seconds_since(start);
}

void StepEngine::add_calls(const std::string& layer_kind, StepResult* result) {
  result->totals.add_calls(calls_, layer_kind, setup_.ceilings);
  calls_.clear();
}

void StepEngine::count_call(const LayerCall& call, double elapsed_ms, StepResult* result) const {
  ReplayMode& mode = result->totals.mode(call.rows().mode(), call.draft);
  mode.ms += elapsed_ms;
  if (call.draft || call.layer_index == 0) {
    ++mode.steps;
    mode.rows += static_cast<int64_t>(call.rows().rows().size());
  }
  result->attention_ms += elapsed_ms;
  result->totals.layer_ms[static_cast<size_t>(call.layer_index)] += elapsed_ms;
}

void StepEngine::run_eager(const StepGroup& group, StepResult* result) {
  std::vector<LayerCall> calls = calls_of(group);
  const auto num_slots =
      static_cast<int64_t>(stream_ ? std::min<size_t>(2, slot_rows().size()) : 1);
  const auto stage_call = [&](size_t i) {
    if (i == calls.size()) return;
    calls[i].slot = static_cast<int64_t>(i) % num_slots;
    timed_stage(calls[i], result);
  };
  const double begin_ms = timed([&] { begin(group); });
  // What begin() runs serves every layer.
  result->attention_ms += begin_ms;
  result->totals.mode(group.batches.front().mode(), is_draft(group.kind)).ms += begin_ms;
  add_calls("all", result);
  stage_call(0);
  for (size_t i = 0; i < calls.size(); ++i) {
    const double elapsed_ms = timed([&] { forward(calls[i]); },
                                    [&] {
                                      if (num_slots > 1) stage_call(i + 1);
                                    });
    count_call(calls[i], elapsed_ms, result);
    add_calls(setup_.model.layer_kind(calls[i].layer), result);
    timed_read(calls[i], result);
    if (num_slots == 1) stage_call(i + 1);
  }
}

void StepEngine::run_graph(PlannedGroup* planned, StepResult* result) {
  const StepGroup& group = planned->group;
  std::vector<LayerCall> calls = calls_of(group);
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].slot = static_cast<int64_t>(i);
    timed_stage(calls[i], result);
  }
  if (!planned->graph) {
    planned->graph = Graph::capture(setup_.device, stream(), [this, &group, calls](Stream) {
      begin(group);
      for (const LayerCall& call : calls) forward(call);
    });
    ++result->totals.graphs.captures;
    result->totals.graphs.nodes += planned->graph->num_nodes();
  }
  const double elapsed_ms = timed([&] { planned->graph->launch(stream()); });
  ++result->totals.graphs.replays;
  calls_.clear();  // a replay is timed as a whole
  for (const LayerCall& call : calls) {
    count_call(call, elapsed_ms / static_cast<double>(calls.size()), result);
    timed_read(call, result);
  }
}

void StepEngine::run_group(PlannedGroup* planned, const Scheduler& scheduler,
                           const StepBatch& batch, StepResult* result) {
  StepGroup& group = planned->group;
  if (group.batches.empty()) return;  // a chain of one drafted token
  build(batch, scheduler, planned);
  group.step = &batch;
  group.scheduler = &scheduler;
  for (size_t i = 0; i < group.batches.size(); ++i) {
    const BatchArrays& rows = group.batches[i];
    group.forward[i] = planned->arrays[i].upload(group.kind == GroupKind::kBatch
                                                     ? rows.batch(table_.view())
                                                     : rows.device_batch(table_.view()),
                                                 stream());
  }
  prepare(group);
  if (setup_.graph && group.kind != GroupKind::kBatch) {
    run_graph(planned, result);
  } else {
    run_eager(group, result);
  }
}

// What the device still does reads memory that the caller may free or write next.
void StepEngine::wait_after_failure() const noexcept {
  try {
    synchronize(setup_.device, stream());
  } catch (const Error&) {  // NOLINT: the failure that is on its way says why
  }
}

void StepEngine::run_step(int64_t step, Scheduler* scheduler, StepBatch* batch) {
  const ThreadScope threads(setup_.device.num_threads);
  std::optional<WrongPage> wrong_page;
  const bool fault_was_due = fault_is_due_;
  fault_is_due_ = step == plan_.fault.step;
  if (fault_is_due_ && plan_.fault.kind == "page") {
    wrong_page.emplace(plan_.fault, *batch, setup_.page_size, scheduler);
  }
  if (fault_is_due_ || fault_was_due) table_.forget();
  StepResult result;
  result.totals = totals_;
  calls_.clear();
  start_step();
  table_.update(*scheduler, *batch, stream());
  const auto run = [&](GroupKind kind, int64_t bucket) {
    run_group(&planned(kind, bucket), *scheduler, *batch, &result);
  };
  const StepKind kind = batch->facts.kind;
  const bool in_plans = kind == StepKind::kVerify || (kind == StepKind::kDecode && setup_.graph);
  const int64_t bucket =
      in_plans ? bucket_of(static_cast<int64_t>(batch->entries.size())) : int64_t{0};
  try {
    if (kind == StepKind::kVerify) {
      for (const GroupKind part :
           {GroupKind::kChain, GroupKind::kVerify, GroupKind::kDraftExtend}) {
        run(part, bucket);
      }
    } else {
      run(in_plans ? GroupKind::kDecode : GroupKind::kBatch, bucket);
    }
  } catch (...) {
    wait_after_failure();
    throw;
  }
  commit_step(*batch);
  result.totals.attention_s += 1e-3 * result.attention_ms;
  totals_ = std::move(result.totals);
  batch->facts.step_ms = result.attention_ms;
}

}  // namespace fovea::internal
