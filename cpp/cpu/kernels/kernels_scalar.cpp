// Plain C++ for any machine: readable, and what the other sets are tested against.
#include "simd_scalar.h"
#include "table.h"

namespace metal_prefill::cpu {

const Kernels& kernels_scalar() {
  return kTable;
}

}  // namespace metal_prefill::cpu
