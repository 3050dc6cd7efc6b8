// AVX2 with AVX-VNNI: x86 client cores since about 2021. Four 8-bit products per lane in one instruction.
#include "simd_avx2.h"
#include "table.h"

namespace metal_prefill::cpu {

extern const Kernels kKernels_avxvnni;
const Kernels kKernels_avxvnni = kTable;

}  // namespace metal_prefill::cpu
