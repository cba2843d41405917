#include "fovea/ceilings.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "fovea/device_info.h"
#include "fovea/stream.h"
#include "fovea/version.h"
#include "src/core/ceilings_kernels.h"
#include "src/core/check.h"
#include "src/core/cuda_probe.h"
#include "src/core/cuda_runtime.h"
#include "src/core/parallel.h"

namespace fovea {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kGranule = 1024;  // read_stream and copy_stream take multiples of it

int64_t round_to_granule(int64_t bytes) { return std::max(kGranule, bytes / kGranule * kGranule); }

// Results of the loops end here, so that none of them is dead code.
std::atomic<uint64_t> checksum{0};

/// Best rate of `work`, which returns the units (bytes, operations) of one sample: at least two
/// samples, then as many as fit into the budget.
double best_units_per_s(std::chrono::milliseconds budget, internal::FunctionRef<double()> work) {
  work();  // warm: pages, clocks, threads
  double best = 0;
  const Clock::time_point begin = Clock::now();
  for (int sample = 0; sample < 2 || Clock::now() - begin < budget; ++sample) {
    const Clock::time_point start = Clock::now();
    const double units = work();
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    best = std::max(best, units / std::max(elapsed.count(), 1e-9));
  }
  return best;
}

// Calls piece(i, worker) for several pieces per thread, so that a thread that starts late costs
// little.
constexpr int64_t kPiecesPerThread = 8;
void for_each_piece(int num_threads, internal::FunctionRef<void(int64_t, int)> piece) {
  const internal::ThreadScope scope(num_threads);
  internal::ParallelFor(kPiecesPerThread * num_threads, 1,
                        [&](int64_t begin, int64_t end, int worker) {
                          for (int64_t i = begin; i < end; ++i) piece(i, worker);
                        });
}

double measure_arithmetic(int num_threads, std::chrono::milliseconds budget,
                          float (*loop)(int64_t, int64_t*)) {
  // About 0.1 ms a piece at 2 to 8 rounds of twelve chains per 50 cycles.
  constexpr int64_t kIterations = 40000;
  return 1e-9 * best_units_per_s(budget, [&] {
           std::atomic<int64_t> total{0};
           for_each_piece(num_threads, [&](int64_t, int) {
             int64_t flops = 0;
             checksum += static_cast<uint64_t>(loop(kIterations, &flops) != 0);
             total += flops;
           });
           return static_cast<double>(total.load());
         });
}

// Every worker reads its own `bytes_per_thread` again and again.
double measure_cache(int num_threads, int64_t bytes_per_thread, std::chrono::milliseconds budget) {
  const int64_t bytes = round_to_granule(bytes_per_thread);
  std::vector<HostBuffer> buffers(static_cast<size_t>(num_threads));
  for (HostBuffer& buffer : buffers) {
    buffer.reserve(static_cast<size_t>(bytes));
    std::fill_n(static_cast<uint8_t*>(buffer.data()), bytes, uint8_t{1});
  }
  const int64_t passes = std::max<int64_t>(1, (int64_t{8} << 20) / bytes);
  return 1e-9 * best_units_per_s(budget, [&] {
           for_each_piece(num_threads, [&](int64_t, int worker) {
             const auto* data =
                 static_cast<const uint8_t*>(buffers[static_cast<size_t>(worker)].data());
             for (int64_t pass = 0; pass < passes; ++pass)
               checksum += internal::read_stream(data, bytes);
           });
           return static_cast<double>(kPiecesPerThread * num_threads * passes * bytes);
         });
}

/// Memory far larger than the caches, touched by the threads that will read it.
class LargeBuffer {
 public:
  LargeBuffer(int64_t bytes, int num_threads)
      : bytes_(bytes), num_threads_(num_threads), memory_(static_cast<size_t>(bytes)) {
    for_each_slice([&](uint8_t* data, int64_t count) { std::fill_n(data, count, uint8_t{1}); });
  }

  uint8_t* data() { return static_cast<uint8_t*>(memory_.data()); }
  int64_t bytes() const { return bytes_; }

  /// Calls visit(address, bytes) for slices of 1 MiB, spread over the threads.
  void for_each_slice(internal::FunctionRef<void(uint8_t*, int64_t)> visit) {
    const internal::ThreadScope scope(num_threads_);
    internal::ParallelFor(bytes_, int64_t{1} << 20, [&](int64_t begin, int64_t end, int) {
      visit(data() + begin, end - begin);
    });
  }

