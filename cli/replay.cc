// fovea replay: a recorded trace through the attention side of a server.

#include "fovea/replay.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/verbs.h"
#include "fovea/ceilings_file.h"
#include "fovea/error.h"
#include "fovea/trace.h"

namespace fovea::cli {
namespace {

void check_model(const std::string& model) {
  const std::vector<std::string> models = replay_models();
  if (std::find(models.begin(), models.end(), model) != models.end()) return;
  std::string known;
  for (const std::string& name : models) known += (known.empty() ? "" : ", ") + name;
  throw UsageError(fmt::format("unknown model '{}'; this build has: {}", model, known));
}

// Both mean nothing without drafts.
void set_draft_options(const ReplayVerbOptions& options, ReplayOptions* result) {
  const bool drafts = result->draft_tokens > 0;
  if (options.accept && !drafts) throw UsageError("--accept needs --draft-tokens");
  if (options.draft_mode && !drafts) throw UsageError("--draft-mode needs --draft-tokens");
  if (options.accept) result->accept = *options.accept;
  if (options.draft_mode) result->draft_mode = parse_draft_mode(*options.draft_mode);
}

ReplayOptions library_options(const ReplayVerbOptions& options) {
  ReplayOptions result = options.replay;
  result.device = options.settings.parsed_device();
  // The CPU makes tensors and checks rows, wherever the backend runs.
  result.device.num_threads = Device::cpu(options.settings.threads).num_threads;
  result.implementation = options.settings.implementation;
  try {
    result.arrivals = parse_arrivals(options.arrivals);
    set_draft_options(options, &result);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  result.seed = static_cast<uint64_t>(options.seed);
  if (const auto ceilings = load_ceilings(result.device)) result.ceilings = ceilings->all_threads;
  return result;
}

TraceFormat trace_format(const std::string& word) {
  try {
    return parse_trace_format(word);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

ReplayResult run_with_progress(const Trace& trace, const ReplayOptions& options) {
  ProgressBar bar;
  const auto show = [&](const ReplayProgress& progress) {
    bar.update(progress.rows_done, progress.rows_total,
               fmt::format("{}: {} of {} requests, {} running", progress.phase,
                           progress.requests_completed, progress.requests_total, progress.running));
  };
  try {
    return replay(trace, options, show);
  } catch (const Error& error) {
    // Options that contradict the model or the trace are usage errors.
    if (error.code() == ErrorCode::kInvalidArgument) throw UsageError(error.what());
    throw;
  }
}

void print_operators(const ReplayResult& result) {
  fmt::print("\n{:<18} {:<10} {:<16} {:>8} {:>10} {:>7} {:>9}\n", "operator", "layers",
             "implementation", "calls", "ms", "time", "roofline");
  for (const ReplayOperator& op : result.ops) {
    const std::string roofline =
        op.roofline_share ? fmt::format("{:.1f} %", 100 * *op.roofline_share) : "-";
    fmt::print("{:<18} {:<10} {:<16} {:>8} {:>10.1f} {:>5.1f} % {:>9}\n", op.name, op.layer_kind,
               op.implementation, op.calls, op.ms, 100 * op.time_share, roofline);
  }
}

void print_modes(const ReplayResult& result) {
  if (!result.drafts && !result.graphs) return;
  fmt::print("\n{:<18} {:>8} {:>10} {:>10} {:>8} {:>8} {:>8}\n", "step", "count", "rows", "ms",
             "p50 ms", "p90 ms", "p99 ms");
  for (const StepKindTotals& totals : step_kind_totals(result)) {
    fmt::print("{:<18} {:>8} {:>10} {:>10.1f} {:>8.2f} {:>8.2f} {:>8.2f}\n", to_string(totals.kind),
               totals.count, totals.rows, totals.ms, totals.p50_ms, totals.p90_ms, totals.p99_ms);
  }
  fmt::print("\n{:<18} {:<10} {:>8} {:>10} {:>10}\n", "forward mode", "model", "batches", "rows",
             "ms");
  for (const ReplayMode& mode : result.modes) {
    fmt::print("{:<18} {:<10} {:>8} {:>10} {:>10.1f}\n", to_string(mode.mode),
               mode.draft ? "draft" : "target", mode.steps, mode.rows, mode.ms);
  }
}

void print_drafts(const ReplayResult& result) {
  if (!result.drafts) return;
  const ReplayDrafts& drafts = *result.drafts;
  std::string lengths;
  for (const int64_t count : drafts.accepted_lengths) {
    lengths += (lengths.empty() ? "" : ", ") + std::to_string(count);
  }
  fmt::print(
      "drafts      {} a round ({}), {} rounds: {} drafted, {} decided, {} accepted, rate {:.3f}\n",
      result.options.draft_tokens, to_string(result.options.draft_mode), drafts.rounds,
      drafts.drafted, drafts.decided, drafts.accepted, drafts.rate);
  fmt::print("            verifications with 0, 1, ... accepted: {}; {} rows rolled back\n",
             lengths, drafts.rolled_back_rows);
}

void print_check(const ReplayResult& result) {
  const CheckSummary& check = result.check;
  if (check.rows == 0) return;
  fmt::print(
      "\ncheck       {} rows recomputed in fp64 ({} prefill, {} decode, {} selecting) of {} "
      "requests: {} mismatches\n",
      check.rows, check.rows_prefill, check.rows_decode, check.rows_selecting, check.requests,
      check.mismatches);
  fmt::print(
      "            worst output rms {:.2g} (limit 5e-3), lse {:.2g} (1e-3), selection slack "
      "{:.2g} (1.5e-5)\n",
      check.worst, check.worst_lse, check.selection_slack);
  for (const CheckFailure& failure : check.failures) {
    fmt::print("MISMATCH    {}\n", failure.message());
  }
}

void print_summary(const ReplayResult& result) {
  const ReplayOptions& options = result.options;
  fmt::print("model       {}, tp {} ({} local heads), {} threads on {}\n", options.model,
             options.tp, result.num_heads, result.threads, result.device);
  fmt::print(
      "scale       1 replayed token = {} trace tokens; topk {}, page {} tokens, sharing {}\n",
      options.token_scale, result.topk, result.page, result.sharing ? "on" : "off");
  fmt::print("requests    {} completed, {} rejected, {} preemptions\n", result.completed,
             result.rejected, result.preempted);
  fmt::print("tokens      {} prompt ({} reusable, {} hit), {} output\n", result.prompt_tokens,
             result.reusable_tokens, result.hit_tokens, result.output_tokens);
  fmt::print("cache       {} pages, {} at the peak, {} evictions\n", result.cache_pages,
             result.pages_peak, result.evictions);
  fmt::print("throughput  prefill {:.0f} tokens/s, decode {:.0f} tokens/s\n",
             result.prefill_tokens_per_s, result.decode_tokens_per_s);
  fmt::print("steps       {}: p50 {:.2f} ms, p90 {:.2f} ms, p99 {:.2f} ms\n", result.steps.size(),
             result.step_p50_ms, result.step_p90_ms, result.step_p99_ms);
  if (result.graphs) {
    fmt::print("graphs      {} captured, {} replayed\n", result.graphs->captures,
               result.graphs->replays);
  }
  print_drafts(result);
  fmt::print("digest      selection {:016x}, output {:016x} over {} rows\n",
             result.digest_selection, result.digest_output, result.digest_rows);
  print_modes(result);
  print_operators(result);
  print_check(result);
}

}  // namespace

int replay(const ReplayVerbOptions& options) {
  check_model(options.replay.model);
  const ReplayOptions replay_options = library_options(options);
  const TraceFormat format = trace_format(options.format);
  check_writable(options.json_path);
  check_writable(options.report_path);
  const Trace trace = read_trace(options.trace_path, format);
  const ReplayResult result = run_with_progress(trace, replay_options);
  for (const std::string& note : result.notes) fmt::print(stderr, "fovea: {}\n", note);
  for (const ReplayRequest& request : result.requests) {
    if (request.outcome != RequestOutcome::kRejected) continue;
    fmt::print(stderr, "fovea: request {} is rejected: {}\n", request.id, request.message);
  }
  print_summary(result);
  write_text(options.json_path, to_json(result));
  write_text(options.report_path, options.report_path.empty() ? "" : render_report_html(result));
  if (result.ok()) return kExitOk;
  fmt::print(stderr, "fovea: {} of {} checked rows are wrong\n", result.check.mismatches,
             result.check.rows);
  return kExitMismatch;
}

}  // namespace fovea::cli
