// Calls by name: the operators of the room batch.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "fovea/context_split.h"
#include "fovea/metadata.h"
#include "fovea/metadata_check.h"
#include "src/binding/bindings.h"

namespace fovea::internal {
namespace {

bool is_extend(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
}

bool reads_ext_len(ForwardMode mode) {
  return is_extend(mode) || mode == ForwardMode::kDraftExtend;
}

bool has_fixed_rows(ForwardMode mode) {
  return mode == ForwardMode::kTargetVerify || mode == ForwardMode::kDraftExtendV2;
}

ForwardMode mode_param(NamedCall& call) {
  return call.choice<ForwardMode>("mode", {{"extend", ForwardMode::kExtend},
                                           {"decode", ForwardMode::kDecode},
                                           {"idle", ForwardMode::kIdle},
                                           {"target_verify", ForwardMode::kTargetVerify},
                                           {"draft_extend", ForwardMode::kDraftExtend},
                                           {"draft_extend_v2", ForwardMode::kDraftExtendV2},
                                           {"mixed", ForwardMode::kMixed}});
}

// N, which only modes with a fixed number of rows require.
int64_t rows_per_request_param(NamedCall& call, ForwardMode mode) {
  if (has_fixed_rows(mode)) return call.integer("rows_per_request");
  call.integer("rows_per_request", 1);
  return 1;
}

// kv_len_delta, which the library takes as int32.
int32_t delta_param(NamedCall& call) {
  const int64_t delta = call.integer("kv_len_delta", 0);
  constexpr int64_t kMaxDelta = std::numeric_limits<int32_t>::max();
  if (delta > kMaxDelta || delta < -kMaxDelta) {
    call.refuse("params.kv_len_delta = " + std::to_string(delta) + " is not an int32");
  }
  return static_cast<int32_t>(delta);
}

// The axes E (rows of the batch) and T (padded rows).
void set_row_axes(NamedCall& call, const MetadataProblem& problem, MetadataTensors& tensors) {
  const int64_t requests = call.extent("R");
  int64_t rows = requests;
  if (has_fixed_rows(problem.mode)) {
    if (__builtin_mul_overflow(requests, problem.rows_per_request, &rows)) {
      call.refuse("rows_per_request = " + std::to_string(problem.rows_per_request) +
                  " is too large");
    }
  } else if (reads_ext_len(problem.mode)) {
    rows = 0;
    for (int64_t r = 0; r < requests; ++r) {
      rows += std::max<int64_t>(call.values("ext_len")[r], 0);
    }
  }
  call.set_extent("E", rows, "the number of rows");
  const int64_t padded = call.integer("padded_rows", 0);
  if (padded != 0 && padded < rows) {
    call.refuse("params.padded_rows = " + std::to_string(padded) + ", expected 0 or at least the " +
                std::to_string(rows) + " rows of the batch");
  }
  tensors.padded_rows = padded;
  call.set_extent("T", padded == 0 ? rows : padded, "padded_rows");
}

// The axis C: columns of the page table, for the longest request as far as the table reaches.
void set_page_axis(NamedCall& call, const MetadataProblem& problem,
                   const MetadataTensors& tensors) {
  int64_t longest = 0;
  for (int64_t r = 0; r < call.extent("R"); ++r) {
    int64_t len = call.values("seq_len")[r];
    if (problem.mode == ForwardMode::kTargetVerify) len += problem.rows_per_request;
    len += tensors.kv_len_delta[0];
    longest = std::max(longest, std::min(len, problem.table_width));
  }
  call.set_extent("C", (longest + problem.page_size - 1) / problem.page_size, "the page count");
}

void make_fields(NamedCall& call, const MetadataProblem& problem, MetadataFields& fields) {
  fields.kv_len = call.out("kv_len", "i32 [R]");
  fields.kv_indptr = call.out("kv_indptr", "i32 [R+1]");
  fields.max_kv_len = call.out("max_kv_len", "i32 [1]");
  fields.q_indptr = call.out("q_indptr", "i32 [R+1]");
  fields.max_q_len = call.out("max_q_len", "i32 [1]");
  fields.page_table = call.out("page_table", "i32 [R, C]");
  fields.row_to_request = call.out("row_to_request", "i32 [T]");
  fields.row_len = call.out("row_len", "i32 [E]");
  fields.topk_length = call.out("topk_length", "i32 [T]");
  fields.topk_indptr = call.out("topk_indptr", "i32 [T+1]");
  fields.ext_len = call.out("ext_len", "i32 [R]");
  if (problem.split_parts > 0) {
    call.set_extent("split_parts", problem.split_parts, "params.split_parts");
    fields.split_schedule = call.out("split_schedule", "i32 [split_parts, 8]");
    fields.split_indptr = call.out("split_indptr", "i32 [T+1]");
  }
  if (!is_extend(problem.mode)) {
    call.set_extent("workers", problem.workers, "params.workers");
    fields.schedule = call.out("schedule", "i32 [workers+1, 2]");
    return;
  }
  fields.k_start = call.out("k_start", "i32 [E]");
  fields.k_end = call.out("k_end", "i32 [E]");
  if (problem.transform == IndexTransform::kRagged) {
    fields.row_offset = call.out("row_offset", "i32 [E]");
  }
}

// A parameter that the library takes as int.
int int_param(NamedCall& call, const std::string& name) {
  const int64_t value = call.integer(name);
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    call.refuse("params." + name + " = " + std::to_string(value) + " is not an int32");
  }
  return static_cast<int>(value);
}

}  // namespace

