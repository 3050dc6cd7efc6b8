// Rotary position embedding on the host: the rotation of each pair of dimensions, for each layer.
#pragma once

#include <cstddef>
#include <vector>

#include "model.h"

namespace metal_prefill {

struct Rotation {
  float cos, sin;
};

// The rotations of a layer.
struct Rope {
  std::vector<float> frequencies;  // [rope_dim / 2 of the layer] radians per position
  float magnitude = 1;             // multiplies cos and sin

  // The rotation of a pair at a position. The angle is computed in double precision: the error of an angle of
  // many thousand radians in float32 would exceed the quantization error of the weights.
  Rotation at(std::size_t position, std::size_t pair) const;

  bool operator==(const Rope&) const = default;
};

// Layers with the same rotations share a rope. Layers without rotation have one without frequencies.
struct Ropes {
  explicit Ropes(const Model& model);

  std::vector<Rope> ropes;
  std::vector<std::size_t> of_layer;  // index into ropes
};

}  // namespace metal_prefill
