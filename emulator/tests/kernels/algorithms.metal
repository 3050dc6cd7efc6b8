// Textbook algorithms, as a test of the emulator itself.
#include <metal_stdlib>
using namespace metal;

// out[i] = the sum of x plus the sum of squares, one value per thread. If `planted`, memory is written again
// before all have read it.
kernel void reduce_twice(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                         constant uint& planted [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                         ushort lane [[thread_index_in_simdgroup]],
                         ushort simdgroup [[simdgroup_index_in_threadgroup]],
                         ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  float sum = simd_sum(x[i]);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
  if (!planted) threadgroup_barrier(mem_flags::mem_threadgroup);
  const float squares = simd_sum(x[i] * x[i]);
  if (lane == 0) partial[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = sum + simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
}

// Position of each thread in a grid that is not a multiple of the threadgroup.
struct Place {
  uint3 in_grid, group, group_size, grid;
  uint index, lane, simdgroup, simdgroups;
};
kernel void places(device Place* out [[buffer(0)]], uint3 in_grid [[thread_position_in_grid]],
                   uint3 group [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
                   uint3 grid [[threads_per_grid]], uint index [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  device Place& place = out[(in_grid.z * grid.y + in_grid.y) * grid.x + in_grid.x];
  place.in_grid = in_grid;
  place.group = group;
  place.group_size = group_size;
  place.grid = grid;
  place.index = index;
  place.lane = lane;
  place.simdgroup = simdgroup;
  place.simdgroups = simdgroups;
}
