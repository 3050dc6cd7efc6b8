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
static inline float2 values_of(PackedByte byte) {
  return float(byte.d) * (float2(byte.quants & 0xF, byte.quants >> 4) - 8.0f);
}

// Sums kCount values (a power of two) over the simdgroup, each lane to the sum of value lane / (32 / kCount).
// Lanes exchange the values that they do not keep, first with the lane at distance kStep = 16: that takes
// kCount shuffles and a few more, instead of five for each value.
template <ushort kCount, ushort kStep = 16>
struct SharedSum {
  static float of(thread float* values, ushort lane) {
    const bool upper = lane & kStep;
#pragma unroll
    for (ushort j = 0; j < kCount / 2; ++j) {
      const float first = values[j], second = values[j + kCount / 2];
      values[j] = (upper ? second : first) + simd_shuffle_xor(upper ? first : second, kStep);
    }
    return SharedSum<kCount / 2, kStep / 2>::of(values, lane);
  }
};
template <ushort kStep>
struct SharedSum<1, kStep> {
  static float of(thread float* values, ushort) {
    float sum = values[0];
    for (ushort step = kStep; step > 0; step /= 2) sum += simd_shuffle_xor(sum, step);
    return sum;
  }
};

// A threadgroup's rows with a tile of tokens. Two simdgroups share two rows, each with half of the columns,
// so that each value read of x is used for both rows. The number of tokens is known to the compiler: no load
// depends on a branch, and the loads of all tokens are in flight together. `partial` has 16 floats for each
// simdgroup.
template <bool kAccumulate, ushort kTokens>
static inline void rows_times_tokens(device const uchar* w, device const float* x, device float* y,
                                     constant MultiTokenArgs& args, uint first_row,
                                     threadgroup float* partial, ushort thread_index, ushort lane,
                                     ushort simdgroup) {
  constexpr ushort kRounds = 2;  // rounds whose weights are loaded before the first is needed
  constexpr ushort kPadded = kTokens > 4 ? 8 : kTokens > 2 ? 4 : kTokens;
  constexpr ushort kValues = 2 * kPadded;  // two rows of tokens
  // The thread that will write a sum reads the value to add it to early.
  const uint row = first_row + thread_index % MULTI_TOKEN_ROWS;
  const ushort token = thread_index / MULTI_TOKEN_ROWS;
  const bool writes = token < kTokens && row < args.out_dim;
  const float before = kAccumulate && writes ? y[token * args.out_stride + row] : 0.0f;

  // Rows beyond the last one repeat it: every thread must reach the barrier.
  const uint even = first_row + simdgroup / 2 * 2, last = args.out_dim - 1;
  device const uchar* row_a = stacked_row(w, args.weights, min(even, last));
  device const uchar* row_b = stacked_row(w, args.weights, min(even + 1, last));
  const uint items = args.in_dim / 8, middle = items / 8 * 4;  // whole blocks
  const uint begin = simdgroup % 2 ? middle : 0, end = simdgroup % 2 ? items : middle;
  const uint whole = begin + ((end - begin) & ~31u);
  // The rest after full rounds is less than one item for each lane (4 items at in_dim 576): divided into
  // single bytes, which hold two values each, it keeps more lanes busy.
  const uint bytes = end * 4, last_byte = items * 4 - 1;
  uint rest = whole * 4 + lane;
  PackedByte byte_a = fetch_byte(row_a, min(rest, last_byte)),
             byte_b = fetch_byte(row_b, min(rest, last_byte));

  float sum[kValues] = {};  // of the first row, then of the second
  for (uint first = begin + lane; first < whole; first += 32 * kRounds) {
    Q4_0::Packed packed_a[kRounds], packed_b[kRounds];
#pragma unroll
    for (ushort r = 0; r < kRounds; ++r) {
      const uint i = min(first + r * 32, items - 1);
      packed_a[r] = Q4_0::fetch(row_a, i);
      packed_b[r] = Q4_0::fetch(row_b, i);
    }
#pragma unroll
    for (ushort r = 0; r < kRounds; ++r) {
      const uint i = first + r * 32;
      if (i >= whole) break;
      float4 a_low, a_high, b_low, b_high;
      Q4_0::unpack(packed_a[r], a_low, a_high);
      Q4_0::unpack(packed_b[r], b_low, b_high);
      device const float* column = x + Q4_0::first(i);
#pragma unroll
      for (ushort t = 0; t < kTokens; ++t) {
        device const float4* values = (device const float4*)(column + t * args.in_dim);
        const float4 low = values[0], high = values[Q4_0::kSecond / 4];
        sum[t] += dot(a_low, low) + dot(a_high, high);
        sum[kPadded + t] += dot(b_low, low) + dot(b_high, high);
      }
    }
  }
  for (; rest < bytes; rest += 32) {
    const float2 a = values_of(byte_a), b = values_of(byte_b);
    byte_a = fetch_byte(row_a, min(rest + 32, last_byte));
    byte_b = fetch_byte(row_b, min(rest + 32, last_byte));
    device const float* column = x + (rest >> 4) * QK4_0 + (rest & 15);
#pragma unroll
    for (ushort t = 0; t < kTokens; ++t) {
      device const float* values = column + t * args.in_dim;
      const float2 both = float2(values[0], values[16]);
      sum[t] += dot(a, both);
      sum[kPadded + t] += dot(b, both);
    }
  }
  const float of_lane = SharedSum<kValues>::of(sum, lane);
  if (lane % (32 / kValues) == 0) partial[simdgroup * 16 + lane / (32 / kValues)] = of_lane;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!writes) return;
  const ushort r = thread_index % MULTI_TOKEN_ROWS, place = r / 2 * 32 + r % 2 * kPadded + token;
  y[token * args.out_stride + row] = before + (partial[place] + partial[place + 16]);
}

