#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "fovea/page_allocator.h"
#include "fovea/replay.h"
#include "fovea/request_table.h"

/// Continuous batching: which rows form each step, and where their tokens live. A pure function of
/// requests and configuration; no operator and no clock is involved.
///
///   Scheduler scheduler(config, requests);
///   StepBatch batch;
///   while (scheduler.next(&batch)) { ...run the rows...; scheduler.commit(); }
///
/// Rules, in this order, for every step:
///  1. Order is the row order of the trace. Running requests always precede waiting ones.
///  2. A step is a prefill chunk if any row can be prefilled, else every running request decodes
///     one row. With `mixed` the decode rows come first and the prefill rows share what is left of
///     the chunk.
///  3. A prefill chunk continues the one request whose prompt is not finished, then admits waiting
///     requests, until `chunk` rows are taken.
///  4. A request is admitted when fewer than max_batch run and, after its cached prefix is taken,
///     there are pages for all its known tokens, plus a reserve for the next kReserveTokens tokens
///     of every running request (no reserve when nothing runs). The head of the queue blocks those
///     behind it. With drafts, room counts draft_tokens rows past those tokens.
///  5. A decode row that finds no page preempts the youngest running request (last in order), which
///     returns to the queue without pages and later recomputes its known tokens. A request that can
///     never fit was rejected at the start, hence the oldest one always advances.
///  6. A full page of a prompt is published under its hash by the step that computes its last row.
///     Requests admitted later in the same step already share it: in every layer all rows of a step
///     are stored before any of them attends.
///  7. With drafts, a step without prefill rows is a round: every running request has draft_tokens
///     + 1 rows, the token that it knows and the drafted ones. The rows of the accepted tokens
///     stay; the others are overwritten by later rows and are never within a length. Their pages
///     stay with the request, because the next round needs at least as many.
///  8. When nothing runs and nothing has arrived, an idle step without requests precedes the jump
///     of the clock to the next arrival.
///  SchedulingRules change 3 and 6.
namespace fovea::internal {

inline constexpr int64_t kReserveTokens = 16;

/// What a model asks of the composition of steps.
struct SchedulingRules {
  /// A request may share pages that another one computes in the same step. Off for models whose
  /// rows need more than stored rows of the prefix, such as a recurrent state: pages are then
  /// published by commit().
  bool share_within_step = true;
  /// A prefill that does not reach its end stops at a position that this divides; at most `chunk`.
  int64_t prefill_alignment = 1;
};

struct SchedulerConfig {
  int64_t page_size = 0;
  int64_t num_pages = 0;  ///< Usable pages, without the dummy page.
  int64_t chunk = 0;
  int64_t max_batch = 0;
  int64_t token_scale = 1;
  bool mixed = false;
  Arrivals arrivals = Arrivals::kAsap;
  VirtualCostModel cost;
  SchedulingRules rules;
  int64_t draft_tokens = 0;  ///< D; 0: no drafts.
  /// Of `count` tokens drafted for positions first, first + 1, ... of a request, how many are
  /// accepted. With draft_tokens > 0.
  std::function<int64_t(int64_t request, int64_t first, int64_t count)> accepted;
};

struct SchedulerRequest {
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  double arrival_ms = 0;
};

/// Rows of a request that need a place: all that it computes, and what its last round may write
/// past them.
int64_t max_request_rows(const SchedulerRequest& request, int64_t draft_tokens);

/// Hashes of the full pages of a request's prompt; empty: it shares nothing.
using PageHashFunction = std::function<std::vector<uint64_t>(int64_t request)>;

/// Rows [begin, end) of one request, by position.
struct StepEntry {
  int64_t request = 0;
  int32_t pool_row = 0;
  int64_t begin = 0;
  int64_t end = 0;
  bool decode = false;    ///< The next row of a request that was running; in a round, its rows.
  int64_t first_new = 0;  ///< Rows before it were computed by this request before a preemption.
  int64_t kept_end = 0;   ///< Rows from here on do not stay. `end` outside a round.
  int64_t accepted = 0;   ///< Leading drafted tokens that are right, the output's end ignored.
  bool starts = false;    ///< The first rows since the request was admitted: what lies before
                          ///< `begin` was found in the cache.
  /// Pages begin / page_size .. published_end - 1 of the request are complete after the step, and
  /// published: later requests may start behind each of them.
  int64_t published_end = 0;

  int64_t rows() const { return end - begin; }
  int64_t kept_rows() const { return kept_end - begin; }
  /// Whether the row of `position` has a token that was drafted wrong.
  bool is_wrong(int64_t position) const { return decode && position > begin + accepted; }
};

struct StepBatch {
  std::vector<StepEntry> entries;
  ReplayStep facts;  ///< All but the measured times.

