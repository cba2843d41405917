// The class MsaBackend of the module.

#include "fovea/msa_backend.h"
#include "python/src/serving.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

using MsaObject = BackendObject<MsaBackend, MsaStepPlan>;
using MsaPlan = MsaObject::Plan;

void read_config(const Fields& read, MsaBackendConfig* config) {
  read("num_heads", &config->num_heads);
  read("num_kv_heads", &config->num_kv_heads);
  read("head_dim", &config->head_dim);
  read("index_heads", &config->index_heads);
  read("index_dim", &config->index_dim);
  read("block_size", &config->block_size);
  read("page_size", &config->page_size);
  read("topk", &config->topk);
  read("init_blocks", &config->init_blocks);
  read("local_blocks", &config->local_blocks);
  read("score", &config->score, {{"max", BlockScore::kMax}, {"lse", BlockScore::kLse}});
  read("index_reduce", &config->index_reduce,
       {{"per_group", IndexReduce::kPerGroup},
        {"max_all", IndexReduce::kMaxAll},
        {"union", IndexReduce::kUnion}});
  read("index_scale", &config->index_scale);
  read("softmax_scale", &config->softmax_scale);
  read("dense_layers", &config->dense_layers);
  read("table_width", &config->table_width);
  read("max_requests", &config->max_requests);
  read("max_rows", &config->max_rows);
  read("rows_per_request", &config->rows_per_request);
  read("deterministic", &config->deterministic);
  read("strict", &config->strict);
  read("implementation", &config->implementation);
}

MsaBatch read_batch(const MsaObject& /*self*/, const Fields& read, Step* step) {
  MsaBatch batch;
  batch.forward = read_forward_batch(read, step);
  read("kv_len_delta", &batch.kv_len_delta);
  return batch;
}

// A sparse layer, or with `dense` one that attends to every block.
nb::dict forward(MsaObject& self, bool dense, nb::dict tensors, nb::dict out, nb::tuple unwanted,
                 MsaPlan* plan, nb::object stream) {
  const auto bound = bind_tensors(self, dense ? "forward_dense" : "forward", std::move(tensors),
                                  std::move(out), std::move(unwanted), std::move(stream));
  const InUse in_use(self.name, &self.in_use);
  MsaForwardTensors t;
  t.q = bound->find("q");
  t.k = bound->find("k");
  t.v = bound->find("v");
  t.index_q = bound->find("index_q");
  t.index_k = bound->find("index_k");
  t.topk_blocks = bound->find("topk_blocks");
  t.k_pool = bound->update_if_given("k_pool");
  t.v_pool = bound->update_if_given("v_pool");
  t.index_pool = bound->update_if_given("index_pool");
  const MsaBackendConfig& config = self.backend.config();
  const int64_t rows = self.rows(plan);
  bound->expect_outputs({"out", "lse", "blocks"});
  t.out = bound->result("out", DType::kBf16, {rows, config.num_heads, config.head_dim});
  t.lse = bound->result("lse", DType::kF32, {rows, config.num_heads});
  t.blocks = bound->result_if_wanted("blocks", DType::kI32,
                                     {config.num_kv_heads, rows, self.backend.list_width()});
  bound->run(0, [&](Workspace, Stream on) {
    if (plan == nullptr) {
      dense ? self.backend.forward_dense(t, on) : self.backend.forward(t, on);
    } else {
      dense ? self.backend.forward_dense(plan->plan, t, on)
            : self.backend.forward(plan->plan, t, on);
    }
  });
  return bound->results();
}

nb::dict routes(const MsaObject& self) {
  const MsaRoutes& routes = self.backend.routes();
  nb::dict result;
  result["idle"] = routes.idle;
  result["extend"] = routes.extend;
  result["decode"] = routes.decode;
  result["verify"] = routes.verify;
  result["draft"] = routes.draft;
  result["dense"] = routes.dense;
  result["given"] = routes.given;
  result["fallback"] = routes.fallback;
  return result;
}

}  // namespace

void bind_msa_backend(nb::module_& module) {
  bind_backend<MsaObject>(module, "MsaBackend", read_config, read_batch)
      .def("forward", &forward, nb::arg("dense"), nb::arg("tensors"), nb::arg("out"),
           nb::arg("unwanted"), nb::arg("plan").none(), nb::arg("stream").none(),
           "One layer: results by name.")
      .def(
          "list_width", [](const MsaObject& self) { return self.backend.list_width(); },
          "Columns of the lists.")
      .def("routes", &routes, "How many forwards took which way.");
}

}  // namespace fovea::python
