// Products of Q4_0 weights with a few tokens, in float32: each weight is dequantized once for a tile of
// tokens.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// y[t][row] (+)= w[row] . x[t]. Threadgroup: 256 threads, 8 simdgroups, one row each.
// Grid: (rows / MULTI_TOKEN_ROWS, batch_size / MULTI_TOKEN_TILE), both rounded up.
template <bool kAccumulate>
kernel void multi_token_matvec_q4_0(device const uchar* w
                                    [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                                    device const float* x [[buffer(1)]],  // [batch_size][in_dim]
                                    device float* y [[buffer(2)]],        // [batch_size][out_stride]
                                    constant MultiTokenArgs& args [[buffer(3)]],
                                    uint2 group [[threadgroup_position_in_grid]],
                                    ushort lane [[thread_index_in_simdgroup]],
                                    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group.x * MULTI_TOKEN_ROWS + simdgroup;
  if (row >= args.out_dim) return;
  const uint first_token = group.y * MULTI_TOKEN_TILE;
  const ushort tokens = min(uint(MULTI_TOKEN_TILE), args.batch_size - first_token);
  device const uchar* weights = stacked_row(w, args.weights, row);
  x += first_token * args.in_dim;
  y += first_token * args.out_stride + row;

  // What is added to is read ahead: behind the sums each token's read would wait for the store before it.
  float before[MULTI_TOKEN_TILE] = {};
#pragma unroll
  for (ushort t = 0; t < MULTI_TOKEN_TILE; ++t)
    if (kAccumulate && lane == 0 && t < tokens) before[t] = y[t * args.out_stride];
  float sum[MULTI_TOKEN_TILE] = {};
  const uint items = args.in_dim / 8, whole = items & ~31u;
  for (uint i = lane; i < whole; i += 32) {
    float4 a, b;
    Q4_0::load(weights, i, a, b);
    device const float* column = x + Q4_0::first(i);
#pragma unroll
    for (ushort t = 0; t < MULTI_TOKEN_TILE; ++t) {
      if (t < tokens) {
        device const float4* values = (device const float4*)(column + t * args.in_dim);
        sum[t] += dot(a, values[0]) + dot(b, values[Q4_0::kSecond / 4]);
      }
    }
  }
  // What is left is less than one item for each lane (8 items at in_dim 576): shared out by single bytes,
  // which hold two values each, it keeps every lane busy.
  for (uint i = whole * 4 + lane; i < items * 4; i += 32) {
    device const block_q4_0* block = (device const block_q4_0*)weights + (i >> 4);
    const float d = float(block->d);
    const uchar quants = block->qs[i & 15];
    const float a = d * (float(quants & 0xF) - 8.0f), b = d * (float(quants >> 4) - 8.0f);
    device const float* column = x + (i >> 4) * QK4_0 + (i & 15);
#pragma unroll
    for (ushort t = 0; t < MULTI_TOKEN_TILE; ++t) {
      if (t < tokens) {
        device const float* values = column + t * args.in_dim;
        sum[t] += a * values[0] + b * values[16];
      }
    }
  }
#pragma unroll
  for (ushort t = 0; t < MULTI_TOKEN_TILE; ++t) {
    if (t < tokens) {
      const float total = simd_sum(sum[t]);
      if (lane == 0) y[t * args.out_stride] = kAccumulate ? before[t] + total : total;
    }
  }
}

typedef decltype(multi_token_matvec_q4_0<false>) multi_token_t;
template [[host_name("multi_token_matvec_q4_0")]] kernel multi_token_t multi_token_matvec_q4_0<false>;
template
    [[host_name("multi_token_matvec_q4_0_accumulate")]] kernel multi_token_t multi_token_matvec_q4_0<true>;
