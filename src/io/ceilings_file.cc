#include "fovea/ceilings_file.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include "fovea/device_info.h"
#include "fovea/error.h"
#include "fovea/json.h"
#include "fovea/version.h"
#include "src/core/log.h"

// {"format": 1, "entries": [{"cpu": ..., "isa": ..., "threads": N, "version": ...,
//   "all_threads": {...}, "one_thread": {...}}]}
// The limits carry the names of ThroughputLimits; an absent one is null.
namespace fovea {
namespace {

constexpr int64_t kFormat = 1;

/// A file that is there and is not what store_ceilings() writes.
[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorCode::kIo, "ceilings file: " + what);
}

const Json& member(const Json& object, const char* name) {
  const Json* found = object.find(name);
  if (found == nullptr) malformed(std::string("no member ") + name);
  return *found;
}

double positive(const Json& object, const char* name) {
  const double value = member(object, name).as_number();
  if (!(value > 0)) malformed(std::string(name) + " is not positive");
  return value;
}

std::optional<double> optional_positive(const Json& object, const char* name) {
  if (member(object, name).kind() == Json::Kind::kNull) return std::nullopt;
  return positive(object, name);
}

ThroughputLimits limits_from_json(const Json& json) {
  ThroughputLimits limits;
  limits.num_threads = static_cast<int>(member(json, "threads").as_integer());
  limits.fp32_fma_gflops = positive(json, "fp32_fma_gflops");
  limits.bf16_dot_gflops = optional_positive(json, "bf16_dot_gflops");
  limits.l2_read_gb_per_s = positive(json, "l2_read_gb_per_s");
  limits.l3_read_gb_per_s = optional_positive(json, "l3_read_gb_per_s");
  limits.dram_read_gb_per_s = positive(json, "dram_read_gb_per_s");
  limits.copy_gb_per_s = positive(json, "copy_gb_per_s");
  limits.gather_1152_gb_per_s = positive(json, "gather_1152_gb_per_s");
  limits.gather_656_gb_per_s = positive(json, "gather_656_gb_per_s");
  return limits;
}

bool has_key(const Json& entry, const std::string& cpu, CpuIsa isa, int num_threads,
             const std::string& version) {
  return member(entry, "cpu").as_string() == cpu &&
         member(entry, "isa").as_string() == to_string(isa) &&
         member(entry, "threads").as_integer() == num_threads &&
         member(entry, "version").as_string() == version;
}

void warn(const std::string& path, const std::exception& error) {
  internal::log_once(LogLevel::kWarning, "ceilings: " + path + " is ignored: " + error.what());
}

// The entries of the file; none, with a log line, for a file that is there and wrong.
Json::Array read_entries(const std::string& path) {
  std::ifstream file(path);
  if (!file) return {};
  std::stringstream text;
  text << file.rdbuf();
  try {
    const Json root = Json::parse(text.str(), path);
    if (member(root, "format").as_integer() != kFormat) malformed("unknown format");
    return member(root, "entries").items();
  } catch (const Error& error) {
    warn(path, error);
    return {};
  }
}

}  // namespace

Json to_json(const ThroughputLimits& limits) {
  const auto optional = [](const std::optional<double>& value) {
    return value ? Json(*value) : Json();
  };
  return Json::object({{"threads", limits.num_threads},
                       {"fp32_fma_gflops", limits.fp32_fma_gflops},
                       {"bf16_dot_gflops", optional(limits.bf16_dot_gflops)},
                       {"l2_read_gb_per_s", limits.l2_read_gb_per_s},
                       {"l3_read_gb_per_s", optional(limits.l3_read_gb_per_s)},
                       {"dram_read_gb_per_s", limits.dram_read_gb_per_s},
                       {"copy_gb_per_s", limits.copy_gb_per_s},
                       {"gather_1152_gb_per_s", limits.gather_1152_gb_per_s},
                       {"gather_656_gb_per_s", limits.gather_656_gb_per_s}});
}

Json to_json(const MachineCeilings& ceilings) {
  return Json::object({{"cpu", ceilings.cpu},
                       {"isa", to_string(ceilings.isa)},
                       {"threads", ceilings.all_threads.num_threads},
                       {"version", ceilings.version},
                       {"all_threads", to_json(ceilings.all_threads)},
                       {"one_thread", to_json(ceilings.one_thread)}});
}

std::string ceilings_path() {
  for (const auto& [variable, folder] : {std::pair{"XDG_CACHE_HOME", "/fovea/ceilings.json"},
                                         std::pair{"HOME", "/.cache/fovea/ceilings.json"}}) {
    const char* base = std::getenv(variable);
    if (base != nullptr && *base != '\0') return std::string(base) + folder;
  }
  return {};
}

std::optional<MachineCeilings> load_ceilings(const Device& device) {
  const std::string path = ceilings_path();
  if (path.empty()) return std::nullopt;
  const bool on_gpu = device.kind == DeviceKind::kCuda;
  const std::string name = on_gpu ? gpu_info(device).name : cpu_facts().model;
  const CpuIsa isa = on_gpu ? CpuIsa::kBaseline : current_cpu_isa();
  const std::string library(version());
  try {
    for (const Json& entry : read_entries(path)) {
      if (!has_key(entry, name, isa, device.num_threads, library)) continue;
      return MachineCeilings{name, isa, library, limits_from_json(member(entry, "all_threads")),
                             limits_from_json(member(entry, "one_thread"))};
    }
  } catch (const Error& error) {
    warn(path, error);
  }
  return std::nullopt;
}

void store_ceilings(const MachineCeilings& ceilings) {
  const std::string path = ceilings_path();
  if (path.empty())
    throw Error(ErrorCode::kIo, "store_ceilings: neither XDG_CACHE_HOME nor HOME is set");
  Json entries = Json::array();
  for (const Json& entry : read_entries(path)) {
    try {
      if (has_key(entry, ceilings.cpu, ceilings.isa, ceilings.all_threads.num_threads,
                  ceilings.version))
        continue;
      entries.push(entry);
    } catch (const Error&) {
      continue;  // an entry without its key can never be found: drop it
    }
  }
  entries.push(to_json(ceilings));
  // Written beside and renamed, so that a reader never sees half a file.
  std::error_code failure;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), failure);
  const std::string partial = path + ".partial";
  {
    std::ofstream file(partial);
    file << Json::object({{"format", kFormat}, {"entries", entries}}).dump(2) << "\n";
    file.flush();
    if (!file) throw Error(ErrorCode::kIo, "store_ceilings: cannot write " + partial);
  }
  std::filesystem::rename(partial, path, failure);
  if (failure)
    throw Error(ErrorCode::kIo, "store_ceilings: cannot write " + path + ": " + failure.message());
}

}  // namespace fovea