 private:
  int64_t bytes_;
  int num_threads_;
  HostBuffer memory_;
};

double measure_dram_read(LargeBuffer* buffer, std::chrono::milliseconds budget) {
  return 1e-9 * best_units_per_s(budget, [&] {
           buffer->for_each_slice([](uint8_t* data, int64_t bytes) {
             checksum += internal::read_stream(data, bytes);
           });
           return static_cast<double>(buffer->bytes());
         });
}

// The lower half of the buffer is copied to the upper one; bytes read and bytes written count.
double measure_copy(LargeBuffer* buffer, int num_threads, std::chrono::milliseconds budget) {
  const int64_t half = round_to_granule(buffer->bytes() / 2);
  return 1e-9 * best_units_per_s(budget, [&] {
           const internal::ThreadScope scope(num_threads);
           internal::ParallelFor(half, int64_t{1} << 20, [&](int64_t begin, int64_t end, int) {
             internal::copy_stream(buffer->data() + begin, buffer->data() + half + begin,
                                   end - begin);
           });
           return static_cast<double>(2 * half);
         });
}

// The rows 0 .. num_rows - 1 in one pseudo-random order.
std::vector<int32_t> shuffled_rows(int64_t num_rows) {
  std::vector<int32_t> rows(static_cast<size_t>(num_rows));
  std::iota(rows.begin(), rows.end(), 0);
  uint64_t state = 0x9E3779B97F4A7C15u;
  for (size_t i = rows.size() - 1; i > 0; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(rows[i], rows[(state >> 33) % (i + 1)]);
  }
  return rows;
}

// Visits every row of the pool once, in an order that repeats: a row comes back only after the
// whole pool has passed through the caches. The best of several prefetch distances.
double measure_gather(LargeBuffer* buffer, int64_t row_bytes, int num_threads,
                      std::chrono::milliseconds budget) {
  const int64_t num_rows = buffer->bytes() / row_bytes;
  const std::vector<int32_t> rows = shuffled_rows(num_rows);
  double best = 0;
  constexpr int64_t kDistances[] = {0, 1, 2, 4};
  for (const int64_t rows_ahead : kDistances) {
    const double rate = best_units_per_s(budget / std::size(kDistances), [&] {
      const internal::ThreadScope scope(num_threads);
      internal::ParallelFor(num_rows, 512, [&](int64_t begin, int64_t end, int) {
        checksum += internal::read_rows(buffer->data(), row_bytes, rows.data() + begin, end - begin,
                                        rows_ahead);
      });
      return static_cast<double>(num_rows * row_bytes);
    });
    best = std::max(best, 1e-9 * rate);
  }
  return best;
}

ThroughputLimits measure_limits(int num_threads, LargeBuffer* buffer,
                                std::chrono::milliseconds budget) {
  const CpuFacts& cpu = cpu_facts();
  ThroughputLimits limits;
  limits.num_threads = num_threads;
  limits.fp32_fma_gflops = measure_arithmetic(num_threads, budget, internal::run_fma_chains);
  if (current_cpu_isa() >= CpuIsa::kAvx512Bf16)
    limits.bf16_dot_gflops = measure_arithmetic(num_threads, budget, internal::run_bf16_dots);
  const int64_t l2 = cpu.l2_bytes_per_core > 0 ? cpu.l2_bytes_per_core : int64_t{256} << 10;
  limits.l2_read_gb_per_s = measure_cache(num_threads, l2 / 2, budget);
  // A share below 2 L2 would measure the L2 again; the threads then exceed half the L3 together.
  if (cpu.l3_bytes_total > 0) {
    const int64_t share = std::max(2 * l2, cpu.l3_bytes_total / 2 / num_threads);
    limits.l3_read_gb_per_s =
        measure_cache(num_threads, std::min(share, int64_t{16} << 20), budget);
  }
  limits.dram_read_gb_per_s = measure_dram_read(buffer, budget);
  limits.copy_gb_per_s = measure_copy(buffer, num_threads, budget);
  limits.gather_1152_gb_per_s = measure_gather(buffer, 1152, num_threads, budget);
  limits.gather_656_gb_per_s = measure_gather(buffer, 656, num_threads, budget);
  return limits;
}

namespace cuda = internal::cuda;

/// Best rate of `submit` in 1e9 units per second, by events around each sample.
double best_gpu_rate(const Device& device, Stream stream, std::chrono::milliseconds budget,
                     internal::FunctionRef<double()> submit) {
  submit();
  Event begin(device), end(device);
  double best = 0;
  const Clock::time_point start = Clock::now();
  for (int sample = 0; sample < 3 || Clock::now() - start < budget; ++sample) {
    begin.record(stream);
    const double units = submit();
    end.record(stream);
    best = std::max(best, 1e-6 * units / std::max(Event::elapsed_ms(begin, end), 1e-6));
  }
  return best;
}

ThroughputLimits measure_gpu_limits(const Device& device, std::chrono::milliseconds budget) {
  const GpuInfo gpu = gpu_info(device);
  const cuda::DeviceScope scope(device.ordinal);
  const OwnedStream stream(device);
  // Far beyond the L2, and so long that the launch does not show.
  const auto free_bytes = static_cast<int64_t>(memory_info(device).free_bytes);
  const int64_t bytes = round_to_granule(std::min(int64_t{1} << 30, free_bytes / 4));
  DeviceBuffer first(device, static_cast<size_t>(bytes), stream);
  DeviceBuffer second(device, static_cast<size_t>(bytes), stream);
  DeviceBuffer sink_memory(device, 256, stream);
  fill_bytes(first.data(), device, 1, first.bytes(), stream);
  fill_bytes(second.data(), device, 1, second.bytes(), stream);
  auto* const sink = static_cast<float*>(sink_memory.data());
  const auto rate = [&](internal::FunctionRef<double()> submit) {
    return best_gpu_rate(device, stream, budget, submit);
  };
  ThroughputLimits limits;
  limits.fp32_fma_gflops = rate([&] { return cuda::submit_fma_chains(gpu.num_sms, sink, stream); });
  limits.bf16_dot_gflops = rate([&] { return cuda::submit_mma_chains(gpu.num_sms, sink, stream); });
  const int64_t half_l2 = round_to_granule(std::max<int64_t>(gpu.l2_bytes, 1 << 20) / 2);
  const int passes = static_cast<int>((int64_t{1} << 30) / half_l2);
  limits.l2_read_gb_per_s = rate([&] {
    return cuda::submit_read(gpu.num_sms, first.data(), std::min(half_l2, bytes), passes, sink,
                             stream);
  });
  limits.dram_read_gb_per_s =
      rate([&] { return cuda::submit_read(gpu.num_sms, first.data(), bytes, 1, sink, stream); });
  limits.copy_gb_per_s = rate(
      [&] { return cuda::submit_copy(gpu.num_sms, first.data(), second.data(), bytes, stream); });
  const auto gather = [&](int64_t row_bytes) {
    const std::vector<int32_t> rows = shuffled_rows(bytes / row_bytes);
    copy_bytes(second.data(), device, rows.data(), Device::cpu(1), rows.size() * sizeof(int32_t),
               stream);
    const double best = rate([&] {
      return cuda::submit_gather(gpu.num_sms, first.data(), row_bytes,
                                 static_cast<const int32_t*>(second.data()),
                                 static_cast<int64_t>(rows.size()), sink, stream);
    });
    synchronize(device, stream);
    return best;
  };
  limits.gather_1152_gb_per_s = gather(1152);
  limits.gather_656_gb_per_s = gather(656);
  return limits;
}

}  // namespace

