// Calls by name: the operators of the room mla.

#include <algorithm>
#include <optional>
#include <string_view>

#include "fovea/dense_mla.h"
#include "fovea/merge_lse.h"
#include "fovea/mha_varlen.h"
#include "fovea/mla_inputs.h"
#include "fovea/sparse_mla.h"
#include "fovea/swa_decode.h"
#include "fovea/swa_indices.h"
#include "src/binding/bindings.h"
#include "src/binding/shared_bindings.h"

namespace fovea::internal {
namespace {

// A latent cache of sparse_mla: bf16 rows [S, Dqk], or a u8 pool whose pages hold page_size tokens.
struct LatentCache {
  ConstTensorView tensor;
  ConstTensorView inv_scale;
  RowFormat row_format = RowFormat::kBf16;
  int64_t page_size = 0;  // 0: bf16 rows
};

RowFormat bind_latent_format(NamedCall& call, std::string_view name, RowFormat otherwise) {
  return call.choice<RowFormat>(name,
                                {{"bf16", RowFormat::kBf16},
                                 {"v32", RowFormat::kV32},
                                 {"v4", RowFormat::kV4},
                                 {"r512", RowFormat::kR512},
                                 {"f576", RowFormat::kF576}},
                                otherwise);
}

// What a cache is called, and how its tensors are declared.
struct CacheNames {
  const char *row_format, *page_size, *kv, *rows, *pool, *inv_scale, *scales;
};
constexpr CacheNames kOwnCache = {
    "row_format", "page_size",          "kv", "bf16 [S, Dqk]", "u8 [pages, page_bytes]",
    "inv_scale",  "bf16|f32 [slots, 1]"};
constexpr CacheNames kExtraCache = {"extra_row_format",
                                    "extra_page_size",
                                    "extra_kv",
                                    "bf16 [extra_S, Dqk]",
                                    "u8 [extra_pages, extra_page_bytes]",
                                    "extra_inv_scale",
                                    "bf16|f32 [extra_slots, 1]"};

// The parameters of the second cache default to those of the first.
LatentCache bind_cache(NamedCall& call, const CacheNames& names, const LatentCache* first) {
  LatentCache cache;
  cache.row_format = bind_latent_format(call, names.row_format,
                                        first != nullptr ? first->row_format : RowFormat::kBf16);
  const bool is_pool =
      cache.row_format != RowFormat::kBf16 || call.dtype_of(names.kv) == DType::kU8;
  cache.tensor = call.in(names.kv, is_pool ? names.pool : names.rows);
  if (!is_pool) {
    call.integer(names.page_size, 0);  // a name of the table, without meaning here
  } else if (first != nullptr && first->page_size > 0) {
    cache.page_size = call.integer(names.page_size, first->page_size);
  } else {
    cache.page_size = call.integer(names.page_size);
  }
  if (cache.row_format == RowFormat::kR512) {
    cache.inv_scale = call.in(names.inv_scale, names.scales);
  }
  return cache;
}

// The first one, with its page size and format.
template <class Problem, class Tensors>
LatentCache bind_own_cache(NamedCall& call, Problem* problem, Tensors* tensors) {
  LatentCache cache = bind_cache(call, kOwnCache, nullptr);
  tensors->kv = cache.tensor;
  tensors->inv_scale = cache.inv_scale;
  problem->row_format = cache.row_format;
  problem->page_size = cache.page_size;
  return cache;
}

// The second cache of sparse_mla: listed slots, or a page table with lengths.
void bind_extra(NamedCall& call, const LatentCache& first, SparseMlaProblem& problem,
                SparseMlaTensors& tensors) {
  const bool has_table = call.has("extra_page_table");
  if (!call.has("extra_kv") && !call.has("extra_indices") && !has_table) {
    if (call.has("extra_topk_length")) {
      call.refuse("extra_topk_length is given without extra_kv and extra_indices");
    }
    // Names of the table, without meaning when there is no second cache.
    bind_latent_format(call, "extra_row_format", RowFormat::kBf16);
    call.integer("extra_page_size", 0);
    return;
  }
  const LatentCache extra = bind_cache(call, kExtraCache, &first);
  tensors.extra_kv = extra.tensor;
  tensors.extra_inv_scale = extra.inv_scale;
  problem.extra_row_format = extra.row_format;
  problem.extra_page_size = extra.page_size;
  if (!has_table) {
    tensors.extra_indices = call.in("extra_indices", "i32 [T, K2]");
    tensors.extra_topk_length = call.opt("extra_topk_length", "i32 [T]");
    problem.extra_topk = call.extent("K2");
    return;
  }
  tensors.extra_page_table = call.in("extra_page_table", "i32 [R, extra_max]");
  tensors.extra_len = call.in("extra_len", "i32 [T]");
  tensors.row_to_request = call.in("row_to_request", "i32 [T]");
  problem.extra_max_pages = call.extent("extra_max");
  problem.extra_topk = problem.extra_max_pages * std::max<int64_t>(1, extra.page_size);
}

}  // namespace

void run_sparse_mla(NamedCall& call) {
  call.later_tensor("schedule", "a split plan from outside");
  SparseMlaProblem problem;
  SparseMlaTensors tensors;
  tensors.q = call.in("q", "bf16|u8 [T, H, Dqk]");
  const LatentCache cache = bind_own_cache(call, &problem, &tensors);
  tensors.indices = call.in("indices", "i32 [T, K]");
  tensors.topk_length = call.opt("topk_length", "i32 [T]");
  tensors.sink = call.opt("sink", "f32 [H]");
  bind_extra(call, cache, problem, tensors);
  if (call.has("inverse_rope")) {
    tensors.inverse_rope = call.in("inverse_rope", "f32 [max_pos, rope]");
    tensors.positions = call.in("positions", "i32 [T]");
    problem.inverse_rope_dim = call.extent("rope");
  }
  problem.softmax_scale = call.number("softmax_scale");
  problem.empty_lse = call.choice<EmptyLse>(
      "empty_lse", {{"neg_inf", EmptyLse::kNegInf}, {"pos_inf", EmptyLse::kPosInf}},
      EmptyLse::kNegInf);
  problem.logit_cap = call.number("logit_cap", 0.0f);
  problem.q_scale = call.number("q_scale", 1.0f);
  problem.k_scale = call.number("k_scale", 1.0f);
  problem.fixed_splits = call.integer("fixed_splits", 0);
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("H");
  problem.head_dim_qk = call.extent("Dqk");
  problem.topk = call.extent("K");
  const SparseMla plan = call.plan<SparseMla>(problem);
  tensors.out = call.out("out", "bf16 [T, H, 512]", NamedCall::Writes::kAll);
  tensors.lse = call.out("lse", "f32 [T, H]", NamedCall::Writes::kAll);
  tensors.max_logits = call.out_if_wanted("max_logits", "f32 [T, H]", NamedCall::Writes::kAll);
  call.run(plan, tensors);
}

void run_swa_decode(NamedCall& call) {
  SwaDecodeProblem problem;
  SwaDecodeTensors tensors;
  tensors.q = call.in("q", "bf16 [T, H, 512]");
  bind_own_cache(call, &problem, &tensors);
  tensors.swa_indices =
      call.in("swa_indices", call.rank_of("swa_indices") == 3 ? "i32|i64 [list_a, list_b, Wi]"
                                                              : "i32|i64 [list, Wi]");
  tensors.swa_lens = call.in("swa_lens", "i32|i64 [lens]");
  tensors.sink = call.opt("sink", "f32 [H]");
  problem.softmax_scale = call.number("softmax_scale");
  problem.window = call.integer("window");
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("H");
  problem.width = call.extent("Wi");
  const SwaDecode plan = call.plan<SwaDecode>(problem);
  run_attention(call, plan, "bf16 [T, H, 512]", &tensors);
}

void run_dense_mla(NamedCall& call) {
  DenseMlaProblem problem;
  DenseMlaTensors tensors;
  tensors.q = call.in("q", "bf16|u8 [T, H, Dqk]");
  problem.row_format = call.choice<RowFormat>(
      "row_format",
      {{"bf16", RowFormat::kBf16}, {"v32", RowFormat::kV32}, {"f576", RowFormat::kF576}},
      RowFormat::kBf16, {"v4", "r512"});
  if (call.rank_of("kv") == 4) {
    tensors.kv = call.in("kv", "bf16 [pages, page_size, h_kv, Dqk]");
    problem.num_heads_kv = call.extent("h_kv");
    problem.page_size = call.integer("page_size", call.extent("page_size"));
  } else {
    tensors.kv = call.dtype_of("kv") == DType::kBf16 ? call.in("kv", "bf16 [S, Dqk]")
                                                     : call.in("kv", "u8 [pages, page_bytes]");
    problem.page_size = call.integer("page_size");
  }
  tensors.page_table = call.in("page_table", "i32 [R, max_pages]");
  bind_lengths(call, &tensors);
  problem.softmax_scale = call.number("softmax_scale");
  problem.causal = call.flag("causal", true);
  problem.q_scale = call.number("q_scale", 1.0f);
  problem.k_scale = call.number("k_scale", 1.0f);
  problem.split_keys = call.integer("split_keys", 0);
  problem.max_rows = call.extent("T");
  problem.max_requests = call.extent("R");
  problem.max_pages = call.extent("max_pages");
  problem.num_heads = call.extent("H");
  problem.head_dim_qk = call.extent("Dqk");
  const DenseMla plan = call.plan<DenseMla>(problem);
  run_attention(call, plan, "bf16 [T, H, 512]", &tensors);
}

void run_mha_varlen(NamedCall& call) {
  MhaVarlenProblem problem;
  MhaVarlenTensors tensors;
  tensors.q = call.in("q", "bf16 [T, H, Dqk]");
  tensors.k = call.in("k", "bf16 [S, H, Dqk]");
  tensors.v = call.in("v", "bf16 [S, H, Dv]");
  tensors.q_indptr = call.in("q_indptr", "i32 [R+1]");
  tensors.kv_indptr = call.in("kv_indptr", "i32 [R+1]");
  problem.softmax_scale = call.number("softmax_scale");
  problem.causal = call.flag("causal", true);
  problem.max_rows = call.extent("T");
  problem.max_keys = call.extent("S");
  problem.max_requests = call.extent("R");
  problem.num_heads = call.extent("H");
  problem.head_dim_qk = call.extent("Dqk");
  problem.head_dim_v = call.extent("Dv");
  const MhaVarlen plan = call.plan<MhaVarlen>(problem);
  run_attention(call, plan, "bf16 [T, H, Dv]", &tensors);
}

void run_build_swa_indices(NamedCall& call) {
  SwaIndicesProblem problem;
  SwaIndicesTensors tensors;
  bind_lengths(call, &tensors);
  tensors.row_valid = call.opt("row_valid", "u8 [T]");
  problem.window = call.integer("window");
  problem.width = call.integer("width", problem.window);
  problem.page_size = call.integer("page_size");
  problem.storage = call.choice<WindowStorage>(
      "storage", {{"paged", WindowStorage::kPaged}, {"ring", WindowStorage::kRing}},
      WindowStorage::kPaged);
  problem.pages = call.integer("pages", -1);
  tensors.page_table = call.in("page_table", "i32 [R, max_pages]");
  problem.max_requests = call.extent("R");
  if (!tensors.row_valid.defined()) {
    // How many rows there are follows from the offsets.
    const int32_t rows = call.values("q_indptr")[problem.max_requests];
    call.set_extent("T", std::max(0, rows), "q_indptr");
  }
  problem.max_rows = call.extent("T");
  const BuildSwaIndices plan = call.plan<BuildSwaIndices>(problem);
  call.set_extent("Wi", problem.width, "params.width");
  tensors.indices = call.out("indices", "i32 [T, Wi]");
  tensors.row_len = call.out("row_len", "i32 [T]");
  call.run(plan, tensors);
}

void run_merge_lse(NamedCall& call) {
  MergeLseTensors tensors;
  tensors.out_parts = call.in("out_parts", "bf16|f32 [P, T, H, D]");
  tensors.lse_parts = call.in("lse_parts", "f32 [P, T, H]");
  tensors.sink = call.opt("sink", "f32 [H]");
  const DType dtype = tensors.out_parts.dtype;
  MergeLseProblem problem;
  problem.num_parts = call.extent("P");
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("H");
  problem.head_dim = call.extent("D");
  problem.dtype = dtype;
  const MergeLse plan = call.plan<MergeLse>(problem);
  run_attention(call, plan, std::string(to_string(dtype)) + " [T, H, D]", &tensors);
}

void run_concat_absorbed_q(NamedCall& call) {
  ConcatAbsorbedQTensors tensors;
  tensors.q_nope = call.in("q_nope", "bf16 [T, H, 512]");
  tensors.q_rope = call.in("q_rope", "bf16 [T, H, 64]");
  ConcatAbsorbedQProblem problem;
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("H");
  const ConcatAbsorbedQ plan = call.plan<ConcatAbsorbedQ>(problem);
  tensors.q = call.out("q", "bf16 [T, H, 576]");
  call.run(plan, tensors);
}

void run_mla_rope_quantize(NamedCall& call) {
  MlaRopeQuantizeProblem problem;
  MlaRopeQuantizeTensors tensors;
  const bool has_q = call.has("q_nope") || call.has("q_rope");
  const bool has_k = call.has("k_nope") || call.has("k_rope") || !has_q;
  if (has_q) {
    tensors.q_nope = call.in("q_nope", "bf16 [T, H, 512]");
    tensors.q_rope = call.in("q_rope", "bf16 [T, H, 64]");
  }
  if (has_k) {
    tensors.k_nope = call.in("k_nope", "bf16 [T, 512]");
    tensors.k_rope = call.in("k_rope", "bf16 [T, 64]");
  }
  tensors.positions = call.in("positions", "i32 [T]");
  tensors.cos_sin = call.in("cos_sin", "f32 [max_pos, 64]");
  problem.rope_style = bind_rope_style(call);
  problem.q_scale = call.number("q_scale", 1.0f);
  problem.k_scale = call.number("k_scale", 1.0f);
  problem.max_rows = call.extent("T");
  problem.num_heads = has_q ? call.extent("H") : 1;
  const MlaRopeQuantize plan = call.plan<MlaRopeQuantize>(problem);
  if (has_q) tensors.q_fp8 = call.out("q_fp8", "u8 [T, H, 576]");
  if (has_k) tensors.k_fp8 = call.out("k_fp8", "u8 [T, 576]");
  call.run(plan, tensors);
}

}  // namespace fovea::internal
