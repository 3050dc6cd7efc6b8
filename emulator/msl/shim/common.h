// Functions of integers and of any number: minima, absolute values, relations, products of vectors.
#pragma once

namespace metal {

// clang-format off: it indents each macro of a list more than the previous one
#define MSL_MIN_MAX(T)                        \
  MSL_INLINE T max(T a, T b) {                \
    return __builtin_elementwise_max(a, b);   \
  }                                           \
  MSL_INLINE T min(T a, T b) {                \
    return __builtin_elementwise_min(a, b);   \
  }                                           \
  MSL_INLINE T clamp(T x, T low, T high) {    \
    return min(max(x, low), high);            \
  }
// Integer functions in plain C++, so that they are constant expressions.
#define MSL_MIN_MAX_INTEGER(T)                       \
  MSL_INLINE constexpr T max(T a, T b) {             \
    return a < b ? b : a;                            \
  }                                                  \
  MSL_INLINE constexpr T min(T a, T b) {             \
    return b < a ? b : a;                            \
  }                                                  \
  MSL_INLINE constexpr T clamp(T x, T low, T high) { \
    return min(max(x, low), high);                   \
  }
#define MSL_MIN_MAX_VECTOR(unused, V) MSL_MIN_MAX(V)
#define MSL_MIN_MAX_VECTORS(T) MSL_FOR_WIDTHS(MSL_MIN_MAX_VECTOR, , ::T)
MSL_FOR_INTEGERS(MSL_MIN_MAX_INTEGER)
MSL_FOR_FLOATS(MSL_MIN_MAX)
MSL_FOR_NUMBERS(MSL_MIN_MAX_VECTORS)
// clang-format on

MSL_INLINE int abs(int x) {
  return x < 0 ? -x : x;
}
MSL_INLINE float abs(float x) {
  return __builtin_fabsf(x);
}
MSL_INLINE bool isnan(float x) {
  return x != x;
}

#define MSL_DOT(V, T)                                                  \
  MSL_INLINE T dot(V a, V b) {                                         \
    T sum = a[0] * b[0];                                               \
    for (int i = 1; i < msl::Shape<V>::width; ++i) sum += a[i] * b[i]; \
    return sum;                                                        \
  }
MSL_DOT(::float2, float)
MSL_DOT(::float3, float)
MSL_DOT(::float4, float)
MSL_DOT(::half4, half)

}  // namespace metal
