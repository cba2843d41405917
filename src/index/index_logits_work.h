#pragma once

#include <cstdint>

#include "fovea/index_logits.h"
#include "src/core/access.h"
#include "src/index/index_page.h"

/// What the SIMD implementations of index_logits share: which rows and keys form a piece of work,
/// and where a key lies. Nothing here influences a bit of a result.
namespace fovea::internal {

/// Keys that row t scores, as positions: of the ragged arrays, or of the row's request.
struct KeyWindow {
  int64_t begin = 0;
  int64_t end = 0;       ///< begin when the row has no keys.
  int64_t request = -1;  ///< Row of the page table; -1 in the ragged layout.
};

/// Consecutive rows whose windows overlap, so that a decoded key serves all of them.
struct RowGroup {
  int64_t first_row;
  int64_t num_rows;
  int64_t key_begin;  ///< Union of the rows' windows.
  int64_t key_end;
  int64_t first_unit;  ///< Units of the groups before this one.
};

/// A piece of work: the rows of a group against some of its keys.
struct LogitsUnit {
  const RowGroup* group;
  int64_t key_begin;
  int64_t key_end;
};

/// Most keys that a SIMD kernel handles at once; every kernel's tile divides it.
inline constexpr int64_t kMaxKeyTile = 48;

/// Where the keys of a tile lie.
struct KeyTile {
  const uint8_t* codes[kMaxKeyTile];
  float scale[kMaxKeyTile];
  bool held[kMaxKeyTile];  ///< Whether the key's page is in the pool.
  bool all_held;
};

class LogitsWork {
 public:
  /// `groups` has room for one entry per row.
  LogitsWork(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors,
             int64_t max_rows_per_group, RowGroup* groups);

  int64_t num_units() const { return num_units_; }
  LogitsUnit unit(int64_t index) const;

  KeyWindow window(int64_t t) const;

  /// Keys [first, first + count) of a group's request. Lanes past them, and keys that are not held,
  /// get the codes of `readable` (head_dim bytes) and scale 0.
  void locate(int64_t request, int64_t first, int64_t count, int64_t lanes, const uint8_t* readable,
              KeyTile* tile) const;

 private:
  void locate_paged(int64_t request, int64_t first, int64_t count, KeyTile* tile) const;
  bool joins(const RowGroup& group, const KeyWindow& group_window, const KeyWindow& window,
             int64_t max_rows) const;

  bool paged_;
  int64_t width_;
  Accessor<const uint8_t, 2> k_fp8_;
  Accessor<const float, 1> k_scale_;
  Accessor<const int32_t, 1> k_start_, k_end_;
  IndexPages<const uint8_t> pages_;
  Accessor<const int32_t, 2> page_table_;
  Accessor<const int32_t, 1> row_to_request_, row_len_;
  const RowGroup* groups_;
  int64_t num_groups_ = 0;
  int64_t num_units_ = 0;
  int64_t key_block_ = 0;
};

}  // namespace fovea::internal
