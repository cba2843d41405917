// fovea verify: problems of the room batch.

#include <algorithm>

#include "cli/verify_cases.h"

namespace fovea::cli {
namespace {

// A request table whose pages are whole and aligned, as an engine makes it.
void add_requests(CaseBuilder& builder, int64_t requests, int64_t width, int64_t page_size) {
  const int64_t table_rows = requests + 3;
  builder.integers("req_to_token", {table_rows, width}, 0, 0);
  for (int64_t row = 0; row < table_rows; ++row) {
    for (int64_t p = 0; p < width; p += page_size) {
      const int64_t page = builder.random().integer(1, 100000);
      for (int64_t i = p; i < std::min(p + page_size, width); ++i) {
        builder.at<int32_t>("req_to_token", row * width + i) =
            static_cast<int32_t>(page * page_size + i - p);
      }
    }
  }
  builder.integers("pool_row", {requests}, 0, table_rows - 1);
}

VerifyCase make_metadata_case(const std::string& mode, int64_t requests, int64_t page_size,
                              bool is_hostile, uint64_t seed) {
  const int64_t width = 300;
  CaseBuilder builder(mode + "_" + std::to_string(requests) + "x" + std::to_string(page_size) +
                          (is_hostile ? "_hostile" : ""),
                      seed);
  add_requests(builder, requests, width, page_size);
  builder.integers("seq_len", {requests}, 4, width - 4);
  builder.param("mode", mode).param("topk", 16).param("page_size", page_size).param("workers", 5);
  const bool reads_ext_len = mode == "extend" || mode == "mixed" || mode == "draft_extend";
  if (reads_ext_len) {
    builder.integers("ext_len", {requests}, 0, 4);
    if (mode == "extend") builder.param("transform", "ragged");
  } else if (mode != "decode" && mode != "idle") {
    builder.param("rows_per_request", 3);
  } else if (mode == "decode") {
    builder.param("kv_len_delta", 2);
  }
  if (is_hostile) {
    make_hostile(builder, "seq_len", 0.2);
    make_hostile(builder, "pool_row", 0.2);
    make_hostile(builder, "req_to_token", 0.05);
    if (reads_ext_len) builder.at<int32_t>("ext_len", 0) = -7;
  } else {
    builder.param("padded_rows", requests * 4 + 2);
  }
  return builder.take();
}

std::vector<VerifyCase> make_metadata_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* mode :
       {"extend", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2", "mixed"}) {
    cases.push_back(make_metadata_case(mode, 5, 64, false, seed));
    cases.push_back(make_metadata_case(mode, 17, 1, false, seed));
    cases.push_back(make_metadata_case(mode, 9, 7, true, seed));
  }
  cases.push_back(make_metadata_case("decode", 0, 4, false, seed));
  cases.push_back(make_metadata_case("extend", 0, 4, false, seed));
  return cases;
}

// Columns of page_table past a request's pages are not written.
void normalise_metadata(const TensorMap&, const Json& params, TensorMap& outputs) {
  const TensorView page_table = outputs.find("page_table");
  const ConstTensorView kv_len = outputs.find("kv_len");
  if (!page_table.defined() || !kv_len.defined()) return;
  const int64_t page_size = params.find("page_size")->as_integer();
  for (int64_t r = 0; r < page_table.shape[0]; ++r) {
    const int64_t len = static_cast<const int32_t*>(kv_len.data)[r];
    for (int64_t j = (len + page_size - 1) / page_size; j < page_table.shape[1]; ++j) {
      static_cast<int32_t*>(page_table.data)[r * page_table.stride[0] + j] = 0;
    }
  }
}

std::vector<VerifyCase> make_schedule_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(
      CaseBuilder("example", seed).list("row_len", {1000, 300, 700}).param("workers", 4).take());
  cases.push_back(CaseBuilder("no_rows", seed).list("row_len", {}).take());
  cases.push_back(CaseBuilder("all_empty", seed).list("row_len", {0, -1, 0, -2000000000}).take());
  cases.push_back(CaseBuilder("groups", seed)
                      .integers("row_len", {24}, 0, 5000)
                      .param("rows_per_group", 3)
                      .param("workers", 7)
                      .take());
  CaseBuilder many("hostile", seed);
  many.integers("row_len", {1000}, -5, 100000).param("workers", 132);
  make_hostile(many, "row_len", 0.1);
  cases.push_back(many.take());
  return cases;
}

}  // namespace

void add_verify_batch(std::vector<VerifyOperator>& list) {
  list.push_back({"metadata_refresh", make_metadata_cases, {}, normalise_metadata});
  list.push_back({"paged_schedule", make_schedule_cases, {}, nullptr});
}

}  // namespace fovea::cli
