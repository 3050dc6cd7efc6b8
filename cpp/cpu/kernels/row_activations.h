// Activations of rows, in terms of the vectors of one instruction set (Simd, included before).
#pragma once

#include "../../../shaders/clamped_silu.h"
#include "activation_table.h"
#include "row_ops.h"

namespace metal_prefill::cpu {
namespace {

inline F sigmoid(F x) {
  return 1.0f / (1.0f + exp2(x * -kLog2E));
}

// Beyond this magnitude, the activation of a negative number is 0, and that of a positive number is the
// number. Arguments are clamped to it: infinity times a factor of 0 is NaN, and sigmoid is at least 2^-127.
constexpr float kFarFromZero = 100.0f;

// Clamps from below. NaN passes through, as the second argument of max().
inline F not_below(F x) {
  return Simd::max(Simd::set(-kFarFromZero), x);
}

inline F silu(F x) {
  return not_below(x) * sigmoid(x);
}

// The tanh approximation, 0.5 x (1 + tanh(u)) = x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
inline F gelu(F x) {
  x = not_below(x);
  const F cubic = Simd::fma(0.044715f * (x * x), x, x);
  return x * sigmoid(1.59576912f * cubic);
}

// x Phi(x), with erf(z) = 1 - p(t) exp(-z^2) for z >= 0 and t = 1 / (1 + 0.3275911 z): Abramowitz and Stegun,
// 7.1.26, which is within 1.5e-7. Half of p(t) exp(-z^2) is the difference from x on the positive side.
inline F gelu_erf(F x) {
  const F size = Simd::min(Simd::set(kFarFromZero), Simd::max(x, 0.0f - x));
  const F z = size * 0.707106781f;
  const F t = 1.0f / Simd::fma(z, Simd::set(0.3275911f), Simd::set(1.0f));
  F p = Simd::set(1.061405429f);
  p = Simd::fma(p, t, Simd::set(-1.453152027f));
  p = Simd::fma(p, t, Simd::set(1.421413741f));
  p = Simd::fma(p, t, Simd::set(-0.284496736f));
  p = Simd::fma(p, t, Simd::set(0.254829592f));
  const F tail = p * t * exp2(z * z * -kLog2E);
  const F missing = size * tail * 0.5f;
  return Simd::max(Simd::set(0.0f), x) - missing;  // NaN passes through max()
}

template <class S>
concept LooksUpFloats = requires(const float* table, typename S::F bits) { S::look_up32(table, bits); };

// max(0, x) minus m(|x|) of activation_table.h. NaN passes through max().
template <class S, Activation kActivation>
inline F activated_by_table(F x) {
  using Table = ActivationTable<kActivation>;
  constexpr const Table& kTable = kActivationTable<kActivation>;
  const F unit = S::set(0x1.8p23f), per_unit = S::set(Table::kPerUnit);  // adding `unit` rounds to integers
  const F size = S::min(S::magnitude(x), S::set(Table::kLimit));
  const F segment = S::fma(size, per_unit, unit);
  const F distance = S::fma(size, per_unit, unit - segment);
  F sum = S::look_up32(kTable.coefficients[Table::kTerms - 1].data(), segment);
  unrolled<Table::kTerms - 1>([&](auto i) ALWAYS_INLINE {
    sum = S::fma(sum, distance, S::look_up32(kTable.coefficients[Table::kTerms - 2 - i].data(), segment));
  });
  return S::max(S::set(0), x) - sum;
}

template <Activation kActivation>
inline F activated(F x) {
  if constexpr (kActivation == Activation::kClampedSilu) {
    // min() and max() keep NaN as their second argument.
    const F scaled = CLAMPED_SILU_SLOPE * Simd::min(Simd::set(CLAMPED_SILU_LIMIT), x);
    return activated<Activation::kSilu>(scaled) * (1.0f / CLAMPED_SILU_SLOPE);
  } else if constexpr (kActivation == Activation::kRelu)
    return Simd::max(Simd::set(0), x);
  else if constexpr (LooksUpFloats<Simd>)
    return activated_by_table<Simd, kActivation>(x);
  else if constexpr (kActivation == Activation::kSilu)
    return silu(x);
  else if constexpr (kActivation == Activation::kGelu)
    return gelu(x);
  else
    return gelu_erf(x);
}

// out = activation(x) * factor(i), for the vector at i.
template <Activation kActivation, typename Factor>
inline void activate_row(const float* x, int n, float* out, Factor&& factor) {
  for (int i = 0; i < n; i += Simd::kLanes)
    store_part(out + i, factor(activated<kActivation>(load_part(x + i, n - i)), i), n - i);
}

// The factor of a gate.
template <Activation kActivation>
inline F factor_of(F up) {
  if constexpr (kActivation == Activation::kClampedSilu) {
    const F limited = Simd::max(Simd::set(-CLAMPED_SILU_LIMIT), Simd::min(Simd::set(CLAMPED_SILU_LIMIT), up));
    return limited + 1.0f;
  } else {
    return up;
  }
}

// Calls body(kind) with the activation as a constant.
template <typename Body>
inline void with_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kSilu:
      return body(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kGelu:
      return body(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluErf:
      return body(std::integral_constant<Activation, Activation::kGeluErf>());
    case Activation::kRelu:
      return body(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kClampedSilu:
      return body(std::integral_constant<Activation, Activation::kClampedSilu>());
  }
}

void gated(const float* gate, const float* up, Activation activation, int n, float* out) {
  with_activation(activation, [&](auto kind) {
    activate_row<kind()>(gate, n, out, [&](F activated, int i) {
      return activated * factor_of<kind()>(load_part(up + i, n - i));
    });
  });
}

void activate(const float* x, std::size_t x_stride, Activation activation, int rows, int columns, float* out,
              std::size_t out_stride) {
  with_activation(activation, [&](auto kind) {
    for (int row = 0; row < rows; ++row)
      activate_row<kind()>(x + std::size_t(row) * x_stride, columns, out + std::size_t(row) * out_stride,
                           [](F activated, int) { return activated; });
  });
}

void apply_gate(const float* gate, int n, float* x) {
  for (int i = 0; i < n; i += Simd::kLanes)
    store_part(x + i, load_part(x + i, n - i) * sigmoid(load_part(gate + i, n - i)), n - i);
}

}  // namespace
}  // namespace metal_prefill::cpu
