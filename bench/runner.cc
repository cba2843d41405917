#include "bench/runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "fovea/error.h"
#include "fovea/stream.h"

namespace fovea::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxSamples = 2000;
constexpr int kMinWarmUps = 3;
constexpr double kWarmUpMs = 30;
// A series ends here even with fewer samples, so that a slow implementation does not stop the rest.
constexpr double kMaxSeriesMs = 30000;

double elapsed_ms(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// The value below which `share` of the sorted samples lie, between neighbours by distance.
double quantile(const std::vector<double>& sorted, double share) {
  const double position = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

// One sample of every run in turn, until there are enough and the budget is spent.
std::vector<std::vector<double>> sample_interleaved(const std::vector<PreparedRun>& runs,
                                                    double budget_ms, CacheFlusher* flusher) {
  for (const PreparedRun& prepared : runs) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; elapsed_ms(begin) < kWarmUpMs || i < kMinWarmUps; ++i) {
      prepared.run({});
      if (elapsed_ms(begin) > kMaxSeriesMs / 10) break;
    }
  }
  std::vector<std::vector<double>> samples(runs.size());
  double spent_ms = 0;
  for (int round = 0; round < kMaxSamples; ++round) {
    if (round >= kMinSamples && spent_ms > budget_ms) break;
    if (spent_ms > kMaxSeriesMs) break;
    for (size_t i = 0; i < runs.size(); ++i) {
      if (flusher != nullptr) flusher->flush();
      const Clock::time_point begin = Clock::now();
      runs[i].run({});
      samples[i].push_back(elapsed_ms(begin));
      spent_ms += samples[i].back();
    }
  }
  return samples;
}

// The same on a GPU. Each round is submitted without waiting, so that the device never waits for
// the host; a flush hides the launch of what follows it.
std::vector<std::vector<double>> sample_on_gpu(const std::vector<PreparedRun>& runs,
                                               const RunSettings& settings, double budget_ms,
                                               CacheFlusher* flusher) {
  const OwnedStream stream(settings.gpu);
  std::vector<std::function<void()>> launches;
  for (const PreparedRun& prepared : runs) {
    if (settings.graph) {
      auto graph = std::make_shared<Graph>(Graph::capture(settings.gpu, stream, prepared.run));
      launches.emplace_back([graph, &stream] { graph->launch(stream); });
    } else {
      launches.emplace_back([&prepared, &stream] { prepared.run(stream); });
    }
  }
  for (const std::function<void()>& launch : launches) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; elapsed_ms(begin) < kWarmUpMs || i < kMinWarmUps; ++i) {
      launch();
      stream.synchronize();
      if (elapsed_ms(begin) > kMaxSeriesMs / 10) break;
    }
  }
  std::vector<Event> marks;
  for (size_t i = 0; i < 2 * runs.size() * kMinSamples; ++i) marks.emplace_back(settings.gpu);
  std::vector<std::vector<double>> samples(runs.size());
  double spent_ms = 0;
  for (int rounds = 0; rounds < kMaxSamples; rounds += kMinSamples) {
    if (rounds > 0 && spent_ms > budget_ms) break;
    for (size_t mark = 0; mark < marks.size(); mark += 2) {
      if (flusher != nullptr) flusher->flush(stream);
      marks[mark].record(stream);
      launches[mark / 2 % runs.size()]();
      marks[mark + 1].record(stream);
    }
    stream.synchronize();
    for (size_t mark = 0; mark < marks.size(); mark += 2) {
      const double ms = Event::elapsed_ms(marks[mark], marks[mark + 1]);
      samples[mark / 2 % runs.size()].push_back(ms);
      spent_ms += ms;
    }
  }
  return samples;
}

// Plans every implementation and compares its result with the reference.
std::vector<PreparedRun> prepare_checked(const BenchCase& bench_case, CaseInputs* inputs,
                                         const Device& device, const RunSettings& settings,
                                         std::vector<Rejection>* rejections) {
  std::vector<std::string> wanted = settings.implementations;
  if (wanted.empty()) wanted.emplace_back();
  std::vector<PreparedRun> runs;
  for (const std::string& name : wanted) {
    try {
      PreparedRun prepared = inputs->prepare(device, Options{name});
      prepared.run({});
      const std::string mismatch = prepared.mismatch();
      if (mismatch.empty()) {
        runs.push_back(std::move(prepared));
      } else {
        rejections->push_back(
            {bench_case.op, bench_case.name, prepared.implementation, mismatch, true});
      }
    } catch (const Error& error) {
      rejections->push_back({bench_case.op, bench_case.name, name, error.what(), false});
    }
  }
  return runs;
}

}  // namespace

Statistics statistics_of(std::vector<double> samples_ms) {
  std::sort(samples_ms.begin(), samples_ms.end());
  Statistics statistics;
  statistics.num_samples = static_cast<int>(samples_ms.size());
  statistics.min_ms = samples_ms.front();
  statistics.p25_ms = quantile(samples_ms, 0.25);
  statistics.median_ms = quantile(samples_ms, 0.5);
  statistics.p75_ms = quantile(samples_ms, 0.75);
  return statistics;
}

CaseOutcome run_case(const BenchCase& bench_case, const RunSettings& settings,
                     const ThroughputLimits& limits, const CpuFacts* facts) {
  CaseOutcome outcome;
  const bool on_gpu = settings.gpu.kind == DeviceKind::kCuda;
  const int cpu_threads =
      bench_case.num_threads > 0 ? bench_case.num_threads : settings.num_threads;
  const Device device = on_gpu ? settings.gpu : Device::cpu(cpu_threads);
  const CpuFacts& machine = facts != nullptr ? *facts : cpu_facts();
  const std::unique_ptr<CaseInputs> inputs = bench_case.make();
  const std::vector<PreparedRun> runs =
      prepare_checked(bench_case, inputs.get(), device, settings, &outcome.rejections);
  if (runs.empty()) return outcome;
  const Work work = inputs->work();
  CacheFlusher flusher(device);
  for (const bool cold : {false, true}) {
    if (settings.only_cold && !cold) continue;
    const DisturbanceProbe probe;
    const double budget_ms = settings.quick ? 0 : (on_gpu ? 200 : 1000);
    CacheFlusher* const flush = cold ? &flusher : nullptr;
    const auto samples = on_gpu ? sample_on_gpu(runs, settings, budget_ms, flush)
                                : sample_interleaved(runs, budget_ms, flush);
    const Disturbance disturbance = on_gpu ? Disturbance() : probe.read();
    for (size_t i = 0; i < runs.size(); ++i) {
      Measurement result;
      result.op = bench_case.op;
      result.case_name = bench_case.name;
      result.description = bench_case.description;
      result.implementation = runs[i].implementation;
      result.isa = current_cpu_isa();
      result.num_threads = device.num_threads;
      result.device = to_string(device);
      result.graph = on_gpu && settings.graph;
      result.cold = cold;
      result.work = work;
      result.time = statistics_of(samples[i]);
      result.floor = floor_of(work, limits, machine, cold);
      // Published times are of CPUs.
      result.target_is_published = !on_gpu && bench_case.target.has_value();
      result.target_ms =
          result.target_is_published
              ? scaled_target_ms(*bench_case.target, work, limits, machine, current_cpu_isa(), cold)
              : general_target_ms(work, result.floor);
      result.disturbance = disturbance;
      outcome.measurements.push_back(std::move(result));
    }
  }
  return outcome;
}

}  // namespace fovea::bench
