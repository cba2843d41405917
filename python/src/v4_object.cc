// The class V4Backend of the module.

#include "fovea/v4_backend.h"
#include "python/src/serving.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

using V4Object = BackendObject<V4Backend, V4StepPlan>;
using V4Plan = V4Object::Plan;

void read_config(const Fields& read, V4BackendConfig* config) {
  const Fields::Words<RowFormat> formats = {{"v4", RowFormat::kV4}, {"bf16", RowFormat::kBf16}};
  read("num_heads", &config->num_heads);
  read("softmax_scale", &config->softmax_scale);
  read("window", &config->window);
  read("window_storage", &config->window_storage,
       {{"token_pages", V4WindowStorage::kTokenPages},
        {"paged", V4WindowStorage::kPaged},
        {"ring", V4WindowStorage::kRing}});
  read("window_page_size", &config->window_page_size);
  read("max_request_rows", &config->max_request_rows);
  read("window_format", &config->window_format, formats);
  read("compressed_format", &config->compressed_format, formats);
  read("csa", &config->csa);
  read("hca", &config->hca);
  read("csa_state_tokens", &config->csa_state_tokens);
  read("hca_state_tokens", &config->hca_state_tokens);
  read("hca_form", &config->hca_form,
       {{"stored", CompressorForm::kStored}, {"online", CompressorForm::kOnline}});
  read("index_heads", &config->index_heads);
  read("topk", &config->topk);
  read("index_scale_mode", &config->index_scale_mode,
       {{"fp32", ScaleMode::kFp32}, {"pow2", ScaleMode::kPow2}});
  read("eps", &config->eps);
  read("page_size", &config->page_size);
  read("table_width", &config->table_width);
  read("max_requests", &config->max_requests);
  read("max_rows", &config->max_rows);
  read("rows_per_request", &config->rows_per_request);
  read("logits_budget_bytes", &config->logits_budget_bytes);
  read("deterministic", &config->deterministic);
  read("strict", &config->strict);
  read("implementation", &config->implementation);
}

V4Batch read_batch(const V4Object& /*self*/, const Fields& read, Step* step) {
  V4Batch batch;
  const PythonCallTensors& tensors = *step->tensors;
  batch.forward = read_forward_batch(read, step);
  batch.window_table = tensors.find("window_table");
  batch.in_slot = tensors.find("in_slot");
  batch.out_slot = tensors.find("out_slot");
  batch.snapshot_seq = tensors.find("snapshot_seq");
  batch.snapshot_pos = tensors.find("snapshot_pos");
  batch.snapshot_slot = tensors.find("snapshot_slot");
  read("kv_len_delta", &batch.kv_len_delta);
  return batch;
}

// The tensors of a compressor, whose names begin with `prefix`.
V4Compressor read_compressor(const std::string& prefix, PythonCallTensors* bound) {
  V4Compressor compressor;
  compressor.kv_gate = bound->find(prefix + "kv_gate");
  compressor.ape = bound->find(prefix + "ape");
  compressor.norm_weight = bound->find(prefix + "norm_weight");
  compressor.state = bound->update_if_given(prefix + "state");
  compressor.pool = bound->update_if_given(prefix + "pool");
  return compressor;
}

V4ForwardTensors read_inputs(PythonCallTensors* bound) {
  V4ForwardTensors t;
  t.q = bound->find("q");
  t.kv = bound->find("kv");
  t.sink = bound->find("sink");
  t.cos_sin = bound->find("cos_sin");
  t.window_pool = bound->update_if_given("window_pool");
  t.compressor = read_compressor("compressor_", bound);
  t.indexer = read_compressor("indexer_", bound);
  t.index_q = bound->find("index_q");
  t.head_gate = bound->find("head_gate");
  return t;
}

int64_t read_ratio(const std::string& label, const nb::dict& params) {
  const Json json = to_params(label, params);
  int64_t ratio = 0;
  Fields(label, json)("ratio", &ratio);
  return ratio;
}

nb::dict forward(V4Object& self, const nb::dict& params, nb::dict tensors, nb::dict out,
                 nb::tuple unwanted, V4Plan* plan, nb::object stream) {
  const auto bound = bind_tensors(self, "forward", std::move(tensors), std::move(out),
                                  std::move(unwanted), std::move(stream));
  const int64_t ratio = read_ratio(self.name + ".forward", params);
  const InUse in_use(self.name, &self.in_use);
  V4ForwardTensors t = read_inputs(bound.get());
  const V4BackendConfig& config = self.backend.config();
  const int64_t rows = self.rows(plan);
  bound->expect_outputs({"out", "lse", "indices"});
  t.out = bound->result("out", DType::kBf16, {rows, config.num_heads, 512});
  t.lse = bound->result("lse", DType::kF32, {rows, config.num_heads});
  t.indices = bound->result_if_wanted("indices", DType::kI32, {rows, config.topk});
  bound->run(0, [&](Workspace, Stream on) {
    if (plan == nullptr) {
      self.backend.forward(ratio, t, on);
    } else {
      self.backend.forward(plan->plan, ratio, t, on);
    }
  });
  return bound->results();
}

// With the tensors of the forward, outputs included, which are not looked into.
void commit(V4Object& self, const V4Plan& plan, const nb::dict& params, nb::dict tensors,
            nb::dict out, nb::object stream) {
  const auto bound = bind_tensors(self, "commit", std::move(tensors), std::move(out), nb::tuple(),
                                  std::move(stream));
  const int64_t ratio = read_ratio(self.name + ".commit", params);
  const InUse in_use(self.name, &self.in_use);
  V4ForwardTensors t = read_inputs(bound.get());
  t.out = bound->given_output("out");
  t.lse = bound->given_output("lse");
  const ConstTensorView accepted = bound->find("accepted");
  bound->run(0,
             [&](Workspace, Stream on) { self.backend.commit(plan.plan, ratio, t, accepted, on); });
}

nb::dict routes(const V4Object& self) {
  const V4Routes& routes = self.backend.routes();
  nb::dict result;
  result["idle"] = routes.idle;
  result["window"] = routes.window;
  result["all"] = routes.all;
  result["selected"] = routes.selected;
  result["pages"] = routes.pages;
  result["snapshot"] = routes.snapshot;
  result["commits"] = routes.commits;
  result["fallback"] = routes.fallback;
  return result;
}

}  // namespace

void bind_v4_backend(nb::module_& module) {
  bind_backend<V4Object>(module, "V4Backend", read_config, read_batch)
      .def("forward", &forward, nb::arg("params"), nb::arg("tensors"), nb::arg("out"),
           nb::arg("unwanted"), nb::arg("plan").none(), nb::arg("stream").none(),
           "One layer: results by name.")
      .def("commit", &commit, nb::arg("plan"), nb::arg("params"), nb::arg("tensors"),
           nb::arg("out"), nb::arg("stream").none(),
           "Makes the accepted rows of a verify the states.")
      .def("routes", &routes, "How many forwards took which way.");
}

}  // namespace fovea::python
