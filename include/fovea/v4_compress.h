#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What a compressor carries from call to call.
enum class CompressorForm : uint8_t {
  kStored,  ///< The last S tokens of a request: values, and logits with ape added.
  kOnline,  ///< Ratio 128: maximum, sum and weighted values of the unfinished group, per channel.
};

struct V4CompressProblem {
  int64_t max_rows = 0;      ///< Upper bound of T.
  int64_t max_requests = 0;  ///< Upper bound of R.
  int64_t ratio = 0;         ///< r: 4 (groups overlap, c = 2) or 128 (c = 1).
  int64_t head_dim = 512;    ///< d: 512 or, for the indexer's rows, 128; >= 64, a multiple of 16.
  RowFormat row_format = RowFormat::kBf16;  ///< kBf16, kV4 with d = 512, or kI132 with d = 128.
  ScaleMode scale_mode = ScaleMode::kFp32;  ///< kI132; others ignore it.
  int64_t page_size = 0;                    ///< Rows per page of the pool, 1..256.
  CompressorForm form = CompressorForm::kStored;
  float eps = 1e-6f;  ///< Of the RMSNorm: finite, >= 0.
  /// n > 0: every request has n rows of which some may be taken back (a verify). The ring must be
  /// long enough for that, S >= c*r - 2 + n, where the first row of a verify counts as kept. Not
  /// with kOnline, which keeps no tokens to go back to.
  int64_t rows_per_request = 0;
};

struct V4CompressTensors {
  ConstTensorView kv_gate{};         ///< f32 [T, 2*c*d]: c*d values, then c*d logits
  ConstTensorView ape{};             ///< f32 [r, c*d], added to the logits
  ConstTensorView norm_weight{};     ///< f32 [d]
  ConstTensorView positions{};       ///< i32 [T]
  ConstTensorView row_to_request{};  ///< i32 [T]
  ConstTensorView cos_sin{};         ///< f32 [max_pos, 64]: 32 cosines, then 32 sines
  TensorView state{};                ///< f32 [states, S, 2, c*d], or (kOnline) [states, 3, d]
  ConstTensorView state_slot{};      ///< i32 [R]
  ConstTensorView page_table{};      ///< i32 [R, max_pages]: pages of the request's rows
  TensorView pool{};                 ///< u8 [pages, >= bytes of page_size rows]
  TensorView emitted{};              ///< i32 [T]: slot of the row that the token completed, or -1
};

/// The key-value compressor of DeepSeek-V4: every r tokens become one cached row.
///
/// With u_t = logit_t + ape[t mod r], per channel i < d of group g = tokens g*r .. g*r + r - 1:
///   r = 128:  e[i] = sum_t softmax_t(u_t[i]) * value_t[i]          over the tokens of group g
///   r = 4:    the same over 8 terms, channel i of the tokens of group g - 1 and channel d + i of
///             those of group g (group 0 has no group before it)
///   row g = pack(rope(bf16 <- e / sqrt(mean(e^2) + eps) * norm_weight))
/// Rope turns the pairs (2i, 2i + 1) of the last 64 channels by row g*r of cos_sin: the position of
/// the group's first token. The turned row is rounded to bf16 once and stored as pack_rows does. It
/// goes to slot page_table[request, g / page_size] * page_size + g % page_size.
///
/// Token t stands in row `row` of its request when positions[row] = t. The rows of one request
/// stand together, with consecutive positions; its earlier tokens are in `state`: token t in ring
/// entry t mod S (S >= c*r). After the call the ring holds the last S tokens that were given to it;
/// older entries keep their bytes. kOnline: state is (m, l, a) = (largest u, sum of exp(u - m), sum
/// of exp(u - m) * value) of the unfinished group; a token with t mod r = 0 starts afresh, and a
/// finished group leaves (-inf, 0, 0). Old state is read before new state is written.
///
/// Edges. Padding is a row whose request is outside [0, R), whose request's state_slot is outside
/// the states, or whose position is negative: nothing of it is read or written, emitted is -1. Of
/// the state nothing of a position below 0 or before the groups at hand is read: a reused state may
/// hold anything, NaN included. A row whose page is outside the pool or beyond the table is not
/// stored, emitted is -1, the state advances. Rows of cos_sin past the table: its last one. A
/// channel whose logits are all -inf gives e = 0. Bytes of the pool that belong to no stored row
/// keep their value. Two requests with one state slot, or two rows with one slot of the pool: what
/// they leave there is unspecified.
///
/// Determinism: a row's bits depend on its tokens alone: not on threads, on other requests, or on
/// how a prompt is cut into calls. The two forms agree up to fp32 rounding.
///
/// Throws Error(kInvalidArgument) from plan() for a value outside the table and from run() for
/// tensors that do not match or a ring that is too short, before anything is written. Contents of
/// tensors are never an error. Ownership, threads and streams: OperatorPlan.
///
/// Source: compressed attention of the DeepSeek-V4 technical report; docs/v4_compress.md.
class FOVEA_API V4Compress : public OperatorPlan<V4CompressProblem, V4CompressTensors> {
 public:
  static V4Compress plan(const V4CompressProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
