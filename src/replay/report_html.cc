#include <algorithm>
#include <array>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "fovea/replay.h"
#include "src/replay/report_style.h"
#include "src/replay/svg_chart.h"

namespace fovea {
namespace {

using internal::BarChart;
using internal::BinnedChart;
using internal::ChartStyle;
using internal::count_text;
using internal::html_escape;
using internal::number_text;
using internal::percent_text;

// Longer runs are drawn in this many intervals, shorter ones in two per step.
constexpr size_t kMaxIntervals = 96;
constexpr size_t kMaxListedRequests = 50;

/// Seconds, or minutes over long runs, for one axis.
struct TimeAxis {
  explicit TimeAxis(double end_ms)
      : unit(end_ms > 1.2e6  ? "min"
             : end_ms > 1200 ? "s"
                             : "ms"),
        scale(end_ms > 1.2e6  ? 60000
              : end_ms > 1200 ? 1000
                              : 1) {}
  std::string unit;
  double scale;  ///< ms per unit
};

/// Equal intervals of [begin_ms, end_ms] that steps are gathered into.
class Intervals {
 public:
  Intervals(double begin_ms, double end_ms, size_t num_events)
      : begin_ms_(begin_ms),
        width_ms_((end_ms - begin_ms) /
                  static_cast<double>(std::clamp<size_t>(2 * num_events, 1, kMaxIntervals))),
        count_(end_ms > begin_ms ? std::clamp<size_t>(2 * num_events, 1, kMaxIntervals) : 0) {}

  size_t count() const { return count_; }
  size_t of(double time_ms) const {
    const double position = std::floor((time_ms - begin_ms_) / width_ms_);
    return static_cast<size_t>(std::clamp(position, 0.0, static_cast<double>(count_ - 1)));
  }

  /// Spreads `amount` evenly over [from_ms, to_ms].
  void add(std::vector<double>* values, double from_ms, double to_ms, double amount) const {
    if (count_ == 0 || !std::isfinite(from_ms) || !std::isfinite(to_ms)) return;
    const size_t first = of(from_ms), last = of(to_ms);
    if (!(to_ms > from_ms) || first == last) {
      (*values)[first] += amount;
      return;
    }
    for (size_t i = first; i <= last; ++i) {
      const double left = std::max(from_ms, begin_ms_ + width_ms_ * static_cast<double>(i));
      const double right = std::min(to_ms, begin_ms_ + width_ms_ * static_cast<double>(i + 1));
      (*values)[i] += amount * std::max(0.0, right - left) / (to_ms - from_ms);
    }
  }

  /// The intervals [first, last) that [from_ms, to_ms) touches.
  std::pair<size_t, size_t> touched(double from_ms, double to_ms) const {
    if (count_ == 0 || !std::isfinite(from_ms) || !std::isfinite(to_ms)) return {0, 0};
    const double last_ms = std::nextafter(to_ms, -INFINITY);  // an interval's end is the next one's
    return {of(from_ms), of(std::max(from_ms, last_ms)) + 1};
  }

  /// Raises every interval that [from_ms, to_ms) touches to at least `value`.
  void raise(std::vector<double>* values, double from_ms, double to_ms, double value) const {
    const auto [first, last] = touched(from_ms, to_ms);
    for (size_t i = first; i < last; ++i) {
      if (!((*values)[i] >= value)) (*values)[i] = value;
    }
  }

