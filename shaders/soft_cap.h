// A soft limit of values.
#pragma once

#include <metal_stdlib>

// cap * tanh(x / cap), with tanh(u) = 1 - 2 / (1 + exp(2 u)).
static inline float soft_cap(float x, float cap) {
  return cap - 2.0f * cap / (1.0f + metal::fast::exp(2.0f * x / cap));
}
