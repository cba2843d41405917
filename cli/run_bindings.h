#pragma once

#include "cli/operator_call.h"

/// One function per operator of `fovea run`; the files are by room.
namespace fovea::cli {

void run_pack_rows(OperatorCall& call);
void run_unpack_rows(OperatorCall& call);
void run_move_rows(OperatorCall& call);
void run_metadata_refresh(OperatorCall& call);
void run_metadata_check(OperatorCall& call);
void run_paged_schedule(OperatorCall& call);
void run_context_split(OperatorCall& call);
void run_split_schedule(OperatorCall& call);
void run_index_quantize(OperatorCall& call);
void run_index_logits(OperatorCall& call);
void run_index_select(OperatorCall& call);
void run_topk_select(OperatorCall& call);
void run_sparse_mla(OperatorCall& call);
void run_dense_mla(OperatorCall& call);
void run_mha_varlen(OperatorCall& call);
void run_merge_lse(OperatorCall& call);
void run_concat_absorbed_q(OperatorCall& call);
void run_mla_rope_quantize(OperatorCall& call);
void run_swa_decode(OperatorCall& call);
void run_build_swa_indices(OperatorCall& call);
void run_v4_compress(OperatorCall& call);
void run_kda_gate(OperatorCall& call);
void run_kda_prefill(OperatorCall& call);
void run_kda_decode(OperatorCall& call);
void run_kda_verify(OperatorCall& call);
void run_kda_commit(OperatorCall& call);
void run_causal_conv1d(OperatorCall& call);
void run_build_page_table(OperatorCall& call);
void run_msa_block_scores(OperatorCall& call);
void run_msa_select_blocks(OperatorCall& call);
void run_msa_score_select(OperatorCall& call);
void run_msa_attend(OperatorCall& call);

}  // namespace fovea::cli
