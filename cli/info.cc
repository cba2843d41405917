// fovea info: what this build and machine have.

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/verbs.h"
#include "fovea/device_info.h"
#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/implementation.h"
#include "fovea/json.h"
#include "fovea/replay.h"
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

Json gpu_json(const Device& device) {
  const GpuInfo gpu = gpu_info(device);
  const MemoryInfo memory = memory_info(device);
  return Json::object({{"name", to_string(device)},
                       {"model", gpu.name},
                       {"compute", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
                       {"multiprocessors", gpu.num_sms},
                       {"clock_mhz", gpu.clock_mhz},
                       {"driver_cuda_version", gpu.driver_version},
                       {"ptx_version", gpu.ptx_version},
                       {"binary_version", gpu.binary_version},
                       {"free_bytes", memory.free_bytes},
                       {"total_bytes", memory.total_bytes}});
}

void print_json() {
  Json isas = Json::array();
  for (const CpuIsa isa : kIsas) {
    if (isa <= best_cpu_isa()) isas.push(to_string(isa));
  }
  Json ops = Json::array();
  for (const OperatorInfo& op : operators()) ops.push(to_json(op));
  Json models = Json::array();
  for (const std::string& name : replay_models()) models.push(name);
  const Device cpu = Device::cpu();
  Json devices = Json::array({Json::object({{"name", to_string(cpu)},
                                            {"threads", cpu.num_threads},
                                            {"instruction_sets", std::move(isas)},
                                            {"in_use", to_string(current_cpu_isa())}})});
  for (int i = 0; i < cuda_device_count(); ++i) devices.push(gpu_json(Device::cuda(i)));
  const Json result = Json::object({{"version", version()},
                                    {"devices", std::move(devices)},
                                    {"replay_models", std::move(models)},
                                    {"operators", std::move(ops)}});
  fmt::print("{}\n", result.dump(2));
}

// Why there is none: what Device::cuda says.
std::string missing_gpu_reason() {
  try {
    Device::cuda(0);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// ptx 80 with machine code of a later GPU says that the driver compiled the PTX.
void print_gpu(const Device& device) {
  const GpuInfo gpu = gpu_info(device);
  const MemoryInfo memory = memory_info(device);
  fmt::print(
      "device {}: {}, compute capability {}.{}, {} multiprocessors, {} MHz, {:.1f} of {:.1f} GiB "
      "free; kernels: ptx {}, machine code {}; driver for CUDA {}.{}\n",
      to_string(device), gpu.name, gpu.compute_major, gpu.compute_minor, gpu.num_sms, gpu.clock_mhz,
      static_cast<double>(memory.free_bytes) / (1 << 30),
      static_cast<double>(memory.total_bytes) / (1 << 30), gpu.ptx_version, gpu.binary_version,
      gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
}

void print_devices() {
  const Device cpu = Device::cpu();
  std::string isas;
  for (const CpuIsa isa : kIsas) {
    if (isa <= best_cpu_isa())
      isas += fmt::format("{}{}", isas.empty() ? "" : ", ", to_string(isa));
  }
  fmt::print("device {}: {} threads; instruction sets {}; in use {}\n", to_string(cpu),
             cpu.num_threads, isas, to_string(current_cpu_isa()));
  for (int i = 0; i < cuda_device_count(); ++i) print_gpu(Device::cuda(i));
  if (cuda_device_count() == 0) fmt::print("no GPU: {}\n", missing_gpu_reason());
}

void print_text() {
  fmt::print("fovea {}\n\n", version());
  print_devices();
  fmt::print("\nreplay models: {}\n\n", fmt::join(replay_models(), " "));
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

// The word's value; main.cc lets only the listed words through.
template <class Value>
Value value_of(const std::string& word,
               std::initializer_list<std::pair<std::string_view, Value>> words) {
  for (const auto& [name, value] : words) {
    if (name == word) return value;
  }
  throw UsageError(fmt::format("'{}' names nothing", word));
}

DsaConfig explained_config(const ExplainOptions& options) {
  DsaConfig config;
  config.topk = options.topk;
  config.row_format = value_of<RowFormat>(
      options.row_format,
      {{"bf16", RowFormat::kBf16}, {"v32", RowFormat::kV32}, {"f576", RowFormat::kF576}});
  config.prefill_implementation = options.prefill_implementation;
  config.decode_implementation = options.decode_implementation;
  config.contiguous_kv_ratio = options.contiguous_kv_ratio;
  config.mha_chunk_capacity = options.mha_chunk_capacity;
  config.context_parallel = options.context_parallel;
  config.extend_kv_source = value_of<ExtendKvSource>(
      options.extend_kv_source,
      {{"cache", ExtendKvSource::kCache}, {"fresh", ExtendKvSource::kFresh}});
  config.deterministic = options.deterministic;
  config.force_absorbed = options.force_absorbed;
  return config;
}

DsaDispatch explained_dispatch(const ExplainOptions& options) {
  DsaBatchFacts facts;
  facts.mode =
      value_of<ForwardMode>(options.mode, {{"extend", ForwardMode::kExtend},
                                           {"decode", ForwardMode::kDecode},
                                           {"idle", ForwardMode::kIdle},
                                           {"target_verify", ForwardMode::kTargetVerify},
                                           {"draft_extend", ForwardMode::kDraftExtend},
                                           {"draft_extend_v2", ForwardMode::kDraftExtendV2},
                                           {"mixed", ForwardMode::kMixed}});
  facts.has_host_lengths = options.max_kv_len >= 0;
  facts.max_kv_len = std::max<int64_t>(options.max_kv_len, 0);
  facts.sum_kv_len = options.sum_kv_len >= 0 ? options.sum_kv_len : facts.max_kv_len;
  facts.num_rows = options.num_rows;
  facts.has_prefix = options.has_prefix;
  facts.context_parallel = options.context_parallel;
  facts.mha_inputs = options.mha_inputs;
  try {
    return dsa_dispatch(explained_config(options), Device::cpu(), facts);
  } catch (const Error& error) {
    throw UsageError(error.what());  // names and facts that do not go together
  }
}

Json kernel_or_null(const std::optional<DsaKernel>& kernel) {
  return kernel.has_value() ? Json(to_string(*kernel)) : Json();
}

// Every name that the configuration accepts, with the kernel of each row format.
Json implementations_json() {
  Json list = Json::array();
  for (const DsaImplementationInfo& info : dsa_implementations()) {
    Json prefill = Json::object({}), decode = Json::object({});
    for (const DsaFormatSupport& format : info.formats) {
      prefill.set(std::string(to_string(format.row_format)), kernel_or_null(format.prefill));
      decode.set(std::string(to_string(format.row_format)), kernel_or_null(format.decode));
    }
    list.push(Json::object({{"name", info.name},
                            {"native", info.native},
                            {"prefill", std::move(prefill)},
                            {"decode", std::move(decode)},
                            {"restriction", info.restriction}}));
  }
  return list;
}

// The name that decides for the mode, and its restriction.
const DsaImplementationInfo& implementation_of(const ExplainOptions& options) {
  const bool prefill = options.mode == "extend" || options.mode == "mixed";
  const std::string& name =
      prefill ? options.prefill_implementation : options.decode_implementation;
  const auto all = dsa_implementations();
  return *std::find_if(all.begin(), all.end(), [&](const auto& info) { return info.name == name; });
}

void explain(const ExplainOptions& options, bool json) {
  const DsaDispatch dispatch = explained_dispatch(options);
  Json reasons = Json::array();
  for (const std::string_view reason : dispatch.reasons) reasons.push(reason);
  if (json) {
    fmt::print("{}\n", Json::object({{"kernel", to_string(dispatch.kernel)},
                                     {"transform", to_string(dispatch.transform)},
                                     {"one_shot", dispatch.one_shot},
                                     {"skip_selection", dispatch.skip_selection},
                                     {"fresh_kv", dispatch.fresh_kv},
                                     {"reasons", std::move(reasons)},
                                     {"implementations", implementations_json()}})
                           .dump(2));
    return;
  }
  fmt::print("{} over a {} cache, topk {}:\n", options.mode, options.row_format, options.topk);
  const DsaImplementationInfo& implementation = implementation_of(options);
  fmt::print("  asked for  {}: {}\n", implementation.name, implementation.restriction);
  fmt::print("  kernel     {}\n  transform  {}\n  selection  {}\n  new keys   {}\nbecause:\n",
             to_string(dispatch.kernel),
             dispatch.one_shot ? "none, no indices are used" : to_string(dispatch.transform),
             dispatch.skip_selection ? "every key, logits are not computed" : "the topk best",
             dispatch.fresh_kv ? "this call's rows" : "read back from the cache");
  for (const std::string_view reason : dispatch.reasons) fmt::print("  {}\n", reason);
}

}  // namespace

int info(const InfoOptions& options) {
  if (options.explain) {
    explain(options.facts, options.json);
  } else if (options.markdown) {
    print_markdown();
  } else if (options.devices && !options.json) {
    print_devices();
  } else if (options.json) {
    print_json();
  } else {
    print_text();
  }
  return kExitOk;
}

}  // namespace fovea::cli
