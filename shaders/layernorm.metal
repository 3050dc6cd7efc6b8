// LayerNorm of each token: y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. One threadgroup per
// token. Columns from args.width on are padding: x, weight and bias are 0 there.
#include <metal_stdlib>

#include "args.h"
#include "reduce.h"
#include "unroll.h"
#include "variants.h"

using namespace metal;

// The threads of a threadgroup.
struct Group {
  threadgroup float* partial;
  ushort thread_index, threads, lane, simdgroup, simdgroups;

  float sum(float value) const {
    return threadgroup_reduce<Sum>(value, partial, lane, simdgroup, simdgroups);
  }
};

// A row of x plus `more` and `addend`, unless they are null.
struct Row {
  device const float4* x;
  device const float4* more;
  device const float4* addend;
  float4 operator()(uint i) const {
    const float4 sum = more ? x[i] + more[i] : x[i];
    return addend ? sum + addend[i] : sum;
  }
};

// The norm of a row; `bias` may be null.
struct NormedRow {
  Row row;
  device const float4* weight;
  device const float4* bias;
  float mean, scale;  // scale is 1 / sqrt(variance + eps)
  float4 operator()(uint i) const {
    return (row(i) - mean) * scale * weight[i] + (bias ? bias[i] : float4(0.0f));
  }
};

// The variance is the mean of squared differences from the mean: a difference of sums would lose digits for a
// large mean.
static inline NormedRow norm(Row row, device const float4* weight, device const float4* bias,
                             constant LayernormArgs& args, Group group) {
  const uint columns = args.dim / 4;
  float sum = 0;
  for (uint i = group.thread_index; i < columns; i += group.threads) sum += dot(row(i), float4(1.0f));
  const float mean = group.sum(sum) / float(args.width);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // partial is overwritten
  sum = 0;
  for (uint i = group.thread_index; i < columns; i += group.threads) {
    const float4 d = row(i) - mean;
    FOR_UNROLL (ushort k = 0; k < 4; ++k) sum += 4 * i + k < args.width ? d[k] * d[k] : 0.0f;
  }
  return {row, weight, bias, mean, precise::rsqrt(group.sum(sum) / float(args.width) + args.eps)};
}

#define GROUP {partial, thread_index, threads, lane, simdgroup, simdgroups}

// T is half if a matmul reads the result.
template <typename T>
kernel void layernorm(device const float4* weight [[buffer(0)]],  // [dim]
                      device const float4* bias [[buffer(1)]],    // [dim]
                      device const float4* x [[buffer(2)]],       // [tokens][dim]
                      device vec<T, 4>* y [[buffer(3)]],          // [tokens][dim]
                      constant LayernormArgs& args [[buffer(4)]], GROUP_ARGUMENTS) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  const Row row = {x + token * columns, nullptr, nullptr};
  const NormedRow normed = norm(row, weight, args.has_bias ? bias : nullptr, args, GROUP);
  y += token * columns;
  for (uint i = thread_index; i < columns; i += threads) y[i] = vec<T, 4>(normed(i));
}

INSTANTIATE_FOR_FLOATS(layernorm)

// The norm of the residual stream itself, x = layernorm(x + addend), and its copy in half for the next
// products. The addend is the bias of the previous projection.
kernel void layernorm_stream(device const float4* weight [[buffer(0)]],  // [dim]
                             device const float4* bias [[buffer(1)]],    // [dim]
                             device const float4* addend [[buffer(2)]],  // [dim]
                             device float4* x [[buffer(3)]],             // [tokens][dim]
                             device half4* copy [[buffer(4)]],           // [tokens][dim]
                             constant LayernormArgs& args [[buffer(5)]], GROUP_ARGUMENTS) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  x += token * columns;
  copy += token * columns;
  const Row row = {x, nullptr, args.has_addend ? addend : nullptr};
  const NormedRow normed = norm(row, weight, args.has_bias ? bias : nullptr, args, GROUP);
  for (uint i = thread_index; i < columns; i += threads) copy[i] = half4(x[i] = normed(i));
}

// The norm of rows in place, x = layernorm(x + addend); a row may be the heads of a token.
kernel void layernorm_in_place(device const float4* weight [[buffer(0)]],  // [dim]
                               device const float4* bias [[buffer(1)]],    // [dim]
                               device const float4* addend [[buffer(2)]],  // [dim]
                               device float4* x [[buffer(3)]],             // [tokens][stride], dim first ones
                               constant LayernormArgs& args [[buffer(4)]], GROUP_ARGUMENTS) {
  threadgroup float partial[32];
  x += token * (args.stride / 4);
  const Row row = {x, nullptr, args.has_addend ? addend : nullptr};
  const NormedRow normed = norm(row, weight, args.has_bias ? bias : nullptr, args, GROUP);
  for (uint i = thread_index; i < args.dim / 4; i += threads) x[i] = normed(i);
}

// Two norms of the residual stream after attention, whose output is y: x = second(x + first(x + y + addend)),
// and a copy in half. Overwrites y. A thread reads only its own values.
kernel void layernorm_twice(device const float4* weight [[buffer(0)]],         // [dim]
                            device const float4* bias [[buffer(1)]],           // [dim]
                            device const float4* addend [[buffer(2)]],         // [dim]
                            device const float4* second_weight [[buffer(3)]],  // [dim]
                            device const float4* second_bias [[buffer(4)]],    // [dim]
                            device float4* y [[buffer(5)]],                    // [tokens][dim]
                            device float4* x [[buffer(6)]],                    // [tokens][dim]
                            device half4* copy [[buffer(7)]],                  // [tokens][dim]
                            constant LayernormArgs& args [[buffer(8)]], GROUP_ARGUMENTS) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  x += token * columns;
  y += token * columns;
  copy += token * columns;
  const Row attended = {x, y, args.has_addend ? addend : nullptr};
  const NormedRow first = norm(attended, weight, args.has_bias ? bias : nullptr, args, GROUP);
  for (uint i = thread_index; i < columns; i += threads) y[i] = x[i] + first(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // partial is overwritten
  const Row row = {y, nullptr, nullptr};
  const NormedRow second =
      norm(row, second_weight, args.has_second_bias ? second_bias : nullptr, args, GROUP);
  for (uint i = thread_index; i < columns; i += threads) copy[i] = half4(x[i] = second(i));
}

// x += bias: the bias of logits, or of a projection that was added to the residual stream.
kernel void add_bias(device const float* bias [[buffer(0)]],  // [dim]
                     device float* x [[buffer(1)]],           // [tokens][dim]
                     constant AddBiasArgs& args [[buffer(2)]], uint2 position [[thread_position_in_grid]]) {
  if (position.x < args.dim) x[position.y * args.dim + position.x] += bias[position.x];
}
