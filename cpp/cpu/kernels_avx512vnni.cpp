// AVX-512 with VNNI: x86 servers since about 2019, AMD since Zen 4.
#include "simd_avx512.h"
#include "table.h"

namespace metal_prefill::cpu {

extern const Kernels kKernels_avx512vnni;
const Kernels kKernels_avx512vnni = kTable;

}  // namespace metal_prefill::cpu
