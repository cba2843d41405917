#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "fovea/device.h"
#include "fovea/device_memory.h"
#include "fovea/export.h"

/// What this machine can reach at best: the measured limits against which operators are judged.
namespace fovea {

/// The CPU as the operating system describes it.
struct CpuFacts {
  std::string model;              ///< e.g. "AMD EPYC 9554"; "unknown" when the system does not say.
  int num_threads = 1;            ///< Hardware threads that this process may see.
  int64_t l2_bytes_per_core = 0;  ///< 0: unknown.
  int64_t l3_bytes_total = 0;     ///< Distinct L3 caches of those threads; 0: none or unknown.
};

/// Read once and kept.
FOVEA_API const CpuFacts& cpu_facts();

/// Measured limits for one number of threads. GFLOP/s count a multiply and an add as two; GB/s are
/// 1e9 bytes per second. Absent: this CPU or instruction set does not have it.
struct ThroughputLimits {
  int num_threads = 1;
  double fp32_fma_gflops = 0;              ///< Independent chains of fused multiply-adds.
  std::optional<double> bf16_dot_gflops;   ///< AVX512-BF16 dot products.
  double l2_read_gb_per_s = 0;             ///< Every thread reads its own half L2.
  std::optional<double> l3_read_gb_per_s;  ///< Together the threads read half the L3.
  double dram_read_gb_per_s = 0;           ///< One pass over 4 L3, 128 MiB to 1 GiB.
  double copy_gb_per_s = 0;                ///< Streaming stores; bytes read plus bytes written.
  double gather_1152_gb_per_s = 0;         ///< bf16 latent rows of that buffer, random order.
  double gather_656_gb_per_s = 0;          ///< The same for packed fp8 rows.

  /// The larger of the two arithmetic limits.
  double best_gflops() const noexcept {
    return bf16_dot_gflops && *bf16_dot_gflops > fp32_fma_gflops ? *bf16_dot_gflops
                                                                 : fp32_fma_gflops;
  }
};

/// The limits of a machine. They are valid for one CPU model, instruction set, number of threads
/// and library version: that is the key under which they are kept. Those of a GPU stand under its
/// name, kBaseline and one thread, both sets being the same: bf16_dot is then the rate of mma.sync
/// (what kernels for every GPU can reach), l2_read that of half its L2, and there is no L3.
struct MachineCeilings {
  std::string cpu;
  CpuIsa isa = CpuIsa::kBaseline;  ///< current_cpu_isa() of the measurement.
  std::string version;             ///< Of the library.
  ThroughputLimits all_threads;
  ThroughputLimits one_thread;
};

/// Measures the limits for `device.num_threads` threads and for one. Every limit is the best of
/// repeated samples over `budget_per_limit`; the whole takes about 20 budgets and up to 1 GiB of
/// memory. Other load on the machine lowers the result: measure on an idle one. A GPU is measured
/// with events around kernels of the library. Throws Error(kOutOfMemory) and Error(kDevice).
FOVEA_API MachineCeilings
measure_ceilings(const Device& device,
                 std::chrono::milliseconds budget_per_limit = std::chrono::milliseconds(150));

/// Empties the caches between two runs of a measurement, by writing memory of twice their size, on
/// a CPU with `device.num_threads` threads. Not thread-safe.
class FOVEA_API CacheFlusher {
 public:
  /// Throws Error(kOutOfMemory).
  explicit CacheFlusher(const Device& device);
  /// On a GPU in the order of `stream`.
  void flush(Stream stream = {});

 private:
  Device device_;
  uint64_t num_flushes_ = 0;
  HostBuffer memory_;           // CPU
  DeviceBuffer device_memory_;  // GPU
};

/// The time in ms below which no implementation can stay: the larger of flops over the better
/// arithmetic limit and bytes over the DRAM read limit. Data that stays in a cache may be faster,
/// so that a share of this time can exceed 1.
FOVEA_API double roofline_ms(const ThroughputLimits& limits, double flops, double bytes) noexcept;

}  // namespace fovea
