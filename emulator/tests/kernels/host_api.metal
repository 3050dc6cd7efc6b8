// Small kernels for tests of the API around them.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

kernel void add(device const float* a [[buffer(0)]],  //
                device const float* b [[buffer(1)]],  //
                device float* sum [[buffer(2)]],      //
                uint i [[thread_position_in_grid]]) {
  sum[i] = a[i] + b[i];
}

struct ScaleArgs {
  uint count;
  float factor;
};

kernel void scale(device const float* x [[buffer(0)]],     //
                  device float* y [[buffer(1)]],           //
                  constant ScaleArgs& args [[buffer(2)]],  //
                  uint i [[thread_position_in_grid]]) {
  if (i < args.count) y[i] = x[i] * args.factor;
}

kernel void exponentials(device const float* x [[buffer(0)]],  //
                         device float4* y [[buffer(1)]],       //
                         uint i [[thread_position_in_grid]]) {
  y[i] = float4(precise::exp(x[i]), fast::exp(x[i]), fast::exp2(x[i]), fast::exp(half(x[i])));
}

kernel void negate4(device const float4* x [[buffer(0)]],  //
                    device float4* y [[buffer(1)]],        //
                    uint i [[thread_position_in_grid]]) {
  y[i] = -x[i];
}

kernel void reverse(device const uint* x [[buffer(0)]],            //
                    device uint* y [[buffer(1)]],                  //
                    threadgroup uint* scratch [[threadgroup(0)]],  //
                    uint i [[thread_index_in_threadgroup]],        //
                    uint n [[threads_per_threadgroup]]) {
  scratch[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = scratch[n - 1 - i];
}

kernel void static_scratch(device uint* y [[buffer(0)]],               //
                           threadgroup uint* more [[threadgroup(0)]],  //
                           uint i [[thread_index_in_threadgroup]],     //
                           uint out [[thread_position_in_grid]]) {
  threadgroup uint tile[1024];
  tile[i] = i;
  more[i] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[out] = tile[i] + more[i];
}

// Accesses elements [first, first + count).
kernel void store(device uint* y [[buffer(0)]],        //
                  constant uint& first [[buffer(1)]],  //
                  constant uint& value [[buffer(2)]],  //
                  uint i [[thread_position_in_grid]]) {
  y[first + i] = value;
}

kernel void store_twice(device uint* y [[buffer(0)]],  //
                        device uint* z [[buffer(1)]],  //
                        uint i [[thread_position_in_grid]]) {
  y[i] = 1;
  z[i] = 2;
}

kernel void load(device const uint* x [[buffer(0)]],  //
                 device uint* y [[buffer(1)]],        //
                 constant uint& first [[buffer(2)]],  //
                 uint i [[thread_position_in_grid]]) {
  y[i] = x[first + i];
}

[[max_total_threads_per_threadgroup(64)]] kernel void limited(device uint* y [[buffer(0)]],
                                                              uint i [[thread_position_in_grid]]) {
  y[i] = i;
}

// A host may omit these kernels, and restore single ones.
#if !defined(ONLY_PARTS) || defined(WITH_ONE)
kernel void part_one(device uint* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = 1;
}
#endif
#if !defined(ONLY_PARTS) || defined(WITH_TWO)
kernel void part_two(device uint* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = 2;
}
#endif

// The elements of x that each lane has, x with these elements negated, and x times its transpose plus x.
kernel void matrix_places(device const float* x [[buffer(0)]],  // [8][8]
                          device float* mine [[buffer(1)]],     // [32][2]
                          device float* out [[buffer(2)]],      // [2][8][8]
                          ushort lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 rows, columns, negated, product;
  simdgroup_load(rows, x, 8);
  simdgroup_load(columns, x, 8, ulong2(0), true);
  simdgroup_load(product, x, 8);
  for (ushort i = 0; i < 2; ++i) {
    mine[lane * 2 + i] = rows.thread_elements()[i];
    negated.thread_elements()[i] = -rows.thread_elements()[i];
  }
  simdgroup_store(negated, out, 8);
  simdgroup_multiply_accumulate(product, rows, columns, product);
  simdgroup_store(product, out + 64, 8);
}
