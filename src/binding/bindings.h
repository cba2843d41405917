#pragma once

#include "src/binding/named_call.h"

/// One function per operator of call_operator(); the files are by room.
namespace fovea::internal {

void run_pack_rows(NamedCall& call);
void run_unpack_rows(NamedCall& call);
void run_move_rows(NamedCall& call);
void run_metadata_refresh(NamedCall& call);
void run_metadata_check(NamedCall& call);
void run_paged_schedule(NamedCall& call);
void run_context_split(NamedCall& call);
void run_split_schedule(NamedCall& call);
void run_index_quantize(NamedCall& call);
void run_index_store(NamedCall& call);
void run_index_gather(NamedCall& call);
void run_index_logits(NamedCall& call);
void run_index_select(NamedCall& call);
void run_topk_select(NamedCall& call);
void run_sparse_mla(NamedCall& call);
void run_dense_mla(NamedCall& call);
void run_mha_varlen(NamedCall& call);
void run_merge_lse(NamedCall& call);
void run_concat_absorbed_q(NamedCall& call);
void run_mla_rope_quantize(NamedCall& call);
void run_swa_decode(NamedCall& call);
void run_build_swa_indices(NamedCall& call);
void run_v4_compress(NamedCall& call);
void run_kda_gate(NamedCall& call);
void run_kda_prefill(NamedCall& call);
void run_kda_decode(NamedCall& call);
void run_kda_verify(NamedCall& call);
void run_kda_commit(NamedCall& call);
void run_causal_conv1d(NamedCall& call);
void run_kda_stage_gate(NamedCall& call);
void run_kda_stage_intra(NamedCall& call);
void run_kda_stage_inter(NamedCall& call);
void run_kda_stage_output(NamedCall& call);
void run_build_page_table(NamedCall& call);
void run_msa_block_scores(NamedCall& call);
void run_msa_select_blocks(NamedCall& call);
void run_msa_score_select(NamedCall& call);
void run_msa_attend(NamedCall& call);

}  // namespace fovea::internal
