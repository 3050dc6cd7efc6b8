// Rotary position embedding of queries and keys, and the append of keys and values to the cache.
#include <metal_stdlib>

#include "args.h"
#include "pages.h"
#include "rope.h"

using namespace metal;

// One simdgroup for each head of q, k and v of a token. Grid: (n_heads + 2 * n_kv_heads, tokens) simdgroups,
// as threads (32 * heads, tokens); with skip_queries only the heads of k and v. T is the type of the cache.
template <typename T>
kernel void rope_append(device const float* bias [[buffer(0)]],    // one row of qkv
                        device const float* q_norm [[buffer(1)]],  // [key_dim]
                        device const float* k_norm [[buffer(2)]],  // [key_dim]
                        device const float2* table [[buffer(3)]],  // [position][rope_dim / 2] (cos, sin)
                        device float* qkv [[buffer(4)]],  // [tokens][q | k | v | ...]; q is rotated in place
                        device const PassRow* rows [[buffer(5)]],  // [tokens]
                        device const uint* pages [[buffer(6)]],    // block tables
                        device T* k_cache [[buffer(7)]],  // pages of [PAGE_POSITIONS][n_kv_heads][key_dim]
                        device T* v_cache [[buffer(8)]],  // pages of [PAGE_POSITIONS][n_kv_heads][value_dim]
                        constant RopeArgs& args [[buffer(9)]],
                        uint2 thread_position [[thread_position_in_grid]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  const uint token = thread_position.y, position = rows[token].position, in_page = position % PAGE_POSITIONS;
  device const uint* block_table = pages + rows[token].pages;
  const uint q_dim = args.n_heads * args.query_step, k_dim = args.n_kv_heads * args.key_dim,
             v_dim = args.n_kv_heads * args.value_dim;
  device float* row = qkv + ulong(token) * args.row_stride;
  uint head = thread_position.x / 32 + (args.skip_queries ? args.n_heads : 0);

  if (head >= args.n_heads + args.n_kv_heads) {  // v: only stored
    head -= args.n_heads + args.n_kv_heads;
    const uint first = q_dim + k_dim + head * args.value_dim;
    device T* v_page = page_at(v_cache, block_table, position, args.page_stride);
    return round_head<T>(row, first, bias, args, lane, v_page + in_page * v_dim + head * args.value_dim);
  }

  // The heads of k follow those of q.
  const uint first =
      head < args.n_heads ? head * args.query_step : q_dim + (head - args.n_heads) * args.key_dim;
  table += position * (args.rope_dim / 2);
  if (head < args.n_heads)
    return rotate_head<float>(row, first, bias, q_norm, args.has_q_norm, table, args, lane, row + first);
  device T* k_page = page_at(k_cache, block_table, position, args.page_stride);
  rotate_head<T>(row, first, bias, k_norm, args.has_k_norm, table, args, lane,
                 k_page + in_page * k_dim + first - q_dim);
}

template [[host_name("rope_append_f16")]] kernel decltype(rope_append<half>) rope_append<half>;
template [[host_name("rope_append_f32")]] kernel decltype(rope_append<float>) rope_append<float>;
