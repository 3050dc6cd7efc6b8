// Products of weights with one token, in float32.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// Sum over the `lanes` adjacent lanes (a power of two) that share a row.
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
  const float before = writes && args.accumulate ? y[row] : 0.0f;  // in flight during the sum
  const uint items = args.in_dim / 8;
  float4 sum = 0.0f;
  // No load depends on a branch: rounds beyond the end read the last item again and do not add it.
  for (uint first = lane % lanes; first < items; first += lanes * kAhead) {
    float4 a[kAhead], b[kAhead], x_a[kAhead], x_b[kAhead];
#pragma unroll
    for (ushort r = 0; r < kAhead; ++r) {
      const uint i = min(first + r * lanes, items - 1);
      W::load(weights, i, a[r], b[r]);
      device const float4* values = (device const float4*)(x + W::first(i));
      x_a[r] = values[0];
      x_b[r] = values[W::kSecond / 4];
    }
#pragma unroll
    for (ushort r = 0; r < kAhead; ++r) {
      const float4 with = fma(b[r], x_b[r], fma(a[r], x_a[r], sum));
      sum = first + r * lanes < items ? with : sum;
    }
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
  const uint items = args.in_dim / 8;
  float4 gate = 0.0f, up = 0.0f;
  for (uint first = lane % lanes; first < items; first += lanes * kAhead) {
    float4 gate_a[kAhead], gate_b[kAhead], up_a[kAhead], up_b[kAhead], x_a[kAhead], x_b[kAhead];
#pragma unroll
    for (ushort r = 0; r < kAhead; ++r) {
      const uint i = min(first + r * lanes, items - 1);
      W::load(gate_weights, i, gate_a[r], gate_b[r]);
      W::load(up_weights, i, up_a[r], up_b[r]);
      device const float4* values = (device const float4*)(x + W::first(i));
      x_a[r] = values[0];
      x_b[r] = values[W::kSecond / 4];
    }
#pragma unroll
    for (ushort r = 0; r < kAhead; ++r) {
      const bool inside = first + r * lanes < items;
      const float4 with_gate = fma(gate_b[r], x_b[r], fma(gate_a[r], x_a[r], gate));
      const float4 with_up = fma(up_b[r], x_b[r], fma(up_a[r], x_a[r], up));
      gate = inside ? with_gate : gate;
      up = inside ? with_up : up;
    }
  }
  const float gate_total = row_sum(gate.x + gate.y + gate.z + gate.w, lanes);
  const float up_total = row_sum(up.x + up.y + up.z + up.w, lanes);
  if (lane % lanes == 0 && row < args.out_dim) y[row] = activate(gate_total, args.activation) * up_total;
}

typedef decltype(matvec<F32>) matvec_t;
#define INSTANTIATE(name, W, number)                                 \
  template [[host_name("matvec_" #name)]] kernel matvec_t matvec<W>; \
  template [[host_name("matvec_swiglu_" #name)]] kernel matvec_t matvec_swiglu<W>;
EACH_TENSOR_TYPE(INSTANTIATE)
