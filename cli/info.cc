// fovea info: what this build and machine have.

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/verbs.h"
#include "fovea/implementation.h"
#include "fovea/json.h"
#include "fovea/version.h"

namespace fovea::cli {
namespace {

constexpr CpuIsa kIsas[] = {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3, CpuIsa::kAvx512Bf16};

Json to_json(const OperatorInfo& op) {
  Json list = Json::array();
  for (const ImplementationInfo& entry : op.implementations) {
    Json item = Json::object({{"name", entry.name},
                              {"device", entry.device == DeviceKind::kCpu ? "cpu" : "cuda"},
                              {"available", entry.available}});
    if (!entry.available) item.set("reason", entry.reason);
    list.push(std::move(item));
  }
  return Json::object({{"name", op.name}, {"room", op.room}, {"implementations", std::move(list)}});
}

void print_json() {
  Json isas = Json::array();
  for (const CpuIsa isa : kIsas) {
    if (isa <= best_cpu_isa()) isas.push(to_string(isa));
  }
  Json ops = Json::array();
  for (const OperatorInfo& op : operators()) ops.push(to_json(op));
  const Device cpu = Device::cpu();
  const Json result = Json::object(
      {{"version", version()},
       {"devices", Json::array({Json::object({{"name", to_string(cpu)},
                                              {"threads", cpu.num_threads},
                                              {"instruction_sets", std::move(isas)},
                                              {"in_use", to_string(current_cpu_isa())}})})},
       {"operators", std::move(ops)}});
  fmt::print("{}\n", result.dump(2));
}

void print_text() {
  const Device cpu = Device::cpu();
  std::string isas;
  for (const CpuIsa isa : kIsas) {
    if (isa <= best_cpu_isa())
      isas += fmt::format("{}{}", isas.empty() ? "" : ", ", to_string(isa));
  }
  fmt::print("fovea {}\n\ndevice {}: {} threads; instruction sets {}; in use {}\n\n", version(),
             to_string(cpu), cpu.num_threads, isas, to_string(current_cpu_isa()));
  fmt::print("{:<8} {:<18} implementations, best first\n", "room", "operator");
  for (const OperatorInfo& op : operators()) {
    std::string names;
    for (const ImplementationInfo& entry : op.implementations) {
      names += fmt::format("{}{}{}", names.empty() ? "" : ", ", entry.name,
                           entry.available ? "" : " (unavailable: " + entry.reason + ")");
    }
    fmt::print("{:<8} {:<18} {}\n", op.room, op.name, names);
  }
}

/// The support matrix: what the build has, whatever the machine.
void print_markdown() {
  std::vector<std::string> columns;
  for (const OperatorInfo& op : operators()) {
    for (const ImplementationInfo& entry : op.implementations) {
      if (std::find(columns.begin(), columns.end(), entry.name) == columns.end()) {
        columns.push_back(entry.name);
      }
    }
  }
  std::sort(columns.begin(), columns.end());
  std::string head = "| operator | room |", rule = "|---|---|";
  for (const std::string& column : columns) {
    head += fmt::format(" `{}` |", column);
    rule += ":-:|";
  }
  fmt::print("{}\n{}\n", head, rule);
  for (const OperatorInfo& op : operators()) {
    fmt::print("| `{}` | {} |", op.name, op.room);
    for (const std::string& column : columns) {
      const bool has = std::any_of(op.implementations.begin(), op.implementations.end(),
                                   [&](const auto& entry) { return entry.name == column; });
      fmt::print(" {} |", has ? "✓" : "–");
    }
    fmt::print("\n");
  }
}

}  // namespace

int info(const InfoOptions& options) {
  if (options.markdown) {
    print_markdown();
  } else if (options.json) {
    print_json();
  } else {
    print_text();
  }
  return kExitOk;
}

}  // namespace fovea::cli
