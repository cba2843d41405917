#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "fovea/sparse_mla.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea::test {

// Limits of spec 6.1 for out and for lse and max_logits, over bf16 rows and over packed fp8 rows.
inline constexpr Tolerance kSparseOut{.absolute = 8e-4, .relative = 3.01 / 128, .cosine = 7e-6};
inline constexpr Tolerance kSparseLse{.absolute = 1e-6, .relative = 2.01 / 65536, .cosine = 1e-7};
inline constexpr Tolerance kSparseFp8Out{.absolute = 1e-3, .relative = 2.01 / 128, .cosine = 5e-6};
inline constexpr Tolerance kSparseFp8Lse{
    .absolute = 1e-6, .relative = 8.01 / 65536, .cosine = 1e-7};

/// A tensor between guard pages whose rows are `pads[axis]` elements further apart than needed; it
/// ends with its last element, so that one byte read or written past it ends the process.
class StridedTensor {
 public:
  StridedTensor() = default;
  StridedTensor(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> pads, uint8_t fill);

  TensorView view() const { return view_; }
  template <class T>
  T& at(std::initializer_list<int64_t> index) const {
    int64_t offset = 0;
    size_t axis = 0;
    for (const int64_t i : index) offset += i * view_.stride[axis++];
    return static_cast<T*>(view_.data)[offset];
  }
  /// Every byte that belongs to no element still has the fill value.
  bool gaps_untouched() const;

 private:
  std::shared_ptr<GuardedMemory> memory_;
  TensorView view_;
  int64_t bytes_ = 0;
  uint8_t fill_ = 0;
};

/// Bytes from a row of Dqk channels to the next of its page, and of all of a page.
int64_t latent_row_bytes(RowFormat format, int64_t head_dim_qk);
int64_t latent_page_bytes(RowFormat format, int64_t head_dim_qk, int64_t page_size);
/// Where the scales of a row lie apart from it: the 7 bytes of v4, or the element of r512.
struct ApartScales {
  uint8_t* bytes = nullptr;
  bool bf16 = false;  // r512: otherwise fp32
};
/// Writes a row of random channels and what an operator has to see of it, as doubles.
void write_latent_row(RowFormat format, int64_t head_dim_qk, float k_scale, Rng& rng, uint8_t* row,
                      double* decoded, ApartScales scales = {});

/// One cache of a case.
struct CacheSpec {
  RowFormat format = RowFormat::kBf16;
  int64_t page_size = 0;  // 0: bf16 [S, Dqk]
  int64_t num_keys = 0;   // S; a multiple of the page size where there is one
  int64_t topk = 0;
  bool lengths = false;
  bool bf16_scale = false;  // type of the scales of r512
  /// > 0, of an extra cache: pages of 3 requests in a table of that width, topk the bound of the
  /// lengths, which are always there.
  int64_t max_pages = 0;
  int64_t page_pad = 19;  // bytes between the pages of a packed pool; odd: rows at any address
};

struct CaseSpec {
  int64_t rows = 1;
  int64_t heads = 1;
  int64_t head_dim_qk = 576;
  CacheSpec primary = {};
  CacheSpec extra = {};  // num_keys 0: absent
  bool sink = false;
  float logit_cap = 0;
  int64_t fixed_splits = 0;
  int64_t split_parts = 0;  // with the schedule of the lengths
  EmptyLse empty_lse = EmptyLse::kNegInf;
  double invalid_share = 0.2;  // of the slots
  int64_t rope_dim = 0;        // of the inverse rotation
  float q_scale = 1.0f;
  float q_code_scale = 0;  // > 0: q is u8, its channels code * q_code_scale
  float k_scale = 1.0f;
  uint64_t seed = 1;
};

/// Two to eleven keys with similar weights and values that cancel: what rounds a weight to bf16
/// misses the limits of 6.1.
std::vector<CaseSpec> few_keys_share_the_weight();

/// What one run wrote.
struct Outputs {
  std::vector<double> out, lse, max_logits;
  std::vector<double> magnitude;  // of expected(): out of the values' magnitudes
  bool rounds_weights = false;    // see tests/support/compare.h
  int num_rounded() const { return rounds_weights ? 1 : 0; }
  std::vector<uint16_t> out_bits;
  std::vector<uint32_t> lse_bits, max_logits_bits;
};

