// Floating-point functions of one to three arguments, for float, half and their vectors, in metal::,
// metal::precise and metal::fast. Results are those of the host's float functions, or of ptx_math.h's, rounded
// to half if the argument is half. The fast ones are the same, with three exceptions: exp on GPUs is less exact; exp
// and exp2 on CPUs have errors on request; and on CPUs the result for an infinite argument is NaN, since Metal's fast
// functions may assume finite arguments.
#pragma once

namespace msl {

MSL_CONSTANT float kPi = 3.14159265358979323846f;

// Float functions that the backend's maths library provides.
#if !MSL_PTX  // ptx_math.h defines these functions
#define MSL_LIBRARY1(name)             \
  MSL_INLINE float f_##name(float x) { \
    return __builtin_##name##f(x);     \
  }
#define MSL_LIBRARY2(name)                      \
  MSL_INLINE float f_##name(float x, float y) { \
    return __builtin_##name##f(x, y);           \
  }
MSL_LIBRARY1(exp)
MSL_LIBRARY1(exp2)
MSL_LIBRARY1(log)
MSL_LIBRARY1(log2) MSL_LIBRARY1(log10) MSL_LIBRARY1(sin) MSL_LIBRARY1(cos) MSL_LIBRARY1(tan)
    MSL_LIBRARY1(asin) MSL_LIBRARY1(acos) MSL_LIBRARY1(atan) MSL_LIBRARY1(sinh) MSL_LIBRARY1(cosh)
        MSL_LIBRARY1(tanh) MSL_LIBRARY1(asinh) MSL_LIBRARY1(acosh) MSL_LIBRARY1(atanh) MSL_LIBRARY2(pow)
            MSL_LIBRARY2(atan2) MSL_LIBRARY2(fmod) MSL_LIBRARY2(fdim) MSL_LIBRARY2(nextafter)
#if !MSL_CHECK
                MSL_INLINE float f_ldexp(float x, int e) {
  return __builtin_ldexpf(x, e);
}
MSL_INLINE float f_frexp(float x, int* e) {
  return __builtin_frexpf(x, e);
}
#else
                float f_ldexp(float x, int e);
float f_frexp(float x, __private int* e);
#endif
#endif

#if MSL_CPU
// Returns the result, with the largest error that the specification allows for fast functions if the executor requests
// it: 3 + floor(|2x|) units of the last place. The argument's bits determine the sign, so that the errors of a sum
// neither all add up nor all cancel. The result for 0 stays 1: kernels rely on it, although the specification does not
// guarantee it.
MSL_INLINE float with_fast_error(float x, float result) {
  const bool errs = ::metal_emulator::abi::current_worker().fast_errors && x != 0.0f;
  if (!errs || !(result < __builtin_inff())) return result;
  uint hash = __builtin_bit_cast(uint, x) * 0x9e3779b1u;
  const int units = 3 + static_cast<int>(__builtin_fminf(__builtin_fabsf(2.0f * x), 1000.0f));
  // The bits of positive floats have the same order as their values.
  const int moved = __builtin_bit_cast(int, result) + (hash >> 31 ? units : -units);
  return __builtin_bit_cast(float, moved < 0 ? 0 : moved);
}
MSL_INLINE float fast_exp(float x) {
  return with_fast_error(x, f_exp(x));
}
MSL_INLINE float fast_exp2(float x) {
  return with_fast_error(x, f_exp2(x));
}
#endif

MSL_INLINE bool infinite(float x) {
  return __builtin_fabsf(x) == __builtin_inff();
}

MSL_INLINE float smooth_ramp(float t) {
  t = __builtin_fminf(__builtin_fmaxf(t, 0.0f), 1.0f);
  return t * t * (3.0f - 2.0f * t);
}

}  // namespace msl

