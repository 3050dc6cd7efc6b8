// The length of a vector. Sums use NumPy's order, so that they are bit-identical to NumPy's on every
// processor.
#pragma once

#include <span>

namespace metal_prefill {

// Sums pairwise in double precision.
double sum_of_squares(std::span<const float> vector);

// Divides a vector by its length. Leaves a zero vector unchanged.
void normalize(std::span<float> vector);

}  // namespace metal_prefill
