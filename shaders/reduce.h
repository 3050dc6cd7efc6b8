// Reductions over a threadgroup.
#pragma once

#include <metal_stdlib>

using namespace metal;

struct Sum {
  static float identity() { return 0.0f; }
  static float simd(float value) { return simd_sum(value); }
};

struct Max {
  static float identity() { return -INFINITY; }
  static float simd(float value) { return simd_max(value); }
};

// Reduces `value` over all threads; every thread receives the result. `partial` has one float per simdgroup
// and may be used again only after another barrier.
template <typename Op>
static inline float threadgroup_reduce(float value, threadgroup float* partial, ushort lane, ushort simdgroup,
                                       ushort simdgroups) {
  value = Op::simd(value);
  if (simdgroups == 1) return value;
  if (lane == 0) partial[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return Op::simd(lane < simdgroups ? partial[lane] : Op::identity());
}

// Built-in arguments of kernels with one threadgroup per token.
#define GROUP_ARGUMENTS                                                                             \
  uint token [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]], \
      ushort threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]],        \
      ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort simdgroups [[simdgroups_per_threadgroup]]
