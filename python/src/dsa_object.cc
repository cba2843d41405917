// The class DsaBackend of the module.

#include "python/src/serving.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

using DsaObject = BackendObject<DsaBackend, DsaStepPlan>;
using DsaPlan = DsaObject::Plan;

void read_config(const Fields& read, DsaConfig* config) {
  read("num_heads", &config->num_heads);
  read("index_heads", &config->index_heads);
  read("index_dim", &config->index_dim);
  read("rope_dim", &config->rope_dim);
  read("topk", &config->topk);
  read("page_size", &config->page_size);
  read("row_format", &config->row_format,
       {{"bf16", RowFormat::kBf16},
        {"v32", RowFormat::kV32},
        {"i132", RowFormat::kI132},
        {"v4", RowFormat::kV4},
        {"r512", RowFormat::kR512},
        {"f576", RowFormat::kF576}});
  const Fields::Words<ScaleMode> scales = {{"fp32", ScaleMode::kFp32}, {"pow2", ScaleMode::kPow2}};
  const Fields::Words<RopeStyle> styles = {{"half_split", RopeStyle::kHalfSplit},
                                           {"interleaved", RopeStyle::kInterleaved}};
  read("kv_scale_mode", &config->kv_scale_mode, scales);
  read("index_scale_mode", &config->index_scale_mode, scales);
  read("index_rope_style", &config->index_rope_style, styles);
  read("hadamard", &config->hadamard);
  read("max_requests", &config->max_requests);
  read("max_rows", &config->max_rows);
  read("table_width", &config->table_width);
  read("rows_per_request", &config->rows_per_request);
  read("draft_topk", &config->draft_topk);
  read("deterministic", &config->deterministic);
  read("force_absorbed", &config->force_absorbed);
  read("context_parallel", &config->context_parallel);
  read("extend_kv_source", &config->extend_kv_source,
       {{"cache", ExtendKvSource::kCache}, {"fresh", ExtendKvSource::kFresh}});
  read("mha_chunk_capacity", &config->mha_chunk_capacity);
  read("logits_budget_bytes", &config->logits_budget_bytes);
  read("implementation", &config->implementation);
  read("prefill_implementation", &config->prefill_implementation);
  read("decode_implementation", &config->decode_implementation);
  read("contiguous_kv_ratio", &config->contiguous_kv_ratio);
  read("split_parts", &config->split_parts);
  read("strict", &config->strict);
  read("fuse_transform", &config->fuse_transform);
  read("fuse_rope", &config->fuse_rope);
  read("rope_style", &config->rope_style, styles);
  read("verify_metadata", &config->verify_metadata);
  read("check", &config->check);
  read("cache_slots", &config->cache_slots);
}

// The rank's part of the batch, from the host lengths that it needs.
void read_context_split(const Fields& read, ExtendKvSource source, Step* step,
                        ForwardBatch* batch) {
  if (!read.has("ranks")) return;
  ContextSplitProblem problem;
  problem.extend_kv_source = source;
  read("ranks", &problem.ranks);
  read("rank", &problem.rank);
  read("scheme", &problem.scheme,
       {{"round_robin", ContextScheme::kRoundRobin}, {"zigzag", ContextScheme::kZigzag}});
  step->context_split = context_split(problem, batch->host_seq_len, batch->host_ext_len);
  batch->context_split = &*step->context_split;
}

ForwardBatch read_batch(const DsaObject& self, const Fields& read, Step* step) {
  ForwardBatch batch = read_forward_batch(read, step);
  read_context_split(read, self.backend.config().extend_kv_source, step, &batch);
  return batch;
}

DsaForwardTensors read_tensors(const DsaObject& self, const DsaPlan* plan,
                               PythonCallTensors* bound) {
  DsaForwardTensors t;
  t.q = bound->find("q");
  t.q_nope = bound->find("q_nope");
  t.q_rope = bound->find("q_rope");
  t.k = bound->find("k");
  t.k_latent = bound->find("k_latent");
  t.k_rope = bound->find("k_rope");
  t.index_q = bound->find("index_q");
  t.index_k = bound->find("index_k");
  t.norm_weight = bound->find("norm_weight");
  t.norm_bias = bound->find("norm_bias");
  t.head_gate = bound->find("head_gate");
  t.cos_sin = bound->find("cos_sin");
  t.mla_cos_sin = bound->find("mla_cos_sin");
  t.topk_indices = bound->find("topk_indices");
  t.q_mha = bound->find("q_mha");
  t.k_mha = bound->find("k_mha");
  t.v_mha = bound->find("v_mha");
  t.kv_pool = bound->update_if_given("kv_pool");
  t.index_pool = bound->update_if_given("index_pool");
  const DsaConfig& config = self.backend.config();
  const int64_t rows = self.rows(plan);
  const DsaDispatch& dispatch = plan == nullptr ? self.backend.dispatch() : plan->plan.dispatch();
  bound->expect_outputs({"out", "lse", "indices"});
  // `out` is the output of whichever form runs.
  if (dispatch.one_shot) {
    t.out_mha = bound->result("out", DType::kBf16, {rows, config.num_heads, 128});
  } else {
    t.out = bound->result("out", DType::kBf16, {rows, config.num_heads, 512});
  }
  t.lse = bound->result("lse", DType::kF32, {rows, config.num_heads});
  t.indices = bound->result_if_wanted("indices", DType::kI32, {rows, config.topk});
  return t;
}

