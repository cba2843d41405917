#include "tests/serving/dsa_random_steps.h"

#include <algorithm>
#include <numeric>

namespace fovea::test {
namespace {

constexpr int32_t kVocabulary = 61;
constexpr int64_t kNumPages = 44;
constexpr int64_t kBuckets[] = {2, 4, 8};

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15u + (hash << 6) + (hash >> 2);
  hash *= 0xFF51AFD7ED558CCDu;
  return hash ^ (hash >> 33);
}

KvPoolConfig pool_config(const DsaConfig& config, RowFormat format, int64_t width, int layers) {
  KvPoolConfig pool;
  pool.row_format = format;
  pool.width = width;
  pool.num_layers = layers;
  pool.num_pages = kNumPages * 4 / config.page_size;
  pool.page_size = config.page_size;
  return pool;
}

}  // namespace

void check_contents(DsaConfig& config) {
  config.check = true;
  config.cache_slots = kNumPages * 4 / config.page_size * config.page_size;
}

DsaConfig random_steps_config(int64_t page_size, RowFormat row_format) {
  DsaConfig config;
  config.num_heads = 2;
  config.index_heads = 2;
  config.index_dim = 32;
  config.rope_dim = 16;
  config.topk = 6;
  config.page_size = page_size;
  config.row_format = row_format;
  config.max_requests = 8;
  config.max_rows = 48;
  config.rows_per_request = 4;
  config.table_width = RandomSteps::kMaxContext + config.rows_per_request;
  return config;
}

int64_t RandomStepsCounts::total_steps() const {
  int64_t total = 0;
  for (const auto& [mode, count] : steps) total += count;
  return total;
}

RandomSteps::RandomSteps(const RandomStepsSetup& setup, uint64_t seed)
    : setup_(setup),
      config_(setup.config),
      rng_(seed),
      backend_(config_, Device::cpu(setup.threads)),
      allocator_(kNumPages * 4 / config_.page_size, config_.page_size),
      table_(config_.max_requests + 1, config_.table_width),
      kv_pool_(pool_config(config_, config_.row_format, 576, kLayers), Device::cpu(1)),
      index_pool_(pool_config(config_, RowFormat::kI132, config_.index_dim, kLayers),
                  Device::cpu(1)),
      images_(config_) {
  for (size_t layer = 0; layer < kLayers; ++layer) {
    // What was never written is NaN.
    for (auto& [pool, shadow] : {std::pair{&kv_pool_, &kv_shadow_[layer]},
                                 std::pair{&index_pool_, &index_shadow_[layer]}}) {
      const TensorView view = pool->layer(static_cast<int64_t>(layer));
      shadow->assign(static_cast<size_t>(view.num_elements()), 0xFF);
      std::copy(shadow->begin(), shadow->end(), static_cast<uint8_t*>(view.data));
    }
  }
  for (int i = 0; i < 5; ++i) {
    std::vector<int32_t>& prompt = prompts_.emplace_back();
    for (int64_t p = 0; p < kMaxContext; ++p) {
      prompt.push_back(static_cast<int32_t>(rng_.integer(0, kVocabulary - 1)));
    }
  }
}

void RandomSteps::step() {
  while (static_cast<int64_t>(live_.size()) < kMaxLive && rng_.integer(0, 2) == 0) admit();
  if (live_.empty()) admit();
  std::vector<int> all;
  for (const auto& [id, request] : live_) all.push_back(id);
  for (const int id : all) {
    const bool full = live_.at(id).len() + 1 > kMaxContext && !live_.at(id).lags();
    if (full || rng_.integer(0, 99) < 2) release(id, !full && rng_.integer(0, 1) == 0);
  }
  switch (rng_.integer(0, 11)) {
    case 0:
    case 1:
    case 2:
      return extend(false);
    case 3:
    case 4:
      return extend(true);
    case 5:
    case 6:
      return decode();
    case 7:
      return draft_chain();
    case 8:
    case 9:
      verify();
      return rng_.integer(0, 3) == 0 ? void() : draft_extend();
    case 10:
      return draft_extend();
    default:
      return rng_.integer(0, 3) == 0 ? idle() : decode();
  }
}

void RandomSteps::finish() {
  while (!live_.empty()) release(live_.begin()->first, false);
  check_pages();
  const PageCounts counts = allocator_.counts();
  expect_equal(counts.referenced, 0, "referenced pages", 0);
  // Nothing is held: every page can be had again.
  expect_equal(static_cast<int64_t>(allocator_.allocate(counts.total).size()), counts.total,
               "pages that can be allocated", 0);
}