/// The bits of two runs, NaN included.
testing::AssertionResult SameBits(const Outputs& a, const Outputs& b);

/// A problem with hostile memory: every buffer guarded and strided, unreferenced keys NaN, bad
/// indices of every kind, columns past the lengths pointing at NaN keys or far outside.
class SparseMlaCase {
 public:
  explicit SparseMlaCase(const CaseSpec& spec);

  SparseMlaProblem problem() const;
  /// Tensors of rows [begin, end), over fresh outputs.
  Outputs run(const Options& options, int threads = 1, int64_t begin = 0, int64_t end = -1);
  /// All rows by a function that takes the place of the plan of an implementation.
  using Runner = void (*)(SparseMlaProblem problem, const SparseMlaTensors& tensors);
  Outputs run_by(Runner runner, std::string_view implementation);
  /// One head of every row as a problem of its own.
  Outputs run_head(const Options& options, int64_t head);
  /// The same with the keys of the page table of the second cache as lists.
  Outputs run_with_lists(const Options& options);
  /// The formula in long double over the decoded keys, without a running maximum.
  Outputs expected(int64_t begin = 0, int64_t end = -1) const;
  testing::AssertionResult matches(const Outputs& actual, int64_t begin = 0,
                                   int64_t end = -1) const;
  /// Whether out and lse of two runs of all rows agree within the limits of one.
  testing::AssertionResult agree(const Outputs& a, const Outputs& b) const;

  /// Overwrites one query element; as it is kept.
  void set_q(int64_t t, int64_t h, int64_t d, float value);
  double query(int64_t t, int64_t h, int64_t d) const;
  /// The index list of a cache (0 primary, 1 extra), to be changed by a test before running; a slot
  /// made valid must name a key that some list named before.
  int32_t& index(int cache, int64_t t, int64_t slot) const;
  int32_t& topk_length_of(int cache, int64_t t) const;
  /// The keys of a cache that row t attends to, in the order of its list.
  std::vector<int64_t> keys_of(int cache, int64_t t) const;
  /// Channel d of a key as the operator has to see it.
  double key(int cache, int64_t key, int64_t d) const;

  /// Takes the query, the primary lists and the decoded primary rows of `other`, as bf16.
  void copy_rows_from(const SparseMlaCase& other);
  /// Allocations of a run after a first one.
  int64_t count_allocations(const Options& options, int threads);

  /// The schedule of rows [begin, end), rows 3 elements further apart than needed.
  StridedTensor schedule(int64_t begin, int64_t end, StridedTensor* indptr) const;
  /// When defined, what runs get in place of their own schedule.
  StridedTensor schedule_override;

  StridedTensor q, sink, inverse_rope, positions;

 private:
  struct Cache {
    CacheSpec spec;
    StridedTensor pool, indices, length, inv_scale, page_table, row_to_request;
    std::vector<double> keys;  // [S, Dqk]; NaN where unreferenced
  };
  struct Buffers {
    StridedTensor out, lse, max_logits, schedule, indptr;
  };
  SparseMlaTensors tensors(int64_t begin, int64_t end, Buffers& buffers) const;
  static Outputs run(const SparseMlaProblem& problem, const SparseMlaTensors& tensors,
                     const Options& options, int threads);
  static Outputs outputs_of(const SparseMlaTensors& tensors, std::string_view implementation);
  bool reads_packed_rows() const;
  void build_cache(Cache& cache, const CacheSpec& spec, Rng& rng);
  void build_lists(Cache& cache, Rng& rng);
  void build_table(Cache& cache, Rng& rng);
  void build_rotation(Rng& rng);
  void write_key(Cache& cache, int64_t key, Rng& rng);
  static std::vector<int64_t> keys_of(const Cache& cache, int64_t t);
  void turn_back(int64_t t, std::vector<double>& value, std::vector<double>& magnitude) const;
  static int64_t list_length(const Cache& cache, int64_t t);

  CaseSpec spec_;
  std::array<Cache, 2> caches_;
};

}  // namespace fovea::test
