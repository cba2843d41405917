#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bench/cases.h"
#include "bench/check.h"
#include "bench/operator_case.h"
#include "fovea/metadata.h"
#include "fovea/row_codec.h"

namespace fovea::bench {
namespace {

constexpr int64_t kPageSize = 64;

double as_double(int64_t value) { return static_cast<double>(value); }

// Slots of whole pages in random order, tokens of a page in order: how a server fills a pool.
OwnedTensor paged_slots(Generator* generator, int64_t rows) {
  std::vector<int32_t> slots;
  for (const int32_t page : permutation(generator, rows / kPageSize)) {
    for (int32_t i = 0; i < kPageSize; ++i)
      slots.push_back(page * static_cast<int32_t>(kPageSize) + i);
  }
  return from_i32(slots, {rows});
}

OwnedTensor make_pool(const RowCodecProblem& problem) {
  OwnedTensor pool(DType::kU8, {problem.max_rows / kPageSize,
                                page_bytes(problem.row_format, kPageSize, problem.width)});
  // Not yet the right bytes, and every page present in memory.
  std::fill_n(pool.data<uint8_t>(), pool.num_elements(), uint8_t{0x55});
  return pool;
}

Work codec_work(int64_t row_bytes, const OwnedTensor& pool, const OwnedTensor& slots, bool packs) {
  Work work;
  work.bytes_read = as_double(slots.bytes() + (packs ? row_bytes : pool.bytes()));
  work.bytes_written = as_double(packs ? pool.bytes() : row_bytes);
  work.traffic = Traffic::kCopy;
  return work;
}

struct Pool {
  OwnedTensor pool;
};

class PackRowsCase : public OperatorCase<PackRows, Pool> {
 public:
  explicit PackRowsCase(const RowCodecProblem& problem) : OperatorCase(problem) {
    Generator generator(31);
    src_ = normal_bf16(&generator, {problem.max_rows, problem.width});
    slots_ = paged_slots(&generator, problem.max_rows);
    work_ = codec_work(src_.bytes(), make_outputs().pool, slots_, true);
  }

 private:
  Pool make_outputs() const override { return {make_pool(problem_)}; }
  PackRowsTensors tensors(Pool* outputs) override { return {src_, slots_, outputs->pool}; }
  std::string difference(const PackRowsTensors& actual, const PackRowsTensors& reference) override {
    return difference_text("pool", actual.pool, reference.pool, kExact);
  }

  OwnedTensor src_, slots_;
};

struct Rows {
  OwnedTensor out;
};

class UnpackRowsCase : public OperatorCase<UnpackRows, Rows> {
 public:
  explicit UnpackRowsCase(const RowCodecProblem& problem) : OperatorCase(problem) {
    Generator generator(32);
    pool_ = make_pool(problem);
    slots_ = paged_slots(&generator, problem.max_rows);
    {
      const OwnedTensor src = normal_bf16(&generator, {problem.max_rows, problem.width});
      const PackRows plan = PackRows::plan(problem, Device::cpu());
      HostBuffer workspace(plan.workspace_bytes());
      plan.run({src, slots_, pool_}, workspace.workspace());
    }
    work_ = codec_work(make_outputs().out.bytes(), pool_, slots_, false);
  }

 private:
  Rows make_outputs() const override {
    Rows rows{OwnedTensor(DType::kBf16, {problem_.max_rows, problem_.width})};
    std::fill_n(rows.out.data<uint8_t>(), rows.out.bytes(), uint8_t{0x55});
    return rows;
  }
  UnpackRowsTensors tensors(Rows* outputs) override { return {pool_, slots_, outputs->out}; }
  std::string difference(const UnpackRowsTensors& actual,
                         const UnpackRowsTensors& reference) override {
    return difference_text("out", actual.out, reference.out, kExact);
  }

