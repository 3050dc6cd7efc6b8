// RMSNorm of each token: y = x / sqrt(mean(x^2) + eps) * weight. Models with norms after their blocks have
// none before them: without a weight, rmsnorm only converts x to the type of y.
//
// One threadgroup per token: each thread reads four adjacent values and their weights at once, and one
// barrier joins the sums (norm.h). No other work runs at this time to hide the latency of a longer chain.
#include <metal_stdlib>

#include "args.h"
#include "norm.h"
#include "variants.h"

using namespace metal;

constant constexpr ushort kMostThreads = 1024;  // maximum per threadgroup

// A row, normalized by all threads of the group: scale is 1 / sqrt(mean(x^2) + eps). A thread keeps its first
// four values, which are all of them if there are enough threads, and reads their weights before the sum. It
// reads no values of other threads, since the result may overwrite the row (rmsnorm_in_place).
struct NormedRow {
  float4 x, weight;
  float scale;
};
static inline NormedRow normed_row(device const float4* x, device const float4* weight, uint dim, float eps,
                                   threadgroup float* partial, ushort thread_index, ushort threads,
                                   ushort lane) {
  const uint columns = dim / 4;
  NormedRow row = {};
  if (thread_index < columns) row = {x[thread_index], weight[thread_index], 0.0f};
  float sum = dot(row.x, row.x);
#pragma unroll(2)
  for (uint i = thread_index + threads; i < columns; i += threads) sum += dot(x[i], x[i]);
  row.scale = norm_scale(sum, dim, eps, partial, thread_index, threads, lane);
  return row;
}

// Built-in arguments of the kernels below: one threadgroup per token.
#define ROW_ARGUMENTS                                                                               \
  uint token [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]], \
      ushort threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]]

// T is half if a matmul reads the result, float if a matvec does.
template <typename T>
kernel void rmsnorm(device const float4* weight [[buffer(0)]],  // [dim]
                    device const float4* x [[buffer(1)]],       // [tokens][stride]
                    device vec<T, 4>* y [[buffer(2)]],          // [tokens][stride]
                    constant RmsnormArgs& args [[buffer(3)]], ROW_ARGUMENTS) {
  threadgroup float partial[kMostThreads];
  const uint columns = args.dim / 4;
  x += token * (args.stride / 4);
  y += token * (args.stride / 4);
  if (!args.has_weight) {
    for (uint i = thread_index; i < columns; i += threads) y[i] = vec<T, 4>(x[i]);
    return;
  }
  const NormedRow row = normed_row(x, weight, args.dim, args.eps, partial, thread_index, threads, lane);
  if (thread_index < columns) y[thread_index] = vec<T, 4>(row.x * row.scale * row.weight);
#pragma unroll(2)
  for (uint i = thread_index + threads; i < columns; i += threads)
    y[i] = vec<T, 4>(x[i] * row.scale * weight[i]);
}

INSTANTIATE_FOR_FLOATS(rmsnorm)

// y = rmsnorm(y). Uses one binding, as Metal's compiler assumes that the buffers of a kernel do not overlap.
kernel void rmsnorm_in_place(device const float4* weight [[buffer(0)]],  // [dim]
                             device float4* y [[buffer(1)]],             // [tokens][stride]
                             constant RmsnormArgs& args [[buffer(2)]], ROW_ARGUMENTS) {
  threadgroup float partial[kMostThreads];
  const uint columns = args.dim / 4;
  y += token * (args.stride / 4);
  const NormedRow row = normed_row(y, weight, args.dim, args.eps, partial, thread_index, threads, lane);
  if (thread_index < columns) y[thread_index] = row.x * row.scale * row.weight;
#pragma unroll(2)
  for (uint i = thread_index + threads; i < columns; i += threads) y[i] = y[i] * row.scale * weight[i];
}

// Adds the norm of a block's output to the residual stream.
kernel void rmsnorm_add(device const float4* weight [[buffer(0)]],  // [dim]
                        device const float* scale [[buffer(1)]],    // of the result; one value
                        device const float4* x [[buffer(2)]],       // [tokens][dim]
                        device float4* y [[buffer(3)]],             // [tokens][dim]
                        constant RmsnormAddArgs& args [[buffer(4)]], ROW_ARGUMENTS) {
  threadgroup float partial[kMostThreads];
  const uint columns = args.dim / 4;
  const float factor = args.has_scale ? scale[0] : 1.0f;
  x += token * columns;
  y += token * columns;
  const NormedRow row = normed_row(x, weight, args.dim, args.eps, partial, thread_index, threads, lane);
  if (thread_index < columns) y[thread_index] = (y[thread_index] + row.x * row.scale * row.weight) * factor;
#pragma unroll(2)
  for (uint i = thread_index + threads; i < columns; i += threads)
    y[i] = (y[i] + x[i] * row.scale * weight[i]) * factor;
}

// rmsnorm_add, then the input of the next products: the norm of the stream, or the stream itself. With as
// many threads as rmsnorm_f32, the results are bit-identical to those of the two kernels.
template <typename T>
kernel void rmsnorm_add_norm(device const float4* weight [[buffer(0)]],       // [dim]
                             device const float4* next_weight [[buffer(1)]],  // [dim]
                             device const float4* x [[buffer(2)]],            // [tokens][dim]
                             device float4* y [[buffer(3)]],                  // [tokens][dim]
                             device vec<T, 4>* normed [[buffer(4)]],          // [tokens][dim]
                             constant RmsnormAddArgs& args [[buffer(5)]], ROW_ARGUMENTS) {
  threadgroup float partial[kMostThreads], next_partial[kMostThreads];
  const uint columns = args.dim / 4;
  x += token * columns;
  y += token * columns;
  normed += token * columns;
  const NormedRow row = normed_row(x, weight, args.dim, args.eps, partial, thread_index, threads, lane);
  float sum = 0.0f;
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 value = y[i] + x[i] * row.scale * weight[i];
    sum += dot(value, value);
    y[i] = value;
    if (!args.has_next) normed[i] = vec<T, 4>(value);
  }
  if (!args.has_next) return;
  const float scale = norm_scale(sum, args.dim, args.next_eps, next_partial, thread_index, threads, lane);
  for (uint i = thread_index; i < columns; i += threads) normed[i] = vec<T, 4>(y[i] * scale * next_weight[i]);
}

INSTANTIATE_FOR_FLOATS(rmsnorm_add_norm)
