#pragma once

#include <chrono>
#include <cstdint>
#include <string>

/// What else the machine does while it is measured.
namespace fovea::bench {

/// Shares of the whole machine's CPU time over an interval; negative when the system does not tell.
struct Disturbance {
  double stolen = -1;  ///< Time that the hypervisor gave to others.
  double others = -1;  ///< Time that other processes were running.

  /// Above these a figure is not worth much: 2 % stolen, 5 % others.
  bool matters() const { return stolen > 0.02 || others > 0.05; }
  /// "others 12 %, stolen 0 %".
  std::string describe() const;
};

/// Measures the disturbance from its construction on.
class DisturbanceProbe {
 public:
  DisturbanceProbe();
  Disturbance read() const;

 private:
  struct Counters {
    bool known = false;
    int64_t total = 0, busy = 0, stolen = 0;  // in ticks
    double own_s = 0;                         // CPU time of this process
    double ticks_per_s = 100;
  };
  static Counters sample();
  Counters begin_;
};

/// Load average of the last minute; negative when unknown.
double load_average();

/// The fastest clock that the system reports now, in MHz; 0 when unknown.
double clock_mhz();

}  // namespace fovea::bench
