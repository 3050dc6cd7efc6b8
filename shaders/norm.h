// The factor of RMSNorm, computed by a threadgroup or by a single simdgroup with bit-identical results.
#pragma once

#include <metal_stdlib>

#include "unroll.h"

using namespace metal;

// 1 / sqrt(mean(x^2) + eps) of `dim` values. Adds the threads' sums over simdgroups in order, then over
// lanes. `partial` has a float per thread, and may be used again only after another barrier.
static inline float norm_scale(float sum_of_thread, uint dim, float eps, threadgroup float* partial,
                               ushort thread_index, ushort threads, ushort lane) {
  partial[thread_index] = sum_of_thread;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (ushort i = lane; i < threads; i += 32) sum += partial[i];
  return precise::rsqrt(simd_sum(sum) / float(dim) + eps);
}

// norm_scale computed by one simdgroup, which adds in the order of a threadgroup of `threads` threads. A lane
// computes the sums of every 32nd of these threads, loading the first values of kTogether of them together.
static inline float norm_scale_of(device const float4* x, uint dim, float eps, uint threads, ushort lane) {
  constexpr ushort kTogether = 8;
  const uint columns = dim / 4;
  float sum = 0.0f;
  for (uint first = lane; first < threads; first += 32 * kTogether) {
    float4 values[kTogether];
    FOR_UNROLL (ushort r = 0; r < kTogether; ++r) values[r] = x[min(first + r * 32, columns - 1)];
    FOR_UNROLL (ushort r = 0; r < kTogether; ++r) {
      const uint thread_index = first + r * 32;
      float sum_of_thread = thread_index < columns ? dot(values[r], values[r]) : 0.0f;
      for (uint i = thread_index + threads; i < columns; i += threads) sum_of_thread += dot(x[i], x[i]);
      sum += thread_index < threads ? sum_of_thread : 0.0f;
    }
  }
  return precise::rsqrt(simd_sum(sum) / float(dim) + eps);
}