// y[t][row] (+)= w[row] . x[t]. Threadgroup: 256 threads, 8 simdgroups, 8 rows.
// Grid: (rows / MULTI_TOKEN_ROWS, batch_size / MULTI_TOKEN_TILE), both rounded up.
template <bool kAccumulate>
kernel void multi_token_matvec_q4_0(device const uchar* w
                                    [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                                    device const float* x [[buffer(1)]],  // [batch_size][in_dim]
                                    device float* y [[buffer(2)]],        // [batch_size][out_stride]
                                    constant MultiTokenArgs& args [[buffer(3)]],
                                    uint2 group [[threadgroup_position_in_grid]],
                                    ushort thread_index [[thread_index_in_threadgroup]],
                                    ushort lane [[thread_index_in_simdgroup]],
                                    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[MULTI_TOKEN_ROWS * 16];
  const uint first_row = group.x * MULTI_TOKEN_ROWS, first_token = group.y * MULTI_TOKEN_TILE;
  x += first_token * args.in_dim;
  y += first_token * args.out_stride;
#define WITH(tokens)                                                                                   \
  return rows_times_tokens<kAccumulate, tokens>(w, x, y, args, first_row, partial, thread_index, lane, \
                                                simdgroup)
  // clang-format off
  switch (min(uint(MULTI_TOKEN_TILE), args.batch_size - first_token)) {
    case 1: WITH(1);
    case 2: WITH(2);
    case 3: WITH(3);
    case 4: WITH(4);
    case 5: WITH(5);
    case 6: WITH(6);
    case 7: WITH(7);
    default: WITH(MULTI_TOKEN_TILE);
  }
    // clang-format on
#undef WITH
}

typedef decltype(multi_token_matvec_q4_0<false>) multi_token_t;
template [[host_name("multi_token_matvec_q4_0")]] kernel multi_token_t multi_token_matvec_q4_0<false>;
template
    [[host_name("multi_token_matvec_q4_0_accumulate")]] kernel multi_token_t multi_token_matvec_q4_0<true>;
