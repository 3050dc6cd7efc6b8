// Attention of many tokens on simdgroup_matrix, with online softmax.
//
// The query heads that share a KV head are stacked: row r of a tile is head r % g of token r / g, where g is
// n_heads / n_kv_heads, so that each block of K and V serves all of them. A simdgroup owns 8 * kRowBlocks
// rows and iterates over the keys independently: there is no barrier beyond the simdgroup, and no limit on
// the number of keys.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "args.h"
#include "attention.h"
#include "pages.h"
#include "stacked_rows.h"
#include "variants.h"

using namespace metal;

constant constexpr float kLowest = -1e30f;  // below every score, and finite: differences of it are numbers

// T is the type of the cache and of the operands; sums are float32. kDimBlocks * 8 dimensions at most, and
// exactly so many where kWhole: then no branch depends on their number, and the loads of a block row can all
// be in flight at the same time.
template <typename T, ushort kDimBlocks, ushort kRowBlocks, bool kWhole>
static inline void attend(device const float* q, AttentionTile tile, device const uint* pages,
                          device const T* k, device const T* v, device half* out,
                          constant AttentionArgs& args, threadgroup float* scratch, uint kv_head, ushort lane,
                          ushort simdgroup) {
  constexpr ushort kRows = 8 * kRowBlocks;
  constexpr ushort kRowLanes = 32 / kRows;  // lanes that share a row of the scores
  constexpr ushort kLaneKeys = PREFILL_KEYS / kRowLanes;
  constexpr ushort kDims = 8 * kDimBlocks;
  constexpr bool kStaged = PREFILL_STAGES_QUERY(kDims, sizeof(T));
  constexpr ushort kQueryRow = PREFILL_QUERY_BYTES(kDims, sizeof(T)) / sizeof(T);
  constexpr ushort kScoreRow = PREFILL_SCORE_ROW, kWeightRow = PREFILL_WEIGHT_ROW(sizeof(T));
  // Where registers suffice, the loads of a whole step are in flight together: first the keys, then the
  // values. Those that no row sees are loaded, too: a step is within a page, and no branch guards a load.
  constexpr bool kAhead = kWhole && PREFILL_LOADS_AHEAD(kDims, sizeof(T));
  constexpr ushort kBlocks = PREFILL_KEYS / 8;
  static_assert(kWeightRow * sizeof(T) <= kScoreRow * sizeof(float), "weights take the place of the scores");
  typedef simdgroup_matrix<T, 8, 8> Block;

  threadgroup float* scores = scratch + simdgroup * PREFILL_SCRATCH(kDims, sizeof(T));  // [kRows][kScoreRow]
  threadgroup T* weights = (threadgroup T*)scores;                                      // [kRows][kWeightRow]
  threadgroup float* diagonal = scores + kRows * kScoreRow;                             // [kRowBlocks][8][8]
  threadgroup T* tail = (threadgroup T*)(diagonal + kRowBlocks * 64);                   // [8][8]
  threadgroup T* staged = (threadgroup T*)(diagonal + kRowBlocks * 64 + 64);            // [kRows][kQueryRow]

  StackedRows rows;
  rows.begin(tile, args);
  device const uint* block_table = pages + tile.pages;
  const ushort row = lane / kRowLanes, part = lane % kRowLanes * kLaneKeys;  // of the scores, for this lane
  const StackedRow mine = rows.row(row, kv_head, args);

  // Queries, scaled for exp2: in registers, or in threadgroup memory where there would be too many.
  const ushort key_blocks = kWhole ? kDimBlocks : args.key_dim / 8,
               value_blocks = kWhole ? kDimBlocks : args.value_dim / 8;
  device const float* my_query = q + (tile.row + mine.token) * args.q_stride + mine.head * args.query_step;
  Block query[kStaged ? 1 : kRowBlocks][kStaged ? 1 : kDimBlocks];
#pragma unroll
  for (ushort c = 0; c < kDimBlocks; c += 4) {
    if (c < key_blocks) {
      threadgroup T* chunk = kStaged ? staged + row * kQueryRow + c * 8 : weights + row * kWeightRow;
      for (ushort i = 0; i < kLaneKeys; i += 4) {
        const ushort d = c * 8 + part + i;
        const float4 values = d < args.key_dim
                                  ? *(device const float4*)(my_query + d) * (args.scale * M_LOG2E_F)
                                  : float4(0.0f);
        *(threadgroup vec<T, 4>*)(chunk + part + i) = vec<T, 4>(values);
      }
      if (kStaged) continue;
      simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (ushort r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (ushort b = 0; b < 4; ++b)
          if (c + b < kDimBlocks)
            simdgroup_load(query[kStaged ? 0 : r][kStaged ? 0 : c + b], weights + r * 8 * kWeightRow + b * 8,
                           kWeightRow);
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  if (kStaged) simdgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 output[kRowBlocks][kDimBlocks];
#pragma unroll
  for (ushort r = 0; r < kRowBlocks; ++r)
#pragma unroll
    for (ushort b = 0; b < kDimBlocks; ++b) output[r][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (ushort i = lane; i < kRowBlocks * 64; i += 32) diagonal[i] = 0.0f;
  float best = kLowest, sum = 0.0f;  // of this lane's row

  const uint end = rows.end_key(kRows), cached = tile.end;
  const ulong k_stride = args.n_kv_heads * args.key_dim, v_stride = args.n_kv_heads * args.value_dim;
  // A step of keys never straddles two pages.
  for (uint key = rows.first_key() / PREFILL_KEYS * PREFILL_KEYS; key < end; key += PREFILL_KEYS) {
    const uint in_page = key % PAGE_POSITIONS;
    device const T* k_keys = page_at(k, block_table, key, args.page_stride) + in_page * k_stride;
    device const T* v_keys = page_at(v, block_table, key, args.page_stride) + in_page * v_stride;
    Block loaded[kAhead ? kBlocks : 1][kAhead ? kDimBlocks : 1];
    if (kAhead) {
#pragma unroll
      for (ushort j = 0; j < kBlocks; ++j)
#pragma unroll
        for (ushort b = 0; b < kDimBlocks; ++b)
          simdgroup_load(loaded[kAhead ? j : 0][kAhead ? b : 0],
                         k_keys + j * 8 * k_stride + kv_head * args.key_dim + b * 8, k_stride, ulong2(0),
                         true);
    }
    // Scores of 32 keys. A block that extends beyond the cached keys reads rows of the cache with undefined
    // contents: they are masked below.
    simdgroup_float8x8 score[kRowBlocks];
#pragma unroll
    for (ushort j = 0; j < kBlocks; ++j) {
      if (key + j * 8 < end) {
        device const T* k_block = k_keys + j * 8 * k_stride + kv_head * args.key_dim;
#pragma unroll
        for (ushort r = 0; r < kRowBlocks; ++r) score[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma unroll
        for (ushort b = 0; b < kDimBlocks; ++b) {
          if (b < key_blocks) {
            Block keys = loaded[kAhead ? j : 0][kAhead ? b : 0];
            if (!kAhead) simdgroup_load(keys, k_block + b * 8, k_stride, ulong2(0), true);
#pragma unroll
            for (ushort r = 0; r < kRowBlocks; ++r) {
              Block own = query[kStaged ? 0 : r][kStaged ? 0 : b];
              if (kStaged) simdgroup_load(own, staged + r * 8 * kQueryRow + b * 8, kQueryRow);
              simdgroup_multiply_accumulate(score[r], own, keys, score[r]);
            }
          }
        }
#pragma unroll
        for (ushort r = 0; r < kRowBlocks; ++r)
          simdgroup_store(score[r], scores + r * 8 * kScoreRow + j * 8, kScoreRow);
      }
    }
    if (kAhead) {
#pragma unroll
      for (ushort j = 0; j < kBlocks; ++j)
#pragma unroll
        for (ushort b = 0; b < kDimBlocks; ++b)
          simdgroup_load(loaded[kAhead ? j : 0][kAhead ? b : 0],
                         v_keys + j * 8 * v_stride + kv_head * args.value_dim + b * 8, v_stride);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax: maximum, weights, sum, and the factor for what was summed before.
    float4 lane_scores[kLaneKeys / 4];
    float new_best = best;
#pragma unroll
    for (ushort i = 0; i < kLaneKeys / 4; ++i) {
      lane_scores[i] = *(threadgroup const float4*)(scores + row * kScoreRow + part + i * 4);
#pragma unroll
      for (ushort c = 0; c < 4; ++c) {
        lane_scores[i][c] = mine.score(lane_scores[i][c], key + part + i * 4 + c);
        new_best = max(new_best, lane_scores[i][c]);
      }
    }
    for (ushort offset = kRowLanes / 2; offset > 0; offset /= 2)
      new_best = max(new_best, simd_shuffle_xor(new_best, offset));
    const float factor = fast::exp2(best - new_best);
    best = new_best;
    sum *= factor;
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the scores were read: weights may take their place
#pragma unroll
    for (ushort i = 0; i < kLaneKeys / 4; ++i) {
      const float4 lane_weights = fast::exp2(lane_scores[i] - best);
#pragma unroll
      for (ushort c = 0; c < 4; ++c) sum += lane_weights[c];
      *(threadgroup vec<T, 4>*)(weights + row * kWeightRow + part + i * 4) = vec<T, 4>(lane_weights);
    }
    if (part == 0) diagonal[row / 8 * 64 + row % 8 * 9] = factor;
    simdgroup_barrier(mem_flags::mem_threadgroup);

    if (simd_any(factor != 1.0f)) {
#pragma unroll
      for (ushort r = 0; r < kRowBlocks; ++r) {
        simdgroup_float8x8 factors;
        simdgroup_load(factors, diagonal + r * 64, 8);
#pragma unroll
        for (ushort b = 0; b < kDimBlocks; ++b)
          if (b < value_blocks) simdgroup_multiply(output[r][b], factors, output[r][b]);
      }
    }
#pragma unroll
    for (ushort j = 0; j < kBlocks; ++j) {
      if (key + j * 8 < end) {
        Block weight[kRowBlocks];
#pragma unroll
        for (ushort r = 0; r < kRowBlocks; ++r)
          simdgroup_load(weight[r], weights + r * 8 * kWeightRow + j * 8, kWeightRow);
        device const T* v_block = v_keys + j * 8 * v_stride + kv_head * args.value_dim;
        if (key + j * 8 + 8 <= cached) {
#pragma unroll
          for (ushort b = 0; b < kDimBlocks; ++b) {
            if (b < value_blocks) {
              Block values = loaded[kAhead ? j : 0][kAhead ? b : 0];
              if (!kAhead) simdgroup_load(values, v_block + b * 8, v_stride);
#pragma unroll
              for (ushort r = 0; r < kRowBlocks; ++r)
                simdgroup_multiply_accumulate(output[r][b], weight[r], values, output[r][b]);
            }
          }
        } else {
          // Rows beyond the cached keys may hold NaN, and 0 * NaN is not 0: they are replaced by zeros.
#pragma unroll
          for (ushort b = 0; b < kDimBlocks; ++b) {
            if (b < value_blocks) {
              for (ushort i = lane; i < 64; i += 32)
                tail[i] = key + j * 8 + i / 8 < cached ? v_block[i / 8 * v_stride + b * 8 + i % 8] : T(0);
              simdgroup_barrier(mem_flags::mem_threadgroup);
              Block values;
              simdgroup_load(values, tail, 8);
              simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
              for (ushort r = 0; r < kRowBlocks; ++r)
                simdgroup_multiply_accumulate(output[r][b], weight[r], values, output[r][b]);
            }
          }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the weights were read: scores may take their place
  }

  // Normalize: four blocks of 8 dimensions at a time through threadgroup memory.
  for (ushort offset = kRowLanes / 2; offset > 0; offset /= 2) sum += simd_shuffle_xor(sum, offset);
  sum = mine.divisor(sum);
  device half* my_out = out + ((tile.row + mine.token) * args.n_heads + mine.head) * args.value_dim;
#pragma unroll
  for (ushort c = 0; c < kDimBlocks; c += 4) {
    if (c < value_blocks) {
#pragma unroll
      for (ushort r = 0; r < kRowBlocks; ++r)
#pragma unroll
        for (ushort b = 0; b < 4; ++b)
          if (c + b < kDimBlocks)
            simdgroup_store(output[r][c + b], scores + r * 8 * kScoreRow + b * 8, kScoreRow);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (ushort i = 0; i < kLaneKeys; i += 4) {
        const ushort d = c * 8 + part + i;
        if (mine.inside && d < args.value_dim)
          *(device half4*)(my_out + d) =
              half4(*(threadgroup const float4*)(scores + row * kScoreRow + part + i) / sum);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// Grid: (simdgroups for the tiles, n_kv_heads).
template <typename T, ushort kDimBlocks, ushort kRowBlocks>
kernel void attention_prefill(
    device const float* q [[buffer(0)]],  // [tokens][q_stride]
    device const AttentionTile* tiles [[buffer(1)]],
    device const uint* pages [[buffer(2)]],  // block tables
    device const T* k [[buffer(3)]],         // pages of [PAGE_POSITIONS][n_kv_heads][key_dim]
    device const T* v [[buffer(4)]],         // the same with value_dim
    device half* out [[buffer(5)]],          // [tokens][n_heads][value_dim]
    constant AttentionArgs& args [[buffer(6)]],
    threadgroup float* scratch [[threadgroup(0)]],  // PREFILL_SCRATCH for each simdgroup
    uint2 group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint tile = group.x * simdgroups + simdgroup;
  if (tile >= args.tiles) return;
  if (args.key_dim == kDimBlocks * 8 && args.value_dim == kDimBlocks * 8)
    attend<T, kDimBlocks, kRowBlocks, true>(q, tiles[tile], pages, k, v, out, args, scratch, group.y, lane,
                                            simdgroup);
  else
    attend<T, kDimBlocks, kRowBlocks, false>(q, tiles[tile], pages, k, v, out, args, scratch, group.y, lane,
                                             simdgroup);
}

typedef decltype(attention_prefill<half, 8, 2>) attention_prefill_f16;
typedef decltype(attention_prefill<float, 8, 2>) attention_prefill_f32;
#define INSTANTIATE(name, T, dims)               \
  IF_WANTED(name##_##dims)(template [[host_name( \
      #name "_" #dims)]] kernel name attention_prefill<T, dims / 8, PREFILL_ROW_BLOCKS(dims, sizeof(T))>;)
#define EACH_SIZE(name, T)  \
  INSTANTIATE(name, T, 64)  \
  INSTANTIATE(name, T, 128) \
  INSTANTIATE(name, T, 256)
EACH_SIZE(attention_prefill_f16, half)
EACH_SIZE(attention_prefill_f32, float)
