// The class KdaBackend of the module.

#include "fovea/kda_backend.h"
#include "python/src/serving.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

using KdaObject = BackendObject<KdaBackend, KdaStepPlan>;
using KdaPlan = KdaObject::Plan;

void read_layer(const Fields& read, KdaLayer* layer) {
  const Fields::Words<DType> floats = {{"bf16", DType::kBf16}, {"f32", DType::kF32}};
  read("num_heads", &layer->num_heads);
  read("num_value_heads", &layer->num_value_heads);
  read("head_dim_k", &layer->head_dim_k);
  read("head_dim_v", &layer->head_dim_v);
  read("gate", &layer->gate.kind,
       {{"softplus", GateKind::kSoftplus},
        {"lower_bound", GateKind::kLowerBound},
        {"given", GateKind::kGiven}});
  read("lower_bound", &layer->gate.lower_bound);
  read("gate_dtype", &layer->gate.dtype, floats);
  read("beta_kind", &layer->beta_kind, {{"prob", BetaKind::kProb}, {"logit", BetaKind::kLogit}});
  read("allow_neg_eigval", &layer->allow_neg_eigval);
  read("normalise", &layer->normalise);
  read("scale", &layer->scale);
  read("beta_dtype", &layer->beta_dtype, floats);
  read("state_dtype", &layer->state_dtype, floats);
}

void read_config(const Fields& read, KdaBackendConfig* config) {
  const Fields::Words<DType> floats = {{"bf16", DType::kBf16}, {"f32", DType::kF32}};
  read_layer(read, &config->layer);
  read("num_layers", &config->num_layers);
  read("convolution", &config->convolution);
  read("window_layout", &config->window_layout,
       {{"wd", WindowLayout::kWd}, {"dw", WindowLayout::kDw}});
  read("conv_weight_dtype", &config->conv_weight_dtype, floats);
  read("conv_bias_dtype", &config->conv_bias_dtype, floats);
  read("num_mla_heads", &config->num_mla_heads);
  read("page_size", &config->page_size);
  read("table_width", &config->table_width);
  read("max_requests", &config->max_requests);
  read("max_rows", &config->max_rows);
  read("rows_per_request", &config->rows_per_request);
  read("max_snapshots", &config->max_snapshots);
  read("verify_mode", &config->verify_mode,
       {{"states", VerifyMode::kStates}, {"records", VerifyMode::kRecords}});
  read("commit", &config->commit,
       {{"direct", CommitMode::kDirect}, {"staged", CommitMode::kStaged}});
  read("deterministic", &config->deterministic);
  read("strict", &config->strict);
  read("check", &config->check);
  read("implementation", &config->implementation);
}

KdaBatch read_batch(const KdaObject& /*self*/, const Fields& read, Step* step) {
  KdaBatch batch;
  const PythonCallTensors& tensors = *step->tensors;
  batch.forward = read_forward_batch(read, step);
  batch.in_slot = tensors.find("in_slot");
  batch.out_slot = tensors.find("out_slot");
  batch.has_initial_state = tensors.find("has_initial_state");
  batch.snapshot_seq = tensors.find("snapshot_seq");
  batch.snapshot_pos = tensors.find("snapshot_pos");
  batch.snapshot_slot = tensors.find("snapshot_slot");
  read("kv_len_delta", &batch.kv_len_delta);
  return batch;
}

