// Inputs of layers from the tokens themselves: a projection of the embedding, normalized for each layer, plus
// rows of an embedding that the host has read. Dividing by sqrt(2) keeps the magnitude of the addends.
#include <metal_stdlib>

#include "args.h"

using namespace metal;

constant constexpr float kRootOfHalf = 0.70710678f;

// One simdgroup per layer of a token. Grid: (layers, tokens) simdgroups, as threads (32 * layers, tokens).
kernel void layer_inputs(device const float* weight [[buffer(0)]],  // [dim]
                         device const float* added [[buffer(1)]],   // [tokens][layers][dim]
                         device float* x [[buffer(2)]],             // [tokens][layers][dim]
                         constant LayerInputsArgs& args [[buffer(3)]],
                         uint2 thread_position [[thread_position_in_grid]],
                         ushort lane [[thread_index_in_simdgroup]]) {
  const uint layer = thread_position.x / 32;
  if (layer >= args.layers) return;
  const ulong first = (ulong(thread_position.y) * args.layers + layer) * args.dim;
  x += first;
  added += first;
  float sum = 0.0f;
  for (uint i = lane; i < args.dim; i += 32) sum += x[i] * x[i];
  const float scale = precise::rsqrt(simd_sum(sum) / (float(args.dim) * args.filled) + args.eps);
  for (uint i = lane; i < args.dim; i += 32) x[i] = (x[i] * scale * weight[i] + added[i]) * kRootOfHalf;
}
