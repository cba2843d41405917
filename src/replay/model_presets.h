#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/dtype.h"

/// The shapes of the models that replay knows.
namespace fovea::internal {

struct ModelSpec {
  std::string name;
  int64_t num_heads = 0;  ///< Query heads before tensor parallel.
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t rope_dim = 0;
  int64_t topk = 0;
  int64_t page_size = 0;
  float softmax_scale = 0;
  RowFormat row_format = RowFormat::kV32;
  ScaleMode kv_scale_mode = ScaleMode::kFp32;
  ScaleMode index_scale_mode = ScaleMode::kPow2;
  RopeStyle index_rope_style = RopeStyle::kHalfSplit;
  bool hadamard = true;
  std::vector<std::string> layer_kinds;  ///< One per layer of the model.

  /// Id of the one layer of the draft model: behind those of the model, with the same shapes.
  int64_t draft_layer() const { return static_cast<int64_t>(layer_kinds.size()); }
  /// Kind of a layer, "draft" for the draft model's.
  std::string layer_kind(int64_t layer) const {
    return layer == draft_layer() ? "draft" : layer_kinds[static_cast<size_t>(layer)];
  }
};

/// The preset of that name. Throws Error(kInvalidArgument) listing what exists.
ModelSpec find_model(const std::string& name);

/// Layer ids that `layers` names: "pattern" (the first layer of each kind), "all", a number N (the
/// first N) or a list "0,3,60". Throws Error(kInvalidArgument).
std::vector<int64_t> parse_layers(const ModelSpec& model, const std::string& layers);

}  // namespace fovea::internal
