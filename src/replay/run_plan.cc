#include "src/replay/run_plan.h"

#include <algorithm>
#include <array>
#include <queue>

#include "src/core/check.h"
#include "src/replay/hash.h"

namespace fovea::internal {
namespace {

struct Candidate {
  uint64_t key = 0;  // the smallest keys win
  CheckRow row;

  friend bool operator<(const Candidate& a, const Candidate& b) {
    return std::tie(a.key, a.row) < std::tie(b.key, b.row);
  }
};

// The `capacity` candidates with the smallest keys.
class Reservoir {
 public:
  explicit Reservoir(int64_t capacity) : capacity_(static_cast<size_t>(capacity)) {}

  void offer(const Candidate& candidate) {
    if (heap_.size() < capacity_) {
      heap_.push(candidate);
    } else if (capacity_ > 0 && candidate.key < heap_.top().key) {
      heap_.pop();
      heap_.push(candidate);
    }
  }

  // Best first.
  std::vector<Candidate> take() {
    std::vector<Candidate> result;
    for (; !heap_.empty(); heap_.pop()) result.push_back(heap_.top());
    std::reverse(result.begin(), result.end());
    return result;
  }

 private:
  size_t capacity_;
  std::priority_queue<Candidate> heap_;
};

class Sampler {
 public:
  Sampler(const RunPlanOptions& options, const Workload& workload)
      : options_(options), workload_(workload) {}

  void offer(const StepEntry& entry) {
    const WorkloadRequest& request = workload_.request(entry.request);
    const int64_t rows = entry.decode ? request.output_tokens : request.prompt_tokens;
    for (int64_t p = std::max(entry.begin, entry.first_new); p < entry.kept_end; ++p) {
      const uint64_t random =
          hash_in(HashDomain::kSample, options_.seed, request.trace_row, p) >> 32;
      // The smallest of n uniform numbers is about exponential with rate n: times n, every request
      // has the same chance of being first.
      const uint64_t key = random * static_cast<uint64_t>(rows);
      const bool selecting = p + 1 > options_.selecting_length;
      strata_[(entry.decode ? 2u : 0u) + (selecting ? 0u : 1u)].offer(
          {key, {entry.request, p, 0, entry.decode}});
    }
  }

  std::vector<CheckRow> take() {
    const int64_t total = options_.check_rows;
    const std::array<int64_t, 4> shares = {total * 2 / 5, total / 10, total * 2 / 5,
                                           total - total * 2 / 5 * 2 - total / 10};
    std::array<std::vector<Candidate>, 4> candidates;
    std::vector<Candidate> chosen;
    for (size_t s = 0; s < 4; ++s) {
      candidates[s] = strata_[s].take();
      const auto count = std::min(candidates[s].size(), static_cast<size_t>(shares[s]));
      chosen.insert(chosen.end(), candidates[s].begin(),
                    candidates[s].begin() + static_cast<std::ptrdiff_t>(count));
      candidates[s].erase(candidates[s].begin(),
                          candidates[s].begin() + static_cast<std::ptrdiff_t>(count));
    }
    for (const size_t s : {size_t{0}, size_t{2}, size_t{1}, size_t{3}}) {
      for (const Candidate& candidate : candidates[s]) {
        if (static_cast<int64_t>(chosen.size()) < total) chosen.push_back(candidate);
      }
    }
    std::vector<CheckRow> rows;
    rows.reserve(chosen.size());
    for (const Candidate& candidate : chosen) rows.push_back(candidate.row);
    std::sort(rows.begin(), rows.end());
    return rows;
  }

 private:
  const RunPlanOptions& options_;
  const Workload& workload_;
  // prefill selecting, prefill short, decode selecting, decode short
  std::array<Reservoir, 4> strata_ = {
      Reservoir(options_.check_rows), Reservoir(options_.check_rows),
      Reservoir(options_.check_rows), Reservoir(options_.check_rows)};
};

// Looks for the best entry to be hit by the fault.
class FaultSearch {
 public:
  explicit FaultSearch(const RunPlanOptions& options) : options_(options) {}

  void look_at(int64_t step, const StepEntry& entry) {
    const std::optional<FaultCandidate> found = options_.find_fault(entry);
    if (!found || found->rank <= rank_) return;
    rank_ = found->rank;
    fault_ = {step, options_.inject, entry.request, found->page};
    row_ = {entry.request, found->position, found->layer_index, entry.decode};
  }

  // Adds the row that the fault hits to the rows to be checked.
  Fault finish(std::vector<CheckRow>* rows) const {
    if (fault_.step < 0) {
      invalid("replay", "inject = " + options_.inject +
                            ", but no step of the trace has a row that it could hit");
    }
    std::erase_if(*rows, [&](const CheckRow& row) {
      return row.request == row_.request && row.position == row_.position;
    });
    rows->push_back(row_);
    std::sort(rows->begin(), rows->end());
    return fault_;
  }

 private:
  const RunPlanOptions& options_;
  int rank_ = -1;
  Fault fault_;
  CheckRow row_;
};

}  // namespace

RunPlan plan_run(const RunPlanOptions& options, const Workload& workload, Scheduler* scheduler) {
  RunPlan plan;
  Sampler sampler(options, workload);
  FaultSearch faults(options);
  StepBatch batch;
  while (scheduler->next(&batch)) {
    for (const StepEntry& entry : batch.entries) {
      sampler.offer(entry);
      if (!options.inject.empty()) faults.look_at(plan.num_steps, entry);
    }
    ++plan.num_steps;
    plan.num_rows += batch.num_rows();
    plan.max_step_rows = std::max(plan.max_step_rows, batch.num_computed());
    plan.max_step_requests =
        std::max(plan.max_step_requests, static_cast<int64_t>(batch.entries.size()));
    scheduler->commit();
  }
  plan.check_rows = sampler.take();
  int64_t turn = 0;
  for (CheckRow& row : plan.check_rows) {
    row.layer = turn++ % options.num_layers;
  }
  if (!options.inject.empty()) plan.fault = faults.finish(&plan.check_rows);
  return plan;
}

const CheckRow* RowFilter::sampled(const StepEntry& entry, int64_t position,
                                   int64_t layer_index) const {
  if (!is_kept(entry, position)) return nullptr;
  const CheckRow from{entry.request, position, 0, false};
  const auto wanted = std::lower_bound(plan_.check_rows.begin(), plan_.check_rows.end(), from);
  const bool found = wanted != plan_.check_rows.end() && wanted->request == entry.request &&
                     wanted->position == position && wanted->layer == layer_index;
  return found ? &*wanted : nullptr;
}

}  // namespace fovea::internal
