// A kernel for few tokens that computes SwiGLU within the down projection. It saves a dispatch and a pass
// through memory, but repeats the activation for each row of weights. Off by default. Grid: (rows, tokens);
// each token reads the weights separately.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// y[row] += w[row] . (activation(gate) * up): SwiGLU of the input of the down projection.
kernel void silu_matvec_q4_0_accumulate(device const uchar* w [[buffer(0)]],  // [out_dim][in_dim]
                                        device const float* gate_up
                                        [[buffer(1)]],  // [tokens][gate | up], rows of 2 * in_dim
                                        device float* y [[buffer(2)]],  // [tokens][out_stride]
                                        constant MatvecArgs& args [[buffer(3)]],
                                        uint2 group [[threadgroup_position_in_grid]],
                                        ushort lane [[thread_index_in_simdgroup]],
                                        ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                        ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const ushort lanes = args.lanes_per_row;
  gate_up += group.y * 2 * args.in_dim;
  y += group.y * args.out_stride;
  const uint row = (group.x * simdgroups + simdgroup) * (32 / lanes) + lane / lanes;
  device const uchar* weights = stacked_row(w, args.weights, min(row, args.out_dim - 1));
  float sum = 0.0f;
  for (uint i = lane % lanes; i < args.in_dim / 8; i += lanes) {
    float4 a, b;
    Q4_0::load(weights, i, a, b);
    device const float* gate = gate_up + Q4_0::first(i);
    device const float* up = gate + args.in_dim;
    for (ushort j = 0; j < 4; ++j) {
      sum += a[j] * activate(gate[j], args.activation) * up[j];
      sum += b[j] * activate(gate[Q4_0::kSecond + j], args.activation) * up[Q4_0::kSecond + j];
    }
  }
  for (ushort offset = lanes / 2; offset > 0; offset /= 2) sum += simd_shuffle_xor(sum, offset);
  if (lane % lanes == 0 && row < args.out_dim) y[row] += sum;
}
