// Activation of the feed-forward block, if it is not fused with a product: out = activation(gate) * up, or
// activation(up) in models without a gate.
#include <metal_stdlib>

#include "args.h"
#include "projection.h"
#include "variants.h"

using namespace metal;

// Grid: (ffn_dim, tokens) in threads. T is half if a matmul reads the result, float if a matvec does.
template <typename T>
kernel void swiglu(device const float* bias [[buffer(0)]],     // [gate | up]
                   device const float* gate_up [[buffer(1)]],  // [tokens][gate | up]
                   device T* out [[buffer(2)]],                // [tokens][ffn_dim]
                   constant SwigluArgs& args [[buffer(3)]], uint2 position [[thread_position_in_grid]]) {
  const uint i = position.x, token = position.y;
  if (i >= args.ffn_dim || token >= args.tokens) return;
  const uint up = args.gated ? i + args.ffn_dim : i;
  device const float* row = gate_up + token * (args.gated ? 2 : 1) * args.ffn_dim;
  const float2 biases = args.has_bias ? float2(bias[i], bias[up]) : float2(0.0f);
  const float first = row[i] + biases[0];
  const float value = args.gated ? activate_gated(first, row[up] + biases[1], args.activation)
                                 : activate(first, args.activation);
  out[token * args.ffn_dim + i] = finite<T>(value);
}

INSTANTIATE_FOR_FLOATS(swiglu)

// The input of a layer from the token itself, through a gate. Grid: (dim, tokens) in threads; T as for
// swiglu.
template <typename T>
kernel void gate_input(device const float* gate [[buffer(0)]],   // [tokens][dim]
                       device const float* input [[buffer(1)]],  // [tokens][input_stride]
                       device T* out [[buffer(2)]],              // [tokens][dim]
                       constant GateInputArgs& args [[buffer(3)]],
                       uint2 position [[thread_position_in_grid]]) {
  const uint i = position.x, token = position.y;
  if (i >= args.dim || token >= args.tokens) return;
  const float value = activate_gated(gate[token * args.dim + i], input[ulong(token) * args.input_stride + i],
                                     args.activation);
  out[token * args.dim + i] = finite<T>(value);
}

INSTANTIATE_FOR_FLOATS(gate_input)
