#pragma once

#include <cstdint>

#include "fovea/dsa_backend.h"

/// What the operators of one forward have to do, for profiles (docs/dsa_backend.md, "Profile").
/// `fields` are those of DsaStep::host_fields(): nothing is read from a GPU.
namespace fovea::internal {

struct OperatorWork {
  double flops = 0;
  double bytes = 0;
};

OperatorWork metadata_work(const DsaConfig& config, const MetadataFields& fields);
OperatorWork pack_rows_work(const DsaConfig& config, int64_t rows);
/// `with_queries`, `with_keys`: which halves run.
OperatorWork index_quantize_work(const DsaConfig& config, int64_t rows, bool with_queries,
                                 bool with_keys);
OperatorWork index_store_work(const DsaConfig& config, int64_t rows);
OperatorWork index_select_work(const DsaConfig& config, const MetadataFields& fields);
OperatorWork map_selection_work(const DsaConfig& config, int64_t rows);
OperatorWork mask_slots_work(int64_t rows);
OperatorWork list_slots_work(const DsaConfig& config, int64_t tokens);
/// `rows`: of the padding.
OperatorWork clear_padding_work(const DsaConfig& config, int64_t rows);
OperatorWork unpack_rows_work(const DsaConfig& config, const MetadataFields& fields);
/// Of the rows [begin, end); `row_bytes`: of the keys that are read.
OperatorWork sparse_mla_work(const DsaConfig& config, const MetadataFields& fields,
                             int64_t row_bytes, int64_t begin, int64_t end);
/// Rows of 576 channels joined from two bf16 parts; `element_bytes`: of the result.
OperatorWork join_work(int64_t rows, int64_t element_bytes);
OperatorWork mha_varlen_work(const DsaConfig& config, const MetadataFields& fields);

/// Bytes of one token's latent row in the cache.
int64_t latent_row_bytes(const DsaConfig& config);

}  // namespace fovea::internal
