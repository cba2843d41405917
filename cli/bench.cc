#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <thread>

#include "bench/case.h"
#include "bench/machine.h"
#include "bench/perf_suite.h"
#include "bench/report.h"
#include "bench/runner.h"
#include "cli/output_file.h"
#include "cli/verbs.h"
#include "fovea/ceilings.h"
#include "fovea/ceilings_file.h"
#include "fovea/device.h"
#include "fovea/device_info.h"
#include "fovea/error.h"
#include "fovea/implementation.h"

namespace fovea::cli {
namespace {

// The cases that the options ask for. Throws UsageError when a name is wrong.
std::vector<bench::BenchCase> select_cases(const BenchOptions& options) {
  std::vector<bench::BenchCase> selected;
  std::set<std::string> seen;
  std::string ops, names;
  for (bench::BenchCase& entry : bench::all_cases()) {
    if (seen.insert(entry.op).second) ops += " " + entry.op;
    if (!options.op.empty() && entry.op != options.op) continue;
    names += fmt::format("\n  {:<36} {}", entry.op + "/" + entry.name, entry.description);
    if (entry.name.find(options.case_name) != std::string::npos)
      selected.push_back(std::move(entry));
  }
  if (names.empty())
    throw UsageError(fmt::format("bench: unknown operator '{}'; there are{}", options.op, ops));
  if (selected.empty())
    throw UsageError(
        fmt::format("bench: no case contains '{}'; there are{}", options.case_name, names));
  return selected;
}

// Limits the instruction set for the life of the object.
class IsaLimit {
 public:
  IsaLimit() : previous_(current_cpu_isa()) {}
  ~IsaLimit() {
    if (current_cpu_isa() != previous_) limit_cpu_isa(previous_);
  }
  IsaLimit(const IsaLimit&) = delete;
  IsaLimit& operator=(const IsaLimit&) = delete;

  // False for a word that names none. Throws Error when this CPU lacks it.
  bool apply(const std::string& name) {
    for (const CpuIsa isa :
         {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3, CpuIsa::kAvx512Bf16}) {
      if (to_string(isa) != name) continue;
      limit_cpu_isa(isa);
      return true;
    }
    return false;
  }

