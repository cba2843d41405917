#pragma once

#include <cstdint>

#include "fovea/dtype.h"
#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// What lse reports for a row without any valid key.
enum class EmptyLse : uint8_t { kNegInf, kPosInf };

/// Channels of V, which is the leading part of each K row.
inline constexpr int64_t kLatentDim = 512;

struct SparseMlaProblem {
  int64_t max_rows = 0;                     ///< Upper bound of T.
  int64_t num_heads = 0;                    ///< H >= 1.
  int64_t head_dim_qk = 576;                ///< 576 or 512 (kV32: 576).
  int64_t topk = 0;                         ///< K >= 0, width of indices.
  int64_t extra_topk = 0;                   ///< Width of extra_indices; 0: no second segment.
  float softmax_scale = 0;                  ///< Finite, > 0; never derived from a width.
  RowFormat row_format = RowFormat::kBf16;  ///< kBf16 or kV32.
  int64_t page_size = 0;                    ///< Of a packed (u8) pool; 0: kv is bf16 [S, Dqk].
  RowFormat extra_row_format = RowFormat::kBf16;
  int64_t extra_page_size = 0;
  EmptyLse empty_lse = EmptyLse::kNegInf;
  float logit_cap = 0;  ///< > 0: s = cap * tanh(s / cap).
  int64_t fixed_splits =
      0;  ///< n > 0: every row's 64-slot blocks cut into n contiguous parts; changes rounding only.
};

struct SparseMlaTensors {
  ConstTensorView q;        ///< bf16 [T, H, Dqk]
  ConstTensorView kv;       ///< bf16 [S, Dqk], or u8 [pages, page_bytes] with page_size
  ConstTensorView indices;  ///< i32 [T, K]; slot; outside the cache (e.g. -1): unused
  ConstTensorView
      topk_length;  ///< optional i32 [T]; clamped to [0, K]; columns past it are never interpreted
  ConstTensorView sink;               ///< optional f32 [H], natural-log units
  ConstTensorView extra_kv;           ///< optional second cache, with extra_indices
  ConstTensorView extra_indices;      ///< i32 [T, extra_topk]
  ConstTensorView extra_topk_length;  ///< optional i32 [T]
  TensorView out;                     ///< bf16 [T, H, 512]
  TensorView lse;                     ///< f32 [T, H], natural log, sink excluded
  TensorView max_logits;              ///< optional f32 [T, H]
};

/// Sparse multi-query latent attention of query rows over the listed tokens of a cache.
///
/// For row t, head h and T(t) the valid slots of both index lists:
///   s_j = cap(softmax_scale * <q[t,h,:], k_j>),  lse = ln sum exp(s_j),  out = sink_factor * sum_j
///   exp(s_j - lse) * k_j[0:512] sink_factor = 1 / (1 + exp(sink[h] - lse))
///
/// Unused slots are never read. Duplicates count twice. A row without valid slots: out exactly 0,
/// lse and max_logits -inf.
class FOVEA_API SparseMla : public OperatorPlan<SparseMlaProblem, SparseMlaTensors> {
 public:
  static SparseMla plan(const SparseMlaProblem& problem, const Device& device,
                        const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
