#include "src/core/cuda_probe.h"

#include <cuda_runtime.h>

#include "src/core/cuda/error.cuh"
#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/mma.cuh"

namespace fovea::internal::cuda {
namespace {

constexpr char kOp[] = "measure_ceilings";
constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;  // all 64 warps of a multiprocessor
constexpr int kWarps = kThreads / 32;
constexpr int kChains = 8;
constexpr int kIterations = 4096;

LaunchShape full_gpu(int num_sms) {
  return {dim3(static_cast<unsigned>(num_sms * kBlocksPerSm)), dim3(kThreads)};
}
double all_threads(int num_sms) { return 1.0 * num_sms * kBlocksPerSm * kThreads; }

// What keeps a loop's work alive: no sum has this value.
__device__ void keep(float value, float* sink) {
  if (value == 1.2345e33f) *sink = value;
}
__device__ void keep(const uint4& value, float* sink) {
  if ((value.x ^ value.y ^ value.z ^ value.w) == 0x9E3779B9u) *sink = 1;
}
__device__ void merge(uint4& into, const uint4& value) {
  into.x ^= value.x;
  into.y ^= value.y;
  into.z ^= value.z;
  into.w ^= value.w;
}

__global__ void __launch_bounds__(kThreads) fma_chains(float* sink) {
  float chain[kChains];
  const float factor = 0.999f + 1e-6f * static_cast<float>(threadIdx.x);
  for (int i = 0; i < kChains; ++i) chain[i] = static_cast<float>(i);
  for (int round = 0; round < kIterations; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) chain[i] = __fmaf_rn(chain[i], factor, 0.5f);
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += chain[i];
  keep(sum, sink);
}

__global__ void __launch_bounds__(kThreads) mma_chains(float* sink) {
  MmaA a;
  MmaB b;
  // Pairs of small bf16 numbers that differ from lane to lane.
  for (int i = 0; i < 4; ++i) a.x[i] = 0x3C003C00u + threadIdx.x * 0x00010001u + i;
  for (int i = 0; i < 2; ++i) b.x[i] = 0x3C103C10u + threadIdx.x * 0x00010001u + i;
  MmaC sums[kChains] = {};
  for (int round = 0; round < kIterations / 4; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) mma(sums[i], a, b);
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i)
    sum += sums[i].x[0] + sums[i].x[1] + sums[i].x[2] + sums[i].x[3];
  keep(sum, sink);
}

__global__ void __launch_bounds__(kThreads)
    read_all(const uint4* data, int64_t count, int passes, float* sink) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint4 sum = {};
  for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 4
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
         i += step) {
      merge(sum, __ldcg(data + i));
    }
  }
  keep(sum, sink);
}

__global__ void __launch_bounds__(kThreads)
    copy_all(const uint4* __restrict__ from, uint4* __restrict__ to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    to[i] = __ldcs(from + i);
  }
}

// A warp per row, four rows in flight.
__global__ void __launch_bounds__(kThreads)
    gather_all(const uint4* pool, int row_chunks, const int32_t* rows, int64_t num_rows,
               float* sink) {
  constexpr int kInFlight = 4;
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kInFlight;
  uint4 sum = {};
  for (int64_t first = warp * kInFlight; first + kInFlight <= num_rows; first += step) {
    int64_t start[kInFlight];
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      start[r] = static_cast<int64_t>(rows[first + r]) * row_chunks;
    }
    for (int chunk = lane; chunk < row_chunks; chunk += 32) {
#pragma unroll
      for (int r = 0; r < kInFlight; ++r) merge(sum, __ldcg(pool + start[r] + chunk));
    }
  }
  keep(sum, sink);
}

}  // namespace

CodeFacts code_facts(int ordinal) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, fma_chains), "cudaFuncGetAttributes");
  CodeFacts facts;
  facts.ptx_version = attributes.ptxVersion;
  facts.binary_version = attributes.binaryVersion;
  int clock_khz = 0;
  if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, ordinal) == cudaSuccess) {
    facts.clock_mhz = clock_khz / 1000;
  }
  check(cudaDriverGetVersion(&facts.driver_version), "cudaDriverGetVersion");
  return facts;
}

double submit_fma_chains(int num_sms, float* sink, Stream stream) {
  launch(kOp, fma_chains, full_gpu(num_sms), stream, sink);
  return 2.0 * kChains * kIterations * all_threads(num_sms);
}

double submit_mma_chains(int num_sms, float* sink, Stream stream) {
  launch(kOp, mma_chains, full_gpu(num_sms), stream, sink);
  constexpr double kFlops = 2.0 * 16 * 8 * 16;  // of one instruction of a warp
  return kFlops * kChains * (kIterations / 4) * all_threads(num_sms) / 32;
}

double submit_read(int num_sms, const void* data, int64_t bytes, int passes, float* sink,
                   Stream stream) {
  launch(kOp, read_all, full_gpu(num_sms), stream, static_cast<const uint4*>(data), bytes / 16,
         passes, sink);
  return static_cast<double>(bytes) * passes;
}

double submit_copy(int num_sms, const void* from, void* to, int64_t bytes, Stream stream) {
  launch(kOp, copy_all, full_gpu(num_sms), stream, static_cast<const uint4*>(from),
         static_cast<uint4*>(to), bytes / 16);
  return 2.0 * static_cast<double>(bytes);
}

double submit_gather(int num_sms, const void* pool, int64_t row_bytes, const int32_t* rows,
                     int64_t num_rows, float* sink, Stream stream) {
  launch(kOp, gather_all, full_gpu(num_sms), stream, static_cast<const uint4*>(pool),
         static_cast<int>(row_bytes / 16), rows, num_rows, sink);
  return static_cast<double>(num_rows / 4 * 4 * row_bytes);
}

}  // namespace fovea::internal::cuda
