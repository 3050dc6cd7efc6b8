// NEON with 4-way dot products (sdot): Apple M1, and Arm's cores since Cortex-A76 and Neoverse N1.
#include "tile_neon.h"

namespace metal_prefill::cpu {

extern const Kernels kKernels_neon_dotprod;
const Kernels kKernels_neon_dotprod = neon_table<DotProduct>("neon_dotprod");

}  // namespace metal_prefill::cpu
