#include "src/index/index_logits_work.h"

#include <algorithm>

namespace fovea::internal {
namespace {

// Keys of a unit, the largest that gives enough units. 480 keys cost one row about 0.09 ms (64
// heads of 128 channels, AVX2), next to which decoding the row's queries (0.8 %) and starting the
// task vanish; few units would leave threads idle, so small problems are cut finer.
constexpr int64_t kKeyBlocks[] = {480, 192, 96};
constexpr int64_t kEnoughUnits = 64;
static_assert(480 % kMaxKeyTile == 0 && 192 % kMaxKeyTile == 0 && 96 % kMaxKeyTile == 0);

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

LogitsWork::LogitsWork(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors,
                       int64_t max_rows_per_group, RowGroup* groups)
    : paged_(problem.layout == IndexLayout::kPaged),
      width_(tensors.logits.shape[1]),
      k_fp8_(access<const uint8_t, 2>(paged_ ? ConstTensorView() : tensors.k_fp8)),
      k_scale_(access<const float, 1>(paged_ ? ConstTensorView() : tensors.k_scale)),
      k_start_(access<const int32_t, 1>(paged_ ? ConstTensorView() : tensors.k_start)),
      k_end_(access<const int32_t, 1>(paged_ ? ConstTensorView() : tensors.k_end)),
      pages_(paged_ ? tensors.index_pool : ConstTensorView(), problem.page_size, problem.head_dim),
      page_table_(access<const int32_t, 2>(paged_ ? tensors.page_table : ConstTensorView())),
      row_to_request_(
          access<const int32_t, 1>(paged_ ? tensors.row_to_request : ConstTensorView())),
      row_len_(access<const int32_t, 1>(paged_ ? tensors.row_len : ConstTensorView())),
      groups_(groups) {
  const int64_t rows = tensors.q_fp8.shape[0];
  KeyWindow group_window;
  bool open = false;
  for (int64_t t = 0; t < rows; ++t) {
    const KeyWindow row = window(t);
    if (open && joins(groups[num_groups_ - 1], group_window, row, max_rows_per_group)) {
      RowGroup& group = groups[num_groups_ - 1];
      ++group.num_rows;
      if (row.begin == row.end) continue;
      group.key_begin = group_window.begin = std::min(group.key_begin, row.begin);
      group.key_end = group_window.end = std::max(group.key_end, row.end);
      continue;
    }
    open = row.begin < row.end;
    if (!open) continue;
    groups[num_groups_++] = RowGroup{t, 1, row.begin, row.end, 0};
    group_window = row;
  }
  for (const int64_t block : kKeyBlocks) {
    key_block_ = block;
    num_units_ = 0;
    for (int64_t g = 0; g < num_groups_; ++g) {
      groups[g].first_unit = num_units_;
      num_units_ += ceil_div(groups[g].key_end - groups[g].key_begin, block);
    }
    if (num_units_ >= kEnoughUnits) break;
  }
}

// A row without keys joins whatever group is open, so that it does not end it.
bool LogitsWork::joins(const RowGroup& group, const KeyWindow& group_window,
                       const KeyWindow& window, int64_t max_rows) const {
  if (group.num_rows >= max_rows) return false;
  if (window.begin == window.end) return true;
  return window.request == group_window.request && window.begin < group_window.end &&
         window.end > group_window.begin;
}

KeyWindow LogitsWork::window(int64_t t) const {
  KeyWindow window;
  if (paged_) {
    window.request = row_to_request_(t);
    if (window.request < 0 || window.request >= page_table_.shape[0]) return {};
    window.end = std::clamp<int64_t>(row_len_(t), 0, width_);
    return window;
  }
  window.begin = std::clamp<int64_t>(k_start_(t), 0, k_fp8_.shape[0]);
  window.end = std::clamp<int64_t>(k_end_(t), window.begin,
                                   std::min(k_fp8_.shape[0], window.begin + width_));
  return window;
}

LogitsUnit LogitsWork::unit(int64_t index) const {
  const RowGroup* group =
      std::upper_bound(groups_, groups_ + num_groups_, index,
                       [](int64_t i, const RowGroup& g) { return i < g.first_unit; }) -
      1;
  const int64_t begin = group->key_begin + (index - group->first_unit) * key_block_;
  return {group, begin, std::min(begin + key_block_, group->key_end)};
}

void LogitsWork::locate(int64_t request, int64_t first, int64_t count, int64_t lanes,
                        const uint8_t* readable, KeyTile* tile) const {
  std::fill(tile->codes + count, tile->codes + lanes, readable);
  std::fill(tile->scale + count, tile->scale + lanes, 0.0f);
  tile->all_held = true;
  if (paged_) {
    std::fill(tile->codes, tile->codes + count, readable);
    locate_paged(request, first, count, tile);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    tile->codes[i] = k_fp8_.row(first + i);
    tile->scale[i] = k_scale_(first + i);
  }
}

void LogitsWork::locate_paged(int64_t request, int64_t first, int64_t count, KeyTile* tile) const {
  int64_t column = first / pages_.page_size;
  int64_t offset = first - column * pages_.page_size;
  for (int64_t i = 0; i < count; ++column, offset = 0) {
    const int64_t page = column < page_table_.shape[1] ? page_table_(request, column) : -1;
    const bool held = pages_.holds(page);
    tile->all_held = tile->all_held && held;
    for (; i < count && offset < pages_.page_size; ++i, ++offset) {
      tile->held[i] = held;
      tile->scale[i] = 0;
      if (!held) continue;
      tile->codes[i] = pages_.codes(page, offset);
      tile->scale[i] = load_scale(pages_.scale(page, offset));
    }
  }
}

}  // namespace fovea::internal
