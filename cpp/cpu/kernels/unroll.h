// Loops with a constant number of iterations, without a branch.
#pragma once

#include <utility>

// Attribute of lambdas and functions that must be inlined into the loops of kernels.
#define ALWAYS_INLINE __attribute__((always_inline))

#define FOR_UNROLL(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)

namespace metal_prefill::cpu {
namespace {

// Calls body with 0 .. kCount - 1 as constants: intrinsics take lanes as constants.
template <int kCount, typename Body>
inline ALWAYS_INLINE void unrolled(Body&& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) ALWAYS_INLINE {
    (body(std::integral_constant<int, i>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

}  // namespace
}  // namespace metal_prefill::cpu
