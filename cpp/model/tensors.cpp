#include "tensors.h"

#include <stdexcept>

#include "../../shaders/position_bias.h"

namespace metal_prefill {

Groups groups_of(Extent extent, const Config& c) {
  switch (extent) {
#define EXTENT(name, count, size) \
  case Extent::name:              \
    return {count, size};
#include "extents.inc"
  }
  throw std::logic_error("not an extent");
}

const Tensor& conv_filter(const LayerWeights& layer) {
  return layer.conv ? layer.conv : layer.scan_conv;
}

bool has_rows_of(LayersOf layers, const Config& c, int layer) {
  const LayerKind kind = c.kind(layer);
  const FeedForwardKind feed_forward = c.feed_forward(layer);
  switch (layers) {
#define LAYERS_OF(name, ...) \
  case LayersOf::name:       \
    return __VA_ARGS__;
#include "extents.inc"
  }
  throw std::logic_error("not a kind of layer");
}

Tensor* find_tensor(Model& model, std::string_view role, int layer) {
  if (layer < 0) {
    for (const auto& [row, member] : kModelTensors)
      if (row.role == role) return &(model.*member);
  } else if (std::size_t(layer) < model.layers.size()) {
    for (const auto& [row, layers, member] : kLayerTensors)
      if (row.role == role) return &(model.layers[std::size_t(layer)].*member);
  }
  return nullptr;
}

}  // namespace metal_prefill
