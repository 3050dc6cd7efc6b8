// Builtin functions of Apple's compiler, on which metal_stdlib is based. Libraries that overload metal_stdlib for
// their own types call them by these names. The last argument of most selects the precision, and is ignored here.
#pragma once

MSL_CONSTANT int __METAL_MAYBE_FAST_MATH__ = 0;
MSL_CONSTANT int __METAL_FAST_MATH__ = 1;
MSL_CONSTANT int __METAL_PRECISE_MATH__ = 2;
MSL_CONSTANT int __METAL_MEMORY_SCOPE_SYSTEM__ = 3;

#define MSL_BUILTIN_1(name)                    \
  template <class T>                           \
  MSL_INLINE T __metal_##name(T x, int = 0) {  \
    return metal::name(x);                     \
  }
#define MSL_BUILTIN_2(name)                         \
  template <class T>                                \
  MSL_INLINE T __metal_##name(T x, T y, int = 0) {  \
    return metal::name(x, y);                       \
  }
#define MSL_BUILTIN_3(name)                              \
  template <class T>                                     \
  MSL_INLINE T __metal_##name(T x, T y, T z, int = 0) {  \
    return metal::name(x, y, z);                         \
  }
MSL_BUILTIN_1(fabs) MSL_BUILTIN_1(acos) MSL_BUILTIN_1(acosh) MSL_BUILTIN_1(asin) MSL_BUILTIN_1(asinh)
MSL_BUILTIN_1(atan) MSL_BUILTIN_1(atanh) MSL_BUILTIN_1(ceil) MSL_BUILTIN_1(cos) MSL_BUILTIN_1(cosh)
MSL_BUILTIN_1(cospi) MSL_BUILTIN_1(exp) MSL_BUILTIN_1(exp2) MSL_BUILTIN_1(exp10) MSL_BUILTIN_1(floor)
MSL_BUILTIN_1(fract) MSL_BUILTIN_1(log) MSL_BUILTIN_1(log2) MSL_BUILTIN_1(log10) MSL_BUILTIN_1(rint)
MSL_BUILTIN_1(round) MSL_BUILTIN_1(rsqrt) MSL_BUILTIN_1(sin) MSL_BUILTIN_1(sinh) MSL_BUILTIN_1(sinpi)
MSL_BUILTIN_1(sqrt) MSL_BUILTIN_1(tan) MSL_BUILTIN_1(tanh) MSL_BUILTIN_1(tanpi) MSL_BUILTIN_1(trunc)
MSL_BUILTIN_2(atan2) MSL_BUILTIN_2(divide) MSL_BUILTIN_2(fmax) MSL_BUILTIN_2(fmin) MSL_BUILTIN_2(fmod)
MSL_BUILTIN_2(nextafter) MSL_BUILTIN_2(pow) MSL_BUILTIN_2(powr)
MSL_BUILTIN_3(fma) MSL_BUILTIN_3(fmax3) MSL_BUILTIN_3(fmin3) MSL_BUILTIN_3(fmedian3)
template <class T>
MSL_INLINE T __metal_frexp(T x, MSL_THREAD int* exponent) {
  return metal::frexp(x, *exponent);
}
template <class T>
MSL_INLINE T __metal_ldexp(T x, int exponent, int = 0) {
  return metal::ldexp(x, exponent);
}

// Operations on simdgroups are looked up at the point of instantiation.
#define __metal_simd_broadcast metal::simd_broadcast
#define __metal_simd_max metal::simd_max
#define __metal_simd_min metal::simd_min
#define __metal_simd_prefix_exclusive_product metal::simd_prefix_exclusive_product
#define __metal_simd_prefix_exclusive_sum metal::simd_prefix_exclusive_sum
#define __metal_simd_prefix_inclusive_product metal::simd_prefix_inclusive_product
#define __metal_simd_prefix_inclusive_sum metal::simd_prefix_inclusive_sum
#define __metal_simd_product metal::simd_product
#define __metal_simd_shuffle metal::simd_shuffle
#define __metal_simd_shuffle_and_fill_down metal::simd_shuffle_and_fill_down
#define __metal_simd_shuffle_and_fill_up metal::simd_shuffle_and_fill_up
#define __metal_simd_shuffle_down metal::simd_shuffle_down
#define __metal_simd_shuffle_rotate_down metal::simd_shuffle_rotate_down
#define __metal_simd_shuffle_rotate_up metal::simd_shuffle_rotate_up
#define __metal_simd_shuffle_up metal::simd_shuffle_up
#define __metal_simd_shuffle_xor metal::simd_shuffle_xor
#define __metal_simd_sum metal::simd_sum
template <class T>
MSL_INLINE T __metal_simd_xor(T value) {
  if constexpr (msl::Same<T, float>::value) {
    return metal::as_type<float>(metal::simd_xor(metal::as_type<uint>(value)));
  } else {
    return metal::simd_xor(value);
  }
}
template <class T>
MSL_INLINE T __metal_get_simdgroup_size(T) {
  return 32;
}

// Types that simdgroups exchange: numbers and vectors of them.
template <class T>
struct __is_valid_simdgroup_type
    : metal::bool_constant<(msl::Shape<T>::width > 1 || metal::is_arithmetic_v<T>)&&!metal::is_same_v<T, bool>> {};
