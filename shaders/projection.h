// Addresses of weight rows and activations, for all kernels that multiply by weights.
#pragma once

#include <metal_stdlib>

#include "args.h"
#include "clamped_silu.h"
#include "unroll.h"

using namespace metal;

// Items of a row that a lane loads before it multiplies the first, in products with one or two tokens. Three
// divides the number of rounds for 576 columns with 32 lanes (3), 1536 with 32 (6) and 576 with 8 (9).
constant constexpr ushort kAhead = 3;

// Whether experts have gates: the matrices are then gate and up, otherwise up alone.
static inline bool has_gates(constant StackedWeights& stack) {
  return stack.rows[1] > 0;
}

// Start of row `row` of the stacked matrices.
static inline device const uchar* stacked_row(device const uchar* weights, constant StackedWeights& stack,
                                              uint row) {
  ulong offset = stack.offset[0];
  uint first = 0, end = 0;  // rows of the matrix
  FOR_UNROLL (ushort i = 1; i < STACKED_MATRICES; ++i) {
    end += stack.rows[i - 1];
    if (row < end) continue;
    first = end;
    offset = stack.offset[i];
  }
  return weights + offset + ulong(row - first) * stack.row_bytes;
}

// Row `row` of matrix `which` of two with the same number of rows: gate or up.
static inline device const uchar* half_row(device const uchar* weights, constant StackedWeights& stack,
                                           ushort which, uint row) {
  return weights + stack.offset[which] + ulong(row) * stack.row_bytes;
}

// Rounds to T, within the finite range of half. Preserves NaN, which clamp() would turn into a number.
template <typename T>
static inline T finite(float value) {
  return T(!is_same<T, half>::value || isnan(value) ? value : clamp(value, -65504.0f, 65504.0f));
}

// x Phi(x). Abramowitz and Stegun 7.1.26: erf(z) = 1 - p(t) exp(-z^2) for z >= 0, t = 1 / (1 + 0.3275911 z),
// within 1.5e-7. MSL has no erf. From |x| = 13 on, the result differs from its limit by less than 1e-36, and
// the square of a larger x may be infinite. NaN passes through.
static inline float gelu_erf(float x) {
  const float size = min(abs(x), 13.0f), z = 0.70710678f * size, t = 1.0f / (1.0f + 0.3275911f * z);
  const float p =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return (x < 0.0f ? 0.0f : x) - 0.5f * size * p * fast::exp(-z * z);
}

// Activation of the feed-forward block: SiLU; GELU by its tanh approximation 0.5 x (1 + tanh(sqrt(2/pi) (x +
// 0.044715 x^3))), which is x * sigmoid of twice the argument; exact GELU; or ReLU, through which NaN passes.
static inline float activate(float x, uint activation) {
  if (activation == ACTIVATION_GELU_ERF) return gelu_erf(x);
  if (activation == ACTIVATION_RELU) return x < 0.0f ? 0.0f : x;
  // Limits the divisor to exp(88): for -inf the quotient would be -inf. NaN passes through.
  x = x < -88.0f ? -88.0f : x;
  const float argument =
      activation == ACTIVATION_SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
  // The fast exponential does not support infinities or NaN; if x is NaN, so is the quotient.
  return x / (1.0f + fast::exp(clamp(-argument, -88.0f, 88.0f)));
}

// activation(gate) * up, or the clamped variant with limits of both, through which NaN passes.
static inline float activate_gated(float gate, float up, uint activation) {
  if (activation != ACTIVATION_CLAMPED) return activate(gate, activation) * up;
  const float limited = gate > CLAMPED_SILU_LIMIT ? CLAMPED_SILU_LIMIT : gate;
  const float scaled = activate(CLAMPED_SILU_SLOPE * limited, ACTIVATION_SILU) / CLAMPED_SILU_SLOPE;
  const float least = up < -CLAMPED_SILU_LIMIT ? -CLAMPED_SILU_LIMIT : up;
  return scaled * ((least > CLAMPED_SILU_LIMIT ? CLAMPED_SILU_LIMIT : least) + 1.0f);
}
