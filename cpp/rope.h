// Rotary position embedding on the host: how far each pair of dimensions turns, layer by layer.
#pragma once

#include <cstddef>
#include <vector>

#include "model.h"

namespace metal_prefill {

struct Rotation {
  float cos, sin;
};

// The turns of a layer.
struct Rope {
  std::vector<float> frequencies;  // [rope_dim / 2] radians per position
  float magnitude = 1;             // multiplies cos and sin; 1 but for YaRN

  // Of a pair at a position. The angle is taken in double precision: in float32, one of many thousand radians
  // would be off by more than the weights' own error.
  Rotation at(std::size_t position, std::size_t pair) const;

  bool operator==(const Rope&) const = default;
};

// Layers that turn alike share a rope.
struct Ropes {
  explicit Ropes(const Model& model);

  std::vector<Rope> ropes;
  std::vector<std::size_t> of_layer;  // index into ropes
};

}  // namespace metal_prefill
