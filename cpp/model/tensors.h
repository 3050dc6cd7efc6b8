// The table of a model's tensors, from the rows of tensors.inc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "model.h"

namespace metal_prefill {

enum class TensorKind {
  kMatrix,   // of any type
  kExperts,  // a matrix for each expert, of any type
  kNorm,     // weights of a norm over `cols` values, F32
  kVector,   // F32
  kFilter,   // of convolutions, [channels][taps], biases of experts, and other tables of float32
};

// A length in a tensor's shape.
enum class Extent {
#define EXTENT(name, ...) name,
#include "extents.inc"
};

// An extent is `count` groups of `size`: the heads of a projection, or one group.
struct Groups {
  int count, size;
  std::int64_t length() const { return std::int64_t(count) * size; }
};
Groups groups_of(Extent extent, const Config& config);

struct TensorRow {
  std::string_view role;  // the name of the member
  std::string_view name;  // in the file; of a layer, after its "blk.N."
  TensorKind kind;
  Extent rows, cols;
  // Whether a file has it: "required", "optional", or the name of the trait of the architecture that decides,
  // a field of Architecture in Python.
  std::string_view presence;

  // Whether the engines rely on it. A tensor that depends on a trait may be absent.
  bool needed() const { return presence == "required"; }
};

struct ModelTensor {
  TensorRow row;
  Tensor Model::* member;
};
inline constexpr ModelTensor kModelTensors[] = {
#define MODEL_TENSOR(member, name, kind, rows, cols, presence) \
  {{#member, name, TensorKind::kind, Extent::rows, Extent::cols, presence}, &Model::member},
#include "tensors.inc"
};

// The layers that have a tensor.
enum class LayersOf {
#define LAYERS_OF(name, ...) name,
#include "extents.inc"
};
bool has_rows_of(LayersOf layers, const Config& config, int layer);

struct LayerTensor {
  TensorRow row;
  LayersOf layers;
  Tensor LayerWeights::* member;
};
inline constexpr LayerTensor kLayerTensors[] = {
#define LAYER_TENSOR(member, name, kind, rows, cols, presence)              \
  {{#member, name, TensorKind::kind, Extent::rows, Extent::cols, presence}, \
   LayersOf::LAYER_KIND,                                                    \
   &LayerWeights::member},
#include "tensors.inc"
};

// Calls visit(row, tensor, layer) for every tensor that a model of these kinds of layers can have, layer by
// layer, including absent ones. Tensors outside the layers have layer -1.
template <class AnyModel, class Visit>
void for_each_tensor(AnyModel& model, const Visit& visit) {
  for (const auto& [row, member] : kModelTensors) visit(row, model.*member, -1);
  for (std::size_t i = 0; i < model.layers.size(); ++i)
    for (const auto& [row, layers, member] : kLayerTensors)
      if (has_rows_of(layers, model.config, int(i))) visit(row, model.layers[i].*member, int(i));
}

// The filter of a layer's convolution; an absent tensor if it has none.
const Tensor& conv_filter(const LayerWeights& layer);

// A model without tensors. Throws std::invalid_argument for more layers than files have.
Model without_tensors(const Config& config);
// The tensor of a role; layer -1 for tensors outside the layers. Throws std::invalid_argument if there is no
// such tensor.
Tensor& tensor_at(Model& model, std::string_view role, int layer);

}  // namespace metal_prefill
