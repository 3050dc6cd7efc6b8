// AVX-512 with VNNI and products of bfloat16 pairs, for attention: Intel servers since 2023, AMD since Zen 4.
#include "simd_avx512.h"
#include "table.h"
#include "tile_attention_bf16.h"

namespace metal_prefill::cpu {
namespace {

constexpr Kernels bf16_table() {
  Kernels table = with_pairs(kTable, 2);
  table.name = "avx512bf16";
  table.attention = attention_of_pairs<VectorTiles>;
  return table;
}

}  // namespace

extern const Kernels kKernels_avx512bf16;
const Kernels kKernels_avx512bf16 = bf16_table();

}  // namespace metal_prefill::cpu
