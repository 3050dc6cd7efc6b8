// Declarations of simdgroup functions for the static check, which never calls them.
#pragma once

namespace metal {

void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

template <class T>
T simd_sum(T value);
template <class T>
T simd_max(T value);
template <class T>
T simd_min(T value);
template <class T>
T simd_shuffle_xor(T value, ushort mask);
bool simd_any(bool value);

}  // namespace metal