  OwnedTensor pool_, slots_;
};

// ---- metadata_refresh

struct Fields {
  OwnedTensor kv_len, kv_indptr, max_kv_len, q_indptr, max_q_len, page_table, row_to_request;
  OwnedTensor row_len, topk_length, topk_indptr, ext_len, k_start, k_end, schedule;
  OwnedTensor split_schedule, split_indptr;
};

struct MetadataShape {
  ForwardMode mode;
  int64_t requests, keys, rows;  // rows of each request
  int num_steps;
  int64_t split_parts;
};

MetadataProblem problem_of(const MetadataShape& shape) {
  MetadataProblem problem;
  problem.mode = shape.mode;
  problem.max_requests = shape.requests;
  problem.max_rows = shape.requests * shape.rows;
  problem.table_width = shape.keys;
  problem.topk = 2048;
  problem.page_size = kPageSize;
  problem.split_parts = shape.split_parts;
  if (shape.mode == ForwardMode::kTargetVerify) problem.rows_per_request = shape.rows;
  return problem;
}

class MetadataCase : public OperatorCase<MetadataRefresh, std::vector<Fields>> {
 public:
  // Every request ends with `keys` tokens, in the last step when there are several.
  explicit MetadataCase(const MetadataShape& shape)
      : OperatorCase(problem_of(shape)), shape_(shape), rows_(problem_.max_rows) {
    Generator generator(33);
    const int64_t requests = shape.requests;
    int64_t seq_len = shape.keys;
    if (shape.mode == ForwardMode::kTargetVerify) seq_len -= shape.rows;
    if (shape.num_steps > 1) seq_len -= shape.num_steps;
    seq_len_ = filled_i32({requests}, static_cast<int32_t>(seq_len));
    pool_row_ = from_i32(permutation(&generator, requests), {requests});
    ext_len_ = filled_i32({requests}, static_cast<int32_t>(shape.rows));
    const int64_t pages = shape.keys / kPageSize;
    const std::vector<int32_t> order = permutation(&generator, requests * pages);
    req_to_token_ = OwnedTensor(DType::kI32, {requests, problem_.table_width});
    for (int64_t r = 0; r < requests; ++r) {
      for (int64_t i = 0; i < shape.keys; ++i) {
        req_to_token_.data<int32_t>()[r * problem_.table_width + i] = static_cast<int32_t>(
            order[static_cast<size_t>(r * pages + i / kPageSize)] * kPageSize + i % kPageSize);
      }
    }
    // One entry a page is read, each from a cache line of its own, once for all steps.
    work_.bytes_read = as_double(64 * requests * pages + 3 * seq_len_.bytes());
    work_.bytes_written =
        as_double(4 * shape.num_steps *
                  (requests * pages + 5 * requests + 6 * rows_ + 8 * shape.split_parts));
  }

 private:
  bool extends() const { return problem_.mode == ForwardMode::kExtend; }

  std::vector<Fields> make_outputs() const override {
    const int64_t requests = problem_.max_requests;
    const auto field = [](std::initializer_list<int64_t> shape) { return filled_i32(shape, -7); };
    std::vector<Fields> steps;
    for (int step = 0; step < shape_.num_steps; ++step) {
      steps.push_back({field({requests}), field({requests + 1}), field({1}), field({requests + 1}),
                       field({1}), field({requests, shape_.keys / kPageSize}), field({rows_}),
                       field({rows_}), field({rows_}), field({rows_ + 1}), field({requests}),
                       field({rows_}), field({rows_}), field({problem_.workers + 1, 2}),
                       field({shape_.split_parts, 8}), field({rows_ + 1})});
    }
    return steps;
  }
  MetadataTensors tensors(std::vector<Fields>* outputs) override {
    MetadataTensors result;
    result.seq_len = seq_len_;
    result.pool_row = pool_row_;
    result.req_to_token = req_to_token_;
    result.num_steps = shape_.num_steps;
    if (extends()) result.ext_len = ext_len_;
    for (size_t i = 0; i < outputs->size(); ++i) {
      if (shape_.num_steps > 1) result.kv_len_delta[i] = static_cast<int32_t>(i) + 1;
      Fields& from = (*outputs)[i];
      MetadataFields& step = result.steps[i];
      step.kv_len = from.kv_len;
      step.kv_indptr = from.kv_indptr;
      step.max_kv_len = from.max_kv_len;
      step.q_indptr = from.q_indptr;
      step.max_q_len = from.max_q_len;
      step.page_table = from.page_table;
      step.row_to_request = from.row_to_request;
      step.row_len = from.row_len;
      step.topk_length = from.topk_length;
      step.topk_indptr = from.topk_indptr;
      step.ext_len = from.ext_len;
      step.k_start = from.k_start;
      step.k_end = from.k_end;
      step.schedule = from.schedule;
      step.split_schedule = from.split_schedule;
      step.split_indptr = from.split_indptr;
    }
    return result;
  }
  std::string difference(const MetadataTensors& actual, const MetadataTensors& reference) override {
    std::string wrong;
    for (size_t i = 0; i < static_cast<size_t>(shape_.num_steps); ++i) {
      const MetadataFields& a = actual.steps[i];
      const MetadataFields& r = reference.steps[i];
      const auto check = [&](const char* name, const TensorView& of_a, const TensorView& of_r) {
        if (!wrong.empty()) return;
        wrong = difference_text(name, of_a, of_r, kExact);
        if (!wrong.empty()) wrong = fmt::format("step {}: {}", i, wrong);
      };
      check("kv_len", a.kv_len, r.kv_len);
      check("kv_indptr", a.kv_indptr, r.kv_indptr);
      check("max_kv_len", a.max_kv_len, r.max_kv_len);
      check("q_indptr", a.q_indptr, r.q_indptr);
      check("max_q_len", a.max_q_len, r.max_q_len);
      check("page_table", a.page_table, r.page_table);
      check("row_to_request", a.row_to_request, r.row_to_request);
      check("row_len", a.row_len, r.row_len);
      check("topk_length", a.topk_length, r.topk_length);
      check("topk_indptr", a.topk_indptr, r.topk_indptr);
      check("ext_len", a.ext_len, r.ext_len);
      check("k_start", a.k_start, r.k_start);
      check("k_end", a.k_end, r.k_end);
      check("schedule", a.schedule, r.schedule);
      check("split_schedule", a.split_schedule, r.split_schedule);
      check("split_indptr", a.split_indptr, r.split_indptr);
    }
    return wrong;
  }