// ---------------------------------------------------------------------------------------------
// Requests and pages

int32_t RandomSteps::draw_token(const Request& request, int64_t position) {
  const auto found = request.rejected.find(position);
  while (true) {
    const auto token = static_cast<int32_t>(rng_.integer(0, kVocabulary - 1));
    if (found == request.rejected.end() || found->second != token) return token;
  }
}

std::vector<uint64_t> RandomSteps::page_hashes(const Request& request) const {
  std::vector<uint64_t> hashes;
  uint64_t hash = 1;
  for (size_t p = 0; p < request.tokens.size(); ++p) {
    hash = mix(hash, static_cast<uint64_t>(request.tokens[p]));
    if ((static_cast<int64_t>(p) + 1) % config_.page_size == 0) hashes.push_back(hash);
  }
  return hashes;
}

void RandomSteps::admit() {
  Request request;
  if (!waiting_.empty() && rng_.integer(0, 1) == 0) {
    request.tokens = waiting_.back();
    waiting_.pop_back();
  } else {
    request.tokens = prompts_[static_cast<size_t>(rng_.integer(0, 4))];
    request.tokens.resize(static_cast<size_t>(rng_.integer(0, 24)));
    const int64_t own = rng_.integer(request.tokens.empty() ? 1 : 0, 8);
    for (int64_t i = 0; i < own; ++i) request.tokens.push_back(draw_token(request, 0));
  }
  // The last token of a prompt is always computed: its row gives the first answer.
  std::vector<uint64_t> hashes = page_hashes(request);
  hashes.resize((request.tokens.size() - 1) / static_cast<size_t>(config_.page_size));
  request.id = next_id_++;
  request.row = table_.acquire();
  request.pages = allocator_.acquire_prefix(hashes);
  request.published = static_cast<int64_t>(request.pages.size());
  counts_.prefix_hits += request.published;
  request.stored.fill(request.published * config_.page_size);
  table_.write(request.row, request.pages, config_.page_size, 0, request.stored[0]);
  live_.emplace(request.id, request);
}

void RandomSteps::release(int id, bool again) {
  Request& request = live_.at(id);
  publish(request);
  if (again && request.len() > 0 && request.len() < kMaxContext) {
    ++counts_.preemptions;
    waiting_.push_back(request.tokens);
  }
  allocator_.release(request.pages);
  table_.release(request.row);
  live_.erase(id);
}

// Pages for positions 0 .. positions - 1; other requests give theirs up when there are none left.
bool RandomSteps::reserve(Request& request, int64_t positions) {
  const auto held = static_cast<int64_t>(request.pages.size());
  const int64_t needed = (positions + config_.page_size - 1) / config_.page_size - held;
  if (needed <= 0) return true;
  while (!allocator_.can_allocate(needed)) {
    std::vector<int> others;
    for (const auto& [id, other] : live_) {
      if (id != request.id && !busy_.contains(id)) others.push_back(id);
    }
    if (others.empty()) return false;
    release(others[static_cast<size_t>(rng_.integer(0, static_cast<int64_t>(others.size()) - 1))],
            true);
  }
  for (const int32_t page : allocator_.allocate(needed)) request.pages.push_back(page);
  const int64_t end = std::min((held + needed) * config_.page_size, config_.table_width);
  table_.write(request.row, request.pages, config_.page_size, held * config_.page_size, end);
  return true;
}

// Gives back the pages past what the request has; the table keeps their slots, stale.
void RandomSteps::trim(Request& request) {
  const int64_t needed = (request.len() + config_.page_size - 1) / config_.page_size;
  if (static_cast<int64_t>(request.pages.size()) <= needed) return;
  const auto first = request.pages.begin() + needed;
  allocator_.release(std::vector<int32_t>(first, request.pages.end()));
  request.pages.erase(first, request.pages.end());
}

// Pages that both layers have filled.
void RandomSteps::publish(Request& request) {
  const std::vector<uint64_t> hashes = page_hashes(request);
  const int64_t full = std::min(request.stored[0], request.stored[1]) / config_.page_size;
  for (; request.published < full; ++request.published) {
    const auto page = static_cast<size_t>(request.published);
    allocator_.publish(request.pages[page], hashes[page]);
  }
}

std::vector<int> RandomSteps::ids_that(bool (*is)(const Request&)) {
  std::vector<int> ids;
  for (const auto& [id, request] : live_) {
    if (!busy_.contains(id) && is(request)) ids.push_back(id);
  }
  return ids;
}

