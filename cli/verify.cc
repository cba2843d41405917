// fovea verify: every implementation against the reference, and all of them against golden files.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "cli/verbs.h"
#include "cli/verify_cases.h"
#include "fovea/call_operator.h"
#include "fovea/error.h"
#include "fovea/json.h"

namespace fovea::cli {
namespace {

// One way to run an operator.
struct Target {
  std::string implementation;
  CpuIsa isa = CpuIsa::kBaseline;  ///< Used by SIMD implementations only.
  std::string unavailable;         ///< Why it cannot run here; empty when it can.
  Device device = Device::cpu(1);  ///< Of its kind even when it cannot run.

  bool on_gpu() const { return device.kind == DeviceKind::kCuda; }
};

std::string isa_name(const Target& target) {
  const bool any =
      target.implementation == "ref" || target.implementation == kHostFunction || target.on_gpu();
  return any ? "any" : std::string(to_string(target.isa));
}

std::string device_name(const Target& target) {
  return target.on_gpu() && !target.unavailable.empty() ? "cuda" : to_string(target.device);
}

// Where verify runs: everywhere, or on one device.
struct Scope {
  bool cpu = true;
  std::vector<Device> gpus;
  bool lists_missing_gpu = true;  ///< Entries of a GPU that is not there are reported as skipped.
};

Scope scope_of(const std::string& text) {
  Scope scope;
  if (text.empty()) {
    for (int i = 0; i < cuda_device_count(); ++i) scope.gpus.push_back(Device::cuda(i));
    return scope;
  }
  RunSettings settings;
  settings.device = text;
  const Device device = settings.parsed_device();
  scope.cpu = device.kind == DeviceKind::kCpu;
  scope.lists_missing_gpu = false;
  if (!scope.cpu) scope.gpus.push_back(device);
  return scope;
}

// One line of the table.
struct Row {
  std::string op;
  Target target;
  int64_t generated = 0;
  int64_t golden = 0;
  int64_t refused = 0;  ///< Of both kinds: problems that the implementation does not support.
  double worst_rms = 0;
  std::vector<std::string> mismatches;
};

struct GoldenCase {
  VerifyCase inputs;
  TensorMap expected;
};

std::vector<Target> targets_of(const OperatorInfo& info, CpuIsa best, const Scope& scope) {
  std::vector<Target> targets;
  for (const ImplementationInfo& entry : info.implementations) {
    if (entry.device == DeviceKind::kCuda) {
      for (const Device& gpu : scope.gpus) targets.push_back({entry.name, best, "", gpu});
      if (scope.gpus.empty() && scope.lists_missing_gpu) {
        targets.push_back({entry.name, best, entry.reason, {DeviceKind::kCuda, 0, 1}});
      }
      continue;
    }
    if (!scope.cpu) continue;
    if (!entry.available || entry.name != "cpu") {
      targets.push_back({entry.name, best, entry.reason});
      continue;
    }
    for (const CpuIsa isa : {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3}) {
      if (isa <= best) targets.push_back({entry.name, isa, ""});
    }
  }
  return targets;
}

TensorMap run_case(const VerifyOperator& op, const VerifyCase& verify_case,
                   const std::string& implementation, const Device& device) {
  MapCallTensors tensors(verify_case.inputs, device);
  call_operator(op.op, tensors, verify_case.params, device, Options{implementation});
  TensorMap outputs = tensors.take_outputs();
  if (op.normalise != nullptr) {
    op.normalise(verify_case.inputs, verify_case.params, outputs);
  }
  return outputs;
}

Tolerance tolerance_of(const VerifyOperator& op, const std::string& output,
                       const std::string& implementation) {
  for (const OutputRule& rule : op.rules) {
    const bool fits = rule.implementation.empty() || rule.implementation == implementation;
    if (rule.output == output && fits) return rule.tolerance;
  }
  return kExact;
}

void compare_outputs(const VerifyOperator& op, const std::string& label, const TensorMap& actual,
                     const TensorMap& expected, Row* row) {
  if (actual.names() != expected.names()) {
    row->mismatches.push_back(label + ": other outputs than expected");
    return;
  }
  for (const std::string& name : expected.names()) {
    const Comparison result = compare(actual.find(name), expected.find(name),
                                      tolerance_of(op, name, row->target.implementation));
    row->worst_rms = std::max(row->worst_rms, result.relative_rms);
    if (!result.close) {
      row->mismatches.push_back(fmt::format("{}: {} {}", label, name, result.detail));
    }
  }
}

// Results with 1, 2 and 3 threads, or of two runs on a GPU, must be equal bit for bit.
void compare_repeated(const VerifyOperator& op, const VerifyCase& verify_case,
                      const TensorMap& first, Row* row) {
  const auto again = [&](const Device& device, const std::string& what) {
    const TensorMap outputs = run_case(op, verify_case, row->target.implementation, device);
    for (const std::string& name : first.names()) {
      if (same_bytes(outputs.find(name), first.find(name))) continue;
      row->mismatches.push_back(fmt::format("{}: {} {}", verify_case.name, name, what));
    }
  };
  if (row->target.on_gpu()) {
    again(row->target.device, "differs between two runs");
    return;
  }
  for (const int threads : {2, 3}) {
    again(Device::cpu(threads), fmt::format("depends on the number of threads (1, {})", threads));
  }
}

std::vector<GoldenCase> read_golden(const std::string& folder, const std::string& op) {
  std::vector<GoldenCase> cases;
  if (folder.empty()) return cases;
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    TensorFile file = read_safetensors(path);
    if (file.metadata["operator"] != op) continue;
    GoldenCase golden;
    golden.inputs.name = std::filesystem::path(path).stem().string();
    golden.inputs.params = Json::parse(file.metadata["params"], path + ": params");
    constexpr std::string_view kPrefix = "expected.";
    for (const std::string& name : file.tensors.names()) {
      if (name.starts_with(kPrefix)) {
        golden.expected.add_copy(name.substr(kPrefix.size()), file.tensors.find(name));
      } else {
        golden.inputs.inputs.add_copy(name, file.tensors.find(name));
      }
    }
    cases.push_back(std::move(golden));
  }
  return cases;
}

// Runs one check and turns an exception of the operator into a mismatch; only an implementation
// that does not support the problem, which the reference does, may refuse it.
template <class Check>
void guarded(const std::string& label, Row* row, Check check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported && row->target.implementation != "ref") {
      ++row->refused;
    } else {
      row->mismatches.push_back(label + ": " + error.what());
    }
  }
}

