#include "src/serving/kda_plans.h"

#include <algorithm>
#include <limits>
#include <string>

#include "src/core/access.h"
#include "src/core/check.h"
#include "src/serving/dsa_shapes.h"
#include "src/serving/row_step.h"

namespace fovea::internal {
namespace {

CausalConv1d convolution_plan(const KdaBackendConfig& config, ConvMode mode,
                              int64_t rows_per_request, const Device& device,
                              const OperatorOptions& options) {
  CausalConv1dProblem problem;
  problem.mode = mode;
  problem.num_channels = kda_channels(config.layer);
  problem.max_rows =
      mode == ConvMode::kPrefill ? config.max_rows : config.max_requests * rows_per_request;
  problem.max_sequences = mode == ConvMode::kPrefill ? config.max_requests : 0;
  problem.max_snapshots = mode == ConvMode::kPrefill ? config.max_snapshots : 0;
  problem.rows_per_request = rows_per_request;
  problem.weight_dtype = config.conv_weight_dtype;
  problem.bias_dtype = config.conv_bias_dtype;
  problem.window_layout = config.window_layout;
  problem.check = config.check;
  return CausalConv1d::plan(problem, device, options("causal_conv1d"));
}

KdaPrefill prefill_plan(const KdaBackendConfig& config, const Device& device,
                        const OperatorOptions& options) {
  KdaPrefillProblem problem;
  problem.layer = config.layer;
  problem.max_rows = config.max_rows;
  problem.max_sequences = config.max_requests;
  problem.max_snapshots = config.max_snapshots;
  problem.commit = config.commit;
  problem.check = config.check;
  return KdaPrefill::plan(problem, device, options("kda_prefill"));
}

KdaVerify verify_plan(const KdaBackendConfig& config, int64_t rows_per_request,
                      const Device& device, const OperatorOptions& options) {
  KdaVerifyProblem problem;
  problem.layer = config.layer;
  problem.mode = config.verify_mode;
  problem.max_requests = config.max_requests;
  problem.rows_per_request = rows_per_request;
  problem.check = config.check;
  return KdaVerify::plan(problem, device, options("kda_verify"));
}

KdaCommit commit_plan(const KdaBackendConfig& config, int64_t rows_per_request, int64_t num_layers,
                      const Device& device, const OperatorOptions& options) {
  KdaCommitProblem problem;
  problem.num_value_heads = config.layer.num_value_heads;
  problem.head_dim_k = config.layer.head_dim_k;
  problem.head_dim_v = config.layer.head_dim_v;
  problem.state_dtype = config.layer.state_dtype;
  problem.mode = config.verify_mode;
  problem.max_requests = config.max_requests;
  problem.rows_per_request = rows_per_request;
  problem.num_layers = num_layers;
  problem.window_layout = config.window_layout;
  problem.check = config.check;
  return KdaCommit::plan(problem, device, options("kda_commit"));
}

double state_bytes(const KdaLayer& layer) {
  return static_cast<double>(layer.num_value_heads * layer.head_dim_k * layer.head_dim_v) *
         (layer.state_dtype == DType::kF32 ? 4 : 2);
}

}  // namespace

int64_t kda_channels(const KdaLayer& layer) {
  return 2 * layer.num_heads * layer.head_dim_k + layer.num_value_heads * layer.head_dim_v;
}

void check_kda_config(const KdaBackendConfig& config) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check_range(kKdaOp, "num_layers", config.num_layers, 1, kMax);
  check_range(kKdaOp, "num_mla_heads", config.num_mla_heads, 0, kMax);
  check_range(kKdaOp, "page_size", config.page_size, 1, 256);
  check_range(kKdaOp, "table_width", config.table_width, 1, kMax);
  check_range(kKdaOp, "max_requests", config.max_requests, 1, kMax);
  check_range(kKdaOp, "max_rows", config.max_rows, 1, kMax);
  check_range(kKdaOp, "rows_per_request", config.rows_per_request, 1, kMax);
  check_range(kKdaOp, "max_snapshots", config.max_snapshots, 0, kMax);
}

DsaConfig metadata_config(const KdaBackendConfig& config) {
  return metadata_config({config.page_size, config.table_width, config.max_requests,
                          config.max_rows, config.rows_per_request});
}

KdaVerifyPlans::KdaVerifyPlans(const KdaBackendConfig& config, int64_t rows_per_request,
                               int64_t num_layers, const Device& device,
                               const OperatorOptions& options)
    : convolution(convolution_plan(config, ConvMode::kVerify, rows_per_request, device, options)),
      verify(verify_plan(config, rows_per_request, device, options)),
      commit(commit_plan(config, rows_per_request, num_layers, device, options)) {}

