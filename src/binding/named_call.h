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
#include "src/binding/recorded_call.h"
#include "src/core/check.h"

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
/// A call can be recorded and repeated: the binding then runs again, and every function gives the
/// answer that it gave, without looking at a declaration or a parameter.
///
/// A declaration is "<type>[|<type>...] [<axis>, ...]". An axis is a number, a name, a name plus a
/// number (R+1), or `?` for any extent. The first tensor that names an axis fixes its extent, the
/// others must agree. Everything is refused by Error(kInvalidArgument) naming operator, tensor or
/// parameter, found and expected.
class NamedCall {
 public:
  /// What an operator writes of a result, given or new, in a call that succeeds.
  enum class Writes { kSome, kAll };

  /// `record`, unless null, receives the answers.
  NamedCall(std::string op, CallTensors& tensors, const Json& params, const Device& device,
            const Options& options, RecordedCall* record);
  /// Repeats a call.
  NamedCall(const RecordedCall& repeats, CallTensors& tensors);

  // Tensors, in the order of the table.
  ConstTensorView in(std::string_view name, std::string_view declaration);
  /// An undefined view when absent.
  ConstTensorView opt(std::string_view name, std::string_view declaration);
  /// The elements of an i32 input on the host.
  const int32_t* values(std::string_view name);
  /// Whether to size results by the contents of lengths where there is a bound too.
  bool sized_by_contents() const { return tensors_.sized_by_contents(); }
  /// An output: the caller's tensor, or a new one, for which every axis must be known: zero-filled,
  /// unless all of it is written.
  TensorView out(std::string_view name, std::string_view declaration,
                 Writes writes = Writes::kSome);
  /// The same for a result that an operator may leave out: undefined when the caller does not want
  /// it.
  TensorView out_if_wanted(std::string_view name, std::string_view declaration,
                           Writes writes = Writes::kSome);
  /// Whether the caller brings the memory of an output, whose axes may then be any.
  bool is_given(std::string_view name);
  /// An input that is changed.
  TensorView update(std::string_view name, std::string_view declaration);
  bool has(std::string_view name);
  /// kNone when absent.
  DType dtype_of(std::string_view name);
  /// 0 when absent.
  int rank_of(std::string_view name);

  // Axes.
  int64_t extent(std::string_view axis);
  /// Fixes an axis that no tensor has named; negative extents are refused under `source`.
  /// `by`: the axes that decide it beside the parameters, as far as there are any.
  void set_extent(std::string_view axis, int64_t extent, std::string_view source,
                  std::initializer_list<std::string_view> by = {});

  // Parameters: without a default they are required.
  int64_t integer(std::string_view name, std::optional<int64_t> otherwise = std::nullopt);
  /// A finite fp32 value.
  float number(std::string_view name, std::optional<float> otherwise = std::nullopt);
  bool flag(std::string_view name, bool otherwise);
  bool has_param(std::string_view name);
  /// One of the words; `later` lists words that the format has but this build does not:
  /// Error(kUnsupported).
  template <class Value>
  Value choice(std::string_view name,
               std::initializer_list<std::pair<std::string_view, Value>> words,
               std::optional<Value> otherwise = std::nullopt,
               std::initializer_list<std::string_view> later = {}) {
    int64_t found = -1;
    if (const RecordedStep* step = repeated(name)) {
      found = step->integer;
    } else {
      std::vector<std::string_view> known;
      for (const auto& [word, value] : words) known.push_back(word);
      found = find_word(std::string(name), known, later, otherwise.has_value());
      remember(name, [&](RecordedStep& answer) { answer.integer = found; });
    }
    return found >= 0 ? (words.begin() + found)->second : *otherwise;
  }

  /// Names of the table that these parameters do not use, as far as they were not declared: they
  /// may be given and change nothing; notes() says so.
  void unused(std::initializer_list<std::string_view> tensors, std::string_view why);

