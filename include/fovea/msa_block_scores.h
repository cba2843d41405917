#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// How the scores of a block's tokens become one number.
enum class BlockScore : uint8_t {
  kMax,  ///< The largest.
  kLse,  ///< ln sum exp.
};

struct MsaBlockScoresProblem {
  int64_t max_rows = 0;      ///< Upper bound of T.
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t max_pages = 0;     ///< Upper bound of the columns of page_table and scores.
  int64_t num_heads = 0;     ///< Hi >= 1, index heads.
  int64_t head_dim = 128;    ///< Di, a multiple of 8.
  int64_t block_size = 0;    ///< P >= 1: tokens of a block, which is a page of the cache.
  int64_t page_size = 0;     ///< 0, or block_size: any other value is an error.
  BlockScore score = BlockScore::kMax;
  float index_scale = 1;  ///< Finite; multiplies every product, in both reductions.
};

struct MsaBlockScoresTensors {
  ConstTensorView iq{};          ///< bf16 [T, Hi, Di]
  ConstTensorView index_k{};     ///< bf16 [slots, 1, Di]: slot s is token s mod P of page s / P
  ConstTensorView page_table{};  ///< i32 [R, max_pages]
  ConstTensorView kv_len{};      ///< i32 [R], the tokens of this call included
  ConstTensorView q_indptr{};    ///< i32 [R+1]: rows of request r are q_indptr[r]..q_indptr[r+1]-1
  ConstTensorView q_offset{};    ///< optional i32 [R]: position of a request's first row; absent:
                                 ///< kv_len - rows
  TensorView scores{};           ///< f32 [Hi, T, max_pages]
};

/// The index scores of block-sparse attention: one number per index head, row and block of P
/// consecutive tokens of the row's request.
///
/// Row i of request r stands at position pos = q_offset[r] + i (absent: kv_len[r] - n + i, n its
/// rows) and sees the tokens j <= pos, j < kv_len[r]. With
///   s[h,t,j] = index_scale * dot(iq[t,h,:], index_k[slot(j),0,:])
/// over the visible j of block n (n * P <= j < n * P + P):
///   kMax   scores[h,t,n] = max s[h,t,j]
///   kLse   scores[h,t,n] = ln sum exp s[h,t,j]
/// and -inf where block n has no visible token, or a page outside the cache.
///
/// Every element is written: rows of no request (before q_indptr[0], at or past q_indptr[R]), of a
/// request with kv_len <= 0 and at a negative position are -inf. A NaN among the visible products
/// of a block makes its score NaN; what is not visible is not read, or has no influence.
///
/// Contents of device tensors are never an error: kv_len is cut to [0, max_pages * P] before
/// anything is derived from it, offsets to [0, T] and raised to their predecessors. Nothing is
/// normalised across blocks.
///
/// The bits of a row depend on its iq, its position and its request's keys alone: not on the chunk
/// that it arrives in, the other rows, or the number of threads. Sums are fp32 or better.
///
/// plan() throws Error(kInvalidArgument) for a bound, a scale or a page_size that is not the block
/// size; run() throws it, before it writes, for tensors that contradict the plan: among them slots
/// that are not a multiple of P, and rows of iq or index_k that do not start at multiples of 16
/// bytes. run() neither allocates nor synchronises. Thread-safe: see OperatorPlan.
///
/// Source: index branch of MiniMax-M3's sparse attention (arXiv 2606.13392);
/// docs/msa_index.md.
class FOVEA_API MsaBlockScores : public OperatorPlan<MsaBlockScoresProblem, MsaBlockScoresTensors> {
 public:
  static MsaBlockScores plan(const MsaBlockScoresProblem& problem, const Device& device,
                             const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
