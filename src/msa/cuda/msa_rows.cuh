#pragma once

#include <cstdint>

#include "src/core/cuda/launch.cuh"
#include "src/core/cuda/request_offsets.cuh"
#include "src/core/cuda/scan.cuh"
#include "src/msa/msa_rows.h"

/// The rows of a batch on the device, as read_msa_rows() has them on the host.
namespace fovea::internal {

struct MsaDeviceRows {
  MsaBatch batch;
  const int32_t* offsets;  ///< [R+1], cut to the rows and never falling; or none
};

__device__ inline MsaRowRange msa_rows_of(const MsaDeviceRows& rows, int64_t request) {
  return {rows.offsets[request], rows.offsets[request + 1]};
}

/// The request of a row, -1: none, and what it owns.
struct MsaRowPlace {
  int64_t request = -1;
  MsaRowRange range;

  __device__ MsaRow row(const MsaBatch& batch, int64_t t) const {
    return request < 0 ? MsaRow{} : batch.row(request, range, t);
  }
};

__device__ inline MsaRowPlace find_msa_place(const MsaDeviceRows& rows, int64_t t) {
  const auto begin_of = [&](int64_t r) { return int64_t{rows.offsets[r]}; };
  const int64_t r = cuda::count_up_to(begin_of, rows.batch.num_requests(), t) - 1;
  if (r < 0) return {};
  const MsaRowRange range = msa_rows_of(rows, r);
  return t < range.end ? MsaRowPlace{r, range} : MsaRowPlace{};
}

__device__ inline MsaRow find_msa_row(const MsaDeviceRows& rows, int64_t t) {
  return find_msa_place(rows, t).row(rows.batch, t);
}

/// The warp's next 32 * kLoads offsets, as they are; 0, where there is none, ends no request.
template <int kLoads>
struct MsaOffsets {
  int32_t x[kLoads];

  __device__ void load(const MsaBatch& batch, int base) {
    const auto count = static_cast<int>(batch.q_indptr.shape[0]);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i =
          base + k * cuda::kWarpThreads + static_cast<int>(threadIdx.x) % cuda::kWarpThreads;
      x[k] = i < count ? batch.q_indptr(i) : 0;
    }
  }
};

/// find_msa_place() from the untrusted offsets themselves, for few requests and rows of 32 bits:
/// the first offset above t ends the request of t, and those before it never reach further than its
/// beginning. `offsets` are the first ones. Every lane of the warp calls it, with one t.
template <int kLoads>
__device__ inline MsaRowPlace seek_msa_place(const MsaBatch& batch, int64_t t,
                                             MsaOffsets<kLoads> offsets) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  const int lane = threadIdx.x % cuda::kWarpThreads;
  const auto count = static_cast<int>(batch.q_indptr.shape[0]);
  const auto row = static_cast<int32_t>(t);
  const auto rows = static_cast<int32_t>(batch.num_rows);
  int32_t begin = 0;
  for (int base = 0;;) {
    int first = INT32_MAX;
    int32_t end = 0;
#pragma unroll
    for (int k = kLoads - 1; k >= 0; --k) {
      const uint32_t above = __ballot_sync(kAllLanes, offsets.x[k] > row);
      if (above == 0) continue;
      first = base + k * cuda::kWarpThreads + __ffs(static_cast<int>(above)) - 1;
      end = min(offsets.x[k], rows);
    }
    int32_t before = 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (base + k * cuda::kWarpThreads + lane < first) before = max(before, offsets.x[k]);
    }
    begin = max(begin, __reduce_max_sync(kAllLanes, before));
    if (first != INT32_MAX) {
      end = __shfl_sync(kAllLanes, end, first % cuda::kWarpThreads);
      return first == 0 ? MsaRowPlace{} : MsaRowPlace{first - 1, {begin, end}};
    }
    base += kLoads * cuda::kWarpThreads;
    if (base >= count) return {};
    offsets.load(batch, base);
  }
}

/// So many offsets take one way to memory.
inline constexpr int kMsaManyLoads = 5;

__device__ inline MsaRowPlace seek_msa_place(const MsaBatch& batch, int64_t t) {
  MsaOffsets<kMsaManyLoads> offsets;
  offsets.load(batch, 0);
  return seek_msa_place(batch, t, offsets);
}

__device__ inline MsaRow seek_msa_row(const MsaBatch& batch, int64_t t) {
  return seek_msa_place(batch, t).row(batch, t);
}

/// Fills offsets[0 .. R] and returns the rows that they describe.
inline MsaDeviceRows launch_msa_rows(const char* op, const MsaBatch& batch, int32_t* offsets,
                                     Stream stream) {
  const OffsetParams params{
      {batch.q_indptr.data}, {offsets}, {batch.num_rows}, batch.num_requests() + 1};
  cuda::launch(op, clean_offsets<kOffsetThreads>, {dim3(1), dim3(kOffsetThreads)}, stream, params);
  return {batch, offsets};
}

}  // namespace fovea::internal
