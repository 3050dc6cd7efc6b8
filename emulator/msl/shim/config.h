// Names that depend on the backend: MSL_CPU (fibers), MSL_PTX (NVIDIA GPUs) or MSL_CHECK (C++ for OpenCL,
// never run).
#pragma once

#if MSL_CHECK
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#define MSL_INLINE inline
#define MSL_CONSTANT static constexpr __constant  // program-scope and static member constants
#define MSL_THREAD __private
#define MSL_DEVICE __global
#define MSL_THREADGROUP __local
#define atomic_int msl_atomic_int  // clang declares OpenCL's
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
#else
#define MSL_INLINE inline __attribute__((always_inline))
#define MSL_CONSTANT static constexpr
#define MSL_THREAD
#define MSL_DEVICE
#define MSL_THREADGROUP
#endif

#define METAL_FUNC inline
#define METAL_CONST const
#define METAL_ASM(...)
#define MSL_UNWRAP(...) __VA_ARGS__

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38F
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define MAXHALF ((half)65504.0f)
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)9.765625e-04f)
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_PI_H ((half)M_PI_F)
#define M_E_H ((half)M_E_F)
#define M_LN2_H ((half)M_LN2_F)
#define M_LOG2E_H ((half)M_LOG2E_F)
#define assert(condition) static_cast<void>(sizeof(bool(condition)))
