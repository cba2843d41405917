#pragma once

#include <cstdint>

#include "src/core/cuda/arithmetic.cuh"
#include "src/core/cuda/async_copy.cuh"
#include "src/core/cuda/row_codes.cuh"
#include "src/mla/cuda/sparse_mla_rows_sm90/block.cuh"

// The warpgroup that brings queries and keys. A warp has 16 keys of each tile: eight neighbouring
// lanes bring four of them, 128 bytes of each at a time, and look up one of the eight keys that
// they have of two tiles, an even one and the next.
namespace fovea::internal::sparse_rows_sm90 {

// Who a thread is. What follows from that is computed where it is used: it is cheap.
struct KeyThread {
  __device__ uint32_t here() const {
    return static_cast<uint32_t>(cuda::computed_here(static_cast<int>(threadIdx.x)));
  }
  __device__ uint32_t warp() const { return here() / 32 % kKeyWarps; }
  __device__ uint32_t lane() const { return here() % 32; }
  __device__ uint32_t piece() const { return here() % 8; }
  // The first of the four keys that the lane brings.
  __device__ uint32_t first_key() const { return here() % kGroupThreads / 8 * 4; }
  // What the lane looks up: of the even tile or the next, and which key.
  __device__ uint32_t looks_in() const { return here() / 4 % 2; }
  __device__ uint32_t looks_for() const { return first_key() + here() % 4; }
};

// What the lane looked up: an aligned key by its place, another one by its address.
struct FoundKey {
  uint32_t place = kNoPlace;
  const uint8_t* address = nullptr;
};

__device__ __forceinline__ int segment_of(const ListedKeys& keys, int tile) {
  return keys.is_primary(tile) ? 0 : 1;
}

// What names a key: an index, or a page of a table.
struct KeyName {
  uint32_t bits = 0;
  bool is_there = false;  // within the list
};

// Of the lane's key of the tiles `even` and even + 1. Nothing waits for it here.
__device__ __forceinline__ KeyName ask_name(const KeyThread& me, const ListedKeys& keys, int even) {
  const int tile = even + static_cast<int>(me.looks_in());
  const int64_t slot = keys.slot(tile, static_cast<int>(me.looks_for()));
  const RowParts& parts = keys.parts;
  KeyName name;
  name.is_there = slot < (keys.is_primary(tile) ? parts.primary_slots : parts.extra_slots);
  const SparseMlaSegment& segment = keys.segment(tile);
  const int32_t* from = nullptr;
  if (name.is_there) {
    from = segment.page_table
               ? segment.page_table.row(segment.row_to_request(keys.t)) +
                     static_cast<uint32_t>(slot) / static_cast<uint32_t>(segment.page_size)
               : segment.indices.row(keys.t) + slot;
  }
  cuda::load_or_zeros_late<4>(name.bits, reinterpret_cast<const uint8_t*>(from), name.is_there);
  return name;
}

__device__ __forceinline__ FoundKey find_key(const KeyThread& me, const Params& params,
                                             const ListedKeys& keys, int even,
                                             const KeyName& asked) {
  const int tile = even + static_cast<int>(me.looks_in());
  const int key = static_cast<int>(me.looks_for());
  const int segment = segment_of(keys, tile);
  const int32_t name = asked.is_there ? static_cast<int32_t>(asked.bits) : -1;
  FoundKey found;
  if (params.layouts[segment].aligned) {
    const auto slot = static_cast<uint32_t>(keys.slot(tile, key));
    found.place = params.places[segment].find(slot, name).row;
  } else if (name >= 0) {
    found.address = keys.address(tile, key, name).row;
    found.place = found.address == nullptr ? kNoPlace : 0;
  }
  return found;
}

// A bit for each of the warp's 16 keys of an even tile (0) or the next (1).
__device__ __forceinline__ uint16_t present_keys(const FoundKey& found, int parity) {
  uint32_t bits = __ballot_sync(0xFFFFFFFF, found.place != kNoPlace) >> (4 * parity) & 0x0F0F0F0F;
  bits = (bits | bits >> 4) & 0x00FF00FF;
  return static_cast<uint16_t>(bits | bits >> 8);
}

// Where the lane's piece of its i-th key is in a panel.
__device__ __forceinline__ uint32_t key_offset(const KeyThread& me, int i) {
  const uint32_t key = me.first_key() + i;
  return cuda::panel_offset(static_cast<int>(key), static_cast<int>(me.piece()));
}

// The lane's four rows of one tile.
struct LaneRows {
  const uint8_t* from[4];  // the lane's piece of the first panel
  bool is_there[4];

