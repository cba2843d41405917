#pragma once

#include <cstdint>

#include "src/replay/hash.h"

namespace fovea::internal {

/// Which drafted tokens a target model accepts: the token at a position with a given chance, if all
/// before it in the draft were. Drawn by (seed, request, position), so that the answer does not
/// depend on the schedule.
class AcceptanceModel {
 public:
  AcceptanceModel(double chance, uint64_t seed) : chance_(chance), seed_(seed) {}

  bool accepts(int64_t trace_row, int64_t position) const {
    const uint64_t random = hash_in(HashDomain::kAcceptance, seed_, trace_row, position);
    return static_cast<double>(random >> 11) * 0x1p-53 < chance_;
  }

  /// How many of `count` tokens drafted for positions first, first + 1, ... are accepted before
  /// one is rejected.
  int64_t accepted(int64_t trace_row, int64_t first, int64_t count) const {
    int64_t accepted = 0;
    while (accepted < count && accepts(trace_row, first + accepted)) ++accepted;
    return accepted;
  }

 private:
  double chance_;
  uint64_t seed_;
};

}  // namespace fovea::internal