nb::dict forward(DsaObject& self, const nb::dict& params, nb::dict tensors, nb::dict out,
                 nb::tuple unwanted, DsaPlan* plan, nb::object stream) {
  const std::string label = self.name + ".forward";
  const auto bound = bind_tensors(self, "forward", std::move(tensors), std::move(out),
                                  std::move(unwanted), std::move(stream));
  const Json json = to_params(label, params);
  const Fields read(label, json);
  DsaLayer layer;
  read("layer", &layer.id);
  read("softmax_scale", &layer.softmax_scale);
  read("logit_cap", &layer.logit_cap);
  read("q_scale", &layer.q_scale);
  read("k_scale", &layer.k_scale);
  const InUse in_use(self.name, &self.in_use);
  DsaForwardTensors t = read_tensors(self, plan, bound.get());
  read("save_kv", &t.save_kv);
  bound->run(0, [&](Workspace, Stream on) {
    if (plan == nullptr) {
      self.backend.forward(layer, t, on);
    } else {
      self.backend.forward(plan->plan, layer, t, on);
    }
  });
  return bound->results();
}

// Steps of a chain: (plan, positions, out_cache_loc, kv_len_delta or None) each.
void begin_draft_steps(DsaObject& self, const nb::dict& params, const nb::dict& tensors,
                       const nb::list& steps, nb::object stream) {
  const std::string label = self.name + ".begin_draft_steps";
  const Json json = to_params(label, params);
  nb::dict all(tensors);
  std::vector<DraftStep> chain;
  std::vector<DsaPlan*> plans;
  for (size_t i = 0; i < nb::len(steps); ++i) {
    const nb::tuple entry = nb::cast<nb::tuple>(steps[i]);
    const std::string suffix = "[" + std::to_string(i) + "]";
    all[("positions" + suffix).c_str()] = entry[1];
    all[("out_cache_loc" + suffix).c_str()] = entry[2];
    if (!nb::isinstance<DsaPlan>(entry[0])) {
      throw Error(ErrorCode::kInvalidArgument, label + ": the plan of step " + std::to_string(i) +
                                                   " belongs to another backend");
    }
    plans.push_back(nb::cast<DsaPlan*>(entry[0]));
    DraftStep step;
    step.plan = &plans.back()->plan;
    if (!nb::object(entry[3]).is_none()) {
      nb::dict delta;
      delta["kv_len_delta"] = entry[3];
      const Json value = to_params(label, delta);
      int32_t number = 0;
      Fields(label, value)("kv_len_delta", &number);
      step.kv_len_delta = number;
    }
    chain.push_back(step);
  }
  auto bound =
      bind_tensors(self, "begin_draft_steps", all, nb::dict(), nb::tuple(), std::move(stream));
  for (size_t i = 0; i < chain.size(); ++i) {
    const std::string suffix = "[" + std::to_string(i) + "]";
    chain[i].positions = bound->find("positions" + suffix);
    chain[i].out_cache_loc = bound->find("out_cache_loc" + suffix);
  }
  ForwardBatch batch;
  batch.mode = ForwardMode::kDecode;
  batch.seq_len = bound->find("seq_len");
  batch.pool_row = bound->find("pool_row");
  batch.req_to_token = bound->find("req_to_token");
  if (batch.seq_len.rank > 0) batch.num_rows = batch.seq_len.shape[0];
  const Fields read(label, json);
  read("num_rows", &batch.num_rows);
  read("padded_rows", &batch.padded_rows);
  const InUse in_use(self.name, &self.in_use);
  bound->run(0, [&](Workspace, Stream on) { self.backend.begin_draft_steps(batch, chain, on); });
  const std::shared_ptr<PythonCallTensors> kept(std::move(bound));
  for (DsaPlan* plan : plans) plan->chain = kept;
}

nb::dict export_dispatch(const DsaDispatch& dispatch) {
  nb::dict result;
  result["kernel"] = std::string(to_string(dispatch.kernel));
  result["one_shot"] = dispatch.one_shot;
  result["skip_selection"] = dispatch.skip_selection;
  result["fresh_kv"] = dispatch.fresh_kv;
  result["transform"] = std::string(to_string(dispatch.transform));
  nb::list reasons;
  for (const std::string_view reason : dispatch.reasons) reasons.append(std::string(reason));
  result["reasons"] = reasons;
  return result;
}

}  // namespace

void bind_dsa_backend(nb::module_& module) {
  bind_backend<DsaObject>(module, "DsaBackend", read_config, read_batch)
      .def("begin_draft_steps", &begin_draft_steps, nb::arg("params"), nb::arg("tensors"),
           nb::arg("steps"), nb::arg("stream").none(), "Begins the steps of a chain of drafts.")
      .def("forward", &forward, nb::arg("params"), nb::arg("tensors"), nb::arg("out"),
           nb::arg("unwanted"), nb::arg("plan").none(), nb::arg("stream").none(),
           "One layer: results by name.")
      .def(
          "dispatch",
          [](const DsaObject& self, const DsaPlan* plan) {
            return export_dispatch(plan == nullptr ? self.backend.dispatch()
                                                   : plan->plan.dispatch());
          },
          nb::arg("plan").none(), "What runs in the step, and why.")
      .def(
          "report",
          [](DsaObject& self, const DsaPlan* plan) {
            const InUse in_use(self.name, &self.in_use);
            const nb::gil_scoped_release release;
            return to_string(plan == nullptr ? self.backend.report() : plan->plan.report());
          },
          nb::arg("plan").none(), "What the last begin_step found in the device contents.");
}

}  // namespace fovea::python
