// Type traits and small utilities.
#pragma once

namespace metal {

template <class A, class B>
using is_same = msl::Same<A, B>;

#if !MSL_CHECK
template <class T, size_t N>
struct array {
  T elements[N];
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
};
#else
#define MSL_ARRAY_ACCESS(SPACE)        \
  SPACE T& operator[](size_t i) SPACE; \
  const SPACE T& operator[](size_t i) const SPACE;
template <class T, size_t N>
struct array {
  T elements[N];
  MSL_ARRAY_ACCESS(__global)
  MSL_ARRAY_ACCESS(__local)
  MSL_ARRAY_ACCESS(__private)
};
#endif

enum class mem_flags : uint { mem_device = 1, mem_threadgroup = 2 };

}  // namespace metal
