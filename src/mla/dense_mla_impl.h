#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fovea/dense_mla.h"
#include "fovea/export.h"
#include "src/core/access.h"
#include "src/core/implementation_list.h"
#include "src/mla/request_ranges.h"
#include "src/mla/sparse_mla_cache.h"
#include "src/mla/sparse_mla_parts.h"

/// The implementations of dense_mla, and where its keys lie.
namespace fovea::internal {

size_t dense_mla_ref_workspace(const DenseMlaProblem& problem, const Device& device);
void dense_mla_ref(const DenseMlaProblem& problem, const Device& device,
                   const DenseMlaTensors& tensors, Workspace workspace);
size_t dense_mla_cpu_workspace(const DenseMlaProblem& problem, const Device& device);
void dense_mla_cpu(const DenseMlaProblem& problem, const Device& device,
                   const DenseMlaTensors& tensors, Workspace workspace);
size_t dense_mla_cpu_avx512bf16_workspace(const DenseMlaProblem& problem, const Device& device);
void dense_mla_cpu_avx512bf16(const DenseMlaProblem& problem, const Device& device,
                              const DenseMlaTensors& tensors, Workspace workspace);
Refusal dense_mla_cuda_supports(const DenseMlaProblem& problem);
size_t dense_mla_cuda_workspace(const DenseMlaProblem& problem, const Device& device);
void dense_mla_cuda_portable(const DenseMlaProblem& problem, const Device& device,
                             const DenseMlaTensors& tensors, Workspace workspace, Stream stream);

/// Query heads of one KV head.
inline int64_t heads_per_kv(const DenseMlaProblem& problem) {
  return problem.num_heads / problem.num_heads_kv;
}

/// Upper bound of the keys of a request: lengths are int32.
inline int64_t max_keys(const DenseMlaProblem& problem) {
  constexpr int64_t kMaxLength = 0x7FFFFFFF;
  return problem.max_pages > kMaxLength / problem.page_size ? kMaxLength
                                                            : problem.max_pages * problem.page_size;
}

/// What the logits are multiplied with: queries and f576 keys enter the dot products as codes.
inline double logit_scale(const DenseMlaProblem& problem) {
  return static_cast<double>(problem.softmax_scale) * problem.q_scale * problem.k_scale;
}

/// The paged cache and the tables of its requests.
struct DenseMlaKeys {
  const uint8_t* base = nullptr;
  int64_t num_pages = 0;
  int64_t page_size = 1;  // tokens
  int64_t page_stride_bytes = 0;
  int64_t row_stride_bytes = 0;  // from a token to the next of its page
  int64_t head_stride_bytes = 0;
  RowFormat format = RowFormat::kBf16;
  const int32_t* page_table = nullptr;
  int64_t table_stride = 0;
  int64_t table_width = 0;
  Accessor<const int32_t, 1> kv_len;

  /// Keys of request r.
  FOVEA_HOST_DEVICE int64_t length(int64_t r) const {
    const int64_t len = kv_len(r), most = table_width * page_size;
    return len < 0 ? 0 : len > most ? most : len;
  }
  /// Page of key j < length(r) of request r, as the table has it.
  FOVEA_HOST_DEVICE int32_t page(int64_t r, int64_t j) const {
    return page_table[r * table_stride + column_of(j)];
  }
  /// Key j of a request on that page; null when the page is outside the pool.
  FOVEA_HOST_DEVICE const uint8_t* row_of_page(int64_t page, int64_t kv_head, int64_t j) const {
    if (page < 0 || page >= num_pages) return nullptr;
    return base + page * page_stride_bytes + (j - column_of(j) * page_size) * row_stride_bytes +
           kv_head * head_stride_bytes;
  }
  /// Key j < length(r) of request r; null when its page is outside the pool.
  FOVEA_HOST_DEVICE const uint8_t* row(int64_t r, int64_t kv_head, int64_t j) const {
    return row_of_page(page(r, j), kv_head, j);
  }

 private:
  // Both fit 32 bits, whose division is several times faster than that of 64 on many processors.
  FOVEA_HOST_DEVICE int64_t column_of(int64_t j) const {
    return static_cast<uint32_t>(j) / static_cast<uint32_t>(page_size);
  }
};

DenseMlaKeys dense_mla_keys(const DenseMlaProblem& problem, const DenseMlaTensors& tensors);

/// How the `count` visible keys of a row are cut on the CPU, and on a GPU with split_keys > 0: into
/// parts of whole blocks of kBlockSlots keys. By split_keys, or from the count alone: parts of
/// kPartBlocks blocks, doubled until there are kMaxParts at most. Doubling, so that rows that see
/// almost the same keys are cut alike and can be computed together.
struct KeyParts {
  int64_t num_blocks;
  int64_t blocks_per_part;

  FOVEA_HOST_DEVICE KeyParts(int64_t count, int64_t split_keys)
      : num_blocks((count + kBlockSlots - 1) / kBlockSlots),
        blocks_per_part(split_keys > 0 ? split_keys / kBlockSlots : kPartBlocks) {
    while (split_keys == 0 && blocks_per_part * kMaxParts < num_blocks) blocks_per_part *= 2;
  }
  FOVEA_HOST_DEVICE int64_t num_parts() const {
    return (num_blocks + blocks_per_part - 1) / blocks_per_part;
  }
};

}  // namespace fovea::internal
