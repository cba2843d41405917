#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "bench/cases.h"
#include "bench/operator_case.h"
#include "bench/out_lse.h"
#include "fovea/dense_mla.h"
#include "fovea/merge_lse.h"
#include "fovea/metadata.h"
#include "fovea/mha_varlen.h"
#include "fovea/numeric.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"

namespace fovea::bench {
namespace {

constexpr int64_t kPoolRows = 65536;
constexpr int64_t kPageSize = 64;

double as_double(int64_t value) { return static_cast<double>(value); }

// ---- sparse_mla: K latent rows per query row, distinct and unordered, of the region that belongs
// to its request.

class SparseMlaCase : public OperatorCase<SparseMla, OutLse> {
 public:
  SparseMlaCase(const SparseMlaProblem& problem, const LatentPool& pool)
      : OperatorCase(problem), pool_rows_(pool.regions * pool.region_rows) {
    Generator generator(11);
    const int64_t width = problem.head_dim_qk;
    q_ = normal_bf16(&generator, {problem.max_rows, problem.num_heads, width});
    kv_ = normal_bf16(&generator, {std::min(pool_rows_, kPoolRows), width});
    if (problem.row_format == RowFormat::kV32) pack_pool();
    if (problem.row_format == RowFormat::kF576) encode_pool();
    if (pool_rows_ > kPoolRows) repeat_pool();
    std::vector<int32_t> slots;
    std::vector<bool> listed(static_cast<size_t>(pool_rows_), false);
    const std::vector<int32_t> pages = permutation(&generator, pool_rows_ / kPageSize);
    for (int64_t t = 0; t < problem.max_rows; ++t) {
      const int64_t region = t / pool.rows_per_request % pool.regions;
      for (const int32_t token : distinct(&generator, problem.topk, pool.region_rows)) {
        const int64_t row = region * pool.region_rows + token;
        const int64_t slot =
            pages[static_cast<size_t>(row / kPageSize)] * kPageSize + row % kPageSize;
        slots.push_back(static_cast<int32_t>(slot));
        listed[static_cast<size_t>(slot)] = true;
      }
    }
    indices_ = from_i32(slots, {problem.max_rows, problem.topk});
    if (problem.split_parts > 0) plan_parts();
    const bool bf16 = problem.row_format == RowFormat::kBf16;
    const int64_t row_bytes = bf16 ? 2 * width : problem.row_format == RowFormat::kV32 ? 656 : 576;
    // A pool row that several query rows list has to come from memory once.
    const auto distinct_rows = std::count(listed.begin(), listed.end(), true);
    work_.flops =
        2.0 * as_double((width + 512) * problem.max_rows * problem.num_heads * problem.topk);
    work_.bytes_read = as_double(distinct_rows * row_bytes + q_.bytes() + indices_.bytes());
    work_.bytes_written = as_double(make_outputs().bytes());
    work_.traffic = bf16 ? Traffic::kGather1152 : Traffic::kGather656;
  }

 private:
  void pack_pool() {
    const int64_t rows = kv_.view().shape[0];
    std::vector<int32_t> slots(static_cast<size_t>(rows));
    std::iota(slots.begin(), slots.end(), 0);
    const OwnedTensor slot_list = from_i32(slots, {rows});
    OwnedTensor pool(DType::kU8, {rows / kPageSize, kPageSize * 656});
    RowCodecProblem codec;
    codec.max_rows = rows;
    codec.row_format = RowFormat::kV32;
    codec.page_size = kPageSize;
    codec.width = 576;
    const PackRows plan = PackRows::plan(codec, Device::cpu());
    HostBuffer workspace(plan.workspace_bytes());
    plan.run({kv_, slot_list, pool}, workspace.workspace());
    kv_ = std::move(pool);
  }

