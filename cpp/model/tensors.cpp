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

Model without_tensors(const Config& config) {
  constexpr int kMostLayers = 100000;
  if (config.n_layers < 0 || config.n_layers > kMostLayers)
    throw std::invalid_argument(std::to_string(config.n_layers) + " layers: a model has at most " +
                                std::to_string(kMostLayers));
  Model model;
  model.config = config;
  model.layers.resize(std::size_t(config.n_layers));
  return model;
}

Tensor& tensor_at(Model& model, std::string_view role, int layer) {
  if (layer < 0) {
    for (const auto& [row, member] : kModelTensors)
      if (row.role == role) return model.*member;
  } else if (std::size_t(layer) < model.layers.size()) {
    for (const auto& [row, layers, member] : kLayerTensors)
      if (row.role == role) return model.layers[std::size_t(layer)].*member;
  }
  const std::string owner = layer < 0 ? "a model" : "layer " + std::to_string(layer);
  throw std::invalid_argument(owner + " has no place for tensor '" + std::string(role) + "'");
}

}  // namespace metal_prefill
