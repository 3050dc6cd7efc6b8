// Plain C++ for any machine: readable, and what the other sets are tested against.
#include "simd_scalar.h"
#include "table.h"

namespace metal_prefill::cpu {

extern const Kernels kKernels_scalar;
const Kernels kKernels_scalar = kTable;

}  // namespace metal_prefill::cpu
