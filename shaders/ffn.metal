// Activation of the feed-forward block, if no product includes it: out = activation(gate) * up, or
// activation(up) in models without a gate.
#include <metal_stdlib>

#include "args.h"
#include "projection.h"

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
  out[token * args.ffn_dim + i] = is_same<T, half>::value ? T(finite_half(value)) : T(value);
}

template [[host_name("swiglu_f32")]] kernel decltype(swiglu<float>) swiglu<float>;
template [[host_name("swiglu_f16")]] kernel decltype(swiglu<half>) swiglu<half>;
