#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/index_cache.h"
#include "fovea/index_quantize.h"
#include "fovea/index_select.h"
#include "fovea/metadata_check.h"
#include "fovea/mha_varlen.h"
#include "fovea/mla_inputs.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "src/serving/operator_options.h"

/// The operators of a backend, planned from its configuration.
namespace fovea::internal {

/// Bounds of metadata_refresh in one mode.
MetadataProblem metadata_problem(const DsaConfig& config, ForwardMode mode);

/// split_parts when the implementation of sparse_mla that runs follows a split plan, otherwise 0:
/// nobody would read one.
int64_t followed_split_parts(const DsaConfig& config, const Device& device,
                             const OperatorOptions& options);

/// Rows whose query is joined or quantised at a time, when it comes in parts: what bounds the
/// scratch memory. Rows do not depend on one another.
inline constexpr int64_t kQueryChunk = 128;

/// What all layers share.
struct DsaPlans {
  DsaPlans(const DsaConfig& config, const Device& device, const OperatorOptions& options);
  size_t workspace_bytes() const;

  // By mode; the second and third with verify_metadata and check.
  std::vector<MetadataRefresh> refresh;
  std::vector<MetadataVerifier> verify;
  std::vector<MetadataCheck> check;
  IndexQuantize quantize;
  IndexStore store;
  IndexSelect select;
  std::optional<IndexSelect> select_ragged;
  ConcatAbsorbedQ join_q;                 ///< kQueryChunk rows.
  std::optional<ConcatAbsorbedQ> join_k;  ///< All rows, of one head; with fresh keys.
};

/// What depends on the layer's scales.
struct LayerPlans {
  LayerPlans(const DsaConfig& config, const DsaLayer& layer, const Device& device,
             const OperatorOptions& options);
  size_t workspace_bytes() const;

  DsaLayer layer;
  PackRows pack;
  std::optional<MlaRopeQuantize> rope_quantize;  ///< With fuse_rope; it gives whole records, which
  std::optional<PackRows> pack_records;          ///< are stored as they are.
  SparseMla cache_direct;
  std::optional<UnpackRows> unpack;
  std::optional<SparseMla> contiguous;
  std::optional<MhaVarlen> one_shot;
};

}  // namespace fovea::internal
