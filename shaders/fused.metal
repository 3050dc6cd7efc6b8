// Decode kernels that include the step before a projection. They save a dispatch and a pass through memory,
// but repeat work in every row: whether that is faster depends on the device. Grid: (rows, tokens); each
// token reads the weights for itself.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// y[row] = w[row] . rmsnorm(x). The norm's factor is common to all columns, so the lanes of a row sum the
// squares of x together with their products, and multiply at the end: x is read once.
template <typename W>
static inline void rmsnorm_matvec(device const uchar* w, device const float* norm, device const float* x,
                                  device float* y, constant MatvecArgs& args, uint first_row, ushort lane) {
  const ushort lanes = args.lanes_per_row;
  const uint row = first_row + lane / lanes;
  device const uchar* weights = stacked_row(w, args.weights, min(row, args.out_dim - 1));
  const uint items = args.in_dim / 8;
  float4 sum = 0.0f, squares = 0.0f;
  for (uint first = lane % lanes; first < items; first += lanes * kAhead) {
    float4 a[kAhead], b[kAhead], x_a[kAhead], x_b[kAhead], scale_a[kAhead], scale_b[kAhead];
#pragma unroll
    for (ushort r = 0; r < kAhead; ++r) {
      const uint i = min(first + r * lanes, items - 1);
      W::load(weights, i, a[r], b[r]);
      device const float4* values = (device const float4*)(x + W::first(i));
      device const float4* scales = (device const float4*)(norm + W::first(i));
      x_a[r] = values[0];
      x_b[r] = values[W::kSecond / 4];
      scale_a[r] = scales[0];
      scale_b[r] = scales[W::kSecond / 4];
    }
#pragma unroll
    for (ushort r = 0; r < kAhead; ++r) {
      const bool inside = first + r * lanes < items;
      const float4 with = fma(b[r], x_b[r] * scale_b[r], fma(a[r], x_a[r] * scale_a[r], sum));
      const float4 with_squares = fma(x_b[r], x_b[r], fma(x_a[r], x_a[r], squares));
      sum = inside ? with : sum;
      squares = inside ? with_squares : squares;
    }
  }
  float2 total = float2(sum.x + sum.y + sum.z + sum.w, squares.x + squares.y + squares.z + squares.w);
  for (ushort offset = lanes / 2; offset > 0; offset /= 2) total += simd_shuffle_xor(total, offset);
  const float scale = precise::rsqrt(total.y / float(args.in_dim) + args.eps);
  if (lane % lanes == 0 && row < args.out_dim) y[row] = total.x * scale;
}

kernel void rmsnorm_matvec_q4_0(device const uchar* w [[buffer(0)]],     // stacked matrices [out_dim][in_dim]
                                device const float* norm [[buffer(1)]],  // [in_dim]
                                device const float* x [[buffer(2)]],     // [tokens][in_dim]
                                device float* y [[buffer(3)]],           // [tokens][out_stride]
                                constant MatvecArgs& args [[buffer(4)]],
                                uint2 group [[threadgroup_position_in_grid]],
                                ushort lane [[thread_index_in_simdgroup]],
                                ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                ushort simdgroups [[simdgroups_per_threadgroup]]) {
  rmsnorm_matvec<Q4_0>(w, norm, x + group.y * args.in_dim, y + group.y * args.out_stride, args,
                       (group.x * simdgroups + simdgroup) * (32 / args.lanes_per_row), lane);
}

kernel void rmsnorm_matvec_f32(device const uchar* w [[buffer(0)]],     // stacked matrices [out_dim][in_dim]
                               device const float* norm [[buffer(1)]],  // [in_dim]
                               device const float* x [[buffer(2)]],     // [tokens][in_dim]
                               device float* y [[buffer(3)]],           // [tokens][out_stride]
                               constant MatvecArgs& args [[buffer(4)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               ushort lane [[thread_index_in_simdgroup]],
                               ushort simdgroup [[simdgroup_index_in_threadgroup]],
                               ushort simdgroups [[simdgroups_per_threadgroup]]) {
  rmsnorm_matvec<F32>(w, norm, x + group.y * args.in_dim, y + group.y * args.out_stride, args,
                      (group.x * simdgroups + simdgroup) * (32 / args.lanes_per_row), lane);
}

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
