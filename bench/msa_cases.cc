#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "bench/cases.h"
#include "bench/check.h"
#include "bench/operator_case.h"
#include "bench/out_lse.h"
#include "fovea/msa_attend.h"
#include "fovea/msa_block_scores.h"
#include "fovea/msa_score_select.h"
#include "fovea/msa_select_blocks.h"
#include "fovea/numeric.h"

namespace fovea::bench {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kTopk = 16;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kIndexHeads = 4;

double as_double(int64_t value) { return static_cast<double>(value); }

// Equal requests. Each reads the pages of a region, which lie in random order: its own one, or,
// with fewer regions than requests, that of its number modulo theirs.
struct Requests {
  int64_t count;
  int64_t regions;
  int64_t rows;     // of each
  int64_t context;  // of each, with its rows
  OwnedTensor page_table, kv_len, q_indptr;
  OwnedTensor row_table, row_len, row_indptr;  // of one row alone

  Requests(Generator* generator, int64_t requests, int64_t rows_each, int64_t context_each,
           int64_t num_regions = 0)
      : count(requests),
        regions(num_regions > 0 ? num_regions : requests),
        rows(rows_each),
        context(context_each) {
    const OwnedTensor pages =
        from_i32(permutation(generator, regions * blocks()), {regions, blocks()});
    page_table = OwnedTensor(DType::kI32, {requests, blocks()});
    for (int64_t r = 0; r < requests; ++r) {
      std::copy_n(pages.data<int32_t>() + r % regions * blocks(), blocks(),
                  page_table.data<int32_t>() + r * blocks());
    }
    kv_len = filled_i32({requests}, static_cast<int32_t>(context));
    std::vector<int32_t> offsets;
    for (int64_t r = 0; r <= requests; ++r) offsets.push_back(static_cast<int32_t>(r * rows));
    q_indptr = from_i32(offsets, {requests + 1});
    row_indptr = from_i32({0, 1}, {2});
  }

  int64_t blocks() const { return (context + kBlock - 1) / kBlock; }
  int64_t num_rows() const { return count * rows; }
  int64_t slots() const { return regions * blocks() * kBlock; }
  int64_t position(int64_t t) const { return context - rows + t % rows; }

  // The batch of row t alone.
  template <class Tensors>
  void one_row(int64_t t, Tensors* tensors) {
    row_len = filled_i32({1}, static_cast<int32_t>(position(t) + 1));
    tensors->page_table = slice_rows(tensors->page_table, t / rows, t / rows + 1);
    tensors->kv_len = row_len;
    tensors->q_indptr = row_indptr;
  }
};

// Row t of axis 1.
template <class View>
View middle_row(View view, int64_t t) {
  const int64_t bytes = t * view.stride[1] * static_cast<int64_t>(size_of(view.dtype));
  if constexpr (std::is_same_v<View, ConstTensorView>)
    view.data = static_cast<const char*>(view.data) + bytes;
  else
    view.data = static_cast<char*>(view.data) + bytes;
  view.shape[1] = 1;
  return view;
}

// ---- msa_attend

struct OutLse {
  OwnedTensor out, lse;
  int64_t bytes() const { return out.bytes() + lse.bytes(); }
};

// Pools beyond this many slots are copies of it.
constexpr int64_t kDistinctSlots = 65536;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileShared = 10;  // of the blocks that are neither block 0 nor the own one

class MsaAttendCase : public OperatorCase<MsaAttend, OutLse> {
 public:
  MsaAttendCase(const MsaAttendProblem& problem, const AttendShape& shape)
      : OperatorCase(problem),
        generator_(41),
        requests_(&generator_, shape.requests, shape.rows, shape.context, shape.regions),
        lists_(shape.lists) {
    const int64_t rows = problem.max_rows, kv_heads = problem.num_kv_heads;
    const bool is_fp8 = problem.kv_mode == MsaKvMode::kKv8;
    q_ = normal_bf16(&generator_, {rows, problem.num_heads, kHeadDim});
    const auto pool = [&] {
      const int64_t slots = requests_.slots(), made = std::min(slots, kDistinctSlots);
      OwnedTensor values = is_fp8 ? random_e4m3(&generator_, {made, kv_heads, kHeadDim}, 1.0f)
                                  : normal_bf16(&generator_, {made, kv_heads, kHeadDim});
      return slots > made ? repeated(values, {slots, kv_heads, kHeadDim}) : std::move(values);
    };
    k_ = pool();
    v_ = pool();
    make_lists();
    const int64_t group = problem.num_heads / kv_heads;
    work_.flops = 4.0 * as_double(pairs_ * group * kHeadDim);
    work_.bytes_read =
        as_double(blocks_read_ * kBlock * 2 * kHeadDim * (is_fp8 ? 1 : 2) + q_.bytes());
    work_.bytes_written = as_double(rows * problem.num_heads * (2 * kHeadDim + 4));
    // Rows of 256 bytes, 1 KiB apart: no figure of this machine comes nearer.
    work_.traffic = Traffic::kGather656;
  }

