// The length of a vector. Sums are made in the order of NumPy's, so that they are bitwise the same as those
// and on every processor.
#pragma once

#include <span>

namespace metal_prefill {

// By halves, in double precision.
double sum_of_squares(std::span<const float> vector);

// Divides a vector by its length; one of length 0 stays.
void normalize(std::span<float> vector);

}  // namespace metal_prefill
