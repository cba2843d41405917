// fovea run: one operator on tensors from a file.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/verbs.h"
#include "fovea/call_operator.h"
#include "fovea/error.h"
#include "fovea/json.h"
#include "fovea/safetensors.h"

namespace fovea::cli {
namespace {

void check_implementation(const std::string& op, const std::string& name) {
  if (name.empty()) return;
  std::string known;
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      if (entry.name == name) return;
      known += (known.empty() ? "" : ", ") + entry.name;
    }
  }
  if (known.empty()) {
    throw UsageError(
        fmt::format("{} is a function of host values, without implementations to choose from", op));
  }
  throw UsageError(fmt::format("{} has no implementation '{}'; it has: {}", op, name, known));
}

Json parse_params(const TensorFile& file, const std::string& path) {
  const auto params = file.metadata.find("params");
  return params == file.metadata.end() ? Json::object()
                                       : Json::parse(params->second, path + ": params");
}

void print_result(const RunOptions& options, const std::string& implementation,
                  const std::string& device, const TensorMap& outputs) {
  if (options.json) {
    Json shapes = Json::object();
    for (const std::string& name : outputs.names()) {
      shapes.set(name, to_string(outputs.find(name)));
    }
    const Json result = Json::object({{"operator", options.op},
                                      {"implementation", implementation},
                                      {"device", device},
                                      {"output", options.output_path},
                                      {"tensors", std::move(shapes)}});
    fmt::print("{}\n", result.dump(2));
    return;
  }
  fmt::print("{}: implementation {} on {}, written to {}\n", options.op, implementation, device,
             options.output_path);
  for (const std::string& name : outputs.names()) {
    fmt::print("  {:<16} {}\n", name, to_string(outputs.find(name)));
  }
}

}  // namespace

void check_operator(const std::string& op) {
  const std::vector<std::string> names = callable_operators();
  if (std::find(names.begin(), names.end(), op) != names.end()) return;
  throw UsageError(
      fmt::format("unknown operator '{}'; this build has: {}", op, fmt::join(names, ", ")));
}

int run(const RunOptions& options) {
  check_operator(options.op);
  check_implementation(options.op, options.settings.implementation);
  const Device device = options.settings.parsed_device();
  const TensorFile input = read_safetensors(options.input_path);
  const Json params = parse_params(input, options.input_path);
  MapCallTensors tensors(input.tensors, device);
  const CallOutcome outcome =
      call_operator(options.op, tensors, params, device, Options{options.settings.implementation});
  TensorFile output;
  output.tensors = tensors.take_outputs();
  write_safetensors(options.output_path, output);
  for (const std::string& note : outcome.notes) fmt::print(stderr, "fovea: {}\n", note);
  print_result(options, outcome.implementation.name, to_string(device), output.tensors);
  return kExitOk;
}

}  // namespace fovea::cli
