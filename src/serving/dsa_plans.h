#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "fovea/dsa_backend.h"
#include "fovea/index_cache.h"
#include "fovea/index_quantize.h"
#include "fovea/index_select.h"
#include "fovea/mha_varlen.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "src/serving/operator_options.h"

/// The operators of a backend, planned from its configuration.
namespace fovea::internal {

/// Bounds of metadata_refresh in one mode.
MetadataProblem metadata_problem(const DsaConfig& config, ForwardMode mode);

/// What all layers share.
struct DsaPlans {
  DsaPlans(const DsaConfig& config, const Device& device, const OperatorOptions& options);
  size_t workspace_bytes() const;
  const MetadataRefresh& refresh_of(ForwardMode mode) const {
    return refresh[static_cast<size_t>(mode)];
  }

  std::vector<MetadataRefresh> refresh;  ///< By mode.
  IndexQuantize quantize;
  IndexStore store;
  IndexSelect select;
  std::optional<IndexSelect> select_ragged;
};

/// What depends on the layer's scales.
struct LayerPlans {
  LayerPlans(const DsaConfig& config, const DsaLayer& layer, const Device& device,
             const OperatorOptions& options);
  size_t workspace_bytes() const;

  DsaLayer layer;
  PackRows pack;
  SparseMla cache_direct;
  std::optional<UnpackRows> unpack;
  std::optional<SparseMla> contiguous;
  std::optional<MhaVarlen> one_shot;
};

}  // namespace fovea::internal
