#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/wgmma.cuh"
#include "src/mla/cuda/sparse_mla_launch.cuh"
#include "src/mla/cuda/sparse_mla_sm90/places.cuh"
#include "src/mla/cuda/sparse_mla_window_sm90/config.h"

// What a launch is given, and the shared memory of a block.
namespace fovea::internal::sparse_window_sm90 {

using latent::kNegInf;
using latent::RowLayout;
using latent::Target;
using sparse_sm90::kNoPlace;
using sparse_sm90::RowPlace;
using sparse_sm90::RowPlaces;

inline constexpr int kKeyPanelBytes = kKeys * cuda::kPanelRowBytes;
inline constexpr int kHeadPanelBytes = kHeads * cuda::kPanelRowBytes;
inline constexpr int kPlaceBytes = kQuarterPanels * kHeadPanelBytes;
inline constexpr int kKeyPanels = kValueDim / cuda::kPanelColumns;

struct Params : latent::RowParams {
  RowPlaces places[2];  // of the segments
  int first_extra;      // key of a row with which the second list starts
  int num_rows, rows_at_a_time;

  explicit Params(const latent::RowParams& row) : RowParams(row) {
    for (int i = 0; i < 2; ++i) places[i] = RowPlaces(segments[i], layouts[i].aligned);
  }
};

struct SharedMemory {
  alignas(1024) uint8_t keys[kKeyPanels][kKeyPanelBytes];
  alignas(1024) uint8_t places[6][kPlaceBytes];
  alignas(16) uint8_t present[kKeys / 8];  // a bit a key
};

// How the work of a row is shared out: a warpgroup has kQuartersOfGroup quarters of the values.
// With all four a block is wide, 128 heads, 64 a warpgroup; otherwise both warpgroups have the same
// 64 heads, in two blocks where each warpgroup has one quarter.
template <int kQuartersOfGroup>
struct Shape {
  static constexpr bool kIsWide = kQuartersOfGroup == kQuarters;
  static constexpr int kBlocksOfHeads = kIsWide ? 1 : kQuarters / (2 * kQuartersOfGroup);

  // The place of queries of a quarter of the channels. A wide block has none for the last quarter
  // until the first one is used up.
  static __device__ int query_place(int group, int quarter) {
    return kIsWide ? 3 * group + (quarter < 3 ? quarter : 0) : quarter;
  }
  static __device__ int result_place(int group) { return kIsWide ? 3 * group + 2 : 4 + group; }
};

}  // namespace fovea::internal::sparse_window_sm90
