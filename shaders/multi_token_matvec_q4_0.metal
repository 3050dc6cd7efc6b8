// Products of Q4_0 weights with a few tokens, in float32: each weight is dequantized once for a tile of
// tokens.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// One byte of a row, two of its values, and their factor.
struct PackedByte {
  uchar quants;
  fp16_t d;
};
static inline PackedByte fetch_byte(device const uchar* row, uint i) {
  device const block_q4_0* block = (device const block_q4_0*)row + (i >> 4);
  return {block->qs[i & 15], block->d};
}

// One row with a tile of tokens. Their number is known to the compiler, so that no load depends on a branch:
// those of all tokens are under way together.
template <bool kAccumulate, ushort kTokens>
static inline void row_times_tokens(device const uchar* weights, device const float* x, device float* y,
                                    constant MultiTokenArgs& args, ushort lane) {
  constexpr ushort kRounds = 4;  // whose weights are asked for before the first is needed
  const uint items = args.in_dim / 8, whole = items & ~31u;
  // What is left after full rounds is less than one item for each lane (8 items at in_dim 576): shared out by
  // single bytes, which hold two values each, it keeps every lane busy.
  const uint bytes = items * 4;
  uint rest = whole * 4 + lane;
  PackedByte byte = fetch_byte(weights, min(rest, bytes - 1));

  // What is added to is read ahead: behind the sums each token's read would wait for the store before it.
  float before[kTokens] = {};
#pragma unroll
  for (ushort t = 0; t < kTokens; ++t)
    if (kAccumulate && lane == 0) before[t] = y[t * args.out_stride];
  float sum[kTokens] = {};
  for (uint first = lane; first < whole; first += 32 * kRounds) {
    Q4_0::Packed packed[kRounds];
#pragma unroll
    for (ushort r = 0; r < kRounds; ++r) packed[r] = Q4_0::fetch(weights, min(first + r * 32, items - 1));
#pragma unroll
    for (ushort r = 0; r < kRounds; ++r) {
      const uint i = first + r * 32;
      if (i >= whole) break;
      float4 a, b;
      Q4_0::unpack(packed[r], a, b);
      device const float* column = x + Q4_0::first(i);
#pragma unroll
      for (ushort t = 0; t < kTokens; ++t) {
        device const float4* values = (device const float4*)(column + t * args.in_dim);
        sum[t] += dot(a, values[0]) + dot(b, values[Q4_0::kSecond / 4]);
      }
    }
  }
  for (; rest < bytes; rest += 32) {
    const float d = float(byte.d);
    const float a = d * (float(byte.quants & 0xF) - 8.0f), b = d * (float(byte.quants >> 4) - 8.0f);
    byte = fetch_byte(weights, min(rest + 32, bytes - 1));
    device const float* column = x + (rest >> 4) * QK4_0 + (rest & 15);
#pragma unroll
    for (ushort t = 0; t < kTokens; ++t) {
      device const float* values = column + t * args.in_dim;
      sum[t] += a * values[0] + b * values[16];
    }
  }
#pragma unroll
  for (ushort t = 0; t < kTokens; ++t) {
    const float total = simd_sum(sum[t]);
    if (lane == 0) y[t * args.out_stride] = kAccumulate ? before[t] + total : total;
  }
}

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
  device const uchar* weights = stacked_row(w, args.weights, row);
  x += first_token * args.in_dim;
  y += first_token * args.out_stride + row;
  // clang-format off
  switch (min(uint(MULTI_TOKEN_TILE), args.batch_size - first_token)) {
    case 1: return row_times_tokens<kAccumulate, 1>(weights, x, y, args, lane);
    case 2: return row_times_tokens<kAccumulate, 2>(weights, x, y, args, lane);
    case 3: return row_times_tokens<kAccumulate, 3>(weights, x, y, args, lane);
    case 4: return row_times_tokens<kAccumulate, 4>(weights, x, y, args, lane);
    case 5: return row_times_tokens<kAccumulate, 5>(weights, x, y, args, lane);
    case 6: return row_times_tokens<kAccumulate, 6>(weights, x, y, args, lane);
    case 7: return row_times_tokens<kAccumulate, 7>(weights, x, y, args, lane);
    default: return row_times_tokens<kAccumulate, MULTI_TOKEN_TILE>(weights, x, y, args, lane);
  }
  // clang-format on
}

typedef decltype(multi_token_matvec_q4_0<false>) multi_token_t;
template [[host_name("multi_token_matvec_q4_0")]] kernel multi_token_t multi_token_matvec_q4_0<false>;
template
    [[host_name("multi_token_matvec_q4_0_accumulate")]] kernel multi_token_t multi_token_matvec_q4_0<true>;