Row verify_target(const VerifyOperator& op, const Target& target,
                  const std::vector<VerifyCase>& cases, const std::vector<TensorMap>& references,
                  std::vector<GoldenCase>& golden) {
  Row row{op.op, target, 0, 0, 0, 0, {}};
  if (!target.unavailable.empty()) return row;
  limit_cpu_isa(target.isa);
  for (size_t i = 0; i < cases.size(); ++i) {
    guarded(cases[i].name, &row, [&] {
      const TensorMap outputs = run_case(op, cases[i], target.implementation, target.device);
      compare_outputs(op, cases[i].name, outputs, references[i], &row);
      compare_repeated(op, cases[i], outputs, &row);
    });
    ++row.generated;
  }
  for (GoldenCase& entry : golden) {
    guarded(entry.inputs.name, &row, [&] {
      const TensorMap outputs = run_case(op, entry.inputs, target.implementation, target.device);
      if (op.normalise != nullptr) {
        op.normalise(entry.inputs.inputs, entry.inputs.params, entry.expected);
      }
      compare_outputs(op, entry.inputs.name, outputs, entry.expected, &row);
    });
    ++row.golden;
  }
  if (row.refused == row.generated + row.golden) {
    row.mismatches.push_back("refused every problem: nothing was compared");
  }
  return row;
}

