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
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/rounding.h"
#include "../model/tensors.h"
#include "arrays.h"
#include "bindings.h"

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
  nb::enum_<RopeStyle>(m, "RopeStyle")
      .value("INTERLEAVED", RopeStyle::kInterleaved)
      .value("NEOX", RopeStyle::kNeox);
  nb::enum_<RopeScaling>(m, "RopeScaling")
      .value("NONE", RopeScaling::kNone)
      .value("LINEAR", RopeScaling::kLinear)
      .value("YARN", RopeScaling::kYarn);
  nb::enum_<Activation>(m, "Activation")
      .value("SILU", Activation::kSilu)
      .value("GELU", Activation::kGelu)
      .value("GELU_ERF", Activation::kGeluErf)
      .value("RELU", Activation::kRelu)
      .value("CLAMPED_SILU", Activation::kClampedSilu);
  nb::enum_<NormKind>(m, "NormKind").value("RMS", NormKind::kRms).value("LAYER", NormKind::kLayer);
  nb::enum_<QkNormPlace>(m, "QkNormPlace")
      .value("HEADS", QkNormPlace::kHeads)
      .value("ROTATED_HEADS", QkNormPlace::kRotatedHeads)
      .value("ROWS", QkNormPlace::kRows);
  nb::enum_<LayerKind>(m, "LayerKind")
      .value("ATTENTION", LayerKind::kAttention)
      .value("SHORT_CONV", LayerKind::kShortConv)
      .value("STATE_SPACE", LayerKind::kStateSpace)
      .value("ATTENTION_AND_STATE_SPACE", LayerKind::kAttentionAndStateSpace)
      .value("GATED_DELTA", LayerKind::kGatedDelta);
  nb::enum_<FeedForwardKind>(m, "FeedForwardKind")
      .value("NONE", FeedForwardKind::kNone)
      .value("DENSE", FeedForwardKind::kDense)
      .value("EXPERTS", FeedForwardKind::kExperts);
  nb::enum_<RouterScore>(m, "RouterScore")
      .value("SOFTMAX", RouterScore::kSoftmax)
      .value("SIGMOID", RouterScore::kSigmoid);
  nb::enum_<Compute>(m, "Compute")
      .value("INT8", Compute::kInt8)
      .value("W8A8", Compute::kW8A8)
      .value("INT16", Compute::kInt16)
      .value("F32", Compute::kF32)
      .value("BF16", Compute::kBf16);
  nb::enum_<KvType>(m, "KvType")
      .value("F16", KvType::kF16)
      .value("F32", KvType::kF32)
      .value("Q8_0", KvType::kQ8_0);

  nb::class_<Config>(m, "Config", "Hyperparameters as the engines read them.")
      .def(nb::init<>())
#define CONFIG(type, name, ...) .def_rw(#name, &Config::name)
#include "../model/config.inc"
      .def("of_layer", &Config::of_layer, "layer"_a,
           "The same model with the dimensions of one layer as those of all.")
      .def("caches", &Config::caches, "layer"_a, "Whether a layer has keys and values of its own.")
      .def("state_values", &Config::state_values, "layer"_a,
           "Float32 values that a layer keeps of the tokens before a position; 0: it has no state.");

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
