#include "src/replay/msa_model.h"

#include <algorithm>
#include <string>

#include "fovea/row_codec.h"
#include "src/core/check.h"
#include "src/replay/msa_engine.h"
#include "src/replay/row_targets.h"

namespace fovea::internal {
namespace {

class MsaFamily final : public ModelFamily {
 public:
  explicit MsaFamily(const MsaShape& shape) : shape_(shape) {}

  const MsaShape& shape() const { return shape_; }

  void check_options(const ReplayOptions& options) const override {
    const int64_t kv_heads = shape_.num_kv_heads;
    if (kv_heads % options.tp != 0 && options.tp % kv_heads != 0) {
      invalid("replay", "tp = " + std::to_string(options.tp) +
                            ", expected a divisor or a multiple "
                            "of the " +
                            std::to_string(kv_heads) + " KV heads");
    }
    const int64_t forced = shape_.init_blocks + shape_.local_blocks;
    if (options.topk > 0 && options.topk < forced) {
      invalid("replay", "topk = " + std::to_string(options.topk) +
                            " blocks, expected at least the " + std::to_string(forced) +
                            " that are always chosen");
    }
  }

  CacheCost cache_cost(const RunSetup& setup) const override {
    const int64_t width = msa_kv_heads(setup) * shape_.head_dim;
    int64_t bytes = 0;
    for (const int64_t layer : setup.layers) {
      bytes += 2 * page_bytes(RowFormat::kBf16, setup.page_size, width);
      if (is_dense_layer(setup.model, layer)) continue;
      bytes += page_bytes(RowFormat::kBf16, setup.page_size, shape_.index_dim);
    }
    return {bytes, 0};
  }

  int64_t selecting_length(const RunSetup& setup) const override {
    return setup.topk * msa_block_size(setup);
  }

  // The best row to be hit by a wrong page: a decode row that selects, else a decode row, else any
  // row. The page is the one that holds the target of its first heads, and none that the step
  // writes.
  std::optional<FaultCandidate> find_fault(const RunSetup& setup, const std::string& /*kind*/,
                                           const StepEntry& entry) const override {
    const int64_t p = entry.kept_end - 1;
    if (p < entry.first_new) return std::nullopt;
    const int64_t layer = first_layer(setup);
    const uint64_t token = setup.workload.token_id(entry.request, p);
    const int64_t page = target_position(setup.seed, setup.layers[static_cast<size_t>(layer)],
                                         {entry.request, p, token}, 0) /
                         setup.page_size;
    // Two complete pages before the rows of the step: one to be replaced, one to replace it.
    if ((page + 1) * setup.page_size > entry.begin || entry.begin < 2 * setup.page_size) {
      return std::nullopt;
    }
    const bool selects = entry.decode && p + 1 > selecting_length(setup);
    return FaultCandidate{(entry.decode ? 1 : 0) + (selects ? 1 : 0), page, p, layer};
  }

  std::unique_ptr<ModelEngine> make_engine(const RunSetup& setup, const RunPlan& plan,
                                           EngineConfig config) const override {
    return std::make_unique<MsaEngine>(setup, plan, std::move(config));
  }

 private:
  // The first simulated layer that selects, else the first one.
  static int64_t first_layer(const RunSetup& setup) {
    for (size_t i = 0; i < setup.layers.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      if (!is_dense_layer(setup.model, setup.layers[i]) && !setup.is_draft(index)) return index;
    }
    return 0;
  }

  MsaShape shape_;
};

}  // namespace

std::shared_ptr<const ModelFamily> make_msa_family(const MsaShape& shape) {
  return std::make_shared<MsaFamily>(shape);
}

const MsaShape& msa_shape(const ModelSpec& model) {
  const auto* const family = dynamic_cast<const MsaFamily*>(model.family.get());
  if (family == nullptr) {
    throw Error(ErrorCode::kInternal, "replay: " + model.name + " is no model of the MSA family");
  }
  return family->shape();
}

bool is_dense_layer(const ModelSpec& model, int64_t layer) {
  return model.layer_kind(layer) == kDenseKind;
}

PageRule msa_page_rule(int64_t block_size) {
  PageRule rule;
  rule.preferred = block_size;
  rule.allows = [block_size](int64_t page) {
    return page % block_size == 0 || block_size % page == 0;
  };
  const std::string block = std::to_string(block_size);
  rule.expected = "a multiple of " + block + " up to 256, or a divisor of it";
  return rule;
}

int64_t msa_block_size(const RunSetup& setup) {
  return std::min(msa_shape(setup.model).block_size, setup.page_size);
}

int64_t msa_kv_heads(const RunSetup& setup) {
  return std::max<int64_t>(1, msa_shape(setup.model).num_kv_heads / setup.tp);
}

ModelSpec minimax_m3() {
  const MsaShape shape;
  ModelSpec model;
  model.name = "minimax-m3";
  model.num_heads = 64;
  model.topk = 16;
  model.page = msa_page_rule(shape.block_size);
  model.layer_kinds.assign(60, kSparseKind);
  std::fill_n(model.layer_kinds.begin(), 3, kDenseKind);
  model.has_draft_layer = true;
  model.injections = {"page"};
  model.family = make_msa_family(shape);
  return model;
}

}  // namespace fovea::internal
