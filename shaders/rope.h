// Rotary position embedding of one head.
#pragma once

#include <metal_stdlib>

#include "args.h"

using namespace metal;

// Dimensions of pair `i`: of a rotated pair, or of two adjacent dimensions after the rotated ones.
static inline ushort2 pair_of(ushort i, ushort rope_dim, uint style) {
  return i >= rope_dim / 2 || style == ROPE_INTERLEAVED ? ushort2(2 * i, 2 * i + 1)
                                                        : ushort2(i, i + rope_dim / 2);
}

// The values of two dimensions of the head at `first`, with their biases.
static inline float2 pair_at(device const float* row, device const float* bias, uint first, ushort2 dims,
                             bool has_bias) {
  const float2 value = float2(row[first + dims.x], row[first + dims.y]);
  return has_bias ? value + float2(bias[first + dims.x], bias[first + dims.y]) : value;
}

// Pair `i` of a head, rotated.
static inline float2 turned(float2 value, device const float2* table, ushort i, ushort rope_dim) {
  if (i >= rope_dim / 2) return value;
  const float2 turn = table[i];
  return float2(value.x * turn.x - value.y * turn.y, value.x * turn.y + value.y * turn.x);
}

// Reads a head of q or k from column `first` of a row of qkv, adds the bias, normalizes and rotates it, and
// writes it to `out`, rounded to T. `out` may be the same columns. `table` is the row of the position.
template <typename T, typename Out>
static inline void rotate_head(device const float* row, uint first, device const float* bias,
                               device const float* norm, bool has_norm, device const float2* table,
                               constant RopeArgs& args, ushort lane, Out out) {
  // A lane reads only the two dimensions that it computes, since other lanes write theirs in place.
  float scale = 1.0f;
  if (has_norm) {
    float sum = 0.0f;
    for (ushort i = lane; i < args.key_dim / 2; i += 32) {
      float2 value = pair_at(row, bias, first, pair_of(i, args.rope_dim, args.style), args.has_bias);
      if (args.norm_after) value = turned(value, table, i, args.rope_dim);
      sum += dot(value, value);
    }
    scale = precise::rsqrt(simd_sum(sum) / float(args.key_dim) + args.eps);
  }
  for (ushort i = lane; i < args.key_dim / 2; i += 32) {
    const ushort2 dims = pair_of(i, args.rope_dim, args.style);
    float2 value = pair_at(row, bias, first, dims, args.has_bias);
    const float2 factor = has_norm ? scale * float2(norm[dims.x], norm[dims.y]) : float2(1.0f);
    if (!args.norm_after) value *= factor;
    value = turned(value, table, i, args.rope_dim);
    if (args.norm_after) value *= factor;
    out[dims.x] = T(value.x);
    out[dims.y] = T(value.y);
  }
}

// The same for a head of v, which is not rotated and is normalized without weights.
template <typename T, typename Out>
static inline void round_head(device const float* row, uint first, device const float* bias,
                              constant RopeArgs& args, ushort lane, Out out) {
  float scale = 1.0f;
  if (args.has_v_norm) {
    float sum = 0.0f;
    for (ushort i = lane; i < args.value_dim; i += 32) {
      const float value = row[first + i] + (args.has_bias ? bias[first + i] : 0.0f);
      sum += value * value;
    }
    scale = precise::rsqrt(simd_sum(sum) / float(args.value_dim) + args.eps);
  }
  for (ushort i = lane; i < args.value_dim; i += 32)
    out[i] = T(scale * (row[first + i] + (args.has_bias ? bias[first + i] : 0.0f)));
}