  // The codes of the rows with k_scale 1.
  void encode_pool() {
    const int64_t rows = kv_.view().shape[0];
    OwnedTensor pool(DType::kU8, {rows / kPageSize, kPageSize * 576});
    const auto* from = static_cast<const bf16_t*>(kv_.view().data);
    auto* to = static_cast<uint8_t*>(pool.view().data);
    for (int64_t i = 0; i < rows * 576; ++i) to[i] = e4m3_from_float(bf16_to_float(from[i]));
    kv_ = std::move(pool);
  }

  void repeat_pool() {
    const int64_t rows =
        problem_.row_format == RowFormat::kBf16 ? pool_rows_ : pool_rows_ / kPageSize;
    kv_ = repeated(kv_, {rows, kv_.view().shape[1]});
  }

  // The split plan of rows of K slots each.
  void plan_parts() {
    const int64_t rows = problem_.max_rows;
    const OwnedTensor lengths = filled_i32({rows}, static_cast<int32_t>(problem_.topk));
    schedule_ = OwnedTensor(DType::kI32, {problem_.split_parts, 8});
    split_indptr_ = OwnedTensor(DType::kI32, {rows + 1});
    const SplitSchedule plan = SplitSchedule::plan({rows, problem_.split_parts}, Device::cpu());
    HostBuffer workspace(plan.workspace_bytes());
    plan.run({lengths, schedule_, split_indptr_}, workspace.workspace());
  }

  OutLse make_outputs() const override {
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, problem_.num_heads, kLatentDim}),
            OwnedTensor(DType::kF32, {problem_.max_rows, problem_.num_heads})};
  }
  SparseMlaTensors tensors(OutLse* outputs) override {
    SparseMlaTensors result;
    result.q = q_;
    result.kv = kv_;
    result.indices = indices_;
    result.split_schedule = schedule_;
    result.split_indptr = split_indptr_;
    result.out = outputs->out;
    result.lse = outputs->lse;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  SparseMlaTensors row_of(const SparseMlaTensors& full, int64_t row) override {
    SparseMlaTensors part = full;
    part.q = slice_rows(full.q, row, row + 1);
    part.indices = slice_rows(full.indices, row, row + 1);
    // The reference does not follow a plan.
    if (problem_.split_parts > 0) part.split_indptr = slice_rows(full.split_indptr, 0, 2);
    part.out = slice_rows(full.out, row, row + 1);
    part.lse = slice_rows(full.lse, row, row + 1);
    return part;
  }
  std::string difference(const SparseMlaTensors& actual,
                         const SparseMlaTensors& reference) override {
    return out_lse_difference(actual, reference, attention_tolerance(implementation_));
  }

  int64_t pool_rows_;
  OwnedTensor q_, kv_, indices_, schedule_, split_indptr_;
};

// ---- dense_mla: equal requests, each with its own pages.

class DenseMlaCase : public OperatorCase<DenseMla, OutLse> {
 public:
  DenseMlaCase(const DenseMlaProblem& problem, int64_t keys) : OperatorCase(problem) {
    Generator generator(14);
    const int64_t requests = problem.max_requests, rows = problem.max_rows / requests;
    const int64_t pages = problem.max_pages;
    q_ = normal_bf16(&generator, {problem.max_rows, problem.num_heads, 576});
    kv_ = normal_bf16(&generator, {requests * pages, kPageSize, 1, 576});
    page_table_ =
        from_i32(distinct(&generator, requests * pages, requests * pages), {requests, pages});
    kv_len_ = filled_i32({requests}, static_cast<int32_t>(keys));
    std::vector<int32_t> offsets;
    for (int64_t r = 0; r <= requests; ++r) offsets.push_back(static_cast<int32_t>(r * rows));
    q_indptr_ = from_i32(offsets, {requests + 1});
    const int64_t seen = rows * keys - rows * (rows - 1) / 2;  // of a request
    work_.flops = 2.0 * (576 + 512) * as_double(requests * seen * problem.num_heads);
    work_.bytes_read = as_double(requests * keys * 1152 + q_.bytes());
    work_.bytes_written = as_double(make_outputs().bytes());
    work_.traffic = Traffic::kGather1152;
  }

