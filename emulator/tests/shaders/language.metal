// Features that Metal Shading Language adds to C++, each with a result that a test knows.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "language.h"

using namespace metal;

constant float table[4] = {1.0, 2.5, 3.0h, 4e1};  // unsuffixed literals are float
constant constexpr uint kWidth = 4;
enum Slots { kFirst = 2, kSecond };

// Vectors.

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
  out[i++] = length(float2(3, 4));
  const float3 f = cross(float3(1, 0, 0), float3(0, 1, 0));
  out[i++] = f.z;
  out[i++] = table[kFirst] + table[kSecond] + table[0] + table[1];
}

// Casts and constructors convert; they do not reinterpret bits.
template <typename To, typename From>
static To converted(From value) {
  return (To)value;
}
template <typename T>
static T from_scalars(float a, float b) {
  T value(a, b);
  return value + T(1);
}
typedef vec<float, 2> pair_t;

kernel void vector_conversions(device int* out [[buffer(0)]]) {
  const float4 v(1.75f, -2.75f, 3.5f, -4.5f);
  const int4 a = (int4)v, b = int4(v), c = static_cast<int4>(v), d = converted<int4>(v), e = -(int4)v;
  const int4 bits = as_type<int4>(v);
  const vec<short, 4> s = vec<short, 4>(v);
  const uint4 low = (uint4)(ushort4)(uchar4)(uint4)257u + 1u;  // each step keeps the low bits
  uint i = 0;
  for (ushort k = 0; k < 4; ++k) {
    out[i++] = a[k];
    out[i++] = b[k];
    out[i++] = c[k];
    out[i++] = d[k];
    out[i++] = e[k];
    out[i++] = bits[k];
    out[i++] = s[k];
    out[i++] = low[k];
  }
  const pair_t p = from_scalars<pair_t>(1.5f, 2.5f);
  out[i++] = int(p.x * 2) + int(p.y * 2);
  out[i++] = any(v < 0) + 2 * all(v < 4) + 4 * all(v < 3);
  const int4 chosen = select(int4(1), int4(2), v < 0);
  out[i++] = chosen.x * 1000 + chosen.y * 100 + chosen.z * 10 + chosen.w;
}

// Memory: packed vectors take no padding, structs have Metal's layout.
struct Mixed {
  packed_float3 a;
  half b;
  uchar c;
  packed_half2 d;
  float3 e;
};
static_assert(sizeof(packed_float3) == 12 && sizeof(float3) == 16 && alignof(packed_half4) == 2, "layouts");
static_assert(sizeof(Mixed) == 48, "layout of a struct");

kernel void packed_vectors(device const Mixed* in [[buffer(0)]], device packed_float3* out [[buffer(1)]],
                           uint i [[thread_position_in_grid]]) {
  device const Mixed& m = in[i];
  const float3 a = m.a;
  out[i] = a * float(m.b) + float3(float(m.c), float2(m.d)) + m.e;
  out[i][1] += m.a.y;
}

// Rounding: half and bfloat round to the nearest even, each operation on its own.
kernel void rounding(device const float* in [[buffer(0)]], device half* halves [[buffer(1)]],
                     device bfloat* bfloats [[buffer(2)]], device float* sums [[buffer(3)]],
                     uint i [[thread_position_in_grid]]) {
  halves[i] = half(in[i]);
  bfloats[i] = bfloat(in[i]);
  const half a = halves[i], b = 0.1h;
  sums[2 * i] = float(a * b + a);
  const bfloat c = bfloats[i];
  sums[2 * i + 1] = float(c) * 0.5f;
}

// Matrices are columns.
kernel void matrices(device float* out [[buffer(0)]]) {
  const float2x3 m(float3(1, 2, 3), float3(4, 5, 6));
  const float3 v = m * float2(10, 1);
  const float2 w = float3(1, 1, 1) * m;
  const float3x2 t = transpose(m);
  const float2x2 p = t * m;
  half4x4 identity(1.0h);
  identity[1][2] = 5.0h;
  const float4x4 wide = float4x4(identity);
  uint i = 0;
  for (ushort k = 0; k < 3; ++k) out[i++] = v[k];
  for (ushort k = 0; k < 2; ++k) out[i++] = w[k];
  for (ushort k = 0; k < 2; ++k) out[i++] = p[k][1];
  out[i++] = wide[1][2] + wide[3][3] * 10 + wide[2][1];
  out[i++] = t[2][1];
}