  MetadataShape shape_;
  int64_t rows_;
  OwnedTensor seq_len_, pool_row_, ext_len_, req_to_token_;
};

template <class Case>
std::vector<BenchCase> codec_cases(const char* op) {
  struct Shape {
    RowFormat format;
    int64_t width, rows;
  };
  std::vector<BenchCase> cases;
  // More rows of the narrow format, so that all of them exceed the caches.
  for (const Shape& shape :
       {Shape{RowFormat::kV32, 576, 65536}, Shape{RowFormat::kI132, 128, 262144},
        Shape{RowFormat::kBf16, 576, 65536}, Shape{RowFormat::kF576, 576, 131072}}) {
    RowCodecProblem problem;
    problem.max_rows = shape.rows;
    problem.row_format = shape.format;
    problem.page_size = kPageSize;
    problem.width = shape.width;
    problem.k_scale = 0.37f;  // of f576: no power of two, so that packing has to divide
    BenchCase entry;
    entry.op = op;
    entry.name = fmt::format("{}_{}k", to_string(shape.format), shape.rows / 1024);
    entry.description = fmt::format("{}K rows of {} channels, {}, pages of 64 in random order",
                                    shape.rows / 1024, shape.width, to_string(shape.format));
    entry.make = [problem] { return std::make_unique<Case>(problem); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace

std::vector<BenchCase> pack_rows_cases() { return codec_cases<PackRowsCase>("pack_rows"); }
std::vector<BenchCase> unpack_rows_cases() { return codec_cases<UnpackRowsCase>("unpack_rows"); }

std::vector<BenchCase> metadata_refresh_cases() {
  std::vector<BenchCase> cases;
  for (const MetadataShape& shape :
       {MetadataShape{ForwardMode::kDecode, 64, 131072, 1, 1, 0},
        MetadataShape{ForwardMode::kTargetVerify, 64, 131072, 4, 1, 64},
        MetadataShape{ForwardMode::kDecode, 64, 131072, 1, 7, 64},
        MetadataShape{ForwardMode::kExtend, 8, 16384, 1024, 1, 0}}) {
    const std::string steps = shape.num_steps == 1 ? "" : fmt::format("_{}steps", shape.num_steps);
    BenchCase entry;
    entry.op = "metadata_refresh";
    entry.name =
        fmt::format("{}_{}x{}k{}", to_string(shape.mode), shape.requests, shape.keys / 1024, steps);
    entry.description =
        fmt::format("{}, {} requests of {}K tokens, {} row{} each, pages of 64{}{}",
                    to_string(shape.mode), shape.requests, shape.keys / 1024, shape.rows,
                    shape.rows == 1 ? "" : "s", shape.split_parts == 0 ? "" : ", both schedules",
                    shape.num_steps == 1 ? "" : fmt::format(", {} steps", shape.num_steps));
    entry.make = [shape] { return std::make_unique<MetadataCase>(shape); };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace fovea::bench
