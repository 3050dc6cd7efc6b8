// A trial of whether an unknown GPU can run the kernels.
#pragma once

#import <Metal/Metal.h>

#include <string>

namespace metal_prefill::metal {

// Runs the kernel `trial`. Returns an empty string if its results are right; otherwise describes the error.
std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue);

}  // namespace metal_prefill::metal
