// Division into parts of equal size, of integers that are not negative.
#pragma once

#include <type_traits>

namespace metal_prefill {

// Static: sources built for one instruction set must not share their copy with others.

// The parts of `size` that hold `n`.
template <typename T>
static constexpr T ceil_div(T n, std::type_identity_t<T> size) {
  return (n + size - 1) / size;
}

// The smallest multiple that is at least `n`.
template <typename T>
static constexpr T round_up(T n, std::type_identity_t<T> multiple) {
  return ceil_div(n, multiple) * multiple;
}

}  // namespace metal_prefill