 private:
  double begin_ms_;
  double width_ms_;
  size_t count_;
};

std::string card(const std::string& heading, const std::string& note, const std::string& content,
                 bool wide = false) {
  std::string html = wide ? "<section class=\"card wide\">" : "<section class=\"card\">";
  html += "<h2>" + html_escape(heading) + "</h2>\n";
  if (!note.empty()) html += "<p class=\"note\">" + html_escape(note) + "</p>\n";
  return html + content + "</section>\n";
}

std::string tile(const std::string& name, const std::string& figure, const std::string& unit,
                 const std::string& detail) {
  std::string html = "<div class=\"tile\"><div class=\"name\">" + html_escape(name) + "</div>";
  html += "<div class=\"figure\">" + html_escape(figure);
  if (!unit.empty()) html += " <span class=\"unit\">" + html_escape(unit) + "</span>";
  html += "</div>";
  if (!detail.empty()) html += "<div class=\"detail\">" + html_escape(detail) + "</div>";
  return html + "</div>\n";
}

/// A table whose columns named in `numbers` (by position) are right-aligned.
class Table {
 public:
  Table(const std::vector<std::string>& headings, std::vector<bool> numbers)
      : numbers_(std::move(numbers)) {
    html_ = "<div class=\"scroll\"><table><thead><tr>";
    for (size_t i = 0; i < headings.size(); ++i) {
      html_ += numbers_[i] ? "<th scope=\"col\" class=\"number\">" : "<th scope=\"col\">";
      html_ += html_escape(headings[i]) + "</th>";
    }
    html_ += "</tr></thead><tbody>\n";
  }
  void add(const std::vector<std::string>& cells) {
    html_ += "<tr>";
    for (size_t i = 0; i < cells.size(); ++i) {
      html_ += numbers_[i] ? "<td class=\"number\">" : "<td class=\"text\">";
      html_ += html_escape(cells[i]) + "</td>";
    }
    html_ += "</tr>\n";
  }
  std::string html() const { return html_ + "</tbody></table></div>\n"; }

