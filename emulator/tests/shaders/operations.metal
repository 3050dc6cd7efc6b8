// Every simdgroup, quad and atomic operation, and the options of 8x8 matrices.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

// Results of one operation after the other, 32 values each.
kernel void simd_reductions(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                            ushort lane [[thread_index_in_simdgroup]]) {
  const int v = x[lane];
  out += lane;
  out[0 * 32] = simd_sum(v);
  out[1 * 32] = simd_product((v & 3) | 1);
  out[2 * 32] = simd_max(v);
  out[3 * 32] = simd_min(v);
  out[4 * 32] = simd_and(v);
  out[5 * 32] = simd_or(v);
  out[6 * 32] = simd_xor(v);
  out[7 * 32] = simd_prefix_inclusive_sum(v);
  out[8 * 32] = simd_prefix_exclusive_sum(v);
  out[9 * 32] = simd_prefix_inclusive_product(lane % 8 == 0 ? 2 : 1);
  out[10 * 32] = simd_prefix_exclusive_product(lane % 8 == 0 ? 2 : 1);
  out[11 * 32] = simd_any(v == x[5]);
  out[12 * 32] = simd_all(v == x[5]);
  out[13 * 32] = int(static_cast<simd_vote::vote_t>(simd_ballot(v > 0)));
  out[14 * 32] = simd_is_first();
  out[15 * 32] = int(simd_sum(float(v)));
  out[16 * 32] = simd_sum(short2(v, 1)).y;
}

kernel void simd_shuffles(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                          ushort lane [[thread_index_in_simdgroup]]) {
  const int v = x[lane], fill = -1 - lane;
  out += lane;
  out[0 * 32] = simd_shuffle(v, (lane * 7) & 31);
  out[1 * 32] = simd_broadcast(v, 13);
  out[2 * 32] = simd_broadcast_first(v);
  out[3 * 32] = simd_shuffle_xor(v, 5);
  out[4 * 32] = simd_shuffle_up(v, 3);
  out[5 * 32] = simd_shuffle_down(v, 4);
  out[6 * 32] = simd_shuffle_rotate_up(v, 3);
  out[7 * 32] = simd_shuffle_rotate_down(v, 4);
  out[8 * 32] = simd_shuffle_and_fill_up(v, fill, 3);
  out[9 * 32] = simd_shuffle_and_fill_down(v, fill, 4);
  out[10 * 32] = simd_shuffle_and_fill_up(v, fill, 2, 8);
  out[11 * 32] = simd_shuffle_and_fill_down(v, fill, 2, 8);
  out[12 * 32] = int4(simd_shuffle(float4(v, 1, 2, 3), 9)).x;
}

kernel void quad_operations(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                            ushort lane [[thread_index_in_simdgroup]],
                            ushort place [[thread_index_in_quadgroup]],
                            ushort quad [[quadgroup_index_in_threadgroup]]) {
  const int v = x[lane];
  out += lane;
  out[0 * 32] = quad_sum(v);
  out[1 * 32] = quad_max(v);
  out[2 * 32] = quad_min(v);
  out[3 * 32] = quad_xor(v);
  out[4 * 32] = quad_prefix_inclusive_sum(v);
  out[5 * 32] = quad_prefix_exclusive_sum(v);
  out[6 * 32] = quad_shuffle(v, 3 - place);
  out[7 * 32] = quad_broadcast(v, 2);
  out[8 * 32] = quad_shuffle_xor(v, 1);
  out[9 * 32] = quad_any(v > 0) + 2 * quad_all(v > 0);
  out[10 * 32] = quad * 10 + place;
  if (quad % 2) {  // uniform in a quad, not in the simdgroup
    out[11 * 32] = quad_sum(v);
  } else {
    out[11 * 32] = quad_product(place + 1);
  }
}

