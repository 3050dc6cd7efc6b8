// Bindings for recorded passes of the Metal engine, in every build: dispatches, and how to read them.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "../../shaders/attention.h"
#include "../../shaders/token_tiles.h"
#include "../base/rounding.h"
#include "../metal/plan/recorder.h"
#include "../model/tensors.h"
#include "bindings.h"
#include "enumerations.h"

namespace nb = nanobind;
using namespace nb::literals;

template <>
struct nanobind::detail::type_caster<metal_prefill::metal::RowOutput>
    : StringCaster<metal_prefill::metal::RowOutput, "none", "greedy", "logits", "log_probs", "hidden",
                   "residual"> {};

namespace metal_prefill::python {

using namespace metal;

namespace {

// A model without weights: configuration, and the types and dimensions of its tensors.
class ModelShape {
 public:
  explicit ModelShape(const Config& config) : model_(without_tensors(config)) {
    // Tensors are distinguished by their addresses, which are never read.
    model_.mapping.data = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 30);  // NOLINT
  }

  void add(const std::string& role, int layer, std::uint32_t type, int rows, int cols) {
    if (rows < 1 || cols < 1)
      throw std::invalid_argument("tensor '" + role + "' has " + std::to_string(rows) + " rows and " +
                                  std::to_string(cols) + " columns");
    const std::size_t bytes = std::size_t(rows) * row_bytes(TensorType(type), std::size_t(cols));
    tensor_at(model_, role, layer) = {
        role, TensorType(type), rows, cols, model_.mapping.data + model_.mapping.bytes, bytes};
    model_.mapping.bytes += round_up(bytes, 32);
  }

  std::vector<Dispatch> plan(int tokens, int position, RowOutput output, int family, const std::string& gpu,
                             const EngineOptions& options) const {
    return metal::plan(model_, tokens, position, output, family, gpu, options);
  }

 private:
  Model model_;
};

using FieldRow = std::tuple<std::string, std::string, std::size_t, std::size_t>;

std::map<std::string, std::tuple<std::size_t, std::vector<FieldRow>>> args_structs() {
  std::map<std::string, std::tuple<std::size_t, std::vector<FieldRow>>> structs;
  for (const ArgsLayout* layout : kArgsLayouts) {
    std::vector<FieldRow> fields;
    for (const ArgsField& field : layout->fields)
      fields.emplace_back(field.name, field.type, field.offset, field.count);
    structs[layout->name] = {layout->bytes, std::move(fields)};
  }
  return structs;
}

#define CONSTANT(name) {#name, name}
const std::map<std::string, std::uint32_t> kConstants = {CONSTANT(ACTIVATION_SILU),
                                                         CONSTANT(ACTIVATION_GELU),
                                                         CONSTANT(ACTIVATION_GELU_ERF),
                                                         CONSTANT(ACTIVATION_RELU),
                                                         CONSTANT(ACTIVATION_CLAMPED),
                                                         CONSTANT(ROPE_INTERLEAVED),
                                                         CONSTANT(ROPE_NEOX),
                                                         CONSTANT(MULTI_TOKEN_TILE),
                                                         CONSTANT(PAGE_POSITIONS),
                                                         CONSTANT(MATMUL_THREADS),
                                                         CONSTANT(MATMUL_K),
                                                         CONSTANT(MATMUL_NARROW_TILE),
                                                         CONSTANT(MATMUL_WIDE_TILE),
                                                         CONSTANT(MATMUL_PARTS),
                                                         CONSTANT(MATMUL_TALL_TOKENS),
                                                         CONSTANT(PREFILL_KEYS),
                                                         CONSTANT(ARGMAX_NONE),
                                                         CONSTANT(STATE_NONE),
                                                         CONSTANT(ATTENTION_TENSOR_ROWS),
                                                         CONSTANT(STACKED_MATRICES),
                                                         CONSTANT(NORMED_MATVEC_ROWS),
                                                         CONSTANT(SCAN_COLUMNS),
                                                         CONSTANT(FEW_TOKEN_ROWS),
                                                         CONSTANT(MANY_TOKEN_ROWS),
                                                         CONSTANT(MANY_TOKEN_TILE)};
#undef CONSTANT

std::map<std::string, std::size_t> attention_sizes(int dims, int element_bytes) {
  return {{"decode_loads_ahead", DECODE_LOADS_AHEAD(DECODE_CHUNKS(dims), element_bytes)},
          {"decode_lanes", DECODE_LANES(dims)},
          {"decode_heads", DECODE_HEADS(DECODE_CHUNKS(dims))},
          {"prefill_value_parts", PREFILL_VALUE_PARTS(dims)},
          {"prefill_row_blocks", PREFILL_ROW_BLOCKS(dims, element_bytes)},
          {"prefill_loads_ahead", PREFILL_LOADS_AHEAD(dims, element_bytes)},
          {"prefill_stages_query", PREFILL_STAGES_QUERY(dims, element_bytes)},
          {"prefill_scratch_bytes", PREFILL_SCRATCH(dims, element_bytes) * sizeof(float)}};
}

using ByteView = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>;

template <std::vector<Contents> Dispatch::* kBuffers>
nb::object contents(nb::handle self, std::size_t binding) {
  const std::vector<Contents>& buffers = nb::cast<const Dispatch&>(self).*kBuffers;
  if (binding >= buffers.size())
    throw std::invalid_argument("the trace kept nothing of binding " + std::to_string(binding));
  const std::span<const std::byte> bytes = buffers[binding].bytes;
  return nb::cast(ByteView(reinterpret_cast<const std::uint8_t*>(bytes.data()), {bytes.size()}, self));
}

}  // namespace

