#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/targets.h"
#include "fovea/device.h"
#include "fovea/implementation.h"

/// What a benchmark case is: inputs, a checked run, the work that one run does.
namespace fovea::bench {

/// One implementation, ready to run on the inputs of a case.
struct PreparedRun {
  std::string implementation;       ///< The one that was chosen.
  std::function<void(Stream)> run;  ///< Submits one run.
  /// Waits, then compares what the last run() wrote with the reference; empty when it is right.
  std::function<std::string()> mismatch;
};

/// The inputs of a case, made once and shared by the implementations that are compared on it.
class CaseInputs {
 public:
  virtual ~CaseInputs() = default;
  virtual Work work() const = 0;
  /// Throws fovea::Error when the implementation refuses. The run refers to these inputs.
  virtual PreparedRun prepare(const Device& device, const Options& options) = 0;
};

struct BenchCase {
  std::string op;           ///< As `fovea info` names it.
  std::string name;         ///< Unique within the operator, e.g. "h128_rows1_bf16".
  std::string description;  ///< The problem, in words.
  int num_threads = 0;      ///< Fixed by the case; 0: as asked.
  std::optional<PublishedTarget> target;
  std::function<std::unique_ptr<CaseInputs>()> make;
};

/// Every case, by operator.
std::vector<BenchCase> all_cases();

}  // namespace fovea::bench
