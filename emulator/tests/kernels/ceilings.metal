// Upper limits of a GPU, for tools/measure/bench_gpu.py: multiply-adds in registers, and an empty kernel.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

constant constexpr ushort kChains = 16;  // independent sums, to fill the pipelines

kernel void nothing(device float* out [[buffer(0)]], uint thread_index [[thread_position_in_grid]]) {
  if (thread_index == 0xffffffff) out[0] = 0.0f;
}

// Performs 2 * kChains * rounds operations per thread.
kernel void multiply_add(device float* out [[buffer(0)]], constant uint& rounds [[buffer(1)]],
                         uint thread_index [[thread_position_in_grid]]) {
  float sums[kChains];
  const float factor = 1.0f + float(thread_index) * 1e-9f;
#pragma unroll
  for (ushort i = 0; i < kChains; ++i) sums[i] = float(i);
  for (uint round = 0; round < rounds; ++round)
#pragma unroll
    for (ushort i = 0; i < kChains; ++i) sums[i] = fma(sums[i], factor, 0.5f);
  float total = 0.0f;
#pragma unroll
  for (ushort i = 0; i < kChains; ++i) total += sums[i];
  out[thread_index] = total;
}

// Performs 2 * 512 * kChains * rounds operations per simdgroup.
kernel void multiply_matrices(device float* out [[buffer(0)]], constant uint& rounds [[buffer(1)]],
                              uint thread_index [[thread_position_in_grid]]) {
  simdgroup_half8x8 a[4], b[4];
  simdgroup_float8x8 sums[kChains];
#pragma unroll
  for (ushort i = 0; i < 4; ++i) {
    a[i] = make_filled_simdgroup_matrix<half, 8, 8>(half(float(thread_index % 7 + i) * 0.01f));
    b[i] = make_filled_simdgroup_matrix<half, 8, 8>(half(float(thread_index % 5 + i) * 0.01f));
  }
#pragma unroll
  for (ushort i = 0; i < kChains; ++i) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint round = 0; round < rounds; ++round)
#pragma unroll
    for (ushort i = 0; i < kChains; ++i) simdgroup_multiply_accumulate(sums[i], a[i / 4], b[i % 4], sums[i]);
#pragma unroll
  for (ushort i = 1; i < kChains; ++i) {
    sums[0].thread_elements()[0] += sums[i].thread_elements()[0];
    sums[0].thread_elements()[1] += sums[i].thread_elements()[1];
  }
  simdgroup_store(sums[0], out + thread_index / 32 * 64, 8);
}
