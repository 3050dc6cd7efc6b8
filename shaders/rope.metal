// Rotary position embedding of queries and keys, and the append of keys and values to the cache.
#include <metal_stdlib>

#include "args.h"
#include "causal_conv.h"
#include "pages.h"
#include "rope.h"
#include "variants.h"

using namespace metal;

// Bindings of rope_append.
template <typename T>
struct Append {
  device const float* bias;
  device const float* q_norm;
  device const float* k_norm;
  device const float2* table;
  device float* qkv;
  device const PassRow* rows;
  device const uint* pages;
  device T* k_cache;
  device T* v_cache;

  // Processes a head of a token with a simdgroup. Heads of q come first, then those of k and v.
  void append(uint head, uint token, constant RopeArgs& args, ushort lane) const {
    const uint position = rows[token].position, in_page = position % PAGE_POSITIONS;
    device const uint* block_table = pages + rows[token].pages;
    const uint q_dim = args.n_heads * args.query_step, k_dim = args.n_kv_heads * args.key_dim,
               v_dim = args.n_kv_heads * args.value_dim;
    device float* row = qkv + ulong(token) * args.row_stride;

    if (head >= args.n_heads + args.n_kv_heads) {  // v: only stored
      head -= args.n_heads + args.n_kv_heads;
      const uint first = q_dim + k_dim + head * args.value_dim;
      device T* v_page = page_at(v_cache, block_table, position, args.page_stride);
      return round_head<T>(row, first, bias, args, lane, v_page + in_page * v_dim + head * args.value_dim);
    }

    const uint first =
        head < args.n_heads ? head * args.query_step : q_dim + (head - args.n_heads) * args.key_dim;
    device const float2* turns = table + position * (args.rope_dim / 2);
    if (head < args.n_heads)
      return rotate_head<float>(row, first, bias, q_norm, args.has_q_norm, turns, args, lane, row + first);
    device T* k_page = page_at(k_cache, block_table, position, args.page_stride);
    rotate_head<T>(row, first, bias, k_norm, args.has_k_norm, turns, args, lane,
                   k_page + in_page * k_dim + first - q_dim);
  }
};

// One simdgroup per head of q, k and v of a token. Grid: (n_heads + 2 * n_kv_heads, tokens) simdgroups, as
// threads (32 * heads, tokens); with skip_queries only the heads of k and v, with skip_keys only those of q.
// T is the type of the cache.
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
  const Append<T> append = {bias, q_norm, k_norm, table, qkv, rows, pages, k_cache, v_cache};
  append.append(thread_position.x / 32 + (args.skip_queries ? args.n_heads : 0), thread_position.y, args,
                lane);
}

INSTANTIATE_FOR_FLOATS(rope_append)

// Combines rope_append and causal_conv for a layer with attention and a state: the first head_groups
// threadgroups of a token process heads, the others channels. Both read columns of the same rows.
template <typename T>
kernel void rope_append_conv(
    device const float* bias [[buffer(0)]], device const float* q_norm [[buffer(1)]],
    device const float* k_norm [[buffer(2)]], device const float2* table [[buffer(3)]],
    device float* projected [[buffer(4)]],     // [tokens][row_stride]
    device const PassRow* rows [[buffer(5)]],  // [tokens]
    device const uint* pages [[buffer(6)]], device T* k_cache [[buffer(7)]], device T* v_cache [[buffer(8)]],
    device const float* filter [[buffer(9)]],      // [channels][taps]
    device const float* conv_bias [[buffer(10)]],  // [channels]
    constant StateRow* state_rows [[buffer(11)]],  // [tokens]
    device float* states [[buffer(12)]],           // slots, from the layer's state in the first
    device float* out [[buffer(13)]],              // [tokens][channels]
    constant RopeConvArgs& args [[buffer(14)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort2 threads [[threads_per_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  if (group.x < args.head_groups) {
    const Append<T> append = {bias, q_norm, k_norm,  table,  projected + args.qkv_column,
                              rows, pages,  k_cache, v_cache};
    const uint head = group.x * (threads.x / 32) + simdgroup;
    append.append(head + (args.rope.skip_queries ? args.rope.n_heads : 0), group.y, args.rope, lane);
    return;
  }
  const uint channel = (group.x - args.head_groups) * threads.x + thread_index;
  if (channel < args.conv.channels)
    convolve<float>(filter, conv_bias, projected + args.conv_column, state_rows, states, out, args.conv,
                    channel, group.y);
}

INSTANTIATE_FOR_FLOATS(rope_append_conv)
