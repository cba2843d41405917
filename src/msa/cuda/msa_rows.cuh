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

__device__ inline MsaRow find_msa_row(const MsaDeviceRows& rows, int64_t t) {
  const auto begin_of = [&](int64_t r) { return int64_t{rows.offsets[r]}; };
  const int64_t r = cuda::count_up_to(begin_of, rows.batch.num_requests(), t) - 1;
  if (r < 0) return {};
  const MsaRowRange range = msa_rows_of(rows, r);
  return t < range.end ? rows.batch.row(r, range, t) : MsaRow{};
}

/// find_msa_row() from the untrusted offsets themselves, for few requests: the first offset above t
/// ends the request of t, and those before it never reach further than its beginning. Every lane of
/// the warp calls it, with one t.
__device__ inline MsaRow seek_msa_row(const MsaBatch& batch, int64_t t) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFF;
  const int lane = threadIdx.x % cuda::kWarpThreads;
  const int64_t count = batch.num_requests() + 1;
  int64_t begin = 0;
  for (int64_t base = 0; base < count; base += cuda::kWarpThreads) {
    const int64_t i = base + lane;
    const int64_t offset = i < count ? batch.offset(i) : 0;
    const uint32_t above = __ballot_sync(kAllLanes, offset > t);
    const int first = above == 0 ? cuda::kWarpThreads : __ffs(static_cast<int>(above)) - 1;
    begin = max(begin, cuda::warp_max(lane < first ? offset : 0));
    if (above == 0) continue;
    const int64_t end = __shfl_sync(kAllLanes, offset, first);
    const int64_t request = base + first - 1;
    return request < 0 ? MsaRow{} : batch.row(request, {begin, end}, t);
  }
  return {};
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
