// Whether an unknown GPU can run the kernels, and one with matrix units those for them.
#pragma once

#import <Metal/Metal.h>

#include <string>

namespace metal_prefill::metal {

// Runs the kernel `trial`. Empty if its results are right; otherwise describes the error.
std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue);
// The same of the kernels `matmul_tensor`, with weights in half precision, and of `attention_tensor`: why
// none of them is used, or why tall tiles, or those of attention, are not. Empty if all are used.
struct TensorFailures {
  std::string any = {}, tall = {}, attention = {};
};
// From the file in a folder, which is specific to one build of the system and one version of the package, or
// else by the trial, whose result is then stored there; empty: nothing is stored.
TensorFailures stored_failures_of_tensor_trial(id<MTLDevice> device, id<MTLCommandQueue> queue,
                                               const std::string& folder);

}  // namespace metal_prefill::metal
