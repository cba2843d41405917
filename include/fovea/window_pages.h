#pragma once

#include <cstdint>
#include <vector>

#include "fovea/export.h"
#include "fovea/page_allocator.h"
#include "fovea/tensor.h"

namespace fovea {

struct WindowPagesConfig {
  int64_t num_rows = 0;   ///< Rows of the table: requests that may be served at once.
  int64_t width = 0;      ///< Tokens of the longest request.
  int64_t num_pages = 0;  ///< Including the dummy page 0.
  int64_t page_size = 0;  ///< Tokens per page, 1..256.
  int64_t window = 0;     ///< W >= 1: a token sees the W tokens up to and including its own.
  /// Most tokens that a step may take back: W - 1 + draft_tokens stay behind the next position.
  int64_t draft_tokens = 0;
};

/// Pages of the window rows of requests whose layers look W tokens back: a page is freed when no
/// later token sees any of it, so that a request holds about W / page_size pages, however long it
/// is.
///
/// table() is i32 [num_rows, ceil(width / page_size)]: column c of a row is the page of tokens
/// c * page_size .. of the request, or -1: freed, or not taken yet. It is what build_swa_indices
/// and the backend of DeepSeek-V4 read (WindowStorage::kPaged); a freed page gives slots of -1,
/// which attention masks.
///
///   pages.extend(row, begin, end);   // before a step that writes tokens begin .. end - 1
///   ... the step, then, with `next` the position of the first token that it did not keep:
///   pages.free_behind(row, next);
///   pages.clear(row);                // the request has ended
///
/// Holds page numbers only. Deterministic; not thread-safe; a call that throws has changed nothing.
class FOVEA_API WindowPages {
 public:
  /// Throws Error(kInvalidArgument) naming the field, Error(kOutOfMemory).
  explicit WindowPages(const WindowPagesConfig& config);

  /// Takes the pages of tokens [begin, end) that the row does not hold. Throws
  /// Error(kInvalidArgument) for a row outside the table or tokens outside [0, width),
  /// Error(kOutOfMemory) when the pages are not there.
  void extend(int64_t row, int64_t begin, int64_t end);

  /// Frees the pages wholly below next_position - (W - 1) - draft_tokens. Returns how many.
  int64_t free_behind(int64_t row, int64_t next_position);

  /// Frees every page of the row.
  void clear(int64_t row);

  /// Pages that a row needs at most while it is extended by `rows` tokens at a time.
  int64_t max_pages_per_row(int64_t rows) const;

  /// Host memory, valid while this object lives; shows later changes.
  ConstTensorView table() const;

  const WindowPagesConfig& config() const { return config_; }
  PageCounts counts() const { return allocator_.counts(); }

 private:
  void check_row(int64_t row) const;
  int32_t* entries(int64_t row) { return table_.data() + row * columns_; }
  int64_t release(int64_t row, int64_t begin_column, int64_t end_column);

  WindowPagesConfig config_;
  PageAllocator allocator_;
  int64_t columns_;
  std::vector<int32_t> table_;        // [num_rows, columns]
  std::vector<int64_t> first_, end_;  // per row: columns that may hold pages
};

}  // namespace fovea
