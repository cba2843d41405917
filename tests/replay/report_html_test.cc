#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/replay.h"
#include "src/replay/svg_chart.h"
#include "tests/replay/sample_result.h"

namespace fovea {
namespace {

using internal::html_escape;
using testing::HasSubstr;
using testing::Not;

size_t count_of(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size()))
    ++count;
  return count;
}

// What is wrong with the markup; empty when every tag is closed in order, every attribute is
// quoted, and no bare & or < stands in text.
std::string markup_error(std::string_view html) {
  const std::set<std::string> kVoid = {"meta", "br"};
  std::vector<std::string> open;
  for (size_t i = 0; i < html.size();) {
    if (html[i] == '&') {
      const size_t semicolon = html.find(';', i);
      if (semicolon == html.npos || semicolon - i > 8)
        return "bare & near: " + std::string(html.substr(i, 40));
      i = semicolon + 1;
      continue;
    }
    if (html[i] != '<') {
      ++i;
      continue;
    }
    const size_t end = html.find('>', i);
    if (end == html.npos) return "unfinished tag";
    std::string tag(html.substr(i + 1, end - i - 1));
    i = end + 1;
    if (tag.starts_with("!")) continue;
    const bool closing = tag.starts_with("/");
    const bool closed = tag.ends_with("/");
    const std::string name = tag.substr(closing, tag.find_first_of(" /", closing) - closing);
    if (name.empty() || name.find_first_not_of("abcdefghijklmnopqrstuvwxyz123456789") != name.npos)
      return "strange tag: " + tag;
    if (count_of(tag, "\"") % 2 != 0) return "unbalanced quotes: " + tag;
    if (closing) {
      if (open.empty() || open.back() != name) return "closes the wrong tag: " + tag;
      open.pop_back();
    } else if (!closed && !kVoid.contains(name)) {
      open.push_back(name);
    }
    if (name == "style" && !closing) i = html.find("</style>", i);
  }
  return open.empty() ? "" : "never closed: " + open.back();
}

void expect_sound(const std::string& html) {
  EXPECT_EQ(markup_error(html), "");
  EXPECT_TRUE(html.starts_with("<!DOCTYPE html>"));
  // Numbers that are no numbers may appear as n/a only: a chart with a NaN coordinate shows
  // nothing.
  for (const char* bad : {"=\"nan", "=\"-nan", "=\"inf", "=\"-inf", " nan", "Hnan", "Vnan", "Vinf"})
    EXPECT_EQ(html.find(bad), html.npos) << bad;
}

TEST(ReportHtml, IsWellFormedAndLoadsNothing) {
  const std::string html = render_report_html(test::sample_result(300));
  expect_sound(html);
  for (const char* reference :
       {"http://", "https://", "src=", "href=", "url(", "@import", "<script"})
    EXPECT_THAT(html, Not(HasSubstr(reference)));
  EXPECT_THAT(html, HasSubstr("prefers-color-scheme: dark"));
}

TEST(ReportHtml, ShowsEveryFigure) {
  const std::string html = render_report_html(test::sample_result(300));
  for (const char* figure : {"conversation.jsonl",
                             "deepseek-v3.2",
                             "1.2.3",
                             "2 threads",
                             "Token scale 1 : 64",
                             "2,346",
                             "789",
                             "5.25",
                             "102",
                             "139",
                             "20,123",
                             "4,567",
                             "4,321",
                             "17 evictions",
                             "3 preemptions",
                             "123,456,789",
                             "0123456789abcdef",
                             "fedcba9876543210",
                             "24,690",
                             "200 rows recomputed in fp64, 0 mismatches",
                             "0.00123",
                             "1.5e-05",
                             "2.5e-06",
                             "sparse_mla",
                             "index_logits",
                             "topk_select",
                             "pack_rows",
                             "metadata_refresh",
                             "18,301",
                             "60.0 %",
                             "55.0 %",
                             "15,251",
                             "40.1"})
    EXPECT_THAT(html, HasSubstr(figure));
  for (const char* chart :
       {"Requests that arrive in each interval", "Running and waiting requests over",
        "Prefill tokens per second", "Decode tokens per second", "Distribution of step latency",
        "Time by operator", "Cache pages held by requests", "Prompt tokens found in the cache"})
    EXPECT_THAT(html, HasSubstr("aria-label=\"" + std::string(chart)));
  EXPECT_EQ(count_of(html, "role=\"img\""), 8u);
  for (const char* axis :
       {">virtual time (", ">time in the trace (", ">step latency (ms, logarithmic)<", ">pages<",
        ">requests<", ">steps<", ">prefill tokens/s<", ">decode tokens/s<", ">time (ms)<"})
    EXPECT_THAT(html, HasSubstr(axis));
}

