// Products of weights with many tokens on the matrix units of an M5, which only Metal 4 exposes: half
// operands, float32 sums. Bindings, arguments and geometry are as in matmul.metal.
// clang-format off: the last of these depends on the others
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
// clang-format on

#include "args.h"
#include "dequant.h"
#include "matmul_tiles.h"
#include "projection.h"
#include "variants.h"

using namespace metal;
using namespace mpp::tensor_ops;

// Computes x w^T over all columns, [kTokens][kRows], in the memory of two steps. All threads take part.
template <typename W, ushort kTokens, ushort kRows>
static inline threadgroup const float* multiply(thread Stage<W, kTokens, kRows, MATMUL_K>& stage,
                                                threadgroup half* staged) {
  using Operand = tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline>;  // packed rows
  constexpr auto descriptor = matmul2d_descriptor(kTokens, kRows, MATMUL_K, false, true, false,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroups<MATMUL_THREADS / 32>> product;
  auto sum = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
#pragma unroll
  for (ushort i = 0; i < sum.get_capacity(); ++i)
    if (sum.is_valid_element(i)) sum[i] = 0.0f;

  stage.begin(staged);
  for (uint k = 0; k < stage.in_dim; k += MATMUL_K) {
    const bool more = stage.load_after(k);
    Operand x(stage.tokens_staged(), dextents<int32_t, 2>(MATMUL_K, kTokens));
    Operand w(stage.weights_staged(), dextents<int32_t, 2>(MATMUL_K, kRows));
    product.run(x, w, sum);
    if (more) stage.store_next();
  }

  // The results overwrite the staged operands.
  static_assert(kTokens * kRows * sizeof(float) <= 2 * (kTokens + kRows) * MATMUL_K * sizeof(half),
                "the results of a tile are in the memory of two steps");
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* results = (threadgroup float*)staged;
  tensor<threadgroup float, dextents<int32_t, 2>, tensor_inline> target(results,
                                                                        dextents<int32_t, 2>(kRows, kTokens));
  sum.store(target);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return results;
}

// y[t][row] (+)= w[row] . x[t]. Threadgroup: MATMUL_THREADS. Grid: (rows / kRows, tokens / kTokens), rounded
// up.
template <typename W, ushort kTokens, ushort kRows>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_tensor(
    device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device float* y [[buffer(2)]],        // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half staged[2 * (kTokens + kRows) * MATMUL_K];  // two steps, then the results
  const uint token = group.y * kTokens, row = group.x * kRows;
  Stage<W, kTokens, kRows, MATMUL_K> stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index;
  stage.weights.begin(w, args, row, thread_index);
  stage.tokens.begin(x, args, token, thread_index);
  threadgroup const float* results = multiply<W, kTokens, kRows>(stage, staged);

  y += token * args.out_stride + row;
  for (ushort e = thread_index; e < kTokens * kRows; e += MATMUL_THREADS) {
    const ushort t = e / kRows, r = e % kRows;
    if (token + t >= args.tokens || row + r >= args.out_dim) continue;
    device float& out = y[t * args.out_stride + r];
    out = args.accumulate ? out + results[e] : results[e];
  }
}

// y[t][row] = activation(gate[row] . x[t]) * (up[row] . x[t]); the stacked matrices are gate and up. Grid:
// (rows / (kRows / 2), tokens / kTokens), rounded up.
template <typename W, ushort kTokens, ushort kRows>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_tensor_swiglu(
    device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device half* y [[buffer(2)]],         // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup half staged[2 * (kTokens + kRows) * MATMUL_K];  // two steps, then the results
  constexpr ushort kOutputs = kRows / 2;                      // per token
  const uint token = group.y * kTokens, row = group.x * kOutputs;
  Stage<W, kTokens, kRows, MATMUL_K> stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index;
  stage.weights.begin_gated(w, args, row, thread_index);
  stage.tokens.begin(x, args, token, thread_index);
  threadgroup const float* results = multiply<W, kTokens, kRows>(stage, staged);

  y += token * args.out_stride + row;
  for (ushort e = thread_index; e < kTokens * kOutputs; e += MATMUL_THREADS) {
    const ushort t = e / kOutputs, r = e % kOutputs;
    if (token + t >= args.tokens || row + r >= args.out_dim) continue;
    threadgroup const float* gate = results + t * kRows + r / 8 * 16 + r % 8;
    y[t * args.out_stride + r] = finite<half>(activate_gated(gate[0], gate[8], args.activation));
  }
}

// Tall tiles: MATMUL_TALL_TOKENS tokens and MATMUL_WIDE_TILE rows, for at least as many tokens and a multiple
// of MATMUL_K columns. Only weights are staged. Activations of so many tokens are read from device memory:
// they would take too much threadgroup memory, and copying them as long as the products. The last tile ends
// with the last token, so that no operand has an edge.
template <typename W>
struct Tall {
  static constant constexpr ushort kTokens = MATMUL_TALL_TOKENS, kRows = MATMUL_WIDE_TILE;
  using Activations = tensor<device half, dextents<int32_t, 2>, tensor_inline>;
  using Staged = tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline>;
  using Product = matmul2d<matmul2d_descriptor(kTokens, kRows, MATMUL_K, false, true, false,
                                               matmul2d_descriptor::mode::multiply_accumulate),
                           execution_simdgroups<MATMUL_THREADS / 32>>;

  // First token of the tile. The last tile may overlap the one before.
  static uint first_token(uint tile, uint tokens) { return min(tile * kTokens, tokens - kTokens); }

  // sum += x w^T over all columns. x begins with the tile's first token; `staged` has two steps of weights.
  template <typename Sum>
  static void multiply(thread WeightTile<W, kRows, MATMUL_K>& weights, device const half* x, uint in_dim,
                       thread Sum& sum, threadgroup half* staged, ushort thread_index) {
    Product product;
    threadgroup half* current = staged;
    threadgroup half* next = staged + kRows * MATMUL_K;
    weights.load(thread_index, 0, in_dim);
    weights.store(current, thread_index);
    for (uint k = 0; k < in_dim; k += MATMUL_K) {
      // All threads have stored `current` and have read the old contents of `next`.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool more = k + MATMUL_K < in_dim;
      if (more) weights.load(thread_index, k + MATMUL_K, in_dim);
      Activations tokens((device half*)(x + k), dextents<int32_t, 2>(MATMUL_K, kTokens),
                         array<int32_t, 2>{1, int32_t(in_dim)});
      Staged rows(current, dextents<int32_t, 2>(MATMUL_K, kRows));
      product.run(tokens, rows, sum);
      if (more) weights.store(next, thread_index);
      threadgroup half* swap = current;
      current = next;
      next = swap;
    }
  }
};

// matmul_tensor with tall tiles. Grid: (rows / MATMUL_WIDE_TILE, tokens / MATMUL_TALL_TOKENS), rounded up.
template <typename W>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_tensor_tall(
    device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device float* y [[buffer(2)]],        // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  typedef Tall<W> Tile;
  threadgroup half staged[2 * Tile::kRows * MATMUL_K];
  const uint first = Tile::first_token(group.y, args.tokens), row = group.x * Tile::kRows;
  WeightTile<W, Tile::kRows, MATMUL_K> weights;
  weights.begin(w, args, row, thread_index);
  typename Tile::Product product;
  auto sum = product.template get_destination_cooperative_tensor<typename Tile::Activations,
                                                                 typename Tile::Staged, float>();
#pragma unroll
  for (ushort i = 0; i < sum.get_capacity(); ++i)
    if (sum.is_valid_element(i)) sum[i] = 0.0f;
  Tile::multiply(weights, x + first * args.in_dim, args.in_dim, sum, staged, thread_index);

#pragma unroll
  for (ushort i = 0; i < sum.get_capacity(); ++i) {
    if (!sum.is_valid_element(i)) continue;
    const auto place = sum.get_multidimensional_index(i);
    const uint r = row + uint(place[0]), t = first + uint(place[1]);
    if (t < group.y * Tile::kTokens || r >= args.out_dim) continue;
    device float& out = y[t * args.out_stride + r];
    out = args.accumulate ? out + sum[i] : sum[i];
  }
}

// matmul_tensor_swiglu with tall tiles. Grid: (rows / (MATMUL_WIDE_TILE / 2), tokens / MATMUL_TALL_TOKENS),
// rounded up.
template <typename W>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_tensor_swiglu_tall(
    device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device half* y [[buffer(2)]],         // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  typedef Tall<W> Tile;
  // Gate and up of a token are in different threads: they are exchanged in threadgroup memory, half of the
  // tokens at a time, in place of the weights.
  constexpr ushort kPart = Tile::kTokens / 2, kOutputs = Tile::kRows / 2;
  threadgroup float results[kPart * Tile::kRows];
  static_assert(sizeof(results) >= 2 * Tile::kRows * MATMUL_K * sizeof(half), "two steps of weights fit");
  const uint first = Tile::first_token(group.y, args.tokens), row = group.x * kOutputs;
  WeightTile<W, Tile::kRows, MATMUL_K> weights;
  weights.begin_gated(w, args, row, thread_index);
  typename Tile::Product product;
  auto sum = product.template get_destination_cooperative_tensor<typename Tile::Activations,
                                                                 typename Tile::Staged, float>();
#pragma unroll
  for (ushort i = 0; i < sum.get_capacity(); ++i)
    if (sum.is_valid_element(i)) sum[i] = 0.0f;
  Tile::multiply(weights, x + first * args.in_dim, args.in_dim, sum, (threadgroup half*)results,
                 thread_index);

  for (ushort part = 0; part < Tile::kTokens; part += kPart) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (ushort i = 0; i < sum.get_capacity(); ++i) {
      if (!sum.is_valid_element(i)) continue;
      const auto place = sum.get_multidimensional_index(i);
      const ushort t = ushort(place[1]);
      if (t >= part && t < part + kPart) results[(t - part) * Tile::kRows + place[0]] = sum[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (ushort e = thread_index; e < kPart * kOutputs; e += MATMUL_THREADS) {
      const uint t = first + part + e / kOutputs;
      const ushort r = e % kOutputs;
      if (t < group.y * Tile::kTokens || row + r >= args.out_dim) continue;
      threadgroup const float* gate = results + e / kOutputs * Tile::kRows + r / 8 * 16 + r % 8;
      y[t * args.out_stride + row + r] = finite<half>(activate_gated(gate[0], gate[8], args.activation));
    }
  }
}

#define INSTANTIATE_SIZE(name, W, size, tile)                              \
  INSTANCE("matmul_tensor_" #name "_" #size, matmul_tensor<W, tile, tile>) \
  INSTANCE("matmul_tensor_swiglu_" #name "_" #size, matmul_tensor_swiglu<W, tile, tile>)
#define INSTANCES(name, W)                                        \
  INSTANTIATE_SIZE(name, W, narrow, MATMUL_NARROW_TILE)           \
  INSTANTIATE_SIZE(name, W, wide, MATMUL_WIDE_TILE)               \
  INSTANCE("matmul_tensor_" #name "_tall", matmul_tensor_tall<W>) \
  INSTANCE("matmul_tensor_swiglu_" #name "_tall", matmul_tensor_swiglu_tall<W>)
#define INSTANTIATE(name, W, number) IF_WANTED(name)(INSTANCES(name, W))
EACH_TENSOR_TYPE(INSTANTIATE)
