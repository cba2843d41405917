#pragma once

#include <cstdint>

#include "src/msa/cuda/msa_rows.cuh"
#include "src/msa/msa_index_impl.h"

/// The two halves of the index branch on the device, for a window of consecutive rows.
namespace fovea::internal {

struct MsaRowWindow {
  int64_t first = 0;
  int64_t count = 0;
};

/// Where a kernel's launches go.
struct MsaLaunch {
  const char* op;
  int num_sms;
  Stream stream;
};

/// Scores of the rows of a window to scores(h, row - window.first, n).
struct MsaScoreWork {
  MsaDeviceRows rows;
  MsaRowWindow window;
  Accessor<const bf16_t, 3> iq;
  MsaIndexKeys keys;
  Accessor<float, 3> scores;
  BlockScore score;
  float index_scale;
  /// Whether every element is written. Otherwise rows with own < min_own are left out, and of the
  /// others what is past their own block may be.
  bool whole;
  int64_t min_own;
};
Refusal msa_scores_cuda_refusal(int64_t max_rows, int64_t num_heads, int64_t head_dim);
void launch_msa_scores(const MsaLaunch& launch, const MsaScoreWork& work);

/// Lists of the rows of a window from those scores.
struct MsaSelectWork {
  MsaDeviceRows rows;
  MsaRowWindow window;
  Accessor<const float, 3> scores;
  Accessor<int32_t, 3> lists;  ///< [Hkv][T][width], of all rows
  int64_t num_heads;           ///< Hi
  int64_t topk, init_blocks, local_blocks;
  IndexReduce index_reduce;
};
Refusal msa_select_cuda_refusal(int64_t max_rows, int64_t num_kv_heads);
void launch_msa_select(const MsaLaunch& launch, const MsaSelectWork& work);

}  // namespace fovea::internal
