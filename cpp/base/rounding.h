// Division of non-negative integers, rounded up.
#pragma once

#include <type_traits>

namespace metal_prefill {

// Static, so that the linker does not merge copies that were compiled for different instruction sets.

// Returns n / size, rounded up.
template <typename T>
static constexpr T ceil_div(T n, std::type_identity_t<T> size) {
  return (n + size - 1) / size;
}

// Returns the smallest multiple that is at least `n`.
template <typename T>
static constexpr T round_up(T n, std::type_identity_t<T> multiple) {
  return ceil_div(n, multiple) * multiple;
}

}  // namespace metal_prefill
