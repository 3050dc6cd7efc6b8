// Products of weights with one token, in float32.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// Sum over the `lanes` neighbouring lanes (a power of two) that share a row.
static inline float row_sum(float sum, ushort lanes) {
  for (ushort offset = lanes / 2; offset > 0; offset /= 2) sum += simd_shuffle_xor(sum, offset);
  return sum;
}

// y[row] (+)= w[row] . x. A simdgroup takes 32 / lanes_per_row rows, whose lanes each take every
// lanes_per_row-th item.
template <typename W>
kernel void matvec(device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                   device const float* x [[buffer(1)]],  // [in_dim]
                   device float* y [[buffer(2)]],        // [out_dim]
                   constant MatvecArgs& args [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
                   ushort lane [[thread_index_in_simdgroup]],
                   ushort simdgroup [[simdgroup_index_in_threadgroup]],
                   ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const ushort lanes = args.lanes_per_row;
  const uint row = (group * simdgroups + simdgroup) * (32 / lanes) + lane / lanes;
  // Lanes beyond the last row repeat it: every lane must take part in the sums.
  device const uchar* weights = stacked_row(w, args.weights, min(row, args.out_dim - 1));
  const bool writes = lane % lanes == 0 && row < args.out_dim;
  const float before = writes && args.accumulate ? y[row] : 0.0f;  // under way while the sum is made
  float4 sum = 0.0f;
#pragma unroll(4)
  for (uint i = lane % lanes; i < args.in_dim / 8; i += lanes) {
    float4 a, b;
    W::load(weights, i, a, b);
    device const float4* values = (device const float4*)(x + W::first(i));
    sum = fma(a, values[0], sum);
    sum = fma(b, values[W::kSecond / 4], sum);
  }
  const float total = row_sum(sum.x + sum.y + sum.z + sum.w, lanes);
  if (writes) y[row] = args.accumulate ? before + total : total;
}

// y[row] = activation(gate[row] . x) * (up[row] . x); the stacked matrices are gate and up.
template <typename W>
kernel void matvec_swiglu(device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
                          device const float* x [[buffer(1)]],  // [in_dim]
                          device float* y [[buffer(2)]],        // [out_dim]
                          constant MatvecArgs& args [[buffer(3)]],
                          uint group [[threadgroup_position_in_grid]],
                          ushort lane [[thread_index_in_simdgroup]],
                          ushort simdgroup [[simdgroup_index_in_threadgroup]],
                          ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const ushort lanes = args.lanes_per_row;
  const uint row = (group * simdgroups + simdgroup) * (32 / lanes) + lane / lanes;
  const ulong row_offset = ulong(min(row, args.out_dim - 1)) * args.weights.row_bytes;
  device const uchar* gate_weights = w + args.weights.offset[0] + row_offset;
  device const uchar* up_weights = w + args.weights.offset[1] + row_offset;
  float4 gate = 0.0f, up = 0.0f;
#pragma unroll(4)
  for (uint i = lane % lanes; i < args.in_dim / 8; i += lanes) {
    device const float4* values = (device const float4*)(x + W::first(i));
    const float4 first = values[0], second = values[W::kSecond / 4];
    float4 a, b;
    W::load(gate_weights, i, a, b);
    gate = fma(b, second, fma(a, first, gate));
    W::load(up_weights, i, a, b);
    up = fma(b, second, fma(a, first, up));
  }
  const float gate_total = row_sum(gate.x + gate.y + gate.z + gate.w, lanes);
  const float up_total = row_sum(up.x + up.y + up.z + up.w, lanes);
  if (lane % lanes == 0 && row < args.out_dim) y[row] = activate(gate_total, args.activation) * up_total;
}

typedef decltype(matvec<F32>) matvec_t;
#define INSTANTIATE(name, W)                                         \
  template [[host_name("matvec_" #name)]] kernel matvec_t matvec<W>; \
  template [[host_name("matvec_swiglu_" #name)]] kernel matvec_t matvec_swiglu<W>;
EACH_TYPE(INSTANTIATE)
