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
};

class MetadataCase : public OperatorCase<MetadataRefresh, Fields> {
 public:
  // Every request has `keys` tokens, the last `rows_per_request` of which are rows of the batch.
  MetadataCase(const MetadataProblem& problem, int64_t keys, int64_t rows_per_request)
      : OperatorCase(problem), keys_(keys), rows_(problem.max_requests * rows_per_request) {
    Generator generator(33);
    const int64_t requests = problem.max_requests;
    seq_len_ = filled_i32({requests}, static_cast<int32_t>(keys));
    pool_row_ = from_i32(permutation(&generator, requests), {requests});
    ext_len_ = filled_i32({requests}, static_cast<int32_t>(rows_per_request));
    const int64_t pages = keys / kPageSize;
    const std::vector<int32_t> order = permutation(&generator, requests * pages);
    req_to_token_ = OwnedTensor(DType::kI32, {requests, problem.table_width});
    for (int64_t r = 0; r < requests; ++r) {
      for (int64_t i = 0; i < keys; ++i) {
        req_to_token_.data<int32_t>()[r * problem.table_width + i] = static_cast<int32_t>(
            order[static_cast<size_t>(r * pages + i / kPageSize)] * kPageSize + i % kPageSize);
      }
    }
    // One entry a page is read, each from a cache line of its own.
    work_.bytes_read = as_double(64 * requests * pages + 3 * seq_len_.bytes());
    work_.bytes_written = as_double(4 * (requests * pages + 5 * requests + 6 * rows_));
  }

 private:
  bool extends() const { return problem_.mode == ForwardMode::kExtend; }

  Fields make_outputs() const override {
    const int64_t requests = problem_.max_requests;
    const auto field = [](std::initializer_list<int64_t> shape) { return filled_i32(shape, -7); };
    return {field({requests}), field({requests + 1}),
            field({1}),        field({requests + 1}),
            field({1}),        field({requests, keys_ / kPageSize}),
            field({rows_}),    field({rows_}),
            field({rows_}),    field({rows_ + 1}),
            field({requests}), field({rows_}),
            field({rows_}),    field({problem_.workers + 1, 2})};
  }
  MetadataTensors tensors(Fields* outputs) override {
    MetadataTensors result;
    result.seq_len = seq_len_;
    result.pool_row = pool_row_;
    result.req_to_token = req_to_token_;
    MetadataFields& step = result.steps[0];
    step.kv_len = outputs->kv_len;
    step.kv_indptr = outputs->kv_indptr;
    step.max_kv_len = outputs->max_kv_len;
    step.q_indptr = outputs->q_indptr;
    step.max_q_len = outputs->max_q_len;
    step.page_table = outputs->page_table;
    step.row_to_request = outputs->row_to_request;
    step.row_len = outputs->row_len;
    step.topk_length = outputs->topk_length;
    step.topk_indptr = outputs->topk_indptr;
    step.ext_len = outputs->ext_len;
    if (extends()) {
      result.ext_len = ext_len_;
      step.k_start = outputs->k_start;
      step.k_end = outputs->k_end;
    } else {
      step.schedule = outputs->schedule;
    }
    return result;
  }
  std::string difference(const MetadataTensors& actual, const MetadataTensors& reference) override {
    const MetadataFields& a = actual.steps[0];
    const MetadataFields& r = reference.steps[0];
    std::string wrong;
    const auto check = [&](const char* name, const TensorView& of_a, const TensorView& of_r) {
      if (wrong.empty() && of_r.defined()) wrong = difference_text(name, of_a, of_r, kExact);
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
    return wrong;
  }

  int64_t keys_;
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
  struct Shape {
    ForwardMode mode;
    int64_t requests, keys, rows;
  };
  std::vector<BenchCase> cases;
  for (const Shape& shape :
       {Shape{ForwardMode::kDecode, 64, 131072, 1}, Shape{ForwardMode::kExtend, 8, 16384, 1024}}) {
    MetadataProblem problem;
    problem.mode = shape.mode;
    problem.max_requests = shape.requests;
    problem.max_rows = shape.requests * shape.rows;
    problem.table_width = shape.keys;
    problem.topk = 2048;
    problem.page_size = kPageSize;
    BenchCase entry;
    entry.op = "metadata_refresh";
    entry.name = fmt::format("{}_{}x{}k", to_string(shape.mode), shape.requests, shape.keys / 1024);
    entry.description = fmt::format("{}, {} requests of {}K tokens, {} row{} each, pages of 64",
                                    to_string(shape.mode), shape.requests, shape.keys / 1024,
                                    shape.rows, shape.rows == 1 ? "" : "s");
    entry.make = [problem, shape] {
      return std::make_unique<MetadataCase>(problem, shape.keys, shape.rows);
    };
    cases.push_back(std::move(entry));
  }
  return cases;
}

}  // namespace fovea::bench
