// Textbook algorithms, as a test of the emulator itself.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

// out[group] = sum of the group's share of x. Threads: any multiple of 32.
kernel void reduce_sum(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                       constant uint& n [[buffer(2)]], uint position [[thread_position_in_grid]],
                       uint threads [[threads_per_grid]], uint group [[threadgroup_position_in_grid]],
                       ushort lane [[thread_index_in_simdgroup]],
                       ushort simdgroup [[simdgroup_index_in_threadgroup]],
                       ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  float sum = 0;
  for (uint i = position; i < n; i += threads) sum += x[i];
  sum = simd_sum(sum);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    sum = simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
    if (lane == 0) out[group] = sum;
  }
}

// out[i] = the sum of x plus the sum of squares, one value per thread. If `planted`, memory is overwritten
// before all threads have read it.
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

// Transposes 16x16 tiles through threadgroup memory of a size that the host sets: 16 rows of 17 floats.
kernel void transpose(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                      constant uint2& size [[buffer(2)]],  // columns, rows of x
                      threadgroup float* tile [[threadgroup(0)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      ushort2 place [[thread_position_in_threadgroup]]) {
  const uint2 from = group * 16 + uint2(place);
  if (from.x < size.x && from.y < size.y) tile[place.y * 17 + place.x] = x[from.y * size.x + from.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint2 to = group.yx * 16 + uint2(place);
  if (to.x < size.y && to.y < size.x) out[to.y * size.y + to.x] = tile[place.x * 17 + place.y];
}

struct MatmulSize {
  uint m, n, k;
};

// c[m][n] = a[m][k] b[k][n] with 8x8 matrices: a simdgroup computes 16x16 of c. Sizes are multiples of 16.
template <typename T>
kernel void matmul_simdgroup(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                             device float* c [[buffer(2)]], constant MatmulSize& size [[buffer(3)]],
                             uint2 group [[threadgroup_position_in_grid]]) {
  simdgroup_float8x8 sum[2][2];
  for (ushort i = 0; i < 4; ++i) sum[i / 2][i % 2] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < size.k; k += 8) {
    simdgroup_matrix<T, 8, 8> left[2], right[2];
    for (ushort i = 0; i < 2; ++i) {
      simdgroup_load(left[i], a, size.k, ulong2(k, group.y * 16 + i * 8));
      simdgroup_load(right[i], b, size.n, ulong2(group.x * 16 + i * 8, k));
    }
    for (ushort i = 0; i < 4; ++i) {
      simdgroup_multiply_accumulate(sum[i / 2][i % 2], left[i / 2], right[i % 2], sum[i / 2][i % 2]);
    }
  }
  for (ushort i = 0; i < 4; ++i) {
    simdgroup_store(sum[i / 2][i % 2], c, size.n, ulong2(group.x * 16 + i % 2 * 8, group.y * 16 + i / 2 * 8));
  }
}
#define INSTANTIATE_MATMUL(type)                                                        \
  template [[host_name("matmul_simdgroup_" #type)]] kernel void matmul_simdgroup<type>( \
      device const type*, device const type*, device float*, constant MatmulSize&, uint2);
INSTANTIATE_MATMUL(float)
INSTANTIATE_MATMUL(half)

// Position of each thread of a grid that is not a multiple of the threadgroup.
struct Place {
  uint3 in_grid, in_group, group, group_size, grid;
  uint index, lane, simdgroup, simdgroups;
};
kernel void places(device Place* out [[buffer(0)]], uint3 in_grid [[thread_position_in_grid]],
                   uint3 in_group [[thread_position_in_threadgroup]],
                   uint3 group [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
                   uint3 grid [[threads_per_grid]], uint index [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]]) {
  device Place& place = out[(in_grid.z * grid.y + in_grid.y) * grid.x + in_grid.x];
  place.in_grid = in_grid;
  place.in_group = in_group;
  place.group = group;
  place.group_size = group_size;
  place.grid = grid;
  place.index = index;
  place.lane = lane;
  place.simdgroup = simdgroup;
  place.simdgroups = simdgroups;
}
