// Products of weights with many tokens on the matrix units of an M5, which only Metal 4 reaches: half
// operands, float32 sums. Bindings, arguments and geometry are those of matmul.metal.
// clang-format off: the last of these builds on the others
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

// x w^T over all columns, [kTokens][kRows] in the memory of two steps. All threads of the threadgroup.
template <typename W, ushort kTokens, ushort kRows>
static inline threadgroup const float* multiply(thread Stage<W, kTokens, kRows, MATMUL_K>& stage,
                                                threadgroup half* staged) {
  using Operand = tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline>;  // in packed rows
  constexpr auto descriptor = matmul2d_descriptor(kTokens, kRows, MATMUL_K, false, true, false,
                                                  matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroups<MATMUL_THREADS / 32>> product;
  auto sum = product.template get_destination_cooperative_tensor<Operand, Operand, float>();
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

  // The results take the place of what was staged.
  static_assert(kTokens * kRows * sizeof(float) <= 2 * (kTokens + kRows) * MATMUL_K * sizeof(half),
                "the results of a tile lie in the memory of two steps");
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
  constexpr ushort kOutputs = kRows / 2;                      // of a token
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
    y[t * args.out_stride + r] = finite_half(activate(gate[0], args.activation) * gate[8]);
  }
}

typedef decltype(matmul_tensor<F32, MATMUL_NARROW_TILE, MATMUL_NARROW_TILE>) matmul_tensor_t;
typedef decltype(matmul_tensor_swiglu<F32, MATMUL_NARROW_TILE, MATMUL_NARROW_TILE>) matmul_tensor_swiglu_t;
#define INSTANTIATE_SIZE(name, W, size, tile)                                                              \
  template                                                                                                 \
      [[host_name("matmul_tensor_" #name "_" #size)]] kernel matmul_tensor_t matmul_tensor<W, tile, tile>; \
  template [[host_name("matmul_tensor_swiglu_" #name                                                       \
                       "_" #size)]] kernel matmul_tensor_swiglu_t matmul_tensor_swiglu<W, tile, tile>;
#define INSTANTIATE(name, W, number)                                    \
  IF_WANTED(name)(INSTANTIATE_SIZE(name, W, narrow, MATMUL_NARROW_TILE) \
                      INSTANTIATE_SIZE(name, W, wide, MATMUL_WIDE_TILE))
EACH_TENSOR_TYPE(INSTANTIATE)
