#include <cmath>
#include <cstdio>

#include "fovea/json.h"
#include "fovea/replay.h"

namespace fovea {
namespace {

// What is not finite (a NaN found by the check) has no JSON form.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(); }

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

Json requests_json(const ReplayResult& result) {
  Json rejections = Json::array();
  for (const ReplayRequest& request : result.requests) {
    if (request.outcome != RequestOutcome::kRejected) continue;
    rejections.push(Json::object({{"request", request.id}, {"message", request.message}}));
  }
  return Json::object({{"completed", result.completed},
                       {"rejected", result.rejected},
                       {"preempted", result.preempted},
                       {"rejections", rejections}});
}

Json options_json(const ReplayResult& result) {
  const ReplayOptions& options = result.options;
  return Json::object(
      {{"model", options.model},
       {"tp", options.tp},
       {"num_heads", result.num_heads},
       {"topk", result.topk},
       {"layers", options.layers},
       {"skip", options.skip},
       {"max_requests", options.max_requests},
       {"chunk", options.chunk},
       {"max_batch", options.max_batch},
       {"prefix_sharing", result.sharing},
       {"mixed", options.mixed},
       {"draft_tokens", options.draft_tokens},
       {"accept", options.draft_tokens > 0 ? number(options.accept) : Json()},
       {"draft_mode",
        options.draft_tokens > 0 ? Json(std::string(to_string(options.draft_mode))) : Json()},
       {"arrivals", to_string(options.arrivals)},
       {"spread_arrivals", options.spread_arrivals},
       {"deterministic", options.deterministic},
       {"graph", options.graph},
       {"implementation", options.implementation},
       {"inject", options.inject}});
}

Json check_json(const CheckSummary& check) {
  Json failures = Json::array();
  for (const CheckFailure& failure : check.failures) {
    failures.push(Json::object({{"request", failure.request},
                                {"position", failure.position},
                                {"layer", failure.layer},
                                {"layer_kind", failure.layer_kind},
                                {"op", failure.op},
                                {"kind", failure.kind},
                                {"detail", failure.detail}}));
  }
  return Json::object({{"rows", check.rows},
                       {"rows_prefill", check.rows_prefill},
                       {"rows_decode", check.rows_decode},
                       {"rows_selecting", check.rows_selecting},
                       {"rows_requantised", check.rows_requantised},
                       {"requests", check.requests},
                       {"mismatches", check.mismatches},
                       {"worst", number(check.worst)},
                       {"worst_lse", number(check.worst_lse)},
                       {"selection_slack", number(check.selection_slack)},
                       {"failures", failures}});
}

Json operators_json(const ReplayResult& result) {
  Json ops = Json::array();
  for (const ReplayOperator& op : result.ops) {
    ops.push(Json::object(
        {{"name", op.name},
         {"layer_kind", op.layer_kind},
         {"impl", op.implementation},
         {"calls", op.calls},
         {"ms", number(op.ms)},
         {"flops", number(op.flops)},
         {"bytes", number(op.bytes)},
         {"time_share", number(op.time_share)},
         {"roofline_share", op.roofline_share ? number(*op.roofline_share) : Json()}}));
  }
  return ops;
}

Json layers_json(const ReplayResult& result) {
  Json layers = Json::array();
  for (const ReplayLayer& layer : result.layers) {
    layers.push(Json::object({{"id", layer.id},
                              {"kind", layer.kind},
                              {"ms", number(layer.ms)},
                              {"checked_rows", layer.checked_rows}}));
  }
  return layers;
}

Json modes_json(const ReplayResult& result) {
  Json modes = Json::array();
  for (const ReplayMode& mode : result.modes) {
    modes.push(Json::object({{"mode", to_string(mode.mode)},
                             {"model", mode.draft ? "draft" : "target"},
                             {"steps", mode.steps},
                             {"rows", mode.rows},
                             {"ms", number(mode.ms)}}));
  }
  return modes;
}

Json drafts_json(const ReplayResult& result) {
  if (!result.drafts) return Json();
  const ReplayDrafts& drafts = *result.drafts;
  Json lengths = Json::array();
  for (const int64_t count : drafts.accepted_lengths) lengths.push(count);
  return Json::object({{"rounds", drafts.rounds},
                       {"verifications", drafts.verifications},
                       {"drafted", drafts.drafted},
                       {"decided", drafts.decided},
                       {"accepted", drafts.accepted},
                       {"rate", number(drafts.rate)},
                       {"rolled_back_rows", drafts.rolled_back_rows},
                       {"accepted_lengths", lengths}});
}

Json graphs_json(const ReplayResult& result) {
  if (!result.graphs) return Json();
  return Json::object({{"captures", result.graphs->captures},
                       {"replays", result.graphs->replays},
                       {"nodes", result.graphs->nodes}});
}

Json steps_json(const ReplayResult& result) {
  Json kinds = Json::array();
  for (const StepKindTotals& totals : step_kind_totals(result)) {
    kinds.push(Json::object({{"kind", to_string(totals.kind)},
                             {"count", totals.count},
                             {"rows", totals.rows},
                             {"ms", number(totals.ms)},
                             {"p50_ms", number(totals.p50_ms)},
                             {"p90_ms", number(totals.p90_ms)},
                             {"p99_ms", number(totals.p99_ms)}}));
  }
  return Json::object({{"count", static_cast<int64_t>(result.steps.size())},
                       {"kinds", kinds},
                       {"p50_ms", number(result.step_p50_ms)},
                       {"p90_ms", number(result.step_p90_ms)},
                       {"p99_ms", number(result.step_p99_ms)},
                       {"prefill_rows", result.prefill_rows},
                       {"decode_rows", result.decode_rows},
                       {"recomputed_rows", result.recomputed_rows}});
}

Json phases_json(const ReplayPhases& phases) {
  return Json::object({{"schedule_s", number(phases.schedule_s)},
                       {"generate_s", number(phases.generate_s)},
                       {"attention_s", number(phases.attention_s)},
                       {"digest_s", number(phases.digest_s)},
                       {"check_s", number(phases.check_s)},
                       {"total_s", number(phases.total_s)}});
}

}  // namespace

std::string to_json(const ReplayResult& result) {
  Json notes = Json::array();
  for (const std::string& note : result.notes) notes.push(note);
  const Json json = Json::object(
      {{"version", result.version},
       {"device", result.device},
       {"threads", result.threads},
       {"seed", result.options.seed},
       {"scale", result.options.token_scale},
       {"page", result.page},
       {"options", options_json(result)},
       {"notes", notes},
       {"requests", requests_json(result)},
       {"trace", Json::object({{"source", result.trace_source},
                               {"prompt_tokens", result.prompt_tokens},
                               {"output_tokens", result.output_tokens},
                               {"reusable_tokens", result.reusable_tokens}})},
       {"cache", Json::object({{"pages", result.cache_pages},
                               {"bytes", result.cache_bytes},
                               {"hit_tokens", result.hit_tokens},
                               {"pages_peak", result.pages_peak},
                               {"evictions", result.evictions}})},
       {"check", check_json(result.check)},
       {"digest", Json::object({{"selection", hex(result.digest_selection)},
                                {"output", hex(result.digest_output)},
                                {"rows", result.digest_rows}})},
       {"throughput", Json::object({{"prefill_tokens_per_s", number(result.prefill_tokens_per_s)},
                                    {"decode_tokens_per_s", number(result.decode_tokens_per_s)}})},
       {"steps", steps_json(result)},
       {"modes", modes_json(result)},
       {"drafts", drafts_json(result)},
       {"graphs", graphs_json(result)},
       {"phases", phases_json(result.phases)},
       {"layers", layers_json(result)},
       {"ops", operators_json(result)}});
  return json.dump(2) + "\n";
}

}  // namespace fovea
