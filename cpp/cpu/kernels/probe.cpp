// Compiled at configuration with the options of each instruction set, to test whether the compiler and its
// assembler support it. Some accept the options but lack an instruction or crash on one.
#if defined(__AMX_INT8__)
#include "amx_tiles.h"
#endif
#if defined(__AVX512BF16__)
#include "simd_bf16.h"
#endif
#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif
#include "tile_peak.h"

namespace metal_prefill::cpu {

double dots(int rounds) {
  return run_dots(rounds);
}
double fmas(int rounds) {
  return run_fmas(rounds);
}

#if defined(__AVX512BF16__)
__m512 pairs(const std::uint16_t* a, const __m512* b) {
  return multiply_pairs(b[0], broadcast_pair(a), round_to_pairs(b[1], b[2]));
}
#endif

#if defined(__AMX_INT8__)
void tiles(const void* a, const void* b, std::int32_t (&sums)[16][16]) {
  keep_tile_config<64>();
  load_tile<4, 16, 64>(a);
  load_tile<6, 16, 64>(b);
  multiply_tiles<0, 4, 6>();
  store_tile<0>(sums);
  drop_tile_config();
}
#endif

#if defined(__ARM_FEATURE_DOTPROD)
int32x4_t products(int32x4_t acc, int8x16_t a, int8x16_t b) {
  return vdotq_laneq_s32(acc, a, b, 3);
}
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
int32x4_t matrix_products(int32x4_t acc, int8x16_t a, int8x16_t b) {
  return vmmlaq_s32(acc, a, b);
}
#endif

}  // namespace metal_prefill::cpu
