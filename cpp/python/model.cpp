#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/rounding.h"
#include "../model/tensors.h"
#include "arrays.h"
#include "bindings.h"
#include "enumerations.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {
namespace {

// Keeps a Python object alive from C++; may be released on any thread.
std::shared_ptr<void> keep_alive(nb::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* p) {
    if (!Py_IsInitialized()) return;  // the interpreter has ended, and its objects with it
    with_gil([p] { Py_DECREF(static_cast<PyObject*>(p)); });
  });
}

// Checks the values of a tensor that are row indices of others.
void check_relative_rows(const Model& model) {
  for (int i = 0; model.relative_row_of && i < model.relative_row_of.cols; ++i) {
    float row = 0;
    std::memcpy(&row, model.relative_row_of.data + std::size_t(i) * sizeof(row), sizeof(row));
    if (!(row >= 0 && row < float(model.config.relative_rows)))
      throw std::invalid_argument("tensor '" + model.relative_row_of.name + "' has the row " +
                                  std::to_string(row) + ", must be at least 0 and below " +
                                  std::to_string(model.config.relative_rows));
  }
}

// Collects views of the weights, checks them, and makes an engine of the model.
class ModelBuilder {
 public:
  ModelBuilder(const Config& config, ByteArray mapping, nb::object owner) : model_(without_tensors(config)) {
    model_.mapping = {reinterpret_cast<const std::byte*>(mapping.data()), mapping.shape(0),
                      keep_alive(std::move(owner))};
  }

  void add(const std::string& role, int layer, const std::string& name, std::uint32_t type, int rows,
           int cols, std::size_t offset, std::size_t bytes) {
    if (offset > model_.mapping.bytes || bytes > model_.mapping.bytes - offset)
      throw std::invalid_argument("tensor '" + name + "' does not lie within the file");
    tensor_at(model_, role, layer) = {name, TensorType(type), rows, cols, model_.mapping.data + offset,
                                      bytes};
  }

  // Takes the result of packed_weights() of an engine of the same model.
  void use_packed(ByteArray packed, nb::object owner) {
    model_.packed = {reinterpret_cast<const std::byte*>(packed.data()), packed.shape(0),
                     keep_alive(std::move(owner))};
  }

  std::shared_ptr<Engine> build(const std::string& device, const EngineOptions& options) {
    if (device != "cpu" && device != "metal")
      throw std::invalid_argument("device '" + device + "' is not cpu or metal");
    validate(model_);
    check_relative_rows(model_);
    const GilRelease release;
    return device == "cpu" ? make_cpu_engine(model_, options) : make_metal_engine(model_, options);
  }

 private:
  Model model_;
};

// A field of Config as Python reads it: vectors are tuples.
template <typename T>
T attribute(const T& value) {
  return value;
}

template <typename T>
auto attribute(const std::vector<T>& values) {
  using Item = std::conditional_t<std::is_same_v<T, std::uint8_t>, bool, T>;
  nb::list items;
  for (const T value : values) items.append(nb::cast(Item(value)));
  return nb::typed<nb::tuple, Item, nb::ellipsis>(nb::tuple(items));
}

template <typename T>
void check_items(const T&, const char*, int) {}

template <typename T>
void check_items(const std::vector<T>& values, const char* name, int layers) {
  if (!values.empty() && values.size() != std::size_t(layers))
    throw std::out_of_range(std::string(name) + " has " + std::to_string(values.size()) + " items for " +
                            std::to_string(layers) + " layers");
}

// A method for one layer, which must be in every list.
template <auto kMethod>
auto of_one_layer(const Config& self, int layer) {
  if (layer < 0 || layer >= self.n_layers)
    throw std::out_of_range("layer " + std::to_string(layer) + " of a model with " +
                            std::to_string(self.n_layers) + " layers");
#define CONFIG(type, name, ...) check_items(self.name, #name, self.n_layers);
#include "../model/config.inc"
  return (self.*kMethod)(layer);
}

nb::typed<nb::dict, nb::str, nb::any> fields_of(const Config& config) {
  nb::dict fields;
#define CONFIG(type, name, ...) fields[#name] = attribute(config.name);
#include "../model/config.inc"
  return nb::typed<nb::dict, nb::str, nb::any>(fields);
}

// A row of the table of tensors, with its shape in a model of some configuration.
struct TensorSpec {
  const TensorRow* row;
  std::string name;  // with {layer} if every layer has one
  nb::tuple shape;
  std::optional<LayersOf> layers;  // none: it belongs to no layer
};

