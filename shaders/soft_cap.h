// A soft limit of values.
#pragma once

#include <metal_stdlib>

// cap * tanh(x / cap), with tanh(u) = 1 - 2 / (1 + exp(2 u)). NaN passes through; the fast exponential
// supports neither NaN nor infinities.
static inline float soft_cap(float x, float cap) {
  const float power = metal::fast::exp(metal::clamp(2.0f * (x / cap), -88.0f, 88.0f));
  return metal::isnan(x) ? x : cap - 2.0f * cap / (1.0f + power);
}
