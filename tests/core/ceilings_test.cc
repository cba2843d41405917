#include "fovea/ceilings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "src/core/ceilings_kernels.h"

namespace fovea {
namespace {

TEST(Ceilings, MeasurementGivesPositiveLimitsOfBothThreadCounts) {
  const MachineCeilings ceilings = measure_ceilings(Device::cpu(2), std::chrono::milliseconds(1));
  EXPECT_EQ(ceilings.cpu, cpu_facts().model);
  EXPECT_EQ(ceilings.isa, current_cpu_isa());
  EXPECT_EQ(ceilings.all_threads.num_threads, 2);
  EXPECT_EQ(ceilings.one_thread.num_threads, 1);
  for (const ThroughputLimits& limits : {ceilings.all_threads, ceilings.one_thread}) {
    // Anything this side of a broken clock: a core does more than 0.1 and less than 1000 GFLOP/s.
    EXPECT_GT(limits.fp32_fma_gflops, 0.1);
    EXPECT_LT(limits.fp32_fma_gflops, 2000);
    EXPECT_EQ(limits.bf16_dot_gflops.has_value(), current_cpu_isa() >= CpuIsa::kAvx512Bf16);
    EXPECT_EQ(limits.l3_read_gb_per_s.has_value(), cpu_facts().l3_bytes_total > 0);
    for (const double rate :
         {limits.l2_read_gb_per_s, limits.dram_read_gb_per_s, limits.copy_gb_per_s,
          limits.gather_1152_gb_per_s, limits.gather_656_gb_per_s}) {
      EXPECT_GT(rate, 0.01);
      EXPECT_LT(rate, 10000);
    }
  }
}

TEST(Ceilings, KernelsDoTheWorkThatIsCounted) {
  HostBuffer from(4096), to(4096);
  auto* bytes = static_cast<uint8_t*>(from.data());
  for (int i = 0; i < 4096; ++i) bytes[i] = static_cast<uint8_t>(i % 251);
  internal::copy_stream(bytes, static_cast<uint8_t*>(to.data()), 4096);
  EXPECT_EQ(0, std::memcmp(bytes, to.data(), 4096));

  // Lane 0 of the sums adds the words at multiples of the lane count: all words equal makes the
  // result count them.
  auto* words = static_cast<uint64_t*>(from.data());
  std::fill_n(words, 512, uint64_t{1});
  const uint64_t read = internal::read_stream(bytes, 4096);
  ASSERT_GT(read, 0u);
  EXPECT_EQ(512 % read, 0u);
  const std::vector<int32_t> rows = {2, 0, 1};
  EXPECT_GT(internal::read_rows(bytes, 1152, rows.data(), 3, 1), 0u);
  EXPECT_EQ(internal::read_rows(bytes, 1152, rows.data(), 3, 0),
            internal::read_rows(bytes, 1152, rows.data(), 3, 2));

  int64_t once = 0, twice = 0;
  internal::run_fma_chains(100, &once);
  internal::run_fma_chains(200, &twice);
  EXPECT_EQ(twice, 2 * once);
}

TEST(Ceilings, RooflineIsTheSlowerOfArithmeticAndMemory) {
  ThroughputLimits limits;
  limits.fp32_fma_gflops = 100;
  limits.dram_read_gb_per_s = 10;
  EXPECT_DOUBLE_EQ(roofline_ms(limits, 1e9, 1e6), 10.0);
  EXPECT_DOUBLE_EQ(roofline_ms(limits, 1e6, 1e9), 100.0);
  limits.bf16_dot_gflops = 200;
  EXPECT_DOUBLE_EQ(roofline_ms(limits, 1e9, 1e6), 5.0);
  EXPECT_DOUBLE_EQ(roofline_ms(limits, 0, 0), 0.0);
}

}  // namespace
}  // namespace fovea
