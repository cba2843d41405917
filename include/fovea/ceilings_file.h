#pragma once

#include <optional>
#include <string>

#include "fovea/ceilings.h"
#include "fovea/device.h"
#include "fovea/export.h"
#include "fovea/json.h"

/// Measured ceilings are kept from one run to the next, so that a replay can report shares without
/// measuring.
namespace fovea {

/// The file that keeps measured ceilings: $XDG_CACHE_HOME/fovea/ceilings.json, otherwise
/// $HOME/.cache/fovea/ceilings.json; empty when neither variable is set.
FOVEA_API std::string ceilings_path();

/// The kept ceilings of this machine for `device.num_threads` threads and current_cpu_isa(); absent
/// when they were never measured. An unreadable or malformed file counts as absent, with a log
/// line.
FOVEA_API std::optional<MachineCeilings> load_ceilings(const Device& device);

/// Adds `ceilings` to the file, replacing an entry with the same key. Throws Error(kIo) when the
/// file cannot be written.
FOVEA_API void store_ceilings(const MachineCeilings& ceilings);

/// The limits as they stand in the file and in results: members by their names, null when absent.
FOVEA_API Json to_json(const ThroughputLimits& limits);
FOVEA_API Json to_json(const MachineCeilings& ceilings);

}  // namespace fovea
