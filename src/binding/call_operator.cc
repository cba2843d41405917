#include "fovea/call_operator.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "fovea/error.h"
#include "src/binding/bindings.h"

namespace fovea {
namespace {

struct Binding {
  std::string_view op;
  void (*run)(internal::NamedCall& call);
};

// Sorted by name.
const std::vector<Binding>& bindings() {
  using namespace internal;  // NOLINT: the table is all that uses it
  static const std::vector<Binding> list = {
      {"build_page_table", run_build_page_table},
      {"build_swa_indices", run_build_swa_indices},
      {"causal_conv1d", run_causal_conv1d},
      {"concat_absorbed_q", run_concat_absorbed_q},
      {"context_split", run_context_split},
      {"dense_mla", run_dense_mla},
      {"index_gather", run_index_gather},
      {"index_logits", run_index_logits},
      {"index_quantize", run_index_quantize},
      {"index_select", run_index_select},
      {"index_store", run_index_store},
      {"kda_commit", run_kda_commit},
      {"kda_decode", run_kda_decode},
      {"kda_gate", run_kda_gate},
      {"kda_prefill", run_kda_prefill},
      {"kda_stage_gate", run_kda_stage_gate},
      {"kda_stage_inter", run_kda_stage_inter},
      {"kda_stage_intra", run_kda_stage_intra},
      {"kda_stage_output", run_kda_stage_output},
      {"kda_verify", run_kda_verify},
      {"merge_lse", run_merge_lse},
      {"metadata_check", run_metadata_check},
      {"metadata_refresh", run_metadata_refresh},
      {"mha_varlen", run_mha_varlen},
      {"mla_rope_quantize", run_mla_rope_quantize},
      {"move_rows", run_move_rows},
      {"msa_attend", run_msa_attend},
      {"msa_block_scores", run_msa_block_scores},
      {"msa_score_select", run_msa_score_select},
      {"msa_select_blocks", run_msa_select_blocks},
      {"pack_rows", run_pack_rows},
      {"paged_schedule", run_paged_schedule},
      {"sparse_mla", run_sparse_mla},
      {"split_schedule", run_split_schedule},
      {"swa_decode", run_swa_decode},
      {"topk_select", run_topk_select},
      {"unpack_rows", run_unpack_rows},
      {"v4_compress", run_v4_compress},
  };
  return list;
}

}  // namespace

std::vector<std::string> callable_operators() {
  std::vector<std::string> names;
  for (const Binding& binding : bindings()) names.emplace_back(binding.op);
  return names;
}

CallRecord::CallRecord() = default;
CallRecord::~CallRecord() = default;

bool CallRecord::is_repeatable() const noexcept { return call_ != nullptr && call_->repeatable; }

const CallOutcome& CallRecord::repeat(CallTensors& tensors) const {
  internal::NamedCall call(*call_, tensors);
  call_->run(call);
  return call_->outcome;
}

CallOutcome call_operator(std::string_view op, CallTensors& tensors, const Json& params,
                          const Device& device, const Options& options, CallRecord* record) {
  const auto binding = std::find_if(bindings().begin(), bindings().end(),
                                    [&](const Binding& entry) { return entry.op == op; });
  if (binding == bindings().end()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no operator '" + std::string(op) + "'");
  }
  std::unique_ptr<internal::RecordedCall> recorded;
  if (record != nullptr) recorded = std::make_unique<internal::RecordedCall>();
  internal::NamedCall call(std::string(op), tensors, params, device, options, recorded.get());
  binding->run(call);
  CallOutcome outcome = std::move(call).outcome();
  if (record != nullptr) {
    recorded->run = binding->run;
    recorded->outcome = outcome;
    record->call_ = std::move(recorded);
  }
  return outcome;
}

}  // namespace fovea
