// Causal convolution over the last tokens of a sequence, channel by channel: the result is
// w[0] * u of the oldest token + ... + w[taps - 1] * u of the token itself. The state before a token is u of
// the taps - 1 tokens before it, the oldest first.
//
// With gates, a row of the input is [b | c | x], u is b * x, and the result is multiplied by c. Without them
// a row begins with u; the result gets a bias, if there is one, and the activation SiLU.
#include <metal_stdlib>

#include "args.h"
#include "causal_conv.h"
#include "variants.h"

using namespace metal;

// Grid: (channels, tokens) in threads. A slot that is read is not written.
template <typename T>
kernel void causal_conv(device const float* filter [[buffer(0)]],  // [channels][taps]
                        device const float* bias [[buffer(1)]],    // [channels]
                        device const float* in [[buffer(2)]],      // [tokens][in_stride]
                        constant StateRow* rows [[buffer(3)]],     // [tokens]
                        device float* states [[buffer(4)]],  // slots, from the layer's state in the first one
                        device T* out [[buffer(5)]],         // [tokens - first_out][channels]
                        constant CausalConvArgs& args [[buffer(6)]],
                        uint2 position [[thread_position_in_grid]]) {
  if (position.x >= args.channels || position.y >= args.tokens) return;
  convolve<T>(filter, bias, in, rows, states, out, args, position.x, position.y);
}

INSTANTIATE_FOR_FLOATS(causal_conv)
