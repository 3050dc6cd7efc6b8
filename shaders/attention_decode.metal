// Causal attention of a few tokens over a long cache, with online softmax in float32.
//
// A threadgroup computes one token, one KV head, up to DECODE_HEADS of the query heads that share it, and one
// split of the keys. Eight lanes share a key, or sixteen if heads are wide: a simdgroup processes four keys
// at a time, or two, and simdgroups alternate. Each group of lanes has its own softmax in registers. At the
// end these are joined: lanes by shuffles, simdgroups in threadgroup memory, and splits by attention_combine.
//
// Reading K and V bounds this kernel. Query heads share the reads, the next keys are loaded before the
// current ones are multiplied, and splits provide threadgroups if a few tokens have too few heads to fill the
// GPU.
#include <metal_stdlib>

#include "args.h"
#include "attention.h"
#include "pages.h"
#include "rope.h"
#include "soft_cap.h"
#include "unroll.h"
#include "variants.h"

using namespace metal;

constant constexpr float kLowest = -1e30f;  // below every score, and finite, so that differences are numbers

// Unnormalized softmax over some keys: o = sum(exp(score - max) v), sum = sum(exp(score - max)).
template <ushort kChunks>
struct PartialSoftmax {
  float best;
  float sum;
  float4 o[kChunks];

  // Changes the maximum that sum and values are relative to.
  void rescale(float new_best) {
    const float factor = fast::exp(best - new_best);
    best = new_best;
    sum *= factor;
    FOR_UNROLL (ushort c = 0; c < kChunks; ++c) o[c] *= factor;
  }
};

// The query heads of a threadgroup, up to DECODE_HEADS, with their softmax so far, in registers. kLanes share
// a key: each has 4 adjacent dimensions of every 4 * kLanes.
template <ushort kChunks, ushort kLanes>
struct Queries {
  static constant constexpr ushort kHeads = DECODE_HEADS(kChunks);
  float4 query[kHeads][kChunks];
  PartialSoftmax<kChunks> state[kHeads];
  ushort heads;
  float score_cap;

  // Loads the queries of `count` heads that are `step` fours apart, in device or threadgroup memory.
  template <typename Fours>
  void begin(Fours q, uint step, ushort count, constant AttentionArgs& args, ushort lane) {
    heads = count;
    score_cap = args.score_cap;
    FOR_UNROLL (ushort h = 0; h < kHeads; ++h) {
      state[h].best = kLowest;
      state[h].sum = 0.0f;
      FOR_UNROLL (ushort c = 0; c < kChunks; ++c) {
        const ushort four = lane % kLanes + c * kLanes;
        const bool inside = h < heads && four * 4u < args.key_dim;
        query[h][c] = inside ? args.scale * q[h * step + four] : float4(0.0f);
        state[h].o[c] = 0.0f;
      }
    }
  }

  // Adds one key per group of lanes; groups without a valid key only take part in the shuffles. Keys and
  // values keep the type of the cache until they are used: as floats they would take twice the registers.
  template <typename T>
  void take(thread const vec<T, 4>* keys, thread const vec<T, 4>* values, bool valid) {
    FOR_UNROLL (ushort h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      float score = 0.0f;
      FOR_UNROLL (ushort c = 0; c < kChunks; ++c) score += dot(query[h][c], float4(keys[c]));
      for (ushort offset = kLanes / 2; offset > 0; offset /= 2) score += simd_shuffle_xor(score, offset);
      if (!valid) continue;
      if (score_cap > 0.0f) score = soft_cap(score, score_cap);
      if (score > state[h].best) state[h].rescale(score);
      const float weight = fast::exp(score - state[h].best);
      state[h].sum += weight;
      FOR_UNROLL (ushort c = 0; c < kChunks; ++c)
        state[h].o[c] = fma(float4(weight), float4(values[c]), state[h].o[c]);
    }
  }

