#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/machine.h"
#include "fovea/ceilings.h"

/// Checks and times one case.
namespace fovea::bench {

struct RunSettings {
  int num_threads = 1;
  std::vector<std::string> implementations;  ///< Empty: the one that plan() prefers.
  bool quick = false;                        ///< The least number of samples.
  Device gpu = {};                           ///< A GPU: cases run there; the default: on the CPU.
  bool graph = false;  ///< On a GPU each run is the launch of a captured graph.
  bool only_cold = false;
};

/// Order statistics of the sampled times.
struct Statistics {
  int num_samples = 0;
  double median_ms = 0;
  double min_ms = 0;
  double p25_ms = 0;
  double p75_ms = 0;
  /// (p75 - p25) / median.
  double spread() const { return median_ms > 0 ? (p75_ms - p25_ms) / median_ms : 0; }
};

/// Of at least one sample.
Statistics statistics_of(std::vector<double> samples_ms);

/// Fewer samples than this say little about the spread.
inline constexpr int kMinSamples = 20;

struct Measurement {
  std::string op;
  std::string case_name;
  std::string description;
  std::string implementation;
  CpuIsa isa = CpuIsa::kBaseline;
  int num_threads = 1;
  std::string device = "cpu";
  bool graph = false;
  /// Caches emptied before every run; otherwise the same inputs again and again.
  bool cold = false;
  Work work;
  Statistics time;
  Floor floor;
  std::optional<double> target_ms;
  bool target_is_published = false;
  Disturbance disturbance;

  /// Floor over median: 1 is the limit itself.
  double roofline_share() const { return floor.milliseconds / time.median_ms; }
};

/// An implementation that gave no time: a refusal, or a wrong result.
struct Rejection {
  std::string op;
  std::string case_name;
  std::string implementation;
  std::string reason;
  bool wrong = false;  ///< The result differs from the reference.
};

struct CaseOutcome {
  std::vector<Measurement> measurements;
  std::vector<Rejection> rejections;
};

/// Compares every implementation with the reference first; those that are right are then timed
/// interleaved, warm and cold. On a GPU a sample is the time between two events around a run, and
/// runs are submitted ahead of the device; `limits` are those of the device, whose caches `facts`
/// describes (null: this CPU).
CaseOutcome run_case(const BenchCase& bench_case, const RunSettings& settings,
                     const ThroughputLimits& limits, const CpuFacts* facts = nullptr);

}  // namespace fovea::bench
