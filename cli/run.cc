// fovea run: one operator on tensors from a file.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/operator_call.h"
#include "cli/run_bindings.h"
#include "cli/verbs.h"
#include "fovea/error.h"
#include "fovea/json.h"
#include "fovea/safetensors.h"

namespace fovea::cli {
namespace {

void check_implementation(const std::string& op, const std::string& name) {
  if (name.empty()) return;
  std::string known;
  for (const OperatorInfo& info : operators()) {
    if (info.name != op) continue;
    for (const ImplementationInfo& entry : info.implementations) {
      if (entry.name == name) return;
      known += (known.empty() ? "" : ", ") + entry.name;
    }
  }
  if (known.empty()) {
    throw UsageError(
        fmt::format("{} is a function of host values, without implementations to choose from", op));
  }
  throw UsageError(fmt::format("{} has no implementation '{}'; it has: {}", op, name, known));
}

Json parse_params(const TensorFile& file, const std::string& path) {
  const auto params = file.metadata.find("params");
  return params == file.metadata.end() ? Json::object()
                                       : Json::parse(params->second, path + ": params");
}

void print_result(const RunOptions& options, const OperatorCall& call, const TensorMap& outputs) {
  if (options.json) {
    Json shapes = Json::object();
    for (const std::string& name : outputs.names()) {
      shapes.set(name, to_string(outputs.find(name)));
    }
    const Json result = Json::object({{"operator", options.op},
                                      {"implementation", call.implementation().name},
                                      {"device", to_string(call.device())},
                                      {"output", options.output_path},
                                      {"tensors", std::move(shapes)}});
    fmt::print("{}\n", result.dump(2));
    return;
  }
  fmt::print("{}: implementation {} on {}, written to {}\n", options.op, call.implementation().name,
             to_string(call.device()), options.output_path);
  for (const std::string& name : outputs.names()) {
    fmt::print("  {:<16} {}\n", name, to_string(outputs.find(name)));
  }
}

}  // namespace

const std::vector<Binding>& bindings() {
  static const std::vector<Binding> list = {
      {"build_page_table", run_build_page_table},
      {"build_swa_indices", run_build_swa_indices},
      {"causal_conv1d", run_causal_conv1d},
      {"concat_absorbed_q", run_concat_absorbed_q},
      {"context_split", run_context_split},
      {"dense_mla", run_dense_mla},
      {"index_logits", run_index_logits},
      {"index_quantize", run_index_quantize},
      {"index_select", run_index_select},
      {"kda_commit", run_kda_commit},
      {"kda_decode", run_kda_decode},
      {"kda_gate", run_kda_gate},
      {"kda_prefill", run_kda_prefill},
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

const Binding& find_binding(const std::string& op) {
  const auto found = std::find_if(bindings().begin(), bindings().end(),
                                  [&](const Binding& binding) { return binding.op == op; });
  if (found != bindings().end()) return *found;
  std::string known;
  for (const Binding& binding : bindings()) {
    known += (known.empty() ? "" : ", ") + std::string(binding.op);
  }
  throw UsageError(fmt::format("unknown operator '{}'; this build has: {}", op, known));
}

int run(const RunOptions& options) {
  const Binding& binding = find_binding(options.op);
  check_implementation(options.op, options.settings.implementation);
  const Device device = options.settings.parsed_device();
  const TensorFile input = read_safetensors(options.input_path);
  const Json params = parse_params(input, options.input_path);
  OperatorCall call(options.op, input.tensors, params, device,
                    Options{options.settings.implementation});
  binding.run(call);
  TensorFile output;
  output.tensors = call.take_outputs();
  write_safetensors(options.output_path, output);
  for (const std::string& note : call.notes()) fmt::print(stderr, "fovea: {}\n", note);
  print_result(options, call, output.tensors);
  return kExitOk;
}

}  // namespace fovea::cli
