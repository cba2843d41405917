#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/tensor.h"
#include "src/replay/batch_arrays.h"
#include "src/replay/dsa_check.h"
#include "src/replay/engine_totals.h"
#include "src/replay/run_plan.h"
#include "src/replay/scheduler.h"

/// Reads what a step produced: selections as positions, digests, the rows to be checked.
namespace fovea::internal {

/// The outputs of one layer for the rows of a forward call.
struct DsaLayerRows {
  int64_t layer_index = 0;
  int64_t layer = 0;        ///< Model layer id.
  ConstTensorView indices;  ///< i32 [T, K]: slots, ascending by position, then -1
  ConstTensorView out;      ///< bf16 [T, H, 512]
  ConstTensorView lse;      ///< f32 [T, H]
  std::span<const StepRow> rows;
  const StepBatch* batch = nullptr;
  ConstTensorView req_to_token;  ///< As the backend saw it.
};

class DsaRowReader {
 public:
  DsaRowReader(int64_t num_pages, int64_t page_size, int num_workers);

  /// Digest of the rows that count. Runs in parallel inside the caller's ThreadScope.
  Digest digest(const DsaLayerRows& layer, const RowFilter& filter, const Workload& workload);

  /// Copies the rows that are to be checked on this layer.
  void take_samples(const DsaLayerRows& layer, const RowFilter& filter,
                    std::vector<DsaSample>* samples);

 private:
  // Page -> its index in the request's row of the table; one map per worker, loaded for one
  // request.
  struct PageMap {
    std::vector<int32_t> index_of_page;
    std::vector<int32_t> loaded;  // the pages whose entry is set
    int64_t request = -1;
  };

  void load(const DsaLayerRows& layer, const StepEntry& entry, PageMap* map) const;
  void read_positions(const DsaLayerRows& layer, int64_t row, PageMap* map,
                      std::vector<int32_t>* positions) const;

  int64_t page_size_;
  std::vector<PageMap> maps_;  // per worker
};

}  // namespace fovea::internal
