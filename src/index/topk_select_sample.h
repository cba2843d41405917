#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fovea::internal {

/// Which entries of a row are looked at to guess a threshold, and which of them is the guess.
///
/// The rank-th largest sampled entry is below the topk-th largest of the row in all but about one
/// of 10^5 rows, and not far below: it is the matching rank of the sample, moved down by four
/// standard deviations. A wrong guess costs time only.
struct TopkSample {
  int64_t size = 0;  ///< 0: the row is too short for a sample to pay.
  int64_t rank = 0;  ///< 1 <= rank < size.
  int64_t part = 0;  ///< The row is cut into `size` parts of this length, one entry from each.

  TopkSample(int64_t len, int64_t topk) {
    constexpr int64_t kSmallest = 512;
    constexpr int64_t kLargest = 2048;
    if (len <= 2 * kLargest || len <= 2 * topk) return;
    // 32 sampled entries above the topk-th largest keep four deviations below 75 % of the rank.
    const int64_t wanted = std::clamp(32 * len / std::max<int64_t>(topk, 1), kSmallest, kLargest);
    const double expected =
        static_cast<double>(wanted) * static_cast<double>(topk) / static_cast<double>(len);
    rank = static_cast<int64_t>(expected + 4.0 * std::sqrt(expected) + 4.0);
    if (rank >= wanted) return;
    size = wanted;
    part = len / wanted;
  }

  /// The sampled places in rising order. The place inside a part varies, so that no period of the
  /// row meets it; the sequence is always the same.
  class Places {
   public:
    explicit Places(const TopkSample& sample) : part_(static_cast<uint64_t>(sample.part)) {}
    int64_t next() {
      noise_ = noise_ * 1664525u + 1013904223u;  // its high bits are the random ones
      const uint64_t place = begin_ + ((noise_ * part_) >> 32);
      begin_ += part_;
      return static_cast<int64_t>(place);
    }

   private:
    uint64_t part_;
    uint64_t begin_ = 0;
    uint32_t noise_ = 0x9E3779B9u;
  };
};

}  // namespace fovea::internal
