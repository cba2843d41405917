#pragma once

#include "src/core/cuda/wgmma.cuh"
#include "src/msa/cuda/msa_attend_kernels.cuh"

// Block by block: where many rows list the same blocks, a block of the cache is read once for the
// rows that list it, not once for each of them.
//
//   count_places    a warp per row and KV head reads its list; every block of it is a place, and
//                   gets a number among the places of its cell
//   cut_items       where the places of each cell begin; cells are cut into items
//   sort_places     the places of a cell side by side
//   attend_items    thread blocks take item after item: one block of the cache in shared memory,
//                   products of a warpgroup for 64 rows of queries at a time; the output over this
//                   block alone goes to memory as a partial result
//   fold_places     a row's partial results become the output
//
// A cell is a block of a request, for a KV head and a slab of rows. The partial results of a slab
// are in memory at a time. The order of places in a cell, of items and of their cells is that of
// atomics; a partial result has the address and the bits that belong to its row and block, whatever
// that order is.
namespace fovea::internal::msa::by_block {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroups = 2;  // of a thread block, tile by tile in turn
inline constexpr int kItemThreads = kWarpgroups * kWarpgroupThreads;
inline constexpr int kItemWarps = kItemThreads / kWarpThreads;
inline constexpr int kBlocksPerSm = 2;
inline constexpr int kTileRows = 64;  // of queries: those of a product
inline constexpr int kItemRows = 1024;
inline constexpr int kMaxItemPlaces = kItemThreads;
inline constexpr int kMaxBlockKeys = 128;
inline constexpr int kMaxDim = 128;
inline constexpr int kFoldWarps = 8;
inline constexpr int kCutThreads = 1024;
inline constexpr int kListThreads = 256;
inline constexpr int64_t kMaxSlabBytes = int64_t{1152} << 20;

// A block in the list of a row.
struct Place {
  int32_t part;  // ((row of the slab) * KV heads + KV head) * topk + index in the sorted list
  int32_t seen;  // tokens of the block that the row sees
};
// Where a place goes: its cell, and its number there.
struct Target {
  int32_t cell;
  int32_t number;
};
struct Item {
  int32_t page;
  int32_t kv_head;
  int32_t first;  // place
  int32_t count;
};
// Of a partial result: logit and sum as in ChainState, and what stored values are multiplied with.
struct alignas(16) PartState {
  float largest;
  float sum;
  float unit;
};
// Where a partial result has the values that a lane of a product has: eight halves, channels
// 32 turn + 8 i + 2 c + e in place 2 i + e, of head `head`. Lanes of a warp are side by side.
struct PartUnit {
  int head, turn, c;

  __device__ static int heads_side_by_side(int group_shift) {
    return 1 << (group_shift < 3 ? group_shift : 3);
  }
  template <int kDim>
  __device__ int index(int group_shift) const {
    return (head / 8 * (kDim / 32) + turn) * 4 * heads_side_by_side(group_shift) + head % 8 * 4 + c;
  }
  template <int kDim>
  __device__ static PartUnit of(int index, int group_shift) {
    const int shift = 2 + (group_shift < 3 ? group_shift : 3);
    const int turns = index >> shift;
    return {turns / (kDim / 32) * 8 + (index & ((1 << shift) - 1)) / 4, turns % (kDim / 32),
            index % 4};
  }
};
// Of a slab.
struct SlabCounts {
  int32_t places;  // given to cells
  int32_t items;   // made
  int32_t taken;   // items that a thread block has begun
};
inline constexpr int kSlabCounts = sizeof(SlabCounts) / sizeof(int32_t);

struct ByBlockParams {
  AttendParams attend;
  int64_t slab_rows;
  int32_t cells_per_slab;   // KV heads * requests * pages
  int32_t item_places;      // at most
  int32_t group_shift;      // a place has 1 << group_shift rows of a tile
  int64_t places_per_slab;  // at most
  int64_t items_per_slab;   // at most
  int32_t* num_places;      // [rows][KV heads]
  int32_t* row_end;         // [rows]: tokens that the row sees
  Target* targets;          // [rows][KV heads][topk]
  SlabCounts* slab_counts;  // [slabs], in front of `counts`
  int32_t* counts;          // [slabs][cells]
  int32_t* firsts;          // [slabs][cells]
  Place* places;            // [slabs][places_per_slab]
  Item* items;              // [slabs][items_per_slab]
  uint4* part_values;       // [rows of a slab][KV heads][topk][units]
  PartState* part_state;    // [rows of a slab][KV heads][topk][1 << group_shift]
};

// Of the first num_slabs slabs: the kernels that write num_places, row_end, places and items,
// behind zeroed counts.
void launch_lists(const ByBlockParams& params, int num_slabs, Stream stream);

}  // namespace fovea::internal::msa::by_block