  // Joins the groups of lanes of a simdgroup, and writes [kHeads][dimensions + 2]: values, maximum and sum.
  void join(threadgroup float* mine, ushort lane) {
    FOR_UNROLL (ushort h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      float best = state[h].best;
      for (ushort offset = kLanes; offset < 32; offset *= 2) best = max(best, simd_shuffle_xor(best, offset));
      state[h].rescale(best);
      for (ushort offset = kLanes; offset < 32; offset *= 2) {
        state[h].sum += simd_shuffle_xor(state[h].sum, offset);
        FOR_UNROLL (ushort c = 0; c < kChunks; ++c) state[h].o[c] += simd_shuffle_xor(state[h].o[c], offset);
      }
      if (lane < kLanes) {
        FOR_UNROLL (ushort c = 0; c < kChunks; ++c)
          for (ushort i = 0; i < 4; ++i) mine[(lane + c * kLanes) * 4 + i] = state[h].o[c][i];
      }
      if (lane == 0) {
        mine[kChunks * kLanes * 4] = best;
        mine[kChunks * kLanes * 4 + 1] = state[h].sum;
      }
      mine += kChunks * kLanes * 4 + 2;
    }
  }
};

// The heads and keys that a threadgroup computes.
struct Share {
  uint kv_head, head, token;  // head: index of the first query head
  ushort heads;
  uint begin, end;  // keys
};

// Grid: (splits, n_kv_heads * blocks of query heads, tokens). A row may have fewer splits than the grid.
static inline Share share_of(uint3 group, device const PassRow& row, constant AttentionArgs& args,
                             ushort most_heads) {
  const uint heads_per_kv = args.n_heads / args.n_kv_heads;
  const uint blocks = (heads_per_kv + most_heads - 1) / most_heads;
  const uint first_of_kv = group.y % blocks * most_heads;
  Share share;
  share.kv_head = group.y / blocks;
  share.head = share.kv_head * heads_per_kv + first_of_kv;
  share.token = group.z;
  share.heads = min(uint(most_heads), heads_per_kv - first_of_kv);
  // The split's part of the keys that the token sees.
  const uint last = row.position + 1;
  const uint window_start = args.window > 0 && last > args.window ? last - args.window : 0;
  share.begin = max(window_start, group.x * row.split_keys);
  share.end = min(last, (group.x + 1) * row.split_keys);
  return share;
}

// K and V of a layer, and the block table of a sequence.
template <typename T>
struct Cache {
  device const T* k;  // in the first page of the pool
  device const T* v;
  device const uint* block_table;
};

// Keys and values of the current step, one for each group of lanes, in the type of the cache.
template <typename T, ushort kChunks, ushort kLanes>
struct CachedKeys {
  vec<T, 4> keys[kChunks], values[kChunks];
  // Pages of the keys of the next two steps. Pages are looked up two steps ahead, so that no load of keys
  // waits for a block table.
  uint page, page_after;

  // Lanes whose key would be after `last` use `last`.
  static uint key_of(uint first, uint last, ushort lane) { return min(first + lane / kLanes, last); }

  static uint page_of(Cache<T> cache, uint first, uint last, ushort lane) {
    return cache.block_table[key_of(first, last, lane) / PAGE_POSITIONS];
  }

  // Loads the keys from `first` on. The next two steps are `step` and 2 * `step` later.
  void load(Cache<T> cache, constant AttentionArgs& args, uint kv_head, uint first, uint step, uint last,
            ushort lane) {
    const ushort dim = lane % kLanes * 4;
    const ulong page_start = ulong(page) * args.page_stride;
    const uint row = key_of(first, last, lane) % PAGE_POSITIONS * args.n_kv_heads + kv_head;
    device const T* k = cache.k + page_start + row * args.key_dim;
    device const T* v = cache.v + page_start + row * args.value_dim;
    page = page_after;
    page_after = page_of(cache, first + 2 * step, last, lane);
    FOR_UNROLL (ushort c = 0; c < kChunks; ++c) {
      const uint d = dim + c * kLanes * 4;
      keys[c] = d < args.key_dim ? *(device const vec<T, 4>*)(k + d) : vec<T, 4>(0);
      values[c] = d < args.value_dim ? *(device const vec<T, 4>*)(v + d) : vec<T, 4>(0);
    }
  }

  // Loads the first keys of a simdgroup, which visits [first, end) in steps of `step` keys.
  void begin(Cache<T> cache, constant AttentionArgs& args, uint kv_head, uint first, uint end, uint step,
             ushort lane) {
    if (first >= end) return;
    page = page_of(cache, first, end - 1, lane);
    page_after = page_of(cache, first + step, end - 1, lane);
    load(cache, args, kv_head, first, step, end - 1, lane);
  }
};