TEST(ReportHtml, AFailedCheckNamesItsRows) {
  ReplayResult result = test::sample_result(20);
  result.check.mismatches = 2;
  result.check.failures = {{17, 4711, 3, "dsa", "sparse_mla", "output", "rms 0.5"}};
  const std::string html = render_report_html(result);
  expect_sound(html);
  EXPECT_THAT(html, HasSubstr("Check failed: 2 of 200 recomputed rows differ"));
  EXPECT_THAT(html, Not(HasSubstr("Check passed")));
  for (const char* part : {"17", "4711", "rms 0.5"}) EXPECT_THAT(html, HasSubstr(part));
}

TEST(ReportHtml, AnUncheckedRunSaysSo) {
  ReplayResult result = test::sample_result(20);
  result.check = {};
  EXPECT_THAT(render_report_html(result), HasSubstr("nothing is verified"));
}

TEST(ReportHtml, RejectedRequestsAreListedUpToALimit) {
  ReplayResult result = test::sample_result(400);
  EXPECT_THAT(render_report_html(result), Not(HasSubstr("Rejected requests")));
  for (size_t i = 0; i < 60; ++i) {
    result.requests[i].outcome = RequestOutcome::kRejected;
    result.requests[i].message = "needs 99 pages, the cache has 98";
  }
  const std::string html = render_report_html(result);
  expect_sound(html);
  EXPECT_EQ(count_of(html, "needs 99 pages"), 50u);
  EXPECT_THAT(html, HasSubstr("The first 50 of 60."));
}

TEST(ReportHtml, ARunOfNothingIsAPageWithoutCharts) {
  const std::string html = render_report_html(ReplayResult{});
  expect_sound(html);
  EXPECT_EQ(count_of(html, "role=\"img\""), 0u);
  EXPECT_EQ(count_of(html, "Nothing to show."), 8u);
}

TEST(ReportHtml, OneStepAndOneRequestAreEnough) {
  ReplayResult result = test::sample_result(1);
  result.requests = {{}};  // arrives at time 0
  expect_sound(render_report_html(result));
}

TEST(ReportHtml, LongRunsAreDrawnInFewIntervals) {
  const std::string html = render_report_html(test::sample_result(20000));
  expect_sound(html);
  EXPECT_LT(html.size(), 400u << 10);
}

TEST(ReportHtml, DraftsHaveACardOnlyWhenThereAreAny) {
  ReplayResult result = test::sample_result(100);
  EXPECT_THAT(render_report_html(result), Not(HasSubstr("rows rolled back")));
  result.options.draft_tokens = 3;
  result.options.accept = 0.65;
  result.options.draft_mode = DraftMode::kV2;
  result.drafts = ReplayDrafts{11, 1234, 3702, 2345, 1678, 0.7156, 789, {300, 250, 184, 500}};
  result.steps[0].kind = StepKind::kVerify;
  result.steps[1].kind = StepKind::kIdle;
  const std::string html = render_report_html(result);
  expect_sound(html);
  for (const char* figure :
       {"71.6 %", "1,678 of 2,345 decided", "3,702", "789", "3 accepted: 500, 40.5 %",
        "3 tokens a round, each accepted with chance 0.65, draft extend v2", "target_verify",
        "98,765", "5,400", ">verify<", ">idle<"})
    EXPECT_THAT(html, HasSubstr(figure));
  result.drafts = ReplayDrafts{};
  result.drafts->rate = std::numeric_limits<double>::quiet_NaN();
  expect_sound(render_report_html(result));
}

