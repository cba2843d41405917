#include <algorithm>
#include <array>

#include "tests/serving/dsa_random_steps_model.h"

namespace fovea::test {
namespace {

constexpr int64_t kWorkers = 64;  // of the paged-logits schedule
constexpr int64_t kSegment = 256;

int64_t entry(const ConstTensorView& field, int64_t index) {
  return static_cast<const int32_t*>(field.data)[index * field.stride[0]];
}

// `field` holds `live`, then `padding` up to its end; its end is not before that of `live`.
void expect_field(const char* name, const ConstTensorView& field, const std::vector<int64_t>& live,
                  int64_t padding) {
  if (!field.defined()) throw StepFailure(std::string(name) + " is missing");
  if (field.shape[0] < static_cast<int64_t>(live.size())) {
    throw StepFailure(std::string(name) + " has " + std::to_string(field.shape[0]) +
                      " entries, expected at least " + std::to_string(live.size()));
  }
  for (int64_t i = 0; i < field.shape[0]; ++i) {
    const bool inside = i < static_cast<int64_t>(live.size());
    expect_equal(entry(field, i), inside ? live[static_cast<size_t>(i)] : padding, name, i);
  }
}

// Exactly `values`.
void expect_whole(const char* name, const ConstTensorView& field,
                  const std::vector<int64_t>& values) {
  expect_field(name, field, values, 0);
  expect_equal(field.shape[0], static_cast<int64_t>(values.size()), name, -1);
}

void check_page_table(const DsaConfig& config, const ModelStep& step,
                      const ConstTensorView& table) {
  for (size_t r = 0; r < step.work.size(); ++r) {
    const ModelWork& work = step.work[r];
    const int64_t columns = (work.kv_len + config.page_size - 1) / config.page_size;
    if (columns > table.shape[1]) throw StepFailure("page_table has too few columns");
    const auto* const row =
        static_cast<const int32_t*>(table.data) + static_cast<int64_t>(r) * table.stride[0];
    for (int64_t j = 0; j < columns; ++j) {
      const auto column = static_cast<size_t>(j);
      const int64_t expected = work.request < 0 ? 0 : int64_t{work.pages.at(column)};
      expect_equal(row[j * table.stride[1]], expected,
                   ("page_table[" + std::to_string(r) + "]").c_str(), j);
    }
  }
}

// Segments of 256 keys dealt to the workers in order; the last workers take the remainder.
void check_schedule(const std::vector<int64_t>& lens, const ConstTensorView& schedule) {
  std::vector<std::pair<int64_t, int64_t>> segments;  // (row, segment of the row)
  for (size_t r = 0; r < lens.size(); ++r) {
    for (int64_t s = 0; s * kSegment < lens[r]; ++s) segments.emplace_back(r, s);
  }
  const auto count = static_cast<int64_t>(segments.size());
  const auto* const data = static_cast<const int32_t*>(schedule.data);
  expect_equal(schedule.shape[0], kWorkers + 1, "schedule.shape", 0);
  int64_t start = 0;
  for (int64_t worker = 0; worker <= kWorkers; ++worker) {
    std::pair<int64_t, int64_t> expected{static_cast<int64_t>(lens.size()), 0};
    if (worker < kWorkers) {
      expected = count == 0 ? std::pair<int64_t, int64_t>{0, 0}
                            : segments[static_cast<size_t>(std::min(start, count - 1))];
      start += count / kWorkers + (worker >= kWorkers - count % kWorkers ? 1 : 0);
    }
    expect_equal(data[worker * schedule.stride[0]], expected.first, "schedule rows", worker);
    expect_equal(data[worker * schedule.stride[0] + schedule.stride[1]], expected.second,
                 "schedule segments", worker);
  }
}

// What each part of the split plan walks: lines of [parts, 8], and the pieces of each row.
struct SplitWalk {
  std::vector<std::array<int64_t, 8>> parts;
  std::vector<int64_t> pieces;
};

// docs/split_schedule.md: parts fill up with blocks of 64 slots and 5 blocks of overhead a piece.
SplitWalk walk_split(const std::vector<int64_t>& lens, int64_t num_parts) {
  const auto rows = static_cast<int64_t>(lens.size());
  std::vector<int64_t> blocks;
  int64_t cost = 0;
  for (const int64_t len : lens) {
    blocks.push_back(std::max<int64_t>(1, (len + 63) / 64));
    cost += blocks.back() + 5;
  }
  const int64_t cap = (cost + num_parts - 1) / num_parts + 5;
  SplitWalk walk;
  walk.pieces.assign(lens.size(), 0);
  int64_t row = 0, block = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    if (row == rows) {
      walk.parts.push_back({rows, rows - 1, 0, 0, 0, 0, 0, 0});
      continue;
    }
    std::array<int64_t, 8> line{row, row, block, 0, walk.pieces[static_cast<size_t>(row)], 0, 0, 0};
    for (int64_t budget = cap; row < rows;) {
      const auto at = static_cast<size_t>(row);
      const int64_t rest = blocks[at] - block;
      const int64_t taken = budget >= rest + 5 ? rest : std::max<int64_t>(0, budget - 5);
      if (taken == 0) break;
      ++walk.pieces[at];
      line[1] = row;
      line[3] = block + taken;
      budget -= taken + 5;
      block += taken;
      if (taken < rest) break;
      ++row;
      block = 0;
    }
    walk.parts.push_back(line);
  }
  for (std::array<int64_t, 8>& line : walk.parts) {
    if (line[0] == rows) continue;
    line[5] = walk.pieces[static_cast<size_t>(line[0])] > 1 ? 1 : 0;
    line[6] = walk.pieces[static_cast<size_t>(line[1])] > 1 ? 1 : 0;
  }
  return walk;
}

void check_split(const DsaConfig& config, std::vector<int64_t> topk_length,
                 const MetadataFields& fields) {
  if (!fields.split_schedule.defined() || !fields.split_indptr.defined()) {
    throw StepFailure("split_schedule is missing");
  }
  topk_length.resize(static_cast<size_t>(fields.split_indptr.shape[0] - 1), 0);
  const SplitWalk walk = walk_split(topk_length, config.split_parts);
  std::vector<int64_t> indptr{0};
  for (const int64_t pieces : walk.pieces) indptr.push_back(indptr.back() + pieces);
  expect_whole("split_indptr", fields.split_indptr, indptr);
  expect_equal(fields.split_schedule.shape[0], config.split_parts, "split_schedule.shape", 0);
  for (int64_t part = 0; part < config.split_parts; ++part) {
    for (int64_t column = 0; column < 8; ++column) {
      expect_equal(static_cast<const int32_t*>(
                       fields.split_schedule.data)[part * fields.split_schedule.stride[0] + column],
                   walk.parts[static_cast<size_t>(part)][static_cast<size_t>(column)],
                   ("split_schedule[" + std::to_string(part) + "]").c_str(), column);
    }
  }
}

}  // namespace

