#pragma once

#include <cstdint>

#include "fovea/export.h"
#include "fovea/plan.h"
#include "fovea/tensor.h"

namespace fovea {

struct IndexCacheProblem {
  int64_t max_rows = 0;    ///< Upper bound of T (store) or of the gathered rows (gather).
  int64_t head_dim = 128;  ///< Di; a token takes Di code bytes and one fp32 scale.
  int64_t page_size = 0;   ///< P, 1..256.
};

struct IndexStoreTensors {
  ConstTensorView k_fp8;    ///< u8 [T, Di]
  ConstTensorView k_scale;  ///< f32 [T]
  ConstTensorView slots;    ///< i32 or i64 [T]; out of range: skipped
  TensorView index_pool;    ///< u8 [pages, >= P * (Di + 4)]
};

/// Scatters quantised index keys into the paged index cache (i132 layout: in each page all codes
/// first, then all scales).
class FOVEA_API IndexStore : public OperatorPlan<IndexCacheProblem, IndexStoreTensors> {
 public:
  static IndexStore plan(const IndexCacheProblem& problem, const Device& device,
                         const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

struct IndexGatherTensors {
  ConstTensorView index_pool;  ///< u8 [pages, >= P * (Di + 4)]
  ConstTensorView page_table;  ///< i32 [R, max_pages]
  ConstTensorView kv_indptr;   ///< i32 [R+1]: request r fills rows kv_indptr[r] .. kv_indptr[r+1]-1
  TensorView k_fp8;    ///< u8 [S, Di], S at least kv_indptr[R]; rows past it are not written
  TensorView k_scale;  ///< f32 [S]; a key whose page is outside the pool: code 0, scale 0
};

/// Gathers the index keys of a batch into contiguous arrays, requests in order.
class FOVEA_API IndexGather : public OperatorPlan<IndexCacheProblem, IndexGatherTensors> {
 public:
  static IndexGather plan(const IndexCacheProblem& problem, const Device& device,
                          const Options& options = {});

 private:
  using OperatorPlan::OperatorPlan;
};

}  // namespace fovea
