#include "src/replay/workload.h"

#include <algorithm>
#include <unordered_set>

#include "src/core/check.h"
#include "src/replay/hash.h"

namespace fovea::internal {
namespace {

constexpr char kOp[] = "replay";

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Readers guarantee this; a trace made by hand may break it.
void check_request(const Trace& trace, int64_t row) {
  const TraceRequest& request = trace.requests[static_cast<size_t>(row)];
  const std::string name = "trace.requests[" + std::to_string(row) + "].";
  check_range(kOp, (name + "input_length").c_str(), request.input_length, 1, kMaxTraceTokens);
  check_range(kOp, (name + "output_length").c_str(), request.output_length, 0, kMaxTraceTokens);
  if (trace.has_hashes) {
    const int64_t blocks = ceil_divide(request.input_length, trace.block_tokens);
    check_range(kOp, (name + "hash_ids.size()").c_str(),
                static_cast<int64_t>(request.hash_ids.size()), blocks, blocks);
  }
}

// Requests with equal timestamps are spread over the time to the next timestamp, in row order, at
// sorted uniform places; the last burst over the length of the burst before it.
void spread(uint64_t seed, std::vector<WorkloadRequest>* requests) {
  double last_gap_ms = 0;
  for (size_t begin = 0; begin < requests->size();) {
    size_t end = begin;
    const double time = (*requests)[begin].arrival_ms;
    while (end < requests->size() && (*requests)[end].arrival_ms == time) ++end;
    const double gap_ms = end < requests->size() ? (*requests)[end].arrival_ms - time : last_gap_ms;
    std::vector<double> places;
    for (size_t i = begin; i < end; ++i) {
      const uint64_t random = hash_in(HashDomain::kArrival, seed, (*requests)[i].trace_row);
      places.push_back(static_cast<double>(random >> 11) * 0x1p-53);
    }
    std::sort(places.begin(), places.end());
    for (size_t i = begin; i < end; ++i) {
      (*requests)[i].arrival_ms = time + places[i - begin] * gap_ms;
    }
    last_gap_ms = gap_ms;
    begin = end;
  }
}

}  // namespace

Workload::Workload(const Trace& trace, const WorkloadOptions& options)
    : trace_(trace), options_(options) {
  const auto rows = static_cast<int64_t>(trace.requests.size());
  check_range(kOp, "skip", options.skip, 0, std::max<int64_t>(rows - 1, 0));
  check_range(kOp, "trace.requests", rows, 1, std::numeric_limits<int32_t>::max());
  check_range(kOp, "trace.block_tokens", trace.block_tokens, 1, 512);
  check_range(kOp, "max_requests", options.max_requests, 0, std::numeric_limits<int64_t>::max());
  if (options.token_scale < 1 || 512 % options.token_scale != 0) {
    invalid(kOp, "token_scale = " + std::to_string(options.token_scale) +
                     ", expected a divisor of 512 (1, 2, 4, ..., 512)");
  }
  const int64_t count = options.max_requests == 0
                            ? rows - options.skip
                            : std::min(options.max_requests, rows - options.skip);
  double arrival_ms = 0;
  for (int64_t row = options.skip; row < options.skip + count; ++row) {
    const TraceRequest& source = trace.requests[static_cast<size_t>(row)];
    check_request(trace, row);
    WorkloadRequest request;
    request.trace_row = row;
    arrival_ms = std::max(arrival_ms, source.timestamp_ms);
    request.arrival_ms = arrival_ms;
    request.prompt_tokens = ceil_divide(source.input_length, options.token_scale);
    request.output_tokens =
        std::max<int64_t>(1, ceil_divide(source.output_length, options.token_scale));
    requests_.push_back(request);
    std::vector<uint64_t> chain;
    uint64_t hash = 0;
    for (const int64_t id : source.hash_ids) chain.push_back(hash = hash_words(hash, id));
    block_chains_.push_back(std::move(chain));
  }
  if (options.spread_arrivals) spread(options.seed, &requests_);
  const std::vector<int64_t> shared = shared_prefixes(std::vector<bool>(requests_.size(), true));
  for (size_t r = 0; r < requests_.size(); ++r) requests_[r].reusable_tokens = shared[r];
}

int64_t Workload::max_rows() const {
  int64_t rows = 1;
  for (const WorkloadRequest& request : requests_) rows = std::max(rows, request.num_rows());
  return rows;
}

int64_t Workload::block_of(const TraceRequest& request, int64_t position) const {
  const int64_t last_token =
      std::min((position + 1) * options_.token_scale, request.input_length) - 1;
  return last_token / trace_.block_tokens;
}

uint64_t Workload::token_id(int64_t r, int64_t position) const {
  const WorkloadRequest& request = requests_[static_cast<size_t>(r)];
  if (position >= request.prompt_tokens) {
    return hash_in(HashDomain::kGeneratedToken, options_.seed, request.trace_row, position);
  }
  if (!trace_.has_hashes) {
    return hash_in(HashDomain::kPrivateToken, options_.seed, request.trace_row, position);
  }
  const TraceRequest& source = trace_.requests[static_cast<size_t>(request.trace_row)];
  const int64_t block = block_of(source, position);
  // The first trace token of a replayed token lies before its block when S exceeds the block: the
  // difference is negative then, and still names the place.
  const int64_t place = position * options_.token_scale - block * trace_.block_tokens;
  return hash_in(HashDomain::kPromptToken, source.hash_ids[static_cast<size_t>(block)], place);
}

uint64_t Workload::wrong_token_id(int64_t r, int64_t position) const {
  const uint64_t wrong = hash_in(HashDomain::kDraftToken, options_.seed,
                                 requests_[static_cast<size_t>(r)].trace_row, position);
  return wrong == token_id(r, position) ? ~wrong : wrong;
}

std::vector<uint64_t> Workload::page_hashes(int64_t r, int64_t page_size) const {
  std::vector<uint64_t> hashes;
  if (!trace_.has_hashes) return hashes;
  const WorkloadRequest& request = requests_[static_cast<size_t>(r)];
  const TraceRequest& source = trace_.requests[static_cast<size_t>(request.trace_row)];
  const std::vector<uint64_t>& chain = block_chains_[static_cast<size_t>(r)];
  const int64_t pages = request.prompt_tokens / page_size;
  hashes.reserve(static_cast<size_t>(pages));
  for (int64_t page = 0; page < pages; ++page) {
    const int64_t last = (page + 1) * page_size - 1;
    const int64_t block = block_of(source, last);
    // The chain up to the block of the page's last token, and the place of that token in it, fix
    // every token up to the end of the page.
    hashes.push_back(hash_words(chain[static_cast<size_t>(block)],
                                last * options_.token_scale - block * trace_.block_tokens));
  }
  return hashes;
}

std::vector<int64_t> Workload::shared_prefixes(const std::vector<bool>& usable) const {
  std::vector<int64_t> shared(requests_.size(), 0);
  std::unordered_set<uint64_t> seen;
  for (size_t r = 0; r < requests_.size(); ++r) {
    const std::vector<uint64_t>& chain = block_chains_[r];
    const auto first_new = std::find_if(chain.begin(), chain.end(),
                                        [&](uint64_t hash) { return !seen.contains(hash); });
    const int64_t input_length =
        trace_.requests[static_cast<size_t>(requests_[r].trace_row)].input_length;
    const int64_t covered =
        std::min((first_new - chain.begin()) * trace_.block_tokens, input_length);
    // A replayed token counts when all its trace tokens are covered.
    shared[r] =
        covered == input_length ? requests_[r].prompt_tokens : covered / options_.token_scale;
    if (usable[r]) seen.insert(chain.begin(), chain.end());
  }
  return shared;
}

}  // namespace fovea::internal
