#include "bench/report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <optional>
#include <utility>

#include <bench_commit.h>  // made by bench/CMakeLists.txt
#include "fovea/ceilings_file.h"
#include "fovea/version.h"

namespace fovea::bench {
namespace {

// Three significant digits and a unit that fits.
std::string time_text(double milliseconds) {
  if (milliseconds >= 1000) return fmt::format("{:.2f} s", milliseconds / 1000);
  if (milliseconds >= 1) return fmt::format("{:.3g} ms", milliseconds);
  return fmt::format("{:.3g} us", milliseconds * 1000);
}

std::string rate_text(const std::optional<double>& rate) {
  return rate ? fmt::format("{:.1f}", *rate) : "-";
}

double gflops(const Measurement& m) { return m.work.flops / (m.time.median_ms * 1e6); }
double gb_per_s(const Measurement& m) { return m.work.bytes() / (m.time.median_ms * 1e6); }

Json share_or_null(double share) { return share < 0 ? Json() : Json(share); }

Json to_json(const Measurement& m) {
  return Json::object({
      {"op", m.op},
      {"case", m.case_name},
      {"description", m.description},
      {"implementation", m.implementation},
      {"isa", to_string(m.isa)},
      {"device", m.device},
      {"graph", m.graph},
      {"threads", m.num_threads},
      {"cache", m.cold ? "cold" : "warm"},
      {"samples", m.time.num_samples},
      {"median_ms", m.time.median_ms},
      {"min_ms", m.time.min_ms},
      {"p25_ms", m.time.p25_ms},
      {"p75_ms", m.time.p75_ms},
      {"spread", m.time.spread()},
      {"flops", m.work.flops},
      {"bytes_read", m.work.bytes_read},
      {"bytes_written", m.work.bytes_written},
      {"gflops", gflops(m)},
      {"gb_per_s", gb_per_s(m)},
      {"limit", m.floor.limit},
      {"floor_ms", m.floor.milliseconds},
      {"roofline_share", m.roofline_share()},
      {"target_ms", m.target_ms ? Json(*m.target_ms) : Json()},
      {"target_kind",
       !m.target_ms ? Json() : Json(m.target_is_published ? "published" : "general")},
      {"min_over_target", m.target_ms ? Json(m.time.min_ms / *m.target_ms) : Json()},
      {"others_share", share_or_null(m.disturbance.others)},
      {"stolen_share", share_or_null(m.disturbance.stolen)},
  });
}

}  // namespace

Session make_session(const std::string& command) {
  Session session;
  session.command = command;
  session.commit = FOVEA_COMMIT;
  session.version = std::string(version());
  const auto now = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
  session.date_utc =
      fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(now)));
  session.clock_mhz = clock_mhz();
  session.load_average = load_average();
  return session;
}

std::string describe_session(const Session& session) {
  std::string gpu;
  if (!session.device.empty()) {
    gpu = fmt::format("{}{}\n", session.device,
                      session.device_clock_mhz > 0
                          ? fmt::format(": up to {:.0f} MHz", session.device_clock_mhz)
                          : "");
  }
  return fmt::format(
      "fovea {} (commit {}), {}\n{}{}: {} hardware threads, {}, {}\ncommand: {}\n", session.version,
      session.commit, session.date_utc, gpu, cpu_facts().model, cpu_facts().num_threads,
      session.clock_mhz > 0 ? fmt::format("{:.0f} MHz", session.clock_mhz) : "clock unknown",
      to_string(current_cpu_isa()), session.command);
}

