// Causal attention of a few tokens over a long cache, with online softmax in float32. Each threadgroup takes
// a share of the keys, and the query heads that read the same keys together; a second kernel joins the
// shares.
#include <metal_stdlib>

#include "args.h"

using namespace metal;

constant constexpr ushort kLanes =
    8;  // lanes that share a key: each holds 4 neighbouring dimensions of every 32
constant constexpr float kLowest = -1e30f;  // below every score, and finite: differences of it are numbers

// Softmax over some keys, not yet normalized: o = sum(exp(score - max) v), sum = sum(exp(score - max)).
template <ushort kChunks>
struct PartialSoftmax {
  float best;
  float sum;
  float4 o[kChunks];

  // Measures everything from another maximum.
  void rescale(float new_best) {
    const float factor = fast::exp(best - new_best);
    best = new_best;
    sum *= factor;
#pragma unroll
    for (ushort c = 0; c < kChunks; ++c) o[c] *= factor;
  }
};

// Grid: (splits, n_kv_heads * blocks of query heads, tokens); up to DECODE_SIMDGROUPS simdgroups.
// With one split `out` is [token][n_heads][value_dim]; else, for attention_combine,
// [token][n_heads][splits][value_dim + 2] with the maximum and the sum behind the values.
template <typename T, ushort kChunks>
kernel void attention_decode(device const float* q [[buffer(0)]],  // [tokens][q_stride]
                             device const T* k [[buffer(1)]],      // [position][n_kv_heads][key_dim]
                             device const T* v [[buffer(2)]],      // [position][n_kv_heads][value_dim]
                             device float* out [[buffer(3)]], constant AttentionArgs& args [[buffer(4)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             ushort thread_index [[thread_index_in_threadgroup]],
                             ushort3 threads [[threads_per_threadgroup]],
                             ushort lane [[thread_index_in_simdgroup]],
                             ushort simdgroup [[simdgroup_index_in_threadgroup]],
                             ushort simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr ushort kHeads = DECODE_HEADS(kChunks);
  const uint heads_per_kv = args.n_heads / args.n_kv_heads, blocks = (heads_per_kv + kHeads - 1) / kHeads;
  const uint kv_head = group.y / blocks, first_of_kv = group.y % blocks * kHeads;
  const uint head = kv_head * heads_per_kv + first_of_kv, token = group.z;
  const ushort heads = min(uint(kHeads), heads_per_kv - first_of_kv);
  const ushort dim = lane % kLanes * 4;  // first dimension of this lane

  // The keys of this threadgroup: its split of those that the token sees.
  const uint last = args.position + token + 1;
  const uint window_start = args.window > 0 && last > args.window ? last - args.window : 0;
  const uint begin = max(window_start, group.x * args.split_keys),
             end = min(last, (group.x + 1) * args.split_keys);

  float4 query[kHeads][kChunks];
  PartialSoftmax<kChunks> state[kHeads];
#pragma unroll
  for (ushort h = 0; h < kHeads; ++h) {
    state[h].best = kLowest;
    state[h].sum = 0.0f;
#pragma unroll
    for (ushort c = 0; c < kChunks; ++c) {
      const bool inside = h < heads && dim + c * 32 < args.key_dim;
      device const float* values = q + token * args.q_stride + (head + h) * args.key_dim + dim + c * 32;
      query[h][c] = inside ? args.scale * *(device const float4*)values : float4(0.0f);
      state[h].o[c] = 0.0f;
    }
  }

  // Four keys a simdgroup at a time; lanes without a key repeat the last one and leave it out.
  const uint step = simdgroups * (32 / kLanes);
  for (uint first = begin + simdgroup * (32 / kLanes); first < end; first += step) {
    const uint key = first + lane / kLanes;
    const bool valid = key < end;
    device const T* k_row = k + (ulong(min(key, end - 1)) * args.n_kv_heads + kv_head) * args.key_dim + dim;
    device const T* v_row = v + (ulong(min(key, end - 1)) * args.n_kv_heads + kv_head) * args.value_dim + dim;
    float4 keys[kChunks], values[kChunks];
#pragma unroll
    for (ushort c = 0; c < kChunks; ++c) {
      keys[c] =
          dim + c * 32 < args.key_dim ? float4(*(device const vec<T, 4>*)(k_row + c * 32)) : float4(0.0f);
      values[c] =
          dim + c * 32 < args.value_dim ? float4(*(device const vec<T, 4>*)(v_row + c * 32)) : float4(0.0f);
    }
#pragma unroll
    for (ushort h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      float score = 0.0f;
#pragma unroll
      for (ushort c = 0; c < kChunks; ++c) score += dot(query[h][c], keys[c]);
      for (ushort offset = kLanes / 2; offset > 0; offset /= 2) score += simd_shuffle_xor(score, offset);
      if (!valid) continue;
      if (score > state[h].best) state[h].rescale(score);
      const float weight = fast::exp(score - state[h].best);
      state[h].sum += weight;
#pragma unroll
      for (ushort c = 0; c < kChunks; ++c) state[h].o[c] = fma(weight, values[c], state[h].o[c]);
    }
  }

  // Join the four keys' worth of a simdgroup, then the simdgroups.
  threadgroup float shared[DECODE_SIMDGROUPS][kHeads][kChunks * 32 + 2];
#pragma unroll
  for (ushort h = 0; h < kHeads; ++h) {
    if (h >= heads) break;
    float best = state[h].best;
    for (ushort offset = kLanes; offset < 32; offset *= 2) best = max(best, simd_shuffle_xor(best, offset));
    state[h].rescale(best);
    for (ushort offset = kLanes; offset < 32; offset *= 2) {
      state[h].sum += simd_shuffle_xor(state[h].sum, offset);
#pragma unroll
      for (ushort c = 0; c < kChunks; ++c) state[h].o[c] += simd_shuffle_xor(state[h].o[c], offset);
    }
    threadgroup float* mine = shared[simdgroup][h];
    if (lane < kLanes) {
#pragma unroll
      for (ushort c = 0; c < kChunks; ++c)
        for (ushort i = 0; i < 4; ++i) mine[dim + c * 32 + i] = state[h].o[c][i];
    }
    if (lane == 0) {
      mine[kChunks * 32] = best;
      mine[kChunks * 32 + 1] = state[h].sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < heads * args.value_dim; i += threads.x) {
    const ushort h = i / args.value_dim, d = i % args.value_dim;
    float best = kLowest, sum = 0.0f, o = 0.0f;
    for (ushort s = 0; s < simdgroups; ++s) best = max(best, shared[s][h][kChunks * 32]);
    for (ushort s = 0; s < simdgroups; ++s) {
      const float weight = fast::exp(shared[s][h][kChunks * 32] - best);
      sum += weight * shared[s][h][kChunks * 32 + 1];
      o += weight * shared[s][h][d];
    }
    const uint row = token * args.n_heads + head + h;
    if (args.splits == 1) {
      out[row * args.value_dim + d] = o / sum;
      continue;
    }
    device float* partial = out + (row * args.splits + group.x) * (args.value_dim + 2);
    partial[d] = o;
    if (d == 0) {
      partial[args.value_dim] = best;
      partial[args.value_dim + 1] = sum;
    }
  }
}

// Joins the splits. Grid: (n_heads, tokens) threadgroups.
kernel void attention_combine(device const float* partial
                              [[buffer(0)]],                    // [tokens][n_heads][splits][value_dim + 2]
                              device float* out [[buffer(1)]],  // [tokens][n_heads][value_dim]
                              constant AttentionArgs& args [[buffer(2)]],
                              uint2 group [[threadgroup_position_in_grid]],
                              ushort thread_index [[thread_index_in_threadgroup]],
                              ushort2 threads [[threads_per_threadgroup]]) {
  const uint row = group.y * args.n_heads + group.x, stride = args.value_dim + 2;
  partial += row * args.splits * stride;
  float best = kLowest, sum = 0.0f;
  for (uint s = 0; s < args.splits; ++s) best = max(best, partial[s * stride + args.value_dim]);
  for (uint s = 0; s < args.splits; ++s)
    sum += fast::exp(partial[s * stride + args.value_dim] - best) * partial[s * stride + args.value_dim + 1];
  for (uint d = thread_index; d < args.value_dim; d += threads.x) {
    float o = 0.0f;
    for (uint s = 0; s < args.splits; ++s)
      o += fast::exp(partial[s * stride + args.value_dim] - best) * partial[s * stride + d];
    out[row * args.value_dim + d] = o / sum;
  }
}

typedef decltype(attention_decode<half, 1>) attention_decode_f16;
typedef decltype(attention_decode<float, 1>) attention_decode_f32;
#define INSTANTIATE(name, T, chunks, dims) \
  template [[host_name(#name "_" #dims)]] kernel name attention_decode<T, chunks>;
#define EACH_SIZE(name, T)     \
  INSTANTIATE(name, T, 1, 32)  \
  INSTANTIATE(name, T, 2, 64)  \
  INSTANTIATE(name, T, 3, 96)  \
  INSTANTIATE(name, T, 4, 128) \
  INSTANTIATE(name, T, 8, 256)
EACH_SIZE(attention_decode_f16, half)
EACH_SIZE(attention_decode_f32, float)
