#pragma once

#include "fovea/dsa_backend.h"

/// Names of implementations and what a configuration may run.
namespace fovea::internal {

/// Throws Error naming field, found value and the names that would do: kInvalidArgument for a name
/// that does not exist or a ratio outside its range, kUnsupported for a name that cannot read the
/// cache or cannot run with `deterministic`.
void check_dsa_implementations(const char* op, const DsaConfig& config);

/// Some batch may run kContiguousBf16: its buffers and plans are needed. For a configuration that
/// passed check_dsa_implementations.
bool may_run_contiguous(const DsaConfig& config);

/// Some batch may read this call's keys instead of the cache.
bool may_run_fresh(const DsaConfig& config);

/// Some batch may run kOneShotMha.
bool may_run_one_shot(const DsaConfig& config);

}  // namespace fovea::internal
