// Stored states to and from scratch rows [V][K] of fp32. Included after src/core/simd.h by
// *_cpu.cc files, once per instruction set.

#if defined(FOVEA_KDA_KDA_STATE_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_KDA_KDA_STATE_SIMD_H_
#undef FOVEA_KDA_KDA_STATE_SIMD_H_
#else
#define FOVEA_KDA_KDA_STATE_SIMD_H_
#endif

#include "src/kda/kda_row_simd.h"
#include "src/kda/kda_state.h"

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// State rows [first, first + count) of one value head.
struct StateRows {
  int64_t head;
  int64_t first;
  int64_t count;
};

/// Entry -1 is zero. Channels past K up to `padded_k` become zero.
inline void load_state(const StateAccess& states, int64_t entry, const StateRows& rows,
                       int64_t head_dim_k, int64_t padded_k, int64_t stride, float* to) {
  for (int64_t v = 0; v < rows.count; ++v) {
    float* row = to + v * stride;
    if (entry < 0) {
      std::fill_n(row, padded_k, 0.0f);
      continue;
    }
    const int64_t at = states.offset(entry, rows.head, rows.first + v, 0);
    if (states.k_stride == 1) {
      if (states.is_bf16)
        load_row(static_cast<const bf16_t*>(states.data) + at, head_dim_k, padded_k, row);
      else
        load_row(static_cast<const float*>(states.data) + at, head_dim_k, padded_k, row);
      continue;
    }
    for (int64_t c = 0; c < head_dim_k; ++c)
      row[c] = states.load(entry, rows.head, rows.first + v, c);
    std::fill(row + head_dim_k, row + padded_k, 0.0f);
  }
}

/// Entry -1: nothing is stored.
inline void store_state(const StateAccess& states, int64_t entry, const StateRows& rows,
                        int64_t head_dim_k, int64_t stride, const float* from) {
  if (entry < 0) return;
  for (int64_t v = 0; v < rows.count; ++v) {
    const float* row = from + v * stride;
    const int64_t at = states.offset(entry, rows.head, rows.first + v, 0);
    if (states.k_stride == 1) {
      if (states.is_bf16)
        store_row(row, head_dim_k, static_cast<bf16_t*>(states.data) + at);
      else
        store_row(row, head_dim_k, static_cast<float*>(states.data) + at);
      continue;
    }
    for (int64_t c = 0; c < head_dim_k; ++c)
      states.store(entry, rows.head, rows.first + v, c, row[c]);
  }
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
