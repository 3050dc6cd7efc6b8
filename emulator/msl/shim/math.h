// The floating-point functions of shaders, for float, half and their vectors. They use the host's float
// functions, or ptx_math.h, and round to half if the argument is half. Fast functions differ in three ways:
// exp on GPUs is less exact; on CPUs they have errors on request; and on CPUs the result for an infinite
// argument is NaN, since Metal's fast functions may assume finite arguments.
#pragma once

namespace msl {

#if !MSL_PTX  // ptx_math.h defines these functions
MSL_INLINE float f_exp(float x) {
  return __builtin_expf(x);
}
MSL_INLINE float f_exp2(float x) {
  return __builtin_exp2f(x);
}
MSL_INLINE float f_log(float x) {
  return __builtin_logf(x);
}
MSL_INLINE float fast_result([[maybe_unused]] float x, float result) {
#if MSL_CPU
  // Returns the result, with the largest error that the specification allows for fast functions if the executor
  // requests it: 3 + floor(|2x|) units of the last place. The argument's bits determine the sign, so that the errors
  // of a sum neither all add up nor all cancel. The result for 0 stays 1: kernels rely on it, although the
  // specification does not guarantee it.
  if (__builtin_fabsf(x) == __builtin_inff()) return __builtin_nanf("");
  const bool errs = ::metal_emulator::abi::current_worker().fast_errors && x != 0.0f;
  if (!errs || !(result < __builtin_inff())) return result;
  uint hash = __builtin_bit_cast(uint, x) * 0x9e3779b1u;
  const int units = 3 + static_cast<int>(__builtin_fminf(__builtin_fabsf(2.0f * x), 1000.0f));
  // The bits of positive floats are ordered as their values.
  const int moved = __builtin_bit_cast(int, result) + (hash >> 31 ? units : -units);
  return __builtin_bit_cast(float, moved < 0 ? 0 : moved);
#else
  return result;
#endif
}
MSL_INLINE float fast_exp(float x) {
  return fast_result(x, f_exp(x));
}
MSL_INLINE float fast_exp2(float x) {
  return fast_result(x, f_exp2(x));
}
#endif

}  // namespace msl

namespace metal {

// Defines a function of floats; halves are converted to float, vectors computed element by element.
#define MSL_EACH1(name, V)                                                 \
  MSL_INLINE V name(V x) {                                                 \
    V result = V();                                                        \
    for (int i = 0; i < msl::Shape<V>::width; ++i) result[i] = name(x[i]); \
    return result;                                                         \
  }
#define MSL_EACH3(name, V)                                                             \
  MSL_INLINE V name(V x, V y, V z) {                                                   \
    V result = V();                                                                    \
    for (int i = 0; i < msl::Shape<V>::width; ++i) result[i] = name(x[i], y[i], z[i]); \
    return result;                                                                     \
  }
// clang-format off: it indents each macro of a list more than the previous one
#define MSL_ON_FLOAT_VECTORS(EACH, name) \
  MSL_FOR_WIDTHS(EACH, name, ::float) MSL_FOR_WIDTHS(EACH, name, ::half)
#define MSL_MATH1(name, expression)        \
  MSL_INLINE float name(float x) {         \
    return expression;                     \
  }                                        \
  MSL_INLINE half name(half value) {       \
    float x = value;                       \
    return static_cast<half>(expression);  \
  }                                        \
  MSL_ON_FLOAT_VECTORS(MSL_EACH1, name)
#define MSL_MATH3(name, expression)                           \
  MSL_INLINE float name(float x, float y, float z) {          \
    return expression;                                        \
  }                                                           \
  MSL_INLINE half name(half first, half second, half third) { \
    float x = first, y = second, z = third;                   \
    return static_cast<half>(expression);                     \
  }                                                           \
  MSL_ON_FLOAT_VECTORS(MSL_EACH3, name)

MSL_MATH3(fma, __builtin_fmaf(x, y, z))
namespace precise {
MSL_MATH1(exp, msl::f_exp(x))
MSL_MATH1(log, msl::f_log(x))
MSL_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))
}
namespace fast {
MSL_MATH1(exp, msl::fast_exp(x))
MSL_MATH1(exp2, msl::fast_exp2(x))
}
// clang-format on

}  // namespace metal