std::vector<Row> verify_operator(const VerifyOperator& op, const VerifyOptions& options,
                                 const Scope& scope, const std::string& golden_folder,
                                 CpuIsa best) {
  const std::vector<VerifyCase> cases = op.make_cases(static_cast<uint64_t>(options.seed));
  std::vector<TensorMap> references;
  references.reserve(cases.size());
  for (const VerifyCase& verify_case : cases) {
    references.push_back(op.reference != nullptr
                             ? op.reference(verify_case)
                             : run_case(op, verify_case, "ref", Device::cpu(1)));
  }
  std::vector<GoldenCase> golden = read_golden(golden_folder, op.op);
  std::vector<Row> rows;
  if (op.reference != nullptr && scope.cpu) {
    rows.push_back(verify_target(op, {kHostFunction, best, ""}, cases, references, golden));
  }
  for (const OperatorInfo& info : operators()) {
    if (info.name != op.op) continue;
    for (const Target& target : targets_of(info, best, scope)) {
      rows.push_back(verify_target(op, target, cases, references, golden));
    }
  }
  limit_cpu_isa(best);
  return rows;
}

void print_json(const std::vector<Row>& rows, bool ok) {
  Json list = Json::array();
  for (const Row& row : rows) {
    Json mismatches = Json::array();
    for (const std::string& text : row.mismatches) mismatches.push(text);
    Json item = Json::object({{"operator", row.op},
                              {"implementation", row.target.implementation},
                              {"device", device_name(row.target)},
                              {"instruction_set", isa_name(row.target)},
                              {"available", row.target.unavailable.empty()},
                              {"generated", row.generated},
                              {"golden", row.golden},
                              {"refused", row.refused},
                              {"worst_rms", row.worst_rms},
                              {"mismatches", std::move(mismatches)}});
    if (!row.target.unavailable.empty()) item.set("reason", row.target.unavailable);
    list.push(std::move(item));
  }
  fmt::print("{}\n", Json::object({{"ok", ok}, {"results", std::move(list)}}).dump(2));
}

void print_table(const std::vector<Row>& rows) {
  fmt::print("{:<18} {:<15} {:<7} {:<16} {:>9} {:>7} {:>8} {:>10}  result\n", "operator",
             "implementation", "device", "instruction set", "generated", "golden", "refused",
             "worst rms");
  for (const Row& row : rows) {
    if (!row.target.unavailable.empty()) {
      fmt::print("{:<18} {:<15} {:<7} skipped: {}\n", row.op, row.target.implementation,
                 device_name(row.target), row.target.unavailable);
      continue;
    }
    fmt::print("{:<18} {:<15} {:<7} {:<16} {:>9} {:>7} {:>8} {:>10.2g}  {}\n", row.op,
               row.target.implementation, device_name(row.target), isa_name(row.target),
               row.generated, row.golden, row.refused, row.worst_rms,
               row.mismatches.empty() ? "ok" : "MISMATCH");
    for (const std::string& text : row.mismatches) fmt::print("    {}\n", text);
  }
}

}  // namespace

std::string installed_golden_folder() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path folder =
      program.parent_path().parent_path() / "share" / "fovea" / "golden";
  return !error && std::filesystem::is_directory(folder, error) ? folder.string() : "";
}

int verify(const VerifyOptions& options) {
  if (!options.op.empty()) check_operator(options.op);
  const Scope scope = scope_of(options.device);
  const std::string golden_folder =
      options.golden.empty() ? installed_golden_folder() : options.golden;
  if (golden_folder.empty()) fmt::print(stderr, "fovea: no golden files are installed\n");
  const CpuIsa best = current_cpu_isa();
  std::vector<Row> rows;
  for (const VerifyOperator& op : verify_operators()) {
    if (!options.op.empty() && op.op != options.op) continue;
    for (Row& row : verify_operator(op, options, scope, golden_folder, best)) {
      rows.push_back(std::move(row));
    }
  }
  const bool ok =
      std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.mismatches.empty(); });
  if (options.json) {
    print_json(rows, ok);
  } else {
    print_table(rows);
  }
  return ok ? kExitOk : kExitMismatch;
}

}  // namespace fovea::cli