// A random part of them, in a random order; at least one when there is one.
std::vector<int> RandomSteps::subset(std::vector<int> ids) {
  for (size_t i = 1; i < ids.size(); ++i) {
    std::swap(ids[i], ids[static_cast<size_t>(rng_.integer(0, static_cast<int64_t>(i)))]);
  }
  if (!ids.empty()) {
    ids.resize(static_cast<size_t>(rng_.integer(1, static_cast<int64_t>(ids.size()))));
  }
  return ids;
}

// ---------------------------------------------------------------------------------------------
// Steps

ModelWork RandomSteps::work_of(const Request& request, int64_t first,
                               std::vector<int32_t> history) const {
  ModelWork work;
  work.request = request.id;
  work.kv_len = static_cast<int64_t>(history.size());
  work.seq_len = work.kv_len;
  work.rows = work.kv_len - first;
  work.first_position = first;
  work.history = std::move(history);
  work.pool_row = request.row;
  work.pages = request.pages;
  return work;
}

void RandomSteps::extend(bool mixed) {
  std::vector<int> ids = subset(ids_that([](const Request& r) { return !r.prefilled(); }));
  std::vector<int> decoding;
  if (mixed) {
    decoding = subset(ids_that(
        [](const Request& r) { return r.prefilled() && !r.lags() && r.len() < kMaxContext; }));
    ids.insert(rng_.integer(0, 1) == 0 ? ids.begin() : ids.end(), decoding.begin(), decoding.end());
  }
  Launch launch;
  launch.step.mode = mixed ? ForwardMode::kMixed : ForwardMode::kExtend;
  launch.layers = {0, 1};
  launch.host_lengths = rng_.integer(0, 2) != 0;
  busy_.insert(ids.begin(), ids.end());
  for (const int id : ids) {
    Request& request = live_.at(id);
    const int64_t first = request.len();
    const bool decodes = request.prefilled();
    const int64_t left = decodes ? 1 : static_cast<int64_t>(request.tokens.size()) - first;
    const int64_t end = first + std::min(left, rng_.integer(1, 7));
    if (!reserve(request, end)) continue;
    if (decodes) request.tokens.push_back(draw_token(request, first));
    request.candidates.clear();
    request.stored.fill(end);
    launch.step.work.push_back(
        work_of(request, first, {request.tokens.begin(), request.tokens.begin() + end}));
  }
  if (rng_.integer(0, 3) == 0) {
    launch.step.padded_rows =
        std::min(config_.max_rows, launch.step.live_rows() + rng_.integer(1, 6));
  }
  run(launch);
  for (const ModelWork& work : launch.step.work) publish(live_.at(work.request));
  busy_.clear();
}

void RandomSteps::decode() {
  const std::vector<int> ids = subset(ids_that(
      [](const Request& r) { return r.prefilled() && !r.lags() && r.len() < kMaxContext; }));
  Launch launch;
  launch.step.mode = ForwardMode::kDecode;
  launch.layers = {0, 1};
  launch.host_lengths = rng_.integer(0, 1) != 0;
  const std::set<int> outer = busy_;
  busy_.insert(ids.begin(), ids.end());
  for (const int id : ids) {
    Request& request = live_.at(id);
    const int64_t first = request.len();
    if (!reserve(request, first + 1)) continue;
    request.tokens.push_back(draw_token(request, first));
    request.candidates.clear();
    request.stored.fill(first + 1);
    launch.step.work.push_back(work_of(request, first, request.tokens));
  }
  const auto requests = static_cast<int64_t>(launch.step.work.size());
  if (requests > 0 && rng_.integer(0, 1) == 0) {
    launch.plan = plan_for(ForwardMode::kDecode, requests);
    pad_requests(launch, launch.plan->bucket().num_requests, 1);
  } else if (rng_.integer(0, 2) == 0) {
    launch.step.padded_rows = requests + rng_.integer(1, 4);
  }
  run(launch);
  for (const ModelWork& work : launch.step.work) {
    if (work.request >= 0) publish(live_.at(work.request));
  }
  busy_ = outer;
}

void RandomSteps::idle() {
  Launch launch;
  launch.step.mode = ForwardMode::kIdle;
  launch.layers = {0, 1};
  if (rng_.integer(0, 1) == 0) {
    launch.plan = plan_for(ForwardMode::kIdle, 2);
    pad_requests(launch, launch.plan->bucket().num_requests, 1);
  } else {
    launch.step.padded_rows = rng_.integer(0, 5);
  }
  run(launch);
}

