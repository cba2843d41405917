#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

/// Problem of index_store and index_gather.
struct IndexCacheProblem {
  int64_t max_rows = 0;    ///< Upper bound of T (store) or of S, the gathered rows (gather).
  int64_t head_dim = 128;  ///< Di, 1..16384; a token takes Di code bytes and one fp32 scale.
  int64_t page_size = 0;   ///< P, 1..256.
};

/// Tensors of index_store. A page may be longer than P * (Di + 4) bytes and the page stride larger
/// still; the surplus is never touched.
struct IndexStoreTensors {
  ConstTensorView k_fp8;    ///< u8 [T, Di]
  ConstTensorView k_scale;  ///< f32 [T]
  ConstTensorView slots;    ///< i32 or i64 [T]: page * P + offset; outside the pool: skipped
  TensorView index_pool;    ///< u8 [pages, >= P * (Di + 4)]
};

/// Scatters quantised index keys into the paged index cache (row format i132).
///
/// Inside a page all codes come first, then all scales: token j of a page has its codes at byte
/// j * Di and its fp32 little-endian scale at byte P * Di + 4 * j. P = 1 gives records of Di + 4
/// bytes. Codes and scales are copied as they are, NaN included.
///
/// A token whose slot is outside the pool (e.g. -1) is skipped; every other byte of the pool keeps
/// its value. A slot that occurs twice in one call is a caller error: its bytes are then a mixture.
/// Addresses are 64-bit. T = 0 does nothing. The caller owns all memory.
///
/// plan() throws Error(kInvalidArgument) for bounds outside the table above, run() for tensors that
/// do not fit the plan, before anything is written. Bitwise equal for any number of threads.
/// Thread-safe, unless two runs write one slot. Needs no workspace.
///
/// Source: the paged index-key cache of public DeepSeek-V3.2 engines, restated in
/// docs/index_cache.md.
class FOVEA_API IndexStore : public OperatorPlan<IndexCacheProblem, IndexStoreTensors> {
 public:
  static IndexStore plan(const IndexCacheProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

/// Tensors of index_gather. With L = kv_indptr[r+1] - kv_indptr[r], columns of request r from
/// ceil(L / P) on are not read.
struct IndexGatherTensors {
  ConstTensorView index_pool;  ///< u8 [pages, >= P * (Di + 4)]
  ConstTensorView page_table;  ///< i32 [R, max_pages]
  ConstTensorView kv_indptr;   ///< i32 [R+1]: request r fills rows kv_indptr[r] .. kv_indptr[r+1]-1
  TensorView k_fp8;    ///< u8 [S, Di], S at least kv_indptr[R]; rows past it are not written
  TensorView k_scale;  ///< f32 [S]; a key whose page is outside the pool: codes 0, scale 0
};

/// Gathers the index keys of a batch into contiguous arrays, requests in order: row
/// kv_indptr[r] + p is position p of request r, from page page_table[r][p / P], offset p % P.
///
/// A position past the table, or on a page outside the pool, gives codes 0 and scale 0. Rows
/// outside [0, S) are left out, rows of no request are not written; where kv_indptr decreases, the
/// later request wins. Pages may occur in several requests. R = 0 and S = 0 do nothing. The caller
/// owns all memory.
///
/// Errors, determinism and thread-safety as IndexStore. Needs no workspace.
class FOVEA_API IndexGather : public OperatorPlan<IndexCacheProblem, IndexGatherTensors> {
 public:
  static IndexGather plan(const IndexCacheProblem& problem, const Device& device,
                          const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
