// fovea verify: problems of the room batch.

#include <algorithm>
#include <map>
#include <set>

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
  builder.param("split_parts", 3);
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

VerifyCase make_check_case(const std::string& mode, const std::string& damaged, uint64_t seed) {
  const int64_t width = 90, page_size = 8, requests = 21, rows_of_request = 2;
  CaseBuilder builder(mode + "_" + damaged, seed);
  add_requests(builder, requests, width, page_size);
  builder.integers("seq_len", {requests}, 4, width - 4);
  builder.integers("out_cache_loc", {requests * rows_of_request}, -1, 800000);
  builder.integers("topk_indices", {requests * rows_of_request, 16}, -1, 800000);
  builder.param("mode", mode).param("page_size", page_size).param("capacity", 800008);
  const bool reads_ext_len = mode == "extend" || mode == "mixed" || mode == "draft_extend";
  if (reads_ext_len) {
    builder.integers("ext_len", {requests}, 0, rows_of_request);
  } else if (mode != "decode" && mode != "idle") {
    builder.param("rows_per_request", rows_of_request);
  } else if (mode == "decode") {
    builder.param("kv_len_delta", 2);
  }
  if (!damaged.empty() && builder.tensor(damaged).defined()) make_hostile(builder, damaged, 0.05);
  return builder.take();
}

std::vector<VerifyCase> make_check_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  for (const char* mode :
       {"extend", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2", "mixed"}) {
    for (const char* damaged :
         {"", "seq_len", "pool_row", "ext_len", "req_to_token", "out_cache_loc", "topk_indices"}) {
      cases.push_back(make_check_case(mode, damaged, seed));
    }
  }
  return cases;
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

VerifyCase make_split_case(const std::string& name, const std::vector<int32_t>& prefix_len,
                           const std::vector<int32_t>& ext_len, int ranks, int rank,
                           const std::string& source, uint64_t seed) {
  CaseBuilder builder(name + "_" + std::to_string(rank) + "of" + std::to_string(ranks), seed);
  std::vector<int32_t> seq_len = ext_len;
  for (size_t i = 0; i < seq_len.size(); ++i) seq_len[i] += prefix_len[i];
  builder.list("seq_len", seq_len).list("ext_len", ext_len).list("prefix_len", prefix_len);
  builder.param("ranks", ranks).param("rank", rank);
  if (!source.empty()) builder.param("extend_kv_source", source);
  return builder.param("scheme", source.empty() ? "zigzag" : "round_robin").take();
}

std::vector<VerifyCase> make_split_cases(uint64_t seed) {
  CaseRandom random(seed);
  std::vector<VerifyCase> cases;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    std::vector<int32_t> prefix_len, ext_len;
    for (int i = 0; i < 5; ++i) {
      prefix_len.push_back(static_cast<int32_t>(random.integer(0, 40)));
      ext_len.push_back(static_cast<int32_t>(random.integer(0, 6)));
    }
    const auto rows = static_cast<int32_t>(random.integer(2 * ranks, 50));
    for (const int rank : std::set{0, ranks / 2, ranks - 1}) {
      cases.push_back(make_split_case("cache", prefix_len, ext_len, ranks, rank, "cache", seed));
      cases.push_back(make_split_case("fresh", prefix_len, ext_len, ranks, rank, "fresh", seed));
      cases.push_back(make_split_case("few", {3}, {2}, ranks, rank, "cache", seed));
      cases.push_back(make_split_case("empty", {}, {}, ranks, rank, "fresh", seed));
      cases.push_back(make_split_case("zigzag", {9}, {rows}, ranks, rank, "", seed));
    }
  }
  return cases;
}

// A split row by row: every row of the batch is asked where it belongs.
struct SplitWalk {
  std::map<std::string, std::vector<int32_t>> arrays;

  std::vector<int32_t>& operator[](const std::string& name) { return arrays[name]; }
  void add_row(int64_t row, int64_t position) {
    arrays["rank_rows"].push_back(static_cast<int32_t>(row));
    arrays["row_len"].push_back(static_cast<int32_t>(position + 1));
  }
};

