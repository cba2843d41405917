#pragma once

#include <cstdint>
#include <optional>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What lse reports for a row without any valid key.
enum class EmptyLse : uint8_t {
  kNegInf,  ///< -inf: what merging across splits, caches or ranks needs.
  kPosInf,  ///< +inf: the convention of some peers.
};

/// Channels of V, which is the leading part of each K row.
inline constexpr int64_t kLatentDim = 512;

struct SparseMlaProblem {
  int64_t max_rows = 0;       ///< Upper bound of T.
  int64_t num_heads = 0;      ///< H >= 1.
  int64_t head_dim_qk = 576;  ///< Dqk: 576 or 512 (kV32, kF576: 576; kV4, kR512: 512).
  int64_t topk = 0;           ///< K, width of indices, 0 .. 2^31 - 1; 0: every row is empty.
  /// Width of extra_indices, or the bound of extra_len; 0: the second segment is empty or absent.
  int64_t extra_topk = 0;
  /// n > 0: the second segment is the first extra_len keys of a request, found through a page table
  /// of n columns; 0: it is listed by extra_indices.
  int64_t extra_max_pages = 0;
  float softmax_scale = 0;                  ///< Finite, > 0; never derived from a width.
  RowFormat row_format = RowFormat::kBf16;  ///< Any but kI132.
  int64_t page_size = 0;  ///< Tokens per page of a packed (u8) pool; 0: kv is bf16 [S, Dqk].
  std::optional<RowFormat> extra_row_format = {};  ///< Absent: row_format.
  std::optional<int64_t> extra_page_size =
      {};  ///< Absent: page_size; 0: extra_kv is bf16 [S2, Dqk].
  EmptyLse empty_lse = EmptyLse::kNegInf;
  float q_scale = 1;  ///< Finite, > 0: q is code * q_scale; 1 for a bf16 q.
  /// n > 0: the last n channels of out, an even number up to 512, are turned back by the angle of
  /// the row's position (inverse_rope, positions); needs head_dim_qk = 512. 0: out as it is.
  int64_t inverse_rope_dim = 0;
  /// Finite, > 0: a key of a kF576 cache is code * k_scale; 1 unless every cache is kF576.
  float k_scale = 1;
  float logit_cap = 0;  ///< > 0: cap(s) = logit_cap * tanh(s / logit_cap); 0: cap(s) = s.
  /// n > 0: every row's 64-slot blocks are cut into n contiguous parts (some may be empty) that are
  /// merged in order; changes rounding only. 0: parts of 4 blocks, at most 16 of them (a row of
  /// more than 64 blocks has longer parts); on a GPU as many as max_rows and num_heads ask for, the
  /// same for every row of a plan.
  int64_t fixed_splits = 0;
  /// P > 0: work is cut and shared out as split_schedule says (SplitScheduleProblem::parts), which
  /// balances rows of uneven length and ties a row's rounding to its batch. At most 65536; not
  /// together with fixed_splits. 0: cuts depend on the row alone.
  int64_t split_parts = 0;
};

struct SparseMlaTensors {
  ConstTensorView q;        ///< bf16 [T, H, Dqk]; with row_format kF576 also u8 [T, H, 576], e4m3
  ConstTensorView kv;       ///< bf16 [S, Dqk], or u8 [pages, page_bytes] with page_size
  ConstTensorView indices;  ///< i32 [T, K]; slot, i.e. page * page_size + offset; outside: unused
  ConstTensorView topk_length = {};    ///< optional i32 [T], clamped to [0, K]; columns past it are
                                       ///< not read as indices
  ConstTensorView sink = {};           ///< optional f32 [H], natural-log units
  ConstTensorView extra_kv = {};       ///< optional second cache, together with extra_indices
  ConstTensorView extra_indices = {};  ///< i32 [T, extra_topk], slots of extra_kv
  ConstTensorView extra_topk_length = {};  ///< optional i32 [T]
  ConstTensorView inv_scale = {};          ///< kR512: bf16 or f32 [pages * page_size, 1], by slot
  ConstTensorView extra_inv_scale = {};    ///< likewise of extra_kv
  /// Exactly with extra_max_pages > 0, in place of extra_indices and extra_topk_length: i32
  /// [R, extra_max_pages]; key g of a request lies in page g / extra_page_size of its row.
  ConstTensorView extra_page_table = {};
  ConstTensorView extra_len = {};       ///< i32 [T], clamped to [0, extra_topk] and to the table
  ConstTensorView row_to_request = {};  ///< i32 [T]; outside 0 .. R - 1: no keys of extra_kv
  /// Exactly with inverse_rope_dim = n: f32 [max_pos, n], n / 2 cosines, then n / 2 sines.
  ConstTensorView inverse_rope = {};
  ConstTensorView positions = {};       ///< i32 [T], clamped into the table
  ConstTensorView split_schedule = {};  ///< i32 [P, 8] (SplitPart) of topk_length; both of these
  ConstTensorView split_indptr = {};    ///< i32 [T+1]; exactly with split_parts > 0
  TensorView out;                       ///< bf16 [T, H, 512]
  TensorView lse;                       ///< f32 [T, H], natural log, sink excluded
  TensorView max_logits = {};           ///< optional f32 [T, H], largest s_j
};

