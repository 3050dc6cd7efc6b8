// Softplus, the activation of the time steps of recurrences.
#pragma once

#include <metal_stdlib>

using namespace metal;

// log(1 + exp(x)). MSL has no log1p, and the sum of 1 and a small number loses most digits of the latter.
static inline float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = precise::exp(x);
  if (e < 0.0625f) return e * (1.0f + e * (-0.5f + e * (0.333333333f + e * (-0.25f + e * 0.2f))));
  return precise::log(1.0f + e);
}
