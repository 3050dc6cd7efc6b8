// LayerNorm of each token: y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
#include <metal_stdlib>

#include "args.h"
#include "projection.h"
#include "reduce.h"

using namespace metal;

struct Moments {
  float mean, scale;  // scale is 1 / sqrt(variance + eps)
};

// Moments of a row of float4, computed by all threads of the group. at(i) returns the values of column i. The
// variance is the mean of squared differences from the mean: with a difference of sums, digits would cancel
// where the mean is large.
template <typename At>
static inline Moments moments_of(thread const At& at, uint columns, float eps, threadgroup float* partial,
                                 ushort thread_index, ushort threads, ushort lane, ushort simdgroup,
                                 ushort simdgroups) {
  const float n = float(columns * 4);
  float sum = 0;
  for (uint i = thread_index; i < columns; i += threads) sum += dot(at(i), float4(1.0f));
  const float mean = threadgroup_reduce<Sum>(sum, partial, lane, simdgroup, simdgroups) / n;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // partial is written again
  sum = 0;
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 d = at(i) - mean;
    sum += dot(d, d);
  }
  sum = threadgroup_reduce<Sum>(sum, partial, lane, simdgroup, simdgroups);
  return {mean, precise::rsqrt(sum / n + eps)};
}

struct PlainRow {
  device const float4* x;
  float4 operator()(uint i) const { return x[i]; }
};

// One threadgroup for each token. T is half where a matmul reads the result.
template <typename T>
kernel void layernorm(device const float4* weight [[buffer(0)]],  // [dim]
                      device const float4* bias [[buffer(1)]],    // [dim]
                      device const float4* x [[buffer(2)]],       // [tokens][dim]
                      device vec<T, 4>* y [[buffer(3)]],          // [tokens][dim]
                      constant LayernormArgs& args [[buffer(4)]], uint token [[threadgroup_position_in_grid]],
                      ushort thread_index [[thread_index_in_threadgroup]],
                      ushort threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                      ushort simdgroup [[simdgroup_index_in_threadgroup]],
                      ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  x += token * columns;
  y += token * columns;
  const PlainRow row = {x};
  const Moments m =
      moments_of(row, columns, args.eps, partial, thread_index, threads, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 offset = args.has_bias ? bias[i] : float4(0.0f);
    y[i] = vec<T, 4>((x[i] - m.mean) * m.scale * weight[i] + offset);
  }
}

template [[host_name("layernorm_f32")]] kernel decltype(layernorm<float>) layernorm<float>;
template [[host_name("layernorm_f16")]] kernel decltype(layernorm<half>) layernorm<half>;

struct StreamRow {
  device const float4* addend;
  device float4* x;
  bool has_addend;
  float4 operator()(uint i) const { return has_addend ? x[i] + addend[i] : x[i]; }
};

// The norm of the residual stream itself, x = layernorm(x + addend), and its copy in half for the products
// that follow. The addend is the bias of the projection before.
kernel void layernorm_stream(device const float4* weight [[buffer(0)]],  // [dim]
                             device const float4* bias [[buffer(1)]],    // [dim]
                             device const float4* addend [[buffer(2)]],  // [dim]
                             device float4* x [[buffer(3)]],             // [tokens][dim]
                             device half4* copy [[buffer(4)]],           // [tokens][dim]
                             constant LayernormArgs& args [[buffer(5)]],
                             uint token [[threadgroup_position_in_grid]],
                             ushort thread_index [[thread_index_in_threadgroup]],
                             ushort threads [[threads_per_threadgroup]],
                             ushort lane [[thread_index_in_simdgroup]],
                             ushort simdgroup [[simdgroup_index_in_threadgroup]],
                             ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  x += token * columns;
  copy += token * columns;
  const StreamRow row = {addend, x, bool(args.has_addend)};
  const Moments m =
      moments_of(row, columns, args.eps, partial, thread_index, threads, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 offset = args.has_bias ? bias[i] : float4(0.0f);
    const float4 normed = (row(i) - m.mean) * m.scale * weight[i] + offset;
    x[i] = normed;
    copy[i] = half4(normed);
  }
}

