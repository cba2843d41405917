#pragma once

#include <string>
#include <vector>

namespace fovea::cli {

/// Options of `fovea bench`.
struct BenchOptions {
  std::string op;         ///< Only this operator; empty: all.
  std::string case_name;  ///< Only cases whose name contains it; empty: all.
  std::string device = "cpu";
  bool graph = false;   ///< On a GPU: launches of a captured graph.
  std::string suite;    ///< "perf": the rows of docs/bench.md instead of cases; empty: cases.
  int num_threads = 0;  ///< 0: every hardware thread.
  std::vector<std::string> implementations;  ///< Compared, interleaved; empty: the preferred one.
  std::string isa;                           ///< Limits the instruction set; empty: the best.
  std::string json_path;                     ///< Also writes JSON there; empty: not.
  bool ceilings = false;  ///< Measures the ceilings anew; alone (no operator named), only them.
  bool quick = false;     ///< The least number of samples.
  std::string command;    ///< The command line as typed, for the record.
};

/// Prints the table on stdout, warnings on stderr. Returns the exit code: 0, 1 when a result
/// differs from the reference, 2 for a name that does not exist, 3 when a file cannot be written.
/// Throws fovea::Error.
int run_bench(const BenchOptions& options);

}  // namespace fovea::cli
