#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/replay/model_family.h"

/// The models that replay knows.
namespace fovea::internal {

/// The preset of that name. Throws Error(kInvalidArgument) listing what exists.
ModelSpec find_model(const std::string& name);

/// Layer ids that `layers` names: "pattern" (the model's own choice, else the first layer of each
/// kind), "all", a number N (the
/// first N) or a list "0,3,60". Throws Error(kInvalidArgument).
std::vector<int64_t> parse_layers(const ModelSpec& model, const std::string& layers);

}  // namespace fovea::internal
