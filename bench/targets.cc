#include "bench/targets.h"

#include <algorithm>

namespace fovea::bench {
namespace {

// The reference machine of docs/bench.md, two threads. Its L2 rate is not published: the L3 rate
// stands in for it, here and for the machine at hand alike.
ThroughputLimits reference_limits(CpuIsa isa, int num_threads) {
  ThroughputLimits limits;
  const double share = num_threads == 1 ? 0.5 : 1.0;  // of two cores
  limits.num_threads = num_threads == 1 ? 1 : 2;
  // 256-bit units do half the work of 512-bit ones.
  limits.fp32_fma_gflops = share * (isa >= CpuIsa::kAvx3 ? 543 : 543 / 2.0);
  if (isa >= CpuIsa::kAvx512Bf16) limits.bf16_dot_gflops = share * 1090;
  limits.l2_read_gb_per_s = share * 215;
  limits.l3_read_gb_per_s = share * 215;
  limits.dram_read_gb_per_s = 48;
  limits.copy_gb_per_s = 55;
  limits.gather_1152_gb_per_s = 43;
  limits.gather_656_gb_per_s = 33;
  return limits;
}

struct Bandwidth {
  double gb_per_s;
  const char* name;
};

Bandwidth memory_bandwidth(Traffic traffic, const ThroughputLimits& limits) {
  switch (traffic) {
    case Traffic::kCopy:
      return {limits.copy_gb_per_s, "copy"};
    case Traffic::kGather1152:
      return {limits.gather_1152_gb_per_s, "gather_1152"};
    case Traffic::kGather656:
      return {limits.gather_656_gb_per_s, "gather_656"};
    case Traffic::kStream:
      break;
  }
  return {limits.dram_read_gb_per_s, "dram_read"};
}

Bandwidth matching_bandwidth(const Work& work, const ThroughputLimits& limits, const CpuFacts& cpu,
                             bool cold) {
  if (!cold) {
    // Three quarters: other data of the run has to live there too.
    const double l2 = 0.75 * static_cast<double>(cpu.l2_bytes_per_core) * limits.num_threads;
    const double l3 = 0.75 * static_cast<double>(cpu.l3_bytes_total);
    if (work.bytes_touched() <= l2) return {limits.l2_read_gb_per_s, "l2_read"};
    if (work.bytes_touched() <= l3 && limits.l3_read_gb_per_s)
      return {*limits.l3_read_gb_per_s, "l3_read"};
  }
  return memory_bandwidth(work.traffic, limits);
}

Floor floor_with(const Work& work, const ThroughputLimits& limits, const Bandwidth& bandwidth) {
  const double arithmetic_ms = work.flops / (limits.best_gflops() * 1e6);
  const double memory_ms = work.bytes() / (bandwidth.gb_per_s * 1e6);
  if (memory_ms >= arithmetic_ms) return {memory_ms, bandwidth.name, false};
  const bool bf16 = limits.best_gflops() > limits.fp32_fma_gflops;
  return {arithmetic_ms, bf16 ? "bf16_dot" : "fp32_fma", true};
}

}  // namespace

Floor floor_of(const Work& work, const ThroughputLimits& limits, const CpuFacts& cpu, bool cold) {
  return floor_with(work, limits, matching_bandwidth(work, limits, cpu, cold));
}

double scaled_target_ms(const PublishedTarget& target, const Work& work,
                        const ThroughputLimits& limits, const CpuFacts& cpu, CpuIsa isa,
                        bool cold) {
  double published_ms = target.milliseconds;
  CpuIsa published_isa = CpuIsa::kAvx512Bf16;
  if (isa <= CpuIsa::kAvx2 && target.avx2_milliseconds) {
    published_ms = *target.avx2_milliseconds;
    published_isa = CpuIsa::kAvx2;
  } else if (isa <= CpuIsa::kAvx3 && target.avx3_milliseconds) {
    published_ms = *target.avx3_milliseconds;
    published_isa = CpuIsa::kAvx3;
  }
  // The level of the memory hierarchy is chosen by this machine's caches on both sides. But a time
  // below the floor from there was taken with the bytes in the L3, against whose floor it counts.
  const ThroughputLimits reference = reference_limits(published_isa, limits.num_threads);
  double there_ms = floor_of(work, reference, cpu, cold).milliseconds;
  if (published_ms < there_ms)
    there_ms = floor_with(work, reference, {*reference.l3_read_gb_per_s, "l3_read"}).milliseconds;
  ThroughputLimits here = limits;
  if (here.l3_read_gb_per_s) here.l2_read_gb_per_s = *here.l3_read_gb_per_s;
  const double ratio = std::max(1.0, published_ms / there_ms);
  return ratio * floor_of(work, here, cpu, cold).milliseconds;
}

double general_target_ms(const Work& work, const Floor& floor) {
  if (floor.arithmetic) return floor.milliseconds / 0.5;
  return floor.milliseconds / (work.traffic == Traffic::kCopy ? 0.85 : 0.6);
}

}  // namespace fovea::bench
