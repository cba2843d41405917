#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "fovea/numeric.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

/// Requests over a paged cache, for the tests of the room.
namespace fovea::test {

inline constexpr bf16_t kBf16NanBits{0x7FFF};
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Tensor i32_vector(const std::vector<int32_t>& values) {
  return Tensor::i32({static_cast<int64_t>(values.size())}, values);
}

/// Lengths, rows and a page table whose pages are shuffled over a pool with spare pages.
struct PagedBatch {
  std::vector<int32_t> lengths;
  std::vector<int32_t> counts;
  int64_t block_size;
  int64_t max_pages;
  int64_t num_pages;
  int64_t num_rows;  // T, may exceed the sum of the counts
  Tensor kv_len, q_indptr, page_table;

  PagedBatch(std::vector<int32_t> kv_lengths, std::vector<int32_t> row_counts, int64_t page,
             uint64_t seed = 1, int64_t spare_columns = 2, int64_t padding_rows = 0)
      : lengths(std::move(kv_lengths)), counts(std::move(row_counts)), block_size(page) {
    int64_t used = 0;
    max_pages = 0;
    for (const int32_t length : lengths) {
      const int64_t pages = (std::max(length, 0) + page - 1) / page;
      used += pages;
      max_pages = std::max(max_pages, pages);
    }
    max_pages += spare_columns;
    num_pages = used + 3;
    std::vector<int32_t> order(static_cast<size_t>(num_pages));
    std::iota(order.begin(), order.end(), 0);
    Rng rng(seed);
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1],
                order[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i) - 1))]);
    const auto requests = static_cast<int64_t>(lengths.size());
    std::vector<int32_t> table(static_cast<size_t>(requests * max_pages), 0);
    size_t next = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t pages = (std::max(lengths[static_cast<size_t>(r)], 0) + page - 1) / page;
      for (int64_t p = 0; p < pages; ++p)
        table[static_cast<size_t>(r * max_pages + p)] = order[next++];
    }
    std::vector<int32_t> offsets(counts.size() + 1, 0);
    std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
    num_rows = offsets.back() + padding_rows;
    kv_len = i32_vector(lengths);
    q_indptr = i32_vector(offsets);
    page_table = Tensor::i32({requests, max_pages}, table);
  }

  int64_t requests() const { return static_cast<int64_t>(lengths.size()); }
  int64_t slots() const { return num_pages * block_size; }
  int64_t first_row(int64_t r) const { return q_indptr.data<int32_t>()[r]; }
  /// Slot of token j of request r.
  int64_t slot(int64_t r, int64_t j) const {
    return page_table.data<int32_t>()[r * max_pages + j / block_size] * block_size + j % block_size;
  }
  /// Position of row i of request r.
  int64_t position(int64_t r, int64_t i) const {
    return lengths[static_cast<size_t>(r)] - counts[static_cast<size_t>(r)] + i;
  }
};

/// Rows of every token of the requests in a pool [slots, heads, dim]; everything else is NaN.
/// `value(request, token, head, channel)`.
template <class Value>
Tensor fill_pool(const PagedBatch& batch, int64_t heads, int64_t dim, Value value) {
  Tensor pool(DType::kBf16, {batch.slots(), heads, dim});
  std::fill_n(pool.data<bf16_t>(), batch.slots() * heads * dim, kBf16NanBits);
  for (int64_t r = 0; r < batch.requests(); ++r) {
    for (int64_t j = 0; j < batch.lengths[static_cast<size_t>(r)]; ++j) {
      bf16_t* row = pool.data<bf16_t>() + batch.slot(r, j) * heads * dim;
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < dim; ++d) row[h * dim + d] = bf16_from_float(value(r, j, h, d));
      }
    }
  }
  return pool;
}

inline Tensor random_pool(const PagedBatch& batch, int64_t heads, int64_t dim, uint64_t seed) {
  Rng rng(seed);
  return fill_pool(batch, heads, dim,
                   [&](int64_t, int64_t, int64_t, int64_t) { return rng.normal(); });
}

}  // namespace fovea::test
