#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/export.h"

/// Which rows and keys belong to a request of dense attention.
namespace fovea::internal {

/// The part [begin, end) of an axis that one request owns.
struct RequestRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

/// Reads the ranges of requests 0, 1, 2, ... from an untrusted offset array: offsets are cut to
/// [0, extent] and never fall, so that ranges are disjoint.
class RequestRanges {
 public:
  RequestRanges(const int32_t* indptr, int64_t extent)
      : indptr_(indptr), extent_(extent), begin_(std::clamp<int64_t>(indptr[0], 0, extent)) {}

  /// The range of the next request.
  RequestRange next() {
    ++request_;
    RequestRange range;
    range.begin = begin_;
    range.end = std::max(begin_, std::clamp<int64_t>(indptr_[request_], 0, extent_));
    begin_ = range.end;
    return range;
  }

 private:
  const int32_t* indptr_;
  int64_t extent_;
  int64_t begin_;
  int64_t request_ = 0;
};

/// Keys that row i of a request with `num_rows` rows and `num_keys` keys sees: keys 0 up to the
/// returned count.
FOVEA_HOST_DEVICE inline int64_t visible_keys(bool causal, int64_t row, int64_t num_rows,
                                              int64_t num_keys) {
  return causal ? std::clamp<int64_t>(num_keys - num_rows + row + 1, 0, num_keys) : num_keys;
}

}  // namespace fovea::internal
