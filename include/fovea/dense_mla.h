#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct DenseMlaProblem {
  int64_t max_rows = 0;                     ///< Upper bound of T.
  int64_t max_requests = 0;                 ///< Upper bound of R.
  int64_t max_pages = 0;                    ///< Upper bound of page_table's width.
  int64_t num_heads = 0;                    ///< H >= 1, a multiple of num_heads_kv.
  int64_t num_heads_kv = 1;                 ///< h_kv >= 1; 1 for a packed pool.
  int64_t head_dim_qk = 576;                ///< Dqk: 576 or 512 (kV32, kF576: 576).
  int64_t page_size = 0;                    ///< Tokens per page, >= 1.
  RowFormat row_format = RowFormat::kBf16;  ///< kBf16, kV32 or kF576.
  float softmax_scale = 0;                  ///< Finite, > 0; never derived from a width.
  bool causal = true;  ///< Right-aligned: row i of n sees keys 0 .. kv_len - n + i.
  float q_scale = 1;   ///< kF576 with a u8 q: q is code * q_scale, finite, > 0; otherwise 1.
  float k_scale = 1;   ///< kF576: a key is code * k_scale, finite, > 0; otherwise 1.
  /// n > 0, a multiple of 64: the keys of a row are cut every n keys, the parts computed by
  /// themselves and merged in order. 0: parts of 256 keys, doubled until a row has 16 at most; on a
  /// GPU as many equal ones as the bounds ask for. Changes rounding only; see Determinism.
  int64_t split_keys = 0;
};

struct DenseMlaTensors {
  ConstTensorView q{};           ///< bf16 [T, H, Dqk]; with row_format kF576 also u8 [T, H, 576]
  ConstTensorView kv{};          ///< bf16 [pages, page_size, h_kv, Dqk]; with h_kv = 1 also bf16
                                 ///< [pages * page_size, Dqk], or u8 [pages, >= page_bytes]
  ConstTensorView page_table{};  ///< i32 [R, max_pages]: page of tokens page_size * column ..
  ConstTensorView kv_len{};      ///< i32 [R], clamped to [0, page_table width * page_size]
  ConstTensorView q_indptr{};    ///< i32 [R+1]: rows of request r are q_indptr[r]..q_indptr[r+1]-1
  TensorView out{};              ///< bf16 [T, H, 512]
  TensorView lse{};              ///< f32 [T, H], natural log
};

/// Dense latent attention in its absorbed (multi-query) form over a paged cache: decode, drafts,
/// and prefill in chunks over a cached prefix.
///
/// Row i of the n rows of a request with S = kv_len keys sees key j when 0 <= j < S and, when
/// causal, j <= S - n + i. For head h, which belongs to KV head g = h / (H / h_kv):
///   s_j = softmax_scale * dot(q[i,h,:], k_j),   lse[i,h] = ln sum_j exp(s_j),
///   out[i,h,:] = sum_j exp(s_j - lse[i,h]) * k_j[0:512]
/// k_j is token j % page_size of page page_table[r, j / page_size]: the bf16 row of KV head g, or
/// bf16(code * scale) of a v32 one (product in fp32). A key of an f576 cache and a query of codes
/// are code * k_scale and code * q_scale, not rounded.
///
/// Edges. A key whose page is outside the pool (negative, or not below the pages there are) counts
/// as absent. Nothing is read of absent keys, of keys at or past kv_len, of the table beyond the
/// last page of a length, and of a page's surplus: all of it may hold anything, NaN included. A key
/// that a row does not see has no influence on it. A row without a visible key (kv_len <= 0, the
/// first rows of a causal request with more rows than keys, no page in the pool), and a head whose
/// scores are all -inf: out = 0 exactly, lse = -inf. NaN in q or in a visible key, or a score of
/// +inf, gives NaN in the rows and heads that use it only. Rows before q_indptr[0] and at or past
/// q_indptr[R] belong to no request: they are neither read nor written. Offsets are device contents
/// and never trusted: each is cut to [0, T] and raised to its predecessor.
///
/// Numbers: as sparse_mla's; cpu_avx512bf16 rounds weights to bf16 for their products, too.
///
/// Determinism: a row's bits depend on its own q and on the keys that it sees, and, on a GPU with
/// split_keys = 0, on the plan's bounds. They do not depend on threads, on other requests or rows,
/// on the page size or on where pages lie, on how a prefill is cut into chunks, or on whether a row
/// is packed or the bf16 row that it decodes to (f576: with k_scale 1, when every value is a bf16
/// number). With the same split_keys > 0 that holds on a GPU for every plan; a split_keys of at
/// least every kv_len means one part, and no memory for parts.
///
/// Throws Error(kInvalidArgument) from plan() for a value outside the tables above and from run()
/// for tensors that do not match, before anything is written. Contents of device tensors are never
/// an error. Ownership, threads and streams: OperatorPlan.
///
/// Source: multi-head latent attention of the DeepSeek-V2 technical report with absorbed weights;
/// docs/dense_mla.md.
class FOVEA_API DenseMla : public OperatorPlan<DenseMlaProblem, DenseMlaTensors> {
 public:
  static DenseMla plan(const DenseMlaProblem& problem, const Device& device,
                       const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
