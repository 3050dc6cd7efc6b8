// The length of a vector. Sums use NumPy's order, so that they are bit-identical to NumPy's on every
// processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace metal_prefill {

// Sums pairwise in double precision.
inline double sum_of_squares(std::span<const float> vector) {
  constexpr std::size_t kSums = 8, kMostAtOnce = 128;
  const std::size_t n = vector.size();
  if (n > kMostAtOnce) {
    const std::size_t half = n / 2 / kSums * kSums;
    return sum_of_squares(vector.first(half)) + sum_of_squares(vector.subspan(half));
  }
  const auto square = [](float x) { return double(x) * double(x); };  // exact
  const std::size_t whole = n / kSums * kSums;
  double sums[kSums] = {};
  for (std::size_t i = 0; i < whole; i += kSums)
    for (std::size_t j = 0; j < kSums; ++j) sums[j] += square(vector[i + j]);
  double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (const float rest : vector.subspan(whole)) sum += square(rest);
  return sum;
}

// Divides a vector by its length. Leaves a zero vector unchanged.
inline void normalize(std::span<float> vector) {
  // Avoids division by 0; no other float32 vector is this short.
  const double length = std::max(std::sqrt(sum_of_squares(vector)), std::numeric_limits<double>::min());
  for (float& x : vector) x = float(double(x) / length);
}

}  // namespace metal_prefill
