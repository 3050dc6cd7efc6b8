// Functions of integers and of any number: minima, absolute values, bits, relations, products of vectors.
#pragma once

namespace metal {

#define MSL_MIN_MAX(T)                        \
  MSL_INLINE T max(T a, T b) {                \
    return __builtin_elementwise_max(a, b);   \
  }                                           \
  MSL_INLINE T min(T a, T b) {                \
    return __builtin_elementwise_min(a, b);   \
  }                                           \
  MSL_INLINE T max3(T a, T b, T c) {          \
    return max(a, max(b, c));                 \
  }                                           \
  MSL_INLINE T min3(T a, T b, T c) {          \
    return min(a, min(b, c));                 \
  }                                           \
  MSL_INLINE T median3(T a, T b, T c) {       \
    return max(min(a, b), min(max(a, b), c)); \
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
  MSL_INLINE constexpr T max3(T a, T b, T c) {       \
    return max(a, max(b, c));                        \
  }                                                  \
  MSL_INLINE constexpr T min3(T a, T b, T c) {       \
    return min(a, min(b, c));                        \
  }                                                  \
  MSL_INLINE constexpr T median3(T a, T b, T c) {    \
    return max(min(a, b), min(max(a, b), c));        \
  }                                                  \
  MSL_INLINE constexpr T clamp(T x, T low, T high) { \
    return min(max(x, low), high);                   \
  }
#define MSL_MIN_MAX_VECTORS(T) MSL_FOR_WIDTHS(MSL_MIN_MAX, ::T)
#define MSL_CLAMP_SCALAR(V)                                                                            \
  MSL_INLINE V clamp(V x, typename msl::Shape<V>::element low, typename msl::Shape<V>::element high) { \
    return min(max(x, V(low)), V(high));                                                               \
  }
#define MSL_CLAMP_SCALARS(T) MSL_FOR_WIDTHS(MSL_CLAMP_SCALAR, ::T)
MSL_FOR_INTEGERS(MSL_MIN_MAX_INTEGER)
MSL_FOR_FLOATS(MSL_MIN_MAX)
MSL_FOR_NUMBERS(MSL_MIN_MAX_VECTORS)
MSL_FOR_NUMBERS(MSL_CLAMP_SCALARS)

#define MSL_ABS(T)                         \
  MSL_INLINE T abs(T x) {                  \
    return static_cast<T>(x < 0 ? -x : x); \
  }
#define MSL_ABS_VECTOR(V)                \
  MSL_INLINE V abs(V x) {                \
    return __builtin_elementwise_abs(x); \
  }
#define MSL_ABS_VECTORS(T) MSL_FOR_WIDTHS(MSL_ABS_VECTOR, ::T)
MSL_ABS(char)
MSL_ABS(short)
MSL_ABS(int)
MSL_ABS(long)
MSL_ABS_VECTORS(char) MSL_ABS_VECTORS(short) MSL_ABS_VECTORS(int) MSL_ABS_VECTORS(long) MSL_ABS_VECTORS(float)
    MSL_ABS_VECTORS(half) MSL_INLINE float abs(float x) {
  return __builtin_fabsf(x);
}
MSL_INLINE half abs(half x) {
  return static_cast<half>(__builtin_fabsf(static_cast<float>(x)));
}
#define MSL_ABS_UNSIGNED(T) \
  MSL_INLINE T abs(T x) {   \
    return x;               \
  }
MSL_ABS_UNSIGNED(uchar)
MSL_ABS_UNSIGNED(ushort)
MSL_ABS_UNSIGNED(uint)
MSL_ABS_UNSIGNED(ulong)
// Bits.
#define MSL_BITS(T, U, width)                                                                              \
  MSL_INLINE T popcount(T x) {                                                                             \
    return static_cast<T>(__builtin_popcountg(static_cast<U>(x)));                                         \
  }                                                                                                        \
  MSL_INLINE T clz(T x) {                                                                                  \
    return static_cast<T>(x ? __builtin_clzg(static_cast<U>(x)) : width);                                  \
  }                                                                                                        \
  MSL_INLINE T ctz(T x) {                                                                                  \
    return static_cast<T>(x ? __builtin_ctzg(static_cast<U>(x)) : width);                                  \
  }                                                                                                        \
  MSL_INLINE T rotate(T x, T by) {                                                                         \
    const int left = static_cast<int>(by) & (width - 1);                                                   \
    const U bits = static_cast<U>(x);                                                                      \
    return static_cast<T>(static_cast<U>(bits << left) |                                                   \
                          static_cast<U>(bits >> ((width - left) & (width - 1))));                         \
  }                                                                                                        \
  MSL_INLINE T reverse_bits(T x) {                                                                         \
    U bits = static_cast<U>(x), result = 0;                                                                \
    for (int i = 0; i < width; ++i, bits = static_cast<U>(bits >> 1)) {                                    \
      result = static_cast<U>((result << 1) | (bits & 1));                                                 \
    }                                                                                                      \
    return static_cast<T>(result);                                                                         \
  }                                                                                                        \
  MSL_INLINE T extract_bits(T x, uint offset, uint bits) {                                                 \
    if (bits == 0) return 0;                                                                               \
    return static_cast<T>(static_cast<T>(static_cast<U>(x) << (width - offset - bits)) >> (width - bits)); \
  }                                                                                                        \
  MSL_INLINE T insert_bits(T base, T insert, uint offset, uint bits) {                                     \
    const U mask = static_cast<U>((bits >= width ? ~U(0) : static_cast<U>((U(1) << bits) - 1)) << offset); \
    return static_cast<T>((static_cast<U>(base) & ~mask) |                                                 \
                          (static_cast<U>(static_cast<U>(insert) << offset) & mask));                      \
  }                                                                                                        \
  MSL_INLINE T hadd(T a, T b) {                                                                            \
    return static_cast<T>((a & b) + ((a ^ b) >> 1));                                                       \
  }                                                                                                        \
  MSL_INLINE T rhadd(T a, T b) {                                                                           \
    return static_cast<T>((a | b) - ((a ^ b) >> 1));                                                       \
  }                                                                                                        \
  MSL_INLINE T addsat(T a, T b) {                                                                          \
    T sum = 0;                                                                                             \
    if (!__builtin_add_overflow(a, b, &sum)) return sum;                                                   \
    return b > 0 ? numeric_limits<T>::max() : numeric_limits<T>::min();                                    \
  }                                                                                                        \
  MSL_INLINE T subsat(T a, T b) {                                                                          \
    T difference = 0;                                                                                      \
    if (!__builtin_sub_overflow(a, b, &difference)) return difference;                                     \
    return b > 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();                                    \
  }
MSL_BITS(char, uchar, 8)
MSL_BITS(uchar, uchar, 8) MSL_BITS(short, ushort, 16) MSL_BITS(ushort, ushort, 16) MSL_BITS(int, uint, 32)
    MSL_BITS(uint, uint, 32) MSL_BITS(long, ulong, 64) MSL_BITS(ulong, ulong, 64)
#define MSL_BITS_VECTORS(T)                                                                   \
  MSL_EACH1(popcount, ::T##2)                                                                 \
  MSL_EACH1(popcount, ::T##3)                                                                 \
  MSL_EACH1(popcount, ::T##4)                                                                 \
  MSL_EACH1(clz, ::T##2)                                                                      \
  MSL_EACH1(clz, ::T##3) MSL_EACH1(clz, ::T##4) MSL_EACH1(ctz, ::T##2) MSL_EACH1(ctz, ::T##3) \
      MSL_EACH1(ctz, ::T##4)
        MSL_FOR_INTEGERS(MSL_BITS_VECTORS)

#define MSL_WIDE(T, W, width)                                                \
  MSL_INLINE T mulhi(T a, T b) {                                             \
    return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> width); \
  }                                                                          \
  MSL_INLINE T madhi(T a, T b, T c) {                                        \
    return static_cast<T>(mulhi(a, b) + c);                                  \
  }                                                                          \
  MSL_INLINE T mad24(T a, T b, T c) {                                        \
    return static_cast<T>(a * b + c);                                        \
  }                                                                          \
  MSL_INLINE T mul24(T a, T b) {                                             \
    return static_cast<T>(a * b);                                            \
  }
            MSL_WIDE(int, long, 32) MSL_WIDE(uint, ulong, 32)
#define MSL_ABSDIFF(T, U)                                                                         \
  MSL_INLINE U absdiff(T a, T b) {                                                                \
    return a < b ? static_cast<U>(b) - static_cast<U>(a) : static_cast<U>(a) - static_cast<U>(b); \
  }
                MSL_ABSDIFF(int, uint) MSL_ABSDIFF(uint, uint) MSL_ABSDIFF(long, ulong)
                    MSL_ABSDIFF(ulong, ulong)

// Relations.
#define MSL_CLASSIFY(name, expression)         \
  MSL_INLINE bool name(float x) {              \
    return expression;                         \
  }                                            \
  MSL_INLINE bool name(half value) {           \
    float x = value;                           \
    return expression;                         \
  }                                            \
  MSL_CLASSIFY_VECTOR(name, ::float2, ::bool2) \
  MSL_CLASSIFY_VECTOR(name, ::float3, ::bool3) MSL_CLASSIFY_VECTOR(name, ::float4, ::bool4)
#define MSL_CLASSIFY_VECTOR(name, V, B)                                             \
  MSL_INLINE B name(V x) {                                                          \
    B result = B();                                                                 \
    for (int i = 0; i < msl::Shape<V>::width; ++i) result[i] = name(x[i]) ? -1 : 0; \
    return result;                                                                  \
  }
                        MSL_CLASSIFY(isnan, x != x)
                            MSL_CLASSIFY(isinf, __builtin_fabsf(x) == __builtin_inff())
                                MSL_CLASSIFY(isfinite, __builtin_fabsf(x) < __builtin_inff())
                                    MSL_CLASSIFY(isnormal, __builtin_fabsf(x) < __builtin_inff() &&
                                                               __builtin_fabsf(x) >= FLT_MIN)
                                        MSL_CLASSIFY(signbit, __builtin_copysignf(1.0f, x) < 0.0f) MSL_INLINE
    bool isordered(float x, float y) {
  return x == x && y == y;
}
MSL_INLINE bool isunordered(float x, float y) {
  return x != x || y != y;
}
#if __METAL_VERSION__ >= 310
MSL_INLINE bool isnan(bfloat x) {
  return isnan(static_cast<float>(x));
}
MSL_INLINE bool isinf(bfloat x) {
  return isinf(static_cast<float>(x));
}
MSL_INLINE bool isfinite(bfloat x) {
  return isfinite(static_cast<float>(x));
}
#endif

template <class T>
MSL_INLINE T select(T a, T b, bool condition) {
  return condition ? b : a;
}
template <class T, class M>
MSL_INLINE
    typename msl::Enable<(msl::Shape<T>::width > 1 && msl::Shape<M>::width == msl::Shape<T>::width), T>::type
    select(T a, T b, M condition) {
  T result = a;
  for (int i = 0; i < msl::Shape<T>::width; ++i) {
    if (condition[i]) result[i] = b[i];
  }
  return result;
}
template <class M>
MSL_INLINE bool any(M condition) {
  if constexpr (msl::Shape<M>::width == 1) {
    return condition;
  } else {
    bool result = false;
    for (int i = 0; i < msl::Shape<M>::width; ++i) result = result || condition[i];
    return result;
  }
}
template <class M>
MSL_INLINE bool all(M condition) {
  if constexpr (msl::Shape<M>::width == 1) {
    return condition;
  } else {
    bool result = true;
    for (int i = 0; i < msl::Shape<M>::width; ++i) result = result && condition[i];
    return result;
  }
}

// Geometry.
#define MSL_GEOMETRY(V, T)                                             \
  MSL_INLINE T dot(V a, V b) {                                         \
    T sum = a[0] * b[0];                                               \
    for (int i = 1; i < msl::Shape<V>::width; ++i) sum += a[i] * b[i]; \
    return sum;                                                        \
  }                                                                    \
  MSL_INLINE T length_squared(V a) {                                   \
    return dot(a, a);                                                  \
  }                                                                    \
  MSL_INLINE T length(V a) {                                           \
    return sqrt(dot(a, a));                                            \
  }                                                                    \
  MSL_INLINE T distance(V a, V b) {                                    \
    return length(a - b);                                              \
  }                                                                    \
  MSL_INLINE T distance_squared(V a, V b) {                            \
    return length_squared(a - b);                                      \
  }                                                                    \
  MSL_INLINE V normalize(V a) {                                        \
    return a * rsqrt(dot(a, a));                                       \
  }
MSL_GEOMETRY(::float2, float)
MSL_GEOMETRY(::float3, float)
MSL_GEOMETRY(::float4, float)
MSL_GEOMETRY(::half2, half)
MSL_GEOMETRY(::half3, half) MSL_GEOMETRY(::half4, half) MSL_INLINE ::float3 cross(::float3 a, ::float3 b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}
MSL_INLINE ::half3 cross(::half3 a, ::half3 b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}

// These functions have a single precision.
#define MSL_ONE_PRECISION \
  using metal::clamp;     \
  using metal::max;       \
  using metal::min;
namespace precise {
MSL_ONE_PRECISION
}
namespace fast {
MSL_ONE_PRECISION
}

}  // namespace metal
