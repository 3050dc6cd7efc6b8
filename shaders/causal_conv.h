// Causal convolution of a channel of a row.
#pragma once

#include <metal_stdlib>

#include "args.h"
#include "projection.h"
#include "state_rows.h"

using namespace metal;

// u of the token `back` tokens before that of `row`: in the pass, or in the state before the chunk.
static inline float input_of(device const float* in, device const float* states, constant StateRow& row,
                             uint back, uint channel, constant CausalConvArgs& args) {
  if (back <= row.token) {
    device const float* u = in + ulong(row_of(row, row.token - back)) * args.in_stride + channel;
    return args.gated ? u[0] * u[2 * args.channels] : u[0];
  }
  if (row.before == STATE_NONE) return 0.0f;
  const uint at = args.taps - 1 - (back - row.token);
  return states[ulong(row.before) * args.slot_stride + at * args.channels + channel];
}

// Computes one channel of a token's row, and the state after the token. T is half if a matmul reads the
// result, otherwise float.
template <typename T>
static inline void convolve(device const float* filter, device const float* bias, device const float* in,
                            constant StateRow* rows, device float* states, device T* out,
                            constant CausalConvArgs& args, uint channel, uint token) {
  constant StateRow& row = rows[token];
  if (token >= args.first_out) {
    float sum = 0.0f;
    for (uint tap = 0; tap < args.taps; ++tap)
      sum = fma(filter[channel * args.taps + tap],
                input_of(in, states, row, args.taps - 1 - tap, channel, args), sum);
    float value;
    if (args.gated) {
      value = in[ulong(token) * args.in_stride + args.channels + channel] * sum;
    } else {
      if (args.biased) sum += bias[channel];
      value = activate(sum, ACTIVATION_SILU);
    }
    out[ulong(token - args.first_out) * args.channels + channel] = finite<T>(value);
  }
  if (row.after == STATE_NONE) return;
  device float* state = states + ulong(row.after) * args.slot_stride + channel;
  for (uint i = 0; i + 1 < args.taps; ++i)
    state[i * args.channels] = input_of(in, states, row, args.taps - 2 - i, channel, args);
}
