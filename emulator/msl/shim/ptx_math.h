// Floating-point functions for which NVIDIA GPUs have no instruction. The exponential, which shaders use most, consists
// of float instructions. The logarithm is a series in double, rounded once; it is slow on GPUs with few units for
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
MSL_INLINE float fast_exp2(float x) {
  return power_of_two(x);
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
// Logarithm of any float.
inline double log_of(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -__builtin_inf() : __builtin_nan("");
  return x < __builtin_inff() ? d_log(x) : __builtin_inf();
}
MSL_INLINE float f_log(float x) {
  return x != x ? x : static_cast<float>(log_of(x));
}

}  // namespace msl
