// Calls by name: the operators of the room msa.

#include <string>

#include "fovea/build_page_table.h"
#include "fovea/msa_attend.h"
#include "fovea/msa_block_scores.h"
#include "fovea/msa_score_select.h"
#include "fovea/msa_select_blocks.h"
#include "src/binding/bindings.h"
#include "src/binding/shared_bindings.h"

namespace fovea::internal {
namespace {

// The arrays that describe a batch, and the bounds that follow from them.
template <class Tensors>
void bind_batch(NamedCall& call, Tensors* tensors) {
  bind_lengths(call, tensors);
  tensors->q_offset = call.opt("q_offset", "i32 [R]");
}

template <class Problem>
void bind_bounds(NamedCall& call, Problem* problem) {
  problem->max_rows = call.extent("T");
  problem->max_requests = call.extent("R");
  problem->max_pages = call.extent("max_pages");
  problem->block_size = call.integer("block_size");
  problem->page_size = call.integer("page_size", problem->block_size);
  if (problem->page_size == 0) call.refuse("params.page_size = 0, expected block_size");
}

template <class Tensors>
void bind_keys(NamedCall& call, Tensors* tensors) {
  tensors->iq = call.in("iq", "bf16 [T, Hi, Di]");
  tensors->index_k = call.in("index_k", "bf16 [slots, 1, Di]");
  tensors->page_table = call.in("page_table", "i32 [R, max_pages]");
}

template <class Problem>
void bind_scoring(NamedCall& call, Problem* problem) {
  problem->score = call.choice<BlockScore>(
      "score", {{"max", BlockScore::kMax}, {"lse", BlockScore::kLse}}, BlockScore::kMax);
  problem->index_scale = call.number("index_scale", 1.0f);
  problem->num_heads = call.extent("Hi");
  problem->head_dim = call.extent("Di");
}

BlocksLayout bind_layout(NamedCall& call) {
  return call.choice<BlocksLayout>(
      "blocks_layout",
      {{"head_major", BlocksLayout::kHeadMajor}, {"row_major", BlocksLayout::kRowMajor}},
      BlocksLayout::kHeadMajor);
}

template <class Problem>
void bind_selection(NamedCall& call, Problem* problem) {
  problem->num_heads = call.extent("Hi");
  problem->topk = call.integer("topk");
  problem->init_blocks = call.integer("init_blocks", 0);
  problem->local_blocks = call.integer("local_blocks", 1);
  problem->num_kv_heads = call.integer("num_kv_heads", problem->num_heads);
  if (problem->num_kv_heads == 0) call.refuse("params.num_kv_heads = 0, expected >= 1");
  problem->index_reduce = call.choice<IndexReduce>("index_reduce",
                                                   {{"per_group", IndexReduce::kPerGroup},
                                                    {"max_all", IndexReduce::kMaxAll},
                                                    {"union", IndexReduce::kUnion}},
                                                   IndexReduce::kPerGroup);
  problem->blocks_layout = bind_layout(call);
}

// After plan(), which has checked the problem.
template <class Problem>
TensorView out_blocks(NamedCall& call, const Problem& problem) {
  const bool is_union = problem.index_reduce == IndexReduce::kUnion;
  call.set_extent("Hkv", problem.num_kv_heads, "params.num_kv_heads", {"Hi"});
  call.set_extent("K",
                  is_union ? problem.num_heads / problem.num_kv_heads * problem.topk : problem.topk,
                  "params.topk", {"Hi"});
  return call.out("blocks", problem.blocks_layout == BlocksLayout::kHeadMajor ? "i32 [Hkv, T, K]"
                                                                              : "i32 [T, Hkv, K]");
}

// Pools and scales of msa_attend, by mode.
void bind_caches(NamedCall& call, MsaKvMode mode, MsaAttendTensors* tensors) {
  if (mode == MsaKvMode::kQ8Kv4) {
    tensors->k_pool = call.in("k_pool", "u8 [pages, Hkv, P, D2]");
    tensors->v_pool = call.in("v_pool", "u8 [pages, Hkv, P, D2]");
    tensors->k_scale = call.in("k_scale", "u8 [pages, Hkv, P, D16]");
    tensors->v_scale = call.in("v_scale", "u8 [pages, Hkv, P, D16]");
    tensors->q_scale = call.opt("q_scale", "f32 [1]");
    tensors->k_global_scale = call.opt("k_global_scale", "f32 [1]");
    tensors->v_global_scale = call.opt("v_global_scale", "f32 [1]");
    return;
  }
  const std::string pool =
      std::string(mode == MsaKvMode::kBf16 ? "bf16" : "u8") +
      (call.rank_of("k_pool") == 4 ? " [pages, Hkv, P, D]" : " [slots, Hkv, D]");
  tensors->k_pool = call.in("k_pool", pool);
  tensors->v_pool = call.in("v_pool", pool);
  if (mode == MsaKvMode::kBf16) return;
  // The operator knows which shapes a scale may have.
  const auto scale = [&](const std::string& name, const std::string& rows) {
    if (mode == MsaKvMode::kKv8) return call.opt(name, "f32 [1]");
    return call.opt(name, call.rank_of(name) == 2 ? "f32 [" + rows + ", Hkv]" : "f32 [?]");
  };
  tensors->k_scale = scale("k_scale", "slots");
  tensors->v_scale = scale("v_scale", "slots");
  if (mode == MsaKvMode::kQ8Kv8) tensors->q_scale = scale("q_scale", "T");
}

}  // namespace

void run_build_page_table(NamedCall& call) {
  BuildPageTableProblem problem;
  BuildPageTableTensors tensors;
  tensors.req_to_token = call.in("req_to_token", "i32 [rows, W]");
  tensors.pool_row = call.in("pool_row", "i32 [R]");
  tensors.kv_len = call.in("kv_len", "i32 [R]");
  problem.max_requests = call.extent("R");
  problem.page_size = call.integer("page_size");
  problem.delta = call.integer("delta", 0);
  if (problem.page_size < 1) call.refuse("params.page_size is below 1");
  const int64_t width = call.extent("W");
  problem.max_pages = call.integer(
      "max_pages", width / problem.page_size + (width % problem.page_size != 0 ? 1 : 0));
  const BuildPageTable plan = call.plan<BuildPageTable>(problem);
  call.set_extent("max_pages", problem.max_pages, "params.max_pages", {"W"});
  tensors.page_table = call.out("page_table", "i32 [R, max_pages]");
  call.run(plan, tensors);
}

void run_msa_block_scores(NamedCall& call) {
  MsaBlockScoresProblem problem;
  MsaBlockScoresTensors tensors;
  bind_keys(call, &tensors);
  bind_batch(call, &tensors);
  bind_bounds(call, &problem);
  bind_scoring(call, &problem);
  const MsaBlockScores plan = call.plan<MsaBlockScores>(problem);
  tensors.scores = call.out("scores", "f32 [Hi, T, max_pages]");
  call.run(plan, tensors);
}

void run_msa_select_blocks(NamedCall& call) {
  MsaSelectBlocksProblem problem;
  MsaSelectBlocksTensors tensors;
  tensors.scores = call.in("scores", "f32 [Hi, T, max_pages]");
  bind_batch(call, &tensors);
  bind_bounds(call, &problem);
  bind_selection(call, &problem);
  const MsaSelectBlocks plan = call.plan<MsaSelectBlocks>(problem);
  tensors.blocks = out_blocks(call, problem);
  call.run(plan, tensors);
}

void run_msa_score_select(NamedCall& call) {
  MsaScoreSelectProblem problem;
  MsaScoreSelectTensors tensors;
  bind_keys(call, &tensors);
  bind_batch(call, &tensors);
  bind_bounds(call, &problem);
  bind_scoring(call, &problem);
  bind_selection(call, &problem);
  const MsaScoreSelect plan = call.plan<MsaScoreSelect>(problem);
  tensors.blocks = out_blocks(call, problem);
  call.run(plan, tensors);
}

void run_msa_attend(NamedCall& call) {
  MsaAttendProblem problem;
  MsaAttendTensors tensors;
  problem.kv_mode = call.choice<MsaKvMode>("kv_mode",
                                           {{"bf16", MsaKvMode::kBf16},
                                            {"kv8", MsaKvMode::kKv8},
                                            {"q8kv8", MsaKvMode::kQ8Kv8},
                                            {"q8kv4", MsaKvMode::kQ8Kv4}},
                                           MsaKvMode::kBf16);
  problem.blocks_layout = bind_layout(call);
  const bool is_q8 = problem.kv_mode == MsaKvMode::kQ8Kv8 || problem.kv_mode == MsaKvMode::kQ8Kv4;
  tensors.q = call.in("q", is_q8 ? "u8 [T, Hq, D]" : "bf16 [T, Hq, D]");
  bind_caches(call, problem.kv_mode, &tensors);
  tensors.page_table = call.in("page_table", "i32 [R, max_pages]");
  bind_batch(call, &tensors);
  tensors.blocks =
      call.in("blocks", problem.blocks_layout == BlocksLayout::kHeadMajor ? "i32 [Hkv, T, K]"
                                                                          : "i32 [T, Hkv, K]");
  tensors.sink = call.opt("sink", "f32 [Hq]");
  bind_bounds(call, &problem);
  problem.num_heads = call.extent("Hq");
  problem.num_kv_heads = call.extent("Hkv");
  problem.head_dim = call.extent("D");
  problem.topk = call.integer("topk", call.extent("K"));
  problem.softmax_scale = call.number("softmax_scale", 0.0f);
  if (call.has_param("softmax_scale") && problem.softmax_scale == 0)
    call.refuse("params.softmax_scale = 0, expected > 0");
  problem.causal = call.flag("causal", true);
  const MsaAttend plan = call.plan<MsaAttend>(problem);
  tensors.out = call.out("out", "bf16 [T, Hq, D]", NamedCall::Writes::kAll);
  tensors.lse = call.out("lse", "f32 [T, Hq]", NamedCall::Writes::kAll);
  call.run(plan, tensors);
}

}  // namespace fovea::internal
