#pragma once

#include <optional>
#include <string>

#include "fovea/ceilings.h"
#include "fovea/device.h"

/// From the work of a run to the time that a machine can reach and the time that is asked of it.
namespace fovea::bench {

/// How the bytes of a run travel when they come from memory.
enum class Traffic {
  kStream,      ///< Read in order.
  kCopy,        ///< Read and written in order, in similar amounts.
  kGather1152,  ///< Rows of about 1152 bytes in random order.
  kGather656,   ///< Rows of about 656 bytes in random order.
};

/// What one run does at least: every input byte it needs read once, every output byte written once.
struct Work {
  double flops = 0;  ///< A multiply-add is two.
  double bytes_read = 0;
  double bytes_written = 0;
  Traffic traffic = Traffic::kStream;
  double bytes_in_place = 0;  ///< Of those written: where others were read.
  double bytes() const { return bytes_read + bytes_written; }
  double bytes_touched() const { return bytes() - bytes_in_place; }
};

/// The least time of a run and what sets it.
struct Floor {
  double milliseconds = 0;
  std::string limit;  ///< The name of the limit in ThroughputLimits without its unit.
  bool arithmetic = false;
};

/// The larger of flops over the better arithmetic limit and bytes over the matching bandwidth. Warm
/// runs whose memory fits into 3/4 of the L2 of all threads, or of the L3, are measured against
/// those.
Floor floor_of(const Work& work, const ThroughputLimits& limits, const CpuFacts& cpu, bool cold);

/// Times that docs/bench.md lists for one machine, the reference: two cores with 512-bit fp32 and
/// bf16 units. Where a case has no time of its own for a narrower instruction set, the ratio to the
/// floor stays.
struct PublishedTarget {
  double milliseconds = 0;                       ///< With AVX512-BF16.
  std::optional<double> avx3_milliseconds = {};  ///< With AVX-512 but without BF16.
  std::optional<double> avx2_milliseconds = {};
};

/// The time asked of this machine: the floor here times the ratio of the published time to the
/// floor on the reference machine. The ratio is never below 1: a published time below the floor
/// there is one of data in the L3, and its ratio that to the floor from the L3.
double scaled_target_ms(const PublishedTarget& target, const Work& work,
                        const ThroughputLimits& limits, const CpuFacts& cpu, CpuIsa isa, bool cold);

/// The time asked of a case without a published one, from the floor: half the arithmetic limit, 60
/// % of a bandwidth, 85 % of the copy rate.
double general_target_ms(const Work& work, const Floor& floor);

}  // namespace fovea::bench
