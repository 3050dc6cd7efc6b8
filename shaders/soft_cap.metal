// Soft limit of logits.
#include <metal_stdlib>

#include "args.h"
#include "soft_cap.h"

using namespace metal;

// Grid: n in threads.
kernel void soft_cap_in_place(device float* x [[buffer(0)]],  // [n]
                              constant SoftCapArgs& args [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i < args.n) x[i] = soft_cap(x[i], args.cap);
}