// Adds keys [first, end) of the cache, the first of which `cached` has loaded. The next keys are loaded
// before the current ones are multiplied, if two steps fit the registers: of a lane's 128, query and output
// take 64 (half of them with 64 dimensions), and a step takes 8 per 32 dimensions in half precision.
template <typename T, ushort kChunks, ushort kLanes>
static inline void take_cached(thread Queries<kChunks, kLanes>& queries,
                               thread CachedKeys<T, kChunks, kLanes>& cached, Cache<T> cache,
                               constant AttentionArgs& args, uint kv_head, uint first, uint end, uint step,
                               ushort lane) {
  constexpr bool kLoadsAhead = DECODE_LOADS_AHEAD(kChunks, sizeof(T));
  while (first < end) {
    const CachedKeys<T, kChunks, kLanes> current = cached;
    const bool valid = first + lane / kLanes < end;
    first += step;
    if (kLoadsAhead && first < end) cached.load(cache, args, kv_head, first, step, end - 1, lane);
    queries.template take<T>(current.keys, current.values, valid);
    if (!kLoadsAhead && first < end) cached.load(cache, args, kv_head, first, step, end - 1, lane);
  }
}

// Joins the simdgroups, whose parts are in `shared`. Simdgroups without keys change nothing. With one split
// `out` is [token][n_heads][value_dim]; otherwise, for attention_combine, it is
// [token][n_heads][splits][value_dim + 2] with the maximum and the sum after the values.
template <ushort kChunks, ushort kLanes>
static inline void store(threadgroup const float* shared, device float* out, constant AttentionArgs& args,
                         Share share, uint split, ushort thread_index, ushort threads, ushort simdgroups) {
  constexpr ushort kDims = kChunks * kLanes * 4, kHead = kDims + 2,
                   kSimdgroup = DECODE_HEADS(kChunks) * kHead;
  for (uint i = thread_index; i < share.heads * args.value_dim; i += threads) {
    const ushort h = i / args.value_dim, d = i % args.value_dim;
    threadgroup const float* part = shared + h * kHead;
    float best = kLowest, sum = 0.0f, o = 0.0f;
    for (ushort s = 0; s < simdgroups; ++s) best = max(best, part[s * kSimdgroup + kDims]);
    for (ushort s = 0; s < simdgroups; ++s) {
      const float weight = fast::exp(part[s * kSimdgroup + kDims] - best);
      sum += weight * part[s * kSimdgroup + kDims + 1];
      o += weight * part[s * kSimdgroup + d];
    }
    const uint row = share.token * args.n_heads + share.head + h;
    if (args.splits == 1) {
      out[row * args.value_dim + d] = o / sum;
      continue;
    }
    device float* partial = out + (row * args.splits + split) * (args.value_dim + 2);
    partial[d] = o;
    if (d == 0) {
      partial[args.value_dim] = best;
      partial[args.value_dim + 1] = sum;
    }
  }
}

// Threadgroup: up to DECODE_SIMDGROUPS simdgroups.
template <typename T, ushort kChunks, ushort kLanes>
kernel void attention_decode(
    device const float* q [[buffer(0)]],       // [tokens][q_stride]
    device const PassRow* rows [[buffer(1)]],  // [tokens]
    device const uint* pages [[buffer(2)]],    // block tables
    device const T* k [[buffer(3)]],           // pages of [PAGE_POSITIONS][n_kv_heads][key_dim]
    device const T* v [[buffer(4)]],           // the same with value_dim
    device float* out [[buffer(5)]], constant AttentionArgs& args [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]],
    ushort3 threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr ushort kHeads = DECODE_HEADS(kChunks), kPart = kHeads * (kChunks * kLanes * 4 + 2);
  threadgroup float shared[DECODE_SIMDGROUPS * kPart];
  device const PassRow& row = rows[group.z];
  if (group.x >= row.splits) return;
  const Share share = share_of(group, row, args, kHeads);
  const uint first = share.begin + simdgroup * (32 / kLanes), step = simdgroups * (32 / kLanes);
  const Cache<T> cache = {k, v, pages + row.pages};
  CachedKeys<T, kChunks, kLanes> cached;
  cached.begin(cache, args, share.kv_head, first, share.end, step, lane);
  Queries<kChunks, kLanes> queries;
  queries.begin((device const float4*)(q + share.token * args.q_stride + share.head * args.query_step),
                args.query_step / 4, share.heads, args, lane);
  take_cached(queries, cached, cache, args, share.kv_head, first, share.end, step, lane);
  queries.join(shared + simdgroup * kPart, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store<kChunks, kLanes>(shared, out, args, share, group.x, thread_index, threads.x, simdgroups);
}