/// Sparse multi-query latent attention of query rows over the listed tokens of one or two caches.
///
/// For row t, head h and the valid slots j of indices[t, 0:topk_length[t]], then of
/// extra_indices[t, 0:extra_topk_length[t]] or of the pages of its request:
///   s_j = cap(softmax_scale * dot(q[t,h,:], k_j)),   lse[t,h] = ln sum_j exp(s_j),
///   out[t,h,:] = sum_j exp(s_j - lse) * k_j[0:512] / (1 + exp(sink[h] - lse))
/// k_j is the stored bf16 row, or bf16(code * scale) of a v32, v4 or r512 one (product in fp32). A
/// key of an f576 cache and a query of codes are code * k_scale and code * q_scale, not rounded:
/// the codes enter the products, softmax_scale * q_scale * k_scale multiplies the logits and
/// k_scale the output. The product of the three must be finite and > 0 in fp32. With inverse_rope
/// the pairs (x, y) = (2i, 2i + 1) of the last channels become (x cos + y sin, y cos - x sin) of
/// row positions[t], before the one rounding to bf16.
///
/// Edges. A slot whose index is outside its cache (negative, or not below S or pages * page_size)
/// counts as absent, and nothing is read for it: unreferenced memory may hold anything. Duplicates
/// count as often as they occur. There is no causal mask: the index list says what is visible. A
/// row without valid slots gives out = 0 exactly, max_logits = -inf and lse = -inf (+inf with
/// EmptyLse::kPosInf), whatever the sink; so does a head whose logits are all -inf. NaN in q or in
/// a referenced token, or a logit of +inf, gives NaN in out, lse and max_logits of that row and
/// head only. sink = -inf: no effect; sink = +inf: out = 0.
///
/// Numbers: logits, weights and sums of weights are fp32 or better, also where bf16 is multiplied,
/// and out is rounded to bf16 once. On a GPU each weight is rounded to bf16 for its product with a
/// value, and for nothing else: lse is that of the unrounded ones, and an element of out is off by
/// up to 2^-8 sum_j exp(s_j - lse) |k_j| (times the factor of the sink) more. docs/sparse_mla.md
/// says what that comes to.
///
/// Determinism: a row's bits depend on its own q, lengths, index list and keys, never on the other
/// rows or the number of threads. An implementation gives the same bits for a packed row and for
/// the bf16 row that it decodes to (f576: with k_scale 1, when every value is a bf16 number).
///
/// With split_parts > 0 a row that the schedule cuts may differ by rounding with its batch; one
/// that it leaves whole has the bits of a plan without. The part that ends a row takes its slots of
/// the extra cache too. The schedule is device content and not trusted: one that does not tile
/// exactly the blocks of these lengths (stale, of another T, garbage) is not followed, and the rows
/// are cut as without one; no content gives a wrong row or an access out of bounds.
///
/// Throws Error(kInvalidArgument) from plan() for a value outside the tables above and from run()
/// for tensors that do not match, before anything is written. Contents of device tensors are never
/// an error. Ownership, threads and streams: OperatorPlan.
///
/// Source: the sparse attention of the DeepSeek-V3.2 technical report in its absorbed (multi-query)
/// form, and the window and compressed entries of DeepSeek-V4 under one softmax;
/// docs/sparse_mla.md.
class FOVEA_API SparseMla : public OperatorPlan<SparseMlaProblem, SparseMlaTensors> {
 public:
  static SparseMla plan(const SparseMlaProblem& problem, const Device& device,
                        const Options& options = {});

  /// Whether the chosen implementation follows split_schedule; false for ref and with split_parts
  /// 0, where a caller need not compute one (with split_parts > 0 the tensors must be there).
  bool reads_split_schedule() const noexcept;

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
