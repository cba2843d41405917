#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fovea/call_operator.h"
#include "fovea/dtype.h"

namespace fovea::internal {

class NamedCall;

/// One answer that a binding was given: what it is of its function, the other fields are unused.
struct RecordedStep {
  std::string name;
  bool is_there = false;         ///< An optional tensor; a result that the caller brings.
  int64_t integer = 0;           ///< A parameter, an extent, a number of a word.
  float number = 0;              ///< A parameter.
  DType dtype = DType::kNone;    ///< Of a tensor, or of a result to make
  std::vector<int64_t> shape{};  ///< and its shape.
};

/// A binding asks the same questions in the same order for every call of the same types, shapes and
/// parameters: the answers, the plans and the outcome of one of them.
struct RecordedCall {
  void (*run)(NamedCall& call) = nullptr;
  std::vector<RecordedStep> steps;
  std::vector<std::shared_ptr<const void>> plans;
  CallOutcome outcome;
  /// False where an answer came from the contents of a tensor.
  bool repeatable = true;
};

}  // namespace fovea::internal