 private:
  // Lists of every (row, KV head); counts the visible (row, token) pairs of all KV heads and the
  // distinct blocks.
  void make_lists() {
    const int64_t rows = problem_.max_rows, kv_heads = problem_.num_kv_heads;
    blocks_ = filled_i32({kv_heads, rows, kTopk}, -1);
    std::vector<bool> listed(
        static_cast<size_t>(kv_heads * requests_.regions * requests_.blocks()));
    for (int64_t g = 0; g < kv_heads; ++g) {
      std::vector<int32_t> tile;
      for (int64_t t = 0; t < rows; ++t) {
        const int64_t own = requests_.position(t) / kBlock;
        if (lists_ == BlockLists::kClustered && t % kTileRows == 0) tile = shared_blocks(own);
        std::vector<int32_t> list = others(own, tile);
        list.push_back(static_cast<int32_t>(own));
        std::copy(list.begin(), list.end(), blocks_.data<int32_t>() + (g * rows + t) * kTopk);
        pairs_ +=
            (static_cast<int64_t>(list.size()) - 1) * kBlock + requests_.position(t) % kBlock + 1;
        const int64_t region = t / requests_.rows % requests_.regions;
        for (const int32_t n : list)
          listed[static_cast<size_t>((g * requests_.regions + region) * requests_.blocks() + n)] =
              true;
      }
    }
    blocks_read_ = std::count(listed.begin(), listed.end(), true);
  }

  // Block 0 and those before `own` that a tile of rows shares.
  std::vector<int32_t> shared_blocks(int64_t own) {
    if (own < kTopk) return {};
    std::vector<int32_t> shared = distinct(&generator_, kTileShared, own - 1);
    for (int32_t& block : shared) ++block;
    shared.push_back(0);
    return shared;
  }

  // 15 blocks before `own`, `first` among them, or all there are; ascending.
  std::vector<int32_t> others(int64_t own, const std::vector<int32_t>& first) {
    std::vector<int32_t> list;
    if (own < kTopk) {
      list.resize(static_cast<size_t>(own));
      std::iota(list.begin(), list.end(), 0);
      return list;
    }
    list = first;
    // Of 15 distinct ones enough are new, however many are in `first`.
    for (const int32_t block : distinct(&generator_, kTopk - 1, own)) {
      if (list.size() == static_cast<size_t>(kTopk - 1)) break;
      if (std::find(first.begin(), first.end(), block) == first.end()) list.push_back(block);
    }
    std::sort(list.begin(), list.end());
    return list;
  }

  OutLse make_outputs() const override {
    return {OwnedTensor(DType::kBf16, {problem_.max_rows, problem_.num_heads, kHeadDim}),
            OwnedTensor(DType::kF32, {problem_.max_rows, problem_.num_heads})};
  }
  MsaAttendTensors tensors(OutLse* outputs) override {
    MsaAttendTensors result;
    result.q = q_;
    result.k_pool = k_;
    result.v_pool = v_;
    result.page_table = requests_.page_table;
    result.kv_len = requests_.kv_len;
    result.q_indptr = requests_.q_indptr;
    result.blocks = blocks_;
    result.out = outputs->out;
    result.lse = outputs->lse;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override {
    return spread_rows(problem_.max_rows, problem_.max_rows > 512 ? 24 : 4);
  }
  MsaAttendTensors row_of(const MsaAttendTensors& full, int64_t row) override {
    MsaAttendTensors part = full;
    requests_.one_row(row, &part);
    part.q = slice_rows(full.q, row, row + 1);
    part.blocks = middle_row(full.blocks, row);
    part.out = slice_rows(full.out, row, row + 1);
    part.lse = slice_rows(full.lse, row, row + 1);
    return part;
  }
  std::string difference(const MsaAttendTensors& actual,
                         const MsaAttendTensors& reference) override {
    return out_lse_difference(actual, reference, attention_tolerance(implementation_));
  }

  Generator generator_;
  Requests requests_;
  BlockLists lists_;
  OwnedTensor q_, k_, v_, blocks_;
  int64_t pairs_ = 0;
  int64_t blocks_read_ = 0;
};

// ---- msa_score_select

class MsaScoreSelectCase : public OperatorCase<MsaScoreSelect, OwnedTensor> {
 public:
  MsaScoreSelectCase(const MsaScoreSelectProblem& problem, int64_t requests, int64_t rows,
                     int64_t context)
      : OperatorCase(problem), generator_(42), requests_(&generator_, requests, rows, context) {
    // Small integers: every implementation selects the same.
    iq_ = integers({problem.max_rows, kIndexHeads, kHeadDim});
    index_k_ = integers({requests_.slots(), 1, kHeadDim});
    int64_t pairs = 0;
    for (int64_t t = 0; t < problem.max_rows; ++t) pairs += requests_.position(t) + 1;
    work_.flops = 2.0 * as_double(pairs * kIndexHeads * kHeadDim);
    work_.bytes_read = as_double(index_k_.bytes() + iq_.bytes());
    work_.bytes_written = as_double(make_outputs().bytes());
  }

