#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/export.h"
#include "fovea/metadata.h"

namespace fovea {

/// How context parallelism deals the query rows of a prefill to ranks.
enum class ContextScheme : uint8_t {
  kRoundRobin,  ///< Row g of the batch belongs to rank g % ranks.
  kZigzag,      ///< One request in 2 * ranks blocks; rank r has blocks r and 2 * ranks - 1 - r.
};

/// "round_robin", "zigzag".
FOVEA_API std::string_view to_string(ContextScheme scheme) noexcept;

struct ContextSplitProblem {
  int ranks = 1;  ///< C >= 1
  int rank = 0;   ///< 0..C-1
  ContextScheme scheme = ContextScheme::kRoundRobin;
  ExtendKvSource extend_kv_source = ExtendKvSource::kCache;  ///< What row_offset counts in.
};

/// The part of an EXTEND batch that one rank computes. A rank without rows has empty arrays and
/// indptr arrays [0].
struct ContextSplit {
  std::vector<int32_t> rank_rows;  ///< [E_r]: row of the whole batch of each local row
  std::vector<int32_t> positions;  ///< [E_r]: its position in its request
  std::vector<int32_t> row_len;    ///< [E_r]
  // Round-robin.
  std::vector<int32_t> selected;   ///< [B]: requests with a row on this rank, ascending
  std::vector<int32_t> ext_len;    ///< [B]: their rows here
  std::vector<int32_t> kv_len;     ///< [B]: their KV lengths; zigzag: [2], of the two sub-calls
  std::vector<int32_t> kv_indptr;  ///< [B+1], over the selected requests
  std::vector<int32_t> q_indptr;   ///< [B+1]
  std::vector<int32_t> k_start, k_end;  ///< [E_r], over the keys of the selected requests
  std::vector<int32_t> row_to_request;  ///< [E_r], index into `selected`
  std::vector<int32_t> row_offset;  ///< [E_r]: k_start; with kFresh over the keys of all requests
  // Zigzag.
  std::vector<int32_t> block_len;  ///< [2 * ranks]
};

/// Splits the rows of a non-speculative EXTEND. `seq_len` holds the KV length (prefix and new
/// rows), `ext_len` the new rows of each request; host arrays.
///
/// Throws Error(kInvalidArgument) for rank outside 0..ranks-1, arrays of different lengths, ext_len
/// < 0, seq_len < ext_len (naming the request), sums beyond int32; zigzag with another number of
/// requests than one, or fewer than 2 * ranks rows. Round-robin takes any number of rows, fewer
/// than ranks included.
///
/// Source: prefill context parallelism of public DeepSeek-V3.2 engines, restated in
/// docs/context_split.md.
FOVEA_API ContextSplit context_split(const ContextSplitProblem& problem,
                                     std::span<const int32_t> seq_len,
                                     std::span<const int32_t> ext_len);

/// Rows that each rank contributes to an all-gather of `num_rows` rows: the most that any rank has,
/// ceil(num_rows / ranks) for both schemes' padding.
FOVEA_API int64_t context_gather_rows(const ContextSplitProblem& problem, int64_t num_rows);

/// Where token row g of the batch stands in the gathered array [ranks * context_gather_rows]: the
/// inverse of the split. [num_rows]
FOVEA_API std::vector<int64_t> context_gather_order(const ContextSplitProblem& problem,
                                                    int64_t num_rows);

}  // namespace fovea
