#include "fovea/dsa_backend.h"
#include "src/batch/forward_modes.h"
#include "src/core/check.h"

namespace fovea {
namespace {

constexpr char kOp[] = "dsa_dispatch";

using internal::is_extend;

void check_mode(ForwardMode mode) {
  if (internal::is_known(mode)) return;
  internal::unsupported(kOp, "mode = " + std::to_string(static_cast<int>(mode)) +
                                 ", expected one of the seven forward modes");
}

// One conjunction: each condition that fails leaves its sentence.
bool one_shot_is_legal(const DsaConfig& config, const Device& device, const DsaBatchFacts& facts,
                       DispatchReasons* reasons) {
  bool legal = true;
  const auto need = [&](bool holds, std::string_view otherwise) {
    if (!holds) reasons->add(otherwise);
    legal = legal && holds;
  };
  need(device.kind == DeviceKind::kCpu, "one-shot is off: the device has no dense kernel");
  need(facts.mha_inputs, "one-shot is off: the caller has no expanded keys and values");
  need(!config.deterministic, "one-shot is off: deterministic is on");
  need(!config.force_absorbed, "one-shot is off: force_absorbed is on");
  need(facts.has_host_lengths, "one-shot is off: there are no host lengths");
  if (facts.has_host_lengths) {
    need(facts.max_kv_len <= config.topk, "one-shot is off: a request is longer than topk");
    need(facts.sum_kv_len <= config.mha_chunk_capacity,
         "one-shot is off: the batch is longer than mha_chunk_capacity");
  }
  return legal;
}

bool contiguous_is_chosen(const DsaConfig& config, const DsaBatchFacts& facts,
                          DispatchReasons* reasons) {
  if (config.prefill_implementation != "contiguous_bf16") {
    reasons->add("cache-direct: the preferred prefill kernel of this device");
    return false;
  }
  bool chosen = true;
  const auto need = [&](bool holds, std::string_view otherwise) {
    if (!holds) reasons->add(otherwise);
    chosen = chosen && holds;
  };
  need(config.row_format == RowFormat::kV32, "cache-direct: a bf16 cache needs no unpacking");
  need(!config.deterministic, "cache-direct: deterministic allows no choice by batch size");
  need(facts.has_host_lengths, "cache-direct: without host lengths the batch has no known bound");
  need(!facts.has_host_lengths || facts.sum_kv_len <= config.mha_chunk_capacity,
       "cache-direct: the batch is longer than mha_chunk_capacity");
  if (chosen) reasons->add("contiguous bf16: preferred by the configuration, and the batch fits");
  return chosen;
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

DsaDispatch dsa_dispatch(const DsaConfig& config, const Device& device,
                         const DsaBatchFacts& facts) {
  check_mode(facts.mode);
  DsaDispatch dispatch;
  if (!is_extend(facts.mode)) {
    dispatch.reasons.add("cache-direct: few rows per request are scored and read in their pages");
    return dispatch;
  }
  dispatch.skip_selection = facts.has_host_lengths && facts.max_kv_len <= config.topk;
  dispatch.one_shot = one_shot_is_legal(config, device, facts, &dispatch.reasons);
  if (dispatch.one_shot) {
    dispatch.kernel = DsaKernel::kOneShotMha;
    dispatch.reasons.add("one-shot: every key would be selected, so dense attention is equal");
    return dispatch;
  }
  if (dispatch.skip_selection) {
    dispatch.reasons.add("selection is skipped: every length fits topk");
  }
  if (contiguous_is_chosen(config, facts, &dispatch.reasons)) {
    dispatch.kernel = DsaKernel::kContiguousBf16;
    dispatch.transform = IndexTransform::kRagged;
    dispatch.fresh_kv = fresh_is_chosen(config, facts, &dispatch.reasons);
  }
  return dispatch;
}

}  // namespace fovea
