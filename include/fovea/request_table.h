#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/export.h"
#include "fovea/tensor.h"

namespace fovea {

/// The request -> slot map of an engine: `req_to_token` i32 [num_rows, width], row r column p =
/// slot of position p. Row 0 is the row of padded requests: never handed out, all zeros (slot 0
/// lies in the dummy page). Host memory, owned. Not thread-safe; a failing call changes nothing.
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

  /// Writes the slots of positions first_position, first_position + 1, ... that live in `pages` of
  /// `page_size` tokens: position p of the request is pages[p / page_size] * page_size + p %
  /// page_size, for p in [begin, end). Throws Error(kInvalidArgument) when the row is not taken,
  /// end > width or the pages do not cover [begin, end).
  void write(int32_t row, std::span<const int32_t> pages, int64_t page_size, int64_t begin,
             int64_t end);

  int64_t num_rows() const noexcept { return num_rows_; }
  int64_t width() const noexcept { return width_; }
  int64_t num_free() const noexcept { return static_cast<int64_t>(free_.size()); }

  /// i32 [num_rows, width].
  ConstTensorView view() const noexcept;

 private:
  int64_t num_rows_;
  int64_t width_;
  std::vector<int32_t> slots_;
  std::vector<int32_t> free_;
  std::vector<bool> taken_;
};

}  // namespace fovea