 private:
  OutLse make_outputs() const override {
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, problem_.num_heads, kLatentDim}),
            OwnedTensor(DType::kF32, {problem_.max_rows, problem_.num_heads})};
  }
  DenseMlaTensors tensors(OutLse* outputs) override {
    return {q_, kv_, page_table_, kv_len_, q_indptr_, outputs->out, outputs->lse};
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  // Row i of its request alone, over the keys that it sees.
  DenseMlaTensors row_of(const DenseMlaTensors& full, int64_t row) override {
    const int64_t rows = problem_.max_rows / problem_.max_requests;
    const int64_t r = row / rows;
    const auto* lengths = static_cast<const int32_t*>(kv_len_.view().data);
    row_kv_len_ = from_i32({static_cast<int32_t>(lengths[r] - rows + row % rows + 1)}, {1});
    row_q_indptr_ = from_i32({0, 1}, {2});
    return {slice_rows(full.q, row, row + 1),
            full.kv,
            slice_rows(full.page_table, r, r + 1),
            row_kv_len_,
            row_q_indptr_,
            slice_rows(full.out, row, row + 1),
            slice_rows(full.lse, row, row + 1)};
  }
  std::string difference(const DenseMlaTensors& actual, const DenseMlaTensors& reference) override {
    return out_lse_difference(actual, reference, attention_tolerance(implementation_));
  }

  OwnedTensor q_, kv_, page_table_, kv_len_, q_indptr_, row_kv_len_, row_q_indptr_;
};

// ---- mha_varlen: equal requests, causal, no prefix.

class MhaVarlenCase : public OperatorCase<MhaVarlen, OutLse> {
 public:
  MhaVarlenCase(const MhaVarlenProblem& problem, int64_t rows_per_request)
      : OperatorCase(problem), rows_per_request_(rows_per_request) {
    Generator generator(12);
    const int64_t rows = problem.max_rows, heads = problem.num_heads;
    q_ = normal_bf16(&generator, {rows, heads, 192});
    k_ = normal_bf16(&generator, {rows, heads, 192});
    v_ = normal_bf16(&generator, {rows, heads, 128});
    std::vector<int32_t> offsets;
    for (int64_t r = 0; r <= problem.max_requests; ++r)
      offsets.push_back(static_cast<int32_t>(r * rows_per_request));
    indptr_ = from_i32(offsets, {problem.max_requests + 1});
    const int64_t pairs = problem.max_requests * rows_per_request * (rows_per_request + 1) / 2;
    work_.flops = 2.0 * (192 + 128) * as_double(pairs * heads);
    work_.bytes_read = as_double(q_.bytes() + k_.bytes() + v_.bytes());
    work_.bytes_written = as_double(make_outputs().bytes());
  }

 private:
  OutLse make_outputs() const override {
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, problem_.num_heads, 128}),
            OwnedTensor(DType::kF32, {problem_.max_rows, problem_.num_heads})};
  }
  MhaVarlenTensors tensors(OutLse* outputs) override {
    return {q_, k_, v_, indptr_, indptr_, outputs->out, outputs->lse};
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  // Row i of its request alone: one request of one row over the i + 1 keys that it sees.
  MhaVarlenTensors row_of(const MhaVarlenTensors& full, int64_t row) override {
    const int64_t first_key = row / rows_per_request_ * rows_per_request_;
    row_q_indptr_ = from_i32({0, 1}, {2});
    row_kv_indptr_ = from_i32({0, static_cast<int32_t>(row - first_key + 1)}, {2});
    return {slice_rows(full.q, row, row + 1),
            slice_rows(full.k, first_key, row + 1),
            slice_rows(full.v, first_key, row + 1),
            row_q_indptr_,
            row_kv_indptr_,
            slice_rows(full.out, row, row + 1),
            slice_rows(full.lse, row, row + 1)};
  }
  std::string difference(const MhaVarlenTensors& actual,
                         const MhaVarlenTensors& reference) override {
    return out_lse_difference(actual, reference, attention_tolerance(implementation_));
  }

  int64_t rows_per_request_;
  OwnedTensor q_, k_, v_, indptr_, row_q_indptr_, row_kv_indptr_;
};

