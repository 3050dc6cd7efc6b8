// Features that Metal Shading Language adds to C++, each with a result that a test expects.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

constant float table[4] = {1.0, 2.5, 3.0h, 4e1};  // unsuffixed literals are float
constant constexpr uint kWidth = 4;
enum Slots { kFirst = 2, kSecond };

kernel void vector_values(device float* out [[buffer(0)]]) {
  float4 a = float4(1, 2, 3, 4), b(0.5f), c = float4(a.xy, 7, 8), d = float4(9, a.zw, 10);
  a.xz = b.yw;  // swizzles may be assigned
  c.w += 1.0;
  d.rgb = d.bgr;
  uint i = 0;
  for (ushort k = 0; k < 4; ++k) out[i++] = a[k];
  for (ushort k = 0; k < 4; ++k) out[i++] = c[k];
  for (ushort k = 0; k < 4; ++k) out[i++] = d[k];
  const float3 e = a.xyz * 2;
  out[i++] = e.x + e.y + e.z;
  out[i++] = dot(float3(1, 2, 3), float3(4, 5, 6));
  out[i++] = table[kFirst] + table[kSecond] + table[0] + table[1];
}

// Constructors convert; they do not reinterpret bits.
template <typename To, typename From>
static To converted(From value) {
  return To(value);
}
template <typename T>
static T from_scalars(float a, float b) {
  T value(a, b);
  return value + T(1);
}
typedef vec<float, 2> pair_t;

kernel void vector_conversions(device int* out [[buffer(0)]]) {
  const float4 v(1.75f, -2.75f, 3.5f, -4.5f);
  const int4 a = int4(v), b = converted<int4>(v);
  const int4 bits = as_type<int4>(v);
  const vec<short, 4> s = vec<short, 4>(v);
  const uint4 low = uint4(uchar4(uint4(257u))) + 1u;  // keeps the low bits
  uint i = 0;
  for (ushort k = 0; k < 4; ++k) {
    out[i++] = a[k];
    out[i++] = b[k];
    out[i++] = bits[k];
    out[i++] = s[k];
    out[i++] = low[k];
  }
  const pair_t p = from_scalars<pair_t>(1.5f, 2.5f);
  out[i++] = int(p.x * 2) + int(p.y * 2);
}

// Structs have Metal's layout.
struct Mixed {
  half a;
  uchar b;
  half2 c;
  float3 d;
};
static_assert(sizeof(float3) == 16 && sizeof(Mixed) == 32, "layout of a struct");

kernel void structs(device const Mixed* in [[buffer(0)]], device float3* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  device const Mixed& m = in[i];
  out[i] = float3(float(m.b), float2(m.c)) * float(m.a) + m.d;
}

// Half rounds to nearest even, after each operation.
kernel void rounding(device const float* in [[buffer(0)]], device half* halves [[buffer(1)]],
                     device float* sums [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  halves[i] = half(in[i]);
  const half a = halves[i], b = 0.1h;
  sums[i] = float(a * b + a);
}

// Templates with host_name, macros that instantiate, classes as template arguments.
struct Twice {
  static float of(float x) { return 2 * x; }
};
struct Squared {
  static float of(float x) { return x * x; }
};
template <typename T, typename F, int N>
kernel void apply(device const T* in [[buffer(0)]], device T* out [[buffer(1)]],
                  constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < n) out[i] = T(F::of(float(in[i])) + N);
}
typedef decltype(apply<float, Twice, 0>) apply_t;
template [[host_name("apply_twice")]] [[kernel]] apply_t apply<float, Twice, 0>;
#define APPLY(name, type, f, n)                                                   \
  template [[host_name("apply_" #name "_" #type)]] kernel void apply<type, f, n>( \
      device const type*, device type*, constant uint&, uint);
APPLY(squared, half, Squared, -1)
APPLY(squared, int, Squared, kWidth)

// Functions of numbers and of simdgroups.
kernel void numbers(device float* out [[buffer(0)]]) {
  uint i = 0;
  out[i++] = clamp(5, 1, 3) + clamp(2.0f, 0.0f, 1.0f) + max(float2(1, 9), float2(4, 2)).y;
  out[i++] = abs(-4) + abs(-0.5f) + min(7u, 5u) + max(short(3), short(-3));
  out[i++] = isnan(INFINITY - INFINITY) + isnan(1.0f) * 2;
  out[i++] = fma(2.0f, 3.0f, 4.0f) + fma(half2(2), half2(3), half2(4)).y;
  out[i++] = precise::exp(1.0f) + fast::exp2(float4(3)).w + fast::exp2(-1.0f);
  out[i++] = precise::log(1.0f) + precise::rsqrt(0.25f) + precise::log(float(M_LOG2E_F));
  out[i++] = kWidth + sizeof(Slots) + (is_same<half, half>::value ? 16 : 0);
}

kernel void simd_operations(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                            ushort lane [[thread_index_in_simdgroup]]) {
  const int v = x[lane];
  out += lane;
  out[0 * 32] = simd_sum(v);
  out[1 * 32] = simd_max(v);
  out[2 * 32] = simd_min(v);
  out[3 * 32] = simd_shuffle_xor(v, 5);
  out[4 * 32] = simd_any(v == x[5]) + 2 * simd_any(v > 1000);
  out[5 * 32] = int(simd_sum(float(v)));
  out[6 * 32] = simd_sum(short2(v, 1)).y;
  out[7 * 32] = int(simd_shuffle_xor(float4(v, 1, 2, 3), 16).x);
}

// Returned lanes take no part.
kernel void early_return(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                         constant uint& n [[buffer(2)]], ushort lane [[thread_index_in_simdgroup]]) {
  if (lane >= n) return;
  out[lane] = simd_sum(x[lane]);
  if (lane % 2) return;
  out[32 + lane] = simd_max(x[lane]);
}

// out = 8x8 blocks: a b, a^T b from a transposed load, a sum of products, and products of products.
template <typename T>
kernel void matrix_options(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                           device float* out [[buffer(2)]], device T* copy [[buffer(3)]]) {
  threadgroup T staged[8 * 10];
  simdgroup_matrix<T, 8, 8> x, y, xt;
  const simdgroup_float8x8 zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_float8x8 c, d = zero, e;
  simdgroup_load(x, a, 8);
  simdgroup_load(y, b);
  simdgroup_load(xt, a, 8, ulong2(0), true);
  simdgroup_multiply_accumulate(c, x, y, zero);
  simdgroup_store(c, out, 8);
  simdgroup_multiply_accumulate(c, xt, y, zero);
  simdgroup_store(c, out + 64, 8);
  for (ushort i = 0; i < 40; ++i)
    simdgroup_multiply_accumulate(d, x, y, d);  // more than are queued at a time
  simdgroup_store(d, out + 128, 8);
  // A chain whose intermediate results are used again and overwritten.
  simdgroup_multiply_accumulate(c, x, y, zero);
  e = c;
  simdgroup_multiply_accumulate(c, x, y, c);
  simdgroup_multiply_accumulate(e, x, y, c);
  c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_multiply_accumulate(c, x, y, e);
  c.thread_elements()[0] += 100.0f;
  simdgroup_store(c, out + 192, 8);
  simdgroup_multiply_accumulate(c, x, y, e);
  c.thread_elements()[0] += 100.0f;
  simdgroup_store(c, out + 256, 8);
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
