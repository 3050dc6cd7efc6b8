// AVX2, FMA and F16C: x86 since about 2013. 8-bit products go through 16-bit pairs (maddubs).
#include "simd_avx2.h"
#include "table.h"

namespace metal_prefill::cpu {

const Kernels& kernels_avx2() {
  return kTable;
}

}  // namespace metal_prefill::cpu
