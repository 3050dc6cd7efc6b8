// Trial of an unknown GPU, which is used only if the results are correct: a product of blocks on
// simdgroup_matrix, a sum over 32 lanes, and maxima and sums of the rows of a block computed by BlockRows.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "block_rows.h"

using namespace metal;

// Threadgroup: one simdgroup.
kernel void trial(device const half* x [[buffer(0)]],  // [8][8]
                  device const half* w [[buffer(1)]],  // [8][8]
                  // [8][8], x w^T; [32], the sum of all lane indices; [8][8], x w^T minus the maxima of the
                  // rows, and [8][8] minus their sums
                  device float* out [[buffer(2)]], ushort lane [[thread_index_in_simdgroup]]) {
  simdgroup_half8x8 a, b;
  simdgroup_load(a, x, 8);
  simdgroup_load(b, w, 8, ulong2(0), true);
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(sum, a, b, sum);
  simdgroup_store(sum, out, 8);
  out[64 + lane] = simd_sum(float(lane));

  threadgroup float places[BLOCK_PLACES];
  BlockRows block_rows;
  block_rows.find(places, lane);
  const float2 mine = elements(sum);
  device float* my_out = out + 96 + block_rows.row * 8 + block_rows.column;
  *(device float2*)my_out = mine - block_rows.largest(max(mine[0], mine[1]));
  simdgroup_store(block_of<float>(mine - block_rows.sum(mine[0] + mine[1])), out + 160, 8);
}
