#pragma once

#include <cstdint>
#include <cstring>

#include "fovea/export.h"
#include "fovea/index_cache.h"
#include "fovea/tensor.h"

/// The paged index cache (row format i132), in 64-bit addresses.
namespace fovea::internal {

/// One page: the codes of its page_size tokens (head_dim bytes each), then their fp32 scales. Byte
/// is const for readers.
template <class Byte>
struct IndexPages {
  Byte* data = nullptr;
  int64_t num_pages = 0;
  int64_t page_stride_bytes = 0;
  int64_t page_size = 0;
  int64_t head_dim = 0;

  template <class View>
  IndexPages(const View& pool, int64_t tokens_per_page, int64_t code_bytes)
      : data(static_cast<Byte*>(pool.data)),
        num_pages(pool.shape[0]),
        page_stride_bytes(pool.stride[0]),
        page_size(tokens_per_page),
        head_dim(code_bytes) {}

  FOVEA_HOST_DEVICE bool holds(int64_t page) const { return page >= 0 && page < num_pages; }
  FOVEA_HOST_DEVICE Byte* codes(int64_t page, int64_t offset) const {
    return data + page * page_stride_bytes + offset * head_dim;
  }
  /// Four bytes, aligned only as far as page stride, page size and head dim happen to be.
  FOVEA_HOST_DEVICE Byte* scale(int64_t page, int64_t offset) const {
    return data + page * page_stride_bytes + page_size * head_dim + offset * 4;
  }
};

/// Bytes of a page that are in use: page_size tokens of head_dim codes and one fp32 scale.
constexpr int64_t index_page_bytes(int64_t page_size, int64_t head_dim) {
  return page_size * (head_dim + 4);
}

inline constexpr int64_t kMaxIndexPageSize = 256;
/// Widest index key; bounds the scratch rows of the operators (models: 128).
inline constexpr int64_t kMaxIndexHeadDim = 16384;
/// Most index heads (models: 64).
inline constexpr int64_t kMaxIndexHeads = 4096;

/// Bounds of a problem of index_store or index_gather.
void check_index_cache(const char* op, const IndexCacheProblem& problem);

/// Requires u8 [pages, at least index_page_bytes].
void check_index_pool(const char* op, const ConstTensorView& pool, int64_t page_size,
                      int64_t head_dim);

inline float load_scale(const uint8_t* from) {
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_scale(float value, uint8_t* to) { std::memcpy(to, &value, sizeof(value)); }

}  // namespace fovea::internal