int64_t ModelStep::live_rows() const {
  int64_t rows = 0;
  for (const ModelWork& entry : work) rows += entry.rows;
  return rows;
}

void check_metadata(const DsaConfig& config, const ModelStep& step, const MetadataFields& fields,
                    bool ragged) {
  const bool extend = step.mode == ForwardMode::kExtend || step.mode == ForwardMode::kMixed;
  const auto requests = static_cast<int64_t>(step.work.size());
  std::vector<int64_t> kv_len, ext_len, row_len, topk_length, row_to_request, k_start, k_end;
  std::vector<int64_t> kv_indptr{0}, q_indptr{0}, topk_indptr{0};
  int64_t max_kv_len = 0, max_q_len = extend ? 1 : 0;
  for (int64_t r = 0; r < requests; ++r) {
    const ModelWork& work = step.work[static_cast<size_t>(r)];
    for (int64_t i = 0; i < work.rows; ++i) {
      row_to_request.push_back(r);
      row_len.push_back(work.row_len(i));
      topk_length.push_back(std::clamp<int64_t>(work.row_len(i), 0, config.topk));
      topk_indptr.push_back(topk_indptr.back() + topk_length.back());
      k_start.push_back(kv_indptr.back());
      k_end.push_back(kv_indptr.back() + work.row_len(i));
    }
    kv_len.push_back(work.kv_len);
    ext_len.push_back(work.rows);
    kv_indptr.push_back(kv_indptr.back() + work.kv_len);
    q_indptr.push_back(q_indptr.back() + work.rows);
    max_kv_len = std::max(max_kv_len, work.kv_len);
    max_q_len = std::max(max_q_len, work.rows);
  }
  expect_whole("kv_len", fields.kv_len, kv_len);
  expect_whole("kv_indptr", fields.kv_indptr, kv_indptr);
  expect_whole("max_kv_len", fields.max_kv_len, {max_kv_len});
  expect_whole("q_indptr", fields.q_indptr, q_indptr);
  expect_whole("max_q_len", fields.max_q_len, {max_q_len});
  expect_whole("ext_len", fields.ext_len, ext_len);
  check_page_table(config, step, fields.page_table);
  expect_field("row_to_request", fields.row_to_request, row_to_request, -1);
  expect_field("row_len", fields.row_len, row_len, 0);
  expect_field("topk_length", fields.topk_length, topk_length, 0);
  expect_field("topk_indptr", fields.topk_indptr, topk_indptr, topk_indptr.back());
  const int64_t padded = std::max(step.num_rows, step.padded_rows);
  if (fields.topk_length.shape[0] < padded) throw StepFailure("topk_length lacks padded rows");
  expect_equal(fields.topk_indptr.shape[0], fields.topk_length.shape[0] + 1, "topk_indptr.shape",
               0);
  // The plan of a bucket covers all its rows, the fields of a draft-extend the live ones.
  const bool cut = step.has_plan && step.mode == ForwardMode::kDraftExtend;
  if (config.split_parts > 0 && !cut) check_split(config, topk_length, fields);
  if (extend) {
    expect_field("k_start", fields.k_start, k_start, 0);
    expect_field("k_end", fields.k_end, k_end, 0);
    if (ragged) expect_field("row_offset", fields.row_offset, k_start, 0);
    return;
  }
  check_schedule(row_len, fields.schedule);
}

}  // namespace fovea::test
