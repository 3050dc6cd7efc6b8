// Models that the engine supports.
#pragma once

#include "../../engine/engine.h"

namespace metal_prefill::metal {

// Throws UnsupportedModelError, with the property and its limit, if the kernels do not suit the model even
// after padding. The model must be valid.
void check_supported(const Model& model, const EngineOptions& options);

}  // namespace metal_prefill::metal
