#include "src/binding/named_call.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstddef>

#include "fovea/error.h"

namespace fovea::internal {
namespace {

struct AxisTerm {
  std::string_view name;  // empty: a number; "?": any extent
  int64_t number = 0;     // the extent, or what is added to the named axis
};

// Views of the text of a declaration: nothing is allocated, as every tensor of every call has one.
struct Declaration {
  static constexpr size_t kMaxTypes = 3;
  std::array<std::string_view, kMaxTypes> types;
  size_t num_types = 0;
  std::array<AxisTerm, kMaxRank> axes;
  size_t num_axes = 0;

  bool has_type(std::string_view type) const {
    const auto end = types.begin() + static_cast<std::ptrdiff_t>(num_types);
    return std::find(types.begin(), end, type) != end;
  }
};

AxisTerm parse_axis(std::string_view text) {
  AxisTerm term;
  const size_t plus = std::min(text.find('+'), text.size());
  std::string_view digits = text.substr(std::min(plus + 1, text.size()));
  if (std::isdigit(static_cast<unsigned char>(text.front()))) {
    digits = text;
  } else {
    term.name = text.substr(0, plus);
  }
  std::from_chars(digits.data(), digits.data() + digits.size(), term.number);
  return term;
}

// Declarations are literals of the bindings, so malformed ones are not looked for. `text` outlives
// the result.
Declaration parse(std::string_view text) {
  Declaration result;
  const size_t open = text.find('[');
  std::string_view types = text.substr(0, text.find(' '));
  while (!types.empty() && result.num_types < Declaration::kMaxTypes) {
    const size_t bar = std::min(types.find('|'), types.size());
    result.types[result.num_types++] = types.substr(0, bar);
    types.remove_prefix(std::min(bar + 1, types.size()));
  }
  std::string_view axes = text.substr(open + 1, text.size() - open - 2);
  while (!axes.empty() && result.num_axes < result.axes.size()) {
    const size_t comma = std::min(axes.find(','), axes.size());
    std::string_view axis = axes.substr(0, comma);
    while (axis.starts_with(' ')) axis.remove_prefix(1);
    result.axes[result.num_axes++] = parse_axis(axis);
    axes.remove_prefix(std::min(comma + 1, axes.size()));
  }
  return result;
}

DType parse_dtype(std::string_view word) {
  for (const DType dtype : {DType::kU8, DType::kI32, DType::kI64, DType::kF32, DType::kBf16}) {
    if (to_string(dtype) == word) return dtype;
  }
  throw Error(ErrorCode::kInternal, "a binding declares the type '" + std::string(word) + "'");
}

}  // namespace

std::string NameSet::list() const {
  std::vector<std::string> sorted = names_;
  std::sort(sorted.begin(), sorted.end());
  std::string text;
  for (const std::string& name : sorted) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

NamedCall::NamedCall(std::string op, CallTensors& tensors, const Json& params, const Device& device,
                     const Options& options, RecordedCall* record)
    : op_(std::move(op)),
      tensors_(tensors),
      params_(&params),
      device_(device),
      options_(options),
      record_(record) {
  if (params_->kind() != Json::Kind::kObject) {
    refuse("params is of type " + std::string(to_string(params_->kind())) +
           ", expected a JSON object");
  }
}

NamedCall::NamedCall(const RecordedCall& repeats, CallTensors& tensors)
    : tensors_(tensors), params_(nullptr), repeats_(&repeats) {}

void NamedCall::refuse(const std::string& what) const {
  throw Error(ErrorCode::kInvalidArgument, op_ + ": " + what);
}

void NamedCall::match(const std::string& name, const ConstTensorView& tensor,
                      std::string_view declaration) {
  const Declaration expected = parse(declaration);
  const auto mismatch = [&](const std::string& detail) {
    refuse(name + " = " + to_string(tensor) + ", expected " + std::string(declaration) + detail);
  };
  if (!expected.has_type(to_string(tensor.dtype)) ||
      tensor.rank != static_cast<int>(expected.num_axes)) {
    mismatch("");
  }
  for (size_t i = 0; i < expected.num_axes; ++i) {
    const AxisTerm& term = expected.axes[i];
    if (term.name == "?") continue;
    if (term.name.empty()) {
      if (tensor.shape[i] != term.number) mismatch("");
      continue;
    }
    const int64_t found = tensor.shape[i] - term.number;
    if (found < 0) mismatch("");
    const ExtentOrigin origin{{name, static_cast<int>(i)}, -term.number, {}};
    const auto axis = axes_.find(term.name);
    if (axis == axes_.end()) {
      axes_.emplace(term.name, Axis{found, name, origin});
    } else if (axis->second.extent != found) {
      mismatch(" with " + axis->first + " = " + std::to_string(axis->second.extent) + " from " +
               axis->second.source);
    } else if (axis->second.origin.axis.input.empty()) {
      axis->second.origin = origin;
    }
  }
}

void NamedCall::expect(const std::string& name, std::string_view declaration) {
  known_tensors_.insert(name);
  const ConstTensorView tensor = tensors_.find(name);
  if (!tensor.defined())
    refuse("the tensor " + name + " is missing, expected " + std::string(declaration));
  match(name, tensor, declaration);
}

ConstTensorView NamedCall::in(std::string_view name, std::string_view declaration) {
  if (const RecordedStep* step = repeated(name)) return tensors_.input(step->name);
  const std::string key(name);
  expect(key, declaration);
  remember(name, [](RecordedStep&) {});
  return tensors_.input(key);
}

ConstTensorView NamedCall::opt(std::string_view name, std::string_view declaration) {
  if (const RecordedStep* step = repeated(name)) {
    return step->is_there ? tensors_.input(step->name) : ConstTensorView{};
  }
  const std::string key(name);
  known_tensors_.insert(key);
  const ConstTensorView tensor = tensors_.find(key);
  remember(name, [&](RecordedStep& step) { step.is_there = tensor.defined(); });
  if (!tensor.defined()) return {};
  match(key, tensor, declaration);
  return tensors_.input(key);
}

const int32_t* NamedCall::values(std::string_view name) {
  if (record_ != nullptr) record_->repeatable = false;
  return tensors_.values(std::string(name));
}

bool NamedCall::is_given(std::string_view name) {
  return answer(name, [&] { return tensors_.given_output(std::string(name)).defined(); }) != 0;
}

bool NamedCall::has(std::string_view name) {
  return answer(name, [&] { return tensors_.find(std::string(name)).defined(); }) != 0;
}

DType NamedCall::dtype_of(std::string_view name) {
  return static_cast<DType>(
      answer(name, [&] { return static_cast<int64_t>(tensors_.find(std::string(name)).dtype); }));
}

int NamedCall::rank_of(std::string_view name) {
  return static_cast<int>(answer(name, [&] { return tensors_.find(std::string(name)).rank; }));
}

std::vector<ExtentOrigin> NamedCall::output_origins(std::string_view declaration) const {
  const Declaration expected = parse(declaration);
  std::vector<ExtentOrigin> origins(expected.num_axes);
  for (size_t i = 0; i < expected.num_axes; ++i) {
    const AxisTerm& term = expected.axes[i];
    const auto found = axes_.find(term.name);
    if (found == axes_.end()) continue;
    origins[i] = found->second.origin;
    origins[i].added += term.number;
  }
  return origins;
}

std::vector<int64_t> NamedCall::output_shape(const std::string& name,
                                             std::string_view declaration) {
  const Declaration expected = parse(declaration);
  auto bytes = static_cast<int64_t>(size_of(parse_dtype(expected.types.front())));
  std::vector<int64_t> shape;
  bool fits = true;
  for (size_t i = 0; i < expected.num_axes; ++i) {
    const AxisTerm& term = expected.axes[i];
    shape.push_back(term.name.empty() ? term.number : known_extent(term.name) + term.number);
    fits = fits && !__builtin_mul_overflow(bytes, shape.back(), &bytes);
  }
  // A parameter or a length out of proportion asks for more than the machine has; filling it page
  // by page would end the process instead of the call.
  static const int64_t memory_bytes = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  if (!fits || bytes > memory_bytes - output_bytes_) {
    throw Error(ErrorCode::kOutOfMemory,
                op_ + ": the output " + name + " needs " +
                    (fits ? std::to_string(bytes) + " bytes" : "more than 2^63 bytes") +
                    ", this machine has " + std::to_string(memory_bytes));
  }
  output_bytes_ += bytes;
  return shape;
}

TensorView NamedCall::provide(const std::string& name, DType dtype,
                              const std::vector<int64_t>& shape, Writes writes) const {
  return writes == Writes::kAll ? tensors_.written_output(name, dtype, shape)
                                : tensors_.output(name, dtype, shape);
}

TensorView NamedCall::out(std::string_view name, std::string_view declaration, Writes writes) {
  if (const RecordedStep* step = repeated(name)) {
    return step->is_there ? tensors_.given_output(step->name)
                          : provide(step->name, step->dtype, step->shape, writes);
  }
  const std::string key(name);
  known_outputs_.insert(key);
  const TensorView given = tensors_.given_output(key);
  if (given.defined()) {
    match(key, given, declaration);
    remember(name, [](RecordedStep& step) { step.is_there = true; });
    return given;
  }
  const DType dtype = parse_dtype(parse(declaration).types.front());
  tensors_.output_origins(key, output_origins(declaration));
  const std::vector<int64_t> shape = output_shape(key, declaration);
  remember(name, [&](RecordedStep& step) {
    step.dtype = dtype;
    step.shape = shape;
  });
  return provide(key, dtype, shape, writes);
}

TensorView NamedCall::out_if_wanted(std::string_view name, std::string_view declaration,
                                    Writes writes) {
  const bool is_wanted = answer(name, [&] {
                           const std::string key(name);
                           known_outputs_.insert(key);
                           return tensors_.given_output(key).defined() || tensors_.wants(key);
                         }) != 0;
  return is_wanted ? out(name, declaration, writes) : TensorView{};
}

TensorView NamedCall::update(std::string_view name, std::string_view declaration) {
  if (const RecordedStep* step = repeated(name)) return tensors_.update(step->name);
  const std::string key(name);
  expect(key, declaration);
  remember(name, [](RecordedStep&) {});
  return tensors_.update(key);
}

void NamedCall::plan_host_function() {
  if (record_ != nullptr) record_->repeatable = false;
  refuse_unknown_names();
  choice_.name = kHostFunction;
}

void NamedCall::out_lists(
    const std::vector<std::pair<std::string, std::span<const int32_t>>>& lists) {
  std::vector<TensorView> outputs;
  for (const auto& [name, values] : lists) {
    known_outputs_.insert(name);
    const auto count = static_cast<int64_t>(values.size());
    const TensorView given = tensors_.given_output(name);
    if (given.defined()) match(name, given, "i32 [" + std::to_string(count) + "]");
    outputs.push_back(given.defined() ? given : tensors_.host_output(name, DType::kI32, {count}));
  }
  refuse_unknown_outputs();
  for (size_t i = 0; i < lists.size(); ++i) {
    std::copy(lists[i].second.begin(), lists[i].second.end(),
              static_cast<int32_t*>(outputs[i].data));
  }
}

int64_t NamedCall::known_extent(std::string_view axis) const {
  const auto found = axes_.find(axis);
  if (found == axes_.end()) {
    throw Error(ErrorCode::kInternal,
                op_ + ": the binding never fixes the axis " + std::string(axis));
  }
  return found->second.extent;
}

int64_t NamedCall::extent(std::string_view axis) {
  return answer(axis, [&] { return known_extent(axis); });
}

void NamedCall::set_extent(std::string_view axis, int64_t extent, std::string_view source,
                           std::initializer_list<std::string_view> by) {
  if (repeats_ != nullptr) return;
  const std::string from(source);
  if (extent < 0) refuse(from + " = " + std::to_string(extent) + ", expected >= 0");
  ExtentOrigin origin;
  for (const std::string_view name : by) {
    const auto found = axes_.find(name);
    if (found == axes_.end()) continue;
    const ExtentOrigin& its = found->second.origin;
    if (!its.axis.input.empty()) origin.by.push_back(its.axis);
    origin.by.insert(origin.by.end(), its.by.begin(), its.by.end());
  }
  axes_.insert_or_assign(std::string(axis), Axis{extent, from, std::move(origin)});
}

const Json* NamedCall::param(const std::string& name, bool required) {
  known_params_.insert(name);
  const Json* value = params_->find(name);
  if (value == nullptr && required) refuse("the parameter " + name + " is missing");
  return value;
}

namespace {

// Runs `read` and names the parameter in its refusal.
template <class Read>
auto read_param(const std::string& op, const std::string& name, Read read) {
  try {
    return read();
  } catch (const Error& error) {
    // The text of the JSON value, without its own prefix.
    const std::string text = error.what();
    const size_t detail = text.find("json: ");
    throw Error(ErrorCode::kInvalidArgument,
                op + ": params." + name + ": " +
                    (detail == std::string::npos ? text : text.substr(detail + 6)));
  }
}

}  // namespace

int64_t NamedCall::integer(std::string_view name, std::optional<int64_t> otherwise) {
  return answer(name, [&] {
    const std::string key(name);
    const Json* value = param(key, !otherwise.has_value());
    return value == nullptr ? *otherwise
                            : read_param(op_, key, [&] { return value->as_integer(); });
  });
}

float NamedCall::number(std::string_view name, std::optional<float> otherwise) {
  if (const RecordedStep* step = repeated(name)) return step->number;
  const std::string key(name);
  const Json* value = param(key, !otherwise.has_value());
  float result = otherwise.value_or(0);
  if (value != nullptr) {
    result = static_cast<float>(read_param(op_, key, [&] { return value->as_number(); }));
    if (!std::isfinite(result)) {
      refuse("params." + key + " = " + value->dump() + ", expected a finite fp32 number");
    }
  }
  remember(name, [&](RecordedStep& step) { step.number = result; });
  return result;
}

bool NamedCall::flag(std::string_view name, bool otherwise) {
  return answer(name, [&] {
           const std::string key(name);
           const Json* value = param(key, false);
           return value == nullptr ? otherwise
                                   : read_param(op_, key, [&] { return value->as_bool(); });
         }) != 0;
}

bool NamedCall::has_param(std::string_view name) {
  return answer(name, [&] { return params_->find(name) != nullptr; }) != 0;
}

int64_t NamedCall::find_word(const std::string& name, const std::vector<std::string_view>& words,
                             const std::vector<std::string_view>& later, bool has_default) {
  const Json* value = param(name, !has_default);
  if (value == nullptr) return -1;
  const std::string word = read_param(op_, name, [&] { return value->as_string(); });
  const auto found = std::find(words.begin(), words.end(), word);
  if (found != words.end()) return found - words.begin();
  if (std::find(later.begin(), later.end(), word) != later.end()) {
    throw Error(ErrorCode::kUnsupported,
                op_ + ": params." + name + " = '" + word + "' is not in this build");
  }
  std::string expected;
  for (const std::string_view known : words) {
    expected += (expected.empty() ? "" : ", ") + std::string(known);
  }
  refuse("params." + name + " = '" + word + "', expected one of " + expected);
}

void NamedCall::unused(std::initializer_list<std::string_view> tensors, std::string_view why) {
  if (repeats_ != nullptr) return;
  for (const std::string_view name : tensors) {
    const std::string key(name);
    const bool is_new = known_tensors_.insert(key);
    if (!is_new || !tensors_.find(key).defined()) continue;
    std::string note = op_;
    note.append(": the tensor ").append(name).append(" is not used ").append(why);
    notes_.push_back(std::move(note));
  }
}

void NamedCall::later_tensor(std::string_view name, std::string_view feature) {
  if (repeats_ != nullptr || !tensors_.find(std::string(name)).defined()) return;
  throw Error(ErrorCode::kUnsupported, op_ + ": the tensor " + std::string(name) + " (" +
                                           std::string(feature) + ") is not in this build");
}

void NamedCall::later_param(std::string_view name, const Json& harmless, std::string_view feature) {
  if (repeats_ != nullptr) return;
  const std::string key(name);
  const Json* value = param(key, false);
  if (value == nullptr || *value == harmless) return;
  const bool equal_numbers = value->kind() == Json::Kind::kNumber &&
                             harmless.kind() == Json::Kind::kInteger &&
                             value->as_number() == harmless.as_number();
  if (equal_numbers) return;
  throw Error(ErrorCode::kUnsupported, op_ + ": params." + key + " = " + value->dump() + " (" +
                                           std::string(feature) + ") is not in this build");
}

void NamedCall::refuse_unknown_names() const {
  for (const std::string& name : tensors_.names()) {
    if (!known_tensors_.contains(name)) {
      refuse("unknown tensor '" + name +
             "'; with these parameters it takes: " + known_tensors_.list());
    }
  }
  for (const auto& [name, value] : params_->members()) {
    if (!known_params_.contains(name)) {
      refuse("unknown parameter '" + name + "'; it takes: " + known_params_.list());
    }
  }
}

void NamedCall::refuse_unknown_outputs() const {
  for (const std::string& name : tensors_.given_outputs()) {
    if (!known_outputs_.contains(name)) {
      refuse("unknown output '" + name +
             "'; with these parameters it has: " + known_outputs_.list());
    }
  }
}

}  // namespace fovea::internal
