// Attention of many tokens on simdgroup_matrix, with online softmax: half or float32 operands, depending on
// the type of the cache, and float32 sums.
//
// The query heads that share a KV head are stacked: row r of a tile is head r % g of token r / g, where g is
// n_heads / n_kv_heads, so that each block of K and V serves all of them. A simdgroup computes 8 * kRowBlocks
// rows and iterates over the keys independently: there is no barrier beyond the simdgroup, and no limit on
// the number of keys. Scores, weights and output stay in its registers; K and V are read from the pages as
// 8x8 blocks.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "args.h"
#include "attention.h"
#include "block_rows.h"
#include "pages.h"
#include "stacked_rows.h"
#include "unroll.h"
#include "variants.h"

using namespace metal;

// T is the type of the cache and of the operands; sums are float32. Heads have at most kDimBlocks * 8
// dimensions, and exactly as many with kWhole: then no branch depends on the number, and the loads of a block
// row can all be in flight at the same time.
template <typename T, ushort kDimBlocks, ushort kRowBlocks, bool kWhole>
static inline void attend(device const float* q, AttentionTile tile, device const uint* pages,
                          device const T* k, device const T* v, device const float* bias,
                          device const float* sinks, device half* out, constant AttentionArgs& args,
                          threadgroup float* scratch, uint2 head_part, ushort lane) {
  constexpr ushort kDims = 8 * kDimBlocks, kValueBlocks = kDimBlocks / PREFILL_VALUE_PARTS(kDims);
  constexpr bool kStaged = PREFILL_STAGES_QUERY(kDims, sizeof(T));
  constexpr ushort kQueryRow = PREFILL_QUERY_BYTES(kDims, sizeof(T)) / sizeof(T);
  // If registers suffice, the loads of a whole step are in flight together: first the keys, then the values.
  // They include keys that no row sees: a step is within a page, and a branch would delay the loads.
  constexpr bool kAhead = kWhole && PREFILL_LOADS_AHEAD(kDims, sizeof(T));
  constexpr ushort kBlocks = PREFILL_KEYS / 8;
  // Loops over a query in registers are unrolled fully: variables cannot index registers.
  constexpr ushort kUnrolled = kStaged ? 8 : kDimBlocks;
  static_assert(!kAhead || !kStaged, "queries are in registers where keys are, too");
  static_assert(!kAhead || kValueBlocks == kDimBlocks, "keys and values take the same registers");
  typedef simdgroup_matrix<T, 8, 8> Block;

  const uint kv_head = head_part.x, first_value = head_part.y * 8 * kValueBlocks;

  BlockRows block_rows;
  block_rows.find(scratch, lane);
  StackedRows rows;
  rows.begin(tile, args, bias, sinks);
  StackedRow mine[kRowBlocks];  // rows of which this lane holds elements
  FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r) mine[r] = rows.row(r * 8 + block_rows.row, kv_head, args);

  // Queries, scaled for exp2: in registers, or in threadgroup memory if they need too many.
  const ushort key_blocks = kWhole ? kDimBlocks : args.key_dim / 8,
               value_blocks = kWhole ? kValueBlocks
                                     : (min(args.value_dim, first_value + 8 * kValueBlocks) -
                                        min(args.value_dim, first_value)) /
                                           8;
  threadgroup T* staged = (threadgroup T*)scratch;  // [8 * kRowBlocks][kQueryRow]
  threadgroup T* my_staged = staged + block_rows.row * kQueryRow + block_rows.column;
  Block query[kStaged ? 1 : kRowBlocks][kStaged ? 1 : kDimBlocks];
  FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r) {
    device const float* my_query =
        q + (tile.row + mine[r].token) * args.q_stride + mine[r].head * args.query_step + block_rows.column;
#pragma unroll(kUnrolled)
    for (ushort b = 0; b < kDimBlocks; ++b) {
      if (b < key_blocks) {
        const auto values = vec<T, 2>(*(device const float2*)(my_query + b * 8) * (args.scale * M_LOG2E_F));
        if (kStaged)
          *(threadgroup vec<T, 2>*)(my_staged + r * 8 * kQueryRow + b * 8) = values;
        else
          query[kStaged ? 0 : r][kStaged ? 0 : b] = block_of<T>(values);
      }
    }
  }
  if (kStaged) simdgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 output[kRowBlocks][kValueBlocks];
  float best[kRowBlocks], sum[kRowBlocks];  // of this lane's rows; `sum` over its keys only
  FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r) {
    best[r] = kLowest;
    sum[r] = 0.0f;
    FOR_UNROLL (ushort b = 0; b < kValueBlocks; ++b)
      output[r][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  const uint end = rows.end_key(8 * kRowBlocks), cached = tile.end;
  const uint2 seen_by_all = rows.seen_by_all(8 * kRowBlocks);
  device const uint* block_table = pages + tile.pages;
  const ulong k_stride = args.n_kv_heads * args.key_dim, v_stride = args.n_kv_heads * args.value_dim;
  // A step of keys never straddles two pages.
  for (uint key = rows.first_key() / PREFILL_KEYS * PREFILL_KEYS; key < end; key += PREFILL_KEYS) {
    const uint in_page = key % PAGE_POSITIONS;
    device const T* k_keys = page_at(k, block_table, key, args.page_stride) + in_page * k_stride;
    device const T* v_keys =
        page_at(v, block_table, key, args.page_stride) + in_page * v_stride + first_value;
    Block loaded[kAhead ? kBlocks : 1][kAhead ? kDimBlocks : 1];
    if (kAhead) {
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
        FOR_UNROLL (ushort b = 0; b < kDimBlocks; ++b)
          simdgroup_load(loaded[kAhead ? j : 0][kAhead ? b : 0],
                         k_keys + j * 8 * k_stride + kv_head * args.key_dim + b * 8, k_stride, ulong2(0),
                         true);
    }
    // Scores of 32 keys. A block that extends beyond the cached keys reads rows of the cache with undefined
    // contents: they are masked below.
    simdgroup_float8x8 score[kRowBlocks][kBlocks];
    FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
        score[r][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    if (kAhead && key + PREFILL_KEYS <= end) {  // consecutive products are independent
      FOR_UNROLL (ushort b = 0; b < kDimBlocks; ++b)
        FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
          FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
            simdgroup_multiply_accumulate(score[r][j], query[kAhead ? r : 0][kAhead ? b : 0],
                                          loaded[kAhead ? j : 0][kAhead ? b : 0], score[r][j]);
    } else {
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j) {
        if (key + j * 8 < end) {
          device const T* k_block = k_keys + j * 8 * k_stride + kv_head * args.key_dim;
#pragma unroll(kUnrolled)
          for (ushort b = 0; b < kDimBlocks; ++b) {
            if (b < key_blocks) {
              Block keys = loaded[kAhead ? j : 0][kAhead ? b : 0];
              if (!kAhead) simdgroup_load(keys, k_block + b * 8, k_stride, ulong2(0), true);
              FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r) {
                Block own = query[kStaged ? 0 : r][kStaged ? 0 : b];
                if (kStaged) simdgroup_load(own, staged + r * 8 * kQueryRow + b * 8, kQueryRow);
                simdgroup_multiply_accumulate(score[r][j], own, keys, score[r][j]);
              }
            }
          }
        }
      }
    }
    if (kAhead) {
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
        FOR_UNROLL (ushort b = 0; b < kDimBlocks; ++b)
          simdgroup_load(loaded[kAhead ? j : 0][kAhead ? b : 0],
                         v_keys + j * 8 * v_stride + kv_head * args.value_dim + b * 8, v_stride);
    }

    // Softmax: maximum, weights, sum, and the factor of the earlier sums. As few branches as possible,
    // so that the rows of a lane do not wait for each other.
    float2 lane_scores[kRowBlocks][kBlocks];
    FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j) lane_scores[r][j] = elements(score[r][j]);
    if (key < seen_by_all.x || key + PREFILL_KEYS > seen_by_all.y || args.alibi_heads > 0 ||
        args.position_bias || args.added_keys > 0 || args.score_cap > 0.0f) {
      FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
        FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
          FOR_UNROLL (ushort c = 0; c < 2; ++c)
            lane_scores[r][j][c] = mine[r].score(lane_scores[r][j][c], key + j * 8 + block_rows.column + c);
    }
    Block weight[kRowBlocks][kBlocks];
    float factor[kRowBlocks];
    bool rescaled = false;
    FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r) {
      float new_best = best[r];
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
        new_best = max(new_best, max(lane_scores[r][j][0], lane_scores[r][j][1]));
      new_best = block_rows.largest(new_best);
      factor[r] = fast::exp2(best[r] - new_best);
      rescaled = rescaled || factor[r] != 1.0f;
      best[r] = new_best;
      sum[r] *= factor[r];
      FOR_UNROLL (ushort j = 0; j < kBlocks; ++j) {
        const float2 lane_weights = fast::exp2(lane_scores[r][j] - new_best);
        sum[r] += lane_weights[0] + lane_weights[1];
        weight[r][j] = block_of<T>(vec<T, 2>(lane_weights));
      }
    }
    if (simd_any(rescaled)) {
      FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
        FOR_UNROLL (ushort b = 0; b < kValueBlocks; ++b)
          if (b < value_blocks) output[r][b] = block_of<float>(elements(output[r][b]) * factor[r]);
    }

    FOR_UNROLL (ushort j = 0; j < kBlocks; ++j) {
      if (key + j * 8 < end) {
        device const T* v_block = v_keys + j * 8 * v_stride + kv_head * args.value_dim;
        if (key + j * 8 + 8 <= cached) {
          FOR_UNROLL (ushort b = 0; b < kValueBlocks; ++b) {
            if (b < value_blocks) {
              Block values = loaded[kAhead ? j : 0][kAhead ? b : 0];
              if (!kAhead) simdgroup_load(values, v_block + b * 8, v_stride);
              FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
                simdgroup_multiply_accumulate(output[r][b], weight[r][j], values, output[r][b]);
            }
          }
        } else {
          // Rows beyond the cached keys may hold NaN, and 0 * NaN is not 0, so they are replaced by zeros.
          const bool beyond = key + j * 8 + block_rows.row >= cached;
          FOR_UNROLL (ushort b = 0; b < kValueBlocks; ++b) {
            if (b < value_blocks) {
              device const T* my_values = v_block + block_rows.row * v_stride + b * 8 + block_rows.column;
              const Block values =
                  block_of<T>(beyond ? vec<T, 2>(T(0)) : *(device const vec<T, 2>*)my_values);
              FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r)
                simdgroup_multiply_accumulate(output[r][b], weight[r][j], values, output[r][b]);
            }
          }
        }
      }
    }
  }

  FOR_UNROLL (ushort r = 0; r < kRowBlocks; ++r) {
    const float scale = 1.0f / mine[r].divisor(block_rows.sum(sum[r]), best[r]);
    device half* my_out = out + ((tile.row + mine[r].token) * args.n_heads + mine[r].head) * args.value_dim +
                          first_value + block_rows.column;
    FOR_UNROLL (ushort b = 0; b < kValueBlocks; ++b) {
      if (b < value_blocks) {
        const half2 normalized = half2(elements(output[r][b]) * scale);
        if (mine[r].inside) *(device half2*)(my_out + b * 8) = normalized;
      }
    }
  }
}