void run_metadata_refresh(NamedCall& call) {
  MetadataProblem problem;
  problem.mode = mode_param(call);
  problem.transform = call.choice<IndexTransform>("transform",
                                                  {{"paged", IndexTransform::kPaged},
                                                   {"local", IndexTransform::kLocal},
                                                   {"ragged", IndexTransform::kRagged}},
                                                  IndexTransform::kPaged);
  problem.topk = call.integer("topk");
  problem.page_size = call.integer("page_size");
  problem.workers = call.integer("workers", 64);
  problem.split_parts = call.integer("split_parts", 0);
  problem.rows_per_request = rows_per_request_param(call, problem.mode);

  MetadataTensors tensors;
  tensors.seq_len = call.in("seq_len", "i32 [R]");
  tensors.pool_row = call.in("pool_row", "i32 [R]");
  tensors.req_to_token = call.in("req_to_token", "i32 [rows, W]");
  if (reads_ext_len(problem.mode)) {
    tensors.ext_len = call.in("ext_len", "i32 [R]");
    tensors.prefix_len = call.opt("prefix_len", "i32 [R]");
  } else {
    call.unused({"ext_len", "prefix_len"}, "in this mode");
  }
  tensors.kv_len_delta[0] = delta_param(call);
  problem.table_width = call.extent("W");
  set_row_axes(call, problem, tensors);
  problem.max_requests = call.extent("R");
  problem.max_rows = call.extent("T");
  const MetadataRefresh plan = call.plan<MetadataRefresh>(problem);
  set_page_axis(call, problem, tensors);
  make_fields(call, problem, tensors.steps[0]);
  call.run(plan, tensors);
}

void run_metadata_check(NamedCall& call) {
  MetadataCheckProblem problem;
  problem.mode = mode_param(call);
  problem.page_size = call.integer("page_size");
  problem.capacity = call.integer("capacity");
  problem.rows_per_request = rows_per_request_param(call, problem.mode);
  problem.max_rows = call.integer("max_rows", std::numeric_limits<int32_t>::max() - 1);
  MetadataCheckTensors tensors;
  tensors.seq_len = call.in("seq_len", "i32 [R]");
  tensors.pool_row = call.in("pool_row", "i32 [R]");
  tensors.req_to_token = call.in("req_to_token", "i32 [rows, W]");
  if (reads_ext_len(problem.mode)) {
    tensors.ext_len = call.in("ext_len", "i32 [R]");
  } else {
    call.unused({"ext_len"}, "in this mode");
  }
  tensors.out_cache_loc = call.opt("out_cache_loc", "i32 [T]");
  tensors.topk_indices = call.opt("topk_indices", "i32 [?, K]");
  tensors.kv_len_delta = delta_param(call);
  problem.max_requests = call.extent("R");
  problem.table_width = call.extent("W");
  problem.topk = tensors.topk_indices.defined() ? call.extent("K") : 0;
  const MetadataCheck plan = call.plan<MetadataCheck>(problem);
  tensors.error_word = call.out("error_word", "i32 [8]");
  call.run(plan, tensors);
}

