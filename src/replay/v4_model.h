#pragma once

#include <cstdint>
#include <memory>

#include "src/replay/model_family.h"

/// Models of DeepSeek-V4 attention: a window in every layer, and compressed entries in most.
namespace fovea::internal {

/// Kinds of their layers: ratio 0, 4 and 128. The draft model's layer has ratio 0.
inline constexpr char kSwaKind[] = "swa";
inline constexpr char kCsaKind[] = "csa";
inline constexpr char kHcaKind[] = "hca";

struct V4Shape {
  int64_t window = 128;
  int64_t index_heads = 64;
  float softmax_scale = 0.04419417382415922f;  ///< 512^-1/2
};

std::shared_ptr<const ModelFamily> make_v4_family(const V4Shape& shape);

/// The shape of a model of this family.
const V4Shape& v4_shape(const ModelSpec& model);

/// Tokens of an entry of the layer; 0: it has none.
int64_t v4_ratio(const ModelSpec& model, int64_t layer);

ModelSpec deepseek_v4_flash();
ModelSpec deepseek_v4_pro();

}  // namespace fovea::internal