size_t KdaVerifyPlans::workspace_bytes() const {
  return std::max(
      {convolution.workspace_bytes(), verify.workspace_bytes(), commit.workspace_bytes()});
}

KdaPlans::KdaPlans(const KdaBackendConfig& config, const Device& device,
                   const OperatorOptions& options)
    : refresh(refresh_plans(metadata_config(config), device, options)),
      prefill_convolution(convolution_plan(config, ConvMode::kPrefill, 1, device, options)),
      update_convolution(convolution_plan(config, ConvMode::kUpdate, 1, device, options)),
      prefill(prefill_plan(config, device, options)),
      decode(KdaDecode::plan({config.layer, config.max_requests, config.check}, device,
                             options("kda_decode"))),
      verify_one(config, 1, 0, device, options),
      verify(config, config.rows_per_request, config.num_layers, device, options) {
  if (config.num_mla_heads == 0) return;
  RowCodecProblem problem;
  problem.max_rows = metadata_config(config).max_rows;
  problem.page_size = config.page_size;
  problem.width = kLatentWidth;
  pack = PackRows::plan(problem, device, options("pack_rows"));
}

size_t KdaPlans::workspace_bytes() const {
  size_t bytes =
      std::max({prefill_convolution.workspace_bytes(), update_convolution.workspace_bytes(),
                prefill.workspace_bytes(), decode.workspace_bytes(), verify_one.workspace_bytes(),
                verify.workspace_bytes()});
  for (const MetadataRefresh& plan : refresh) bytes = std::max(bytes, plan.workspace_bytes());
  return pack ? std::max(bytes, pack->workspace_bytes()) : bytes;
}

DenseMla dense_plan(const KdaBackendConfig& config, float softmax_scale, const Device& device,
                    const OperatorOptions& options) {
  const DsaConfig metadata = metadata_config(config);
  DenseMlaProblem problem;
  problem.max_rows = metadata.max_rows;
  problem.max_requests = config.max_requests;
  problem.max_pages = (config.table_width + config.page_size - 1) / config.page_size;
  problem.num_heads = config.num_mla_heads;
  problem.page_size = config.page_size;
  problem.softmax_scale = softmax_scale;
  return DenseMla::plan(problem, device, options("dense_mla"));
}

// A row decays, corrects, updates and reads its state: 7 operations per element.
OperatorWork kda_work(const KdaBackendConfig& config, int64_t rows, int64_t states) {
  const KdaLayer& layer = config.layer;
  const auto per_head = static_cast<double>(layer.num_value_heads);
  const auto dims = static_cast<double>(layer.head_dim_k * layer.head_dim_v);
  const double row_bytes = 2.0 * static_cast<double>(kda_channels(layer)) +
                           per_head * (2.0 * static_cast<double>(layer.head_dim_v) +
                                       static_cast<double>(layer.head_dim_k) *
                                           (layer.gate.dtype == DType::kF32 ? 4 : 2) +
                                       (layer.beta_dtype == DType::kF32 ? 4 : 2));
  return {7.0 * static_cast<double>(rows) * per_head * dims,
          static_cast<double>(rows) * row_bytes +
              2.0 * static_cast<double>(states) * state_bytes(layer)};
}

OperatorWork convolution_work(const KdaBackendConfig& config, int64_t rows) {
  const auto elements = static_cast<double>(rows * kda_channels(config.layer));
  return {8.0 * elements, 4.0 * elements};
}

OperatorWork commit_work(const KdaBackendConfig& config, int64_t requests, int64_t layers) {
  const auto states = static_cast<double>(requests * layers);
  return {0,
          states * (state_bytes(config.layer) +
                    4.0 * static_cast<double>(config.layer.num_value_heads *
                                              config.layer.head_dim_k * config.layer.head_dim_v))};
}

OperatorWork padding_work(int64_t rows, int64_t row_bytes) {
  return {0, static_cast<double>(rows * row_bytes)};
}

// Every row meets every key that it sees, once for the score and once for the value.
OperatorWork dense_work(const KdaBackendConfig& config, const MetadataFields& fields) {
  const auto row_len = access<const int32_t, 1>(fields.row_len);
  const auto kv_len = access<const int32_t, 1>(fields.kv_len);
  double pairs = 0, keys = 0;
  for (int64_t t = 0; t < row_len.shape[0]; ++t) pairs += std::max(row_len(t), 0);
  for (int64_t r = 0; r < kv_len.shape[0]; ++r) keys += std::max(kv_len(r), 0);
  const auto heads = static_cast<double>(config.num_mla_heads);
  const double rows = static_cast<double>(row_len.shape[0]);
  return {2.0 * pairs * heads * (kLatentWidth + kLatentDim),
          2.0 * (keys * kLatentWidth + rows * heads * (kLatentWidth + kLatentDim))};
}

}  // namespace fovea::internal
