// Causal convolution over the last tokens of a sequence, channel by channel: the result is
// w[0] * u of the oldest token + ... + w[taps - 1] * u of the token itself. The state before a token is u of
// the taps - 1 tokens before it, the oldest first.
//
// With gates, a row of the input is [b | c | x], u is b * x, and the result is multiplied by c. Without them
// a row begins with u; the result gets a bias, where there is one, and the activation SiLU.
#include <metal_stdlib>

#include "args.h"
#include "projection.h"
#include "state_rows.h"

using namespace metal;

// u of the token `back` tokens before the one of `row`: in the pass, or in the state before the chunk.
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

// Grid: (channels, tokens) in threads. A slot that is read is not written. T is half where a matmul reads the
// result, else float.
template <typename T>
kernel void causal_conv(device const float* filter [[buffer(0)]],  // [channels][taps]
                        device const float* bias [[buffer(1)]],    // [channels]
                        device const float* in [[buffer(2)]],      // [tokens][in_stride]
                        constant StateRow* rows [[buffer(3)]],     // [tokens]
                        device float* states [[buffer(4)]],  // slots, from the layer's state in the first one
                        device T* out [[buffer(5)]],         // [tokens - first_out][channels]
                        constant CausalConvArgs& args [[buffer(6)]],
                        uint2 position [[thread_position_in_grid]]) {
  const uint channel = position.x, token = position.y;
  if (channel >= args.channels || token >= args.tokens) return;
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
      if (args.has_bias) sum += bias[channel];
      value = activate(sum, ACTIVATION_SILU);
    }
    out[ulong(token - args.first_out) * args.channels + channel] =
        is_same<T, half>::value ? T(finite_half(value)) : T(value);
  }
  if (row.after == STATE_NONE) return;
  device float* state = states + ulong(row.after) * args.slot_stride + channel;
  for (uint i = 0; i + 1 < args.taps; ++i)
    state[i * args.channels] = input_of(in, states, row, args.taps - 2 - i, channel, args);
}

template [[host_name("causal_conv_f32")]] kernel decltype(causal_conv<float>) causal_conv<float>;
template [[host_name("causal_conv_f16")]] kernel decltype(causal_conv<half>) causal_conv<half>;
