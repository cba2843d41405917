#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/causal_conv1d.h"
#include "fovea/dense_mla.h"
#include "fovea/kda_backend.h"
#include "fovea/kda_commit.h"
#include "fovea/kda_decode.h"
#include "fovea/kda_prefill.h"
#include "fovea/kda_verify.h"
#include "fovea/metadata.h"
#include "fovea/row_codec.h"
#include "src/serving/dsa_profile.h"
#include "src/serving/operator_options.h"

/// The operators of a KdaBackend, planned from its configuration.
namespace fovea::internal {

inline constexpr char kKdaOp[] = "kda_backend";

/// Channels of a token's q|k|v.
int64_t kda_channels(const KdaLayer& layer);

/// Throws Error naming the field.
void check_kda_config(const KdaBackendConfig& config);

/// What StepArrays and the metadata operators need to know.
DsaConfig metadata_config(const KdaBackendConfig& config);

/// A verify of `rows_per_request` rows per request and what makes it current.
struct KdaVerifyPlans {
  KdaVerifyPlans(const KdaBackendConfig& config, int64_t rows_per_request, int64_t num_layers,
                 const Device& device, const OperatorOptions& options);
  size_t workspace_bytes() const;

  CausalConv1d convolution;
  KdaVerify verify;
  KdaCommit commit;
};

struct KdaPlans {
  KdaPlans(const KdaBackendConfig& config, const Device& device, const OperatorOptions& options);
  size_t workspace_bytes() const;

  std::vector<MetadataRefresh> refresh;  ///< By mode.
  CausalConv1d prefill_convolution, update_convolution;
  KdaPrefill prefill;
  KdaDecode decode;
  KdaVerifyPlans verify_one;     ///< One row per request, one layer.
  KdaVerifyPlans verify;         ///< rows_per_request rows, all layers.
  std::optional<PackRows> pack;  ///< With full-attention layers.
};

/// Of a full-attention layer with this scale.
DenseMla dense_plan(const KdaBackendConfig& config, float softmax_scale, const Device& device,
                    const OperatorOptions& options);

/// What operators have to do, for profiles (docs/kda_backend.md, "Profile").
OperatorWork kda_work(const KdaBackendConfig& config, int64_t rows, int64_t states);
OperatorWork convolution_work(const KdaBackendConfig& config, int64_t rows);
OperatorWork commit_work(const KdaBackendConfig& config, int64_t requests, int64_t layers);
/// `rows` of padding that are written, each of `row_bytes`.
OperatorWork padding_work(int64_t rows, int64_t row_bytes);
/// `fields`: KdaStep::host_fields().
OperatorWork dense_work(const KdaBackendConfig& config, const MetadataFields& fields);

}  // namespace fovea::internal
