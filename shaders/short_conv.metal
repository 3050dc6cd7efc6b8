// Gated short convolution over the last tokens of a sequence. With u = b * x of each token, the result is
// c * (w[0] * u of the oldest token + ... + w[taps - 1] * u of the token itself), channel by channel. The
// state before a token is u of the taps - 1 tokens before it, the oldest first.
#include <metal_stdlib>

#include "args.h"
#include "projection.h"

using namespace metal;

// Row of the pass with a token of the same chunk.
static inline uint row_of(constant StateRow& row, uint token) {
  return token < row.split ? row.first + token : row.rest + (token - row.split);
}

// u of the token `back` tokens before the one of `row`: a product of the pass, or in the state before the
// chunk.
static inline float input_of(device const float* gated, device const float* states, constant StateRow& row,
                             uint back, uint channel, constant ShortConvArgs& args) {
  if (back <= row.token) {
    device const float* b = gated + ulong(row_of(row, row.token - back)) * 3 * args.channels + channel;
    return b[0] * b[2 * args.channels];
  }
  if (row.before == STATE_NONE) return 0.0f;
  const uint at = args.taps - 1 - (back - row.token);
  return states[ulong(row.before) * args.slot_stride + at * args.channels + channel];
}

// Grid: (channels, tokens) in threads. A slot that is read is not written. T is half where a matmul reads the
// result, float where a matvec does.
template <typename T>
kernel void short_conv(device const float* filter [[buffer(0)]],  // [channels][taps]
                       device const float* gated [[buffer(1)]],   // [tokens][b | c | x]
                       constant StateRow* rows [[buffer(2)]],     // [tokens]
                       device float* states [[buffer(3)]],  // slots, from the layer's state in the first one
                       device T* out [[buffer(4)]],         // [tokens - first_out][channels]
                       constant ShortConvArgs& args [[buffer(5)]],
                       uint2 position [[thread_position_in_grid]]) {
  const uint channel = position.x, token = position.y;
  if (channel >= args.channels || token >= args.tokens) return;
  constant StateRow& row = rows[token];
  if (token >= args.first_out) {
    float sum = 0.0f;
    for (uint tap = 0; tap < args.taps; ++tap)
      sum = fma(filter[channel * args.taps + tap],
                input_of(gated, states, row, args.taps - 1 - tap, channel, args), sum);
    const float value = gated[ulong(token) * 3 * args.channels + args.channels + channel] * sum;
    out[ulong(token - args.first_out) * args.channels + channel] =
        is_same<T, half>::value ? T(finite_half(value)) : T(value);
  }
  if (row.after == STATE_NONE) return;
  device float* state = states + ulong(row.after) * args.slot_stride + channel;
  for (uint i = 0; i + 1 < args.taps; ++i)
    state[i * args.channels] = input_of(gated, states, row, args.taps - 2 - i, channel, args);
}

template [[host_name("short_conv_f32")]] kernel decltype(short_conv<float>) short_conv<float>;
template [[host_name("short_conv_f16")]] kernel decltype(short_conv<half>) short_conv<half>;