 private:
  OwnedTensor integers(std::initializer_list<int64_t> shape) {
    OwnedTensor tensor(DType::kBf16, shape);
    for (int64_t i = 0; i < tensor.num_elements(); ++i)
      tensor.data<bf16_t>()[i] = bf16_from_float(static_cast<float>(generator_.below(15) - 7));
    return tensor;
  }
  OwnedTensor make_outputs() const override {
    return OwnedTensor(DType::kI32, {kIndexHeads, problem_.max_rows, kTopk});
  }
  MsaScoreSelectTensors tensors(OwnedTensor* outputs) override {
    MsaScoreSelectTensors result;
    result.iq = iq_;
    result.index_k = index_k_;
    result.page_table = requests_.page_table;
    result.kv_len = requests_.kv_len;
    result.q_indptr = requests_.q_indptr;
    result.blocks = *outputs;
    return result;
  }
  std::vector<int64_t> sampled_rows() const override { return spread_rows(problem_.max_rows); }
  MsaScoreSelectTensors row_of(const MsaScoreSelectTensors& full, int64_t row) override {
    MsaScoreSelectTensors part = full;
    requests_.one_row(row, &part);
    part.iq = slice_rows(full.iq, row, row + 1);
    part.blocks = middle_row(full.blocks, row);
    return part;
  }
  std::string difference(const MsaScoreSelectTensors& actual,
                         const MsaScoreSelectTensors& reference) override {
    return difference_text("blocks", actual.blocks, reference.blocks, kExact);
  }

  Generator generator_;
  Requests requests_;
  OwnedTensor iq_, index_k_;
};

// ---- msa_select_blocks: rows of 8192 candidates.

class MsaSelectCase : public OperatorCase<MsaSelectBlocks, OwnedTensor> {
 public:
  explicit MsaSelectCase(const MsaSelectBlocksProblem& problem) : OperatorCase(problem) {
    Generator generator(43);
    const int64_t rows = problem.max_rows, pages = problem.max_pages;
    scores_ = normal_f32(&generator, {problem.num_heads, rows, pages});
    kv_len_ = filled_i32({1}, static_cast<int32_t>(pages * kBlock));
    q_indptr_ = from_i32({0, static_cast<int32_t>(rows)}, {2});
    work_.bytes_read = as_double(scores_.bytes());
    work_.bytes_written = as_double(make_outputs().bytes());
  }

 private:
  OwnedTensor make_outputs() const override {
    return OwnedTensor(DType::kI32, {problem_.num_heads, problem_.max_rows, kTopk});
  }
  MsaSelectBlocksTensors tensors(OwnedTensor* outputs) override {
    MsaSelectBlocksTensors result;
    result.scores = scores_;
    result.kv_len = kv_len_;
    result.q_indptr = q_indptr_;
    result.blocks = *outputs;
    return result;
  }
  std::string difference(const MsaSelectBlocksTensors& actual,
                         const MsaSelectBlocksTensors& reference) override {
    return difference_text("blocks", actual.blocks, reference.blocks, kExact);
  }

