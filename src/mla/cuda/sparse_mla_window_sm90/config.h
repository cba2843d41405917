#pragma once

#include <cstdint>

// The budget of a block of sparse_mla over short lists on compute capability 9.0: one block a
// multiprocessor.
//
//   registers  2 warpgroups of 128 threads, up to 255 each: 64 logits, later 32 of weights and
//              twice 64 sums of values
//   shared     keys [128][512] bf16, 8 panels of 64 columns              131,072
//              6 places of 16 KB: queries of 64 heads x 128 channels, or results
//                                                                         98,304
//              masks                                                          16
//              of 232,448 bytes
namespace fovea::internal::sparse_window_sm90 {

inline constexpr int kHeads = 64;
inline constexpr int kKeys = 128;
inline constexpr int kValueDim = 512;
inline constexpr int kQuarters = 4;  // of the channels
inline constexpr int kQuarterPanels = 2;
inline constexpr int kQuarterChannels = kQuarterPanels * 64;

inline constexpr int kGroupThreads = 128;
inline constexpr int kThreads = 2 * kGroupThreads;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kWarpHeads = 16;

// Slots of the first list count as a multiple of that, so that a warp's keys beside each other are
// of one list.
inline constexpr int kListStep = 8;

}  // namespace fovea::internal::sparse_window_sm90