TEST(ReportHtml, PeaksSurviveTheIntervals) {
  ReplayResult result = test::sample_result(20000);
  result.steps[12345].running = 987654;
  EXPECT_THAT(render_report_html(result), HasSubstr("running: 987,654"));
}

TEST(ReportHtml, ThroughputIsTokensOverTheTimeOfTheirSteps) {
  ReplayResult result;
  // 300 tokens in 2 s, then a decode step; the rate holds while the virtual clock passes the step.
  result.steps = {{StepKind::kPrefill, 0, 0, 2000, 1, 0, 300, 0, 0, 0, 0, 0},
                  {StepKind::kDecode, 500, 5000, 10, 1, 0, 0, 2, 0, 0, 0, 0}};
  result.requests = {{}};
  result.requests[0].finish_virtual_ms = 1000;
  const std::string html = render_report_html(result);  // four intervals of 250 ms
  EXPECT_EQ(count_of(html, "prefill: 150 tokens/s"), 2u);
  EXPECT_EQ(count_of(html, "prefill: 0 tokens/s"), 2u);
  EXPECT_EQ(count_of(html, "decode: 200 tokens/s"), 2u);
}

TEST(ReportHtml, OccupancyOfAnIntervalIsThatOfOneStep) {
  ReplayResult result = test::sample_result(20000);
  for (ReplayStep& step : result.steps) {
    // Held and kept pages take turns; together they are never more than 100.
    const int64_t i = &step - result.steps.data();
    step.pages_used = i % 2 == 0 ? 99 : 1;
    step.pages_cached = 100 - step.pages_used;
  }
  const std::string html = render_report_html(result);
  EXPECT_THAT(html,
              Not(HasSubstr("held by requests: 99 pages\nkept for reuse, held by nobody: 99")));
  EXPECT_THAT(html,
              HasSubstr("held by requests: 99 pages\nkept for reuse, held by nobody: 1 pages"));
}

TEST(ReportHtml, HostileStringsAndNumbersDoNoHarm) {
  const std::string hostile =
      "</title><script>alert('x')</script>\"'&<!--\x01\xff\xc0\x80\xed\xa0\x80%s%n]]>";
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  const double kInf = std::numeric_limits<double>::infinity();
  ReplayResult result = test::sample_result(40);
  for (std::string* text :
       {&result.version, &result.device, &result.trace_source, &result.options.model,
        &result.options.layers, &result.options.implementation, &result.options.inject})
    *text = hostile;
  result.notes = {hostile};
  result.layers = {{-1, hostile, kNan, -5}};
  result.ops = {{hostile, hostile, hostile, -1, kNan, kInf, -kInf, kNan, kNan},
                {hostile, hostile, hostile, 1, 5, 0, 0, kInf, kInf}};
  result.requests[0].outcome = RequestOutcome::kRejected;
  result.requests[0].message = hostile;
  result.requests[1].arrival_ms = kNan;
  result.requests[2].arrival_ms = -kInf;
  result.requests[3].finish_virtual_ms = kNan;
  result.check.mismatches = 1;
  result.check.failures = {{1, 2, 3, hostile, hostile, hostile, hostile}};
  result.steps[5].step_ms = kNan;
  result.steps[6].step_ms = -1;
  result.steps[7].virtual_ms = kNan;
  result.steps[8].real_ms = kInf;
  result.steps[9].pages_used = std::numeric_limits<int64_t>::max();
  result.steps[10].running = std::numeric_limits<int64_t>::min();
  result.step_p50_ms = kNan;
  result.step_p99_ms = 0;
  result.prefill_tokens_per_s = kInf;
  const std::string html = render_report_html(result);
  expect_sound(html);
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr("\x01")));
  EXPECT_THAT(html, Not(HasSubstr("\xff")));
  EXPECT_THAT(html, HasSubstr("&lt;script&gt;alert(&#39;x&#39;)"));
}

