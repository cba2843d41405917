#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/replay.h"

/// What the steps of a run add up to.
namespace fovea::internal {

/// Sums of row fingerprints modulo 2^64.
struct Digest {
  uint64_t selection = 0;
  uint64_t output = 0;
  int64_t rows = 0;

  Digest& operator+=(const Digest& other) {
    selection += other.selection;
    output += other.output;
    rows += other.rows;
    return *this;
  }
};

struct EngineTotals {
  Digest digest;
  double generate_s = 0;
  double attention_s = 0;
  double read_s = 0;
  std::vector<double> layer_ms;  ///< Per simulated layer.
  /// roofline_share: summed here as time; the run divides it by the measured time at its end.
  std::vector<ReplayOperator> operators;
  std::vector<ReplayMode> modes;
  ReplayGraphs graphs;

  /// The entry of a forward mode, made when it is new.
  ReplayMode& mode(ForwardMode mode, bool draft);

  void add_calls(std::span<const OperatorCall> calls, const std::string& layer_kind,
                 const std::optional<ThroughputLimits>& ceilings);
};

}  // namespace fovea::internal
