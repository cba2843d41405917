#pragma once

#include <algorithm>
#include <cstdint>

#include "src/core/workspace.h"

/// Memory of one worker of the chunked form of KDA, for every instruction set.
namespace fovea::internal {

/// Rows of scratch memory are padded with zeros to whole groups of this many floats: two vectors of
/// the widest instruction set.
inline constexpr int64_t kKdaRowGroup = 32;
/// State rows that one pass of the products takes at most.
inline constexpr int64_t kKdaMostRows = 12;

constexpr int64_t kda_padded(int64_t channels) {
  return (channels + kKdaRowGroup - 1) / kKdaRowGroup * kKdaRowGroup;
}

/// Floats from one row to the next: an odd number of cache lines, so that rows meet all cache sets.
constexpr int64_t kda_row_stride(int64_t channels) { return kda_padded(channels) + 16; }

/// Arrays for chunks of C rows, K key channels and V value channels. Names as in docs/kda.md.
struct KdaChunkScratch {
  int64_t padded_k;
  int64_t stride_k;    ///< of arrays [..][K]
  int64_t stride_v;    ///< of arrays [..][V]
  float* bias;         ///< [K] dt_bias, or zeros
  float* g_sum;        ///< [K] natural log
  float* chunk_decay;  ///< [K] exp(g_sum)
  float* beta;         ///< [C]
  float* decay;        ///< [C][K] exp(g)
  float* key;          ///< [C][K] as the products take it
  float* query;        ///< [C][K] the same, times scale
  float* kr;           ///< [C][K] keys decayed up to the last row
  float* row_key;      ///< [16][K] keys of a block decayed from the block's first row on
  float* row_query;    ///< [16][K]
  float* key_query;    ///< [K][2C] Kd^T, then Qd^T
  float* a;            ///< [C][C] k_i k_j exp(G_i - G_j), j < i
  float* x;            ///< [C][C] (I + A)^-1
  float* x_t;          ///< [C][C] (X diag(beta))^T
  float* p_t;          ///< [C][C] P^T
  float* rows;         ///< [C][V] values in, outputs out
  float* value_t;      ///< [V][C]
  float* out_t;        ///< [V][C]
  float* both;         ///< [kKdaMostRows][2C] S Kd^T and S Qd^T of a group of state rows
  float* u;            ///< [kKdaMostRows][C]
  float* state;        ///< [V][K]

  KdaChunkScratch(WorkspaceCutter& cutter, int64_t chunk, int64_t head_dim_k, int64_t head_dim_v)
      : padded_k(kda_padded(head_dim_k)),
        stride_k(kda_row_stride(head_dim_k)),
        stride_v(kda_row_stride(head_dim_v)) {
    const int64_t padded_v = kda_padded(head_dim_v);
    for (float** row : {&bias, &g_sum, &chunk_decay}) *row = cutter.take<float>(padded_k);
    beta = cutter.take<float>(kda_padded(chunk));
    for (float** rows_k : {&decay, &key, &query, &kr})
      *rows_k = cutter.take<float>(chunk * stride_k);
    for (float** rows_k : {&row_key, &row_query}) *rows_k = cutter.take<float>(16 * stride_k);
    key_query = cutter.take<float>(padded_k * 2 * chunk);
    for (float** square : {&a, &x, &x_t, &p_t}) *square = cutter.take<float>(chunk * chunk);
    rows = cutter.take<float>(chunk * stride_v);
    for (float** turned : {&value_t, &out_t}) *turned = cutter.take<float>(padded_v * chunk);
    both = cutter.take<float>(kKdaMostRows * 2 * chunk);
    u = cutter.take<float>(kKdaMostRows * chunk);
    state = cutter.take<float>(head_dim_v * stride_k);
  }
};

}  // namespace fovea::internal
