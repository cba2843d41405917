#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "fovea/msa_attend.h"
#include "tests/msa/paged_batch.h"
#include "tests/support/compare.h"
#include "tests/support/targets.h"

namespace fovea::test {

/// Queries, caches and lists of a batch. Tensors that are not defined are left out.
struct AttendCase {
  PagedBatch batch;
  int64_t heads, kv_heads, dim, topk;
  bool causal = true;
  bool batch_invariant = false;
  float softmax_scale = 0;
  MsaKvMode mode = MsaKvMode::kBf16;
  BlocksLayout layout = BlocksLayout::kHeadMajor;
  Tensor q, k, v, blocks, out, lse;
  Tensor q_offset, sink, q_scale, k_scale, v_scale, k_global_scale, v_global_scale;
  bool has_offset = false, has_sink = false, has_q_scale = false, has_k_scale = false,
       has_v_scale = false, has_global_scales = false;

  AttendCase(PagedBatch requests, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
             int64_t width, uint64_t seed = 3)
      : batch(std::move(requests)),
        heads(num_heads),
        kv_heads(num_kv_heads),
        dim(head_dim),
        topk(width) {
    Rng rng(seed);
    q = Tensor::bf16({batch.num_rows, heads, dim},
                     rng.bf16_normals(batch.num_rows * heads * dim, 2.0f));
    k = random_pool(batch, kv_heads, dim, seed + 1);
    v = random_pool(batch, kv_heads, dim, seed + 2);
    random_lists(seed + 3);
    make_outputs();
  }

  void make_outputs() {
    out = Tensor(DType::kBf16, {batch.num_rows, heads, dim});
    lse = Tensor(DType::kF32, {batch.num_rows, heads});
    out.fill_bytes(0x55);
    lse.fill_bytes(0x55);
  }

