// NEON with 4-way dot products (sdot): Apple M1, and Arm's cores since Cortex-A76 and Neoverse N1.
#include "simd_neon.h"
#include "table.h"
#include "tile_neon.h"

namespace metal_prefill::cpu {

const Kernels& kernels_neon_dotprod() {
  static constexpr Kernels table = neon_table<DotProduct>("neon_dotprod", kTable);
  return table;
}

}  // namespace metal_prefill::cpu
