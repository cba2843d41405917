#include "src/replay/scheduler.h"

#include <algorithm>

#include "src/core/check.h"

namespace fovea::internal {

int64_t max_request_rows(const SchedulerRequest& request, int64_t draft_tokens) {
  const int64_t rows = request.prompt_tokens + request.output_tokens - 1;
  return request.output_tokens > 1 ? rows + draft_tokens : rows;
}

namespace {

constexpr char kOp[] = "replay";

// Columns for the longest request that fits the cache.
int64_t table_width(const SchedulerConfig& config, const std::vector<SchedulerRequest>& requests) {
  int64_t width = 1;
  for (const SchedulerRequest& request : requests) {
    const int64_t rows = max_request_rows(request, config.draft_tokens);
    if (rows <= config.num_pages * config.page_size) width = std::max(width, rows);
  }
  return width;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, std::vector<SchedulerRequest> requests,
                     PageHashFunction page_hashes)
    : config_(config),
      requests_(std::move(requests)),
      page_hashes_(std::move(page_hashes)),
      states_(requests_.size()),
      allocator_(config.num_pages + 1, config.page_size),
      table_(std::min(config.max_batch, static_cast<int64_t>(requests_.size())) + 1,
             table_width(config, requests_)) {
  for (int64_t r = 0; r < static_cast<int64_t>(requests_.size()); ++r) {
    RequestState& state = mutable_state(r);
    state.known = request(r).prompt_tokens;
    if (pages_for(max_rows(r)) <= config_.num_pages) {
      waiting_.insert(r);
      continue;
    }
    state.outcome = RequestOutcome::kRejected;
    state.finished = true;
    state.message = "needs " + std::to_string(max_rows(r)) + " tokens (" +
                    std::to_string(pages_for(max_rows(r))) + " pages of " +
                    std::to_string(config_.page_size) + "), but the whole cache has " +
                    std::to_string(config_.num_pages) +
                    " pages; raise cache_tokens or the token scale";
    ++rejected_;
  }
  unarrived_ = static_cast<int64_t>(waiting_.size());
  drafts_.accepted_lengths.assign(static_cast<size_t>(config_.draft_tokens + 1), 0);
  advance_arrivals();
}

void Scheduler::advance_arrivals() {
  const auto count = static_cast<int64_t>(requests_.size());
  while (arrived_ < count &&
         (config_.arrivals == Arrivals::kAsap || request(arrived_).arrival_ms <= clock_ms_)) {
    if (!state(arrived_).finished) --unarrived_;
    ++arrived_;
  }
}

bool Scheduler::next(StepBatch* batch) {
  if (!step_pending_) {
    if (running_.empty() && waiting_.empty()) return false;
    if (running_.empty() && *waiting_.begin() >= arrived_) {
      form_idle_step();
    } else {
      form_step();
    }
    step_pending_ = true;
  }
  *batch = step_;
  return true;
}

void Scheduler::form_idle_step() {
  step_.entries.clear();
  step_.facts = ReplayStep{};
  step_.facts.kind = StepKind::kIdle;
  step_.facts.virtual_ms = clock_ms_;
  step_.facts.pages_cached = allocator_.counts().cached;
}

void Scheduler::form_step() {
  step_.entries.clear();
  step_.facts = ReplayStep{};
  if (config_.mixed) add_decode_rows(1);
  add_prefill_rows();
  const bool round = step_.facts.prefill_tokens == 0 && config_.draft_tokens > 0;
  if (step_.entries.empty() || round) {
    // Nothing to prefill: the decode rows of a mixed step become a round.
    step_.entries.clear();
    step_.facts.decode_tokens = 0;
    add_decode_rows(1 + config_.draft_tokens);
  }
  if (step_.entries.empty()) {
    throw Error(ErrorCode::kInternal, "replay: the scheduler formed an empty step");
  }
  ReplayStep& facts = step_.facts;
  const PageCounts counts = allocator_.counts();
  pages_peak_ = std::max(pages_peak_, counts.referenced);
  facts.kind = facts.decode_tokens == 0   ? StepKind::kPrefill
               : facts.prefill_tokens > 0 ? StepKind::kMixed
               : round                    ? StepKind::kVerify
                                          : StepKind::kDecode;
  facts.virtual_ms = clock_ms_;
  facts.running = static_cast<int64_t>(running_.size());
  facts.waiting = static_cast<int64_t>(waiting_.size()) - unarrived_;
  facts.pages_used = counts.referenced;
  facts.pages_cached = counts.cached;
}

void Scheduler::add_decode_rows(int64_t rows) {
  // A copy: preemption removes members behind the current one.
  const std::vector<int64_t> order(running_.begin(), running_.end());
  for (const int64_t r : order) {
    if (running_.contains(r) && state(r).decoding && take_pages_for_decode(r, rows)) {
      add_entry(r, rows, true);
      if (rows > 1) verify(&step_.entries.back());
    }
  }
}

bool Scheduler::take_pages_for_decode(int64_t r, int64_t rows) {
  RequestState& state = mutable_state(r);
  const int64_t missing =
      pages_for(state.computed + rows) - static_cast<int64_t>(state.pages.size());
  if (missing <= 0) return true;
  while (!allocator_.can_allocate(missing)) {
    const int64_t youngest = *running_.rbegin();
    preempt_youngest();
    if (youngest == r) return false;
  }
  const std::vector<int32_t> fresh = allocator_.allocate(missing);
  state.pages.insert(state.pages.end(), fresh.begin(), fresh.end());
  write_table(r, state.computed);
  return true;
}

// Row begin + i gives the token after it, if the drafted tokens up to there are right; what would
// be past the end of the output does not stay.
void Scheduler::verify(StepEntry* entry) {
  const int64_t r = entry->request;
  entry->accepted = config_.accepted(r, entry->begin + 1, config_.draft_tokens);
  const int64_t missing_tokens =
      request(r).prompt_tokens + request(r).output_tokens - state(r).known;
  entry->kept_end = entry->begin + std::min(entry->accepted + 1, missing_tokens);
  step_.facts.verify_rows += entry->rows();
  step_.facts.decode_tokens -= entry->end - entry->kept_end;
}

void Scheduler::preempt_youngest() {
  const int64_t r = *running_.rbegin();
  stop_running(r);
  waiting_.insert(r);
  ++mutable_state(r).preemptions;
  ++preempted_;
  ++step_.facts.preempted;
}

void Scheduler::stop_running(int64_t r) {
  RequestState& state = mutable_state(r);
  allocator_.release(state.pages);
  table_.release(state.pool_row);
  state.pages.clear();
  state.pool_row = 0;
  state.computed = 0;
  state.decoding = false;
  running_.erase(r);
}

void Scheduler::add_prefill_rows() {
  int64_t budget = config_.chunk - step_.facts.decode_tokens;
  const auto take = [&](int64_t r) {
    const int64_t rows = prefill_rows(r, budget);
    // What alignment leaves of the budget stays unused.
    budget = state(r).computed + rows < state(r).known ? 0 : budget - rows;
    if (rows > 0) add_entry(r, rows, false);
  };
  // Only the youngest can be unfinished: nobody is admitted behind an unfinished prompt, because
  // that one takes the whole budget.
  if (!running_.empty() && !state(*running_.rbegin()).decoding) take(*running_.rbegin());
  if (step_.facts.preempted > 0) return;
  while (budget > 0 && !waiting_.empty() && *waiting_.begin() < arrived_ &&
         static_cast<int64_t>(running_.size()) < config_.max_batch && admit(*waiting_.begin())) {
    take(*running_.rbegin());
  }
}

int64_t Scheduler::prefill_rows(int64_t r, int64_t budget) const {
  const int64_t missing = state(r).known - state(r).computed;
  if (missing <= budget) return missing;
  const int64_t end = state(r).computed + std::max<int64_t>(budget, 0);
  return std::max<int64_t>(0, end - end % config_.rules.prefill_alignment - state(r).computed);
}

int64_t Scheduler::reserve_pages(int64_t r) const {
  const int64_t soon =
      pages_for(std::min(state(r).known + kReserveTokens, num_rows(r)) + max_rows(r) - num_rows(r));
  const auto held = running_.contains(r) ? static_cast<int64_t>(state(r).pages.size())
                                         : pages_for(state(r).known);
  return std::max<int64_t>(0, soon - held);
}

bool Scheduler::admit(int64_t r) {
  RequestState& state = mutable_state(r);
  if (state.page_hashes.empty()) state.page_hashes = page_hashes_(r);
  // The last known token is always computed: its row gives the next token.
  const size_t usable = std::min(state.page_hashes.size(),
                                 static_cast<size_t>((state.known - 1) / config_.page_size));
  std::vector<int32_t> pages =
      allocator_.acquire_prefix(std::span<const uint64_t>(state.page_hashes).first(usable));
  const int64_t hit_tokens = static_cast<int64_t>(pages.size()) * config_.page_size;
  const int64_t missing = pages_for(state.known) - static_cast<int64_t>(pages.size());
  int64_t reserve = 0;
  if (!running_.empty()) {
    for (const int64_t other : running_) reserve += reserve_pages(other);
    reserve += reserve_pages(r);
  }
  if (!allocator_.can_allocate(missing + reserve)) {
    allocator_.release(pages);
    return false;
  }
  const std::vector<int32_t> fresh = allocator_.allocate(missing);
  pages.insert(pages.end(), fresh.begin(), fresh.end());
  state.pages = std::move(pages);
  state.pool_row = table_.acquire();
  state.computed = hit_tokens;
  state.starting = true;
  if (!state.admitted_before) {
    state.admitted_before = true;
    state.hit_tokens = hit_tokens;
    state.produced = hit_tokens;
    step_.facts.hit_tokens += hit_tokens;
  }
  waiting_.erase(r);
  running_.insert(r);
  write_table(r, 0);
  return true;
}

void Scheduler::write_table(int64_t r, int64_t begin) {
  const RequestState& current = state(r);
  const int64_t end =
      std::min(static_cast<int64_t>(current.pages.size()) * config_.page_size, table_.width());
  table_.write(current.pool_row, current.pages, config_.page_size, begin, end);
}

void Scheduler::add_entry(int64_t r, int64_t rows, bool decode) {
  const RequestState& current = state(r);
  StepEntry entry;
  entry.request = r;
  entry.pool_row = current.pool_row;
  entry.begin = current.computed;
  entry.end = entry.kept_end = current.computed + rows;
  entry.decode = decode;
  entry.first_new = current.produced;
  entry.starts = current.starting;
  entry.published_end = std::min((current.computed + rows) / config_.page_size,
                                 static_cast<int64_t>(current.page_hashes.size()));
  if (config_.rules.share_within_step) publish(entry);
  step_.entries.push_back(entry);
  (decode ? step_.facts.decode_tokens : step_.facts.prefill_tokens) += rows;
}

void Scheduler::publish(const StepEntry& entry) {
  const RequestState& current = state(entry.request);
  for (int64_t page = entry.begin / config_.page_size; page < entry.published_end; ++page) {
    const auto i = static_cast<size_t>(page);
    allocator_.publish(current.pages[i], current.page_hashes[i]);
  }
}

void Scheduler::commit() {
  if (!step_pending_) throw Error(ErrorCode::kInternal, "replay: commit without a step");
  step_pending_ = false;
  clock_ms_ += step_cost_ms();
  if (step_.facts.kind == StepKind::kIdle) clock_ms_ = request(*waiting_.begin()).arrival_ms;
  if (step_.facts.kind == StepKind::kVerify) ++drafts_.rounds;
  for (const StepEntry& entry : step_.entries) commit_entry(entry, clock_ms_);
  advance_arrivals();
}

double Scheduler::step_cost_ms() const {
  const VirtualCostModel& cost = config_.cost;
  const bool round = step_.facts.kind == StepKind::kVerify;
  const auto prefill = static_cast<double>(step_.facts.prefill_tokens);
  const auto decode =
      static_cast<double>(round ? step_.facts.verify_rows : step_.facts.decode_tokens);
  const auto drafts = static_cast<double>(round ? config_.draft_tokens : 0);
  return static_cast<double>(config_.token_scale) *
         (prefill * cost.prefill_ms_per_row + (decode > 0 ? cost.decode_step_ms : 0.0) +
          decode * cost.decode_ms_per_row + drafts * cost.draft_forward_ms);
}

void Scheduler::count_verification(const StepEntry& entry) {
  const int64_t kept = entry.kept_rows();
  const int64_t accepted = std::min(entry.accepted, kept);
  // The row behind the accepted tokens has decided about one more draft, unless they were the last
  // ones drafted or the output ends before it.
  const bool rejected = entry.accepted < config_.draft_tokens && kept == entry.accepted + 1;
  ++drafts_.verifications;
  drafts_.drafted += config_.draft_tokens;
  drafts_.accepted += accepted;
  drafts_.decided += accepted + (rejected ? 1 : 0);
  drafts_.rolled_back_rows += entry.rows() - kept;
  ++drafts_.accepted_lengths[static_cast<size_t>(accepted)];
}

void Scheduler::commit_entry(const StepEntry& entry, double end_ms) {
  if (step_.facts.kind == StepKind::kVerify) count_verification(entry);
  if (!config_.rules.share_within_step) publish(entry);
  RequestState& state = mutable_state(entry.request);
  state.starting = false;
  state.computed = entry.kept_end;
  state.produced = std::max(state.produced, entry.kept_end);
  const int64_t prompt_tokens = request(entry.request).prompt_tokens;
  if (state.computed < state.known) return;
  // The row of the newest known token gives the next token; in a round accepted tokens lie between.
  state.known = state.computed + 1;
  state.decoding = true;
  if (state.known == prompt_tokens + 1) state.first_token_virtual_ms = end_ms;
  if (state.known < prompt_tokens + request(entry.request).output_tokens) return;
  state.finished = true;
  state.finish_virtual_ms = end_ms;
  state.page_hashes = {};
  ++completed_;
  stop_running(entry.request);
}

}  // namespace fovea::internal
