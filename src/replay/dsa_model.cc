#include "src/replay/dsa_model.h"

#include "fovea/error.h"
#include "fovea/row_codec.h"
#include "src/replay/dsa_engine.h"

namespace fovea::internal {
namespace {

class DsaFamily final : public ModelFamily {
 public:
  explicit DsaFamily(const DsaShape& shape) : shape_(shape) {}

  const DsaShape& shape() const { return shape_; }

  CacheCost cache_cost(const RunSetup& setup) const override {
    const auto layers = static_cast<int64_t>(setup.layers.size());
    return {layers * (page_bytes(shape_.row_format, setup.page_size, kDsaRowWidth) +
                      page_bytes(RowFormat::kI132, setup.page_size, shape_.index_dim)),
            0};
  }

  int64_t selecting_length(const RunSetup& setup) const override { return setup.topk; }

  // The best row to be hit by a wrong page: a decode row longer than topk, else a decode row, else
  // any row. The page is the one that holds the row's first target, and none that the step writes.
  std::optional<FaultCandidate> find_fault(const RunSetup& setup, const std::string& /*kind*/,
                                           const StepEntry& entry) const override {
    const int64_t p = entry.kept_end - 1;
    if (p < entry.first_new) return std::nullopt;
    const uint64_t token = setup.workload.token_id(entry.request, p);
    const int64_t page =
        target_position(setup.seed, setup.layers.front(), {entry.request, p, token}, 0) /
        setup.page_size;
    // Two complete pages before the rows of the step: one to be replaced, one to replace it.
    if ((page + 1) * setup.page_size > entry.begin || entry.begin < 2 * setup.page_size) {
      return std::nullopt;
    }
    const int rank = (entry.decode ? 1 : 0) + (entry.decode && p + 1 > setup.topk ? 1 : 0);
    return FaultCandidate{rank, page, p, 0};
  }

  std::unique_ptr<ModelEngine> make_engine(const RunSetup& setup, const RunPlan& plan,
                                           EngineConfig config) const override {
    return std::make_unique<DsaEngine>(setup, plan, std::move(config));
  }

 private:
  DsaShape shape_;
};

}  // namespace

std::shared_ptr<const ModelFamily> make_dsa_family(const DsaShape& shape) {
  return std::make_shared<DsaFamily>(shape);
}

const DsaShape& dsa_shape(const ModelSpec& model) {
  const auto* const family = dynamic_cast<const DsaFamily*>(model.family.get());
  if (family == nullptr) {
    throw Error(ErrorCode::kInternal, "replay: " + model.name + " is no model of the DSA family");
  }
  return family->shape();
}

ModelSpec deepseek_v32() {
  DsaShape shape;
  shape.index_heads = 64;
  shape.index_dim = 128;
  shape.rope_dim = 64;
  // (128 + 64)^-1/2 * m^2 with m = 0.1 * ln(40) + 1: context extended by a factor of 40.
  shape.softmax_scale = 0.1352337788608801f;
  ModelSpec model;
  model.name = "deepseek-v3.2";
  model.num_heads = 128;
  model.topk = 2048;
  model.page.preferred = 64;
  model.layer_kinds.assign(61, "dsa");
  model.has_draft_layer = true;
  model.injections = {"page"};
  model.family = make_dsa_family(shape);
  return model;
}

}  // namespace fovea::internal
