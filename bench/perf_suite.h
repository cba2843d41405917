#pragma once

#include <string>
#include <vector>

#include "bench/runner.h"
#include "fovea/json.h"

/// The rows that compare this library with other kernels on one kind of GPU: docs/bench.md.
namespace fovea::bench {

struct PerfRow {
  std::string section;
  std::string name;
  double peer_us = 0;  ///< Of the fastest peer; 0: none was measured.
  double target_us = 0;
  BenchCase bench_case;
  double peak_gflops = 0;  ///< Of the arithmetic that the floor counts with.
};

struct PerfResult {
  PerfRow row;
  double value_us = 0;  ///< Median; 0: none.
  double floor_us = 0;
  std::string check = "ok";  ///< Otherwise why there is no value.

  bool met() const { return value_us > 0 && value_us <= row.target_us; }
};

/// Every row of every section, also those that this build cannot run.
std::vector<PerfRow> perf_rows();

/// Bytes over the read bandwidth that the rows were made with, flops over the row's peak.
double perf_floor_us(const Work& work, double peak_gflops);

/// How the check of a row begins whose run failed on the device.
inline constexpr char kFailed[] = "FAILED: ";

/// Checks and times one row: cold; on a GPU captured graphs, quick or not. An Error becomes the
/// row's check.
PerfResult run_perf_row(const PerfRow& row, const RunSettings& settings,
                        const ThroughputLimits& limits);

/// One line, and the heading of all.
std::string perf_heading();
std::string perf_line(const PerfResult& result);

/// {device, commit, date, rows: [{name, section, value, unit, target, peer, ratio_to_peer, floor,
/// floor_share, met, check}]}; times in us, null where there is none.
Json perf_json(const std::string& device, const std::string& commit, const std::string& date,
               const std::vector<PerfResult>& results);

}  // namespace fovea::bench
