#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "bench/cases.h"
#include "bench/operator_case.h"
#include "bench/out_lse.h"
#include "fovea/row_codec.h"
#include "fovea/swa_decode.h"

namespace fovea::bench {
namespace {

constexpr int64_t kDim = 512;
constexpr int64_t kWindow = 128;
constexpr int64_t kPageSize = 64;
constexpr int64_t kPackedRows = 65536;  // the rows of a larger pool repeat them

double as_double(int64_t value) { return static_cast<double>(value); }

// A pool of v4 or r512 rows, the latter with fp32 scales.
struct LatentRows {
  OwnedTensor pool, inv_scale;
};

LatentRows packed_rows(Generator* generator, RowFormat format, int64_t rows) {
  const int64_t packed = std::min(rows, kPackedRows);
  const OwnedTensor src = normal_bf16(generator, {packed, kDim});
  std::vector<int32_t> slots(static_cast<size_t>(packed));
  std::iota(slots.begin(), slots.end(), 0);
  const OwnedTensor slot_list = from_i32(slots, {packed});
  const int64_t bytes = page_bytes(format, kPageSize, kDim);
  LatentRows latent;
  latent.pool = OwnedTensor(DType::kU8, {packed / kPageSize, bytes});
  RowCodecProblem codec;
  codec.max_rows = packed;
  codec.row_format = format;
  codec.page_size = kPageSize;
  codec.width = kDim;
  const PackRows plan = PackRows::plan(codec, Device::cpu());
  HostBuffer workspace(plan.workspace_bytes());
  PackRowsTensors tensors{src, slot_list, latent.pool};
  if (format == RowFormat::kR512) {
    latent.inv_scale = OwnedTensor(DType::kF32, {packed, 1});
    tensors.inv_scale = latent.inv_scale;
  }
  plan.run(tensors, workspace.workspace());
  if (rows == packed) return latent;
  latent.pool = repeated(latent.pool, {rows / kPageSize, bytes});
  if (format == RowFormat::kR512) latent.inv_scale = repeated(latent.inv_scale, {rows, 1});
  return latent;
}

// Where token `row` of a pool lies whose pages are in the order of `pages`.
int32_t slot_of(const std::vector<int32_t>& pages, int64_t row) {
  return pages[static_cast<size_t>(row / kPageSize)] * static_cast<int32_t>(kPageSize) +
         static_cast<int32_t>(row % kPageSize);
}

// The window of every request, oldest token first: tokens of its own, in pages in random order.
OwnedTensor window_lists(Generator* generator, int64_t requests) {
  const std::vector<int32_t> pages = permutation(generator, requests * kWindow / kPageSize);
  std::vector<int32_t> slots;
  for (int64_t row = 0; row < requests * kWindow; ++row) slots.push_back(slot_of(pages, row));
  return from_i32(slots, {requests, kWindow});
}

Work attention_work(const V4Shape& shape, double bytes_read, double bytes_written) {
  Work work;
  const int64_t keys = shape.requests * (kWindow + shape.extra_topk);
  work.flops = 2.0 * as_double(2 * kDim * shape.heads * keys);
  const double row = shape.format == RowFormat::kV4 ? 583 : 516;
  work.bytes_read = bytes_read + row * as_double(keys);
  work.bytes_written = bytes_written;
  work.traffic = Traffic::kGather656;
  return work;
}

float softmax_scale() { return static_cast<float>(1 / std::sqrt(as_double(kDim))); }

OutLse make_out_lse(int64_t rows, int64_t heads) {
  return {OwnedTensor(DType::kBf16, {rows, heads, kDim}), OwnedTensor(DType::kF32, {rows, heads})};
}

// ---- sparse_mla: a window, and compressed entries of a region of its own for each request.

SparseMlaProblem v4_problem(const V4Shape& shape) {
  SparseMlaProblem problem;
  problem.max_rows = shape.requests;
  problem.num_heads = shape.heads;
  problem.head_dim_qk = kDim;
  problem.topk = kWindow;
  problem.extra_topk = shape.extra_topk;
  problem.softmax_scale = softmax_scale();
  problem.row_format = shape.format;
  problem.page_size = kPageSize;
  return problem;
}

class V4AttentionCase : public OperatorCase<SparseMla, OutLse> {
 public:
  explicit V4AttentionCase(const V4Shape& shape) : OperatorCase(v4_problem(shape)) {
    Generator generator(15);
    q_ = normal_bf16(&generator, {shape.requests, shape.heads, kDim});
    window_ = packed_rows(&generator, shape.format, shape.requests * kWindow);
    indices_ = window_lists(&generator, shape.requests);
    if (shape.extra_topk > 0) make_entries(&generator, shape);
    work_ = attention_work(shape, as_double(q_.bytes() + indices_.bytes() + extra_indices_.bytes()),
                           as_double(make_outputs().bytes()));
  }

