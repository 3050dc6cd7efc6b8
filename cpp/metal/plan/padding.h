// Padding of models whose dimensions do not suit the kernels.
#pragma once

#include "../../model/model.h"

namespace metal_prefill::metal {

// The kernels read rows in items of 8 values: true if every dimension is a multiple of 8.
bool fits_kernels(const Config& config);

// A copy of the model with its dimensions rounded up to multiples of 8. Zeros in the weights keep the added
// dimensions zero throughout, so the results are those of the original. The embedding of the inputs of
// layers, which the host reads, stays as it is. Throws UnsupportedModelError for models that cannot be
// padded.
Model pad_model(const Model& original);

}  // namespace metal_prefill::metal
