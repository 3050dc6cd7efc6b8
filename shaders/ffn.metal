// SwiGLU of projections that were computed separately: out = activation(gate) * up.
#include <metal_stdlib>

#include "args.h"
#include "projection.h"

using namespace metal;

// Grid: (ffn_dim, tokens) in threads. T is half where a matmul reads the result, float where a matvec does.
template <typename T>
kernel void swiglu(device const float* gate_up [[buffer(0)]],  // [tokens][2 * ffn_dim]
                   device T* out [[buffer(1)]],                // [tokens][ffn_dim]
                   constant SwigluArgs& args [[buffer(2)]], uint2 position [[thread_position_in_grid]]) {
  const uint i = position.x, token = position.y;
  if (i >= args.ffn_dim || token >= args.tokens) return;
  device const float* gate = gate_up + token * 2 * args.ffn_dim + i;
  const float value = activate(gate[0], args.activation) * gate[args.ffn_dim];
  out[token * args.ffn_dim + i] = is_same<T, half>::value ? T(finite_half(value)) : T(value);
}

template [[host_name("swiglu_f32")]] kernel decltype(swiglu<float>) swiglu<float>;
template [[host_name("swiglu_f16")]] kernel decltype(swiglu<half>) swiglu<half>;
