// Passes over the logits of a whole vocabulary. Sums use a fixed order and no fused operations, so that they
// are bit-identical on every processor.
#pragma once

#include <span>

namespace metal_prefill {

// The largest value, -inf if there is none. Values are not NaN.
float largest_of(std::span<const float> values);

// Index of the first NaN, or -1.
int first_nan(std::span<const float> values);

// Sum of exp(value - largest), where no value is above `largest`, which is finite.
double sum_exp(std::span<const float> values, double largest);

// weights[i] = exp((values[i] - largest) * factor), where factor is positive and finite.
void exp_weights(std::span<const float> values, double largest, double factor, double* weights);
double sum(std::span<const double> weights);

}  // namespace metal_prefill