  // From the lanes that looked them up. All exchanges before the first copy: one waits for up to
  // 300 cycles while products read shared memory.
  __device__ __forceinline__ LaneRows(const KeyThread& me, const uint8_t* base,
                                      const FoundKey& found, int place) {
    const uint32_t first_lane = me.lane() / 8 * 8 + 4 * place;
    uint32_t at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = __shfl_sync(0xFFFFFFFF, found.place, first_lane + i);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      is_there[i] = at[i] != kNoPlace;
      from[i] = base + 8 * static_cast<uint64_t>(is_there[i] ? at[i] : 0) + 16 * me.piece();
      cuda::hold(from[i]);
    }
  }
};

// Asks for one half of the lane's keys.
template <bool kHasRope>
__device__ __forceinline__ void copy_half(const KeyThread& me, const LaneRows& rows, int half,
                                          Tile& tile) {
  const int first_panel = is_left(half) ? 0 : kHalfPanels;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint8_t* const to = tile[first_panel] + key_offset(me, i);
    const uint8_t* const row = rows.from[i] + first_panel * cuda::kPanelRowBytes;
#pragma unroll
    for (int panel = 0; panel < kHalfPanels; ++panel) {
      cuda::copy_async<16>(to + panel * kPanelBytes, row + panel * cuda::kPanelRowBytes,
                           rows.is_there[i]);
    }
    if (kHasRope && has_rope(half)) {
      cuda::copy_async<16>(tile[kWeightPanel] + key_offset(me, i),
                           rows.from[i] + kWeightPanel * cuda::kPanelRowBytes, rows.is_there[i]);
    }
  }
}

// The same for rows at any address.
template <bool kHasRope>
__device__ __forceinline__ void store_half(const KeyThread& me, const FoundKey& found, int half,
                                           Tile& tile) {
  const int first_panel = is_left(half) ? 0 : kHalfPanels;
  const int num_panels = kHalfPanels + (kHasRope && has_rope(half) ? 1 : 0);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const auto address = reinterpret_cast<const uint8_t*>(
        __shfl_sync(0xFFFFFFFF, reinterpret_cast<unsigned long long>(found.address),
                    me.lane() / 8 * 8 + 4 * place_of(half) + i));
#pragma unroll 1
    for (int n = 0; n < num_panels; ++n) {
      const int panel = n < kHalfPanels ? first_panel + n : kWeightPanel;
      uint4 values = make_uint4(0, 0, 0, 0);
      if (address != nullptr)
        values = latent::load_bf16<false>(address, 8 * panel + static_cast<int>(me.piece()));
      *reinterpret_cast<uint4*>(tile[panel] + key_offset(me, i)) = values;
    }
  }
}

// The lane's part of what a barrier stands for is there, or on its way.
__device__ __forceinline__ void arrive_full(bool on_its_way, Mbarrier& full) {
  if (on_its_way) {
    cuda::mbarrier_arrive_with_copies(full);
  } else {
    cuda::shared_stores_before_wgmma();
    cuda::mbarrier_arrive(full);
  }
}