 private:
  CpuIsa previous_;
};

void warn_when_busy() {
  const bench::DisturbanceProbe probe;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const bench::Disturbance disturbance = probe.read();
  if (!disturbance.matters()) return;
  fmt::print(stderr,
             "fovea bench: warning: something else runs on this machine ({}; load average {:.1f}); "
             "the figures are not worth much\n",
             disturbance.describe(), bench::load_average());
}

MachineCeilings ceilings_for(const Device& device, bool again) {
  if (!again) {
    if (std::optional<MachineCeilings> kept = load_ceilings(device)) return *kept;
  }
  fmt::print(stderr, "fovea bench: measuring the ceilings of this machine\n");
  const bench::DisturbanceProbe probe;
  MachineCeilings ceilings = measure_ceilings(device);
  if (const bench::Disturbance disturbance = probe.read(); disturbance.matters()) {
    fmt::print(
        stderr,
        "fovea bench: warning: the ceilings were measured on a busy machine ({}); repeat with "
        "--ceilings when it is idle\n",
        disturbance.describe());
  }
  try {
    store_ceilings(ceilings);
    fmt::print(stderr, "fovea bench: kept in {}\n", ceilings_path());
  } catch (const Error& error) {
    fmt::print(stderr, "fovea bench: warning: {}\n", error.what());
  }
  return ceilings;
}

// Every name must belong to some operator; one that lacks it is reported and left out.
void check_implementations(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::vector<OperatorInfo> infos = operators();
    const bool exists = std::any_of(infos.begin(), infos.end(), [&](const OperatorInfo& info) {
      return std::any_of(info.implementations.begin(), info.implementations.end(),
                         [&](const ImplementationInfo& entry) { return entry.name == name; });
    });
    if (!exists)
      throw UsageError(fmt::format("bench: no operator has an implementation '{}'", name));
  }
}

Device device_of(const BenchOptions& options) {
  RunSettings settings;
  settings.device = options.device;
  settings.threads = options.num_threads;
  return settings.parsed_device();
}

// The caches of the device, as floor_of() asks for them: the L2 of a GPU is one.
CpuFacts cache_facts(const Device& device) {
  if (device.kind == DeviceKind::kCpu) return cpu_facts();
  const GpuInfo gpu = gpu_info(device);
  return {gpu.name, 1, gpu.l2_bytes, 0};
}

// The rows of the suite whose section/name contains the text.
std::vector<bench::PerfRow> select_rows(const BenchOptions& options) {
  if (options.suite != "perf")
    throw UsageError(fmt::format("bench: --suite '{}', expected perf", options.suite));
  std::vector<bench::PerfRow> selected;
  for (bench::PerfRow& row : bench::perf_rows()) {
    if ((row.section + "/" + row.name).find(options.case_name) != std::string::npos)
      selected.push_back(std::move(row));
  }
  if (selected.empty())
    throw UsageError(fmt::format("bench: no row of the suite contains '{}'", options.case_name));
  return selected;
}

int run_suite(const std::vector<bench::PerfRow>& rows, const BenchOptions& options,
              const bench::Session& session, const bench::RunSettings& settings,
              const std::string& device_name) {
  std::vector<bench::PerfResult> results;
  std::string section;
  bool wrong = false;
  fmt::print("{}", bench::perf_heading());
  for (const bench::PerfRow& row : rows) {
    if (row.section != section) fmt::print("{}\n", row.section);
    section = row.section;
    results.push_back(bench::run_perf_row(row, settings, session.ceilings.all_threads));
    const std::string& check = results.back().check;
    wrong = wrong || check.starts_with("WRONG") || check.starts_with(bench::kFailed);
    fmt::print("  {}", bench::perf_line(results.back()));
    std::fflush(stdout);
  }
  write_text(
      options.json_path,
      bench::perf_json(device_name, session.commit, session.date_utc, results).dump(2) + "\n");
  return wrong ? kExitMismatch : kExitOk;
}

// Runs the cases one after the other and prints each as soon as it is done.
bench::CaseOutcome run_cases(const std::vector<bench::BenchCase>& cases,
                             const bench::RunSettings& settings, const MachineCeilings& ceilings,
                             const CpuFacts& facts) {
  bench::CaseOutcome all;
  fmt::print("{}", bench::table_heading());
  for (const bench::BenchCase& entry : cases) {
    const ThroughputLimits& limits =
        entry.num_threads == 1 ? ceilings.one_thread : ceilings.all_threads;
    bench::CaseOutcome outcome = bench::run_case(entry, settings, limits, &facts);
    for (const bench::Measurement& measurement : outcome.measurements)
      fmt::print("{}", bench::table_row(measurement));
    for (const bench::Rejection& rejection : outcome.rejections) {
      fmt::print(stderr, "fovea bench: {}/{} {}: {}{}\n", rejection.op, rejection.case_name,
                 rejection.implementation, rejection.wrong ? "WRONG RESULT, not timed: " : "",
                 rejection.reason);
    }
    std::fflush(stdout);
    std::move(outcome.measurements.begin(), outcome.measurements.end(),
              std::back_inserter(all.measurements));
    std::move(outcome.rejections.begin(), outcome.rejections.end(),
              std::back_inserter(all.rejections));
  }
  return all;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  const std::vector<bench::BenchCase> cases =
      options.suite.empty() ? select_cases(options) : std::vector<bench::BenchCase>();
  const std::vector<bench::PerfRow> rows =
      options.suite.empty() ? std::vector<bench::PerfRow>() : select_rows(options);
  IsaLimit limit;
  if (!options.isa.empty() && !limit.apply(options.isa))
    throw UsageError(
        fmt::format("bench: --isa '{}', expected baseline, avx2, avx3 or avx512bf16", options.isa));
  check_implementations(options.implementations);
  check_writable(options.json_path);
  const Device device = device_of(options);
  const bool on_gpu = device.kind == DeviceKind::kCuda;
  if (options.graph && !on_gpu) throw UsageError("bench: --graph needs --device cuda:N");
  const bench::RunSettings settings{device.num_threads, options.implementations,
                                    options.quick,      on_gpu ? device : Device(),
                                    options.graph,      false};
  const CpuFacts facts = cache_facts(device);
  if (!on_gpu) warn_when_busy();
  bench::Session session = bench::make_session(options.command);
  if (on_gpu) {
    const GpuInfo gpu = gpu_info(device);
    session.device = gpu.name;
    session.device_clock_mhz = gpu.clock_mhz;
  }
  fmt::print("{}\n", bench::describe_session(session));
  session.ceilings = ceilings_for(device, options.ceilings);
  fmt::print("{}\n", bench::describe_ceilings(session.ceilings));
  if (!options.suite.empty()) return run_suite(rows, options, session, settings, facts.model);
  bench::CaseOutcome outcome;
  const bool only_ceilings = options.ceilings && options.op.empty() && options.case_name.empty();
  if (!only_ceilings) {
    outcome = run_cases(cases, settings, session.ceilings, facts);
    fmt::print(
        "\nshare: floor over median; min/tgt: fastest run over target (1 or less: reached; *: "
        "general target), see docs/bench.md\n");
  }
  write_text(options.json_path,
             to_json(session, outcome.measurements, outcome.rejections).dump(2) + "\n");
  const bool wrong = std::any_of(outcome.rejections.begin(), outcome.rejections.end(),
                                 [](const bench::Rejection& rejection) { return rejection.wrong; });
  return wrong ? kExitMismatch : kExitOk;
}

}  // namespace fovea::cli
