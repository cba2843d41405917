// Calls by name: the operators of the room index.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "fovea/index_cache.h"
#include "fovea/index_logits.h"
#include "fovea/index_quantize.h"
#include "fovea/index_select.h"
#include "fovea/topk_select.h"
#include "src/binding/bindings.h"
#include "src/binding/shared_bindings.h"

namespace fovea::internal {
namespace {

IndexLayout bind_layout(NamedCall& call) {
  return call.choice<IndexLayout>(
      "layout", {{"ragged", IndexLayout::kRagged}, {"paged", IndexLayout::kPaged}});
}

// The tensors that index_logits and index_select share.
template <class Problem, class Tensors>
void bind_queries_and_keys(NamedCall& call, Problem& problem, Tensors& tensors) {
  problem.layout = bind_layout(call);
  tensors.q_fp8 = call.in("q_fp8", "u8 [T, Hi, Di]");
  tensors.head_weight = call.in("head_weight", "f32 [T, Hi]");
  if (problem.layout == IndexLayout::kRagged) {
    tensors.k_fp8 = call.in("k_fp8", "u8 [S, Di]");
    tensors.k_scale = call.in("k_scale", "f32 [S]");
    tensors.k_start = call.in("k_start", "i32 [T]");
    tensors.k_end = call.in("k_end", "i32 [T]");
  } else {
    bind_index_pool(call, &tensors);
    tensors.row_to_request = call.in("row_to_request", "i32 [T]");
    tensors.row_len = call.in("row_len", "i32 [T]");
    tensors.schedule = call.opt("schedule", "i32 [workers+1, 2]");
    problem.page_size = call.integer("page_size");
  }
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("Hi");
  problem.head_dim = call.extent("Di");
}

// A row that reaches further past its page table is cut there: every later column is -inf, and a
// length out of proportion would fill the memory with them.
constexpr int64_t kColumnsPastTable = 4096;

// Tokens that a row of the page table holds. plan() refuses the page sizes that are cut here.
int64_t table_capacity(NamedCall& call, int64_t page_size) {
  return call.extent("max_pages") * std::clamp<int64_t>(page_size, 0, 256);
}

// The longest row: k_end - k_start within [0, S], or row_len of a row whose request exists.
template <class Problem>
int64_t longest_row(NamedCall& call, const Problem& problem) {
  int64_t longest = 0;
  for (int64_t t = 0; t < problem.max_rows; ++t) {
    int64_t length = 0;
    if (problem.layout == IndexLayout::kRagged) {
      const int64_t keys = call.extent("S");
      length = std::clamp<int64_t>(call.values("k_end")[t], 0, keys) -
               std::clamp<int64_t>(call.values("k_start")[t], 0, keys);
    } else {
      const int64_t request = call.values("row_to_request")[t];
      if (request >= 0 && request < call.extent("R")) length = call.values("row_len")[t];
    }
    longest = std::max(longest, length);
  }
  return longest;
}

// Columns of logits that the call provides.
int64_t logits_width(NamedCall& call, const IndexLogitsProblem& problem) {
  if (problem.layout == IndexLayout::kRagged) {
    return call.sized_by_contents() ? longest_row(call, problem) : call.extent("S");
  }
  const int64_t capacity = table_capacity(call, problem.page_size);
  if (!call.sized_by_contents()) return capacity;
  return std::min(longest_row(call, problem), capacity + kColumnsPastTable);
}

// The longest row that a selection has to look at.
int64_t selection_width(NamedCall& call, const IndexSelectProblem& problem) {
  if (problem.layout == IndexLayout::kRagged) {
    return call.sized_by_contents() ? longest_row(call, problem) : call.extent("S");
  }
  // Positions past the table score -inf and the first of them win, so that no selection reaches
  // beyond the larger of the table and topk.
  const int64_t bound = std::max(table_capacity(call, problem.page_size), problem.topk);
  return call.sized_by_contents() ? std::min(longest_row(call, problem), bound) : bound;
}

// The part of topk_select and index_select that turns positions into indices. The axis T is known.
// `has_pages`: the layout has bound page_table, row_to_request and page_size already.
template <class Problem, class Tensors>
void bind_transform(NamedCall& call, bool has_pages, Problem& problem, Tensors& tensors) {
  problem.topk = call.integer("topk");
  problem.transform = call.choice<IndexTransform>("transform",
                                                  {{"local", IndexTransform::kLocal},
                                                   {"paged", IndexTransform::kPaged},
                                                   {"ragged", IndexTransform::kRagged}},
                                                  IndexTransform::kLocal);
  const bool paged = problem.transform == IndexTransform::kPaged;
  if (paged && call.has("token_table")) {
    tensors.token_table = call.in("token_table", "i32 [Rt, max_len]");
    tensors.row_to_request = call.opt("row_to_request", "i32 [T]");
    if (call.has("page_table") && !has_pages) {
      call.refuse("page_table and token_table are both given, expected one");
    }
    problem.page_size = call.integer("page_size", problem.page_size);
  } else if (paged) {
    tensors.page_table = call.in("page_table", "i32 [R, max_pages]");
    tensors.row_to_request = call.in("row_to_request", "i32 [T]");
    problem.page_size = call.integer("page_size");
  } else {
    problem.page_size = call.integer("page_size", problem.page_size);
  }
  if (problem.transform == IndexTransform::kRagged) {
    tensors.row_offset = call.in("row_offset", "i32 [T]");
  }
  call.set_extent("K", problem.topk, "params.topk");
}

// Rows that the requests of a gather fill: where the last one ends.
int64_t gathered_rows(NamedCall& call) {
  return std::max<int64_t>(0, call.values("kv_indptr")[call.extent("R")]);
}

}  // namespace

void run_index_store(NamedCall& call) {
  IndexCacheProblem problem;
  IndexStoreTensors tensors;
  tensors.k_fp8 = call.in("k_fp8", "u8 [T, Di]");
  tensors.k_scale = call.in("k_scale", "f32 [T]");
  tensors.slots = call.in("slots", "i32|i64 [T]");
  tensors.index_pool = call.update("index_pool", "u8 [pages, page_bytes]");
  problem.max_rows = call.extent("T");
  problem.head_dim = call.extent("Di");
  problem.page_size = call.integer("page_size");
  call.run(call.plan<IndexStore>(problem), tensors);
}

void run_index_gather(NamedCall& call) {
  IndexCacheProblem problem;
  IndexGatherTensors tensors;
  bind_index_pool(call, &tensors);
  tensors.kv_indptr = call.in("kv_indptr", "i32 [R+1]");
  problem.page_size = call.integer("page_size");
  problem.head_dim = call.integer("head_dim", problem.head_dim);
  call.set_extent("Di", problem.head_dim, "params.head_dim");
  if (!call.is_given("k_fp8")) {
    call.set_extent("S", gathered_rows(call), "the end of the last request");
  }
  // The bound of S is as good as S itself: nothing is sized by it.
  problem.max_rows = std::numeric_limits<int32_t>::max();
  const IndexGather plan = call.plan<IndexGather>(problem);
  tensors.k_fp8 = call.out("k_fp8", "u8 [S, Di]");
  tensors.k_scale = call.out("k_scale", "f32 [S]");
  call.run(plan, tensors);
}

void run_index_quantize(NamedCall& call) {
  IndexQuantizeProblem problem;
  IndexQuantizeTensors tensors;
  tensors.q = call.in("q", "bf16 [T, Hi, Di]");
  tensors.k = call.in("k", "bf16 [T, Di]");
  tensors.norm_weight = call.in("norm_weight", "f32 [Di]");
  tensors.norm_bias = call.in("norm_bias", "f32 [Di]");
  tensors.head_gate = call.in("head_gate", "f32 [T, Hi]");
  tensors.positions = call.in("positions", "i32 [T]");
  tensors.cos_sin = call.in("cos_sin", "f32 [max_pos, rope]");
  problem.rope_style = bind_rope_style(call);
  problem.hadamard = call.flag("hadamard", false);
  problem.scale_mode = bind_scale_mode(call, std::nullopt);
  problem.max_rows = call.extent("T");
  problem.num_heads = call.extent("Hi");
  problem.head_dim = call.extent("Di");
  problem.rope_dim = call.extent("rope");
  const IndexQuantize plan = call.plan<IndexQuantize>(problem);
  tensors.q_fp8 = call.out("q_fp8", "u8 [T, Hi, Di]");
  tensors.q_scale = call.out("q_scale", "f32 [T, Hi]");
  tensors.k_fp8 = call.out("k_fp8", "u8 [T, Di]");
  tensors.k_scale = call.out("k_scale", "f32 [T]");
  tensors.head_weight = call.out("head_weight", "f32 [T, Hi]");
  call.run(plan, tensors);
}

void run_index_logits(NamedCall& call) {
  IndexLogitsProblem problem;
  IndexLogitsTensors tensors;
  bind_queries_and_keys(call, problem, tensors);
  if (problem.layout == IndexLayout::kRagged) {
    call.integer("page_size", 0);  // a name of the table, without meaning here
    call.unused({"index_pool", "page_table", "row_to_request", "row_len", "schedule"},
                "in the ragged layout");
  } else {
    call.unused({"k_fp8", "k_scale", "k_start", "k_end"}, "in the paged layout");
  }
  const bool is_given = call.is_given("logits");
  if (!is_given) {
    call.set_extent("W", logits_width(call, problem), "the longest row", {"max_pages"});
  }
  const bool has_every_key =
      !is_given && problem.layout == IndexLayout::kRagged && !call.sized_by_contents();
  const IndexLogits plan = call.plan<IndexLogits>(problem);
  tensors.logits = call.out("logits", has_every_key ? "f32 [T, S]" : "f32 [T, W]");
  call.run(plan, tensors);
}

void run_topk_select(NamedCall& call) {
  TopkSelectProblem problem;
  TopkSelectTensors tensors;
  tensors.logits = call.in("logits", "f32 [T, W]");
  tensors.row_len = call.in("row_len", "i32 [T]");
  tensors.row_start = call.opt("row_start", "i32 [T]");
  bind_transform(call, false, problem, tensors);
  call.unused({"page_table", "token_table", "row_to_request", "row_offset"}, "by this transform");
  problem.max_rows = call.extent("T");
  problem.max_width = call.extent("W");
  const TopkSelect plan = call.plan<TopkSelect>(problem);
  tensors.indices = call.out("indices", "i32 [T, K]", NamedCall::Writes::kAll);
  call.run(plan, tensors);
}

void run_index_select(NamedCall& call) {
  IndexSelectProblem problem;
  IndexSelectTensors tensors;
  bind_queries_and_keys(call, problem, tensors);
  bind_transform(call, problem.layout == IndexLayout::kPaged, problem, tensors);
  call.unused({"k_fp8", "k_scale", "k_start", "k_end", "index_pool", "page_table", "token_table",
               "row_to_request", "row_len", "row_offset", "schedule"},
              "by this layout and transform");
  problem.max_width = selection_width(call, problem);
  const IndexSelect plan = call.plan<IndexSelect>(problem);
  tensors.indices = call.out("indices", "i32 [T, K]", NamedCall::Writes::kAll);
  call.run(plan, tensors);
}

}  // namespace fovea::internal
