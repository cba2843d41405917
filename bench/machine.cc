#include "bench/machine.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace fovea::bench {

std::string Disturbance::describe() const {
  const auto percent = [](double share) {
    return share < 0 ? std::string("unknown") : fmt::format("{:.0f} %", 100 * share);
  };
  return "others " + percent(others) + ", stolen " + percent(stolen);
}

DisturbanceProbe::Counters DisturbanceProbe::sample() {
  Counters counters;
  // First line: cpu user nice system idle iowait irq softirq steal ...
  std::ifstream file("/proc/stat");
  std::string word;
  int64_t user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  if (file >> word >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal) {
    counters.known = word == "cpu";
    counters.busy = user + nice + system + irq + softirq;
    counters.stolen = steal;
    counters.total = counters.busy + steal + idle + iowait;
  }
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) counters.known = false;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  counters.own_s = seconds(usage.ru_utime) + seconds(usage.ru_stime);
  counters.ticks_per_s = static_cast<double>(std::max(1L, sysconf(_SC_CLK_TCK)));
  return counters;
}

DisturbanceProbe::DisturbanceProbe() : begin_(sample()) {}

Disturbance DisturbanceProbe::read() const {
  const Counters end = sample();
  const auto total = static_cast<double>(end.total - begin_.total);
  // Counters advance in ticks of 10 ms: fewer than 20 say nothing.
  if (!begin_.known || !end.known || total < 20) return {};
  const double own = (end.own_s - begin_.own_s) * end.ticks_per_s;
  const double others = static_cast<double>(end.busy - begin_.busy) - own;
  return {static_cast<double>(end.stolen - begin_.stolen) / total,
          std::clamp(others / total, 0.0, 1.0)};
}

double load_average() {
  double load = 0;
  return getloadavg(&load, 1) == 1 ? load : -1;
}

double clock_mhz() {
  std::ifstream file("/proc/cpuinfo");
  double fastest = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with("cpu MHz") || colon == std::string::npos) continue;
    fastest = std::max(fastest, std::strtod(line.c_str() + colon + 1, nullptr));
  }
  return fastest;
}

}  // namespace fovea::bench