nb::dict forward_kda(KdaObject& self, const nb::dict& params, nb::dict tensors, nb::dict out,
                     KdaPlan* plan, nb::object stream) {
  const std::string label = self.name + ".forward_kda";
  const auto bound = bind_tensors(self, "forward_kda", std::move(tensors), std::move(out),
                                  nb::tuple(), std::move(stream));
  const Json json = to_params(label, params);
  int64_t layer = 0;
  Fields(label, json)("layer", &layer);
  const InUse in_use(self.name, &self.in_use);
  KdaForwardTensors t;
  t.qkv = bound->find("qkv");
  t.g = bound->find("g");
  t.beta = bound->find("beta");
  t.a_log = bound->find("a_log");
  t.dt_bias = bound->find("dt_bias");
  t.conv_weight = bound->find("conv_weight");
  t.conv_bias = bound->find("conv_bias");
  t.state = bound->update_if_given("state");
  t.window = bound->update_if_given("window");
  const KdaLayer& shape = self.backend.config().layer;
  bound->expect_outputs({"out"});
  t.out = bound->result("out", DType::kBf16,
                        {self.rows(plan), shape.num_value_heads, shape.head_dim_v});
  bound->run(0, [&](Workspace, Stream on) {
    if (plan == nullptr) {
      self.backend.forward_kda(layer, t, on);
    } else {
      self.backend.forward_kda(plan->plan, layer, t, on);
    }
  });
  return bound->results();
}

nb::dict forward_mla(KdaObject& self, const nb::dict& params, nb::dict tensors, nb::dict out,
                     KdaPlan* plan, nb::object stream) {
  const std::string label = self.name + ".forward_mla";
  const auto bound = bind_tensors(self, "forward_mla", std::move(tensors), std::move(out),
                                  nb::tuple(), std::move(stream));
  const Json json = to_params(label, params);
  const InUse in_use(self.name, &self.in_use);
  KdaMlaTensors t;
  Fields(label, json)("softmax_scale", &t.softmax_scale);
  t.q = bound->find("q");
  t.k = bound->find("k");
  t.kv_pool = bound->update_if_given("kv_pool");
  const int64_t rows = self.rows(plan);
  const int64_t heads = self.backend.config().num_mla_heads;
  bound->expect_outputs({"out", "lse"});
  t.out = bound->result("out", DType::kBf16, {rows, heads, 512});
  t.lse = bound->result("lse", DType::kF32, {rows, heads});
  bound->run(0, [&](Workspace, Stream on) {
    if (plan == nullptr) {
      self.backend.forward_mla(t, on);
    } else {
      self.backend.forward_mla(plan->plan, t, on);
    }
  });
  return bound->results();
}

void commit(KdaObject& self, const KdaPlan& plan, nb::dict tensors, nb::object stream) {
  const auto bound =
      bind_tensors(self, "commit", std::move(tensors), nb::dict(), nb::tuple(), std::move(stream));
  const InUse in_use(self.name, &self.in_use);
  KdaCommitInputs inputs;
  inputs.accepted = bound->find("accepted");
  inputs.track_slot = bound->find("track_slot");
  inputs.track_accepted = bound->find("track_accepted");
  inputs.state = bound->update_if_given("state");
  inputs.window = bound->update_if_given("window");
  bound->run(0, [&](Workspace, Stream on) { self.backend.commit(plan.plan, inputs, on); });
}

nb::dict routes(const KdaObject& self) {
  const KdaRoutes& routes = self.backend.routes();
  nb::dict result;
  result["idle"] = routes.idle;
  result["single"] = routes.single;
  result["packed"] = routes.packed;
  result["snapshot"] = routes.snapshot;
  result["decode"] = routes.decode;
  result["verified"] = routes.verified;
  result["speculative"] = routes.speculative;
  result["commits"] = routes.commits;
  result["fallback"] = routes.fallback;
  result["restored"] = routes.restored;
  return result;
}

}  // namespace

void bind_kda_backend(nb::module_& module) {
  bind_backend<KdaObject>(module, "KdaBackend", read_config, read_batch)
      .def("forward_kda", &forward_kda, nb::arg("params"), nb::arg("tensors"), nb::arg("out"),
           nb::arg("plan").none(), nb::arg("stream").none(), "One KDA layer: results by name.")
      .def("forward_mla", &forward_mla, nb::arg("params"), nb::arg("tensors"), nb::arg("out"),
           nb::arg("plan").none(), nb::arg("stream").none(),
           "One full-attention layer: results by name.")
      .def("commit", &commit, nb::arg("plan"), nb::arg("tensors"), nb::arg("stream").none(),
           "Makes the accepted rows of a verify the states.")
      .def("routes", &routes, "How many forwards took which way.");
}

}  // namespace fovea::python