  OwnedTensor scores_, kv_len_, q_indptr_;
};

}  // namespace

BenchCase msa_attend_case(const AttendShape& shape) {
  MsaAttendProblem problem;
  problem.max_rows = shape.requests * shape.rows;
  problem.max_requests = shape.requests;
  problem.max_pages = (shape.context + kBlock - 1) / kBlock;
  problem.num_heads = shape.heads;
  problem.num_kv_heads = shape.kv_heads;
  problem.head_dim = kHeadDim;
  problem.block_size = kBlock;
  problem.topk = kTopk;
  problem.kv_mode = shape.mode;
  BenchCase entry;
  entry.op = "msa_attend";
  entry.name = fmt::format("h{}_kv{}_{}x{}_{}", shape.heads, shape.kv_heads, shape.requests,
                           shape.rows, shape.context);
  entry.description = fmt::format(
      "{} request{} x {} row{}, {} tokens, {}/{} heads x 128, own block and 15 others{}",
      shape.requests, shape.requests == 1 ? "" : "s", shape.rows, shape.rows == 1 ? "" : "s",
      shape.context, shape.heads, shape.kv_heads,
      shape.lists == BlockLists::kClustered ? ", clustered" : "");
  entry.make = [problem, shape] { return std::make_unique<MsaAttendCase>(problem, shape); };
  return entry;
}

std::vector<BenchCase> msa_attend_cases() {
  struct Named {
    const char* name;
    AttendShape shape;
    std::optional<PublishedTarget> target = {};
  };
  // The first two have published figures: one decode row, and a dense prefill of 512 rows.
  const Named named[] = {
      {"decode_h64_kv4_b1", {1, 1, 32768, 64, 4}, PublishedTarget{0.100}},
      {"prefill_h64_kv4_512x2048", {1, 512, 2048, 64, 4}, PublishedTarget{46}},
      {"decode_h64_kv4_b16", {16, 1, 8192, 64, 4}},
      {"decode_h16_kv1_b16", {16, 1, 8192, 16, 1}},
      {"decode_h4_kv1_b16", {16, 1, 8192, 4, 1}},
      {"decode_h64_kv4_b1_kv8", {1, 1, 32768, 64, 4, MsaKvMode::kKv8}},
      {"verify_h64_kv4_b1_rows4", {1, 4, 32768, 64, 4}},
      {"prefill_h64_kv4_64x32k", {1, 64, 32768, 64, 4}},
  };
  std::vector<BenchCase> cases;
  for (const Named& entry : named) {
    BenchCase bench_case = msa_attend_case(entry.shape);
    bench_case.name = entry.name;
    bench_case.target = entry.target;
    cases.push_back(std::move(bench_case));
  }
  return cases;
}

std::vector<BenchCase> msa_score_select_cases() {
  struct Shape {
    const char* name;
    int64_t requests, rows, context;
  };
  std::vector<BenchCase> cases;
  for (const Shape& shape : {Shape{"decode_b1_128k", 1, 1, 131072},
                             {"decode_b16_8k", 16, 1, 8192},
                             {"prefill_128x16k", 1, 128, 16384}}) {
    MsaScoreSelectProblem problem;
    problem.max_rows = shape.requests * shape.rows;
    problem.max_requests = shape.requests;
    problem.max_pages = (shape.context + kBlock - 1) / kBlock;
    problem.num_heads = kIndexHeads;
    problem.head_dim = kHeadDim;
    problem.block_size = kBlock;
    problem.topk = kTopk;
    BenchCase entry;
    entry.op = "msa_score_select";
    entry.name = shape.name;
    entry.description = fmt::format(
        "{} request{} x {} row{}, {} tokens, 4 index heads x 128, top 16", shape.requests,
        shape.requests == 1 ? "" : "s", shape.rows, shape.rows == 1 ? "" : "s", shape.context);
    entry.make = [problem, shape] {
      return std::make_unique<MsaScoreSelectCase>(problem, shape.requests, shape.rows,
                                                  shape.context);
    };
    cases.push_back(std::move(entry));
  }
  return cases;
}

std::vector<BenchCase> msa_select_blocks_cases() {
  MsaSelectBlocksProblem problem;
  problem.max_rows = 64;
  problem.max_requests = 1;
  problem.max_pages = 8192;
  problem.num_heads = kIndexHeads;
  problem.block_size = kBlock;
  problem.topk = kTopk;
  BenchCase entry;
  entry.op = "msa_select_blocks";
  entry.name = "rows64_8192_blocks";
  entry.description = "64 rows x 4 heads, 16 of 8192 blocks";
  entry.make = [problem] { return std::make_unique<MsaSelectCase>(problem); };
  return {entry};
}

}  // namespace fovea::bench