// ---- merge_lse

class MergeLseCase : public OperatorCase<MergeLse, OutLse> {
 public:
  explicit MergeLseCase(const MergeLseProblem& problem) : OperatorCase(problem) {
    Generator generator(13);
    out_parts_ = normal_bf16(
        &generator, {problem.num_parts, problem.max_rows, problem.num_heads, problem.head_dim});
    lse_parts_ = normal_f32(&generator, {problem.num_parts, problem.max_rows, problem.num_heads});
    work_.flops = 2.0 * as_double(out_parts_.num_elements());
    work_.bytes_read = as_double(out_parts_.bytes() + lse_parts_.bytes());
    work_.bytes_written = as_double(make_outputs().bytes());
  }

 private:
  OutLse make_outputs() const override {
    return {OwnedTensor(problem_.dtype, {problem_.max_rows, problem_.num_heads, problem_.head_dim}),
            OwnedTensor(DType::kF32, {problem_.max_rows, problem_.num_heads})};
  }
  MergeLseTensors tensors(OutLse* outputs) override {
    return {out_parts_, lse_parts_, {}, outputs->out, outputs->lse};
  }
  std::string difference(const MergeLseTensors& actual, const MergeLseTensors& reference) override {
    return out_lse_difference(actual, reference, kBf16Output);
  }

  OwnedTensor out_parts_, lse_parts_;
};

std::optional<PublishedTarget> sparse_mla_target(int64_t rows, int64_t heads, RowFormat format) {
  if (format == RowFormat::kF576) return std::nullopt;
  const bool bf16 = format == RowFormat::kBf16;
  if (rows == 1 && heads == 128) return PublishedTarget{bf16 ? 0.80 : 0.85, 1.4, 2.9};
  if (rows == 1 && heads == 16) return PublishedTarget{0.18};
  if (rows == 1 && heads == 8 && bf16) return PublishedTarget{0.13};
  if (rows == 16 && heads == 128 && bf16) return PublishedTarget{12.5};
  if (rows == 16 && heads == 16 && bf16) return PublishedTarget{2.2};
  return std::nullopt;
}

}  // namespace

BenchCase sparse_mla_case(const SparseMlaProblem& problem, const LatentPool& pool) {
  const int64_t rows = problem.max_rows;
  BenchCase entry;
  entry.op = "sparse_mla";
  entry.name = fmt::format("h{}_rows{}_{}", problem.num_heads, rows, to_string(problem.row_format));
  entry.description = fmt::format("{} query row{} x {} heads, {} of {}K {} rows", rows,
                                  rows == 1 ? "" : "s", problem.num_heads, problem.topk,
                                  pool.region_rows / 1024, to_string(problem.row_format));
  if (pool.regions > 1) entry.description += fmt::format(", {} regions", pool.regions);
  if (problem.split_parts > 0) {
    entry.name += fmt::format("_parts{}", problem.split_parts);
    entry.description += fmt::format(", split plan of {} parts", problem.split_parts);
  } else if (pool.regions == 1) {
    entry.target = sparse_mla_target(rows, problem.num_heads, problem.row_format);
  }
  entry.make = [problem, pool] { return std::make_unique<SparseMlaCase>(problem, pool); };
  return entry;
}