nb::tuple shape_of(const TensorRow& row, const Config& config) {
  const Groups rows = groups_of(row.rows, config);
  const std::int64_t cols = groups_of(row.cols, config).length();
  switch (row.kind) {
    case TensorKind::kMatrix:
    case TensorKind::kFilter:
      return nb::make_tuple(rows.length(), cols);
    case TensorKind::kExperts:
      return nb::make_tuple(rows.count, rows.size, cols);
    case TensorKind::kNorm:
    case TensorKind::kVector:
      return nb::make_tuple(cols);
  }
  throw std::logic_error("not a kind of tensor");
}

std::vector<TensorSpec> tensor_specs(const Config& config) {
  std::vector<TensorSpec> specs;
  const auto add = [&](const TensorRow& row, const char* prefix, std::optional<LayersOf> layers) {
    specs.push_back({&row, prefix + std::string(row.name), shape_of(row, config), layers});
  };
  for (const ModelTensor& tensor : kModelTensors) add(tensor.row, "", std::nullopt);
  for (const LayerTensor& tensor : kLayerTensors) add(tensor.row, "blk.{layer}.", tensor.layers);
  return specs;
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::enum_<KvType>(m, "KvType")
      .value("F16", KvType::kF16)
      .value("F32", KvType::kF32)
      .value("Q8_0", KvType::kQ8_0);

  const Config defaults;
  nb::class_<Config>(m, "ModelConfig", "Hyperparameters of a model.")
      .def(
          "__init__",
          [](Config* self
#define CONFIG(type, name, ...) , type name
#include "../model/config.inc"
          ) {
            new (self) Config{
#define CONFIG(type, name, ...) .name = std::move(name),
#include "../model/config.inc"
            };
          },
          nb::kw_only()
#define CONFIG(type, name, ...) , nb::arg(#name) = defaults.name
#include "../model/config.inc"
              )
#define CONFIG(type, name, value, text) \
  .def_prop_ro(#name, [](const Config& self) { return attribute(self.name); }, text)
#include "../model/config.inc"
      .def("as_dict", &fields_of, "Return the attributes by their names.")
      .def(
          "replace",
          [](const Config& self, const nb::kwargs& changes) {
            nb::dict fields = fields_of(self);
            for (const auto& [name, value] : changes) {
              const nb::str shown = nb::str("ModelConfig: {}={!r}").format(name, value);
              if (!fields.contains(name))
                throw nb::type_error(nb::str("{} is not an attribute").format(shown).c_str());
              nb::dict alone;
              alone[name] = value;
              try {
                nb::type<Config>()(**alone);
              } catch (const nb::python_error&) {
                throw nb::type_error(
                    nb::str("{} has the wrong type or is out of range").format(shown).c_str());
              }
            }
            fields.update(changes);
            return nb::type<Config>()(**fields);
          },
          nb::sig("def replace(self, **changes: typing.Any) -> ModelConfig"),
          "Return a copy with other values of some attributes; a wrong one raises TypeError.")
      .def("__hash__",
           [](const Config& self) { return nb::hash(nb::tuple(nb::list(fields_of(self).values()))); })
      .def(
          "__reduce__",
          [](const Config& self) {
            const nb::object partial = nb::module_::import_("functools").attr("partial");
            return nb::make_tuple(partial(nb::type<Config>(), **fields_of(self)), nb::tuple());
          },
          nb::sig("def __reduce__(self) -> tuple[typing.Any, ...]"))
      .def(
          "__eq__", [](const Config& self, const Config& other) { return self == other; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__",
           [](const Config& self) {
             nb::list items;
             for (const auto [name, value] : fields_of(self))
               items.append(nb::str("{}={!r}").format(name, value));
             return nb::str("ModelConfig({})").format(nb::str(", ").attr("join")(items));
           })
      .def_prop_ro(
          "generates", [](const Config& self) { return self.causal && self.has_head; },
          "Whether the model predicts text.")
      .def("of_layer", &of_one_layer<&Config::of_layer>, "layer"_a,
           "Return this configuration with the dimensions of one layer as those of all.")
      .def("kind", &of_one_layer<&Config::kind>, "layer"_a, "Return the kind of a layer.")
      .def("caches", &of_one_layer<&Config::caches>, "layer"_a,
           "Return whether a layer has keys and values of its own.")
      .def("state_values", &of_one_layer<&Config::state_values>, "layer"_a,
           "Return the number of float32 values that a layer keeps of the tokens before a position.");
  m.def("has_attention", &has_attention, "kind"_a, "Return whether a layer of a kind keeps keys and values.");
  m.def("has_matrix_state", &has_matrix_state, "kind"_a,
        "Return whether the state of a layer of a kind has a matrix for each head.");

  nb::class_<TensorSpec>(m, "TensorSpec", "A tensor that a model may have.")
      .def_prop_ro(
          "kind",
          [](const TensorSpec& self) {
            static constexpr const char* kNames[] = {"matrix", "experts", "norm", "vector", "filter"};
            return kNames[int(self.row->kind)];
          },
          "matrix, experts, norm, vector or filter.")
      .def_prop_ro("role", [](const TensorSpec& self) { return std::string(self.row->role); })
      .def_prop_ro(
          "presence", [](const TensorSpec& self) { return std::string(self.row->presence); },
          "required, optional, or the trait of an architecture that decides.")
      .def_ro("name", &TensorSpec::name, "In the file, with {layer} where every layer has one.")
      .def_prop_ro(
          "shape", [](const TensorSpec& self) { return self.shape; },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("per_layer", [](const TensorSpec& self) { return self.layers.has_value(); })
      .def(
          "is_in",
          [](const TensorSpec& self, const Config& config, int layer) {
            return self.layers && has_rows_of(*self.layers, config, layer);
          },
          "config"_a, "layer"_a, "Return whether a layer has it.");
  m.def(
      "tensor_types",
      [] {
        std::map<std::uint32_t, std::tuple<std::string_view, std::size_t, std::size_t>> types;
        for (const auto& [type, name, values, bytes] : tensor_types())
          types[std::uint32_t(type)] = {name, values, bytes};
        return types;
      },
      "The tensor types that a matrix can have by number: name, and values and bytes of a block.");
  m.def("tensors", &tensor_specs, "config"_a, "The rows of the table of tensors.");

  nb::class_<MetalOptions>(m, "MetalOptions", "Options of the Metal engine alone.")
      .def_rw("fused_norm", &MetalOptions::fused_norm, nb::arg().none())
      .def_rw("matvec_rows", &MetalOptions::matvec_rows)
      .def_rw("buffer_work", &MetalOptions::buffer_work)
      .def_rw("resident_seconds", &MetalOptions::resident_seconds)
      .def_rw("pipeline_folder", &MetalOptions::pipeline_folder)
      .def_rw("is_measured", &MetalOptions::is_measured)
      .def(
          "share_kernels", [](MetalOptions& self) { self.shared_kernels = make_shared_kernels(); },
          "Let the engines that are built from now on share libraries and pipelines.")
      .def("end_sharing", [](MetalOptions& self) { self.shared_kernels = nullptr; })
      .def_rw("no_matmul_tensor", &MetalOptions::no_matmul_tensor)
      .def_rw("tall_tiles", &MetalOptions::tall_tiles)
      .def_rw("attention_tensor", &MetalOptions::attention_tensor);
  nb::class_<EngineOptions>(m, "EngineOptions", "Options of an engine.")
      .def(nb::init<>())
      .def_rw("threads", &EngineOptions::threads)
      .def_rw("compute", &EngineOptions::compute)
      .def_rw("kv_type", &EngineOptions::kv_type)
      .def_rw("chunk_tokens", &EngineOptions::chunk_tokens)
      .def_rw("max_context", &EngineOptions::max_context)
      .def_rw("kv_memory", &EngineOptions::kv_memory)
      .def_rw("prefix_memory", &EngineOptions::prefix_memory)
      .def_rw("poison_cache", &EngineOptions::poison_cache)
      .def_rw("metal", &EngineOptions::metal);

  nb::class_<ModelBuilder>(m, "ModelBuilder", "Collects weight views and builds an engine.")
      .def(nb::init<const Config&, ByteArray, nb::object>(), "config"_a, "mapping"_a, "owner"_a)
      .def("add", &ModelBuilder::add, "role"_a, "layer"_a, "name"_a, "type"_a, "rows"_a, "cols"_a, "offset"_a,
           "bytes"_a)
      .def("use_packed", &ModelBuilder::use_packed, "packed"_a, "owner"_a)
      .def("build", &ModelBuilder::build, "device"_a, "options"_a);
}

}  // namespace metal_prefill::python
