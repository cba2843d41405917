#include "src/replay/step_engine.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <optional>

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

}  // namespace

// What one step adds; merged only when all of it succeeded.
struct StepEngine::StepResult {
  EngineTotals totals;
  double attention_s = 0;
};

StepEngine::StepEngine(const RunSetup& setup, const RunPlan& plan, EngineConfig config)
    : setup_(setup),
      plan_(plan),
      config_(std::move(config)),
      filter_(plan, config_.digest_from),
      rows_(1, BatchArrays(setup.workload, setup.page_size)),
      chain_rows_(static_cast<size_t>(num_draft_steps()), rows_.front()) {
  totals_.layer_ms.assign(setup.layers.size(), 0.0);
}

int64_t StepEngine::max_rows() const {
  const int64_t round_rows = config_.max_requests * (setup_.draft_tokens + 1);
  return std::max(config_.max_rows, setup_.draft_tokens > 0 ? round_rows : int64_t{1});
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

void StepEngine::add_calls(const std::string& layer_kind, StepResult* result) {
  result->totals.add_calls(calls_, layer_kind, setup_.ceilings);
  calls_.clear();
}

void StepEngine::run_layer(const LayerCall& call, StepResult* result) {
  EngineTotals& totals = result->totals;
  Clock::time_point start = Clock::now();
  stage(call);
  totals.generate_s += seconds_since(start);
  start = Clock::now();
  forward(call);
  const double forward_s = seconds_since(start);
  ReplayMode& mode = totals.mode(call.rows().mode(), call.draft);
  mode.ms += 1e3 * forward_s;
  if (call.draft || call.layer_index == 0) {
    ++mode.steps;
    mode.rows += static_cast<int64_t>(call.rows().rows().size());
  }
  result->attention_s += forward_s;
  totals.layer_ms[static_cast<size_t>(call.layer_index)] += 1e3 * forward_s;
  add_calls(setup_.model.layer_kind(call.layer), result);
  if (call.group.kind == GroupKind::kChain) return;
  start = Clock::now();
  totals.digest += read(call);
  totals.read_s += seconds_since(start);
}

void StepEngine::run_group(StepGroup group, std::span<const BatchArrays> batches,
                           std::pair<int64_t, int64_t> layers, StepResult* result) {
  if (batches.empty()) return;
  group.batches = batches;
  if (group.kind != GroupKind::kBatch && !made_plans_.contains({group.kind, group.bucket})) {
    make_plans(group.kind, group.bucket);
    made_plans_.insert({group.kind, group.bucket});
    calls_.clear();  // what a new plan is filled with belongs to no step
  }
  const Clock::time_point start = Clock::now();
  begin(group);
  const double elapsed_s = seconds_since(start);
  // What begin() runs serves every layer.
  const bool draft = group.kind == GroupKind::kChain || group.kind == GroupKind::kDraftExtend;
  result->attention_s += elapsed_s;
  result->totals.mode(batches.front().mode(), draft).ms += 1e3 * elapsed_s;
  add_calls("all", result);
  for (size_t i = 0; i < batches.size(); ++i) {
    for (int64_t l = layers.first; l < layers.second; ++l) {
      run_layer({group, static_cast<int64_t>(i), l, setup_.layers[static_cast<size_t>(l)],
                 setup_.is_draft(l)},
                result);
    }
  }
}

void StepEngine::run_batch(const StepGroup& group, StepResult* result) {
  const StepKind kind = group.step->facts.kind;
  rows_.front().build(mode_of(kind), *group.scheduler, *group.step);
  if (kind == StepKind::kIdle) rows_.front().pad_rows(1);
  run_group(group, rows_, {0, num_layers()}, result);
}

int64_t StepEngine::bucket_of(int64_t requests) const {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(requests)));
  return std::min(power, config_.max_requests);
}

void StepEngine::run_round(const StepGroup& group, StepResult* result) {
  StepGroup part = group;
  part.bucket = bucket_of(static_cast<int64_t>(group.step->entries.size()));
  for (size_t j = 0; j < chain_rows_.size(); ++j) {
    chain_rows_[j].build_draft_step(static_cast<int64_t>(j), *group.scheduler, *group.step);
    chain_rows_[j].pad_requests(part.bucket, 1);
  }
  const std::pair<int64_t, int64_t> target = {0, num_target_layers()};
  const std::pair<int64_t, int64_t> draft = {num_target_layers(), num_layers()};
  part.kind = GroupKind::kChain;
  run_group(part, chain_rows_, draft, result);
  const auto run_padded = [&](GroupKind kind, ForwardMode mode,
                              std::pair<int64_t, int64_t> layers) {
    rows_.front().build(mode, *group.scheduler, *group.step);
    rows_.front().pad_requests(part.bucket, setup_.draft_tokens + 1);
    part.kind = kind;
    run_group(part, rows_, layers, result);
  };
  run_padded(GroupKind::kVerify, ForwardMode::kTargetVerify, target);
  run_padded(
      GroupKind::kDraftExtend,
      setup_.draft_mode == DraftMode::kV1 ? ForwardMode::kDraftExtend : ForwardMode::kDraftExtendV2,
      draft);
}

void StepEngine::run_step(int64_t step, Scheduler* scheduler, StepBatch* batch) {
  const ThreadScope threads(setup_.device.num_threads);
  std::optional<WrongPage> wrong_page;
  fault_is_due_ = step == plan_.fault.step;
  if (fault_is_due_ && plan_.fault.kind == "page") {
    wrong_page.emplace(plan_.fault, *batch, setup_.page_size, scheduler);
  }
  StepResult result;
  result.totals = totals_;
  calls_.clear();
  start_step();
  StepGroup group;
  group.req_to_token = scheduler->table().view();
  group.step = batch;
  group.scheduler = scheduler;
  if (batch->facts.kind == StepKind::kVerify) {
    run_round(group, &result);
  } else {
    run_batch(group, &result);
  }
  commit_step(*batch);
  result.totals.attention_s += result.attention_s;
  totals_ = std::move(result.totals);
  batch->facts.step_ms = 1e3 * result.attention_s;
}

}  // namespace fovea::internal