// The queries of `heads` heads from `first_head` on, zeros past them.
template <int kHeadDim>
__device__ __forceinline__ void bring_queries(const KeyThread& me, const latent::Queries& queries,
                                              int64_t t, int64_t first_head, int heads,
                                              SharedMemory<kHeadDim>& shared) {
  const int64_t start = t * queries.row_stride + first_head * queries.head_stride;
  constexpr int kPanels = SharedMemory<kHeadDim>::kPanels;
  if (queries.aligned) {
    const auto* const from = static_cast<const bf16_t*>(queries.data) + start + 8 * me.piece();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = static_cast<int>(me.first_key()) + i;
      const bool is_there = head < heads;
      const auto* const row = from + (is_there ? head * queries.head_stride : 0);
      uint8_t* const to = shared.q[0] + key_offset(me, i);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        cuda::copy_async<16>(to + panel * kPanelBytes, row + 64 * panel, is_there);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x % kGroupThreads; i < kHeads * kHeadDim; i += kGroupThreads) {
      const int head = i / kHeadDim, d = i % kHeadDim;
      const bf16_t value =
          head < heads
              ? static_cast<const bf16_t*>(queries.data)[start + head * queries.head_stride + d]
              : bf16_t{0};
      auto* const to = shared.q[d / 64] + cuda::panel_offset(head, d % 64 / 8);
      reinterpret_cast<bf16_t*>(to)[d % 8] = value;
    }
  }
  arrive_full(queries.aligned, shared.q_full);
}

template <int kHeadDim>
__device__ __forceinline__ void bring_unit(const Params& params, int64_t unit, int64_t turn,
                                           int64_t (&use)[2], SharedMemory<kHeadDim>& shared) {
  constexpr bool kHasRope = kHeadDim > kValueDim;
  const KeyThread me;
  const int64_t t = static_cast<uint32_t>(unit) / params.head_groups;
  const int64_t first_head = static_cast<uint32_t>(unit) % params.head_groups * kHeads;
  const RowParts parts{params.segments[0].length(t), params.segments[1].length(t), 1};
  const ListedKeys keys{params.segments, parts, t};
  const auto num_tiles = static_cast<int>(parts.num_blocks);
  KeyName name = ask_name(me, keys, 0);
  if (turn > 0) cuda::mbarrier_wait(shared.q_free, turn - 1);
  if (threadIdx.x % kGroupThreads == 0) {
    shared.num_tiles = num_tiles;
    cuda::mbarrier_arrive(shared.q_full);
  }
  const int64_t heads_left = params.outputs.num_heads - first_head;
  bring_queries(me, params.queries, t, first_head,
                static_cast<int>(heads_left < kHeads ? heads_left : kHeads), shared);
#pragma unroll 1
  for (int even = 0; even < num_tiles; even += 2) {
    const FoundKey found = find_key(me, params, keys, even, name);
    name = ask_name(me, keys, even + 2);
    const uint16_t present[2] = {present_keys(found, 0), present_keys(found, 1)};
    const int num_places = even + 1 < num_tiles ? 2 : 1;
    // A loop, for the sake of code that is fetched once and used twice.
#pragma unroll 1
    for (int place = 0; place < num_places; ++place) {
      const int segment = segment_of(keys, even + place);
      const int64_t uses = place == 0 ? use[0]++ : use[1]++;
      const bool is_aligned = params.layouts[segment].aligned;
      const LaneRows rows(me, params.segments[segment].base, found, place);
      Tile& tile = shared.tiles[place];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int half = 2 * place + i;
        if (uses > 0) cuda::mbarrier_wait(shared.free[half], uses - 1);
        if (is_aligned) {
          copy_half<kHasRope>(me, rows, half, tile);
        } else {
          store_half<kHasRope>(me, found, half, tile);
        }
        if (i == 0 && me.lane() == 0) {
          // Behind the copies, which are waited for longer. The mask before it was read before the
          // half was free.
          shared.present[place][me.warp()] = place == 0 ? present[0] : present[1];
          cuda::mbarrier_arrive(shared.full[half]);
        }
        arrive_full(is_aligned, shared.full[half]);
      }
    }
  }
}

// Of all units of the block.
template <int kHeadDim>
__device__ __forceinline__ void work_on_keys(const Params& params, SharedMemory<kHeadDim>& shared) {
  int64_t use[2] = {0, 0}, turn = 0;  // of the places, by all units
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < params.num_units; unit += params.num_blocks)
    bring_unit(params, unit, turn++, use, shared);
  cuda::wait_for_copies();
}

}  // namespace fovea::internal::sparse_rows_sm90
