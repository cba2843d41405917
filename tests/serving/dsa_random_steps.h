#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/kv_pool.h"
#include "fovea/page_allocator.h"
#include "fovea/request_table.h"
#include "tests/serving/dsa_random_steps_model.h"
#include "tests/support/rng.h"

namespace fovea::test {

struct RandomStepsSetup {
  std::string name;
  DsaConfig config;
  int threads = 1;
  bool bit_equal = true;  ///< A row has the same bits in every step that computes it again.
};
inline void PrintTo(const RandomStepsSetup& setup, std::ostream* out) { *out << setup.name; }

/// What a run came across, so that a test can see that it was not idle.
struct RandomStepsCounts {
  std::map<ForwardMode, int64_t> steps;
  int64_t plan_steps = 0;       ///< of those, into a plan
  int64_t draft_chains = 0;     ///< calls of begin_draft_steps
  int64_t rows = 0;             ///< compared with the model
  int64_t unclear_rows = 0;     ///< whose selection fp32 may order either way
  int64_t repeated_rows = 0;    ///< computed before, and bit-equal
  int64_t prefix_hits = 0;      ///< pages
  int64_t rejected_tokens = 0;  ///< rolled back after a verify
  int64_t preemptions = 0;

  int64_t total_steps() const;
};

/// A small engine that makes random legal steps over a backend of two layers, and compares every
/// byte and field with the plain model after each. Layer 0 is the target model, layer 1 the draft
/// model: verify runs the first, draft-extend and draft steps the second, everything else both.
///
/// The same setup and seed give the same steps.
class RandomSteps {
 public:
  RandomSteps(const RandomStepsSetup& setup, uint64_t seed);

  /// One or more forwards. Throws StepFailure.
  void step();
  /// Releases every request; every page must be free or cached then, and evictable.
  void finish();

  const RandomStepsCounts& counts() const { return counts_; }
  /// One line a forward.
  const std::deque<std::string>& log() const { return log_; }

  static constexpr int64_t kMaxContext = 40;
  static constexpr float kSoftmaxScale = 0.0721688f;  // 192^-0.5

 private:
  static constexpr int kLayers = 2;
  static constexpr int64_t kMaxLive = 6;

  struct Request {
    int id = 0;
    int32_t row = 0;
    std::vector<int32_t> tokens;            // prompt, then what was committed
    std::vector<int32_t> pages;             // of positions 0 ..
    std::array<int64_t, kLayers> stored{};  // leading positions whose rows a layer holds
    std::vector<int32_t> candidates;        // of the verify that a draft-extend has to follow
    std::map<int64_t, int32_t> rejected;    // token that must not become true at a position
    int64_t published = 0;                  // pages
    int64_t len() const { return stored[0]; }
    bool lags() const { return stored[1] < stored[0]; }
    bool prefilled() const { return stored[0] == static_cast<int64_t>(tokens.size()); }
  };
  struct Launch {
    ModelStep step;
    std::vector<int> layers;
    DsaStepPlan* plan = nullptr;
    bool host_lengths = false;
    std::vector<int32_t> host_seq_len, host_ext_len;
    Tensor seq_len, pool_row, ext_len, positions, out_cache_loc;
  };
  struct Inputs {
    Tensor q, k, index_q, index_k, gate, out, lse, indices;
  };

  // Requests and pages.
  void admit();
  void release(int id, bool again);
  bool reserve(Request& request, int64_t positions);
  void trim(Request& request);
  void publish(Request& request);
  std::vector<uint64_t> page_hashes(const Request& request) const;
  int32_t draw_token(const Request& request, int64_t position);
  std::vector<int> ids_that(bool (*is)(const Request&));
  std::vector<int> subset(std::vector<int> ids);

  // Steps.
  void extend(bool mixed);
  void decode();
  void idle();
  void verify();
  void draft_extend();
  void draft_chain();
  void run_chain(const std::vector<int>& ids, int64_t steps);
  ModelWork work_of(const Request& request, int64_t first, std::vector<int32_t> history) const;
  void pad_requests(Launch& launch, int64_t requests, int64_t rows);
  int64_t bucket_for(int64_t requests);
  DsaStepPlan* plan_for(ForwardMode mode, int64_t requests);
  DsaStepPlan* chain_plan(int64_t bucket, int64_t j);

  // One forward.
  void run(Launch& launch);
  void lay_out(Launch& launch);
  ForwardBatch batch_of(const Launch& launch) const;
  void forward(const Launch& launch, int layer);
  void fill_inputs(const Launch& launch, int layer, Inputs& inputs);
  void check_report(const Launch& launch) const;
  void check_outputs(const Launch& launch, int layer, const Inputs& inputs);
  void check_row(const Launch& launch, int layer, size_t owner, int64_t i, int64_t row,
                 const Inputs& inputs);
  void check_repeat(int layer, const ModelWork& work, int64_t i, uint64_t digest);
  void write_shadow(int layer, int32_t slot, const TokenImage& image);
  void check_pools();
  void check_live_rows(int layer);
  void check_pages() const;
  void note(const Launch& launch);
  int32_t slot_of(const ModelWork& work, int64_t position) const;

  RandomStepsSetup setup_;
  DsaConfig config_;
  Rng rng_;
  DsaBackend backend_;
  PageAllocator allocator_;
  RequestTable table_;
  KvPool kv_pool_, index_pool_;
  TokenImages images_;
  std::array<std::vector<uint8_t>, kLayers> kv_shadow_, index_shadow_;
  std::map<int, Request> live_;
  std::set<int> busy_;  // requests that an unfinished step refers to
  std::vector<std::vector<int32_t>> prompts_, waiting_;
  std::map<std::pair<ForwardMode, int64_t>, DsaStepPlan> plans_;
  std::map<std::pair<int64_t, int64_t>, DsaStepPlan> chain_plans_;
  std::unordered_map<uint64_t, uint64_t> digests_;
  int next_id_ = 0;
  RandomStepsCounts counts_;
  std::deque<std::string> log_;
};

/// The configuration of a run: tiny widths, so that thousands of steps cost little.
DsaConfig random_steps_config(int64_t page_size, RowFormat row_format);
/// Turns `check` on: no step may be reported then.
void check_contents(DsaConfig& config);

}  // namespace fovea::test
