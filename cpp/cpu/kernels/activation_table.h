// Piecewise polynomial activations, for instruction sets that look values up in two registers.
//
// Each is x * s(x) with s(x) + s(-x) = 1, so it is max(0, x) - m(|x|) with m(a) = a * s(-a), which is at most
// 0.3 and vanishes for large a. Each of the segments of equal length has a polynomial in the distance from
// its middle. That takes about half of the operations of an exponential, and no division.
#pragma once

#include <array>
#include <cstddef>

#include "../../model/model.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kSegments = 32;  // the floats of two vectors of sixteen

// Evaluated at compile time only: library functions round differently from system to system.
constexpr double exponential(double x) {
  constexpr int kHalvings = 6, kTerms = 14;
  const double part = x / (1 << kHalvings);
  double term = 1, sum = 1;
  for (int n = 1; n <= kTerms; ++n) sum += term *= part / n;
  for (int i = 0; i < kHalvings; ++i) sum *= sum;
  return sum;
}

// erf(z) = 2 / sqrt(pi) * exp(-z^2) * sum of 2^n z^(2n + 1) / (1 * 3 * ... * (2n + 1)).
constexpr double error_function(double z) {
  double term = z, sum = z;
  for (int n = 1; n <= 80; ++n) sum += term *= 2 * z * z / (2 * n + 1);
  return 1.1283791670955126 * exponential(-z * z) * sum;
}

template <Activation kActivation>
constexpr double missing(double a) {
  if constexpr (kActivation == Activation::kGeluErf)
    return a / 2 * (1 - error_function(a * 0.7071067811865476));
  const double z = kActivation == Activation::kSilu ? a : 1.5957691216057308 * (a + 0.044715 * a * a * a);
  return a / (1 + exponential(z));
}

// kLimit is the middle of the last segment, where the missing part is below 1e-7.
template <Activation kActivation>
struct ActivationTable {
  static constexpr bool kIsWide = kActivation == Activation::kSilu;
  static constexpr int kTerms = kIsWide ? 7 : 5;
  static constexpr float kLimit = kIsWide ? 20.0f : 5.8f, kPerUnit = (kSegments - 1) / kLimit;
  // Coefficients of powers of the distance from the middle of a segment, in segments.
  alignas(64) std::array<std::array<float, kSegments>, kTerms> coefficients;
};

// Interpolates at Chebyshev nodes; the middle, exact at 0, comes first.
template <Activation kActivation>
constexpr ActivationTable<kActivation> activation_table() {
  using Table = ActivationTable<kActivation>;
  constexpr int kTerms = Table::kTerms;
  constexpr std::array<double, 7>
      kSeven = {0, 0.4874639561, -0.4874639561, 0.3909157412, -0.3909157412, 0.2169418696, -0.2169418696},
      kFive = {0, 0.4755282581, -0.4755282581, 0.2938926261, -0.2938926261};
  constexpr std::array<double, 7> kNodes = kTerms == 7 ? kSeven : kFive;
  Table table{};
  for (std::size_t s = 0; s < kSegments; ++s) {
    std::array<double, kTerms> difference{}, power{};
    for (std::size_t i = 0; i < kTerms; ++i)
      difference[i] = missing<kActivation>((double(s) + kNodes[i]) / double(Table::kPerUnit));
    for (std::size_t step = 1; step < kTerms; ++step)
      for (std::size_t i = kTerms - 1; i >= step; --i)
        difference[i] = (difference[i] - difference[i - 1]) / (kNodes[i] - kNodes[i - step]);
    for (std::size_t i = kTerms; i-- > 0;) {  // power = power * (x - node) + difference
      for (std::size_t k = kTerms - 1; k > 0; --k) power[k] = power[k - 1] - kNodes[i] * power[k];
      power[0] = difference[i] - kNodes[i] * power[0];
    }
    for (std::size_t k = 0; k < kTerms; ++k) table.coefficients[k][s] = float(power[k]);
  }
  return table;
}

template <Activation kActivation>
constexpr ActivationTable<kActivation> kActivationTable = activation_table<kActivation>();

}  // namespace
}  // namespace metal_prefill::cpu
