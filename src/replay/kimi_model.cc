#include "src/replay/kimi_model.h"

#include <algorithm>

#include "fovea/error.h"
#include "fovea/row_codec.h"
#include "fovea/state_pool.h"
#include "src/replay/kimi_engine.h"
#include "src/replay/row_targets.h"

namespace fovea::internal {
namespace {

class KimiFamily final : public ModelFamily {
 public:
  explicit KimiFamily(const KimiShape& shape) : shape_(shape) {}

  const KimiShape& shape() const { return shape_; }

  // A page of tokens comes with the snapshot of the state behind it.
  CacheCost cache_cost(const RunSetup& setup) const override {
    const StatePoolConfig states = kimi_state_pool(setup, 1);
    const int64_t slot = StatePool::slot_bytes(states);
    const int64_t mla = static_cast<int64_t>(setup.layers.size()) - num_kda_layers(setup);
    return {mla * page_bytes(RowFormat::kBf16, setup.page_size, kKimiRowWidth) + slot, 2 * slot};
  }

  std::optional<FaultCandidate> find_fault(const RunSetup& setup, const std::string& kind,
                                           const StepEntry& entry) const override {
    return kind == "snapshot" ? find_wrong_snapshot(setup, entry) : find_wrong_page(setup, entry);
  }

  std::unique_ptr<ModelEngine> make_engine(const RunSetup& setup, const RunPlan& plan,
                                           EngineConfig config) const override {
    return std::make_unique<KimiEngine>(setup, plan, std::move(config));
  }

 private:
  // The simulated layer that is of this kind, first of all; -1: none.
  static int64_t first_layer(const RunSetup& setup, bool kda) {
    for (size_t i = 0; i < setup.layers.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      if (is_kda_layer(setup.model, setup.layers[i]) == kda && !setup.is_draft(index)) return index;
    }
    return -1;
  }

  // A request that resumes from a snapshot: the row behind it depends on the state most.
  static std::optional<FaultCandidate> find_wrong_snapshot(const RunSetup& setup,
                                                           const StepEntry& entry) {
    const int64_t layer = first_layer(setup, true);
    const bool resumes = entry.starts && entry.begin > 0;
    if (layer < 0 || !resumes || entry.begin < entry.first_new) return std::nullopt;
    return FaultCandidate{0, entry.begin / setup.page_size - 1, entry.begin, layer};
  }

  // A full-attention row, a decode row if there is one, whose first target lies in a complete page
  // before the rows of the step.
  static std::optional<FaultCandidate> find_wrong_page(const RunSetup& setup,
                                                       const StepEntry& entry) {
    const int64_t layer = first_layer(setup, false);
    const int64_t p = entry.kept_end - 1;
    if (layer < 0 || p < entry.first_new) return std::nullopt;
    const uint64_t token = setup.workload.token_id(entry.request, p);
    const int64_t page = target_position(setup.seed, setup.layers[static_cast<size_t>(layer)],
                                         {entry.request, p, token}, 0) /
                         setup.page_size;
    if ((page + 1) * setup.page_size > entry.begin || entry.begin < 2 * setup.page_size) {
      return std::nullopt;
    }
    return FaultCandidate{entry.decode ? 1 : 0, page, p, layer};
  }

  KimiShape shape_;
};

}  // namespace

std::shared_ptr<const ModelFamily> make_kimi_family(const KimiShape& shape) {
  return std::make_shared<KimiFamily>(shape);
}

const KimiShape& kimi_shape(const ModelSpec& model) {
  const auto* const family = dynamic_cast<const KimiFamily*>(model.family.get());
  if (family == nullptr) {
    throw Error(ErrorCode::kInternal, "replay: " + model.name + " is no model of the KDA family");
  }
  return family->shape();
}

KdaLayer kimi_layer(const KimiShape& shape, int64_t num_heads) {
  KdaLayer layer;
  layer.num_heads = num_heads;
  layer.num_value_heads = num_heads;
  layer.head_dim_k = shape.head_dim_k;
  layer.head_dim_v = shape.head_dim_v;
  layer.beta_kind = BetaKind::kLogit;
  layer.normalise = true;
  return layer;
}

bool is_kda_layer(const ModelSpec& model, int64_t layer) {
  return model.layer_kind(layer) == kKdaKind;
}

ModelSpec kimi_linear() {
  KimiShape shape;
  shape.softmax_scale = 0.07216878364870322f;  // (128 + 64)^-1/2
  ModelSpec model;
  model.name = "kimi-linear";
  model.num_heads = 32;
  model.page.preferred = 64;
  model.page.allows = [](int64_t page) { return page % 64 == 0; };
  model.page.expected = "a multiple of 64 up to 256";
  model.scheduling.share_within_step = false;
  model.scheduling.prefill_alignment = 64;
  for (int64_t layer = 0; layer < 27; ++layer) {
    model.layer_kinds.emplace_back(layer % 4 == 3 || layer == 26 ? kMlaKind : kKdaKind);
  }
  model.pattern_layers = {0, 1, 2, 3};
  model.has_draft_layer = true;
  model.injections = {"page", "snapshot"};
  model.family = make_kimi_family(shape);
  return model;
}

}  // namespace fovea::internal