  /// Rows that stay.
  int64_t num_rows() const { return facts.prefill_tokens + facts.decode_tokens; }
  /// Rows of the target model.
  int64_t num_computed() const {
    return facts.prefill_tokens + std::max(facts.decode_tokens, facts.verify_rows);
  }
};

/// What became of a request.
struct RequestState {
  RequestOutcome outcome = RequestOutcome::kCompleted;
  bool finished = false;
  double first_token_virtual_ms = 0;
  double finish_virtual_ms = 0;
  int64_t hit_tokens = 0;  ///< At first admission.
  int64_t preemptions = 0;
  std::string message;
  bool decoding = false;  ///< Running, and only the row of its newest token is missing.
  int64_t computed = 0;   ///< Rows 0..computed-1 are in the cache.
  int64_t known = 0;      ///< Tokens known: the prompt and what was generated.
  int64_t produced = 0;   ///< Rows up to here were computed or hit at least once.
  bool admitted_before = false;
  bool starting = false;  ///< Admitted, and no row committed since.
  int32_t pool_row = 0;   ///< 0: not running.
  std::vector<int32_t> pages;
  std::vector<uint64_t> page_hashes;
};

class Scheduler {
 public:
  /// Rejects requests that can never fit.
  Scheduler(const SchedulerConfig& config, std::vector<SchedulerRequest> requests,
            PageHashFunction page_hashes);

  /// Forms the next step and takes its pages; false when every request is done. Until commit() the
  /// same step is given again, so that a failed step can be repeated.
  bool next(StepBatch* batch);

  /// The rows of the step are in the cache: advances requests, frees what is finished, moves the
  /// virtual clock.
  void commit();

  const RequestState& state(int64_t request) const { return states_[static_cast<size_t>(request)]; }
  const PageAllocator& allocator() const { return allocator_; }
  RequestTable& table() { return table_; }
  const RequestTable& table() const { return table_; }
  int64_t pages_peak() const { return pages_peak_; }
  int64_t completed() const { return completed_; }
  int64_t rejected() const { return rejected_; }
  int64_t preempted() const { return preempted_; }
  /// Of the rounds committed so far; accepted_lengths has draft_tokens + 1 entries. Without `rate`.
  const ReplayDrafts& drafts() const { return drafts_; }

 private:
  const SchedulerRequest& request(int64_t r) const { return requests_[static_cast<size_t>(r)]; }
  RequestState& mutable_state(int64_t r) { return states_[static_cast<size_t>(r)]; }
  int64_t pages_for(int64_t tokens) const {
    return (tokens + config_.page_size - 1) / config_.page_size;
  }
  int64_t num_rows(int64_t r) const {
    return request(r).prompt_tokens + request(r).output_tokens - 1;
  }
  int64_t max_rows(int64_t r) const { return max_request_rows(request(r), config_.draft_tokens); }
  void advance_arrivals();
  void form_idle_step();
  int64_t reserve_pages(int64_t r) const;
  void form_step();
  void add_decode_rows(int64_t rows);
  void add_prefill_rows();
  bool admit(int64_t r);
  void preempt_youngest();
  bool take_pages_for_decode(int64_t r, int64_t rows);
  void stop_running(int64_t r);
  int64_t prefill_rows(int64_t r, int64_t budget) const;
  void add_entry(int64_t r, int64_t rows, bool decode);
  void publish(const StepEntry& entry);
  void verify(StepEntry* entry);
  void commit_entry(const StepEntry& entry, double end_ms);
  void count_verification(const StepEntry& entry);
  double step_cost_ms() const;
  void write_table(int64_t r, int64_t begin);

  SchedulerConfig config_;
  std::vector<SchedulerRequest> requests_;
  PageHashFunction page_hashes_;
  std::vector<RequestState> states_;
  PageAllocator allocator_;
  RequestTable table_;
  std::set<int64_t> running_;  // in trace order
  std::set<int64_t> waiting_;
  StepBatch step_;
  bool step_pending_ = false;
  double clock_ms_ = 0;
  int64_t arrived_ = 0;    // requests 0..arrived_-1 have arrived
  int64_t unarrived_ = 0;  // waiting requests that have not
  int64_t pages_peak_ = 0;
  int64_t completed_ = 0;
  int64_t rejected_ = 0;
  int64_t preempted_ = 0;
  ReplayDrafts drafts_;
};

}  // namespace fovea::internal
