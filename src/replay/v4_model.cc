#include "src/replay/v4_model.h"

#include "fovea/error.h"
#include "fovea/row_codec.h"
#include "fovea/state_pool.h"
#include "src/replay/v4_engine.h"
#include "src/replay/v4_inputs.h"

namespace fovea::internal {
namespace {

class V4Family final : public ModelFamily {
 public:
  explicit V4Family(const V4Shape& shape) : shape_(shape) {}

  const V4Shape& shape() const { return shape_; }

  // A page holds the window rows and entries of its tokens; with it comes a snapshot of the
  // compressors of ratio 4.
  CacheCost cache_cost(const RunSetup& setup) const override {
    const auto layers = static_cast<int64_t>(setup.layers.size());
    CacheCost cost;
    cost.bytes_per_page = layers * page_bytes(RowFormat::kV4, setup.page_size, kV4Width);
    const V4StateConfigs states = v4_states(setup, 1, 1);
    if (const int64_t count = count_layers(setup, kCsaRatio); count > 0) {
      const int64_t slot =
          StatePool::slot_bytes(states.csa) + StatePool::slot_bytes(states.indexer);
      const int64_t rows = setup.page_size / kCsaRatio;
      cost.bytes_per_page += count * (page_bytes(RowFormat::kV4, rows, kV4Width) +
                                      page_bytes(RowFormat::kI132, rows, kV4IndexDim)) +
                             slot;
      cost.bytes_per_request += StateSlots::kPerRequest * slot;
    }
    if (const int64_t count = count_layers(setup, kHcaRatio); count > 0) {
      cost.bytes_per_page +=
          count * page_bytes(RowFormat::kV4, setup.page_size / kHcaRatio, kV4Width);
      cost.bytes_per_request += StateSlots::kPerRequest * StatePool::slot_bytes(states.hca);
    }
    return cost;
  }

  int64_t selecting_length(const RunSetup& setup) const override {
    if (count_layers(setup, kCsaRatio) == 0) return ModelFamily::selecting_length(setup);
    return kCsaRatio * setup.topk + kCsaRatio - 1;
  }

  std::optional<FaultCandidate> find_fault(const RunSetup& setup, const std::string& kind,
                                           const StepEntry& entry) const override {
    return kind == "window" ? find_stale_window(setup, entry) : find_wrong_page(setup, entry);
  }

  std::unique_ptr<ModelEngine> make_engine(const RunSetup& setup, const RunPlan& plan,
                                           EngineConfig config) const override {
    return std::make_unique<V4Engine>(setup, plan, std::move(config));
  }

 private:
  // The first simulated layer of this ratio; -1: none.
  static int64_t first_layer(const RunSetup& setup, int64_t ratio) {
    for (size_t i = 0; i < setup.layers.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      if (v4_ratio(setup.model, setup.layers[i]) == ratio && !setup.is_draft(index)) return index;
    }
    return -1;
  }

  // A request that starts behind a shared prefix: its first row sees the prefix' window.
  static std::optional<FaultCandidate> find_stale_window(const RunSetup& setup,
                                                         const StepEntry& entry) {
    const bool resumes = entry.starts && entry.begin > 0;
    if (!resumes || entry.begin < entry.first_new) return std::nullopt;
    return FaultCandidate{0, entry.begin / setup.page_size - 1, entry.begin, 0};
  }

  // A row, a decode row if there is one, that leans to an entry, or in a model without any to a
  // token, of a complete page before the rows of the step.
  std::optional<FaultCandidate> find_wrong_page(const RunSetup& setup,
                                                const StepEntry& entry) const {
    int64_t layer = first_layer(setup, kHcaRatio);
    if (layer < 0) layer = first_layer(setup, kCsaRatio);
    if (layer < 0) layer = first_layer(setup, 0);
    const int64_t p = entry.kept_end - 1;
    if (layer < 0 || p < entry.first_new) return std::nullopt;
    const int64_t id = setup.layers[static_cast<size_t>(layer)];
    const int64_t ratio = v4_ratio(setup.model, id);
    const RowToken row{entry.request, p, setup.workload.token_id(entry.request, p)};
    if (ratio > 0 && (p + 1) / ratio == 0) return std::nullopt;
    const int64_t token =
        ratio == 0 ? window_target(setup.seed, id, row, 0, shape_.window)
                   : entry_target(setup.seed, id, row, kEntryGroup, (p + 1) / ratio) * ratio;
    const int64_t page = token / setup.page_size;
    if ((page + 1) * setup.page_size > entry.begin || entry.begin < 2 * setup.page_size) {
      return std::nullopt;
    }
    return FaultCandidate{entry.decode ? 1 : 0, page, p, layer};
  }

  V4Shape shape_;
};

ModelSpec v4_model(const char* name, int64_t num_heads, int64_t topk) {
  ModelSpec model;
  model.name = name;
  model.num_heads = num_heads;
  model.topk = topk;
  model.page.preferred = 256;
  model.page.allows = [](int64_t page) { return page % kHcaRatio == 0; };
  model.page.expected = "128 or 256";
  // Who starts behind a page needs the compressors' states there, which exist after the step.
  model.scheduling.share_within_step = false;
  model.has_draft_layer = true;
  model.injections = {"page", "window"};
  model.family = make_v4_family({});
  return model;
}

// Kinds of layers 2 to last - 1: entries of 4 and of 128 tokens in turn.
void add_alternating(int64_t last, ModelSpec* model) {
  for (int64_t layer = 2; layer < last; ++layer) {
    model->layer_kinds.emplace_back(layer % 2 == 0 ? kCsaKind : kHcaKind);
  }
}

}  // namespace

std::shared_ptr<const ModelFamily> make_v4_family(const V4Shape& shape) {
  return std::make_shared<V4Family>(shape);
}

const V4Shape& v4_shape(const ModelSpec& model) {
  const auto* const family = dynamic_cast<const V4Family*>(model.family.get());
  if (family == nullptr) {
    throw Error(ErrorCode::kInternal, "replay: " + model.name + " is no model of the V4 family");
  }
  return family->shape();
}

int64_t v4_ratio(const ModelSpec& model, int64_t layer) {
  const std::string kind = model.layer_kind(layer);
  if (kind == kCsaKind) return kCsaRatio;
  return kind == kHcaKind ? kHcaRatio : 0;
}

ModelSpec deepseek_v4_flash() {
  ModelSpec model = v4_model("deepseek-v4-flash", 64, 512);
  model.layer_kinds = {kSwaKind, kSwaKind};
  add_alternating(43, &model);
  return model;
}

ModelSpec deepseek_v4_pro() {
  ModelSpec model = v4_model("deepseek-v4-pro", 128, 1024);
  model.layer_kinds = {kHcaKind, kHcaKind};
  add_alternating(61, &model);
  return model;
}

}  // namespace fovea::internal
