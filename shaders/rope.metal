// Rotary position embedding of queries and keys, and the append of keys and values to the cache.
#include <metal_stdlib>

#include "args.h"

using namespace metal;

// Dimensions of pair `i`: of a rotated one, or two neighbours behind the rotated ones.
static inline ushort2 pair_of(ushort i, ushort rope_dim, uint style) {
  return i >= rope_dim / 2 || style == ROPE_INTERLEAVED ? ushort2(2 * i, 2 * i + 1)
                                                        : ushort2(i, i + rope_dim / 2);
}

// The values of two dimensions of the head at `first`, with their biases.
static inline float2 pair_at(device const float* row, device const float* bias, uint first, ushort2 dims,
                             bool has_bias) {
  const float2 value = float2(row[first + dims.x], row[first + dims.y]);
  return has_bias ? value + float2(bias[first + dims.x], bias[first + dims.y]) : value;
}

// One simdgroup for each head of q, k and v of a token. Grid: (n_heads + 2 * n_kv_heads, tokens) simdgroups,
// as threads (32 * heads, tokens); with skip_queries the heads of k and v alone. T is the type of the cache.
template <typename T>
kernel void rope_append(device const float* bias [[buffer(0)]],    // one row of qkv
                        device const float* q_norm [[buffer(1)]],  // [key_dim]
                        device const float* k_norm [[buffer(2)]],  // [key_dim]
                        device const float2* table [[buffer(3)]],  // [position][rope_dim / 2] (cos, sin)
                        device float* qkv [[buffer(4)]],  // [tokens][q | k | v]; q is rotated in place
                        device T* k_cache [[buffer(5)]],  // [position][n_kv_heads][key_dim]
                        device T* v_cache [[buffer(6)]],  // [position][n_kv_heads][value_dim]
                        constant RopeArgs& args [[buffer(7)]],
                        uint2 thread_position [[thread_position_in_grid]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  const uint token = thread_position.y, position = args.position + token;
  const uint q_dim = args.n_heads * args.key_dim, k_dim = args.n_kv_heads * args.key_dim,
             v_dim = args.n_kv_heads * args.value_dim;
  device float* row = qkv + token * (q_dim + k_dim + v_dim);
  uint head = thread_position.x / 32 + (args.skip_queries ? args.n_heads : 0);

  if (head >= args.n_heads + args.n_kv_heads) {  // v: only stored
    head -= args.n_heads + args.n_kv_heads;
    const uint first = q_dim + k_dim + head * args.value_dim;
    device T* out = v_cache + position * v_dim + head * args.value_dim;
    for (ushort i = lane; i < args.value_dim; i += 32)
      out[i] = T(row[first + i] + (args.has_bias ? bias[first + i] : 0.0f));
    return;
  }

  const bool is_query = head < args.n_heads;
  const uint first = head * args.key_dim;  // the heads of k follow those of q
  device const float* norm = is_query ? q_norm : k_norm;
  const bool has_norm = is_query ? args.has_q_norm : args.has_k_norm;
  // A lane takes two dimensions at a time and reads no others: other lanes write theirs in place.
  float scale = 1.0f;
  if (has_norm) {
    float sum = 0.0f;
    for (ushort i = lane; i < args.key_dim / 2; i += 32) {
      const float2 value = pair_at(row, bias, first, pair_of(i, args.rope_dim, args.style), args.has_bias);
      sum += dot(value, value);
    }
    scale = precise::rsqrt(simd_sum(sum) / float(args.key_dim) + args.eps);
  }

  const uint cached = position * k_dim + first - q_dim;  // of a key
  table += position * (args.rope_dim / 2);
  for (ushort i = lane; i < args.key_dim / 2; i += 32) {
    const ushort2 dims = pair_of(i, args.rope_dim, args.style);
    float2 value = pair_at(row, bias, first, dims, args.has_bias);
    if (has_norm) value *= scale * float2(norm[dims.x], norm[dims.y]);
    if (i < args.rope_dim / 2) {
      const float2 turn = table[i];
      value = float2(value.x * turn.x - value.y * turn.y, value.x * turn.y + value.y * turn.x);
    }
    if (is_query) {
      row[first + dims.x] = value.x;
      row[first + dims.y] = value.y;
    } else {
      k_cache[cached + dims.x] = T(value.x);
      k_cache[cached + dims.y] = T(value.y);
    }
  }
}

template [[host_name("rope_append_f16")]] kernel decltype(rope_append<half>) rope_append<half>;
template [[host_name("rope_append_f32")]] kernel decltype(rope_append<float>) rope_append<float>;