namespace metal {

// Defines a function of floats; halves are converted to float, vectors computed element by element.
#define MSL_EACH1(name, V)                                                 \
  MSL_INLINE V name(V x) {                                                 \
    V result = V();                                                        \
    for (int i = 0; i < msl::Shape<V>::width; ++i) result[i] = name(x[i]); \
    return result;                                                         \
  }
#define MSL_EACH2(name, V)                                                       \
  MSL_INLINE V name(V x, V y) {                                                  \
    V result = V();                                                              \
    for (int i = 0; i < msl::Shape<V>::width; ++i) result[i] = name(x[i], y[i]); \
    return result;                                                               \
  }
#define MSL_EACH3(name, V)                                                             \
  MSL_INLINE V name(V x, V y, V z) {                                                   \
    V result = V();                                                                    \
    for (int i = 0; i < msl::Shape<V>::width; ++i) result[i] = name(x[i], y[i], z[i]); \
    return result;                                                                     \
  }
#define MSL_ON_FLOAT_VECTORS(EACH, name) \
  EACH(name, ::float2)                   \
  EACH(name, ::float3) EACH(name, ::float4) EACH(name, ::half2) EACH(name, ::half3) EACH(name, ::half4)
#define MSL_MATH1(name, expression)                                     \
  MSL_INLINE float name(float x) {                                      \
    return MSL_RESULT(msl::infinite(x), expression);                    \
  }                                                                     \
  MSL_INLINE half name(half value) {                                    \
    float x = value;                                                    \
    return static_cast<half>(MSL_RESULT(msl::infinite(x), expression)); \
  }                                                                     \
  MSL_ON_FLOAT_VECTORS(MSL_EACH1, name)
#define MSL_MATH2(name, expression)                                                         \
  MSL_INLINE float name(float x, float y) {                                                 \
    return MSL_RESULT(msl::infinite(x) || msl::infinite(y), expression);                    \
  }                                                                                         \
  MSL_INLINE half name(half first, half second) {                                           \
    float x = first, y = second;                                                            \
    return static_cast<half>(MSL_RESULT(msl::infinite(x) || msl::infinite(y), expression)); \
  }                                                                                         \
  MSL_ON_FLOAT_VECTORS(MSL_EACH2, name)
#define MSL_MATH3(name, expression)                                                        \
  MSL_INLINE float name(float x, float y, float z) {                                       \
    return MSL_RESULT(msl::infinite(x) || msl::infinite(y) || msl::infinite(z),            \
                      expression);                                                         \
  }                                                                                        \
  MSL_INLINE half name(half first, half second, half third) {                              \
    float x = first, y = second, z = third;                                                \
    return static_cast<half>(                                                              \
        MSL_RESULT(msl::infinite(x) || msl::infinite(y) || msl::infinite(z), expression)); \
  }                                                                                        \
  MSL_ON_FLOAT_VECTORS(MSL_EACH3, name)

#define MSL_ALL_MATH                                                                                         \
  MSL_MATH1(exp, MSL_EXP(x))                                                                              \
  MSL_MATH1(exp2, MSL_EXP2(x))                                                                               \
  MSL_MATH1(exp10, msl::f_pow(10.0f, x))                                                                     \
  MSL_MATH1(log, msl::f_log(x)) MSL_MATH1(log2, msl::f_log2(x)) MSL_MATH1(log10, msl::f_log10(x)) MSL_MATH1( \
      sin, msl::f_sin(x)) MSL_MATH1(cos, msl::f_cos(x)) MSL_MATH1(tan, msl::f_tan(x))                        \
      MSL_MATH1(asin, msl::f_asin(x)) MSL_MATH1(acos, msl::f_acos(x)) MSL_MATH1(                             \
          atan, msl::f_atan(x)) MSL_MATH1(sinh, msl::f_sinh(x)) MSL_MATH1(cosh, msl::f_cosh(x))              \
          MSL_MATH1(tanh, msl::f_tanh(x)) MSL_MATH1(asinh, msl::f_asinh(x)) MSL_MATH1(                       \
              acosh, msl::f_acosh(x)) MSL_MATH1(atanh, msl::f_atanh(x))                                      \
              MSL_MATH1(sinpi, msl::f_sin(msl::kPi* x)) MSL_MATH1(cospi, msl::f_cos(msl::kPi* x)) MSL_MATH1( \
                  tanpi, msl::f_tan(msl::kPi* x)) MSL_MATH1(sqrt, __builtin_sqrtf(x))                        \
                  MSL_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x)) MSL_MATH1(fabs, __builtin_fabsf(x)) MSL_MATH1( \
                      floor, __builtin_floorf(                                                               \
                                 x)) MSL_MATH1(ceil, __builtin_ceilf(x)) MSL_MATH1(rint, __builtin_rintf(x)) \
                      MSL_MATH1(round, __builtin_roundf(x)) MSL_MATH1(trunc, __builtin_truncf(x))            \
                          MSL_MATH1(fract, __builtin_fminf(x - __builtin_floorf(x), 0.99999994f)) MSL_MATH1( \
                              sign, x > 0.0f   ? 1.0f                                                        \
                                    : x < 0.0f ? -1.0f                                                       \
                                    : x == 0.0f                                                              \
                                        ? x                                                                  \
                                        : 0.0f)                                                              \
                              MSL_MATH1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))           \
                                  MSL_MATH2(pow, msl::f_pow(x, y)) MSL_MATH2(powr, msl::f_pow(x, y))         \
                                      MSL_MATH2(atan2, msl::f_atan2(x, y)) MSL_MATH2(                        \
                                          fmod, msl::f_fmod(x, y)) MSL_MATH2(fdim, msl::f_fdim(x, y))        \
                                          MSL_MATH2(divide, x / y) MSL_MATH2(fmax, __builtin_fmaxf(x, y))    \
                                              MSL_MATH2(fmin, __builtin_fminf(x, y)) MSL_MATH2(              \
                                                  copysign, __builtin_copysignf(x, y))                       \
                                                  MSL_MATH2(step, y < x ? 0.0f : 1.0f) MSL_MATH3(            \
                                                      fma, __builtin_fmaf(x, y, z))                          \
                                                      MSL_MATH3(mix, x + (y - x) * z) MSL_MATH3(             \
                                                          fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))  \
                                                          MSL_MATH3(fmin3, __builtin_fminf(                  \
                                                                               x, __builtin_fminf(y, z)))    \
                                                              MSL_MATH3(fmedian3,                            \
                                                                        __builtin_fmaxf(                     \
                                                                            __builtin_fminf(x, y),           \
                                                                            __builtin_fminf(                 \
                                                                                __builtin_fmaxf(x, y), z)))  \
                                                                  MSL_MATH3(                                 \
                                                                      smoothstep,                            \
                                                                      msl::smooth_ramp((z - x) / (y - x)))   \
                                                                      MSL_INLINE float                       \
                                                                      sincos(float x,                        \
                                                                             MSL_THREAD float& cosine) {     \
    cosine = msl::f_cos(x);                                                                                  \
    return msl::f_sin(x);                                                                                    \
  }                                                                                                          \
  MSL_INLINE half sincos(half x, MSL_THREAD half& cosine) {                                                  \
    cosine = static_cast<half>(msl::f_cos(x));                                                               \
    return static_cast<half>(msl::f_sin(x));                                                                 \
  }                                                                                                          \
  MSL_INLINE float modf(float x, MSL_THREAD float& whole) {                                                  \
    whole = __builtin_truncf(x);                                                                             \
    return x - whole;                                                                                        \
  }                                                                                                          \
  MSL_INLINE float ldexp(float x, int exponent) {                                                            \
    return msl::f_ldexp(x, exponent);                                                                        \
  }                                                                                                          \
  MSL_INLINE half ldexp(half x, int exponent) {                                                              \
    return static_cast<half>(msl::f_ldexp(x, exponent));                                                     \
  }                                                                                                          \
  MSL_INLINE float frexp(float x, MSL_THREAD int& exponent) {                                                \
    return msl::f_frexp(x, &exponent);                                                                       \
  }                                                                                                          \
  MSL_INLINE float nextafter(float x, float y) {                                                             \
    return msl::f_nextafter(x, y);                                                                           \
  }

#define MSL_RESULT(infinite, expression) (expression)
#define MSL_EXP(x) msl::f_exp(x)
#define MSL_EXP2(x) msl::f_exp2(x)
MSL_ALL_MATH
namespace precise {
MSL_ALL_MATH
}
#if MSL_PTX || MSL_CPU
#undef MSL_EXP
#define MSL_EXP(x) msl::fast_exp(x)
#endif
#if MSL_CPU
#undef MSL_RESULT
#define MSL_RESULT(infinite, expression) ((infinite) ? __builtin_nanf("") : (expression))
#undef MSL_EXP2
#define MSL_EXP2(x) msl::fast_exp2(x)
#endif
namespace fast {
MSL_ALL_MATH
}

// mix with a single weight for all elements.
#define MSL_MIX_SCALAR(V)                                              \
  MSL_INLINE V mix(V x, V y, typename msl::Shape<V>::element weight) { \
    return x + (y - x) * weight;                                       \
  }
MSL_MIX_SCALAR(::float2)
MSL_MIX_SCALAR(::float3)
MSL_MIX_SCALAR(::float4) MSL_MIX_SCALAR(::half2) MSL_MIX_SCALAR(::half3) MSL_MIX_SCALAR(::half4)

}  // namespace metal
