#include "src/msa/msa_checks.h"

#include <cmath>
#include <limits>
#include <string>

#include "src/core/check.h"

namespace fovea::internal {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kRowAlignment = 16;

}  // namespace

void check_msa_bounds(const char* op, int64_t max_rows, int64_t max_requests, int64_t max_pages,
                      int64_t block_size, int64_t page_size) {
  check_range(op, "max_rows", max_rows, 0, kMaxInt32);
  check_range(op, "max_requests", max_requests, 0, kMaxInt32);
  // Positions are int32: a table of more tokens cannot be filled.
  constexpr int64_t kMaxBlockSize = 1 << 16;
  check_range(op, "block_size", block_size, 1, kMaxBlockSize);
  check_range(op, "max_pages", max_pages, 0, kMaxInt32 / block_size);
  if (page_size != 0 && page_size != block_size) {
    invalid(op, "page_size = " + std::to_string(page_size) +
                    ", expected block_size = " + std::to_string(block_size) +
                    ": a block is a page of the cache; page the cache in blocks");
  }
}

void check_msa_index(const char* op, int64_t num_heads, int64_t head_dim, float index_scale) {
  constexpr int64_t kMaxHeads = 4096;
  constexpr int64_t kMaxHeadDim = 1024;
  constexpr int64_t kChannels = 8;
  check_range(op, "num_heads", num_heads, 1, kMaxHeads);
  check_range(op, "head_dim", head_dim, kChannels, kMaxHeadDim);
  if (head_dim % kChannels != 0) {
    invalid(op, "head_dim = " + std::to_string(head_dim) + ", expected a multiple of " +
                    std::to_string(kChannels));
  }
  if (!std::isfinite(index_scale))
    invalid(op, "index_scale = " + std::to_string(index_scale) + ", expected a finite value");
}

void check_msa_score(const char* op, BlockScore score) {
  if (score == BlockScore::kMax || score == BlockScore::kLse) return;
  invalid(op, "score = " + std::to_string(static_cast<int>(score)) +
                  ", expected a value of BlockScore");
}

void check_msa_selection(const char* op, const MsaSelectBlocksProblem& problem) {
  constexpr int64_t kMaxHeads = 4096;
  constexpr int64_t kMaxTopk = 1 << 16;
  const int64_t heads = problem.num_heads;
  const int64_t kv_heads = problem.num_kv_heads;
  check_range(op, "num_heads", heads, 1, kMaxHeads);
  check_range(op, "num_kv_heads", kv_heads, 1, kMaxHeads);
  check_range(op, "topk", problem.topk, 1, kMaxTopk);
  check_range(op, "init_blocks", problem.init_blocks, 0, kMaxTopk);
  check_range(op, "local_blocks", problem.local_blocks, 0, kMaxTopk);
  if (problem.init_blocks + problem.local_blocks > problem.topk) {
    invalid(op, "topk = " + std::to_string(problem.topk) +
                    ", expected at least init_blocks + local_blocks = " +
                    std::to_string(problem.init_blocks + problem.local_blocks) +
                    ", the blocks that are always chosen");
  }
  const std::string counts =
      "num_heads = " + std::to_string(heads) + " with num_kv_heads = " + std::to_string(kv_heads);
  switch (problem.index_reduce) {
    case IndexReduce::kPerGroup:
      if (heads != kv_heads)
        invalid(op, counts +
                        ", but index_reduce per_group takes one index head per KV head; use "
                        "max_all or union");
      break;
    case IndexReduce::kMaxAll:
      break;
    case IndexReduce::kUnion:
      if (heads % kv_heads != 0)
        invalid(op, counts + ", but index_reduce union takes a multiple of the KV heads");
      break;
    default:
      invalid(op, "index_reduce = " + std::to_string(static_cast<int>(problem.index_reduce)) +
                      ", expected a value of IndexReduce");
  }
  if (problem.blocks_layout != BlocksLayout::kHeadMajor &&
      problem.blocks_layout != BlocksLayout::kRowMajor) {
    invalid(op, "blocks_layout = " + std::to_string(static_cast<int>(problem.blocks_layout)) +
                    ", expected a value of BlocksLayout");
  }
}

void check_msa_batch(const char* op, const ConstTensorView& kv_len, const ConstTensorView& q_indptr,
                     const ConstTensorView& q_offset, int64_t max_requests) {
  check_tensor(op, "kv_len", kv_len, DType::kI32, {kAnyExtent});
  const int64_t requests = kv_len.shape[0];
  check_range(op, "kv_len.shape[0]", requests, 0, max_requests);
  check_tensor(op, "q_indptr", q_indptr, DType::kI32, {requests + 1});
  check_optional(op, "q_offset", q_offset, DType::kI32, {requests});
}

void check_msa_page_table(const char* op, const ConstTensorView& page_table, int64_t num_requests,
                          int64_t max_pages) {
  check_tensor(op, "page_table", page_table, DType::kI32, {num_requests, kAnyExtent});
  check_range(op, "page_table.shape[1]", page_table.shape[1], 0, max_pages);
}

void check_msa_alignment(const char* op, const char* name, const ConstTensorView& tensor) {
  if (tensor.num_elements() == 0) return;
  const auto item = static_cast<int64_t>(size_of(tensor.dtype));
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % kRowAlignment == 0;
  for (int axis = 0; axis + 1 < tensor.rank; ++axis) {
    const auto i = static_cast<size_t>(axis);
    if (tensor.shape[i] > 1 && tensor.stride[i] * item % kRowAlignment != 0) aligned = false;
  }
  if (!aligned) {
    invalid(op, std::string(name) + " = " + to_string(tensor) +
                    ", expected rows that start at multiples of 16 bytes; copy the tensor first");
  }
}

void check_msa_slots(const char* op, const char* name, int64_t slots, int64_t block_size) {
  if (slots % block_size == 0) return;
  invalid(op, std::string(name) + " has " + std::to_string(slots) +
                  " slots, expected a multiple of block_size = " + std::to_string(block_size) +
                  "; pages of the pool must be whole");
}

void check_msa_index_k(const char* op, const ConstTensorView& index_k, int64_t head_dim,
                       int64_t block_size) {
  check_tensor(op, "index_k", index_k, DType::kBf16, {kAnyExtent, 1, head_dim});
  check_msa_slots(op, "index_k", index_k.shape[0], block_size);
  check_msa_alignment(op, "index_k", index_k);
}

void check_msa_blocks(const char* op, const ConstTensorView& blocks, BlocksLayout layout,
                      int64_t num_kv_heads, int64_t rows, int64_t width) {
  if (layout == BlocksLayout::kHeadMajor)
    check_tensor(op, "blocks", blocks, DType::kI32, {num_kv_heads, rows, width});
  else
    check_tensor(op, "blocks", blocks, DType::kI32, {rows, num_kv_heads, width});
}

}  // namespace fovea::internal
