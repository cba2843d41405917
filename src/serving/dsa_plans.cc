#include "src/serving/dsa_plans.h"

#include <algorithm>

#include "src/batch/forward_modes.h"
#include "src/serving/dsa_dispatch.h"
#include "src/serving/dsa_shapes.h"

namespace fovea::internal {
namespace {

RowCodecProblem codec_problem(const DsaConfig& config, const DsaLayer& layer, int64_t max_rows) {
  RowCodecProblem problem;
  problem.max_rows = max_rows;
  problem.row_format = config.row_format;
  problem.page_size = config.page_size;
  problem.width = kLatentWidth;
  problem.scale_mode = config.kv_scale_mode;
  problem.k_scale = layer.k_scale;
  return problem;
}

MlaRopeQuantizeProblem rope_problem(const DsaConfig& config, const DsaLayer& layer) {
  MlaRopeQuantizeProblem problem;
  problem.max_rows = config.max_rows;
  problem.num_heads = config.num_heads;
  problem.rope_style = config.rope_style;
  problem.q_scale = layer.q_scale;
  problem.k_scale = layer.k_scale;
  return problem;
}

// A bf16 row is copied bit by bit: 576 codes are 288 of its channels.
RowCodecProblem record_problem(const DsaConfig& config) {
  RowCodecProblem problem;
  problem.max_rows = config.max_rows;
  problem.row_format = RowFormat::kBf16;
  problem.page_size = config.page_size;
  problem.width = kLatentWidth / 2;
  return problem;
}

IndexQuantizeProblem quantize_problem(const DsaConfig& config) {
  IndexQuantizeProblem problem;
  problem.max_rows = config.max_rows;
  problem.num_heads = config.index_heads;
  problem.head_dim = config.index_dim;
  problem.rope_dim = config.rope_dim;
  problem.rope_style = config.index_rope_style;
  problem.hadamard = config.hadamard;
  problem.scale_mode = config.index_scale_mode;
  return problem;
}

IndexSelectProblem select_problem(const DsaConfig& config, IndexTransform transform) {
  IndexSelectProblem problem;
  problem.layout = IndexLayout::kPaged;
  problem.max_rows = config.max_rows;
  problem.max_width = config.table_width;
  problem.num_heads = config.index_heads;
  problem.head_dim = config.index_dim;
  problem.topk = config.topk;
  problem.transform = config.fuse_transform ? transform : IndexTransform::kLocal;
  problem.page_size = config.page_size;
  problem.logits_budget_bytes = config.logits_budget_bytes;
  return problem;
}

SparseMlaProblem attention_problem(const DsaConfig& config, const DsaLayer& layer,
                                   bool contiguous) {
  SparseMlaProblem problem;
  problem.max_rows = config.max_rows;
  problem.num_heads = config.num_heads;
  problem.head_dim_qk = kLatentWidth;
  problem.topk = config.topk;
  problem.softmax_scale = layer.softmax_scale;
  problem.logit_cap = layer.logit_cap;
  problem.row_format = contiguous ? RowFormat::kBf16 : config.row_format;
  problem.page_size = contiguous ? 0 : config.page_size;
  if (config.row_format == RowFormat::kF576) problem.k_scale = layer.k_scale;
  if (config.fuse_rope) problem.q_scale = layer.q_scale;
  problem.split_parts = config.split_parts;
  return problem;
}

MetadataCheckProblem check_problem(const DsaConfig& config, ForwardMode mode) {
  MetadataCheckProblem problem;
  problem.mode = mode;
  problem.max_requests = config.max_requests;
  problem.max_rows = config.max_rows;
  problem.table_width = config.table_width;
  problem.rows_per_request = config.rows_per_request;
  problem.page_size = config.page_size;
  problem.topk = config.topk;
  problem.capacity = config.cache_slots;
  return problem;
}

MhaVarlenProblem mha_problem(const DsaConfig& config, const DsaLayer& layer) {
  MhaVarlenProblem problem;
  problem.max_rows = config.max_rows;
  problem.max_keys = config.mha_chunk_capacity;
  problem.max_requests = config.max_requests;
  problem.num_heads = config.num_heads;
  problem.softmax_scale = layer.softmax_scale;
  return problem;
}

template <class Plan>
size_t bytes_of(const Plan& plan) {
  return plan.workspace_bytes();
}
template <class Plan>
size_t bytes_of(const std::optional<Plan>& plan) {
  return plan ? plan->workspace_bytes() : 0;
}

}  // namespace

MetadataProblem metadata_problem(const DsaConfig& config, ForwardMode mode) {
  MetadataProblem problem;
  problem.mode = mode;
  problem.max_requests = config.max_requests;
  problem.max_rows = config.max_rows;
  problem.table_width = config.table_width;
  problem.rows_per_request = config.rows_per_request;
  problem.topk = config.topk;
  problem.page_size = config.page_size;
  problem.split_parts = config.split_parts;
  // row_offset costs one array and is then there for the contiguous kernel.
  problem.transform = is_extend(mode) ? IndexTransform::kRagged : IndexTransform::kPaged;
  return problem;
}

int64_t followed_split_parts(const DsaConfig& config, const Device& device,
                             const OperatorOptions& options) {
  if (config.split_parts == 0) return 0;
  // Any scale: the choice does not depend on it.
  const SparseMlaProblem problem = attention_problem(config, {0, 1.0f}, false);
  const SparseMla plan = SparseMla::plan(problem, device, options("sparse_mla"));
  return plan.reads_split_schedule() ? config.split_parts : 0;
}

DsaPlans::DsaPlans(const DsaConfig& config, const Device& device, const OperatorOptions& options)
    : quantize(IndexQuantize::plan(quantize_problem(config), device, options("index_quantize"))),
      store(IndexStore::plan({config.max_rows, config.index_dim, config.page_size}, device,
                             options("index_store"))),
      select(IndexSelect::plan(select_problem(config, IndexTransform::kPaged), device,
                               options("index_select"))),
      join_q(ConcatAbsorbedQ::plan({kQueryChunk, config.num_heads}, device,
                                   options("concat_absorbed_q"))) {
  for (int i = 0; is_known(static_cast<ForwardMode>(i)); ++i) {
    const auto mode = static_cast<ForwardMode>(i);
    const MetadataProblem problem = metadata_problem(config, mode);
    refresh.push_back(MetadataRefresh::plan(problem, device, options("metadata_refresh")));
    if (config.verify_metadata) verify.emplace_back(problem, device);
    if (config.check) {
      check.push_back(
          MetadataCheck::plan(check_problem(config, mode), device, options("metadata_check")));
    }
  }
  if (may_run_contiguous(config)) {
    select_ragged = IndexSelect::plan(select_problem(config, IndexTransform::kRagged), device,
                                      options("index_select"));
  }
  if (may_run_fresh(config)) {
    join_k = ConcatAbsorbedQ::plan({config.max_rows, 1}, device, options("concat_absorbed_q"));
  }
}

size_t DsaPlans::workspace_bytes() const {
  size_t bytes = std::max({bytes_of(quantize), bytes_of(store), bytes_of(select),
                           bytes_of(select_ragged), bytes_of(join_q), bytes_of(join_k)});
  for (const MetadataRefresh& plan : refresh) bytes = std::max(bytes, bytes_of(plan));
  for (const MetadataCheck& plan : check) bytes = std::max(bytes, bytes_of(plan));
  return bytes;
}

LayerPlans::LayerPlans(const DsaConfig& config, const DsaLayer& layer_in, const Device& device,
                       const OperatorOptions& options)
    : layer(layer_in),
      pack(PackRows::plan(codec_problem(config, layer, config.max_rows), device,
                          options("pack_rows"))),
      cache_direct(
          SparseMla::plan(attention_problem(config, layer, false), device, options("sparse_mla"))) {
  if (may_run_contiguous(config)) {
    unpack = UnpackRows::plan(codec_problem(config, layer, config.mha_chunk_capacity), device,
                              options("unpack_rows"));
    contiguous =
        SparseMla::plan(attention_problem(config, layer, true), device, options("sparse_mla"));
  }
  if (config.fuse_rope) {
    rope_quantize =
        MlaRopeQuantize::plan(rope_problem(config, layer), device, options("mla_rope_quantize"));
    pack_records = PackRows::plan(record_problem(config), device, options("pack_rows"));
  }
  if (may_run_one_shot(config)) {
    one_shot = MhaVarlen::plan(mha_problem(config, layer), device, options("mha_varlen"));
  }
}

size_t LayerPlans::workspace_bytes() const {
  return std::max({bytes_of(pack), bytes_of(cache_direct), bytes_of(unpack), bytes_of(contiguous),
                   bytes_of(one_shot), bytes_of(rope_quantize), bytes_of(pack_records)});
}

}  // namespace fovea::internal
