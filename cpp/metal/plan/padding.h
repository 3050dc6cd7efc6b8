// Padding of models whose dimensions do not suit the kernels.
#pragma once

#include "../../model/model.h"

namespace metal_prefill::metal {

inline constexpr int kItem = 8;  // values that kernels read at a time

// Whether every dimension is a multiple of kItem.
bool fits_kernels(const Config& config);

// Returns a copy of a supported model with its dimensions rounded up to multiples of kItem. Zeros in the
// weights keep the added dimensions zero throughout, so that results are those of the original. The embedding
// of layer inputs, which the host reads, is not padded.
Model pad_model(const Model& original);

}  // namespace metal_prefill::metal