 private:
  void make_entries(Generator* generator, const V4Shape& shape) {
    constexpr int64_t kEntries = 8192;  // of a request: 32K tokens
    const int64_t regions = std::min<int64_t>(shape.requests, 64);
    extra_ = packed_rows(generator, shape.format, regions * kEntries);
    const std::vector<int32_t> pages = permutation(generator, regions * kEntries / kPageSize);
    std::vector<int32_t> slots;
    for (int64_t t = 0; t < shape.requests; ++t) {
      std::vector<int32_t> entries = distinct(generator, shape.extra_topk, kEntries);
      std::sort(entries.begin(), entries.end());  // as the indexer writes them
      for (const int32_t entry : entries)
        slots.push_back(slot_of(pages, t % regions * kEntries + entry));
    }
    extra_indices_ = from_i32(slots, {shape.requests, shape.extra_topk});
  }

  OutLse make_outputs() const override {
    return make_out_lse(problem_.max_rows, problem_.num_heads);
  }
  SparseMlaTensors tensors(OutLse* outputs) override {
    SparseMlaTensors result;
    result.q = q_;
    result.kv = window_.pool;
    result.inv_scale = window_.inv_scale;
    result.indices = indices_;
    result.extra_kv = extra_.pool;
    result.extra_inv_scale = extra_.inv_scale;
    result.extra_indices = extra_indices_;
    result.out = outputs->out;
    result.lse = outputs->lse;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  SparseMlaTensors row_of(const SparseMlaTensors& full, int64_t row) override {
    SparseMlaTensors part = full;
    part.q = slice_rows(full.q, row, row + 1);
    part.indices = slice_rows(full.indices, row, row + 1);
    if (problem_.extra_topk > 0) part.extra_indices = slice_rows(full.extra_indices, row, row + 1);
    part.out = slice_rows(full.out, row, row + 1);
    part.lse = slice_rows(full.lse, row, row + 1);
    return part;
  }
  std::string difference(const SparseMlaTensors& actual,
                         const SparseMlaTensors& reference) override {
    return out_lse_difference(actual, reference, attention_tolerance(implementation_));
  }

  LatentRows window_, extra_;
  OwnedTensor q_, indices_, extra_indices_;
};

// ---- swa_decode: windows alone.

SwaDecodeProblem swa_problem(const V4Shape& shape) {
  SwaDecodeProblem problem;
  problem.max_rows = shape.requests;
  problem.num_heads = shape.heads;
  problem.width = problem.window = kWindow;
  problem.softmax_scale = softmax_scale();
  problem.row_format = shape.format;
  problem.page_size = kPageSize;
  return problem;
}

class SwaDecodeCase : public OperatorCase<SwaDecode, OutLse> {
 public:
  explicit SwaDecodeCase(const V4Shape& shape) : OperatorCase(swa_problem(shape)) {
    Generator generator(16);
    q_ = normal_bf16(&generator, {shape.requests, shape.heads, kDim});
    window_ = packed_rows(&generator, shape.format, shape.requests * kWindow);
    indices_ = window_lists(&generator, shape.requests);
    lens_ = filled_i32({shape.requests}, static_cast<int32_t>(kWindow));
    work_ = attention_work(shape, as_double(q_.bytes() + indices_.bytes() + lens_.bytes()),
                           as_double(make_outputs().bytes()));
  }

