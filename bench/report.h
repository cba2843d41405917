#pragma once

#include <string>
#include <vector>

#include "bench/runner.h"
#include "fovea/ceilings.h"
#include "fovea/json.h"

/// Benchmark results as text and as JSON.
namespace fovea::bench {

/// What every result of one invocation shares.
struct Session {
  std::string command;
  std::string commit;
  std::string version;
  std::string date_utc;         ///< ISO 8601.
  std::string device;           ///< Name of the GPU; empty: the CPU.
  double device_clock_mhz = 0;  ///< The highest of the GPU; 0: unknown.
  double clock_mhz = 0;         ///< As the system reports it at the start; 0: unknown.
  double load_average = -1;
  MachineCeilings ceilings;
};

/// A session of this build at this moment, without ceilings.
Session make_session(const std::string& command);

/// Two or three lines: library, commit, CPU, instruction set, command.
std::string describe_session(const Session& session);

/// The limits of both thread counts as a table.
std::string describe_ceilings(const MachineCeilings& ceilings);

/// The heading of the table of results, and one line of it.
std::string table_heading();
std::string table_row(const Measurement& measurement);

/// The JSON of docs/results/README.md.
Json to_json(const Session& session, const std::vector<Measurement>& measurements,
             const std::vector<Rejection>& rejections);

}  // namespace fovea::bench
