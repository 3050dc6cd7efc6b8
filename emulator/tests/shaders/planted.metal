// Mistakes that the sanitizers must find, each at the line that says so.
#include <metal_stdlib>

using namespace metal;

// Neighbours exchange values through threadgroup memory.
kernel void exchange(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                     constant uint& planted [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                     uint n [[threads_per_threadgroup]]) {
  threadgroup float shared[128];
  shared[i] = x[i];  // MISTAKE: written
  if (!planted) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[n - 1 - i];  // MISTAKE: read
}

// The same between different simdgroups, which a simdgroup barrier does not synchronize.
kernel void exchange_far(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                         constant uint& planted [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                         uint n [[threads_per_threadgroup]]) {
  threadgroup float shared[128];
  shared[i] = x[i];
  if (planted) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[i] = shared[n - 1 - i];
}

// The missing barrier is between two other barriers.
kernel void exchange_between(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                             constant uint& planted [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                             uint n [[threads_per_threadgroup]]) {
  threadgroup float shared[128];
  shared[i] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[i] = x[i];
  if (!planted) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[n - 1 - i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[i] = 0;
}
kernel void exchange_in_simdgroup(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                                  constant uint& planted [[buffer(2)]],
                                  uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[128];
  shared[i] = 0;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  shared[i] = x[i];
  if (!planted) simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i ^ 1];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  shared[i] = 0;
}

kernel void read_beyond_buffer(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                               constant uint& planted [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = x[planted ? i + 1 : i];  // MISTAKE: beyond a buffer
}

kernel void read_beyond_threadgroup_array(device const float* x [[buffer(0)]],
                                          device float* out [[buffer(1)]],
                                          constant uint& planted [[buffer(2)]],
                                          uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  threadgroup float other[64];
  shared[i] = other[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup const float* element = shared + (planted ? i + 1 : i);
  out[i] = other[i] + *element;  // MISTAKE: beyond a threadgroup array
}

kernel void read_beyond_local_array(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                                    constant uint& planted [[buffer(2)]],
                                    uint i [[thread_index_in_threadgroup]]) {
  float local[8];
  for (uint k = 0; k < 8; ++k) local[k] = x[k];
  device const float* chosen = x + (planted ? 8 : 7);
  out[i] = local[uint(*chosen)];  // MISTAKE: beyond a local array
}

kernel void overflow(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                     constant uint& planted [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = x[i] + (planted ? 0x7fffffff : 1);  // MISTAKE: signed overflow
}
