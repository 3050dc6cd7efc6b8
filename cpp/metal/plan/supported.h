// Which models the engine computes.
#pragma once

#include "../../engine/engine.h"

namespace metal_prefill::metal {

// Throws UnsupportedModelError, with the property and its limit, if the kernels do not suit the model, also
// not with its dimensions padded. The model must be valid.
void check_supported(const Model& model, const EngineOptions& options);

}  // namespace metal_prefill::metal
