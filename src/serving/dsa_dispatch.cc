#include "src/serving/dsa_dispatch.h"

#include <algorithm>
#include <cmath>

#include "src/batch/forward_modes.h"
#include "src/core/check.h"

namespace fovea {
namespace {

constexpr char kOp[] = "dsa_dispatch";

constexpr auto kDirect = DsaKernel::kCacheDirect;
constexpr auto kContiguous = DsaKernel::kContiguousBf16;
using Reads = std::optional<DsaKernel>;
constexpr Reads kRefused = std::nullopt;

// Formats in one order: bf16, v32, f576; of each, prefill and decode.
constexpr std::array<DsaFormatSupport, 3> formats(Reads bf16_prefill, Reads bf16_decode,
                                                  Reads v32_prefill, Reads v32_decode,
                                                  Reads f576_prefill, Reads f576_decode) {
  return {{{RowFormat::kBf16, bf16_prefill, bf16_decode},
           {RowFormat::kV32, v32_prefill, v32_decode},
           {RowFormat::kF576, f576_prefill, f576_decode}}};
}

constexpr auto kEveryFormat = formats(kDirect, kDirect, kDirect, kDirect, kDirect, kDirect);
constexpr auto kBf16Only = formats(kDirect, kDirect, kRefused, kRefused, kRefused, kRefused);

constexpr DsaImplementationInfo kImplementations[] = {
    {.name = "auto",
     .native = true,
     .formats = kEveryFormat,
     .chooses_by_ratio = true,
     .restriction = "In prefill, contiguous_kv_ratio > 0 needs a batch with host lengths."},
    {.name = "cache_direct",
     .native = true,
     .formats = kEveryFormat,
     .restriction = "None: every mode, every format, with and without host lengths."},
    {.name = "contiguous_bf16",
     .native = true,
     .formats = formats(kDirect, kRefused, kContiguous, kRefused, kRefused, kRefused),
     .restriction = "Prefill only, not with deterministic over v32; batches without host lengths "
                    "or beyond mha_chunk_capacity read the cache directly."},
    // Its kernel takes bf16 rows: a v32 cache has to be unpacked, which decode modes never do.
    {.name = "flashmla_sparse",
     .formats = formats(kDirect, kDirect, kContiguous, kRefused, kRefused, kRefused),
     .restriction = "Reads bf16 rows: over v32 as contiguous_bf16."},
    {.name = "flashmla_kv",
     .formats = formats(kRefused, kRefused, kDirect, kDirect, kRefused, kRefused),
     .restriction = "Reads v32 rows; a bf16 cache is refused, not quantised per call."},
    {.name = "flashmla_auto",
     .formats = kEveryFormat,
     .chooses_by_ratio = true,
     .restriction = "As auto."},
    {.name = "fa3", .formats = kBf16Only, .restriction = "Reads bf16 rows."},
    {.name = "tilelang", .formats = kBf16Only, .restriction = "Reads bf16 rows."},
    {.name = "trtllm",
     .formats = formats(kDirect, kDirect, kRefused, kRefused, kDirect, kDirect),
     .long_one_shot = true,
     .restriction = "Reads bf16 rows or rows with one scale per cache; one-shot takes requests up "
                    "to mha_chunk_capacity."},
    {.name = "aiter", .formats = kBf16Only, .restriction = "Reads bf16 rows."},
};

constexpr DsaKernelInfo kKernels[] = {
    {.kernel = DsaKernel::kCacheDirect,
     .op = "sparse_mla",
     .transform = IndexTransform::kPaged,
     .prefill = true,
     .decode = true,
     .deterministic = true,
     .logit_cap = true},
    {.kernel = DsaKernel::kContiguousBf16,
     .op = "sparse_mla",
     .transform = IndexTransform::kRagged,
     .prefill = true,
     .logit_cap = true},
    {.kernel = DsaKernel::kOneShotMha,
     .op = "mha_varlen",
     .transform = IndexTransform::kPaged,
     .prefill = true},
};

using internal::is_extend;

void check_facts(const DsaBatchFacts& facts) {
  if (!internal::is_known(facts.mode)) {
    internal::unsupported(kOp, "mode = " + std::to_string(static_cast<int>(facts.mode)) +
                                   ", expected extend, mixed, decode, idle, target_verify, "
                                   "draft_extend or draft_extend_v2");
  }
  if (facts.context_parallel && !is_extend(facts.mode)) {
    internal::unsupported(kOp, "mode = " + std::string(to_string(facts.mode)) +
                                   " with a context split, expected extend or mixed");
  }
}

const DsaImplementationInfo* find(std::string_view name) {
  for (const DsaImplementationInfo& info : kImplementations) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

// Of a format that some implementation reads.
Reads kernel_of(const DsaImplementationInfo& info, RowFormat format, bool prefill) {
  const DsaFormatSupport& support = *info.support(format);
  return prefill ? support.prefill : support.decode;
}

// One conjunction: each condition that fails leaves its sentence.
class Conjunction {
 public:
  explicit Conjunction(DispatchReasons* reasons) : reasons_(reasons) {}
  void need(bool holds, std::string_view otherwise) {
    if (!holds) reasons_->add(otherwise);
    all_ = all_ && holds;
  }
  bool all() const { return all_; }

 private:
  DispatchReasons* reasons_;
  bool all_ = true;
};

bool one_shot_is_legal(const DsaConfig& config, const Device& device, const DsaBatchFacts& facts,
                       const DsaImplementationInfo& prefill, DispatchReasons* reasons) {
  Conjunction legal(reasons);
  legal.need(device.kind == DeviceKind::kCpu || device.kind == DeviceKind::kCuda,
             "one-shot is off: the device has no dense kernel");
  legal.need(facts.mha_inputs, "one-shot is off: the caller has no expanded keys and values");
  legal.need(!config.deterministic, "one-shot is off: deterministic is on");
  legal.need(!config.force_absorbed, "one-shot is off: force_absorbed is on");
  legal.need(!config.context_parallel && !facts.context_parallel,
             "one-shot is off: context parallelism is on");
  legal.need(facts.has_host_lengths, "one-shot is off: there are no host lengths");
  if (!facts.has_host_lengths) return false;
  if (!prefill.long_one_shot) {
    legal.need(facts.max_kv_len <= config.topk, "one-shot is off: a request is longer than topk");
  }
  // The bound of a request of long_one_shot follows from it.
  legal.need(facts.sum_kv_len <= config.mha_chunk_capacity,
             "one-shot is off: the batch is longer than mha_chunk_capacity");
  return legal.all();
}

// Both ways to the contiguous kernel: a batch whose size the host knows, within the buffers.
void need_bounded_batch(const DsaConfig& config, const DsaBatchFacts& facts, Conjunction* chosen) {
  chosen->need(facts.has_host_lengths,
               "cache-direct: without host lengths the batch has no known bound");
  chosen->need(!facts.has_host_lengths || facts.sum_kv_len <= config.mha_chunk_capacity,
               "cache-direct: the batch is longer than mha_chunk_capacity");
}

bool ratio_is_met(const DsaConfig& config, const DsaBatchFacts& facts, DispatchReasons* reasons) {
  if (config.row_format != RowFormat::kV32) {
    reasons->add("cache-direct: only a v32 cache is worth unpacking");
    return false;
  }
  if (config.contiguous_kv_ratio == 0) {
    reasons->add("cache-direct: the preferred prefill kernel of this device");
    return false;
  }
  Conjunction chosen(reasons);
  chosen.need(facts.mode == ForwardMode::kExtend,
              "cache-direct: contiguous_kv_ratio is for batches without decode rows");
  need_bounded_batch(config, facts, &chosen);
  chosen.need(!facts.has_host_lengths ||
                  static_cast<double>(facts.sum_kv_len) <
                      config.contiguous_kv_ratio * static_cast<double>(facts.num_rows),
              "cache-direct: the keys outnumber the rows by contiguous_kv_ratio or more");
  if (chosen.all()) {
    reasons->add("contiguous bf16: the keys are few for the rows, by contiguous_kv_ratio");
  }
  return chosen.all();
}

bool contiguous_is_chosen(const DsaConfig& config, const DsaBatchFacts& facts,
                          const DsaImplementationInfo& prefill, DispatchReasons* reasons) {
  if (prefill.chooses_by_ratio) return ratio_is_met(config, facts, reasons);
  if (kernel_of(prefill, config.row_format, true) != kContiguous) {
    reasons->add("cache-direct: the prefill implementation reads this cache in its pages");
    return false;
  }
  Conjunction chosen(reasons);
  need_bounded_batch(config, facts, &chosen);
  if (chosen.all()) {
    reasons->add("contiguous bf16: preferred by the configuration, and the batch fits");
  }
  return chosen.all();
}

bool fresh_is_chosen(const DsaConfig& config, const DsaBatchFacts& facts,
                     DispatchReasons* reasons) {
  if (config.extend_kv_source != ExtendKvSource::kFresh) return false;
  if (facts.has_prefix) {
    reasons->add("keys come from the cache: a request has a prefix");
    return false;
  }
  reasons->add("keys are this call's fresh rows: no request has a prefix");
  return true;
}

std::string_view reason_of_decode(ForwardMode mode) {
  if (internal::is_decode(mode)) {
    return "cache-direct: one row per request is scored and read in its pages";
  }
  return "cache-direct: the rows of a draft are scored and read in the pages of their request";
}

// "auto, cache_direct or flashmla_kv": the names that could stand in the field.
std::string names_that_read(const DsaConfig& config, bool prefill) {
  std::vector<std::string_view> names;
  for (const DsaImplementationInfo& info : kImplementations) {
    const Reads kernel = kernel_of(info, config.row_format, prefill);
    if (!kernel.has_value() || (config.deterministic && *kernel == kContiguous)) continue;
    names.push_back(info.name);
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

void check_name(const char* op, const DsaConfig& config, const char* field, const std::string& name,
                bool prefill) {
  const DsaImplementationInfo* const info = find(name);
  if (info == nullptr) {
    internal::invalid(
        op, std::string(field) + " = '" + name + "', expected " + names_that_read(config, prefill));
  }
  const Reads kernel = kernel_of(*info, config.row_format, prefill);
  if (!kernel.has_value()) {
    internal::unsupported(op, std::string(field) + " = " + name + " with row_format = " +
                                  std::string(to_string(config.row_format)) +
                                  ", which it does not read" + (prefill ? "" : " in decode modes") +
                                  "; expected " + names_that_read(config, prefill));
  }
  if (config.deterministic && *kernel == kContiguous) {
    internal::unsupported(
        op, std::string(field) + " = " + name +
                " with deterministic: whether the cache is unpacked depends on the size of the "
                "batch; expected " +
                names_that_read(config, prefill) + ", or deterministic = false");
  }
}

}  // namespace

std::string_view to_string(DsaKernel kernel) noexcept {
  switch (kernel) {
    case DsaKernel::kCacheDirect:
      return "cache_direct";
    case DsaKernel::kContiguousBf16:
      return "contiguous_bf16";
    case DsaKernel::kOneShotMha:
      return "one_shot_mha";
  }
  return "";
}

std::span<const DsaImplementationInfo> dsa_implementations() noexcept { return kImplementations; }

std::span<const DsaKernelInfo> dsa_kernels() noexcept { return kKernels; }

DsaDispatch dsa_dispatch(const DsaConfig& config, const Device& device,
                         const DsaBatchFacts& facts) {
  check_facts(facts);
  internal::check_dsa_implementations(kOp, config);
  DsaDispatch dispatch;
  if (!is_extend(facts.mode)) {
    dispatch.reasons.add(reason_of_decode(facts.mode));
    return dispatch;
  }
  const DsaImplementationInfo& prefill = *find(config.prefill_implementation);
  dispatch.skip_selection =
      facts.has_host_lengths && !facts.context_parallel && facts.max_kv_len <= config.topk;
  dispatch.one_shot = one_shot_is_legal(config, device, facts, prefill, &dispatch.reasons);
  if (dispatch.one_shot) {
    dispatch.kernel = DsaKernel::kOneShotMha;
    dispatch.reasons.add(
        facts.max_kv_len <= config.topk
            ? "one-shot: every key would be selected, so dense attention is equal"
            : "one-shot: dense attention over every key, up to mha_chunk_capacity by this name");
    return dispatch;
  }
  if (dispatch.skip_selection) {
    dispatch.reasons.add("selection is skipped: every length fits topk");
  }
  if (contiguous_is_chosen(config, facts, prefill, &dispatch.reasons)) {
    dispatch.kernel = DsaKernel::kContiguousBf16;
    dispatch.transform = IndexTransform::kRagged;
    dispatch.fresh_kv = fresh_is_chosen(config, facts, &dispatch.reasons);
  }
  return dispatch;
}

namespace internal {

void check_dsa_implementations(const char* op, const DsaConfig& config) {
  if (find("auto")->support(config.row_format) == nullptr) {
    invalid(op, "row_format = " + std::string(to_string(config.row_format)) +
                    ", expected bf16, v32 or f576");
  }
  check_name(op, config, "prefill_implementation", config.prefill_implementation, true);
  check_name(op, config, "decode_implementation", config.decode_implementation, false);
  if (!std::isfinite(config.contiguous_kv_ratio) || config.contiguous_kv_ratio < 0) {
    invalid(op, "contiguous_kv_ratio = " + std::to_string(config.contiguous_kv_ratio) +
                    ", expected a finite number >= 0");
  }
  if (config.deterministic && config.contiguous_kv_ratio > 0) {
    unsupported(op, "contiguous_kv_ratio = " + std::to_string(config.contiguous_kv_ratio) +
                        " with deterministic: the choice depends on the size of the batch; "
                        "expected 0, or deterministic = false");
  }
}

bool may_run_contiguous(const DsaConfig& config) {
  const DsaImplementationInfo& prefill = *find(config.prefill_implementation);
  if (config.row_format != RowFormat::kV32 || config.deterministic) return false;
  if (prefill.chooses_by_ratio) return config.contiguous_kv_ratio > 0;
  return kernel_of(prefill, config.row_format, true) == kContiguous;
}

bool may_run_fresh(const DsaConfig& config) {
  return may_run_contiguous(config) && config.extend_kv_source == ExtendKvSource::kFresh;
}

bool may_run_one_shot(const DsaConfig& config) {
  return !config.deterministic && !config.force_absorbed && !config.context_parallel;
}

}  // namespace internal
}  // namespace fovea
