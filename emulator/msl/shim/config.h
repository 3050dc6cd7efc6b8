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
#else
#define MSL_INLINE inline __attribute__((always_inline))
#define MSL_CONSTANT static constexpr
#define MSL_THREAD
#define MSL_DEVICE
#define MSL_THREADGROUP
#endif

#define MSL_UNWRAP(...) __VA_ARGS__

#define INFINITY __builtin_inff()
#define FLT_MAX 3.402823466e+38F
#define M_LOG2E_F 1.44269504088896340736f