std::vector<BenchCase> sparse_mla_cases() {
  std::vector<BenchCase> cases;
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kV32, RowFormat::kF576}) {
    for (const int64_t rows : {1, 16}) {
      for (const int64_t heads : {128, 16, 8}) {
        SparseMlaProblem problem;
        problem.max_rows = rows;
        problem.num_heads = heads;
        problem.topk = 2048;
        problem.softmax_scale = static_cast<float>(1 / std::sqrt(192.0));
        problem.row_format = format;
        problem.page_size = format == RowFormat::kBf16 ? 0 : kPageSize;
        cases.push_back(sparse_mla_case(problem));
      }
    }
  }
  // The same work with and without a split plan.
  for (const int64_t rows : {1, 32}) {
    for (const int64_t parts : {0, 2, 8, 64}) {
      if (rows == 1 && parts == 0) continue;  // above
      SparseMlaProblem problem;
      problem.max_rows = rows;
      problem.num_heads = 16;
      problem.topk = 2048;
      problem.softmax_scale = static_cast<float>(1 / std::sqrt(192.0));
      problem.row_format = RowFormat::kV32;
      problem.page_size = kPageSize;
      problem.split_parts = parts;
      cases.push_back(sparse_mla_case(problem));
    }
  }
  return cases;
}

std::vector<BenchCase> dense_mla_cases() {
  struct Shape {
    int64_t requests, rows, keys, heads;
  };
  std::vector<BenchCase> cases;
  for (const auto& [requests, rows, keys, heads] : {Shape{1, 1, 8192, 128},
                                                    {1, 1, 8192, 32},
                                                    {16, 1, 1024, 32},
                                                    {1, 64, 2048, 32},
                                                    {1, 64, 2048, 128}}) {
    DenseMlaProblem problem;
    problem.max_rows = requests * rows;
    problem.max_requests = requests;
    problem.max_pages = keys / kPageSize;
    problem.num_heads = heads;
    problem.page_size = kPageSize;
    problem.softmax_scale = static_cast<float>(1 / std::sqrt(192.0));
    BenchCase entry;
    entry.op = "dense_mla";
    entry.name = fmt::format("h{}_{}x{}_of_{}", heads, requests, rows, keys);
    entry.description =
        fmt::format("{} request{} of {} row{} over {} bf16 keys, {} heads, causal", requests,
                    requests == 1 ? "" : "s", rows, rows == 1 ? "" : "s", keys, heads);
    entry.make = [problem, keys = keys] { return std::make_unique<DenseMlaCase>(problem, keys); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

std::vector<BenchCase> mha_varlen_cases() {
  std::vector<BenchCase> cases;
  for (const auto& [requests, rows] : {std::pair<int64_t, int64_t>{1, 1024}, {8, 128}}) {
    MhaVarlenProblem problem;
    problem.max_rows = problem.max_keys = requests * rows;
    problem.max_requests = requests;
    problem.num_heads = 16;
    problem.softmax_scale = static_cast<float>(1 / std::sqrt(192.0));
    BenchCase entry;
    entry.op = "mha_varlen";
    entry.name = fmt::format("h16_{}x{}", requests, rows);
    entry.description = fmt::format("{} request{} of {} rows, 16 heads, causal", requests,
                                    requests == 1 ? "" : "s", rows);
    entry.make = [problem, rows = rows] { return std::make_unique<MhaVarlenCase>(problem, rows); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

std::vector<BenchCase> merge_lse_cases() {
  std::vector<BenchCase> cases;
  for (const int64_t rows : {1, 64}) {
    BenchCase entry;
    entry.op = "merge_lse";
    entry.name = fmt::format("h128_parts8_rows{}", rows);
    entry.description =
        fmt::format("8 parts, {} row{}, 128 heads x 512, bf16", rows, rows == 1 ? "" : "s");
    entry.make = [rows] {
      return std::make_unique<MergeLseCase>(MergeLseProblem{8, rows, 128, 512, DType::kBf16});
    };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace fovea::bench
