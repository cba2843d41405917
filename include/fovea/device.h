#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "fovea/export.h"

namespace fovea {

enum class DeviceKind : uint8_t { kCpu, kCuda };

/// Where an operator runs. On the CPU `num_threads` bounds the threads of one run(); it never
/// changes a result.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int ordinal = 0;
  int num_threads = 1;

  /// `num_threads` = 0 takes every hardware thread. Throws Error(kInvalidArgument) when negative.
  FOVEA_API static Device cpu(int num_threads = 0);
  /// Throws Error(kUnsupported), saying why, when this build or machine has no such GPU. Kernels
  /// need compute capability 8.0.
  FOVEA_API static Device cuda(int ordinal = 0);
};

/// "cpu" or "cuda:0".
FOVEA_API std::string to_string(const Device& device);

/// GPUs that this build can use on this machine; 0 without CUDA.
FOVEA_API int cuda_device_count();

/// Parses "cpu" or "cuda[:N]". Throws Error(kInvalidArgument) on other text and Error(kUnsupported)
/// for a device that this build or machine does not have.
FOVEA_API Device parse_device(std::string_view text, int num_threads = 0);

/// An execution queue of the device; the default is its default queue. The CPU runs in the calling
/// thread and ignores it.
struct Stream {
  void* handle = nullptr;
};

/// Scratch memory of one run(), owned by the caller, at least plan.workspace_bytes() long and
/// 64-byte aligned. Two runs that may overlap in time need two workspaces. Its content before and
/// after a run is unspecified.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

/// Host memory for workspaces and pools: 64-byte aligned, uninitialised, grown on request and never
/// shrunk. From 8 MiB on it asks the system for huge pages, which rows gathered from a pool need to
/// arrive fast.
class FOVEA_API HostBuffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(size_t bytes) { reserve(bytes); }

  /// Makes the buffer at least `bytes` long; the old content is lost when it grows. Throws
  /// Error(kOutOfMemory).
  void reserve(size_t bytes);

  void* data() noexcept { return data_.get(); }
  const void* data() const noexcept { return data_.get(); }
  size_t bytes() const noexcept { return bytes_; }
  Workspace workspace() noexcept { return {data_.get(), bytes_}; }

 private:
  struct Release {
    void operator()(void* data) const noexcept;
  };
  std::unique_ptr<void, Release> data_;
  size_t bytes_ = 0;
};

/// Instruction sets of the SIMD implementations, in rising order.
enum class CpuIsa : uint8_t {
  kBaseline,    ///< What every CPU of the architecture has.
  kAvx2,        ///< AVX2, FMA, BMI2.
  kAvx3,        ///< AVX-512 F, BW, CD, DQ, VL.
  kAvx512Bf16,  ///< kAvx3 with bf16 dot products.
};

/// "baseline", "avx2", "avx3", "avx512bf16".
FOVEA_API std::string_view to_string(CpuIsa isa) noexcept;

/// The best instruction set of this CPU.
FOVEA_API CpuIsa best_cpu_isa() noexcept;

/// The best one that SIMD implementations may use now: best_cpu_isa() unless limited. Throws Error
/// for a wrong FOVEA_CPU_ISA.
FOVEA_API CpuIsa current_cpu_isa();

/// Limits the SIMD implementations to `isa` and below, for tests and measurements (also
/// FOVEA_CPU_ISA=<name>). Affects plans made afterwards and runs started afterwards; must not be
/// called while one runs. Throws Error(kUnsupported) when this CPU lacks `isa`.
FOVEA_API void limit_cpu_isa(CpuIsa isa);

}  // namespace fovea
