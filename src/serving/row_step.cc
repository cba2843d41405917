#include "src/serving/row_step.h"

#include <algorithm>
#include <array>
#include <string>

#include "src/core/check.h"
#include "src/core/parallel.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/dsa_plans.h"
#include "src/serving/selection_map.h"

namespace fovea::internal {
namespace {

constexpr std::array kModes = {ForwardMode::kExtend,      ForwardMode::kDecode,
                               ForwardMode::kIdle,        ForwardMode::kTargetVerify,
                               ForwardMode::kDraftExtend, ForwardMode::kDraftExtendV2,
                               ForwardMode::kMixed};

// The checks of lengths and rows are those of every backend; the message names the one that asks.
void in_the_name_of(const char* op, FunctionRef<void()> check) {
  try {
    check();
  } catch (const Error& error) {
    std::string text = error.what();
    const std::string other = kDsaOp;
    const size_t at = text.find(other);
    if (at != std::string::npos) text.replace(at, other.size(), op);
    throw Error(error.code(), text);
  }
}

StepShape shape_of(const ForwardBatch& batch) {
  StepShape shape;
  shape.num_requests = batch.seq_len.shape[0];
  shape.num_rows = shape.num_tokens = batch.num_rows;
  shape.padded_rows = shape.padded_tokens = std::max(batch.num_rows, batch.padded_rows);
  return shape;
}

}  // namespace

DsaConfig metadata_config(const RowBounds& bounds) {
  DsaConfig config;
  config.num_heads = 1;
  config.topk = 1;
  config.page_size = bounds.page_size;
  config.row_format = RowFormat::kBf16;
  config.max_requests = bounds.max_requests;
  config.max_rows = std::max(bounds.max_rows, bounds.max_requests * bounds.rows_per_request);
  config.table_width = bounds.table_width;
  config.rows_per_request = bounds.rows_per_request;
  return config;
}

std::vector<MetadataRefresh> refresh_plans(const DsaConfig& config, const Device& device,
                                           const OperatorOptions& options) {
  std::vector<MetadataRefresh> plans;
  plans.reserve(kModes.size());
  for (const ForwardMode mode : kModes) {
    plans.push_back(
        MetadataRefresh::plan(metadata_problem(config, mode), device, options("metadata_refresh")));
  }
  return plans;
}

void check_row_batch(const char* op, const char* no_split, const DsaConfig& config,
                     const ForwardBatch& batch, const std::optional<StepBucket>& bucket,
                     int32_t kv_len_delta) {
  in_the_name_of(op, [&] { check_forward_batch(config, batch, bucket, kv_len_delta); });
  if (batch.context_split != nullptr) {
    unsupported(op, std::string("context_split: ") + no_split + "; leave it out");
  }
}

void check_row_bucket(const char* op, const DsaConfig& config, const StepBucket& bucket) {
  in_the_name_of(op, [&] { check_bucket(config, bucket); });
}

RowStep::RowStep(const DsaConfig& config, const StepHome& home)
    : RowStep(config, home, config.max_requests, config.max_rows) {}

RowStep::RowStep(const DsaConfig& config, const StepHome& home, const StepBucket& bucket_in)
    : RowStep(config, home, bucket_in.num_requests,
              bucket_in.num_requests * bucket_in.rows_per_request) {
  bucket = bucket_in;
}

RowStep::RowStep(const DsaConfig& config, const StepHome& home, int64_t max_requests,
                 int64_t max_rows)
    : device(home.device),
      arrays(config, max_requests, max_rows, home),
      lengths(home.device.kind == DeviceKind::kCpu ? 0 : max_requests,
              home.device.kind == DeviceKind::kCpu ? 0 : max_rows) {}

void begin_rows(const DsaConfig& config, const std::vector<MetadataRefresh>& refresh,
                const ForwardBatch& batch, int32_t kv_len_delta, OperatorCaller& caller,
                RowStep* step) {
  const StepShape shape = shape_of(batch);
  MetadataTensors tensors;
  tensors.seq_len = batch.seq_len;
  tensors.pool_row = batch.pool_row;
  tensors.req_to_token = batch.req_to_token;
  tensors.ext_len = batch.ext_len;
  tensors.kv_len_delta[0] = kv_len_delta;
  tensors.steps[0] =
      step->arrays.views(batch.mode, shape.num_requests, shape.num_rows, shape.padded_rows);
  step->begun = false;
  step->fields = tensors.steps[0];
  const bool on_cpu = step->device.kind == DeviceKind::kCpu;
  if (!on_cpu) step->lengths.fill(config, batch, shape, kv_len_delta);
  caller.call("metadata_refresh", refresh[static_cast<size_t>(batch.mode)], tensors,
              [&] { return metadata_work(config, step->host_fields()); });
  step->mode = batch.mode;
  step->num_requests = shape.num_requests;
  step->num_rows = shape.num_rows;
  step->padded_rows = shape.padded_rows;
  step->store_slots = first_rows(batch.out_cache_loc, shape.num_rows);
  // num_rows of a draft extension may be a bound: what lies behind the last request is not stored.
  if (batch.mode == ForwardMode::kDraftExtend) {
    const TensorView slots = slice_rows(step->arrays.store_slots(), 0, shape.num_rows);
    caller.call_own(
        "mask_slots",
        [&] {
          mask_slots(step->fields.row_to_request, batch.out_cache_loc, slots, step->device,
                     caller.stream());
        },
        [&] { return mask_slots_work(shape.num_rows); });
    step->store_slots = slots;
  }
  step->begun = true;
}

}  // namespace fovea::internal
