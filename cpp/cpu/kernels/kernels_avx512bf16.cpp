// AVX-512 with VNNI and products of bfloat16 pairs, for attention: Intel servers since 2023, AMD since Zen 4.
#include "simd_avx512.h"
#include "store_pairs.h"
#include "tile_attention_bf16.h"
#include "tile_pairs.h"
#include "tile_peak.h"

namespace metal_prefill::cpu {
namespace {

double run_bfloat16(int rounds) {
  const auto start = [](const std::uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); };
  const auto load = [](const std::uint8_t* p) { return _mm512_load_si512(p); };
  run_chains(rounds, start, load, [](F acc, __m512i x) ALWAYS_INLINE { return multiply_pairs(acc, x, x); });
  return double(rounds) * kPeakChains * Simd::kLanes * 2;
}

}  // namespace

// Multiplies weights in bfloat16 by pairs, and keeps a cache in f16 as pairs.
const Kernels& kernels_avx512bf16() {
  static const Kernels set = [] {
    Kernels table = kernels_avx512vnni();
    table.name = "avx512bf16";
    table.multiply_pairs = multiply_pair_blocks;
    table.widen_to_pairs = widen_to_pairs;
    table.round_to_bfloat16 = round_to_bfloat16;
    table.half_layout = KvLayout::kPairs;
    table.key_multiple = 2;
    table.store_keys = store_key_pairs;
    table.store_values = store_value_pairs;
    table.attention = attention_of_pairs<VectorTiles>;
    table.run_bfloat16 = run_bfloat16;
    return table;
  }();
  return set;
}

}  // namespace metal_prefill::cpu