kernel void atomics(device atomic_int* ints [[buffer(0)]], device atomic_uint* uints [[buffer(1)]],
                    device atomic_float* floats [[buffer(2)]], device atomic_uint* old [[buffer(3)]],
                    uint i [[thread_position_in_grid]]) {
  threadgroup atomic_int local;
  if (i % 64 == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int v = int(i) - 100;
  atomic_fetch_add_explicit(&ints[0], v, memory_order_relaxed);
  atomic_fetch_sub_explicit(&ints[1], v, memory_order_relaxed);
  atomic_fetch_max_explicit(&ints[2], v, memory_order_relaxed);
  atomic_fetch_min_explicit(&ints[3], v, memory_order_relaxed);
  atomic_fetch_and_explicit(&uints[0], ~(1u << (i % 32)), memory_order_relaxed);
  atomic_fetch_or_explicit(&uints[1], 1u << (i % 32), memory_order_relaxed);
  atomic_fetch_xor_explicit(&uints[2], 1u << (i % 31), memory_order_relaxed);
  atomic_fetch_add_explicit(&floats[0], 0.5f, memory_order_relaxed);
  atomic_exchange_explicit(&uints[3], i, memory_order_relaxed);
  uint expected = atomic_load_explicit(&uints[4], memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(&uints[4], &expected, expected + 2, memory_order_relaxed,
                                                memory_order_relaxed)) {
  }
  atomic_store_explicit(&old[i], atomic_fetch_add_explicit(&uints[5], 1u, memory_order_relaxed),
                        memory_order_relaxed);
  atomic_fetch_add_explicit(&local, 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i % 64 == 0)
    atomic_fetch_add_explicit(&ints[4], atomic_load_explicit(&local, memory_order_relaxed),
                              memory_order_relaxed);
}

// out = 8x8 blocks: a b, a^T b from a transposed load, (a b)^T by a transposed store, a b + 3 I with an
// origin, and products of products.
template <typename T>
kernel void matrix_options(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                           device float* out [[buffer(2)]], device T* copy [[buffer(3)]]) {
  threadgroup T staged[8 * 10];
  simdgroup_matrix<T, 8, 8> x, y, xt;
  simdgroup_float8x8 c, d(3.0f), e;
  simdgroup_load(x, a, 8);
  simdgroup_load(y, b);
  simdgroup_load(xt, a, 8, ulong2(0), true);
  simdgroup_multiply(c, x, y);
  simdgroup_store(c, out, 8);
  simdgroup_multiply(c, xt, y);
  simdgroup_store(c, out + 64, 8);
  simdgroup_multiply(c, x, y);
  simdgroup_store(c, out + 128, 8, ulong2(0), true);
  simdgroup_multiply_accumulate(d, x, y, d);
  simdgroup_store(d, out + 192 - 8 - 2, 8, ulong2(2, 1));
  // A chain whose intermediate results are used again and overwritten.
  simdgroup_multiply(c, x, y);
  e = c;
  simdgroup_multiply_accumulate(c, x, y, c);
  simdgroup_multiply_accumulate(e, x, y, c);
  c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_multiply_accumulate(c, x, y, e);
  c.thread_elements()[0] += 100.0f;
  simdgroup_store(c, out + 256, 8);
  simdgroup_multiply_accumulate(c, x, y, e);
  c.thread_elements()[0] += 100.0f;
  simdgroup_store(c, out + 320, 8);
  simdgroup_store(x, staged, 10);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(y, staged, 10);
  simdgroup_store(y, copy, 8);
}
template [[host_name("matrix_options_float")]] kernel void matrix_options<float>(device const float*,
                                                                                 device const float*,
                                                                                 device float*,
                                                                                 device float*);
template [[host_name("matrix_options_half")]] kernel void matrix_options<half>(device const half*,
                                                                               device const half*,
                                                                               device float*, device half*);

// A half result is rounded after each product; a float result is not.
kernel void matrix_rounding(device const half* a [[buffer(0)]], device half* out [[buffer(1)]],
                            device float* wide [[buffer(2)]]) {
  simdgroup_half8x8 x, sum = make_filled_simdgroup_matrix<half, 8, 8>(0.0h);
  simdgroup_float8x8 exact = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(x, a, 8);
  for (ushort i = 0; i < 40; ++i) {  // more products than the emulator computes at a time
    simdgroup_multiply_accumulate(sum, x, x, sum);
    simdgroup_multiply_accumulate(exact, x, x, exact);
  }
  simdgroup_store(sum, out, 8);
  simdgroup_store(exact, wide, 8);
}

// Lanes that have returned take no part.
kernel void early_return(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                         constant uint& n [[buffer(2)]], ushort lane [[thread_index_in_simdgroup]]) {
  if (lane >= n) return;
  out[lane] = simd_sum(x[lane]);
  if (lane % 2) return;
  out[32 + lane] = simd_prefix_inclusive_sum(x[lane]);
  out[64 + lane] = simd_broadcast_first(x[lane]);
}
