// Packed vectors have the alignment of their element. Three elements occupy the size of three, so packed_T3 is a
// structure that converts to and from T3.
#pragma once

#define MSL_PACKED_EVEN(T)                                                         \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MSL_FOR_NUMBERS(MSL_PACKED_EVEN)
MSL_FOR_BFLOAT(MSL_PACKED_EVEN)

#if MSL_CHECK
#define MSL_PACKED_ACCESS(T, SPACE) \
  operator T##3() const SPACE;      \
  SPACE T& operator[](int i) SPACE; \
  const SPACE T& operator[](int i) const SPACE;
#define MSL_PACKED_ASSIGN(T, SPACE) \
  void operator=(T##3 v) SPACE;     \
  void operator=(packed_##T##3 v) SPACE;
#define MSL_PACKED_THREE(T)                                 \
  struct packed_##T##3 {                                    \
    T x, y, z;                                              \
    packed_##T##3();                                        \
    packed_##T##3(T##3 v);                                  \
    packed_##T##3(T x, T y, T z);                           \
    packed_##T##3(const __global packed_##T##3 & other);    \
    packed_##T##3(const __local packed_##T##3 & other);     \
    packed_##T##3(const __constant packed_##T##3 & other);  \
    packed_##T##3(const __private packed_##T##3 & other);   \
    MSL_PACKED_ACCESS(T, __global)                          \
    MSL_PACKED_ACCESS(T, __local)                           \
    MSL_PACKED_ACCESS(T, __private)                         \
    operator T##3() const __constant;                       \
    const __constant T& operator[](int i) const __constant; \
    MSL_PACKED_ASSIGN(T, __global)                          \
    MSL_PACKED_ASSIGN(T, __local)                           \
    MSL_PACKED_ASSIGN(T, __private)                         \
  };
#else
#define MSL_PACKED_THREE(T)                                                                \
  struct packed_##T##3 {                                                                   \
    T x, y, z;                                                                             \
    packed_##T##3() = default;                                                             \
    constexpr packed_##T##3(T##3 v) : x(v[0]), y(v[1]), z(v[2]) {}                         \
    constexpr packed_##T##3(T first, T second, T third) : x(first), y(second), z(third) {} \
    constexpr operator T##3() const {                                                      \
      return T##3 {x, y, z};                                                               \
    }                                                                                      \
    constexpr T& operator[](int i) {                                                       \
      return i == 0 ? x : i == 1 ? y : z;                                                  \
    }                                                                                      \
    constexpr const T& operator[](int i) const {                                           \
      return i == 0 ? x : i == 1 ? y : z;                                                  \
    }                                                                                      \
  };
#endif
MSL_FOR_NUMBERS(MSL_PACKED_THREE)
MSL_FOR_BFLOAT(MSL_PACKED_THREE)

namespace metal {
#define MSL_USE_PACKED(T) \
  using ::packed_##T##2;  \
  using ::packed_##T##3;  \
  using ::packed_##T##4;
MSL_FOR_NUMBERS(MSL_USE_PACKED)
MSL_FOR_BFLOAT(MSL_USE_PACKED)

MSL_INLINE ::float4 unpack_unorm4x8_to_float(uint x) {
  return ::float4{float(x & 255), float(x >> 8 & 255), float(x >> 16 & 255), float(x >> 24)} / 255.0f;
}
MSL_INLINE uint pack_float_to_unorm4x8(::float4 v) {
  uint result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint>(rint(saturate(v[i]) * 255.0f)) << (8 * i);
  return result;
}
}  // namespace metal