void bind_recordings(nb::module_& m) {
  nb::class_<PipelineInfo>(m, "PipelineInfo", "A pipeline that was built when the model was opened.")
      .def_ro("kernel", &PipelineInfo::kernel)
      .def_ro("seconds", &PipelineInfo::seconds, "That building it took, others at the same time.")
      .def_ro("max_threads", &PipelineInfo::max_threads, "Of a threadgroup.");
  nb::class_<Dispatch>(m, "Dispatch", "One dispatch of a GPU.")
      .def_ro("kernel", &Dispatch::kernel)
      .def_ro("layer", &Dispatch::layer, "-1 before the layers and after them.")
      .def_prop_ro(
          "grid", [](const Dispatch& self) { return std::tuple(self.grid[0], self.grid[1], self.grid[2]); },
          "Threadgroups.")
      .def_ro("threads", &Dispatch::threads, "Of a threadgroup.")
      .def_ro("threadgroup_bytes", &Dispatch::threadgroup_bytes)
      .def_ro("after_barrier", &Dispatch::after_barrier)
      .def_ro("buffers", &Dispatch::buffers, "Labels, by binding.")
      .def_prop_ro("args", [](const Dispatch& self) { return nb::bytes(self.args.data(), self.args.size()); })
      .def_ro("args_struct", &Dispatch::args_struct, "Name of their struct, in args_structs.")
      .def_prop_ro(
          "runs",
          [](const Dispatch& self) {
            std::vector<std::tuple<int, int>> runs;
            for (const auto& [position, rows] : self.runs) runs.emplace_back(position, rows);
            return runs;
          },
          "(position, rows) of each run of consecutive rows of a sequence; empty if the kernel reads or "
          "writes no K and V.")
      .def("before", &contents<&Dispatch::before>, "binding"_a,
           "The bytes of a buffer from its binding on, before the dispatch. Those of weights are valid as "
           "long as the engine.")
      .def("after", &contents<&Dispatch::after>, "binding"_a, "The same, after the dispatch.")
      .def_ro("start", &Dispatch::start, "Seconds of the GPU's clock.")
      .def_ro("end", &Dispatch::end);
  nb::class_<ModelShape>(m, "ModelShape", "A model without weights: types and dimensions of its tensors.")
      .def(nb::init<const Config&>(), "config"_a)
      .def("add", &ModelShape::add, "role"_a, "layer"_a, "type"_a, "rows"_a, "cols"_a)
      .def("plan", &ModelShape::plan, "tokens"_a, "position"_a, "output"_a, "family"_a, "gpu"_a, "options"_a,
           "The dispatches that the Metal engine would make for a prompt.");
  m.def("attention_sizes", &attention_sizes, "dims"_a, "element_bytes"_a,
        "Sizes of shaders/attention.h for heads of so many dimensions and elements of the cache.");
  m.attr("args_structs") = args_structs();  // name: (bytes, [(field, type, offset, count)])
  m.attr("shader_constants") = kConstants;
}

}  // namespace metal_prefill::python