std::string describe_ceilings(const MachineCeilings& ceilings) {
  const ThroughputLimits& all = ceilings.all_threads;
  const ThroughputLimits& one = ceilings.one_thread;
  std::string text = fmt::format(
      "{:<28}{:>11}{:>11}\n", "ceilings",
      fmt::format("{} thread{}", all.num_threads, all.num_threads == 1 ? "" : "s"), "1 thread");
  const auto line = [&](const char* name, const std::optional<double>& of_all,
                        const std::optional<double>& of_one) {
    text += fmt::format("  {:<26}{:>11}{:>11}\n", name, rate_text(of_all), rate_text(of_one));
  };
  line("fp32_fma, GFLOP/s", all.fp32_fma_gflops, one.fp32_fma_gflops);
  line("bf16_dot, GFLOP/s", all.bf16_dot_gflops, one.bf16_dot_gflops);
  line("l2_read, GB/s", all.l2_read_gb_per_s, one.l2_read_gb_per_s);
  line("l3_read, GB/s", all.l3_read_gb_per_s, one.l3_read_gb_per_s);
  line("dram_read, GB/s", all.dram_read_gb_per_s, one.dram_read_gb_per_s);
  line("copy, GB/s", all.copy_gb_per_s, one.copy_gb_per_s);
  line("gather_1152, GB/s", all.gather_1152_gb_per_s, one.gather_1152_gb_per_s);
  line("gather_656, GB/s", all.gather_656_gb_per_s, one.gather_656_gb_per_s);
  return text;
}

std::string table_heading() {
  return fmt::format(
      "{:<40} {:<15} {:>2} {:<5}{:>10}{:>10}{:>8}{:>9}{:>8}  {:<12}{:>6}{:>10}{:>8}\n", "case",
      "implementation", "th", "cache", "median", "min", "spread", "GFLOP/s", "GB/s", "limit",
      "share", "target", "min/tgt");
}

std::string table_row(const Measurement& m) {
  std::string row = fmt::format(
      "{:<40} {:<15} {:>2} {:<5}{:>10}{:>10}{:>7.1f}%{:>9.1f}{:>8.1f}  {:<12}{:>5.0f}%",
      m.op + "/" + m.case_name, m.implementation, m.num_threads, m.cold ? "cold" : "warm",
      time_text(m.time.median_ms), time_text(m.time.min_ms), 100 * m.time.spread(), gflops(m),
      gb_per_s(m), m.floor.limit, 100 * m.roofline_share());
  if (m.target_ms) {
    row += fmt::format("{:>10}{:>7.2f}{}", time_text(*m.target_ms), m.time.min_ms / *m.target_ms,
                       m.target_is_published ? " " : "*");
  }
  if (m.time.num_samples < kMinSamples) row += fmt::format(" only {} runs", m.time.num_samples);
  return row + (m.disturbance.matters() ? " disturbed" : "") + "\n";
}

Json to_json(const Session& session, const std::vector<Measurement>& measurements,
             const std::vector<Rejection>& rejections) {
  Json results = Json::array();
  for (const Measurement& measurement : measurements) results.push(to_json(measurement));
  Json rejected = Json::array();
  for (const Rejection& rejection : rejections) {
    rejected.push(Json::object({{"op", rejection.op},
                                {"case", rejection.case_name},
                                {"implementation", rejection.implementation},
                                {"wrong", rejection.wrong},
                                {"reason", rejection.reason}}));
  }
  return Json::object({
      {"format", 1},
      {"version", session.version},
      {"commit", session.commit},
      {"command", session.command},
      {"date_utc", session.date_utc},
      {"cpu", cpu_facts().model},
      {"device", session.device.empty() ? Json() : Json(session.device)},
      {"device_clock_mhz", session.device_clock_mhz > 0 ? Json(session.device_clock_mhz) : Json()},
      {"hardware_threads", cpu_facts().num_threads},
      {"l2_bytes_per_core", cpu_facts().l2_bytes_per_core},
      {"l3_bytes_total", cpu_facts().l3_bytes_total},
      {"clock_mhz", session.clock_mhz > 0 ? Json(session.clock_mhz) : Json()},
      {"load_average", session.load_average < 0 ? Json() : Json(session.load_average)},
      {"ceilings", fovea::to_json(session.ceilings)},
      {"results", std::move(results)},
      {"rejections", std::move(rejected)},
  });
}

}  // namespace fovea::bench
