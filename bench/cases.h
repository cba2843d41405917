#pragma once

#include <vector>

#include "bench/case.h"

/// The cases of each operator; all_cases() joins them.
namespace fovea::bench {

std::vector<BenchCase> sparse_mla_cases();
std::vector<BenchCase> index_logits_cases();
std::vector<BenchCase> topk_select_cases();
std::vector<BenchCase> index_select_cases();
std::vector<BenchCase> index_quantize_cases();
std::vector<BenchCase> pack_rows_cases();
std::vector<BenchCase> unpack_rows_cases();
std::vector<BenchCase> mha_varlen_cases();
std::vector<BenchCase> metadata_refresh_cases();
std::vector<BenchCase> merge_lse_cases();
std::vector<BenchCase> msa_attend_cases();
std::vector<BenchCase> msa_score_select_cases();
std::vector<BenchCase> msa_select_blocks_cases();

}  // namespace fovea::bench