// Grid: (simdgroups for the tiles, n_kv_heads * PREFILL_VALUE_PARTS).
template <typename T, ushort kDimBlocks, ushort kRowBlocks>
kernel void attention_prefill(
    device const float* q [[buffer(0)]],  // [tokens][q_stride]
    device const AttentionTile* tiles [[buffer(1)]],
    device const uint* pages [[buffer(2)]],   // block tables
    device const T* k [[buffer(3)]],          // pages of [PAGE_POSITIONS][n_kv_heads][key_dim]
    device const T* v [[buffer(4)]],          // the same with value_dim
    device const float* bias [[buffer(5)]],   // [BIAS_BUCKETS][n_heads], or [tokens][n_heads][added_keys]
    device const float* sinks [[buffer(6)]],  // [n_heads]
    device half* out [[buffer(7)]],           // [tokens][n_heads][value_dim]
    constant AttentionArgs& args [[buffer(8)]],
    threadgroup float* scratch [[threadgroup(0)]],  // PREFILL_SCRATCH per simdgroup
    uint2 group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint tile = group.x * simdgroups + simdgroup;
  if (tile >= args.tiles) return;
  scratch += simdgroup * PREFILL_SCRATCH(kDimBlocks * 8, sizeof(T));
  constexpr uint kParts = PREFILL_VALUE_PARTS(kDimBlocks * 8);
  const uint2 head_part = uint2(group.y / kParts, group.y % kParts);
  if (args.key_dim == kDimBlocks * 8 && args.value_dim == kDimBlocks * 8)
    attend<T, kDimBlocks, kRowBlocks, true>(q, tiles[tile], pages, k, v, bias, sinks, out, args, scratch,
                                            head_part, lane);
  else
    attend<T, kDimBlocks, kRowBlocks, false>(q, tiles[tile], pages, k, v, bias, sinks, out, args, scratch,
                                             head_part, lane);
}

#define INSTANTIATE(name, T, dims) \
  IF_WANTED(name##_##dims)         \
  (INSTANCE(#name "_" #dims, attention_prefill<T, dims / 8, PREFILL_ROW_BLOCKS(dims, sizeof(T))>))
#define EACH_SIZE(name, T)  \
  INSTANTIATE(name, T, 64)  \
  INSTANTIATE(name, T, 128) \
  INSTANTIATE(name, T, 256) \
  INSTANTIATE(name, T, 512)
EACH_SIZE(attention_prefill_f16, half)
EACH_SIZE(attention_prefill_f32, float)
