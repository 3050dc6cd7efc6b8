// Activations of rows, in terms of the vectors of one instruction set (Simd, included before).
#pragma once

#include "activation_table.h"
#include "row_ops.h"

namespace metal_prefill::cpu {
namespace {

inline F sigmoid(F x) {
  return Simd::div(Simd::set(1.0f), Simd::add(Simd::set(1.0f), exp2(Simd::mul(x, Simd::set(-kLog2E)))));
}

// The tanh approximation, 0.5 x (1 + tanh(u)) = x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
inline F gelu(F x) {
  const F cubic = Simd::fma(Simd::mul(Simd::set(0.044715f), Simd::mul(x, x)), x, x);
  return Simd::mul(x, sigmoid(Simd::mul(Simd::set(1.59576912f), cubic)));
}

// x Phi(x), with erf(z) = 1 - p(t) exp(-z^2) for z >= 0 and t = 1 / (1 + 0.3275911 z): Abramowitz and Stegun,
// 7.1.26, which is within 1.5e-7. Half of p(t) exp(-z^2) is what is missing to x on the positive side.
inline F gelu_erf(F x) {
  const F size = Simd::max(x, Simd::sub(Simd::set(0.0f), x));
  const F z = Simd::mul(size, Simd::set(0.707106781f));
  const F t = Simd::div(Simd::set(1.0f), Simd::fma(z, Simd::set(0.3275911f), Simd::set(1.0f)));
  F p = Simd::set(1.061405429f);
  p = Simd::fma(p, t, Simd::set(-1.453152027f));
  p = Simd::fma(p, t, Simd::set(1.421413741f));
  p = Simd::fma(p, t, Simd::set(-0.284496736f));
  p = Simd::fma(p, t, Simd::set(0.254829592f));
  const F tail = Simd::mul(Simd::mul(p, t), exp2(Simd::mul(Simd::mul(z, z), Simd::set(-kLog2E))));
  const F missing = Simd::mul(Simd::mul(size, tail), Simd::set(0.5f));
  return Simd::sub(Simd::max(Simd::set(0.0f), x), missing);  // NaN, which max() keeps, stays
}

template <class S>
concept LooksUpFloats = requires(const float* table, typename S::F bits) { S::look_up32(table, bits); };

// max(0, x), less what activation_table.h has of |x|. NaN, which max() keeps, stays.
template <class S, Activation kActivation>
inline F activated_by_table(F x) {
  using Table = ActivationTable<kActivation>;
  constexpr const Table& kTable = kActivationTable<kActivation>;
  const F unit = S::set(0x1.8p23f), per_unit = S::set(Table::kPerUnit);  // adding the unit rounds
  const F size = S::min(S::magnitude(x), S::set(Table::kLimit));
  const F segment = S::fma(size, per_unit, unit);
  const F distance = S::fma(size, per_unit, S::sub(unit, segment));
  F sum = S::look_up32(kTable.coefficients[Table::kTerms - 1].data(), segment);
  unrolled<Table::kTerms - 1>([&](auto i) __attribute__((always_inline)) {
    sum = S::fma(sum, distance, S::look_up32(kTable.coefficients[Table::kTerms - 2 - i].data(), segment));
  });
  return S::sub(S::max(S::set(0), x), sum);
}

template <Activation kActivation>
inline F activated(F x) {
  if constexpr (LooksUpFloats<Simd>)
    return activated_by_table<Simd, kActivation>(x);
  else if constexpr (kActivation == Activation::kSilu)
    return Simd::mul(x, sigmoid(x));
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

template <typename Factor>
inline void activate_rows(const float* x, Activation activation, int n, float* out, Factor&& factor) {
  switch (activation) {
    case Activation::kSilu:
      return activate_row<Activation::kSilu>(x, n, out, factor);
    case Activation::kGelu:
      return activate_row<Activation::kGelu>(x, n, out, factor);
    case Activation::kGeluErf:
      return activate_row<Activation::kGeluErf>(x, n, out, factor);
  }
}

void gated(const float* gate, const float* up, Activation activation, int n, float* out) {
  activate_rows(gate, activation, n, out,
                [&](F activated, int i) { return Simd::mul(activated, load_part(up + i, n - i)); });
}

void activate(const float* x, Activation activation, int n, float* out) {
  activate_rows(x, activation, n, out, [](F activated, int) { return activated; });
}

void apply_gate(const float* gate, int n, float* x) {
  for (int i = 0; i < n; i += Simd::kLanes)
    store_part(x + i, Simd::mul(load_part(x + i, n - i), sigmoid(load_part(gate + i, n - i))), n - i);
}

}  // namespace
}  // namespace metal_prefill::cpu
