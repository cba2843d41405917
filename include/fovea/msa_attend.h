#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/msa_select_blocks.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// How queries and the cache are stored.
enum class MsaKvMode : uint8_t {
  kBf16,   ///< q, k, v bf16.
  kKv8,    ///< q bf16; k, v e4m3.
  kQ8Kv8,  ///< q, k, v e4m3.
  kQ8Kv4,  ///< q e4m3; k, v e2m1, two values a byte, the even channel in the low half.
};

struct MsaAttendProblem {
  int64_t max_rows = 0;      ///< Upper bound of T.
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t max_pages = 0;     ///< Upper bound of the columns of page_table.
  int64_t num_heads = 0;     ///< Hq, a multiple of Hkv.
  int64_t num_kv_heads = 0;  ///< Hkv >= 1.
  int64_t head_dim = 128;    ///< D, a multiple of 16.
  int64_t block_size = 0;    ///< P >= 1: tokens of a block, which is a page of the cache.
  int64_t page_size = 0;     ///< 0, or block_size: any other value is an error.
  int64_t topk = 0;          ///< K >= 0, the columns of blocks; another width is an error.
  float softmax_scale = 0;   ///< Finite, > 0; 0: 1 / sqrt(D).
  bool causal = true;        ///< false drops the test j <= pos and nothing else.
  MsaKvMode kv_mode = MsaKvMode::kBf16;
  BlocksLayout blocks_layout = BlocksLayout::kHeadMajor;
  /// A row's bits do not depend on the number of rows in the call, nor on the plan's max_rows and
  /// max_requests. The CPU always is; a GPU chooses its way and cuts lists by the other bounds
  /// only.
  bool batch_invariant = false;
};

/// Pools [slots, Hkv, D], slot s being token s mod P of page s / P, or [pages, Hkv, P, D]: the same
/// memory order with other strides, or a real one of that form; k and v also as halves of one
/// interleaved buffer. All strides but the last are free and equal for k and v.
struct MsaAttendTensors {
  ConstTensorView q{};       ///< bf16 [T, Hq, D]; q8 modes u8 (e4m3)
  ConstTensorView k_pool{};  ///< bf16, 8-bit modes u8 (e4m3): [slots, Hkv, D] or [pages, Hkv, P,
                             ///< D]; kQ8Kv4 u8 [pages, Hkv, P, D/2]
  ConstTensorView v_pool{};  ///< as k_pool
  ConstTensorView page_table{};      ///< i32 [R, max_pages]
  ConstTensorView kv_len{};          ///< i32 [R], the tokens of this call included
  ConstTensorView q_indptr{};        ///< i32 [R+1]
  ConstTensorView q_offset{};        ///< optional i32 [R]; absent: kv_len - rows
  ConstTensorView blocks{};          ///< i32 [Hkv, T, K] or [T, Hkv, K] by blocks_layout
  ConstTensorView sink{};            ///< optional f32 [Hq], natural-log units
  ConstTensorView q_scale{};         ///< optional f32: kQ8Kv8 [1], [Hkv] or [T, Hkv]; kQ8Kv4 [1]
  ConstTensorView k_scale{};         ///< optional f32: kKv8 [1]; kQ8Kv8 [1], [Hkv] or [slots, Hkv];
                                     ///< kQ8Kv4, required: u8 (e4m3) [pages, Hkv, P, D/16]
  ConstTensorView v_scale{};         ///< as k_scale
  ConstTensorView k_global_scale{};  ///< optional f32 [1], kQ8Kv4
  ConstTensorView v_global_scale{};  ///< optional f32 [1], kQ8Kv4
  TensorView out{};                  ///< bf16 [T, Hq, D]
  TensorView lse{};                  ///< optional f32 [T, Hq], natural log, sink excluded
};

/// Grouped-query attention of each row over the blocks that its list names.
///
/// Row t at position pos (as in MsaBlockScores) and query head h, KV head g = h / (Hq / Hkv), over
///   A = { j : floor(j / P) in blocks[g,t,:], j < kv_len, and j <= pos when causal }
///   x_j = softmax_scale * dot(q[t,h,:], k_j),   lse[t,h] = ln sum_A exp(x_j),
///   out[t,h,:] = sum_A exp(x_j - lse) * v_j / (1 + exp(sink[h] - lse))
/// with q, k_j, v_j the stored values times their scales: kQ8Kv8 q_scale, k_scale and v_scale of
/// head g, or of (row or slot, head g); kQ8Kv4 e4m3(e2m1 * scale of 16 channels), saturating at
/// +-448, times the global scale. Absent scales are 1.
///
/// The list is a set: order and repeats do not matter. Ids below 0, at or past the request's length
/// or, when causal, past its own block, and blocks on a page outside the cache contribute nothing
/// and are not read. A row with empty A gives out = 0 exactly and lse = -inf, whatever the sink:
/// rows of no request, of one with kv_len <= 0, at a negative position, with nothing but such ids.
/// Every row of out and lse is written. Tokens that no row sees may hold NaN or infinities, also
/// beside visible ones in a page. NaN in q or in a visible token gives NaN in that row and head.
///
/// Contents of device tensors are never an error; lengths and offsets are cut as in MsaBlockScores.
///
/// Logits, weights and sums of weights are fp32 or better, and out is rounded to bf16 once. On a
/// GPU a weight may be rounded to bf16 for its product with a value, and for nothing else: an
/// element of out is then off by up to 2^-8 sum_A exp(x_j - lse) |v_j| more.
///
/// Same plan, same inputs: the same bits, for any number of threads.
///
/// plan() throws Error(kInvalidArgument) for a bound, scale or head count out of range and a
/// page_size that is not the block size; run() throws it, before it writes, for tensors that
/// contradict the plan: among them slots that are not a multiple of P, a list width other than K,
/// pools of different strides, rows of q, the pools or out that do not start at multiples of 16
/// bytes (tables may start anywhere). run() neither allocates nor synchronises. Thread-safe: see
/// OperatorPlan.
///
/// Source: MiniMax-M3's sparse attention (arXiv 2606.13392); docs/msa_attend.md.
class FOVEA_API MsaAttend : public OperatorPlan<MsaAttendProblem, MsaAttendTensors> {
 public:
  static MsaAttend plan(const MsaAttendProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