// Overloads, members and specializations that differ by address space.
static float where(device const float* p) {
  return *p + 1;
}
static float where(threadgroup const float* p) {
  return *p + 1;
}
static float where(thread const float* p) {
  return *p + 1;
}
static float where(constant float* p) {
  return *p + 1;
}
struct Counter {
  int value;
  int next() device { return ++value; }
  int next() threadgroup { return ++value; }
  int next() thread { return ++value; }
  int get() const constant { return value; }
};
template <typename P>
struct is_device : false_type {};
template <typename T>
struct is_device<device T*> : true_type {};

kernel void spaces(device float* out [[buffer(0)]], constant float& in [[buffer(1)]],
                   device Counter& counter [[buffer(2)]]) {
  threadgroup float shared[1];
  threadgroup Counter local;
  shared[0] = 2;
  local.value = 10;
  float mine = 3;
  out[0] = where(out + 4) + where(shared) * 10 + where(&mine) * 100 + where(&in) * 1000;
  Counter own = {20};
  out[1] = counter.next() + local.next() + own.next();
  out[2] = conditional_t<is_same_v<int, int>, float, int>(1.5f);
}

// Templates with host_name, macros that instantiate, functions as template arguments, implicit indices.
static float twice(float x) {
  return 2 * x;
}
static float squared(float x) {
  return x * x;
}
template <typename T, float (*F)(float), int N>
kernel void apply(device const T* in, device T* out, constant uint& n, uint i [[thread_position_in_grid]]) {
  if (i < n) out[i] = T(F(float(in[i])) + N);
}
typedef decltype(apply<float, twice, 0>) apply_t;
template [[host_name("apply_twice")]] [[kernel]] apply_t apply<float, twice, 0>;
#define APPLY(name, type, f, n)                                                   \
  template [[host_name("apply_" #name "_" #type)]] kernel void apply<type, f, n>( \
      device const type*, device type*, constant uint&, uint);
APPLY(squared, half, squared, -1)
APPLY(squared, int, squared, kWidth)

// Function constants, what is computed from them, and an argument that exists under one.
constant bool has_bias [[function_constant(0)]];
constant int scale [[function_constant(kFirst + 1)]];
constant float shift [[function_constant(9)]];
constant float shift_or_one = is_function_constant_defined(shift) ? shift : 1.0;
constant int scale_twice = scale * 2;
kernel void specialized(device float* out [[buffer(0)]],
                        device const float* bias [[buffer(kFirst), function_constant(has_bias)]],
                        uint i [[thread_position_in_grid]]) {
  float value = float(i) * scale_twice + shift_or_one;
  if (has_bias) value += bias[i];
  out[i] = value;
}
kernel void unspecialized(device float* out [[buffer(0)]]) {
  out[0] = kLanguageHeader;
}

// Code as kernel libraries have it: constants of a named type with an octal index, loops unrolled by a macro,
// comparisons among template parameters, members that differ by address space and are defaulted,
// instantiations whose template arguments follow from the parameters, and threadgroup variables with an
// initializer that says nothing.
constant int32_t width [[function_constant(010)]];
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
template <int N>
static int unrolled_sum(int first) {
  int sum = 0;
#pragma unroll(SMALLER(N, 4))
  for (int i = 0; i < N; ++i) sum += first + i;
  return sum;
}
template <typename T, enable_if_t<sizeof(T) < 4 && is_same_v<T, half>, bool> = true>
static int narrow(T) {
  return 1;
}
template <typename T, enable_if_t<!(sizeof(T) < 4 && is_same_v<T, half>), bool> = true>
static int narrow(T) {
  return 0;
}
struct Pair {
  float a, b;
  Pair() thread = default;
  Pair() threadgroup = default;
  Pair() device = default;
};
struct Scaled {
  float value;
  constexpr Scaled(float x) thread : value(2 * x) {}
  constexpr Scaled(float x) constant : value(2 * x) {}
  constexpr Scaled(float x) threadgroup : value(2 * x) {}
};
static float first_and_last(uint4 v) {
  return v.x * 10 + v.w;
}
static float difference(Pair pair) {
  return pair.a - pair.b;
}
typedef bfloat rounded_t;
template <typename T, int N>
struct Row {
  T values[N];
};
template <typename T, int N>
kernel void deduced(device Row<T, N>* rows [[buffer(0)]], constant T& factor [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  for (int k = 0; k < N; ++k) rows[i].values[k] *= factor;
}
template [[host_name("deduced_float_3")]] kernel void deduced(device Row<float, 3>* rows [[buffer(0)]],
                                                              constant float& factor [[buffer(1)]],
                                                              uint i [[thread_position_in_grid]]);
template [[host_name("deduced_int_2")]] kernel void deduced(device Row<int, 2>* rows [[buffer(0)]],
                                                            constant int& factor [[buffer(1)]],
                                                            uint i [[thread_position_in_grid]]);
kernel void idioms(device float* out [[buffer(0)]]) {
  threadgroup float ignored[4] = {0};
  threadgroup Pair pair;
  pair.a = 3;
  out[0] = unrolled_sum<6>(10);
  out[1] = narrow(1.0h) * 10 + narrow(1.0f) + narrow(short(1));
  out[2] = width + pair.a;
  out[3] = ignored[2];
  const uint low = 4;
  out[4] = first_and_last({low, low + 1, 6, 7}) + difference({9, 2}) * 100;
  out[5] = float(static_cast<rounded_t>(half(1.005859375))) + float(static_cast<half>(rounded_t(2)));
  out[6] = Scaled(21).value + half4(bfloat4(bfloat(out[2]))).x + float2(bfloat2(half2(0.5h))).y;
  out[7] = fast::max(2.0f, 3.0f) + precise::min(5, 4) * 10 + fast::clamp(7.0f, 0.0f, 1.0f) * 100;
}
// Products by operator; a bfloat is compared as a float.
kernel void idioms_of_simdgroups(device float* x [[buffer(0)]], device float* most [[buffer(1)]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m;
  simdgroup_load(m, x);
  simdgroup_store(m * m * m, x + 64);
  most[lane] = simd_max(bfloat(lane)) - simd_min(bfloat(lane + 2.0f));
}

// Numbers.
kernel void numbers(device float* out [[buffer(0)]]) {
  uint i = 0;
  out[i++] = numeric_limits<half>::max();
  out[i++] = numeric_limits<float>::epsilon();
  out[i++] = numeric_limits<int>::lowest();
  out[i++] = clamp(5, 1, 3) + clamp(float2(-1, 9), 0.0f, 1.0f).y;
  out[i++] = popcount(0xf0fu) + clz(1u) + ctz(8) + int(reverse_bits(1u) >> 31);
  out[i++] = float(mulhi(0x80000000u, 6u)) + absdiff(3, -4) + rotate(0x80000001u, 1u);
  out[i++] = extract_bits(0xabcdu, 4, 8);
  out[i++] = insert_bits(0u, 5u, 4, 3);
  out[i++] = addsat(uchar(250), uchar(10)) + subsat(uchar(3), uchar(10));
  out[i++] = fract(2.75f) + sign(-3.0f) + step(1.0f, 2.0f) + mix(1.0f, 3.0f, 0.5f);
  out[i++] = smoothstep(0.0f, 2.0f, 1.0f) + saturate(7.0f) + fma(2.0f, 3.0f, 4.0f) + max3(1, 9, 4);
  out[i++] = precise::exp(1.0f) + fast::log(1.0f) + metal::precise::sqrt(4.0f) + rsqrt(0.25f);
  float whole, cosine;
  out[i++] = modf(3.25f, whole) + whole * 10 + sincos(0.0f, cosine) + cosine * 100;
  int exponent;
  out[i++] = frexp(12.0f, exponent) + exponent + ldexp(1.0f, 5);
  out[i++] = isnan(NAN) + isinf(-INFINITY) * 2 + isfinite(1.0f) * 4 + signbit(-0.0f) * 8;
  out[i++] = fmin(NAN, 2.0f) + max(short(3), short(-3)) + abs(-4) + min(7u, 5u);
  out[i++] =
      atan2(1.0f, 1.0f) * 4 / M_PI_F + pow(2.0f, 10.0f) + exp2(3.0f) + log2(8.0f) + round(2.5f) + rint(2.5f);
  out[i++] = kWidth + sizeof(Slots) + (hadd(7u, 4u) == 5u) + bool(median3(3, 1, 2) == 2);
}
