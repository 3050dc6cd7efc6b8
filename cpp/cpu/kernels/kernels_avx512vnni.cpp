// AVX-512 with VNNI: x86 servers since about 2019, AMD since Zen 4.
#include "simd_avx512.h"
#include "table.h"

namespace metal_prefill::cpu {

const Kernels& kernels_avx512vnni() {
  return kTable;
}

}  // namespace metal_prefill::cpu
