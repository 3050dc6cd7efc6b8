// Plain C++ for any machine: readable, and the reference of tests for the other sets.
#include "simd_scalar.h"
#include "table.h"

namespace metal_prefill::cpu {

const Kernels& kernels_scalar() {
  return kTable;
}

}  // namespace metal_prefill::cpu
