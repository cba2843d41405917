#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// How the lists of the index heads become lists of the KV heads.
enum class IndexReduce : uint8_t {
  kPerGroup,  ///< Hi = Hkv: head g selects for KV head g.
  kMaxAll,    ///< One list from the largest score over all heads, for every KV head.
  kUnion,     ///< Hi = r * Hkv: the r lists of a KV head, merged; up to r * topk entries.
};

/// Axes of `blocks`. Never inferred from a shape: with T = Hkv both would fit.
enum class BlocksLayout : uint8_t {
  kHeadMajor,  ///< [Hkv, T, K]
  kRowMajor,   ///< [T, Hkv, K]
};

struct MsaSelectBlocksProblem {
  int64_t max_rows = 0;      ///< Upper bound of T.
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t max_pages = 0;     ///< Upper bound of the columns of scores.
  int64_t num_heads = 0;     ///< Hi >= 1, index heads.
  int64_t num_kv_heads = 0;  ///< Hkv; 0: Hi.
  int64_t block_size = 0;    ///< P >= 1.
  int64_t page_size = 0;     ///< 0, or block_size: any other value is an error.
  int64_t topk = 0;          ///< K, 1..65536, at least init_blocks + local_blocks.
  int64_t init_blocks = 0;   ///< Blocks 0 .. init_blocks - 1 are always chosen.
  int64_t local_blocks = 1;  ///< So are the row's own block and the local_blocks - 1 before it.
  IndexReduce index_reduce = IndexReduce::kPerGroup;
  BlocksLayout blocks_layout = BlocksLayout::kHeadMajor;
};

struct MsaSelectBlocksTensors {
  ConstTensorView scores{};    ///< f32 [Hi, T, max_pages]
  ConstTensorView kv_len{};    ///< i32 [R]
  ConstTensorView q_indptr{};  ///< i32 [R+1]
  ConstTensorView q_offset{};  ///< optional i32 [R]
  TensorView blocks{};  ///< i32 [Hkv, T, K] or [T, Hkv, K] by blocks_layout; union: r * K columns
};

/// Chooses the blocks that each row attends to, from the scores of msa_block_scores.
///
/// Row t at position pos (as there) has own = min(floor(pos / P), max_pages - 1) and the candidates
/// 0..own. Order of choice: forced blocks, that is n < init_blocks and n > own - local_blocks, come
/// first; then larger scores, equal ones (+0 and -0 too) by smaller n, NaN after every number. The
/// first min(K, own + 1) are written in ascending order, then -1. Forcing is a rank of its own and
/// not a large score: no score, +inf included, displaces a forced block.
///
/// kMaxAll takes the largest score over the heads in this order first (NaN only where every head
/// has NaN) and gives every KV head the same list. kUnion merges the lists of the r heads g * r ..
/// g * r + r - 1 of KV head g: ascending, without repeats, then -1.
///
/// Every element is written: rows of no request, with kv_len <= 0 or at a negative position are -1
/// throughout. With own < K the list is 0..own and the scores are not read; scores past own never
/// are. Contents of device tensors are never an error; they are cut as in msa_block_scores.
///
/// The result depends on the row alone and is exact: the same on every implementation, for any
/// number of threads.
///
/// plan() throws Error(kInvalidArgument) for a bound out of range, K too small for the forced
/// blocks, head counts that index_reduce does not fit, a page_size that is not the block size;
/// run() throws it, before it writes, for tensors that contradict the plan. run() neither allocates
/// nor synchronises. Thread-safe: see OperatorPlan.
///
/// Source: MiniMax-M3's sparse attention (arXiv 2606.13392); docs/msa_index.md.
class FOVEA_API MsaSelectBlocks
    : public OperatorPlan<MsaSelectBlocksProblem, MsaSelectBlocksTensors> {
 public:
  static MsaSelectBlocks plan(const MsaSelectBlocksProblem& problem, const Device& device,
                              const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