  /// Lists [kv_heads][rows][topk] of distinct blocks in random order among -1, the own block first.
  void random_lists(uint64_t seed) {
    Rng rng(seed);
    blocks = Tensor(DType::kI32, {kv_heads, batch.num_rows, topk});
    blocks.fill_bytes(0xFF);
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int64_t r = 0; r < batch.requests(); ++r) {
        for (int64_t i = 0; i < batch.counts[static_cast<size_t>(r)]; ++i) {
          const int64_t own = batch.position(r, i) / batch.block_size;
          if (batch.position(r, i) < 0 || topk == 0) continue;
          std::vector<int32_t> choice(static_cast<size_t>(own + 1));
          std::iota(choice.begin(), choice.end(), 0);
          std::swap(choice[0], choice.back());
          for (size_t j = 1; j < choice.size(); ++j)
            std::swap(choice[j],
                      choice[static_cast<size_t>(rng.integer(
                          static_cast<int64_t>(j), static_cast<int64_t>(choice.size()) - 1))]);
          choice.resize(static_cast<size_t>(topk), -1);
          for (size_t j = choice.size(); j > 1; --j)
            std::swap(choice[j - 1],
                      choice[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(j) - 1))]);
          std::copy(choice.begin(), choice.end(), list(g, batch.first_row(r) + i));
        }
      }
    }
  }
  int32_t* list(int64_t g, int64_t t) {
    return blocks.data<int32_t>() + (g * batch.num_rows + t) * topk;
  }
  void set_list(int64_t g, int64_t t, const std::vector<int32_t>& ids) {
    std::fill_n(list(g, t), topk, -1);
    std::copy(ids.begin(), ids.end(), list(g, t));
  }

  MsaAttendProblem problem() const {
    MsaAttendProblem result;
    result.max_rows = batch.num_rows;
    result.max_requests = batch.requests();
    result.max_pages = batch.max_pages;
    result.num_heads = heads;
    result.num_kv_heads = kv_heads;
    result.head_dim = dim;
    result.block_size = batch.block_size;
    result.topk = topk;
    result.softmax_scale = softmax_scale;
    result.causal = causal;
    result.kv_mode = mode;
    result.blocks_layout = layout;
    result.batch_invariant = batch_invariant;
    return result;
  }
  MsaAttendTensors tensors() {
    MsaAttendTensors result;
    result.q = q;
    result.k_pool = k;
    result.v_pool = v;
    result.page_table = batch.page_table;
    result.kv_len = batch.kv_len;
    result.q_indptr = batch.q_indptr;
    if (has_offset) result.q_offset = q_offset;
    result.blocks = blocks;
    if (has_sink) result.sink = sink;
    if (has_q_scale) result.q_scale = q_scale;
    if (has_k_scale) result.k_scale = k_scale;
    if (has_v_scale) result.v_scale = v_scale;
    if (has_global_scales) {
      result.k_global_scale = k_global_scale;
      result.v_global_scale = v_global_scale;
    }
    result.out = out;
    result.lse = lse;
    return result;
  }
  void run(const Options& options, int threads = 1) {
    test::run(MsaAttend::plan(problem(), device_of(options, threads), options), tensors());
  }

  /// Elements of the reference's output over the magnitudes of the values.
  std::vector<double> magnitude() const {
    AttendCase unsigned_values = *this;
    const bool bf16 = mode == MsaKvMode::kBf16;
    for (size_t i = bf16 ? 1 : 0; i < v.bytes().size(); i += bf16 ? 2 : 1)
      unsigned_values.v.data<uint8_t>()[i] &= mode == MsaKvMode::kQ8Kv4 ? 0x77 : 0x7F;
    unsigned_values.run({"ref"});
    return to_doubles(unsigned_values.out.view());
  }
  /// Compares the output with one of the same case; `num_rounded` of them are from rounded weights.
  testing::AssertionResult out_close_to(const AttendCase& expected, int num_rounded,
                                        const Tolerance& tolerance = kBf16Output) const {
    return ExpectCloseOutputs(to_doubles(out.view()), to_doubles(expected.out.view()),
                              num_rounded > 0 ? magnitude() : std::vector<double>(), num_rounded,
                              tolerance);
  }

  float out_at(int64_t t, int64_t h, int64_t d) const {
    return bf16_to_float(out.data<bf16_t>()[(t * heads + h) * dim + d]);
  }
  float lse_at(int64_t t, int64_t h) const { return lse.data<float>()[t * heads + h]; }
  /// Output bits of row t, then its lse.
  std::vector<uint8_t> row_bits(int64_t t) const {
    const int64_t row = heads * dim * 2;
    std::vector<uint8_t> bytes(out.bytes().begin() + t * row, out.bytes().begin() + (t + 1) * row);
    bytes.insert(bytes.end(), lse.bytes().begin() + t * heads * 4,
                 lse.bytes().begin() + (t + 1) * heads * 4);
    return bytes;
  }

  /// The part of rows [first, last) of request r as a batch of its own, at positions that the rows
  /// have here.
  AttendCase rows_of(int64_t r, int32_t first, int32_t last) const {
    AttendCase part = *this;
    const int64_t count = last - first;
    const int64_t row = batch.first_row(r) + first;
    part.batch.num_rows = count;
    part.batch.lengths = {static_cast<int32_t>(batch.position(r, last - 1) + 1)};
    part.batch.counts = {last - first};
    part.batch.kv_len = i32_vector(part.batch.lengths);
    part.batch.q_indptr = i32_vector({0, last - first});
    part.batch.page_table = Tensor::i32(
        {1, batch.max_pages},
        std::vector<int32_t>(batch.page_table.data<int32_t>() + r * batch.max_pages,
                             batch.page_table.data<int32_t>() + (r + 1) * batch.max_pages));
    part.q = Tensor(DType::kBf16, {count, heads, dim});
    std::memcpy(part.q.data<bf16_t>(), q.data<bf16_t>() + row * heads * dim,
                static_cast<size_t>(count * heads * dim) * 2);
    part.blocks = Tensor(DType::kI32, {kv_heads, count, topk});
    for (int64_t g = 0; g < kv_heads; ++g)
      std::memcpy(part.blocks.data<int32_t>() + g * count * topk,
                  blocks.data<int32_t>() + (g * batch.num_rows + row) * topk,
                  static_cast<size_t>(count * topk) * 4);
    part.make_outputs();
    return part;
  }
};

}  // namespace fovea::test
