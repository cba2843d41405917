#pragma once

#include <algorithm>
#include <cstdint>

#include "src/replay/hash.h"
#include "src/replay/workload.h"

/// Which earlier keys the queries of a row lean to.
namespace fovea::internal {

/// Rows point to at most this many earlier positions: head h points to that of group h % kTargets.
/// Several index heads share one, so that the indexer really selects it, and the attention heads
/// of the group then find their key among the selected.
inline constexpr int64_t kTargets = 8;

/// The earlier position (0 for the first row) that group `group` of a row's heads points to.
inline int64_t target_position(uint64_t seed, int64_t layer, const RowToken& row, int64_t group) {
  return scale_to(hash_in(HashDomain::kTarget, seed, layer, row.token_id, row.position, group),
                  std::max<int64_t>(row.position, 1));
}

}  // namespace fovea::internal
