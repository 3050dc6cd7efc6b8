// Attention of many tokens on the matrix units of an M5, which only Metal 4 exposes: half operands, float32
// sums, online softmax. Bindings and arguments are as in attention_prefill.metal, assumptions about tensors
// as in matmul_tensor.metal.
//
// A threadgroup computes a tile of ATTENTION_TENSOR_ROWS stacked rows. A step is a product with PREFILL_KEYS
// keys, a softmax with two threads per row, and a product with as many values. Keys and values are read from
// device memory, in strided rows.
// clang-format off: the last of these depends on the others
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
// clang-format on

#include "args.h"
#include "attention.h"
#include "pages.h"
#include "stacked_rows.h"
#include "unroll.h"
#include "variants.h"

using namespace metal;
using namespace mpp::tensor_ops;

constant constexpr ushort kRows = ATTENTION_TENSOR_ROWS, kKeys = PREFILL_KEYS;
constant constexpr ushort kSimdgroups = MATMUL_THREADS / 32;
static_assert(MATMUL_THREADS == 2 * kRows, "two threads share a row");

typedef tensor<device half, dextents<int32_t, 2>, tensor_inline> Cached;
typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> Staged;

// Heads of kDims dimensions. Grid: (tiles, n_kv_heads).
template <ushort kDims>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void attention_tensor(
    device const float* q [[buffer(0)]],  // [tokens][q_stride]
    device const AttentionTile* tiles [[buffer(1)]],
    device const uint* pages [[buffer(2)]],   // block tables
    device const half* k [[buffer(3)]],       // pages of [PAGE_POSITIONS][n_kv_heads][kDims]
    device const half* v [[buffer(4)]],       // the same
    device const float* bias [[buffer(5)]],   // [BIAS_BUCKETS][n_heads], or [tokens][n_heads][added_keys]
    device const float* sinks [[buffer(6)]],  // [n_heads]
    device half* out [[buffer(7)]],           // [tokens][n_heads][kDims]
    constant AttentionArgs& args [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr auto score_descriptor =
      matmul2d_descriptor(kRows, kKeys, kDims, false, true, false, matmul2d_descriptor::mode::multiply);
  constexpr auto value_descriptor = matmul2d_descriptor(kRows, kDims, kKeys, false, false, false,
                                                        matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<score_descriptor, execution_simdgroups<kSimdgroups>> score_product;
  matmul2d<value_descriptor, execution_simdgroups<kSimdgroups>> value_product;
  threadgroup half queries[kRows * kDims];  // the values in the last step
  threadgroup float scores[kRows * kKeys];  // then the weights, as halves at the beginning of each row
  threadgroup float of_row[kRows];          // factor of the earlier sums, then the sum of weights
  threadgroup float changed[kSimdgroups];   // 1 if a factor is not 1
  static_assert(kRows >= kKeys, "values take the place of the queries");

  const uint kv_head = group.y;
  StackedRows rows;
  device const AttentionTile& of = tiles[group.x];
  rows.begin({of.row, of.tokens, of.position, of.pages, of.first, of.end}, args, bias, sinks);
  const ushort row = thread_index / 2, half_of_row = thread_index % 2;
  const StackedRow mine = rows.row(row, kv_head, args);

  // Queries, scaled for exp2.
  device const float* my_query =
      q + (rows.tile.row + mine.token) * args.q_stride + mine.head * args.query_step;
  for (ushort d = half_of_row * (kDims / 2); d < (half_of_row + 1) * (kDims / 2); d += 4)
    *(threadgroup half4*)(queries + row * kDims + d) =
        half4(*(device const float4*)(my_query + d) * (args.scale * M_LOG2E_F));

  auto output = value_product.template get_destination_cooperative_tensor<Staged, Cached, float>();
#pragma unroll
  for (ushort i = 0; i < output.get_capacity(); ++i)
    if (output.is_valid_element(i)) output[i] = 0.0f;
  float best = kLowest, sum = 0.0f;  // of this thread's row; `sum` over its keys only

  device const uint* block_table = pages + rows.tile.pages;
  const uint end = rows.end_key(kRows), cached = rows.tile.end;
  const uint stride = args.n_kv_heads * kDims;  // between positions
  threadgroup half* weights = (threadgroup half*)scores;
  threadgroup float* my_scores = scores + row * kKeys + half_of_row * (kKeys / 2);
  threadgroup half* my_weights = weights + row * 2 * kKeys + half_of_row * (kKeys / 2);
  // A step of keys never straddles two pages.
  for (uint key = rows.first_key() / kKeys * kKeys; key < end; key += kKeys) {
    const ulong first = key % PAGE_POSITIONS * stride + kv_head * kDims;
    device const half* keys = page_at(k, block_table, key, args.page_stride) + first;
    device const half* values = page_at(v, block_table, key, args.page_stride) + first;

    // Scores. Those of keys beyond the cached ones, with undefined contents, are masked below.
    threadgroup_barrier(mem_flags::mem_threadgroup);  // queries are stored; weights and factors were read
    Staged own(queries, dextents<int32_t, 2>(kDims, kRows));
    Cached others((device half*)keys, dextents<int32_t, 2>(kDims, kKeys),
                  array<int32_t, 2>{1, int32_t(stride)});
    auto score = score_product.template get_destination_cooperative_tensor<Staged, Cached, float>();
    score_product.run(own, others, score);
    tensor<threadgroup float, dextents<int32_t, 2>, tensor_inline> target(scores,
                                                                          dextents<int32_t, 2>(kKeys, kRows));
    score.store(target);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax: maximum, weights, sum, and the factor of the earlier sums.
    float4 lane_scores[kKeys / 8];
    float new_best = best;
    FOR_UNROLL (ushort i = 0; i < kKeys / 8; ++i) {
      lane_scores[i] = *(threadgroup const float4*)(my_scores + i * 4);
      FOR_UNROLL (ushort c = 0; c < 4; ++c) {
        lane_scores[i][c] = mine.score(lane_scores[i][c], key + half_of_row * (kKeys / 2) + i * 4 + c);
        new_best = max(new_best, lane_scores[i][c]);
      }
    }
    new_best = max(new_best, simd_shuffle_xor(new_best, 1));
    const float factor = fast::exp2(best - new_best);
    best = new_best;
    sum *= factor;
    simdgroup_barrier(mem_flags::mem_threadgroup);  // both threads have read the row: its weights may follow
    FOR_UNROLL (ushort i = 0; i < kKeys / 8; ++i) {
      const float4 lane_weights = fast::exp2(lane_scores[i] - best);
      FOR_UNROLL (ushort c = 0; c < 4; ++c) sum += lane_weights[c];
      *(threadgroup half4*)(my_weights + i * 4) = half4(lane_weights);
    }
    if (half_of_row == 0) of_row[row] = factor;
    const bool differs = simd_any(factor != 1.0f);
    if (thread_index % 32 == 0) changed[simdgroup] = differs ? 1.0f : 0.0f;
    // Rows beyond the cached keys may hold NaN, and 0 * NaN is not 0, so they are replaced by zeros. This is
    // the last step, after which no product reads the queries.
    const bool last = key + kKeys > cached;
    if (last)
      for (ushort i = thread_index; i < kKeys * kDims / 4; i += MATMUL_THREADS) {
        const ushort position = i / (kDims / 4), d = i % (kDims / 4) * 4;
        *(threadgroup half4*)(queries + position * kDims + d) =
            key + position < cached ? *(device const half4*)(values + position * stride + d) : half4(0.0h);
      }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float any_changed = 0.0f;
    for (ushort s = 0; s < kSimdgroups; ++s) any_changed += changed[s];
    if (any_changed > 0.0f)
#pragma unroll
      for (ushort i = 0; i < output.get_capacity(); ++i)
        if (output.is_valid_element(i)) output[i] *= of_row[output.get_multidimensional_index(i)[1]];
    Staged weight(weights, dextents<int32_t, 2>(kKeys, kRows), array<int32_t, 2>{1, 2 * kKeys});
    if (last) {
      Staged staged(queries, dextents<int32_t, 2>(kDims, kKeys));
      value_product.run(weight, staged, output);
    } else {
      Cached in_place((device half*)values, dextents<int32_t, 2>(kDims, kKeys),
                      array<int32_t, 2>{1, int32_t(stride)});
      value_product.run(weight, in_place, output);
    }
  }

  // Normalizes each thread's part of the output.
  sum += simd_shuffle_xor(sum, 1);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // factors were read
  if (half_of_row == 0) of_row[row] = mine.divisor(sum, best);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (ushort i = 0; i < output.get_capacity(); ++i) {
    if (!output.is_valid_element(i)) continue;
    const auto place = output.get_multidimensional_index(i);  // (dimension, row)
    const uint r = rows.tile.first + uint(place[1]);
    if (r >= rows.count) continue;
    device half* head =
        out +
        ((rows.tile.row + r / rows.heads) * args.n_heads + kv_head * rows.heads + r % rows.heads) * kDims;
    head[place[0]] = half(output[i] / of_row[place[1]]);
  }
}

#define INSTANTIATE(name, dims) IF_WANTED(name##_##dims)(INSTANCE(#name "_" #dims, attention_tensor<dims>))
INSTANTIATE(attention_tensor_f16, 64)
INSTANTIATE(attention_tensor_f16, 128)
