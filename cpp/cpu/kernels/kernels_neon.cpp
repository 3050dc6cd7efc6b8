// NEON alone: 64-bit Arm before the dot product extension (Cortex-A72 and older). 8-bit products are widened
// to 16 bits.
#include "simd_neon.h"
#include "table.h"

namespace metal_prefill::cpu {

const Kernels& kernels_neon() {
  return kTable;
}

}  // namespace metal_prefill::cpu
