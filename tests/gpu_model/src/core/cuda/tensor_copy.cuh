#pragma once

#include "src/core/cuda/mbarrier.cuh"
#include "src/core/cuda/wgmma.cuh"

// Model of src/core/cuda/tensor_copy.cuh. Copies are done when they start.
namespace fovea::internal::cuda {

struct PanelMap {
  const uint8_t* data = nullptr;
  int64_t rows, pages, page_stride_bytes;
  int box_rows;
};

inline PanelMap make_panel_map(const char*, const void* data, int64_t rows, int64_t pages,
                               int64_t page_stride_bytes, int box_rows) {
  test::gpu::need_alignment(data, 16);
  if (page_stride_bytes % 16 != 0) throw std::logic_error("pages of a map at no multiple of 16");
  return {static_cast<const uint8_t*>(data), rows, pages, page_stride_bytes, box_rows};
}

inline void prefetch_map(const PanelMap&) {}

inline void copy_panel(void* to, const PanelMap& map, int row, int page, Mbarrier& full) {
  test::gpu::need_alignment(to, 8 * kPanelRowBytes);
  if (row < 0 || page < 0 || page >= map.pages)
    throw std::logic_error("a copy from outside of its map");
  std::memset(to, 0, static_cast<size_t>(map.box_rows) * kPanelRowBytes);
  for (int i = 0; i < map.box_rows && row + i < map.rows; ++i) {
    const uint8_t* const from =
        map.data + page * map.page_stride_bytes + int64_t{row + i} * kPanelRowBytes;
    for (int piece = 0; piece < 8; ++piece) {
      std::memcpy(static_cast<uint8_t*>(to) + panel_offset(i, piece), from + 16 * piece, 16);
    }
  }
  full.bytes_ahead += map.box_rows * kPanelRowBytes;
  end_phase(full);
}

}  // namespace fovea::internal::cuda
