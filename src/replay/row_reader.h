#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/tensor.h"
#include "src/replay/batch_arrays.h"
#include "src/replay/check.h"
#include "src/replay/run_plan.h"
#include "src/replay/scheduler.h"

/// Reads what a step produced: selections as positions, digests, the rows to be checked.
namespace fovea::internal {

/// Sums of row fingerprints modulo 2^64.
struct Digest {
  uint64_t selection = 0;
  uint64_t output = 0;
  int64_t rows = 0;

  Digest& operator+=(const Digest& other) {
    selection += other.selection;
    output += other.output;
    rows += other.rows;
    return *this;
  }
};

/// The outputs of one layer for the rows of a forward call.
struct LayerRows {
  int64_t layer_index = 0;
  int64_t layer = 0;        ///< Model layer id.
  ConstTensorView indices;  ///< i32 [T, K]: slots, ascending by position, then -1
  ConstTensorView out;      ///< bf16 [T, H, 512]
  ConstTensorView lse;      ///< f32 [T, H]
  std::span<const StepRow> rows;
  const StepBatch* batch = nullptr;
  ConstTensorView req_to_token;  ///< As the backend saw it.
};

class RowReader {
 public:
  RowReader(int64_t num_pages, int64_t page_size, int num_workers);

  /// Digest of the rows that stay, are first produced here and start at digest_from[request]. Runs
  /// in parallel inside the caller's ThreadScope.
  Digest digest(const LayerRows& layer, std::span<const int64_t> digest_from,
                const Workload& workload);

  /// Copies the rows that the plan wants checked on this layer, of those that stay and are first
  /// produced here.
  void take_samples(const LayerRows& layer, const RunPlan& plan, std::vector<CheckSample>* samples);

 private:
  // Page -> its index in the request's row of the table; one map per worker, loaded for one
  // request.
  struct PageMap {
    std::vector<int32_t> index_of_page;
    std::vector<int32_t> loaded;  // the pages whose entry is set
    int64_t request = -1;
  };

  void load(const LayerRows& layer, const StepEntry& entry, PageMap* map) const;
  void read_positions(const LayerRows& layer, int64_t row, PageMap* map,
                      std::vector<int32_t>* positions) const;

  int64_t page_size_;
  std::vector<PageMap> maps_;  // per worker
};

}  // namespace fovea::internal