  /// Names that the tables have but this build does not: given, they are Error(kUnsupported). A
  /// parameter that has its default value is let through.
  void later_tensor(std::string_view name, std::string_view feature);
  void later_param(std::string_view name, const Json& harmless, std::string_view feature);

  /// A refusal of the binding itself.
  [[noreturn]] void refuse(const std::string& what) const;

  /// Refuses names that were not asked for, then plans: everything that the problem alone decides
  /// is refused before an output takes memory. All inputs and parameters are declared by now.
  template <class Op>
  Op plan(const typename Op::Problem& problem) {
    if (repeats_ != nullptr) return *static_cast<const Op*>(repeats_->plans[next_plan_++].get());
    refuse_unknown_names();
    Op result = Op::plan(problem, device_, options_);
    choice_ = result.implementation();
    if (record_ != nullptr) record_->plans.push_back(std::make_shared<const Op>(result));
    return result;
  }

  /// Instead of plan(), for functions of host values that have no implementations to choose from.
  void plan_host_function();

  /// The results of a host function, each an i32 output of one axis.
  void out_lists(const std::vector<std::pair<std::string, std::span<const int32_t>>>& lists);

  template <class Op>
  void run(const Op& plan, const typename Op::Tensors& tensors) {
    if (repeats_ == nullptr) refuse_unknown_outputs();
    tensors_.run(plan.workspace_bytes(),
                 [&](Workspace workspace, Stream stream) { plan.run(tensors, workspace, stream); });
  }

  CallOutcome outcome() && { return {std::move(choice_), std::move(notes_)}; }

 private:
  struct Axis {
    int64_t extent;
    std::string source;
    ExtentOrigin origin;
  };

  /// The answer that is repeated; null while a call is planned.
  const RecordedStep* repeated([[maybe_unused]] std::string_view name) {
    if (repeats_ == nullptr) return nullptr;
    const RecordedStep& step = repeats_->steps[next_step_++];
    FOVEA_DCHECK(step.name == name);
    return &step;
  }
  template <class Fill>
  void remember(std::string_view name, Fill fill) {
    if (record_ == nullptr) return;
    fill(record_->steps.emplace_back(RecordedStep{.name = std::string(name)}));
  }
  /// Answers with `ask()` and remembers it.
  template <class Ask>
  int64_t answer(std::string_view name, Ask ask) {
    if (const RecordedStep* step = repeated(name)) return step->integer;
    const int64_t result = ask();
    remember(name, [&](RecordedStep& step) { step.integer = result; });
    return result;
  }

  /// Requires the tensor.
  void expect(const std::string& name, std::string_view declaration);
  const Json* param(const std::string& name, bool required);
  /// Number of the word; -1: the default.
  int64_t find_word(const std::string& name, const std::vector<std::string_view>& words,
                    const std::vector<std::string_view>& later, bool has_default);
  int64_t known_extent(std::string_view axis) const;
  void match(const std::string& name, const ConstTensorView& tensor, std::string_view declaration);
  void refuse_unknown_names() const;
  void refuse_unknown_outputs() const;
  TensorView provide(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                     Writes writes) const;
  std::vector<ExtentOrigin> output_origins(std::string_view declaration) const;
  /// The shape of an output whose axes are known; refused beyond the memory of this machine.
  std::vector<int64_t> output_shape(const std::string& name, std::string_view declaration);

  std::string op_;
  CallTensors& tensors_;
  const Json* params_;
  Device device_;
  Options options_;
  int64_t output_bytes_ = 0;
  std::map<std::string, Axis, std::less<>> axes_;
  NameSet known_tensors_;
  NameSet known_params_;
  NameSet known_outputs_;
  std::vector<std::string> notes_;
  ImplementationChoice choice_;
  RecordedCall* record_ = nullptr;
  const RecordedCall* repeats_ = nullptr;
  size_t next_step_ = 0;
  size_t next_plan_ = 0;
};

}  // namespace fovea::internal