void walk_round_robin(const std::vector<int32_t>& prefix_len, const std::vector<int32_t>& ext_len,
                      int64_t ranks, int64_t rank, bool is_fresh, SplitWalk* walk) {
  SplitWalk& out = *walk;
  for (const char* name : {"rank_rows", "row_len", "selected", "ext_len", "kv_len", "k_start",
                           "k_end", "row_to_request", "row_offset"}) {
    out[name] = {};
  }
  out["kv_indptr"] = out["q_indptr"] = {0};
  int64_t row = 0;
  int32_t all_keys = 0, selected_keys = 0;
  for (size_t i = 0; i < ext_len.size(); ++i) {
    const int32_t request = static_cast<int32_t>(out["selected"].size());
    int32_t count = 0;
    for (int32_t k = 0; k < ext_len[i]; ++k, ++row) {
      if (row % ranks != rank) continue;
      ++count;
      out.add_row(row, prefix_len[i] + k);
      out["k_start"].push_back(selected_keys);
      out["k_end"].push_back(selected_keys + prefix_len[i] + k + 1);
      out["row_to_request"].push_back(request);
      out["row_offset"].push_back(is_fresh ? all_keys : selected_keys);
    }
    all_keys += prefix_len[i] + ext_len[i];
    if (count == 0) continue;
    selected_keys += prefix_len[i] + ext_len[i];
    out["selected"].push_back(static_cast<int32_t>(i));
    out["ext_len"].push_back(count);
    out["kv_len"].push_back(prefix_len[i] + ext_len[i]);
    out["kv_indptr"].push_back(selected_keys);
    out["q_indptr"].push_back(out["q_indptr"].back() + count);
  }
}

void walk_zigzag(int32_t prefix_len, int32_t ext_len, int64_t ranks, int64_t rank,
                 SplitWalk* walk) {
  SplitWalk& out = *walk;
  int32_t row = 0;
  for (int64_t block = 0; block < 2 * ranks; ++block) {
    const auto len = static_cast<int32_t>(ext_len / (2 * ranks) + (block < ext_len % (2 * ranks)));
    out["block_len"].push_back(len);
    const bool is_mine = block == rank || block == 2 * ranks - 1 - rank;
    for (int32_t k = 0; k < len; ++k, ++row) {
      if (is_mine) out.add_row(row, prefix_len + row);
    }
    if (is_mine) out["kv_len"].push_back(prefix_len + row);
  }
}

TensorMap walk_split(const VerifyCase& verify_case) {
  const auto list = [&](const std::string& name) {
    const ConstTensorView tensor = verify_case.inputs.find(name);
    const auto* data = static_cast<const int32_t*>(tensor.data);
    return std::vector<int32_t>(data, data + tensor.num_elements());
  };
  const Json& params = verify_case.params;
  const int64_t ranks = params.find("ranks")->as_integer();
  const int64_t rank = params.find("rank")->as_integer();
  const std::vector<int32_t> prefix_len = list("prefix_len"), ext_len = list("ext_len");
  SplitWalk walk;
  if (params.find("scheme")->as_string() == "zigzag") {
    walk_zigzag(prefix_len[0], ext_len[0], ranks, rank, &walk);
  } else {
    const bool is_fresh = params.find("extend_kv_source")->as_string() == "fresh";
    walk_round_robin(prefix_len, ext_len, ranks, rank, is_fresh, &walk);
  }
  TensorMap outputs;
  for (const auto& [name, values] : walk.arrays) {
    const TensorView tensor = outputs.add(name, DType::kI32, {static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(tensor.data));
  }
  return outputs;
}

std::vector<VerifyCase> make_split_schedule_cases(uint64_t seed) {
  std::vector<VerifyCase> cases;
  cases.push_back(
      CaseBuilder("example", seed).list("topk_length", {1000, 300, 700}).param("parts", 4).take());
  cases.push_back(CaseBuilder("no_rows", seed).list("topk_length", {}).take());
  cases.push_back(CaseBuilder("all_empty", seed).list("topk_length", {0, -1, 0, 0}).take());
  cases.push_back(CaseBuilder("one_row", seed).list("topk_length", {2048}).take());
  CaseBuilder many("hostile", seed);
  many.integers("topk_length", {1000}, -5, 5000).param("parts", 132);
  make_hostile(many, "topk_length", 0.1);
  cases.push_back(many.take());
  return cases;
}

}  // namespace

void add_verify_batch(std::vector<VerifyOperator>& list) {
  list.push_back({"metadata_refresh", make_metadata_cases, {}, normalise_metadata});
  list.push_back({"metadata_check", make_check_cases, {}, nullptr});
  list.push_back({"paged_schedule", make_schedule_cases, {}, nullptr});
  list.push_back({"context_split", make_split_cases, {}, nullptr, walk_split});
  list.push_back({"split_schedule", make_split_schedule_cases, {}, nullptr, nullptr});
}

}  // namespace fovea::cli