// N rows a request: its next token and N - 1 guesses. Of these a random number turns out right.
void RandomSteps::verify() {
  const int64_t n = config_.rows_per_request;
  const std::vector<int> ids = subset(ids_that(
      [](const Request& r) { return r.prefilled() && !r.lags() && r.len() < kMaxContext; }));
  Launch launch;
  launch.step.mode = ForwardMode::kTargetVerify;
  launch.layers = {0};
  launch.host_lengths = rng_.integer(0, 1) != 0;
  busy_.insert(ids.begin(), ids.end());
  for (const int id : ids) {
    Request& request = live_.at(id);
    const int64_t first = request.len();
    if (!reserve(request, first + n)) continue;
    // After a chain of drafts its tokens are verified, or others.
    if (request.candidates.empty() || rng_.integer(0, 1) == 0) request.candidates.clear();
    while (static_cast<int64_t>(request.candidates.size()) < n) {
      const auto at = first + static_cast<int64_t>(request.candidates.size());
      request.candidates.push_back(draw_token(request, at));
    }
    std::vector<int32_t> history = request.tokens;
    history.insert(history.end(), request.candidates.begin(), request.candidates.end());
    launch.step.work.push_back(work_of(request, first, std::move(history)));
    launch.step.work.back().seq_len = first;
  }
  if (launch.step.work.empty()) {
    busy_.clear();
    return;
  }
  const auto requests = static_cast<int64_t>(launch.step.work.size());
  if (rng_.integer(0, 1) == 0) {
    launch.plan = plan_for(launch.step.mode, requests);
    pad_requests(launch, launch.plan->bucket().num_requests, n);
  } else if (rng_.integer(0, 2) == 0) {
    launch.step.padded_rows = launch.step.live_rows() + rng_.integer(1, 4);
  }
  run(launch);
  for (const ModelWork& work : launch.step.work) {
    if (work.request < 0) continue;
    Request& request = live_.at(work.request);
    const int64_t room = kMaxContext - request.len();
    const int64_t accepted = std::min(room, rng_.integer(1, n));
    request.rejected.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int32_t token = request.candidates[static_cast<size_t>(i)];
      if (i < accepted) {
        request.tokens.push_back(token);
      } else {
        request.rejected[request.len() + i] = token;
        ++counts_.rejected_tokens;
      }
    }
    request.stored[0] += accepted;
  }
  busy_.clear();
}

// The draft model catches up with what was accepted: those tokens (v1), or all N (v2).
void RandomSteps::draft_extend() {
  const int64_t n = config_.rows_per_request;
  const std::vector<int> ids = subset(ids_that([](const Request& r) { return r.lags(); }));
  if (ids.empty()) return;
  const bool v2 = rng_.integer(0, 1) == 0;
  Launch launch;
  launch.step.mode = v2 ? ForwardMode::kDraftExtendV2 : ForwardMode::kDraftExtend;
  launch.layers = {1};
  launch.host_lengths = rng_.integer(0, 1) != 0;
  for (const int id : ids) {
    const Request& request = live_.at(id);
    const int64_t first = request.stored[1];
    std::vector<int32_t> history = request.tokens;
    if (v2) {
      history.resize(static_cast<size_t>(first));
      history.insert(history.end(), request.candidates.begin(), request.candidates.end());
    }
    launch.step.work.push_back(work_of(request, first, std::move(history)));
  }
  const auto requests = static_cast<int64_t>(launch.step.work.size());
  if (rng_.integer(0, 1) == 0) {
    launch.plan = plan_for(launch.step.mode, requests);
    pad_requests(launch, launch.plan->bucket().num_requests, v2 ? n : rng_.integer(0, 1));
  } else if (rng_.integer(0, 2) == 0) {
    launch.step.padded_rows = launch.step.live_rows() + rng_.integer(1, 4);
  }
  // Without host lengths only a bound of the rows is known.
  if (!v2 && !launch.host_lengths && (launch.plan != nullptr || rng_.integer(0, 1) == 0)) {
    launch.step.num_rows = static_cast<int64_t>(launch.step.work.size()) * n;
    launch.step.padded_rows = 0;
  }
  run(launch);
  for (const ModelWork& work : launch.step.work) {
    if (work.request < 0) continue;
    Request& request = live_.at(work.request);
    request.stored[1] = request.stored[0];
    request.candidates.clear();
    publish(request);
    if (rng_.integer(0, 1) == 0) trim(request);
  }
}

