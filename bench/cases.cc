#include "bench/cases.h"

#include <iterator>

namespace fovea::bench {

std::vector<BenchCase> all_cases() {
  std::vector<BenchCase> cases;
  for (auto* make : {sparse_mla_cases,     v4_attention_cases,     swa_decode_cases,
                     index_logits_cases,   topk_select_cases,      index_select_cases,
                     index_quantize_cases, pack_rows_cases,        unpack_rows_cases,
                     dense_mla_cases,      mha_varlen_cases,       metadata_refresh_cases,
                     merge_lse_cases,      kda_prefill_cases,      kda_decode_cases,
                     msa_attend_cases,     msa_score_select_cases, msa_select_blocks_cases,
                     kda_verify_cases,     kda_commit_cases,       causal_conv1d_cases}) {
    std::vector<BenchCase> more = make();
    cases.insert(cases.end(), std::make_move_iterator(more.begin()),
                 std::make_move_iterator(more.end()));
  }
  return cases;
}

}  // namespace fovea::bench
