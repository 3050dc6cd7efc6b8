// Trials: whether an unknown GPU can run the kernels, and whether matrix units run their kernels.
#pragma once

#import <Metal/Metal.h>

#include <string>

namespace metal_prefill::metal {

// Runs the kernel `trial`. Returns an empty string if its results are right; otherwise describes the error.
std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue);
// Failures of the kernels `matmul_tensor`, with weights in half precision, and `attention_tensor`: why none
// of them is used (any), or why tall tiles or attention are not. Empty strings if all are used.
struct TensorFailures {
  std::string any = {}, tall = {}, attention = {};
};
// Reads the result from a file in `folder`, which is specific to one build of the system and one version of
// the package; otherwise runs the trial and stores the result there. If `folder` is empty, nothing is stored.
TensorFailures stored_failures_of_tensor_trial(id<MTLDevice> device, id<MTLCommandQueue> queue,
                                               const std::string& folder);

}  // namespace metal_prefill::metal
