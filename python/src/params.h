#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/json.h"
#include "python/src/label.h"

namespace fovea::python {

/// A flag, an integer, a finite number or a word; numpy's scalars count as numbers. Throws
/// Error(kInvalidArgument) under the label for anything else.
Json to_param(const Label& label, nanobind::handle value);

/// Keyword arguments as a JSON object; None stands for absent. Throws what to_param()
/// does, under "<label>: <name>".
Json to_params(const std::string& label, const nanobind::dict& params);

/// Reads parameters into the fields of a struct, which keep their value where none is given:
///
///   read("topk", &config.topk);
///   read("commit", &config.commit, {{"direct", CommitMode::kDirect}, ...});
///
/// Throws Error(kInvalidArgument) naming label, parameter, found and expected.
class Fields {
 public:
  /// `params` is an object and outlives the reader.
  Fields(std::string label, const Json& params) : label_(std::move(label)), params_(params) {}

  void operator()(const char* name, int64_t* field) const;
  void operator()(const char* name, int32_t* field) const;
  void operator()(const char* name, float* field) const;
  void operator()(const char* name, double* field) const;
  void operator()(const char* name, bool* field) const;
  void operator()(const char* name, std::string* field) const;

  template <class Value>
  using Words = std::vector<std::pair<std::string_view, Value>>;

  template <class Value>
  void operator()(const char* name, Value* field, const Words<Value>& words) const {
    const Json* value = params_.find(name);
    if (value == nullptr) return;
    std::string known;
    for (const auto& [word, meaning] : words) {
      if (value->kind() == Json::Kind::kString && value->as_string() == word) {
        *field = meaning;
        return;
      }
      known += (known.empty() ? "" : ", ") + std::string(word);
    }
    refuse(name, *value, "one of " + known);
  }

  bool has(const char* name) const { return params_.find(name) != nullptr; }

 private:
  [[noreturn]] void refuse(const char* name, const Json& found, const std::string& expected) const;

  std::string label_;
  const Json& params_;
};

}  // namespace fovea::python
