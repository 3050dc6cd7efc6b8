// AVX2 with AVX-VNNI: x86 client cores since about 2021. Four 8-bit products per lane in one instruction.
#include "simd_avx2.h"
#include "tile_attention_q8.h"
#include "tile_gemm.h"
#include "tile_narrow.h"
#include "tile_peak.h"
#include "tile_rotated.h"

namespace metal_prefill::cpu {

const Kernels& kernels_avx2();  // which this set extends

namespace {

void attention_vnni(const AttentionHead& head, int first, int count) {
  if (head.layout == KvLayout::kQ8)
    attention_q8(head, first, count);
  else
    kernels_avx2().attention(head, first, count);
}

}  // namespace

// Replaces the products of 8-bit integers, and the blocks of weights for them.
const Kernels& kernels_avxvnni() {
  static const Kernels set = [] {
    Kernels table = kernels_avx2();
    table.name = "avxvnni";
    table.multiply_int8 = multiply_int8;
    table.multiply_narrow = multiply_narrow;
    table.widen = widen;
    table.multiply_rotated = multiply_rotated<Simd>;
    table.rotated_zero = kCodeZero;
    table.rotate = rotate;
    table.rotate_wide = wide_rotation<Simd>();
    table.limit_pairs = pair_limiter<Simd>();
    table.attention = attention_vnni;
    table.run_dots = run_dots;
    return table;
  }();
  return set;
}

}  // namespace metal_prefill::cpu
