#include "fovea/request_table.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "src/core/check.h"

namespace fovea {
namespace {

constexpr char kName[] = "request_table";
using internal::kMaxInt32;

}  // namespace

RequestTable::RequestTable(int64_t num_rows, int64_t width) : num_rows_(num_rows), width_(width) {
  // Rows and positions are stored as int32.
  internal::check_range(kName, "num_rows", num_rows, 1, kMaxInt32);
  internal::check_range(kName, "width", width, 1, kMaxInt32);
  try {
    slots_.resize(static_cast<size_t>(num_rows * width));
    taken_.resize(static_cast<size_t>(num_rows));
    written_width_.resize(static_cast<size_t>(num_rows));
    free_.reserve(static_cast<size_t>(num_rows));
  } catch (const std::exception&) {  // bad_alloc or length_error
    throw Error(ErrorCode::kOutOfMemory, std::string(kName) + ": no memory for " +
                                             std::to_string(num_rows) + " rows of " +
                                             std::to_string(width) + " slots");
  }
  for (int64_t row = num_rows - 1; row > 0; --row) free_.push_back(static_cast<int32_t>(row));
}

int32_t RequestTable::acquire() {
  if (free_.empty()) {
    throw Error(ErrorCode::kOutOfMemory, std::string(kName) + ": all " +
                                             std::to_string(num_rows_ - 1) +
                                             " rows are taken; release one first");
  }
  const int32_t row = free_.back();
  free_.pop_back();
  taken_[static_cast<size_t>(row)] = true;
  return row;
}

void RequestTable::check_taken(const char* call, int32_t row) const {
  if (row > 0 && row < num_rows_ && taken_[static_cast<size_t>(row)]) return;
  internal::invalid(kName, std::string(call) + ": row " + std::to_string(row) +
                               " is not taken; acquire() gives the rows to use");
}

void RequestTable::release(int32_t row) {
  check_taken("release", row);
  const auto i = static_cast<size_t>(row);
  std::fill_n(slots_.begin() + row * width_, written_width_[i], 0);
  written_width_[i] = 0;
  taken_[i] = false;
  free_.push_back(row);
}

void RequestTable::write(int32_t row, std::span<const int32_t> pages, int64_t page_size,
                         int64_t begin, int64_t end) {
  check_taken("write", row);
  internal::check_range(kName, "page_size", page_size, 1, 256);
  internal::check_range(kName, "end", end, 0, width_);
  internal::check_range(kName, "begin", begin, 0, end);
  if (begin == end) return;
  const int64_t num_pages = (end + page_size - 1) / page_size;
  if (static_cast<int64_t>(pages.size()) < num_pages) {
    internal::invalid(kName, "write: pages = " + std::to_string(pages.size()) + " pages of " +
                                 std::to_string(page_size) + ", expected " +
                                 std::to_string(num_pages) + " to cover position " +
                                 std::to_string(end - 1));
  }
  for (int64_t j = begin / page_size; j < num_pages; ++j) {
    internal::check_range(kName, "pages", pages[static_cast<size_t>(j)], 0,
                          (kMaxInt32 + 1) / page_size - 1);
  }
  int32_t* const slots = slots_.data() + row * width_;
  for (int64_t p = begin; p < end;) {
    const int64_t page_end = std::min(end, (p / page_size + 1) * page_size);
    int64_t slot = pages[static_cast<size_t>(p / page_size)] * page_size + p % page_size;
    for (; p < page_end; ++p, ++slot) slots[p] = static_cast<int32_t>(slot);
  }
  int64_t& written = written_width_[static_cast<size_t>(row)];
  written = std::max(written, end);
}

ConstTensorView RequestTable::view() const noexcept {
  ConstTensorView view;
  view.dtype = DType::kI32;
  view.rank = 2;
  view.shape = {num_rows_, width_};
  view.stride = {width_, 1};
  view.data = slots_.data();
  return view;
}

}  // namespace fovea
