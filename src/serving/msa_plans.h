#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "fovea/metadata.h"
#include "fovea/msa_attend.h"
#include "fovea/msa_backend.h"
#include "fovea/msa_score_select.h"
#include "fovea/row_codec.h"
#include "src/serving/dsa_profile.h"
#include "src/serving/operator_options.h"
#include "src/serving/row_step.h"

/// The operators of an MsaBackend, planned from its configuration.
namespace fovea::internal {

inline constexpr char kMsaBackendOp[] = "msa_backend";

/// The configuration with what its zeros stand for. Throws Error naming the field.
MsaBackendConfig check_msa_config(const MsaBackendConfig& config);

/// Of a checked configuration.
DsaConfig metadata_config(const MsaBackendConfig& config);

/// Columns of a request's page table.
int64_t msa_table_pages(const MsaBackendConfig& config);

/// Columns of the lists.
int64_t msa_list_columns(const MsaBackendConfig& config);

/// Operators for steps within these bounds. Splits of rows follow the bounds, so that few rows get
/// plans of their own.
struct MsaPlans {
  MsaPlans(const MsaBackendConfig& config, int64_t max_requests, int64_t max_rows,
           const Device& device, const OperatorOptions& options);
  size_t workspace_bytes() const;

  PackRows store_row;    ///< All KV heads of a token.
  PackRows store_head;   ///< One of them, where a pool does not hold them side by side.
  PackRows store_index;  ///< Index keys.
  MsaScoreSelect select;
  MsaAttend attend;
  std::optional<MsaAttend> attend_all;  ///< With dense layers.
};

/// Throws Error naming the tensor. `rows`: T.
void check_msa_forward(const MsaBackendConfig& config, int64_t rows, bool dense,
                       const MsaForwardTensors& tensors);

/// What operators have to do, for profiles (docs/msa_backend.md, "Profile"). `fields`:
/// RowStep::host_fields().
OperatorWork msa_store_work(int64_t rows, int64_t channels);
OperatorWork msa_select_work(const MsaBackendConfig& config, const MetadataFields& fields);
OperatorWork msa_attend_work(const MsaBackendConfig& config, bool dense,
                             const MetadataFields& fields);

}  // namespace fovea::internal
