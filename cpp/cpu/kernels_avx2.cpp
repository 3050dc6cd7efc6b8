// AVX2, FMA and F16C: x86 since about 2013. 8-bit products go through 16-bit pairs (maddubs).
#include "simd_avx2.h"
#include "table.h"

namespace metal_prefill::cpu {

extern const Kernels kKernels_avx2;
const Kernels kKernels_avx2 = kTable;

}  // namespace metal_prefill::cpu
