#include "softmax.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../base/processor.h"

// The default target of x86 has vectors of two doubles; these functions take half the time with vectors of
// four.
#if defined(__x86_64__)
#define METAL_PREFILL_WIDE __attribute__((target("avx2")))
#else
#define METAL_PREFILL_WIDE
#endif
#define METAL_PREFILL_INLINE inline __attribute__((always_inline))

namespace metal_prefill {

namespace {

constexpr std::size_t kLanes = 16;  // partial results that do not wait for each other
constexpr double kLowest = -700;    // smaller values have weight 0: no sum of such small weights matters

bool has_wide_vectors() {
  static const bool has = processor_features().avx2;
  return has;
}

// exp(x) for x <= 0, -inf included: 2^n * exp(r) with |r| <= ln(2) / 2, where the Taylor polynomial of degree
// 12 is exact to 2e-16.
METAL_PREFILL_INLINE double exp_of(double x) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer, which is then in the lowest bits
  constexpr double kLog2e = 0x1.71547652b82fep0;
  constexpr double kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
  const double clamped = x < kLowest ? kLowest : x;
  const double shifted = clamped * kLog2e + kShift;
  const double n = shifted - kShift;
  const double r = (clamped - n * kLn2High) - n * kLn2Low;
  constexpr double kFactorials[] = {39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
  double p = 1.0 / 479001600;
#pragma GCC unroll 12
  for (const double factorial : kFactorials) p = p * r + 1.0 / factorial;
  const double power = std::bit_cast<double>((std::bit_cast<std::uint64_t>(shifted) + 1023) << 52);
  return x < kLowest ? 0.0 : p * power;
}

METAL_PREFILL_INLINE double sum_of_lanes(const double* lanes) {
  double total = 0;
  for (std::size_t j = 0; j < kLanes; ++j) total += lanes[j];
  return total;
}

METAL_PREFILL_INLINE double sum_exp_body(std::span<const float> values, double largest) {
  const float* x = values.data();
  const std::size_t n = values.size(), whole = n - n % kLanes;
  double lanes[kLanes] = {};
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += exp_of(double(x[i + j]) - largest);
  for (std::size_t i = whole; i < n; ++i) lanes[i - whole] += exp_of(double(x[i]) - largest);
  return sum_of_lanes(lanes);
}

METAL_PREFILL_INLINE void exp_weights_body(std::span<const float> values, double largest, double factor,
                                           double* weights) {
  const float* x = values.data();
  for (std::size_t i = 0; i < values.size(); ++i) weights[i] = exp_of((double(x[i]) - largest) * factor);
}

METAL_PREFILL_WIDE double sum_exp_wide(std::span<const float> values, double largest) {
  return sum_exp_body(values, largest);
}

METAL_PREFILL_WIDE void exp_weights_wide(std::span<const float> values, double largest, double factor,
                                         double* weights) {
  exp_weights_body(values, largest, factor, weights);
}

}  // namespace

float largest_of(std::span<const float> values) {
  const float* x = values.data();
  const std::size_t n = values.size(), whole = n - n % kLanes;
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  for (std::size_t i = whole; i < n; ++i) lanes[i - whole] = std::max(lanes[i - whole], x[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

int first_nan(std::span<const float> values) {
  const float* x = values.data();
  const std::size_t n = values.size(), whole = n - n % kLanes;
  int lanes[kLanes] = {};
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] |= x[i + j] != x[i + j];
  const bool any = std::any_of(lanes, lanes + kLanes, [](int lane) { return lane != 0; });
  for (std::size_t i = any ? 0 : whole; i < n; ++i)
    if (std::isnan(x[i])) return int(i);
  return -1;
}

double sum_exp(std::span<const float> values, double largest) {
  return has_wide_vectors() ? sum_exp_wide(values, largest) : sum_exp_body(values, largest);
}

void exp_weights(std::span<const float> values, double largest, double factor, double* weights) {
  if (has_wide_vectors()) return exp_weights_wide(values, largest, factor, weights);
  exp_weights_body(values, largest, factor, weights);
}

double sum(std::span<const double> weights) {
  const std::size_t n = weights.size(), whole = n - n % kLanes;
  double lanes[kLanes] = {};
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += weights[i + j];
  for (std::size_t i = whole; i < n; ++i) lanes[i - whole] += weights[i];
  return sum_of_lanes(lanes);
}

}  // namespace metal_prefill