void run_paged_schedule(NamedCall& call) {
  PagedScheduleTensors tensors;
  tensors.row_len = call.in("row_len", "i32 [T]");
  PagedScheduleProblem problem;
  problem.max_rows = call.extent("T");
  problem.workers = call.integer("workers", 64);
  problem.rows_per_group = call.integer("rows_per_group", 1);
  call.set_extent("workers", problem.workers, "params.workers");
  const PagedSchedule plan = call.plan<PagedSchedule>(problem);
  tensors.schedule = call.out("schedule", "i32 [workers+1, 2]");
  call.run(plan, tensors);
}

void run_context_split(NamedCall& call) {
  const auto lengths = [&](const char* name) {
    call.in(name, "i32 [R]");
    return std::span<const int32_t>(call.values(name), static_cast<size_t>(call.extent("R")));
  };
  const auto seq_len = lengths("seq_len");
  const auto ext_len = lengths("ext_len");
  const ConstTensorView prefix_len = call.opt("prefix_len", "i32 [R]");
  ContextSplitProblem problem;
  problem.scheme = call.choice<ContextScheme>(
      "scheme", {{"round_robin", ContextScheme::kRoundRobin}, {"zigzag", ContextScheme::kZigzag}});
  problem.extend_kv_source = call.choice<ExtendKvSource>(
      "extend_kv_source", {{"cache", ExtendKvSource::kCache}, {"fresh", ExtendKvSource::kFresh}},
      ExtendKvSource::kCache);
  problem.ranks = int_param(call, "ranks");
  problem.rank = int_param(call, "rank");
  call.plan_host_function();
  const ContextSplit split = context_split(problem, seq_len, ext_len);
  for (size_t i = 0; prefix_len.defined() && i < seq_len.size(); ++i) {
    if (call.values("prefix_len")[i] == seq_len[i] - ext_len[i]) continue;
    call.refuse("request " + std::to_string(i) +
                ": prefix_len = " + std::to_string(call.values("prefix_len")[i]) +
                ", expected seq_len - ext_len = " + std::to_string(seq_len[i] - ext_len[i]));
  }
  std::vector<std::pair<std::string, std::span<const int32_t>>> lists = {
      {"rank_rows", split.rank_rows}, {"row_len", split.row_len}, {"kv_len", split.kv_len}};
  if (problem.scheme == ContextScheme::kZigzag) {
    lists.emplace_back("block_len", split.block_len);
  } else {
    lists.emplace_back("selected", split.selected);
    lists.emplace_back("ext_len", split.ext_len);
    lists.emplace_back("kv_indptr", split.kv_indptr);
    lists.emplace_back("q_indptr", split.q_indptr);
    lists.emplace_back("k_start", split.k_start);
    lists.emplace_back("k_end", split.k_end);
    lists.emplace_back("row_to_request", split.row_to_request);
    lists.emplace_back("row_offset", split.row_offset);
  }
  call.out_lists(lists);
}

void run_split_schedule(NamedCall& call) {
  SplitScheduleTensors tensors;
  tensors.topk_length = call.in("topk_length", "i32 [T]");
  SplitScheduleProblem problem;
  problem.max_rows = call.extent("T");
  problem.parts = call.integer("parts", 64);
  call.set_extent("parts", problem.parts, "params.parts");
  const SplitSchedule plan = call.plan<SplitSchedule>(problem);
  tensors.split_schedule = call.out("split_schedule", "i32 [parts, 8]");
  tensors.split_indptr = call.out("split_indptr", "i32 [T+1]");
  call.run(plan, tensors);
}

}  // namespace fovea::internal
