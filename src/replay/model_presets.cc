#include "src/replay/model_presets.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "fovea/replay.h"
#include "src/core/check.h"
#include "src/replay/dsa_model.h"
#include "src/replay/kimi_model.h"
#include "src/replay/msa_model.h"
#include "src/replay/v4_model.h"

namespace fovea {
namespace internal {
namespace {

const std::vector<ModelSpec>& presets() {
  static const std::vector<ModelSpec> models = {deepseek_v32(), deepseek_v4_flash(),
                                                deepseek_v4_pro(), kimi_linear(), minimax_m3()};
  return models;
}

int64_t parse_number(const std::string& layers, std::string_view text) {
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
    invalid("replay", "layers = '" + layers +
                          "', expected pattern, all, a number of layers or a list like 0,3,60");
  }
  return value;
}

}  // namespace

ModelSpec find_model(const std::string& name) {
  std::string known;
  for (const ModelSpec& model : presets()) {
    if (model.name == name) return model;
    known += (known.empty() ? "" : ", ") + model.name;
  }
  invalid("replay", "model = '" + name + "' is unknown; this build has " + known);
}

std::vector<int64_t> parse_layers(const ModelSpec& model, const std::string& layers) {
  const auto count = static_cast<int64_t>(model.layer_kinds.size());
  std::vector<int64_t> ids;
  if (layers == "pattern" && !model.pattern_layers.empty()) return model.pattern_layers;
  if (layers == "pattern") {
    for (int64_t id = 0; id < count; ++id) {
      const auto begin = model.layer_kinds.begin();
      if (std::find(begin, begin + id, begin[id]) == begin + id) ids.push_back(id);
    }
    return ids;
  }
  if (layers.find(',') == std::string::npos) {
    const int64_t number = layers == "all" ? count : parse_number(layers, layers);
    check_range("replay", "layers", number, 1, count);
    for (int64_t id = 0; id < number; ++id) ids.push_back(id);
    return ids;
  }
  std::string_view rest = layers;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    ids.push_back(parse_number(layers, rest.substr(0, comma)));
    check_range("replay", "layers", ids.back(), 0, count - 1);
    if (std::find(ids.begin(), ids.end() - 1, ids.back()) != ids.end() - 1) {
      invalid("replay",
              "layers = '" + layers + "' names layer " + std::to_string(ids.back()) + " twice");
    }
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return ids;
}

}  // namespace internal

std::vector<std::string> replay_models() {
  std::vector<std::string> names;
  for (const internal::ModelSpec& model : internal::presets()) names.push_back(model.name);
  return names;
}

}  // namespace fovea
