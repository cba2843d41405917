// The classes of pools: memory of the library that is handed out as tensors.

#include "fovea/kv_pool.h"
#include "fovea/state_pool.h"
#include "fovea/stream.h"
#include "python/src/serving.h"

namespace nb = nanobind;

namespace fovea::python {
namespace {

struct KvPoolObject {
  KvPoolObject(const KvPoolConfig& config, const Device& where)
      : device(where), pool(config, where) {
    synchronize(device);  // the zeros are there for every stream
  }
  Device device;
  KvPool pool;
};

struct StatePoolObject {
  StatePoolObject(const StatePoolConfig& config, const Device& where)
      : device(where), pool(config, where) {
    synchronize(device);
  }
  Device device;
  StatePool pool;
};

void read_kv_config(const Fields& read, KvPoolConfig* config) {
  read("row_format", &config->row_format,
       {{"bf16", RowFormat::kBf16},
        {"v32", RowFormat::kV32},
        {"i132", RowFormat::kI132},
        {"v4", RowFormat::kV4},
        {"r512", RowFormat::kR512},
        {"f576", RowFormat::kF576}});
  read("width", &config->width);
  read("num_layers", &config->num_layers);
  read("num_pages", &config->num_pages);
  read("page_size", &config->page_size);
}

void read_state_config(const Fields& read, StatePoolConfig* config) {
  read("num_layers", &config->num_layers);
  read("num_slots", &config->num_slots);
  read("num_value_heads", &config->num_value_heads);
  read("head_dim_k", &config->head_dim_k);
  read("head_dim_v", &config->head_dim_v);
  read("state_dtype", &config->state_dtype, {{"f32", DType::kF32}, {"bf16", DType::kBf16}});
  read("window_rows", &config->window_shape[0]);
  read("window_columns", &config->window_shape[1]);
}

template <class Object, class Config>
nb::class_<Object> bind_pool(nb::module_& module, const char* name,
                             void (*read_config)(const Fields&, Config*)) {
  nb::class_<Object> type(module, name, "See the class of the package.");
  type.def(
          "__init__",
          [name, read_config](Object* self, const nb::dict& config, const std::string& device) {
            const Json params = to_params(name, config);
            Config parsed;
            read_config(Fields(name, params), &parsed);
            const Device where = device_of(device);
            const nb::gil_scoped_release release;
            new (self) Object(parsed, where);
          },
          nb::arg("config"), nb::arg("device"))
      .def_prop_ro(
          "bytes", [](const Object& self) { return self.pool.bytes(); }, "Of all layers.");
  return type;
}

// A view of the pool that keeps it.
template <class Object, class Get>
ExportedTensor view_of(nb::object self, Get get) {
  auto& object = nb::cast<Object&>(self);
  return ExportedTensor(get(object.pool), object.device, self);
}

// None where the pool has no windows.
template <class Get>
nb::object windows_of(nb::object self, Get get) {
  auto& object = nb::cast<StatePoolObject&>(self);
  const TensorView view = get(object.pool);
  return view.defined() ? nb::cast(ExportedTensor(view, object.device, self)) : nb::none();
}

Stream stream_of(const nb::object& stream) {
  Stream result;
  if (!stream.is_none()) result.handle = reinterpret_cast<void*>(nb::cast<uintptr_t>(stream));
  return result;
}

}  // namespace

void bind_pools(nb::module_& module) {
  bind_pool<KvPoolObject>(module, "KvPool", read_kv_config)
      .def(
          "layer",
          [](nb::object self, int64_t layer) {
            return view_of<KvPoolObject>(self, [&](KvPool& pool) { return pool.layer(layer); });
          },
          nb::arg("layer"), "u8 [num_pages, page_bytes] of one layer.");
  bind_pool<StatePoolObject>(module, "StatePool", read_state_config)
      .def(
          "state",
          [](nb::object self, int64_t layer) {
            return view_of<StatePoolObject>(self,
                                            [&](StatePool& pool) { return pool.state(layer); });
          },
          nb::arg("layer"), "[slots, HV, V, K] of one layer.")
      .def(
          "states",
          [](nb::object self) {
            return view_of<StatePoolObject>(self, [&](StatePool& pool) { return pool.states(); });
          },
          "[layers, slots, HV, V, K].")
      .def(
          "window",
          [](nb::object self, int64_t layer) {
            return windows_of(self, [&](StatePool& pool) { return pool.window(layer); });
          },
          nb::arg("layer"), "Windows of one layer, or None.")
      .def(
          "windows",
          [](nb::object self) {
            return windows_of(self, [&](StatePool& pool) { return pool.windows(); });
          },
          "Windows of all layers, or None.")
      .def(
          "copy",
          [](StatePoolObject& self, int64_t from, int64_t to, const nb::object& stream) {
            self.pool.copy(from, to, stream_of(stream));
          },
          nb::arg("from_slot"), nb::arg("to_slot"), nb::arg("stream").none() = nb::none(),
          "One slot becomes a copy of another, in every layer.")
      .def(
          "clear",
          [](StatePoolObject& self, int64_t slot, const nb::object& stream) {
            self.pool.clear(slot, stream_of(stream));
          },
          nb::arg("slot"), nb::arg("stream").none() = nb::none(),
          "The slot becomes zeros in every layer.");
}

}  // namespace fovea::python
