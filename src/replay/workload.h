#pragma once

#include <cstdint>
#include <vector>

#include "fovea/trace.h"

/// A trace as it is replayed: scaled lengths, the identity of every token and page.
namespace fovea::internal {

struct WorkloadOptions {
  int64_t skip = 0;
  int64_t max_requests = 0;  ///< 0: all.
  int64_t token_scale = 1;   ///< S, divides 512.
  bool spread_arrivals = false;
  uint64_t seed = 0;
};

/// One request in replayed tokens. A prompt of n tokens becomes ceil(n / S), an output of n tokens
/// max(1, ceil(n / S)). Row p of the request is the row of token p; the rows of the prompt and of
/// all generated tokens but the last are computed.
struct WorkloadRequest {
  int64_t trace_row = 0;
  double arrival_ms = 0;  ///< Non-decreasing.
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  /// Leading prompt tokens that an infinite cache holds from earlier requests, by whole blocks.
  int64_t reusable_tokens = 0;

  int64_t num_rows() const { return prompt_tokens + output_tokens - 1; }
};

/// A row of a request by its token, which may be one that was drafted wrong. The tokens before it
/// are the request's own.
struct RowToken {
  int64_t request = 0;
  int64_t position = 0;
  uint64_t token_id = 0;
};

/// Immutable after construction; thread-safe.
class Workload {
 public:
  /// Throws Error(kInvalidArgument) when skip leaves nothing or the scale does not divide 512.
  /// Keeps a reference to `trace`.
  Workload(const Trace& trace, const WorkloadOptions& options);

  int64_t num_requests() const { return static_cast<int64_t>(requests_.size()); }
  const WorkloadRequest& request(int64_t r) const { return requests_[static_cast<size_t>(r)]; }
  /// Most rows of one request, at least 1.
  int64_t max_rows() const;

  /// Identity of token `position` of request r. A prompt token is named by the id of the block that
  /// holds its last trace token and by its place in that block, so that equal prefixes are equal
  /// tokens; a generated token by (row of the trace, position, seed).
  uint64_t token_id(int64_t r, int64_t position) const;

  /// Identity of a token that the draft model guessed wrong at `position`: never the token there.
  uint64_t wrong_token_id(int64_t r, int64_t position) const;

  /// One hash per full page of the prompt: equal hashes stand for equal tokens in this page and in
  /// every page before it. Empty for a trace without block ids.
  std::vector<uint64_t> page_hashes(int64_t r, int64_t page_size) const;

  /// Leading tokens of each request that an earlier request with usable[earlier] has too, by whole
  /// blocks.
  std::vector<int64_t> shared_prefixes(const std::vector<bool>& usable) const;

 private:
  // Index of the trace block that holds the last trace token of replayed prompt token `position`.
  int64_t block_of(const TraceRequest& request, int64_t position) const;

  const Trace& trace_;
  WorkloadOptions options_;
  std::vector<WorkloadRequest> requests_;
  // Per request, the hash of the ids of blocks 0..b for each block b.
  std::vector<std::vector<uint64_t>> block_chains_;
};

}  // namespace fovea::internal
