#include <algorithm>
#include <cstring>

#include "src/core/access.h"
#include "src/core/parallel.h"
#include "src/index/index_page.h"
#include "src/index/index_store_impl.h"

namespace fovea::internal {
namespace {

constexpr int64_t kRowsPerPiece = 512;

struct Gather {
  IndexPages<const uint8_t> pages;
  Accessor<const int32_t, 2> page_table;
  Accessor<const int32_t, 1> kv_indptr;
  Accessor<uint8_t, 2> k_fp8;
  Accessor<float, 1> k_scale;

  // Output rows [begin, end), all of request r, whose position 0 is row `first`. Within a page the
  // tokens are consecutive, so a page is one copy of codes and one of scales when the output is
  // packed.
  void copy(int64_t r, int64_t first, int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end;) {
      const int64_t column = (row - first) / pages.page_size;
      const int64_t offset = (row - first) - column * pages.page_size;
      const int64_t count = std::min(end - row, pages.page_size - offset);
      const int64_t page = column < page_table.shape[1] ? page_table(r, column) : -1;
      if (pages.holds(page))
        copy_tokens(page, offset, row, count);
      else
        clear_tokens(row, count);
      row += count;
    }
  }

 private:
  void copy_tokens(int64_t page, int64_t offset, int64_t row, int64_t count) const {
    const auto code_bytes = static_cast<size_t>(pages.head_dim);
    const uint8_t* codes = pages.codes(page, offset);
    if (k_fp8.stride[0] == pages.head_dim) {
      std::memcpy(k_fp8.row(row), codes, static_cast<size_t>(count) * code_bytes);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(k_fp8.row(row + i), codes + i * pages.head_dim, code_bytes);
      }
    }
    std::memcpy(k_scale.row() + row, pages.scale(page, offset), static_cast<size_t>(count) * 4);
  }

  void clear_tokens(int64_t row, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      std::memset(k_fp8.row(row + i), 0, static_cast<size_t>(pages.head_dim));
      k_scale(row + i) = 0;
    }
  }
};

}  // namespace

void index_gather_cpu(const IndexCacheProblem& problem, const Device& device,
                      const IndexGatherTensors& tensors, Workspace) {
  const Gather gather{
      IndexPages<const uint8_t>(tensors.index_pool, problem.page_size, problem.head_dim),
      access<const int32_t, 2>(tensors.page_table), access<const int32_t, 1>(tensors.kv_indptr),
      access<uint8_t, 2>(tensors.k_fp8), access<float, 1>(tensors.k_scale)};
  const int64_t requests = gather.page_table.shape[0];
  const ThreadScope threads(device.num_threads);
  // Pieces are output rows, so no two threads write one row even where kv_indptr is not monotone;
  // within a piece requests come in order, as in the reference. Looking at every request costs a
  // few compares next to the copy of 512 rows.
  ParallelFor(gather.k_fp8.shape[0], kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t first = gather.kv_indptr(r);
      gather.copy(r, first, std::max(begin, first),
                  std::min<int64_t>(end, gather.kv_indptr(r + 1)));
    }
  });
}

}  // namespace fovea::internal