 private:
  OutLse make_outputs() const override {
    return make_out_lse(problem_.max_rows, problem_.num_heads);
  }
  SwaDecodeTensors tensors(OutLse* outputs) override {
    SwaDecodeTensors result;
    result.q = q_;
    result.kv = window_.pool;
    result.inv_scale = window_.inv_scale;
    result.swa_indices = indices_;
    result.swa_lens = lens_;
    result.out = outputs->out;
    result.lse = outputs->lse;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  SwaDecodeTensors row_of(const SwaDecodeTensors& full, int64_t row) override {
    SwaDecodeTensors part = full;
    part.q = slice_rows(full.q, row, row + 1);
    part.swa_indices = slice_rows(full.swa_indices, row, row + 1);
    part.swa_lens = slice_rows(full.swa_lens, row, row + 1);
    part.out = slice_rows(full.out, row, row + 1);
    part.lse = slice_rows(full.lse, row, row + 1);
    return part;
  }
  std::string difference(const SwaDecodeTensors& actual,
                         const SwaDecodeTensors& reference) override {
    return out_lse_difference(actual, reference, attention_tolerance(implementation_));
  }

  LatentRows window_;
  OwnedTensor q_, indices_, lens_;
};

BenchCase named_case(const char* op, const V4Shape& shape) {
  BenchCase entry;
  entry.op = op;
  entry.name =
      fmt::format("h{}_rows{}_{}_window", shape.heads, shape.requests, to_string(shape.format));
  entry.description =
      fmt::format("{} row{} x {} heads, window of {} {} rows", shape.requests,
                  shape.requests == 1 ? "" : "s", shape.heads, kWindow, to_string(shape.format));
  if (shape.extra_topk > 0) {
    entry.name += fmt::format("{}", shape.extra_topk);
    entry.description += fmt::format(" and {} compressed ones", shape.extra_topk);
  }
  return entry;
}

}  // namespace

BenchCase v4_attention_case(const V4Shape& shape) {
  BenchCase entry = named_case("sparse_mla", shape);
  entry.make = [shape] { return std::make_unique<V4AttentionCase>(shape); };
  return entry;
}

BenchCase swa_decode_case(const V4Shape& shape) {
  BenchCase entry = named_case("swa_decode", shape);
  entry.make = [shape] { return std::make_unique<SwaDecodeCase>(shape); };
  return entry;
}

std::vector<BenchCase> v4_attention_cases() {
  struct Entry {
    V4Shape shape;
    std::optional<PublishedTarget> target = {};
  };
  const Entry entries[] = {
      {{128, 1, RowFormat::kV4, 0}},
      {{128, 1, RowFormat::kV4, 512}},
      {{64, 1, RowFormat::kV4, 0}, PublishedTarget{0.026}},
      {{64, 1, RowFormat::kV4, 512}, PublishedTarget{0.120}},
      {{64, 64, RowFormat::kV4, 0}, PublishedTarget{1.45}},
  };
  std::vector<BenchCase> cases;
  for (const Entry& entry : entries) {
    cases.push_back(v4_attention_case(entry.shape));
    cases.back().target = entry.target;
  }
  return cases;
}

std::vector<BenchCase> swa_decode_cases() {
  std::vector<BenchCase> cases;
  for (const RowFormat format : {RowFormat::kR512, RowFormat::kV4}) {
    for (const int64_t requests : {1, 16})
      cases.push_back(swa_decode_case({128, requests, format}));
  }
  return cases;
}

}  // namespace fovea::bench