// Decodes the draft model alone, ahead of what is committed; all its plans in one refresh.
void RandomSteps::draft_chain() {
  // The first draft comes from draft-extend: a single one needs no chain.
  if (config_.rows_per_request <= 2) return;
  const std::vector<int> ids = subset(ids_that(
      [](const Request& r) { return r.prefilled() && !r.lags() && r.len() < kMaxContext; }));
  const int64_t steps = rng_.integer(1, config_.rows_per_request - 2);
  busy_.insert(ids.begin(), ids.end());
  std::vector<int> drafted;
  for (const int id : ids) {
    Request& request = live_.at(id);
    if (!reserve(request, request.len() + steps)) continue;
    drafted.push_back(id);
    request.candidates.clear();
    for (int64_t j = 0; j < steps; ++j) {
      request.candidates.push_back(draw_token(request, request.len() + j));
    }
  }
  if (!drafted.empty()) run_chain(drafted, steps);
  busy_.clear();
}

void RandomSteps::run_chain(const std::vector<int>& ids, int64_t steps) {
  const bool original = rng_.integer(0, 3) == 0;  // every step has the committed length
  const int64_t bucket = bucket_for(static_cast<int64_t>(ids.size()));
  std::vector<Launch> launches(static_cast<size_t>(steps));
  std::vector<DraftStep> drafts;
  for (int64_t j = 0; j < steps; ++j) {
    Launch& launch = launches[static_cast<size_t>(j)];
    launch.step.mode = ForwardMode::kDecode;
    launch.layers = {1};
    launch.plan = chain_plan(bucket, j);
    for (const int id : ids) {
      const Request& request = live_.at(id);
      std::vector<int32_t> history = request.tokens;
      history.insert(history.end(), request.candidates.begin(), request.candidates.begin() + j + 1);
      ModelWork work = work_of(request, request.len() + j, std::move(history));
      work.seq_len = request.len();
      if (original) work.kv_len = request.len();
      launch.step.work.push_back(std::move(work));
    }
    pad_requests(launch, bucket, 1);
    for (ModelWork& work : launch.step.work) {
      if (work.request < 0 && !original) work.kv_len += j + 1;
    }
    lay_out(launch);
    drafts.push_back({launch.plan, launch.positions, launch.out_cache_loc});
    if (original) drafts.back().kv_len_delta = 0;
  }
  ForwardBatch batch = batch_of(launches[0]);
  batch.positions = {};
  batch.out_cache_loc = {};
  backend_.begin_draft_steps(batch, drafts);
  ++counts_.draft_chains;
  for (const Launch& launch : launches) {
    note(launch);
    check_metadata(config_, launch.step, launch.plan->metadata(), false);
    check_report(launch);
  }
  for (const Launch& launch : launches) {
    // Other requests may be served between the steps of a chain.
    if (rng_.integer(0, 3) == 0) decode();
    forward(launch, 1);
    check_pools();
    ++counts_.steps[ForwardMode::kDecode];
    ++counts_.plan_steps;
  }
  check_pages();
}

void RandomSteps::pad_requests(Launch& launch, int64_t requests, int64_t rows) {
  while (static_cast<int64_t>(launch.step.work.size()) < requests) {
    ModelWork work;
    work.seq_len = kPaddedSeqLen;
    // One token for all rows, or as many as rows.
    const bool v2 = launch.step.mode == ForwardMode::kDraftExtendV2;
    if (v2 && rng_.integer(0, 1) == 0) work.seq_len = rows;
    work.kv_len = work.seq_len;
    if (launch.step.mode == ForwardMode::kTargetVerify) work.kv_len += rows;
    work.rows = rows;
    launch.step.work.push_back(work);
  }
}

// A bucket that holds `requests`, not always the smallest.
int64_t RandomSteps::bucket_for(int64_t requests) {
  int64_t bucket = kBuckets[static_cast<size_t>(rng_.integer(0, 2))];
  while (bucket < requests) bucket *= 2;
  return bucket;
}

DsaStepPlan* RandomSteps::plan_for(ForwardMode mode, int64_t requests) {
  const int64_t bucket = bucket_for(requests);
  const bool one_row = mode == ForwardMode::kDecode || mode == ForwardMode::kIdle;
  auto found = plans_.find({mode, bucket});
  if (found == plans_.end()) {
    const StepBucket shape{mode, bucket, one_row ? 1 : config_.rows_per_request};
    found = plans_.emplace(std::pair{mode, bucket}, backend_.make_step_plan(shape)).first;
  }
  return &found->second;
}

// Step j of a chain has a plan of its own.
DsaStepPlan* RandomSteps::chain_plan(int64_t bucket, int64_t j) {
  auto found = chain_plans_.find({bucket, j});
  if (found == chain_plans_.end()) {
    const StepBucket shape{ForwardMode::kDecode, bucket, 1};
    found = chain_plans_.emplace(std::pair{bucket, j}, backend_.make_step_plan(shape)).first;
  }
  return &found->second;
}

}  // namespace fovea::test