TEST(HtmlEscape, KeepsTextAndReplacesWhatIsNoText) {
  EXPECT_EQ(html_escape("a<b & \"c\" 'd'>"), "a&lt;b &amp; &quot;c&quot; &#39;d&#39;&gt;");
  EXPECT_EQ(html_escape("Gr\xC3\xBC\xC3\x9F"
                        "e \xE2\x82\xAC \xF0\x9F\x99\x82"),
            "Gr\xC3\xBC\xC3\x9F"
            "e \xE2\x82\xAC \xF0\x9F\x99\x82");
  EXPECT_EQ(html_escape(std::string_view("\0x", 2)), "\xEF\xBF\xBDx");
  EXPECT_EQ(html_escape("\xC3"), "\xEF\xBF\xBD");                  // cut off
  EXPECT_EQ(html_escape("\xC0\xAF"), "\xEF\xBF\xBD\xEF\xBF\xBD");  // overlong /
  EXPECT_EQ(html_escape(""), "");
}

TEST(ReportNumbers, HaveThreeDigitsAndSeparators) {
  EXPECT_EQ(internal::count_text(0), "0");
  EXPECT_EQ(internal::count_text(-1234567), "-1,234,567");
  EXPECT_EQ(internal::count_text(-123), "-123");
  EXPECT_EQ(internal::count_text(999), "999");
  EXPECT_EQ(internal::count_text(1000), "1,000");
  EXPECT_EQ(internal::count_text(std::numeric_limits<int64_t>::min()),
            "-9,223,372,036,854,775,808");
  EXPECT_EQ(internal::number_text(12345.6), "12,346");
  EXPECT_EQ(internal::number_text(0.012345), "0.0123");
  EXPECT_EQ(internal::number_text(99.96), "100");
  EXPECT_EQ(internal::number_text(NAN), "n/a");
  EXPECT_EQ(internal::percent_text(0.375), "37.5 %");
}

TEST(SvgChart, ALegendAppearsWithTheSecondSeries) {
  internal::BinnedChart chart;
  chart.title = "test";
  chart.series = {{"one", 1, {1, 2, 3}}};
  EXPECT_THAT(internal::render_chart(chart), Not(HasSubstr("legend")));
  chart.series.push_back({"two", 2, {1, NAN, 3}});
  const std::string html = internal::render_chart(chart);
  EXPECT_THAT(html, HasSubstr("legend"));
  EXPECT_THAT(html, HasSubstr("0.333 to 0.667 \none: 2 </title>"));  // no value of "two" here
  EXPECT_EQ(markup_error(html), "");
}

TEST(SvgChart, EveryBarSaysItsValue) {
  internal::BarChart chart;
  chart.title = "bars";
  chart.bars = {{"first", 3, "3 ms"}, {"second", 0, "0 ms"}, {std::string(200, 'x'), 1, "1 ms"}};
  const std::string html = internal::render_bars(chart);
  EXPECT_EQ(markup_error(html), "");
  EXPECT_THAT(html, HasSubstr("<title>first: 3 ms</title>"));
  EXPECT_THAT(html, HasSubstr("<title>second: 0 ms</title>"));
  EXPECT_THAT(html, HasSubstr("<title>" + std::string(200, 'x') + ": 1 ms</title>"));
  EXPECT_THAT(html, Not(HasSubstr(">" + std::string(200, 'x') + "<")));  // cut in the drawing
}

}  // namespace
}  // namespace fovea
