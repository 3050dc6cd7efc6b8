// The elements of an 8x8 block that a lane holds.
//
// Metal's specification leaves this to the GPU, so kernels that compute with the elements of a block
// determine it at run time. They rely on two facts that hold for all known GPU families; the self-test
// rejects other GPUs. A lane has two adjacent elements of a row, at the same places of every block. The
// indices of the four lanes that share a row differ in the same two bits, or sets of bits.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "attention.h"

using namespace metal;

static inline float2 elements(simdgroup_float8x8 block) {
  return float2(block.thread_elements()[0], block.thread_elements()[1]);
}

template <typename T>
static inline simdgroup_matrix<T, 8, 8> block_of(vec<T, 2> values) {
  simdgroup_matrix<T, 8, 8> block;
  block.thread_elements()[0] = values[0];
  block.thread_elements()[1] = values[1];
  return block;
}

struct BlockRows {
  ushort row, column;  // of this lane's first element; the second is at the next column
  ushort near, far;    // the bits in which the lanes of a row differ

  // Loads a block that contains the numbers of its places. Requires all lanes of a simdgroup, and
  // BLOCK_PLACES floats at `places` that no other simdgroup uses.
  void find(threadgroup float* places, ushort lane) {
    places[lane] = lane;
    places[32 + lane] = 32 + lane;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 block;
    simdgroup_load(block, places, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the memory may be overwritten
    const ushort place = ushort(elements(block)[0]);
    row = place / 8;
    column = place % 8;
    const ushort first = simd_sum(place == 0 ? lane : ushort(0));
    near = first ^ simd_sum(place == 2 ? lane : ushort(0));
    far = first ^ simd_sum(place == 4 ? lane : ushort(0));
  }

  // Reductions over the values of the four lanes that share a row.
  float largest(float value) const {
    value = max(value, simd_shuffle_xor(value, near));
    return max(value, simd_shuffle_xor(value, far));
  }
  float sum(float value) const {
    value += simd_shuffle_xor(value, near);
    return value + simd_shuffle_xor(value, far);
  }
};
