#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "fovea/dense_mla.h"
#include "tests/mla/sparse_mla_case.h"

namespace fovea::test {

struct DenseMlaSpec {
  std::vector<int32_t> rows = {1};    // of each request
  std::vector<int32_t> kv_len = {1};  // as the tensor holds it
  int64_t heads = 1;
  int64_t heads_kv = 1;
  int64_t head_dim_qk = 576;
  RowFormat format = RowFormat::kBf16;
  int64_t page_size = 64;
  bool packed = false;    // a bf16 cache as u8 pool
  int64_t max_pages = 0;  // 0: one more than the longest length needs
  bool causal = true;
  double invalid_share = 0;  // of the pages
  float q_code_scale = 0;    // > 0: q is u8, its channels code * q_code_scale
  float k_scale = 1;
  int64_t split_keys = 0;
  uint64_t seed = 1;
};

struct DenseMlaOutputs {
  std::vector<double> out, lse;   // [T, H, 512], [T, H]
  std::vector<double> magnitude;  // of expected(): out of the values' magnitudes
  bool rounds_weights = false;    // see tests/support/compare.h
  int num_rounded() const { return rounds_weights ? 1 : 0; }
  std::vector<uint16_t> out_bits;  // the same
  std::vector<uint32_t> lse_bits;
  int64_t heads = 0;

  /// What row t has, as bits.
  std::vector<uint32_t> row(int64_t t) const;
};
testing::AssertionResult SameBits(const DenseMlaOutputs& a, const DenseMlaOutputs& b);

/// A problem with hostile memory: every buffer guarded and strided, all of the cache that no row
/// sees NaN, pages in random order, the table beyond each length garbage. A few pages that no
/// request uses lie between them.
class DenseMlaCase {
 public:
  explicit DenseMlaCase(const DenseMlaSpec& spec);

  DenseMlaProblem problem() const;
  int64_t num_rows() const { return num_rows_; }
  /// First row of a request.
  int64_t first_row(int64_t r) const;
  /// Keys that the request has and their channels, NaN where its page is outside the pool.
  int64_t num_keys(int64_t r) const;
  bool key_exists(int64_t r, int64_t j) const;
  double& key(int64_t r, int64_t kv_head, int64_t j, int64_t d);
  /// Overwrites channel d of a bf16 key.
  void set_key(int64_t r, int64_t kv_head, int64_t j, int64_t d, float value);
  void set_q(int64_t t, int64_t h, int64_t d, float value);
  double query(int64_t t, int64_t h, int64_t d) const;

  DenseMlaOutputs run(const Options& options, int threads = 1);
  /// Other tensors or another problem over outputs of the same shape.
  DenseMlaOutputs run(const DenseMlaProblem& problem, const DenseMlaTensors& tensors,
                      const Options& options, int threads = 1);
  /// Inputs only.
  DenseMlaTensors tensors() const;
  /// The formula in long double, without a running maximum.
  DenseMlaOutputs expected();
  DenseMlaOutputs expected(const DenseMlaProblem& problem);
  testing::AssertionResult matches(const DenseMlaOutputs& actual);

  StridedTensor q, kv, page_table, kv_len, q_indptr;

 private:
  uint8_t* row_at(int64_t r, int64_t kv_head, int64_t j) const;

  DenseMlaSpec spec_;
  int64_t num_rows_ = 0;
  int64_t table_width_ = 0;
  std::vector<std::vector<double>> keys_;  // of each request [h_kv, kv_len, Dqk]
};

}  // namespace fovea::test
