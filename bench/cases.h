#pragma once

#include <cstdint>
#include <vector>

#include "bench/case.h"
#include "fovea/index_logits.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_prefill.h"
#include "fovea/msa_attend.h"
#include "fovea/sparse_mla.h"

/// The cases of each operator; all_cases() joins them.
namespace fovea::bench {

std::vector<BenchCase> sparse_mla_cases();
std::vector<BenchCase> v4_attention_cases();
std::vector<BenchCase> swa_decode_cases();
std::vector<BenchCase> index_logits_cases();
std::vector<BenchCase> topk_select_cases();
std::vector<BenchCase> index_select_cases();
std::vector<BenchCase> index_quantize_cases();
std::vector<BenchCase> pack_rows_cases();
std::vector<BenchCase> unpack_rows_cases();
std::vector<BenchCase> dense_mla_cases();
std::vector<BenchCase> mha_varlen_cases();
std::vector<BenchCase> metadata_refresh_cases();
std::vector<BenchCase> merge_lse_cases();
std::vector<BenchCase> kda_prefill_cases();
std::vector<BenchCase> kda_decode_cases();
std::vector<BenchCase> msa_attend_cases();
std::vector<BenchCase> msa_score_select_cases();
std::vector<BenchCase> msa_select_blocks_cases();
std::vector<BenchCase> kda_verify_cases();
std::vector<BenchCase> kda_commit_cases();
std::vector<BenchCase> causal_conv1d_cases();

/// The latent cache of a sparse_mla case: the rows of a request are taken from a region of its own
/// (from the first one again when there are more requests), whose pages lie in random order.
struct LatentPool {
  int64_t regions = 1;
  int64_t region_rows = 65536;  ///< A multiple of 64.
  int64_t rows_per_request = 1;
};
BenchCase sparse_mla_case(const SparseMlaProblem& problem, const LatentPool& pool = {});

/// A decode step of DeepSeek-V4, one query row a request: a window of 128 rows, and `extra_topk`
/// entries of 8192 compressed ones (of the first requests' again beyond 64 requests).
struct V4Shape {
  int64_t heads, requests;
  RowFormat format = RowFormat::kV4;  ///< Or r512.
  int64_t extra_topk = 0;             ///< Of sparse_mla only.
};
BenchCase v4_attention_case(const V4Shape& shape);
BenchCase swa_decode_case(const V4Shape& shape);

/// `keys` is the length of the longest row, a multiple of 64; rows_per_request of the paged layout
/// divides rows.
struct ScoringShape {
  IndexLayout layout;
  int64_t rows, keys;
  int64_t rows_per_request = 1;
  bool causal = false;  ///< Ragged: the rows are the last ones of the keys' sequence.
};
BenchCase index_logits_case(const ScoringShape& shape);
BenchCase index_select_case(const ScoringShape& shape);

/// What the logits of a row look like.
enum class Values { kNormal, kEqual, kFewValues, kAscending, kDescending, kCloseTogether };
BenchCase topk_select_case(int64_t rows, int64_t width, Values values);

/// Packed sequences of these lengths, each from one state of a pool to another; the bounds of the
/// problem are filled in.
BenchCase kda_prefill_case(KdaPrefillProblem problem, const std::vector<int64_t>& lengths);
/// One row each of problem.max_rows states, which are updated in place.
BenchCase kda_decode_case(const KdaDecodeProblem& problem);

/// How the block lists of consecutive rows relate; every list holds the own block of its row, and
/// all there are while those are not more than the list holds.
enum class BlockLists {
  kRandom,     ///< The others are uniform.
  kClustered,  ///< 16 consecutive rows share block 0 and 10 of the others; the rest is uniform.
};
struct AttendShape {
  int64_t requests, rows, context;  ///< Rows and tokens of each request, its rows among them.
  int64_t heads, kv_heads;
  MsaKvMode mode = MsaKvMode::kBf16;
  BlockLists lists = BlockLists::kRandom;
  int64_t regions = 0;  ///< Request r reads the pages of region r mod this; 0: one each.
};
/// 16 blocks of 128 tokens, heads of 128 channels.
BenchCase msa_attend_case(const AttendShape& shape);

}  // namespace fovea::bench
