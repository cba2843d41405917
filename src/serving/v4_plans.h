#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "fovea/index_quantize.h"
#include "fovea/index_select.h"
#include "fovea/metadata.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "fovea/swa_indices.h"
#include "fovea/v4_backend.h"
#include "src/serving/dsa_profile.h"
#include "src/serving/operator_options.h"
#include "src/serving/v4_shapes.h"

/// The operators of a V4Backend, planned from its configuration.
namespace fovea::internal {

inline constexpr char kV4Op[] = "v4_backend";
inline constexpr int64_t kV4RopeWidth = 64;

/// Throws Error naming the field.
void check_v4_config(const V4BackendConfig& config);

/// What StepArrays and the metadata operators need to know.
DsaConfig metadata_config(const V4BackendConfig& config);

/// Rows of one request in one step at most.
int64_t max_request_rows(const V4BackendConfig& config);

/// Compressed rows of a page.
inline int64_t compressed_page(const V4BackendConfig& config, int64_t ratio) {
  return config.page_size / ratio;
}

/// Whether no request can have more than topk entries of ratio 4.
inline bool sees_all(const V4BackendConfig& config, int64_t tokens) {
  return tokens / kCsaRatio <= config.topk;
}

struct V4Plans {
  V4Plans(const V4BackendConfig& config, const Device& device, const OperatorOptions& options);
  size_t workspace_bytes() const;

  std::vector<MetadataRefresh> refresh;  ///< By mode.
  BuildSwaIndices window;
  PackRows pack;
  SparseMla attend_window;
  // csa
  std::optional<V4Compress> compress_csa, compress_index;
  std::optional<IndexQuantize> quantize;
  std::optional<IndexSelect> select;
  std::optional<SparseMla> attend_csa;
  // hca
  std::optional<V4Compress> compress_hca;
  std::optional<SparseMla> attend_hca;
};

/// What operators have to do, for profiles (docs/v4_backend.md, "Profile"). `fields`: those of
/// V4Step::host_fields().
OperatorWork swa_indices_work(const V4BackendConfig& config, int64_t rows);
OperatorWork pack_window_work(const V4BackendConfig& config, int64_t rows);
OperatorWork compress_work(const V4BackendConfig& config, int64_t ratio, int64_t head_dim,
                           int64_t rows, int64_t requests);
OperatorWork index_query_work(const V4BackendConfig& config, int64_t rows);
OperatorWork entry_select_work(const V4BackendConfig& config, const MetadataFields& fields);
OperatorWork attend_work(const V4BackendConfig& config, int64_t ratio,
                         const MetadataFields& fields);

}  // namespace fovea::internal
