#include "fovea/window_pages.h"

#include <algorithm>
#include <string>

#include "src/core/check.h"

namespace fovea {
namespace {

constexpr char kName[] = "window_pages";

const WindowPagesConfig& checked(const WindowPagesConfig& config) {
  internal::check_range(kName, "num_rows", config.num_rows, 1, internal::kMaxInt32);
  internal::check_range(kName, "width", config.width, 1, internal::kMaxInt32);
  internal::check_range(kName, "page_size", config.page_size, 1, 256);
  internal::check_range(kName, "window", config.window, 1, internal::kMaxInt32);
  internal::check_range(kName, "draft_tokens", config.draft_tokens, 0, internal::kMaxInt32);
  return config;
}

}  // namespace

WindowPages::WindowPages(const WindowPagesConfig& config)
    : config_(checked(config)),
      allocator_(config.num_pages, config.page_size),
      columns_((config.width + config.page_size - 1) / config.page_size) {
  try {
    table_.assign(static_cast<size_t>(config.num_rows * columns_), -1);
    first_.assign(static_cast<size_t>(config.num_rows), 0);
    end_.assign(static_cast<size_t>(config.num_rows), 0);
  } catch (const std::exception&) {  // bad_alloc or length_error
    throw Error(ErrorCode::kOutOfMemory, std::string(kName) + ": no memory for " +
                                             std::to_string(config.num_rows) + " rows of " +
                                             std::to_string(columns_) + " pages");
  }
}

void WindowPages::check_row(int64_t row) const {
  internal::check_range(kName, "row", row, 0, config_.num_rows - 1);
}

void WindowPages::extend(int64_t row, int64_t begin, int64_t end) {
  check_row(row);
  internal::check_range(kName, "begin", begin, 0, config_.width);
  internal::check_range(kName, "end", end, begin, config_.width);
  if (begin == end) return;
  const int64_t first = begin / config_.page_size, last = (end - 1) / config_.page_size;
  int32_t* const pages = entries(row);
  const int64_t missing = std::count(pages + first, pages + last + 1, -1);
  const std::vector<int32_t> taken = allocator_.allocate(missing);
  auto next = taken.begin();
  for (int64_t column = first; column <= last; ++column) {
    if (pages[column] < 0) pages[column] = *next++;
  }
  const auto i = static_cast<size_t>(row);
  first_[i] = first_[i] == end_[i] ? first : std::min(first_[i], first);
  end_[i] = std::max(end_[i], last + 1);
}

int64_t WindowPages::release(int64_t row, int64_t begin_column, int64_t end_column) {
  int32_t* const pages = entries(row);
  int64_t freed = 0;
  for (int64_t column = begin_column; column < end_column; ++column) {
    if (pages[column] < 0) continue;
    allocator_.release({&pages[column], 1});
    pages[column] = -1;
    ++freed;
  }
  return freed;
}

int64_t WindowPages::free_behind(int64_t row, int64_t next_position) {
  check_row(row);
  internal::check_range(kName, "next_position", next_position, 0, config_.width);
  const int64_t kept_from = next_position - (config_.window - 1) - config_.draft_tokens;
  const auto i = static_cast<size_t>(row);
  const int64_t end = std::clamp(kept_from / config_.page_size, first_[i], end_[i]);
  const int64_t freed = release(row, first_[i], end);
  first_[i] = end;
  return freed;
}

void WindowPages::clear(int64_t row) {
  check_row(row);
  const auto i = static_cast<size_t>(row);
  release(row, first_[i], end_[i]);
  first_[i] = end_[i] = 0;
}

int64_t WindowPages::max_pages_per_row(int64_t rows) const {
  const int64_t tokens = config_.window - 1 + config_.draft_tokens + rows;
  // The span may begin at the last token of a page; a page behind it is held until it is whole.
  return std::min(columns_, (tokens + config_.page_size - 2) / config_.page_size + 1);
}

ConstTensorView WindowPages::table() const {
  return make_tensor(static_cast<const void*>(table_.data()), DType::kI32,
                     {config_.num_rows, columns_});
}

}  // namespace fovea
