// The length of a vector. Sums are made in NumPy's order, so that they are bitwise equal to its sums, on
// every processor.
#pragma once

#include <span>

namespace metal_prefill {

// By halves, in double precision.
double sum_of_squares(std::span<const float> vector);

// Divides a vector by its length; one of length 0 stays.
void normalize(std::span<float> vector);

}  // namespace metal_prefill