 private:
  std::vector<bool> numbers_;
  std::string html_;
};

struct Fact {
  std::string name;
  std::string value;
  bool monospace = false;
};

std::string definitions(const std::vector<Fact>& facts) {
  std::string html = "<dl>";
  for (const Fact& fact : facts) {
    html += "<dt>" + html_escape(fact.name);
    html += fact.monospace ? "</dt><dd class=\"mono\">" : "</dt><dd>";
    html += html_escape(fact.value) + "</dd>\n";
  }
  return html + "</dl>\n";
}

std::string yes_no(bool value) { return value ? "yes" : "no"; }
std::string or_default(int64_t value, const std::string& meaning) {
  return value == 0 ? meaning : count_text(value);
}

std::string hex_text(uint64_t value) {
  std::array<char, 17> digits;
  std::snprintf(digits.data(), digits.size(), "%016" PRIx64, value);
  return digits.data();
}

std::string scale_banner(const ReplayResult& result) {
  const int64_t scale = result.options.token_scale;
  std::string html =
      "<p class=\"scale\"><strong>Token scale 1 : " + count_text(scale) + "</strong> ";
  html += scale == 1 ? "&#8211; every token of the trace was computed."
                     : "&#8211; one replayed token stands for " + count_text(scale) +
                           " tokens of the trace. Every token count below is in replayed tokens.";
  html += " Selection width (top-k) " + count_text(result.topk) + ", " +
          count_text(result.num_heads) + " query heads, page of " + count_text(result.page) +
          " tokens.</p>\n";
  return html;
}

std::string verdict(const CheckSummary& check) {
  if (check.mismatches > 0) {
    return "<p class=\"verdict fail\">&#10007; Check failed: " + count_text(check.mismatches) +
           " of " + count_text(check.rows) + " recomputed rows differ.</p>\n";
  }
  if (check.rows == 0)
    return "<p class=\"verdict\">No rows were recomputed (--check 0): nothing is verified.</p>\n";
  return "<p class=\"verdict pass\">&#10003; Check passed: " + count_text(check.rows) +
         " rows recomputed in fp64, 0 mismatches.</p>\n";
}

std::string draft_options(const ReplayOptions& options) {
  if (options.draft_tokens == 0) return "none";
  return count_text(options.draft_tokens) + " tokens a round, each accepted with chance " +
         number_text(options.accept) + ", draft extend " +
         std::string(to_string(options.draft_mode));
}

std::string options_table(const ReplayOptions& options) {
  const auto& cost = options.virtual_cost;
  return definitions({
      {"model", options.model},
      {"device", to_string(options.device)},
      {"threads", std::to_string(options.device.num_threads)},
      {"tensor parallel", count_text(options.tp)},
      {"layers", options.layers},
      {"skip", count_text(options.skip)},
      {"max requests", or_default(options.max_requests, "all")},
      {"token scale", count_text(options.token_scale)},
      {"top-k", or_default(options.topk, "the model's")},
      {"page", or_default(options.page, "the model's")},
      {"chunk", count_text(options.chunk) + " prefill rows a step"},
      {"max batch", count_text(options.max_batch) + " requests"},
      {"cache", or_default(options.cache_tokens, "enough for the trace")},
      {"prefix sharing", yes_no(options.prefix_sharing)},
      {"mixed steps", yes_no(options.mixed)},
      {"drafts", draft_options(options)},
      {"arrivals", std::string(to_string(options.arrivals))},
      {"arrivals spread", yes_no(options.spread_arrivals)},
      {"virtual cost", number_text(cost.prefill_ms_per_row) + " ms per prefill row, " +
                           number_text(cost.decode_step_ms) + " ms per decode step, " +
                           number_text(cost.decode_ms_per_row) + " ms per decode row, " +
                           number_text(cost.draft_forward_ms) + " ms per draft forward"},
      {"seed", std::to_string(options.seed)},
      {"deterministic", yes_no(options.deterministic)},
      {"graphs", yes_no(options.graph)},
      {"checked rows", count_text(options.check_rows)},
      {"implementation",
       options.implementation.empty() ? "the preferred ones" : options.implementation},
      {"injected fault", options.inject.empty() ? "none" : options.inject},
  });
}

std::string header(const ReplayResult& result) {
  std::string html = "<header><h1>" + html_escape(result.options.model) + " on " +
                     html_escape(result.device) + "</h1>\n";
  html += "<p class=\"sub\">Replay of " + html_escape(result.trace_source) + " &#183; " +
          count_text(result.threads) + (result.threads == 1 ? " thread" : " threads") +
          " &#183; fovea " + html_escape(result.version) + "</p>\n";
  html += scale_banner(result) + verdict(result.check);
  for (const std::string& note : result.notes)
    html += "<p class=\"sub\">Note: " + html_escape(note) + "</p>\n";
  return html + "</header>\n";
}

std::string key_figures(const ReplayResult& result) {
  const auto part = [](int64_t count, int64_t whole) {
    return whole > 0 ? percent_text(static_cast<double>(count) / static_cast<double>(whole)) : "";
  };
  std::string html = "<div class=\"tiles\">\n";
  html += tile(
      "Requests completed", count_text(result.completed), "",
      count_text(result.rejected) + " rejected, " + count_text(result.preempted) + " preemptions");
  html += tile("Prefill", number_text(result.prefill_tokens_per_s), "tokens/s",
               count_text(result.prefill_rows) + " rows");
  html += tile("Decode", number_text(result.decode_tokens_per_s), "tokens/s",
               count_text(result.decode_rows) + " rows");
  html += tile("Step latency p50", number_text(result.step_p50_ms), "ms",
               "p90 " + number_text(result.step_p90_ms) + " ms, p99 " +
                   number_text(result.step_p99_ms) + " ms");
  html += tile("Prompt tokens from the cache", part(result.hit_tokens, result.prompt_tokens), "",
               count_text(result.hit_tokens) + " of " + count_text(result.prompt_tokens) + "; " +
                   count_text(result.reusable_tokens) + " reusable");
  html += tile(
      "Cache pages, peak", count_text(result.pages_peak), "",
      "of " + count_text(result.cache_pages) + "; " + count_text(result.evictions) + " evictions");
  if (result.drafts) {
    html += tile("Drafts accepted", percent_text(result.drafts->rate), "",
                 count_text(result.drafts->accepted) + " of " + count_text(result.drafts->decided) +
                     " decided");
  }
  html += tile("Rows checked", count_text(result.check.rows), "",
               count_text(result.check.rows_selecting) + " selecting, " +
                   count_text(result.check.mismatches) + " mismatches");
  html += tile("Wall time", number_text(result.phases.total_s), "s",
               number_text(result.phases.attention_s) + " s of attention");
  return html + "</div>\n";
}

struct Span {
  double begin_ms = 0;
  double end_ms = 0;
};

/// From the first step to the last thing that happened, on the virtual clock.
Span virtual_span(const ReplayResult& result) {
  Span span;
  if (!result.steps.empty() && std::isfinite(result.steps.front().virtual_ms))
    span.begin_ms = span.end_ms = result.steps.front().virtual_ms;
  for (const ReplayStep& step : result.steps) span.end_ms = std::max(span.end_ms, step.virtual_ms);
  for (const ReplayRequest& request : result.requests)
    span.end_ms = std::max(span.end_ms, request.finish_virtual_ms);
  return span;
}

/// Start of the next step, or the end of the run after the last one.
double next_virtual_ms(const ReplayResult& result, size_t step, double end_ms) {
  return step + 1 < result.steps.size() ? result.steps[step + 1].virtual_ms : end_ms;
}

std::string arrivals_card(const ReplayResult& result) {
  Span span{INFINITY, 0};
  for (const ReplayRequest& request : result.requests) {
    if (!std::isfinite(request.arrival_ms)) continue;
    span.begin_ms = std::min(span.begin_ms, request.arrival_ms);
    span.end_ms = std::max(span.end_ms, request.arrival_ms);
  }
  // Requests that all arrive at once still have an interval; no requests have none.
  const double begin_ms = std::isfinite(span.begin_ms) ? span.begin_ms : 0;
  const double end_ms = result.requests.empty()
                            ? begin_ms
                            : std::max(span.end_ms + (span.end_ms - begin_ms) / 1000, begin_ms + 1);
  const Intervals intervals(begin_ms, end_ms, std::min<size_t>(result.requests.size(), 40));
  std::vector<double> arrivals(intervals.count(), 0.0);
  for (const ReplayRequest& request : result.requests)
    intervals.add(&arrivals, request.arrival_ms, request.arrival_ms, 1);
  const TimeAxis axis(end_ms);
  BinnedChart chart;
  chart.title = "Requests that arrive in each interval of the trace";
  chart.x_label = "time in the trace (" + axis.unit + ")";
  chart.y_label = "requests per interval";
  chart.x_unit = axis.unit;
  chart.y_unit = "";
  chart.x_begin = begin_ms / axis.scale;
  chart.x_end = end_ms / axis.scale;
  chart.style = ChartStyle::kStackedBars;
  chart.series = {{"requests", 1, std::move(arrivals)}};
  const std::string note =
      result.options.arrivals == Arrivals::kAsap
          ? "As recorded. This run admits requests in order as soon as there is room (asap), "
            "whatever their time."
          : "As recorded, and as admitted at the earliest on the virtual clock.";
  return card("Arrivals", note, render_chart(chart));
}

std::string running_card(const ReplayResult& result) {
  const auto [begin_ms, end_ms] = virtual_span(result);
  const Intervals intervals(begin_ms, end_ms, result.steps.size());
  std::vector<double> running(intervals.count(), NAN), waiting(intervals.count(), NAN);
  for (size_t i = 0; i < result.steps.size(); ++i) {
    const ReplayStep& step = result.steps[i];
    const double until_ms = next_virtual_ms(result, i, end_ms);
    intervals.raise(&running, step.virtual_ms, until_ms, static_cast<double>(step.running));
    intervals.raise(&waiting, step.virtual_ms, until_ms, static_cast<double>(step.waiting));
  }
  const TimeAxis axis(end_ms);
  BinnedChart chart;
  chart.title = "Running and waiting requests over the virtual clock";
  chart.x_label = "virtual time (" + axis.unit + ")";
  chart.y_label = "requests";
  chart.x_unit = axis.unit;
  chart.x_begin = begin_ms / axis.scale;
  chart.x_end = end_ms / axis.scale;
  chart.series = {{"running", 1, std::move(running)}, {"waiting", 2, std::move(waiting)}};
  return card("Running and waiting requests",
              "Largest number in each interval. The virtual clock follows a cost model, not "
              "measured time.",
              render_chart(chart));
}

/// Tokens of one kind over the measured time of the steps that computed them.
std::string throughput_card(const ReplayResult& result, bool prefill) {
  const auto [begin_ms, end_ms] = virtual_span(result);
  const Intervals intervals(begin_ms, end_ms, result.steps.size());
  std::vector<double> tokens(intervals.count(), 0.0), time_ms(intervals.count(), 0.0);
  for (size_t i = 0; i < result.steps.size(); ++i) {
    const ReplayStep& step = result.steps[i];
    const int64_t step_tokens = prefill ? step.prefill_tokens : step.decode_tokens;
    if (step_tokens <= 0 || !(step.step_ms > 0) || !std::isfinite(step.step_ms)) continue;
    const double until_ms = next_virtual_ms(result, i, end_ms);
    intervals.add(&tokens, step.virtual_ms, until_ms, static_cast<double>(step_tokens));
    intervals.add(&time_ms, step.virtual_ms, until_ms, step.step_ms);
  }
  for (size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = time_ms[i] > 0 ? 1000 * tokens[i] / time_ms[i] : 0;
  const TimeAxis axis(end_ms);
  const std::string kind = prefill ? "prefill" : "decode";
  BinnedChart chart;
  chart.title = prefill ? "Prefill tokens per second" : "Decode tokens per second";
  chart.x_label = "virtual time (" + axis.unit + ")";
  chart.y_label = kind + " tokens/s";
  chart.x_unit = axis.unit;
  chart.y_unit = "tokens/s";
  chart.x_begin = begin_ms / axis.scale;
  chart.x_end = end_ms / axis.scale;
  chart.style = ChartStyle::kStackedAreas;
  chart.series = {{kind, prefill ? 1 : 2, std::move(tokens)}};
  return card(prefill ? "Prefill throughput" : "Decode throughput",
              "Measured: tokens over the time of the steps that computed them; 0 where there were "
              "none.",
              render_chart(chart));
}

std::string latency_card(const ReplayResult& result) {
  constexpr size_t kBins = 32;
  double fastest = INFINITY, slowest = 0;
  for (const ReplayStep& step : result.steps) {
    if (!(step.step_ms > 0) || !std::isfinite(step.step_ms)) continue;
    fastest = std::min(fastest, step.step_ms);
    slowest = std::max(slowest, step.step_ms);
  }
  BinnedChart chart;
  chart.title = "Distribution of step latency by kind of step";
  chart.x_label = "step latency (ms, logarithmic)";
  chart.y_label = "steps";
  chart.x_unit = "ms";
  chart.y_unit = "steps";
  chart.log_x = true;
  chart.style = ChartStyle::kStackedBars;
  if (slowest > 0) {
    chart.x_begin = fastest / 1.05;
    chart.x_end = slowest * 1.05;
    for (const StepKind kind :
         {StepKind::kPrefill, StepKind::kDecode, StepKind::kMixed, StepKind::kVerify}) {
      std::vector<double> counts(kBins, 0.0);
      bool any = false;
      for (const ReplayStep& step : result.steps) {
        if (step.kind != kind || !(step.step_ms > 0) || !std::isfinite(step.step_ms)) continue;
        const double position =
            std::log(step.step_ms / chart.x_begin) / std::log(chart.x_end / chart.x_begin);
        ++counts[std::min(kBins - 1, static_cast<size_t>(position * kBins))];
        any = true;
      }
      if (any)
        chart.series.push_back({std::string(to_string(kind)), static_cast<int>(kind) + 1, counts});
    }
    chart.x_marks = {{result.step_p50_ms, "p50 " + number_text(result.step_p50_ms) + " ms"},
                     {result.step_p90_ms, "p90 " + number_text(result.step_p90_ms) + " ms"},
                     {result.step_p99_ms, "p99 " + number_text(result.step_p99_ms) + " ms"}};
  }
  return card("Step latency",
              count_text(static_cast<int64_t>(result.steps.size())) +
                  " steps; a step is its metadata and the forward of every layer, a verify step "
                  "a whole round of drafts.",
              render_chart(chart));
}

std::string drafts_card(const ReplayResult& result) {
  if (!result.drafts) return {};
  const ReplayDrafts& drafts = *result.drafts;
  BarChart chart;
  chart.title = "Verifications by number of accepted tokens";
  chart.x_label = "verifications";
  for (size_t accepted = 0; accepted < drafts.accepted_lengths.size(); ++accepted) {
    const int64_t count = drafts.accepted_lengths[accepted];
    const double share = drafts.verifications > 0 ? static_cast<double>(count) /
                                                        static_cast<double>(drafts.verifications)
                                                  : 0;
    chart.bars.push_back({std::to_string(accepted) + " accepted", static_cast<double>(count),
                          count_text(count) + ", " + percent_text(share)});
  }
  return card(
      "Drafts",
      "A drafted token counts as decided when all before it in its draft were accepted and "
      "the output reaches it.",
      render_bars(chart) + definitions({
                               {"rounds", count_text(drafts.rounds)},
                               {"verifications", count_text(drafts.verifications)},
                               {"tokens drafted", count_text(drafts.drafted)},
                               {"tokens decided", count_text(drafts.decided)},
                               {"tokens accepted", count_text(drafts.accepted)},
                               {"acceptance", percent_text(drafts.rate) + " of the decided tokens"},
                               {"rows rolled back", count_text(drafts.rolled_back_rows)},
                           }));
}

std::string modes_card(const ReplayResult& result) {
  Table kinds(
      {"kind of step", "steps", "rows that stay", "time, ms", "p50, ms", "p90, ms", "p99, ms"},
      {false, true, true, true, true, true, true});
  for (const StepKindTotals& totals : step_kind_totals(result)) {
    kinds.add({std::string(to_string(totals.kind)), count_text(totals.count),
               count_text(totals.rows), number_text(totals.ms), number_text(totals.p50_ms),
               number_text(totals.p90_ms), number_text(totals.p99_ms)});
  }
  std::string note = "A verify step is a round: draft steps, verification, draft extend.";
  if (result.graphs) {
    note += " Graphs: " + count_text(result.graphs->captures) + " captured, " +
            count_text(result.graphs->replays) + " replayed.";
  }
  Table modes({"forward mode", "model", "batches", "rows", "time, ms"},
              {false, false, true, true, true});
  for (const ReplayMode& mode : result.modes) {
    modes.add({std::string(to_string(mode.mode)), mode.draft ? "draft" : "target",
               count_text(mode.steps), count_text(mode.rows), number_text(mode.ms)});
  }
  return card("Steps by kind", note, kinds.html() + "<br>" + modes.html());
}

std::string cache_card(const ReplayResult& result) {
  const auto [begin_ms, end_ms] = virtual_span(result);
  const Intervals intervals(begin_ms, end_ms, result.steps.size());
  // Both amounts of an interval are those of its fullest step: their own peaks may lie apart.
  std::vector<double> total(intervals.count(), -1.0);
  std::vector<double> used(intervals.count(), NAN), cached(intervals.count(), NAN);
  double peak = 0;
  for (size_t i = 0; i < result.steps.size(); ++i) {
    const ReplayStep& step = result.steps[i];
    const auto step_used = static_cast<double>(step.pages_used);
    const auto step_cached = static_cast<double>(step.pages_cached);
    peak = std::max(peak, step_used + step_cached);
    const auto [first, last] =
        intervals.touched(step.virtual_ms, next_virtual_ms(result, i, end_ms));
    for (size_t bin = first; bin < last; ++bin) {
      if (step_used + step_cached <= total[bin]) continue;
      total[bin] = step_used + step_cached;
      used[bin] = step_used;
      cached[bin] = step_cached;
    }
  }
  const TimeAxis axis(end_ms);
  BinnedChart chart;
  chart.title = "Cache pages held by requests and kept for reuse over the virtual clock";
  chart.x_label = "virtual time (" + axis.unit + ")";
  chart.y_label = "pages";
  chart.x_unit = axis.unit;
  chart.y_unit = "pages";
  chart.x_begin = begin_ms / axis.scale;
  chart.x_end = end_ms / axis.scale;
  chart.style = ChartStyle::kStackedAreas;
  chart.series = {{"held by requests", 1, std::move(used)},
                  {"kept for reuse, held by nobody", 2, std::move(cached)}};
  const auto capacity = static_cast<double>(result.cache_pages);
  if (capacity > 0 && capacity <= 2.5 * peak)
    chart.y_marks = {{capacity, "capacity " + count_text(result.cache_pages)}};
  return card("Cache occupancy",
              "Capacity " + count_text(result.cache_pages) + " pages of " +
                  count_text(result.page) + " tokens, " + count_text(result.cache_bytes) +
                  " bytes. Each interval shows its fullest moment.",
              render_chart(chart));
}

std::string hits_card(const ReplayResult& result) {
  const auto [begin_ms, end_ms] = virtual_span(result);
  const Intervals intervals(begin_ms, end_ms, std::min<size_t>(result.steps.size(), 40));
  std::vector<double> hits(intervals.count(), 0.0);
  for (const ReplayStep& step : result.steps)
    intervals.add(&hits, step.virtual_ms, step.virtual_ms, static_cast<double>(step.hit_tokens));
  const TimeAxis axis(end_ms);
  BinnedChart chart;
  chart.title = "Prompt tokens found in the cache over the virtual clock";
  chart.x_label = "virtual time (" + axis.unit + ")";
  chart.y_label = "tokens per interval";
  chart.x_unit = axis.unit;
  chart.y_unit = "tokens";
  chart.x_begin = begin_ms / axis.scale;
  chart.x_end = end_ms / axis.scale;
  chart.style = ChartStyle::kStackedBars;
  chart.series = {{"tokens found", 1, std::move(hits)}};
  return card("Prefix hits",
              result.sharing ? "Prompt tokens that admitted requests found in the cache; " +
                                   count_text(result.reusable_tokens) + " were reusable at best."
                             : "Prefix sharing was off.",
              render_chart(chart));
}

/// The operators, the slowest first; what is no number comes last.
std::vector<ReplayOperator> sorted_operators(const ReplayResult& result) {
  std::vector<ReplayOperator> ops = result.ops;
  const auto key = [](const ReplayOperator& op) { return std::isnan(op.ms) ? -1 : op.ms; };
  std::stable_sort(ops.begin(), ops.end(), [&](const ReplayOperator& a, const ReplayOperator& b) {
    return key(a) > key(b);
  });
  return ops;
}

std::string operator_time_card(const ReplayResult& result) {
  BarChart chart;
  chart.title = "Time by operator";
  chart.x_label = "time (ms)";
  for (const ReplayOperator& op : sorted_operators(result)) {
    chart.bars.push_back({op.name + (op.layer_kind.empty() ? "" : " (" + op.layer_kind + ")"),
                          op.ms, number_text(op.ms) + " ms, " + percent_text(op.time_share)});
  }
  return card("Time by operator", "Summed over all steps and layers; shares are of the step time.",
              render_bars(chart));
}

std::string operators_card(const ReplayResult& result) {
  Table table({"operator", "layer kind", "implementation", "calls", "time, ms",
               "share of step time", "GFLOP/s", "GB/s", "share of roofline"},
              {false, false, false, true, true, true, true, true, true});
  bool any_roofline = false;
  for (const ReplayOperator& op : sorted_operators(result)) {
    const double to_giga = op.ms > 0 ? 1e-6 / op.ms : NAN;  // per ms to 1e9 per s
    table.add({op.name, op.layer_kind, op.implementation, count_text(op.calls), number_text(op.ms),
               percent_text(op.time_share), number_text(op.flops * to_giga),
               number_text(op.bytes * to_giga),
               op.roofline_share ? percent_text(*op.roofline_share) : "\xE2\x80\x93"});
    any_roofline = any_roofline || op.roofline_share.has_value();
  }
  return card("Operators",
              any_roofline ? "Share of roofline: least possible time by the measured ceilings of "
                             "this machine over measured time."
                           : "Share of roofline is unknown: run `fovea bench --ceilings` once.",
              table.html(), true);
}

std::string check_card(const ReplayResult& result) {
  const CheckSummary& check = result.check;
  std::string html = definitions({
      {"rows recomputed", count_text(check.rows) + " (" + count_text(check.rows_prefill) +
                              " prefill, " + count_text(check.rows_decode) + " decode) of " +
                              count_text(check.requests) + " requests"},
      {"rows longer than top-k", count_text(check.rows_selecting)},
      {"mismatches", count_text(check.mismatches)},
      {"worst relative rms error", number_text(check.worst) + " (limit 0.005)"},
      {"worst lse error", number_text(check.worst_lse) + " (limit 0.001)"},
      {"selection slack", number_text(check.selection_slack) + " of max |logit|"},
      {"digest of selections", hex_text(result.digest_selection), true},
      {"digest of outputs", hex_text(result.digest_output), true},
      {"rows in the digests", count_text(result.digest_rows)},
  });
  if (!check.failures.empty()) {
    Table table({"request", "position", "layer", "kind", "operator", "what", "detail"},
                {true, true, true, false, false, false, false});
    for (const CheckFailure& failure : check.failures) {
      table.add({std::to_string(failure.request), std::to_string(failure.position),
                 std::to_string(failure.layer), failure.layer_kind, failure.op, failure.kind,
                 failure.detail});
    }
    html += table.html();
  }
  return card(
      "Check and digests",
      "Sampled rows are recomputed in fp64 without caches, pages, sharing or drafts. Digests do "
      "not depend on threads, chunk, batch, page, sharing or drafts.",
      html);
}

std::string layers_card(const ReplayResult& result) {
  Table layers({"layer", "kind", "forward time, ms", "rows checked"}, {true, false, true, true});
  for (const ReplayLayer& layer : result.layers) {
    layers.add({std::to_string(layer.id), layer.kind, number_text(layer.ms),
                count_text(layer.checked_rows)});
  }
  const ReplayPhases& phases = result.phases;
  Table time({"phase of the run", "wall time, s"}, {false, true});
  time.add({"scheduling, pages, tables", number_text(phases.schedule_s)});
  time.add({"input tensors", number_text(phases.generate_s)});
  time.add({"attention", number_text(phases.attention_s)});
  time.add({"digests", number_text(phases.digest_s)});
  time.add({"check", number_text(phases.check_s)});
  time.add({"all", number_text(phases.total_s)});
  return card("Layers and phases", "", layers.html() + "<br>" + time.html());
}

std::string rejected_card(const ReplayResult& result) {
  Table table({"request", "prompt tokens", "output tokens", "reason"}, {true, true, true, false});
  size_t listed = 0, rejected = 0;
  for (const ReplayRequest& request : result.requests) {
    if (request.outcome != RequestOutcome::kRejected) continue;
    if (++rejected > kMaxListedRequests) continue;
    ++listed;
    table.add({std::to_string(request.id), count_text(request.prompt_tokens),
               count_text(request.output_tokens), request.message});
  }
  if (rejected == 0) return {};
  return card("Rejected requests",
              listed < rejected
                  ? "The first " + std::to_string(listed) + " of " + std::to_string(rejected) + "."
                  : "",
              table.html(), true);
}

}  // namespace

std::string render_report_html(const ReplayResult& result) {
  std::string html = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  html += "<title>fovea replay: " + html_escape(result.options.model) + "</title>\n";
  html += "<style>" + std::string(internal::kReportStyle) + "</style>\n</head>\n<body>\n<main>\n";
  html += header(result) + key_figures(result);
  html += "<div class=\"cards\">\n";
  html += arrivals_card(result) + running_card(result);
  html += throughput_card(result, true) + throughput_card(result, false);
  html += latency_card(result) + modes_card(result);
  html += drafts_card(result) + check_card(result);
  html += cache_card(result) + hits_card(result);
  html += operator_time_card(result) + layers_card(result);
  html += operators_card(result) + rejected_card(result);
  html += card("Options", "As given on the command line.", options_table(result.options), true);
  return html + "</div>\n</main>\n</body>\n</html>\n";
}

}  // namespace fovea
