#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

/// The request -> slot map of an engine: `req_to_token` i32 [num_rows, width], row r column p =
/// slot of position p. Row 0 is the row of padded requests: never handed out, all zeros (slot 0
/// lies in the dummy page), as is every entry that was not written. Host memory, owned by the
/// table. Deterministic. Not thread-safe; a failing call changes nothing.
class FOVEA_API RequestTable {
 public:
  /// Throws Error(kInvalidArgument) unless num_rows >= 1 and width >= 1, Error(kOutOfMemory) when
  /// the memory is not there.
  RequestTable(int64_t num_rows, int64_t width);

  /// A free row. Throws Error(kOutOfMemory) when all are taken.
  int32_t acquire();
  /// Gives a row back; its entries become 0. Throws Error(kInvalidArgument) for a row that is not
  /// taken.
  void release(int32_t row);

  /// Writes the slots of positions [begin, end) of a request that lives in `pages` of `page_size`
  /// tokens: column p becomes pages[p / page_size] * page_size + p % page_size. Only the pages of
  /// that range are looked at. Throws Error(kInvalidArgument) when the row is not taken, [begin,
  /// end) is not within [0, width], the pages do not cover it, page_size is outside 1..256, or a
  /// slot does not fit int32.
  void write(int32_t row, std::span<const int32_t> pages, int64_t page_size, int64_t begin,
             int64_t end);

  int64_t num_rows() const noexcept { return num_rows_; }
  int64_t width() const noexcept { return width_; }
  int64_t num_free() const noexcept { return static_cast<int64_t>(free_.size()); }

  /// i32 [num_rows, width]; valid while the table lives, shows later writes.
  ConstTensorView view() const noexcept;

 private:
  void check_taken(const char* call, int32_t row) const;

  int64_t num_rows_;
  int64_t width_;
  std::vector<int32_t> slots_;
  std::vector<int32_t> free_;  // the last one is handed out next
  std::vector<bool> taken_;
  std::vector<int64_t> written_width_;  // per row: every entry from here on is 0
};

}  // namespace fovea