MachineCeilings measure_ceilings(const Device& device, std::chrono::milliseconds budget_per_limit) {
  if (device.kind == DeviceKind::kCuda) {
    const ThroughputLimits limits = measure_gpu_limits(device, budget_per_limit);
    return {gpu_info(device).name, CpuIsa::kBaseline, std::string(version()), limits, limits};
  }
  internal::check_range("measure_ceilings", "device.num_threads", device.num_threads, 1, 1 << 16);
  const CpuFacts& cpu = cpu_facts();
  MachineCeilings result;
  result.cpu = cpu.model;
  result.isa = current_cpu_isa();  // also applies FOVEA_CPU_ISA before the first dispatch
  result.version = std::string(version());
  const int64_t pool_bytes =
      std::clamp(4 * cpu.l3_bytes_total, int64_t{128} << 20, int64_t{1} << 30);
  LargeBuffer buffer(pool_bytes, device.num_threads);
  result.all_threads = measure_limits(device.num_threads, &buffer, budget_per_limit);
  result.one_thread =
      device.num_threads == 1 ? result.all_threads : measure_limits(1, &buffer, budget_per_limit);
  return result;
}

CacheFlusher::CacheFlusher(const Device& device) : device_(device) {
  if (device.kind == DeviceKind::kCuda) {
    constexpr size_t kFlushBytes = size_t{256} << 20;  // the figures of docs/bench.md
    const auto l2_bytes = static_cast<size_t>(gpu_info(device).l2_bytes);
    device_memory_.reserve(device, std::max(kFlushBytes, 2 * l2_bytes));
    synchronize(device);  // the memory is of the default stream
  } else {
    memory_.reserve(static_cast<size_t>(
        std::clamp(2 * cpu_facts().l3_bytes_total, int64_t{64} << 20, int64_t{1} << 30)));
  }
  flush();
}

void CacheFlusher::flush(Stream stream) {
  // Written, not only read: a read of untouched memory may come from one shared page of zeros.
  const auto value = static_cast<uint8_t>(++num_flushes_);
  if (device_.kind == DeviceKind::kCuda) {
    fill_bytes(device_memory_.data(), device_, value, device_memory_.bytes(), stream);
    return;
  }
  auto* data = static_cast<uint8_t*>(memory_.data());
  const internal::ThreadScope scope(device_.num_threads);
  internal::ParallelFor(
      static_cast<int64_t>(memory_.bytes()), int64_t{1} << 20,
      [&](int64_t begin, int64_t end, int) { std::fill(data + begin, data + end, value); });
}

double roofline_ms(const ThroughputLimits& limits, double flops, double bytes) noexcept {
  const double arithmetic_ms = flops / (limits.best_gflops() * 1e6);
  const double memory_ms = bytes / (limits.dram_read_gb_per_s * 1e6);
  return std::max(arithmetic_ms, memory_ms);
}

}  // namespace fovea
