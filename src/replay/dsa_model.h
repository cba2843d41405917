#pragma once

#include <cstdint>
#include <memory>

#include "fovea/dtype.h"
#include "src/replay/model_family.h"

/// Models with DeepSeek sparse attention.
namespace fovea::internal {

struct DsaShape {
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t rope_dim = 0;
  float softmax_scale = 0;
  RowFormat row_format = RowFormat::kV32;
  ScaleMode kv_scale_mode = ScaleMode::kFp32;
  ScaleMode index_scale_mode = ScaleMode::kPow2;
  RopeStyle index_rope_style = RopeStyle::kHalfSplit;
  bool hadamard = true;
};

std::shared_ptr<const ModelFamily> make_dsa_family(const DsaShape& shape);

/// The shape of a model of this family.
const DsaShape& dsa_shape(const ModelSpec& model);

ModelSpec deepseek_v32();

}  // namespace fovea::internal