// The norm of rows where they are, x = layernorm(x + addend), such as the heads of a token.
kernel void layernorm_in_place(device const float4* weight [[buffer(0)]],  // [dim]
                               device const float4* bias [[buffer(1)]],    // [dim]
                               device const float4* addend [[buffer(2)]],  // [dim]
                               device float4* x [[buffer(3)]],             // [tokens][stride], of which dim
                               constant LayernormArgs& args [[buffer(4)]],
                               uint token [[threadgroup_position_in_grid]],
                               ushort thread_index [[thread_index_in_threadgroup]],
                               ushort threads [[threads_per_threadgroup]],
                               ushort lane [[thread_index_in_simdgroup]],
                               ushort simdgroup [[simdgroup_index_in_threadgroup]],
                               ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  x += token * (args.stride / 4);
  const StreamRow row = {addend, x, bool(args.has_addend)};
  const Moments m =
      moments_of(row, columns, args.eps, partial, thread_index, threads, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 offset = args.has_bias ? bias[i] : float4(0.0f);
    x[i] = (row(i) - m.mean) * m.scale * weight[i] + offset;
  }
}

struct AttendedRow {
  device const float4* addend;
  device const float4* x;
  device float4* y;
  bool has_addend;
  float4 operator()(uint i) const { return has_addend ? x[i] + y[i] + addend[i] : x[i] + y[i]; }
};

// Two norms of the residual stream after attention, whose output is y: x = second(x + first(x + y + addend)),
// and a copy in half. Overwrites y; a thread reads no values but its own.
kernel void layernorm_twice(device const float4* weight [[buffer(0)]],         // [dim]
                            device const float4* bias [[buffer(1)]],           // [dim]
                            device const float4* addend [[buffer(2)]],         // [dim]
                            device const float4* second_weight [[buffer(3)]],  // [dim]
                            device const float4* second_bias [[buffer(4)]],    // [dim]
                            device float4* y [[buffer(5)]],                    // [tokens][dim]
                            device float4* x [[buffer(6)]],                    // [tokens][dim]
                            device half4* copy [[buffer(7)]],                  // [tokens][dim]
                            constant LayernormArgs& args [[buffer(8)]],
                            uint token [[threadgroup_position_in_grid]],
                            ushort thread_index [[thread_index_in_threadgroup]],
                            ushort threads [[threads_per_threadgroup]],
                            ushort lane [[thread_index_in_simdgroup]],
                            ushort simdgroup [[simdgroup_index_in_threadgroup]],
                            ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  const uint columns = args.dim / 4;
  x += token * columns;
  y += token * columns;
  copy += token * columns;
  const AttendedRow attended = {addend, x, y, bool(args.has_addend)};
  const Moments first =
      moments_of(attended, columns, args.eps, partial, thread_index, threads, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 offset = args.has_bias ? bias[i] : float4(0.0f);
    y[i] = x[i] + (attended(i) - first.mean) * first.scale * weight[i] + offset;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // partial is written again
  const PlainRow row = {y};
  const Moments second =
      moments_of(row, columns, args.eps, partial, thread_index, threads, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < columns; i += threads) {
    const float4 offset = args.has_second_bias ? second_bias[i] : float4(0.0f);
    const float4 stream = (y[i] - second.mean) * second.scale * second_weight[i] + offset;
    x[i] = stream;
    copy[i] = half4(stream);
  }
}

// The bias of a projection that was added to the residual stream: x += bias.
kernel void add_bias(device const float4* bias [[buffer(0)]],  // [dim]
                     device float4* x [[buffer(1)]],           // [tokens][dim]
                     constant AddBiasArgs& args [[buffer(2)]], uint2 position [[thread_position_in_grid]]) {
  const uint columns = args.dim / 4;
  if (position.x < columns) x[position.y * columns + position.x] += bias[position.x];
}
