#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fovea/replay.h"
#include "src/replay/check_summary.h"
#include "src/replay/engine_totals.h"
#include "src/replay/run_plan.h"
#include "src/replay/scheduler.h"
#include "src/replay/workload.h"

/// What the replayer asks of a model. How to add one: docs/replay-engines.md.
namespace fovea::internal {

class ModelFamily;

/// Which page sizes a model can have.
struct PageRule {
  int64_t preferred = 0;  ///< The model's own.
  std::function<bool(int64_t page)> allows = [](int64_t) { return true; };
  std::string expected = "1..256";  ///< In words, for the error.
};

/// A model preset.
struct ModelSpec {
  std::string name;
  int64_t num_heads = 0;  ///< Query heads before tensor parallel, which divides them.
  int64_t topk = 0;       ///< Selection width; 0: nothing is selected.
  PageRule page;
  SchedulingRules scheduling;
  std::vector<std::string> layer_kinds;  ///< One per layer of the model.
  /// What the layers option "pattern" runs; empty: the first layer of each kind.
  std::vector<int64_t> pattern_layers = {};
  bool has_draft_layer = false;         ///< Drafts are possible.
  std::vector<std::string> injections;  ///< Faults that find_fault knows, e.g. "page".
  std::shared_ptr<const ModelFamily> family;

  /// Id of the one layer of the draft model: behind those of the model.
  int64_t draft_layer() const { return static_cast<int64_t>(layer_kinds.size()); }
  /// Kind of a layer, "draft" for the draft model's.
  std::string layer_kind(int64_t layer) const {
    return layer == draft_layer() ? "draft" : layer_kinds[static_cast<size_t>(layer)];
  }
};

/// What is fixed before a run is planned. What it refers to outlives the run.
struct RunSetup {
  const ModelSpec& model;
  const Workload& workload;
  std::vector<int64_t> layers;  ///< Model layer ids; with drafts the draft model's layer is last.
  int64_t draft_tokens = 0;
  DraftMode draft_mode = DraftMode::kV1;
  int64_t tp = 1;
  int64_t topk = 0;
  int64_t page_size = 0;
  int64_t max_batch = 0;  ///< Requests that run at once: pool rows are 1..max_batch.
  bool sharing = true;    ///< Requests may start behind shared pages.
  bool deterministic = true;
  bool graph = false;  ///< Steps in step plans run as captured graphs.
  uint64_t seed = 0;
  std::string implementation = {};
  Device device = {};
  std::optional<ThroughputLimits> ceilings = {};

  int64_t num_heads() const { return model.num_heads / tp; }
  /// Whether layer_index is that of the draft model.
  bool is_draft(int64_t layer_index) const {
    return draft_tokens > 0 && layer_index + 1 == static_cast<int64_t>(layers.size());
  }
};

/// Bounds of one run, found by its plan.
struct EngineConfig {
  int64_t num_pages = 0;     ///< Usable pages, without the dummy page.
  int64_t table_width = 0;   ///< Columns of the request table.
  int64_t max_requests = 0;  ///< Of one step.
  int64_t max_rows = 0;      ///< Of one step.
  /// Rows of request r before digest_from[r] belong to an earlier request and enter no digest.
  std::vector<int64_t> digest_from;
};

/// Device memory of all simulated layers together.
struct CacheCost {
  int64_t bytes_per_page = 0;
  int64_t bytes_per_request = 0;  ///< Of max_batch requests, whatever the pages.
};

/// One run of a model: pools, backend, tensors, samples. StepEngine does what is common.
class ModelEngine {
 public:
  virtual ~ModelEngine() = default;

  /// Runs the step that `scheduler` has formed and sets its step_ms. A step that throws leaves
  /// totals and samples as they were and may be run again: its rows go to the same slots.
  virtual void run_step(int64_t step, Scheduler* scheduler, StepBatch* batch) = 0;

  virtual const EngineTotals& totals() const = 0;
  /// Of the pools.
  virtual int64_t cache_bytes() const = 0;

  /// Memory of the rows that wait to be checked.
  virtual int64_t sample_bytes() const = 0;
  /// Recomputes the sampled rows of the steps since the last call, in parallel inside the caller's
  /// ThreadScope, and forgets them.
  virtual std::vector<CheckedRow> check_samples() = 0;
};

/// Makes engines of one kind; immutable, thread-safe. One object per preset holds its shapes.
class ModelFamily {
 public:
  virtual ~ModelFamily() = default;

  /// Throws Error(kInvalidArgument) for options that the model cannot have; the common ones have
  /// been checked.
  virtual void check_options(const ReplayOptions& options) const;

  virtual CacheCost cache_cost(const RunSetup& setup) const = 0;

  /// Rows longer than this select. Default: none does.
  virtual int64_t selecting_length(const RunSetup& setup) const;

  /// How the fault `kind` (one of ModelSpec::injections) could hit the rows of an entry; absent: it
  /// cannot. Default: no fault.
  virtual std::optional<FaultCandidate> find_fault(const RunSetup& setup, const std::string& kind,
                                                   const StepEntry& entry) const;

  /// References to `setup` and `plan` are kept.
  virtual std::unique_ptr<ModelEngine> make_engine(const RunSetup& setup, const RunPlan& plan,
                                                   EngineConfig config) const = 0;
};

}  // namespace fovea::internal
