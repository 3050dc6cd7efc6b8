// Floating-point functions for which NVIDIA GPUs have no instruction. The exponential, which shaders use most, consists
// of float instructions. The others are series in double, rounded once; they are slow on GPUs with few units for
// double.
#pragma once

namespace msl {

MSL_INLINE float power_of_two(float x) {  // 2^x within two units of the last place
  float result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
MSL_INLINE float fast_exp(float x) {
  return power_of_two(x * 1.44269504f);
}
MSL_INLINE float float_of(uint bits) {
  return __builtin_bit_cast(float, bits);
}
// x * 2^e for any e: in two steps, so that subnormal results are rounded once.
MSL_INLINE float f_ldexp(float x, int e) {
  e = e < -300 ? -300 : e > 300 ? 300 : e;
  for (; e < -126; e += 100) x *= float_of((127 - 100) << 23);
  for (; e > 127; e -= 127) x *= float_of((127 + 127) << 23);
  return x * float_of(static_cast<uint>(127 + e) << 23);
}
MSL_INLINE float f_exp(float x) {
  // x = n ln 2 + r, with ln 2 in two parts so that n ln 2 is exact enough.
  const float n = __builtin_rintf(__builtin_fminf(__builtin_fmaxf(x * 1.44269504f, -160.0f), 130.0f));
  float r = __builtin_fmaf(n, -0.693359375f, x);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  const int half_n = static_cast<int>(n) / 2, rest = static_cast<int>(n) - half_n;
  const float result = power_of_two(r * 1.44269504f) * float_of(static_cast<uint>(127 + half_n) << 23) *
                       float_of(static_cast<uint>(127 + rest) << 23);
  return x > 89.0f ? __builtin_inff() : x < -105.0f ? 0.0f : result;
}
MSL_INLINE float f_exp2(float x) {
  return power_of_two(x);
}

// Series in double. `d_` functions take and return doubles with an error far below a float's last place.
MSL_INLINE double d_power_of_two(int n) {  // -1022 to 1023
  return __builtin_bit_cast(double, static_cast<ulong>(1023 + n) << 52);
}
inline double d_exp(double x) {
  x = x < -700.0 ? -700.0 : x > 700.0 ? 700.0 : x;
  const double n = __builtin_rint(x * 1.4426950408889634);
  const double r = __builtin_fma(n, -1.9082149292705877e-10, __builtin_fma(n, -0.693147180369123816, x));
  double sum = 1.0;
  for (int i = 13; i > 0; --i) sum = 1.0 + sum * r / i;
  return sum * d_power_of_two(static_cast<int>(n));
}
// Logarithm of a positive, normal double.
inline double d_log(double x) {
  ulong bits = __builtin_bit_cast(ulong, x);
  int e = static_cast<int>(bits >> 52) - 1023;
  double m = __builtin_bit_cast(double, (bits & 0xffffffffffffful) | 0x3ff0000000000000ul);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 0.0;
  for (int i = 21; i > 0; i -= 2) sum = sum * square + 1.0 / i;
  return 2.0 * s * sum + e * 0.6931471805599453;
}
// Of any float.
inline double log_of(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -__builtin_inf() : __builtin_nan("");
  return x < __builtin_inff() ? d_log(x) : __builtin_inf();
}
MSL_INLINE float f_log(float x) {
  return x != x ? x : static_cast<float>(log_of(x));
}
MSL_INLINE float f_log2(float x) {
  return x != x ? x : static_cast<float>(log_of(x) * 1.4426950408889634);
}
MSL_INLINE float f_log10(float x) {
  return x != x ? x : static_cast<float>(log_of(x) * 0.43429448190325183);
}
inline float f_pow(float x, float y) {
  if (y == 0.0f || x == 1.0f) return 1.0f;
  if (x != x || y != y) return x + y;
  const float size = __builtin_fabsf(x);
  const bool whole = __builtin_truncf(y) == y;
  const bool odd = whole && __builtin_fabsf(y) < 16777216.0f && (static_cast<int>(y) & 1);
  if (x < 0.0f && !whole && size < __builtin_inff() && __builtin_fabsf(y) < __builtin_inff())
    return __builtin_nanf("");
  float result;
  if (size == 0.0f || size == __builtin_inff()) {
    result = (size == 0.0f) == (y > 0.0f) ? 0.0f : __builtin_inff();
  } else if (__builtin_fabsf(y) == __builtin_inff()) {
    result = size == 1.0f ? 1.0f : (size > 1.0f) == (y > 0.0f) ? __builtin_inff() : 0.0f;
  } else {
    result = static_cast<float>(d_exp(y * d_log(size)));
  }
  return odd && __builtin_signbit(x) ? -result : result;
}
// Sine of an angle in [0, pi / 4] and its square, and the cosine.
MSL_INLINE double sine_series(double x, double square) {
  double sum = 0.0;
  for (int i = 15; i > 0; i -= 2) sum = 1.0 - sum * square / (i * (i + 1));
  return x * sum;
}
MSL_INLINE double cosine_series(double square) {
  double sum = 0.0;
  for (int i = 14; i >= 0; i -= 2) sum = 1.0 - sum * square / ((i + 1) * (i + 2));
  return sum;
}
inline double d_sin(double x, int quarters) {
  const double n = __builtin_rint(x * 0.63661977236758134);
  const double r = __builtin_fma(n, -6.123233995736766e-17, __builtin_fma(n, -1.5707963267948966, x));
  const long quadrant = (static_cast<long>(n) + quarters) & 3;
  const double square = r * r, value = quadrant & 1 ? cosine_series(square) : sine_series(r, square);
  return quadrant & 2 ? -value : value;
}
MSL_INLINE float f_sin(float x) {
  return static_cast<float>(d_sin(x, 0));
}
MSL_INLINE float f_cos(float x) {
  return static_cast<float>(d_sin(x, 1));
}
MSL_INLINE float f_tan(float x) {
  return static_cast<float>(d_sin(x, 0) / d_sin(x, 1));
}
inline double d_atan(double x) {
  const double size = __builtin_fabs(x);
  double t = size > 1.0 ? 1.0 / size : size;
  for (int i = 0; i < 2; ++i) t = t / (1.0 + __builtin_sqrt(1.0 + t * t));  // the tangent of half the angle
  double sum = 0.0;
  for (int i = 25; i > 0; i -= 2) sum = 1.0 / i - sum * t * t;
  double angle = 4.0 * t * sum;
  if (size > 1.0) angle = 1.5707963267948966 - angle;
  return __builtin_copysign(angle, x);
}
MSL_INLINE float f_atan(float x) {
  return static_cast<float>(d_atan(x));
}
inline float f_atan2(float y, float x) {
  const double pi = 3.141592653589793;
  if (x != x || y != y) return x + y;
  const bool left = __builtin_signbit(x);
  double angle;
  if (y == 0.0f) {
    angle = 0.0;
  } else if (__builtin_fabsf(x) == __builtin_inff()) {
    angle = __builtin_fabsf(y) == __builtin_inff() ? pi / 4 : 0.0;
  } else {
    angle = d_atan(__builtin_fabs(static_cast<double>(y)) / __builtin_fabs(static_cast<double>(x)));
  }
  return static_cast<float>(__builtin_copysign(left ? pi - angle : angle, static_cast<double>(y)));
}
MSL_INLINE float f_asin(float x) {
  const double d = x;
  return static_cast<float>(d_atan(d / __builtin_sqrt((1.0 - d) * (1.0 + d))));
}
MSL_INLINE float f_acos(float x) {
  const double d = x;
  return static_cast<float>(2.0 * d_atan(__builtin_sqrt((1.0 - d) / (1.0 + d))));
}
// Hyperbolic functions; near zero a difference of exponentials would cancel.
inline float f_sinh(float x) {
  const double d = x;
  if (__builtin_fabsf(x) < 0.01f) return static_cast<float>(d + d * d * d / 6.0);
  return static_cast<float>((d_exp(d) - d_exp(-d)) * 0.5);
}
inline float f_cosh(float x) {
  return static_cast<float>((d_exp(x) + d_exp(-x)) * 0.5);
}
inline float f_tanh(float x) {
  const double d = x;
  if (__builtin_fabsf(x) < 0.005f) return static_cast<float>(d - d * d * d / 3.0);
  if (__builtin_fabsf(x) > 20.0f) return __builtin_copysignf(1.0f, x);
  const double e = d_exp(2.0 * d);
  return static_cast<float>((e - 1.0) / (e + 1.0));
}
inline float f_asinh(float x) {
  const double d = __builtin_fabs(static_cast<double>(x));
  if (!(d < __builtin_inf())) return x;
  const double value = d < 0.01 ? d - d * d * d / 6.0 : d_log(d + __builtin_sqrt(d * d + 1.0));
  return static_cast<float>(__builtin_copysign(value, static_cast<double>(x)));
}
inline float f_acosh(float x) {
  const double d = x;
  if (!(x >= 1.0f)) return __builtin_nanf("");
  return x < __builtin_inff() ? static_cast<float>(d_log(d + __builtin_sqrt((d - 1.0) * (d + 1.0)))) : x;
}
inline float f_atanh(float x) {
  const double d = x;
  if (__builtin_fabsf(x) < 0.01f) return static_cast<float>(d + d * d * d / 3.0);
  if (__builtin_fabsf(x) == 1.0f) return __builtin_copysignf(__builtin_inff(), x);
  return __builtin_fabsf(x) < 1.0f ? static_cast<float>(0.5 * d_log((1.0 + d) / (1.0 - d)))
                                   : __builtin_nanf("");
}
MSL_INLINE float f_fdim(float x, float y) {
  return x != x || y != y ? x + y : x > y ? x - y : 0.0f;
}
// Exact, because the operands of the subtraction are within a factor of two of each other.
inline float f_fmod(float x, float y) {
  double rest = __builtin_fabs(static_cast<double>(x));
  const double divisor = __builtin_fabs(static_cast<double>(y));
  if (!(rest < __builtin_inf()) || !(divisor > 0.0)) return __builtin_nanf("");
  if (divisor == __builtin_inf()) return x;
  double step = divisor;
  while (step * 2.0 <= rest) step *= 2.0;
  for (; step >= divisor; step *= 0.5) {
    if (rest >= step) rest -= step;
  }
  return __builtin_copysignf(static_cast<float>(rest), x);
}
MSL_INLINE float f_nextafter(float x, float y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  if (x == 0.0f) return __builtin_copysignf(float_of(1), y);
  const uint bits = __builtin_bit_cast(uint, x);
  return float_of((x < y) == (x > 0.0f) ? bits + 1 : bits - 1);
}
inline float f_frexp(float x, int* e) {
  *e = 0;
  if (x == 0.0f || !(__builtin_fabsf(x) < __builtin_inff())) return x;
  int scale = 0;
  if (__builtin_fabsf(x) < FLT_MIN) {
    x *= 16777216.0f;
    scale = -24;
  }
  const uint bits = __builtin_bit_cast(uint, x);
  *e = static_cast<int>(bits >> 23 & 255) - 126 + scale;
  return float_of((bits & 0x807fffffu) | 126u << 23);
}

}  // namespace msl
