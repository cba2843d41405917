#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/export.h"
#include "src/mla/sparse_mla_cache.h"

/// How the SIMD implementations of sparse_mla cut a row's key list: slots into blocks of 64, blocks
/// into parts, the valid slots of a part into tiles. Everything here depends on the row alone, or
/// on the piece of it that a split plan gives.
namespace fovea::internal {

inline constexpr int64_t kBlockSlots = 64;
inline constexpr int64_t kTileKeys = 64;
/// Without fixed_splits a part has 4 blocks, so that a row of 2048 slots feeds 8 threads, or a
/// sixteenth of the row, so that the partial results of a row stay bounded.
inline constexpr int64_t kPartBlocks = 4;
inline constexpr int64_t kMaxParts = 16;

/// The parts of one row, or of a piece of it: contiguous ranges of its blocks, primary blocks
/// first.
struct RowParts {
  int64_t primary_slots = 0;
  int64_t primary_blocks = 0;
  int64_t extra_slots = 0;
  int64_t num_blocks = 0;
  int64_t num_parts = 0;
  int64_t blocks_per_part = 0;  // 0: boundaries by fixed_splits
  int64_t begin_block = 0;      // of the piece that is cut; the whole row by default
  int64_t end_block = 0;

  FOVEA_HOST_DEVICE RowParts(int64_t slots0, int64_t slots1, int64_t fixed_splits)
      : primary_slots(slots0),
        primary_blocks((slots0 + kBlockSlots - 1) / kBlockSlots),
        extra_slots(slots1),
        num_blocks(primary_blocks + (slots1 + kBlockSlots - 1) / kBlockSlots),
        end_block(num_blocks) {
    if (fixed_splits > 0) {
      // With more parts than blocks every block is a part of its own; the rest are empty.
      num_parts = std::min(fixed_splits, num_blocks);
    } else {
      cut_piece();
    }
  }

  /// The same for the blocks [begin, end) alone, clamped to those of the row.
  RowParts piece(int64_t begin, int64_t end) const {
    RowParts parts = *this;
    parts.begin_block = std::min(begin, num_blocks);
    parts.end_block = std::clamp(end, parts.begin_block, num_blocks);
    parts.cut_piece();
    return parts;
  }

  /// First block of a part; of num_parts: the end.
  FOVEA_HOST_DEVICE int64_t first_block(int64_t part) const {
    if (blocks_per_part == 0) return num_blocks * part / num_parts;
    return std::min(end_block, begin_block + part * blocks_per_part);
  }

 private:
  FOVEA_HOST_DEVICE void cut_piece() {
    const int64_t blocks = end_block - begin_block;
    const int64_t sixteenth = (blocks + kMaxParts - 1) / kMaxParts;
    blocks_per_part = sixteenth > kPartBlocks ? sixteenth : kPartBlocks;
    num_parts = (blocks + blocks_per_part - 1) / blocks_per_part;
  }
};

/// Upper bound of num_parts over all rows of a problem.
inline int64_t max_parts(const SparseMlaProblem& problem) {
  const int64_t blocks = RowParts(problem.topk, problem.extra_topk, 0).num_blocks;
  if (problem.fixed_splits > 0) return std::min(problem.fixed_splits, blocks);
  return std::min(kMaxParts, (blocks + kPartBlocks - 1) / kPartBlocks);
}

/// Up to 64 valid keys of one part, in slot order.
struct KeyTile {
  int64_t part = 0;
  int num_keys = 0;
  int num_primary = 0;  // the first ones; the others are rows of the extra cache
  const uint8_t* rows[kTileKeys];
  uint64_t scales[kTileKeys] = {};  // LatentKey::scales
};

/// Walks the valid keys of the parts [first_part, end_part) of query row t. A tile never crosses a
/// part; parts without valid slots yield none.
class TileReader {
 public:
  TileReader(const SparseMlaSegment (&segments)[2], int64_t t, const RowParts& parts,
             int64_t first_part, int64_t end_part)
      : segments_(segments), t_(t), parts_(parts), part_(first_part), end_part_(end_part) {
    if (part_ < end_part_) slot_ = parts_.first_block(part_) * kBlockSlots;
  }

  /// False at the end.
  bool next(KeyTile* tile) {
    tile->num_keys = 0;
    tile->num_primary = 0;
    while (part_ < end_part_ && tile->num_keys == 0) {
      tile->part = part_;
      const int64_t end_slot = parts_.first_block(part_ + 1) * kBlockSlots;
      const int64_t primary_end = parts_.primary_blocks * kBlockSlots;
      fill(segments_[0], 0, std::min(end_slot, primary_end), parts_.primary_slots, tile);
      tile->num_primary = tile->num_keys;
      fill(segments_[1], primary_end, end_slot, primary_end + parts_.extra_slots, tile);
      if (slot_ >= end_slot) ++part_;
    }
    return tile->num_keys > 0;
  }

 private:
  // Takes slots up to `end` while the tile has room. Slots count from the row's first block;
  // `first` is the one where the segment starts, those from `limit` on are past its length.
  void fill(const SparseMlaSegment& segment, int64_t first, int64_t end, int64_t limit,
            KeyTile* tile) {
    if (slot_ < first || slot_ >= end) return;
    for (; slot_ < std::min(end, limit) && tile->num_keys < kTileKeys; ++slot_) {
      const LatentKey key = segment.key(t_, slot_ - first);
      if (key.row == nullptr) continue;
      tile->rows[tile->num_keys] = key.row;
      tile->scales[tile->num_keys++] = key.scales;
    }
    if (slot_ >= limit) slot_ = end;
  }

  const SparseMlaSegment (&segments_)[2];
  int64_t t_;
  const RowParts& parts_;
  int64_t part_;
  int64_t end_part_;
  int64_t slot_ = 0;
};

}  // namespace fovea::internal
