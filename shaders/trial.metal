// An unknown GPU must compute this correctly before it is used: a product of blocks on simdgroup_matrix, and
// a sum over 32 lanes.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

// One simdgroup.
kernel void trial(device const half* x [[buffer(0)]],  // [8][8]
                  device const half* w [[buffer(1)]],  // [8][8]
                  device float* out [[buffer(2)]],  // [8][8], x w^T; then the sum of all lanes' numbers, [32]
                  ushort lane [[thread_index_in_simdgroup]]) {
  simdgroup_half8x8 a, b;
  simdgroup_load(a, x, 8);
  simdgroup_load(b, w, 8, ulong2(0), true);
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(sum, a, b, sum);
  simdgroup_store(sum, out, 8);
  out[64 + lane] = simd_sum(float(lane));
}
