#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/call_operator.h"
#include "fovea/device.h"
#include "fovea/implementation.h"
#include "fovea/json.h"
#include "fovea/tensor.h"

namespace fovea::internal {

/// A few names, in one piece of memory: every call builds three of them.
class NameSet {
 public:
  /// Whether the name is new.
  bool insert(std::string_view name) {
    if (contains(name)) return false;
    if (names_.empty()) names_.reserve(32);
    names_.emplace_back(name);
    return true;
  }
  bool contains(std::string_view name) const {
    return std::find(names_.begin(), names_.end(), name) != names_.end();
  }
  /// The names, sorted, with commas between them.
  std::string list() const;

 private:
  std::vector<std::string> names_;
};

/// Maps tensors and parameters by name to the structs of an operator, so that a binding reads like
/// its row of docs/run.md:
///
///   tensors.lse_parts = call.in("lse_parts", "f32 [P, T, H]");
///   tensors.sink = call.opt("sink", "f32 [H]");
///   const MergeLse plan = call.plan<MergeLse>(problem);
///   tensors.lse = call.out("lse", "f32 [T, H]");
///   call.run(plan, tensors);
///
/// The views that in(), opt(), out() and update() return are of the device's memory: what a binding
/// reads itself comes from values().
///
/// A declaration is "<type>[|<type>...] [<axis>, ...]". An axis is a number, a name, a name plus a
/// number (R+1), or `?` for any extent. The first tensor that names an axis fixes its extent, the
/// others must agree. Everything is refused by Error(kInvalidArgument) naming operator, tensor or
/// parameter, found and expected.
class NamedCall {
 public:
  NamedCall(std::string op, CallTensors& tensors, const Json& params, const Device& device,
            const Options& options);

  // Tensors, in the order of the table.
  ConstTensorView in(const std::string& name, std::string_view declaration);
  /// An undefined view when absent.
  ConstTensorView opt(const std::string& name, std::string_view declaration);
  /// The elements of an i32 input on the host.
  const int32_t* values(const std::string& name) const { return tensors_.values(name); }
  /// Whether to size results by the contents of lengths where there is a bound too.
  bool sized_by_contents() const { return tensors_.sized_by_contents(); }
  /// An output: the caller's tensor, or a zero-filled one, for which every axis must be known.
  TensorView out(const std::string& name, std::string_view declaration);
  /// The same for a result that an operator may leave out: undefined when the caller does not want
  /// it.
  TensorView out_if_wanted(const std::string& name, std::string_view declaration);
  /// Whether the caller brings the memory of an output, whose axes may then be any.
  bool is_given(const std::string& name) const { return tensors_.given_output(name).defined(); }
  /// An input that is changed.
  TensorView update(const std::string& name, std::string_view declaration);
  bool has(const std::string& name) const { return tensors_.find(name).defined(); }
  /// kNone when absent.
  DType dtype_of(const std::string& name) const { return tensors_.find(name).dtype; }
  /// 0 when absent.
  int rank_of(const std::string& name) const { return tensors_.find(name).rank; }

  // Axes.
  int64_t extent(std::string_view axis) const;
  /// Fixes an axis that no tensor names; negative extents are refused under `source`.
  void set_extent(const std::string& axis, int64_t extent, const std::string& source);

  // Parameters: without a default they are required.
  int64_t integer(const std::string& name, std::optional<int64_t> otherwise = std::nullopt);
  /// A finite fp32 value.
  float number(const std::string& name, std::optional<float> otherwise = std::nullopt);
  bool flag(const std::string& name, bool otherwise);
  bool has_param(const std::string& name) const { return params_.find(name) != nullptr; }
  /// One of the words; `later` lists words that the format has but this build does not:
  /// Error(kUnsupported).
  template <class Value>
  Value choice(const std::string& name,
               std::initializer_list<std::pair<std::string_view, Value>> words,
               std::optional<Value> otherwise = std::nullopt,
               std::initializer_list<std::string_view> later = {}) {
    std::vector<std::string_view> known;
    for (const auto& [word, value] : words) known.push_back(word);
    const std::optional<size_t> found = find_word(name, known, later, otherwise.has_value());
    return found ? (words.begin() + *found)->second : *otherwise;
  }

  /// Names of the table that these parameters do not use, as far as they were not declared: they
  /// may be given and change nothing; notes() says so.
  void unused(std::initializer_list<std::string> tensors, const std::string& why);

  /// Names that the tables have but this build does not: given, they are Error(kUnsupported). A
  /// parameter that has its default value is let through.
  void later_tensor(const std::string& name, const std::string& feature);
  void later_param(const std::string& name, const Json& harmless, const std::string& feature);

  /// A refusal of the binding itself.
  [[noreturn]] void refuse(const std::string& what) const;

  /// Refuses names that were not asked for, then plans: everything that the problem alone decides
  /// is refused before an output takes memory. All inputs and parameters are declared by now.
  template <class Op>
  Op plan(const typename Op::Problem& problem) {
    refuse_unknown_names();
    Op result = Op::plan(problem, device_, options_);
    choice_ = result.implementation();
    return result;
  }

  /// Instead of plan(), for functions of host values that have no implementations to choose from.
  void plan_host_function();

  /// The results of a host function, each an i32 output of one axis.
  void out_lists(const std::vector<std::pair<std::string, std::span<const int32_t>>>& lists);

  template <class Op>
  void run(const Op& plan, const typename Op::Tensors& tensors) {
    refuse_unknown_outputs();
    tensors_.run(plan.workspace_bytes(),
                 [&](Workspace workspace, Stream stream) { plan.run(tensors, workspace, stream); });
  }

  CallOutcome outcome() && { return {std::move(choice_), std::move(notes_)}; }

 private:
  struct Axis {
    int64_t extent;
    std::string source;
  };

  /// Requires the tensor.
  void expect(const std::string& name, std::string_view declaration);
  const Json* param(const std::string& name, bool required);
  std::optional<size_t> find_word(const std::string& name,
                                  const std::vector<std::string_view>& words,
                                  const std::vector<std::string_view>& later, bool has_default);
  void match(const std::string& name, const ConstTensorView& tensor, std::string_view declaration);
  void refuse_unknown_names() const;
  void refuse_unknown_outputs() const;
  /// The shape of an output whose axes are known; refused beyond the memory of this machine.
  std::vector<int64_t> output_shape(const std::string& name, std::string_view declaration);

  std::string op_;
  CallTensors& tensors_;
  const Json& params_;
  Device device_;
  Options options_;
  int64_t output_bytes_ = 0;
  std::map<std::string, Axis, std::less<>> axes_;
  NameSet known_tensors_;
  NameSet known_params_;
  NameSet known_outputs_;
  std::vector<std::string> notes_;
  ImplementationChoice choice_;
};

}  // namespace fovea::internal
