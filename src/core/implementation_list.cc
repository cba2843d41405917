#include "src/core/implementation_list.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "src/core/check.h"
#include "src/core/cuda_runtime.h"
#include "src/core/log.h"

namespace fovea {
namespace {

struct RegisteredOperator {
  const char* room;
  const char* name;
  std::vector<ImplementationInfo> (*list)();
};

struct Registry {
  std::mutex mutex;
  std::vector<RegisteredOperator> operators;
  std::optional<std::map<std::string, std::string>>
      forced;  // operator -> name; unset: read the environment first
};

Registry& registry() {
  static Registry* const instance =
      new Registry;  // never destroyed: plans may outlive other statics
  return *instance;
}

std::string list_everything(const std::vector<OperatorInfo>& infos) {
  std::string text;
  for (const OperatorInfo& info : infos) {
    text += text.empty() ? "" : "; ";
    text += info.name + ":";
    for (const ImplementationInfo& entry : info.implementations) text += " " + entry.name;
  }
  return text;
}

bool has_name(const OperatorInfo& info, std::string_view name) {
  return std::any_of(info.implementations.begin(), info.implementations.end(),
                     [&](const ImplementationInfo& entry) { return entry.name == name; });
}

std::map<std::string, std::string> parse_forced(std::string_view text) {
  const std::vector<OperatorInfo> infos = operators();
  std::map<std::string, std::string> forced;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string item(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
    const size_t equals = item.find('=');
    const std::string op = equals == std::string::npos ? "" : item.substr(0, equals);
    const std::string name = equals == std::string::npos ? item : item.substr(equals + 1);
    bool found = false;
    for (const OperatorInfo& info : infos) {
      if ((op.empty() || info.name == op) && has_name(info, name)) {
        found = true;
        // "op=name" wins over a bare name, whatever their order.
        if (!op.empty())
          forced[info.name] = name;
        else
          forced.emplace(info.name, name);
      }
    }
    if (!found) {
      internal::invalid("force_implementations",
                        "'" + item + "' names nothing; this build has " + list_everything(infos));
    }
  }
  return forced;
}

std::string forced_name(const char* op) {
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().forced) {
      const auto found = registry().forced->find(op);
      return found == registry().forced->end() ? std::string() : found->second;
    }
  }
  const char* text = std::getenv("FOVEA_FORCE_IMPL");
  force_implementations(text != nullptr ? text : "");
  return forced_name(op);
}

}  // namespace

std::vector<OperatorInfo> operators() {
  std::vector<RegisteredOperator> entries;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    entries = registry().operators;
  }
  std::vector<OperatorInfo> infos;
  infos.reserve(entries.size());
  for (const RegisteredOperator& entry : entries)
    infos.push_back({entry.name, entry.room, entry.list()});
  std::sort(infos.begin(), infos.end(), [](const OperatorInfo& a, const OperatorInfo& b) {
    return std::tie(a.room, a.name) < std::tie(b.room, b.name);
  });
  return infos;
}

void force_implementations(std::string_view text) {
  std::map<std::string, std::string> forced = parse_forced(text);
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().forced = std::move(forced);
}

namespace internal {

Refusal cuda_available() { return cuda::unavailable_reason(); }

Refusal cuda_sm90_available() {
  Refusal reason = cuda::unavailable_reason();
  for (int i = 0; reason.empty() && i < cuda::device_count(); ++i) {
    const cuda::DeviceFacts& facts = cuda::device_facts(i);
    if (facts.compute_major == 9 && facts.compute_minor == 0) continue;
    reason = "needs GPUs of compute capability 9.0; cuda:" + std::to_string(i) + " (" + facts.name +
             ") has " + std::to_string(facts.compute_major) + "." +
             std::to_string(facts.compute_minor);
  }
  return reason;
}

OperatorRegistration::OperatorRegistration(const char* room, const char* name,
                                           std::vector<ImplementationInfo> (*list)()) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().operators.push_back({room, name, list});
}

size_t choose_candidate(const char* op, const std::vector<Candidate>& candidates,
                        const Device& device, const Options& options,
                        ImplementationChoice* choice) {
  const std::string forced =
      options.implementation.empty() ? forced_name(op) : options.implementation;
  std::string tried;
  bool exists = false;
  const auto choose = [&](size_t i) {
    choice->name = candidates[i].name;
    log_once(LogLevel::kDispatch, std::string(op) + ": runs " + candidates[i].name);
    return i;
  };
  std::optional<size_t> second_best;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    Refusal refusal = candidate.refusal;
    if (candidate.device != device.kind) refusal = "does not run on " + to_string(device);
    exists = exists || candidate.name == forced;
    const bool wanted = forced.empty() || candidate.name == forced;
    if (wanted && refusal.empty()) {
      if (!forced.empty() || candidate.reluctance.empty()) return choose(i);
      if (!second_best) second_best = i;
      refusal = candidate.reluctance;
    }
    if (wanted) {
      choice->refused.emplace_back(candidate.name, refusal);
      log_once(LogLevel::kDispatch,
               std::string(op) + ": " + candidate.name + " refuses: " + refusal);
    }
    tried += std::string(tried.empty() ? "" : "; ") + candidate.name + " (" +
             (refusal.empty() ? "supports the problem" : refusal) + ")";
  }
  if (second_best) return choose(*second_best);
  if (!forced.empty() && !exists) {
    invalid(op, "implementation '" + forced + "' does not exist; there are " + tried);
  }
  unsupported(op, (forced.empty() ? std::string("no implementation supports the problem: ")
                                  : "the forced implementation '" + forced + "' refuses: ") +
                      tried);
}

}  // namespace internal
}  // namespace fovea
