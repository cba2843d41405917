#pragma once

#include <cstdint>
#include <limits>

#include "src/core/access.h"
#include "src/core/cuda/vector_io.cuh"
#include "src/index/index_logits_impl.h"
#include "src/index/index_page.h"

/// What the kernels of index_logits share: their tensors, the keys of a row, where a key lies.
namespace fovea::internal::index_rows {

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct Inputs {
  Accessor<const uint8_t, 3> q_fp8;
  Accessor<const float, 2> head_weight;
  Accessor<float, 2> logits;
  // ragged
  Accessor<const uint8_t, 2> k_fp8;
  const float* k_scale = nullptr;
  const int32_t* k_start = nullptr;
  const int32_t* k_end = nullptr;
  // paged
  IndexPages<const uint8_t> pages;
  int32_t page_shift = -1;  // log2 of the page size, or -1
  Accessor<const int32_t, 2> page_table;
  const int32_t* row_to_request = nullptr;
  const int32_t* row_len = nullptr;
  int32_t num_heads;
  int32_t head_dim;

  Inputs(const IndexLogitsProblem& problem, const IndexLogitsTensors& tensors)
      : q_fp8(access<const uint8_t, 3>(tensors.q_fp8)),
        head_weight(access<const float, 2>(tensors.head_weight)),
        logits(access<float, 2>(tensors.logits)),
        pages(problem.layout == IndexLayout::kPaged ? tensors.index_pool : ConstTensorView(),
              problem.page_size, problem.head_dim),
        num_heads(static_cast<int32_t>(problem.num_heads)),
        head_dim(static_cast<int32_t>(problem.head_dim)) {
    if (problem.layout == IndexLayout::kPaged) {
      page_table = access<const int32_t, 2>(tensors.page_table);
      row_to_request = static_cast<const int32_t*>(tensors.row_to_request.data);
      row_len = static_cast<const int32_t*>(tensors.row_len.data);
      for (int shift = 0; shift <= 8; ++shift) {
        if (problem.page_size == int64_t{1} << shift) page_shift = shift;
      }
    } else {
      k_fp8 = access<const uint8_t, 2>(tensors.k_fp8);
      k_scale = static_cast<const float*>(tensors.k_scale.data);
      k_start = static_cast<const int32_t*>(tensors.k_start.data);
      k_end = static_cast<const int32_t*>(tensors.k_end.data);
    }
  }
};

/// The largest of 16, 4, 1 that divides every address of codes, and for 16 and 4 lets a scale be
/// read as one word.
inline int address_unit(const IndexLogitsProblem& problem, const Inputs& inputs) {
  const auto fits = [&](int64_t bytes) {
    const auto unit = static_cast<uintptr_t>(bytes);
    const bool rows = cuda::is_aligned(inputs.q_fp8.data, unit) &&
                      inputs.q_fp8.stride[0] % bytes == 0 && inputs.q_fp8.stride[1] % bytes == 0 &&
                      problem.head_dim % bytes == 0;
    const bool keys =
        problem.layout == IndexLayout::kPaged
            ? cuda::is_aligned(inputs.pages.data, unit) &&
                  inputs.pages.page_stride_bytes % bytes == 0
            : cuda::is_aligned(inputs.k_fp8.data, unit) && inputs.k_fp8.stride[0] % bytes == 0;
    return rows && keys;
  };
  return fits(16) ? 16 : fits(4) ? 4 : 1;
}

/// Rows of a request when all requests of a batch have the same number, which shapes alone tell.
inline int64_t rows_per_request(const Inputs& inputs) {
  const int64_t requests = inputs.page_table.shape[0] > 1 ? inputs.page_table.shape[0] : 1;
  return (inputs.q_fp8.shape[0] + requests - 1) / requests;
}

/// Keys that a row scores. Positions are entries of i32 tensors or below them, hence int32.
struct Window {
  int32_t begin;
  int32_t end;      // begin when the row has no keys
  int32_t request;  // row of the page table; 0 in the ragged layout

  __device__ bool is_empty() const { return begin == end; }
  /// Whether the rows read some keys together.
  __device__ bool meets(const Window& other) const {
    return request == other.request && other.begin < end && begin < other.end;
  }
  __device__ void include(const Window& other) {
    begin = other.begin < begin ? other.begin : begin;
    end = other.end > end ? other.end : end;
  }
};

__device__ inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

template <bool kPaged>
__device__ Window window_of(const Inputs& inputs, int64_t t) {
  const int64_t width = inputs.logits.shape[1];
  if constexpr (kPaged) {
    const int32_t request = inputs.row_to_request[t];
    const int32_t length = inputs.row_len[t];
    const bool known = request >= 0 && request < inputs.page_table.shape[0];
    // No branch between the two reads: they are under way together.
    return {0, static_cast<int32_t>(clamp(known ? length : 0, 0, width)), known ? request : 0};
  } else {
    const int64_t keys = inputs.k_fp8.shape[0];
    const int64_t begin = clamp(inputs.k_start[t], 0, keys);
    const int64_t limit = keys < begin + width ? keys : begin + width;
    const int64_t end = clamp(inputs.k_end[t], begin, limit > begin ? limit : begin);
    return {static_cast<int32_t>(begin), static_cast<int32_t>(end), 0};
  }
}

__device__ inline void split_position(const Inputs& inputs, int32_t position, int32_t& column,
                                      int32_t& offset) {
  if (inputs.page_shift >= 0) {
    column = position >> inputs.page_shift;
    offset = position & ((1 << inputs.page_shift) - 1);
  } else {
    const auto page_size = static_cast<int32_t>(inputs.pages.page_size);
    column = position / page_size;
    offset = position - column * page_size;
  }
}

/// The page of a column, -1 when the table or the pool does not have it.
__device__ inline int64_t page_at(const Inputs& inputs, int64_t request, int64_t column) {
  if (column >= inputs.page_table.shape[1]) return -1;
  const int64_t page = inputs.page_table(request, column);
  return inputs.pages.holds(page) ? page : -1;
}

/// 16 codes from `channel` on, zeros past head_dim. kBytes divides the address; 16 and 4 also
/// divide head_dim.
template <int kBytes>
__device__ uint4 load_codes(const uint8_t* row, int32_t channel, int32_t head_dim) {
  uint4 codes = make_uint4(0, 0, 0, 0);
  if constexpr (kBytes == 16) {
    if (channel < head_dim) codes = *reinterpret_cast<const uint4*>(row + channel);
  } else {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i += kBytes) {
      if (channel + i >= head_dim) continue;
      if constexpr (kBytes == 4) {
        words[i / 4] = *reinterpret_cast<const uint32_t*>(row + channel + i);
      } else {
        words[i / 4] |= static_cast<uint32_t>(row[channel + i]) << (8 * (i % 4));
      }
    }
    codes = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return codes;
}

/// Word `i` of four.
__device__ inline uint32_t word_of(const uint4& codes, int i) {
  return i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
}

}  // namespace fovea::internal::index_rows