// Combines rope_append and attention_decode for sequences with a single token each: each threadgroup rotates
// the heads that it needs in threadgroup memory. The threadgroup whose share includes the token's own key
// appends it to the cache, where no other threadgroup of this dispatch reads it. With skip_keys the key is
// already in the cache, and a row of qkv has queries only.
template <typename T, ushort kChunks, ushort kLanes>
kernel void rope_attention_decode(
    device const float* bias [[buffer(0)]],    // one row of qkv
    device const float* q_norm [[buffer(1)]],  // [key_dim]
    device const float* k_norm [[buffer(2)]],  // [key_dim]
    device const float2* table [[buffer(3)]],  // [position][rope_dim / 2]
    device const float* qkv [[buffer(4)]],     // [tokens][q | k | v | ...]
    device const PassRow* rows [[buffer(5)]],  // [tokens]
    device const uint* pages [[buffer(6)]],    // block tables
    device T* k_cache [[buffer(7)]],           // pages of [PAGE_POSITIONS][n_kv_heads][key_dim]
    device T* v_cache [[buffer(8)]],           // pages of [PAGE_POSITIONS][n_kv_heads][value_dim]
    device float* out [[buffer(9)]], constant RopeAttentionArgs& args [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]],
    ushort3 threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr ushort kHeads = DECODE_HEADS(kChunks), kDims = kChunks * kLanes * 4, kPart = kHeads * (kDims + 2);
  threadgroup float shared[DECODE_SIMDGROUPS * kPart];
  threadgroup float4 aligned[(kHeads + 2) * kDims / 4];  // the queries, the token's own key and value
  threadgroup float* const rotated = (threadgroup float*)aligned;
  constant RopeArgs& rope = args.rope;
  constant AttentionArgs& attention = args.attention;
  device const PassRow& row = rows[group.z];
  if (group.x >= row.splits) return;
  const Share share = share_of(group, row, attention, kHeads);
  threadgroup float* const own_key = rotated + kHeads * kDims;
  threadgroup float* const own_value = own_key + kDims;

  // Starts to load keys of earlier calls before the queries are ready.
  const uint first = share.begin + simdgroup * (32 / kLanes), step = simdgroups * (32 / kLanes);
  const uint position = row.position, end = rope.skip_keys ? share.end : min(share.end, position);
  const Cache<T> cache = {k_cache, v_cache, pages + row.pages};
  CachedKeys<T, kChunks, kLanes> cached;
  cached.begin(cache, attention, share.kv_head, first, end, step, lane);

  // Each simdgroup rotates a head at a time.
  const uint k_first = attention.n_heads * attention.query_step;
  const uint v_first = k_first + attention.n_kv_heads * attention.key_dim;
  table += position * (rope.rope_dim / 2);
  qkv += group.z * attention.q_stride;
  for (ushort h = simdgroup; h < share.heads + (rope.skip_keys ? 0 : 2); h += simdgroups) {
    if (h < share.heads)
      rotate_head<float>(qkv, (share.head + h) * attention.query_step, bias, q_norm, rope.has_q_norm, table,
                         rope, lane, rotated + h * kDims);
    else if (h == share.heads)
      rotate_head<T>(qkv, k_first + share.kv_head * attention.key_dim, bias, k_norm, rope.has_k_norm, table,
                     rope, lane, own_key);
    else
      round_head<T>(qkv, v_first + share.kv_head * attention.value_dim, bias, rope, lane, own_value);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  Queries<kChunks, kLanes> queries;
  queries.begin(aligned, kDims / 4, share.heads, attention, lane);
  take_cached(queries, cached, cache, attention, share.kv_head, first, end, step, lane);

  if (!rope.skip_keys && share.begin <= position && position < share.end) {
    // Processed in cache order, as attention_decode does, so that the sums are bit-identical.
    const uint turn = position - share.begin;
    if (simdgroup == turn / (32 / kLanes) % simdgroups) {
      // In the type of the cache, like the other keys.
      vec<T, 4> keys[kChunks], values[kChunks];
      FOR_UNROLL (ushort c = 0; c < kChunks; ++c) {
        const ushort four = lane % kLanes + c * kLanes;
        threadgroup const float4* own = aligned + kHeads * kDims / 4 + four;
        keys[c] = vec<T, 4>(four * 4u < attention.key_dim ? own[0] : float4(0.0f));
        values[c] = vec<T, 4>(four * 4u < attention.value_dim ? own[kDims / 4] : float4(0.0f));
      }
      queries.template take<T>(keys, values, lane / kLanes == turn % (32 / kLanes));
    }
    if (share.head == share.kv_head * (attention.n_heads / attention.n_kv_heads)) {
      const uint head = position % PAGE_POSITIONS * attention.n_kv_heads + share.kv_head;
      device T* k_page = page_at(k_cache, cache.block_table, position, attention.page_stride);
      device T* v_page = page_at(v_cache, cache.block_table, position, attention.page_stride);
      for (ushort i = thread_index; i < attention.key_dim; i += threads.x)
        k_page[head * attention.key_dim + i] = T(own_key[i]);
      for (ushort i = thread_index; i < attention.value_dim; i += threads.x)
        v_page[head * attention.value_dim + i] = T(own_value[i]);
    }
  }
  queries.join(shared + simdgroup * kPart, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store<kChunks, kLanes>(shared, out, attention, share, group.x, thread_index, threads.x, simdgroups);
}

// Joins the splits. Grid: (n_heads, tokens) threadgroups.
kernel void attention_combine(device const float* partial
                              [[buffer(0)]],  // [tokens][n_heads][splits][value_dim + 2]
                              device const PassRow* rows [[buffer(1)]],  // [tokens]
                              device float* out [[buffer(2)]],           // [tokens][n_heads][value_dim]
                              constant AttentionArgs& args [[buffer(3)]],
                              uint2 group [[threadgroup_position_in_grid]],
                              ushort thread_index [[thread_index_in_threadgroup]],
                              ushort2 threads [[threads_per_threadgroup]]) {
  const uint row = group.y * args.n_heads + group.x, stride = args.value_dim + 2,
             splits = rows[group.y].splits;
  partial += row * args.splits * stride;
  float best = kLowest, sum = 0.0f;
  for (uint s = 0; s < splits; ++s) best = max(best, partial[s * stride + args.value_dim]);
  for (uint s = 0; s < splits; ++s)
    sum += fast::exp(partial[s * stride + args.value_dim] - best) * partial[s * stride + args.value_dim + 1];
  for (uint d = thread_index; d < args.value_dim; d += threads.x) {
    float o = 0.0f;
    for (uint s = 0; s < splits; ++s)
      o += fast::exp(partial[s * stride + args.value_dim] - best) * partial[s * stride + d];
    out[row * args.value_dim + d] = o / sum;
  }
}

#define INSTANCES(T, type, dims)                                         \
  INSTANCE("attention_decode_" #type "_" #dims,                          \
           attention_decode<T, DECODE_CHUNKS(dims), DECODE_LANES(dims)>) \
  INSTANCE("rope_attention_decode_" #type "_" #dims,                     \
           rope_attention_decode<T, DECODE_CHUNKS(dims), DECODE_LANES(dims)>)
#define INSTANTIATE(T, type, dims) IF_WANTED(attention_decode_##type##_##dims)(INSTANCES(T, type, dims))
#define EACH_SIZE(T, type)  \
  INSTANTIATE(T, type, 32)  \
  INSTANTIATE(T, type, 64)  \
  INSTANTIATE(T, type, 96)  \
  INSTANTIATE(T, type, 128) \
  INSTANTIATE(T, type, 256) \
  INSTANTIATE(T, type, 512)
EACH_SIZE(half, f16)
EACH_SIZE(float, f32)
