// Products of bfloat16 weights, where they lie in the file, with activations rounded to bfloat16, in pairs of
// columns (AVX512_BF16): twice the multiply-adds of an instruction in float32. Sums are float32.
#pragma once

#include "simd_bf16.h"
#include "tile_float.h"

namespace metal_prefill::cpu {
namespace {

struct PairProduct {
  using Weight = std::uint16_t;
  using Value = std::uint16_t;
  static constexpr int kColumns = kPairPad;
  static constexpr bool kFetchesPages = true;
  static constexpr int kTokens = 6;  // by 4 rows: 24 sums, 4 of weights, one of activations

  static __m512i weight(const Weight* p) { return _mm512_loadu_si512(p); }
  static __m512i value(const Value* p) { return _mm512_load_si512(p); }
  static F add(F acc, __m512i weight, __m512i value) { return multiply_pairs(acc, weight, value); }
};
constexpr int kPairRows = 4;

// Up to as many tokens wait for memory, whatever the tile.
constexpr int kFewPairTokens = PairProduct::kTokens;

void multiply_bfloat16(const std::uint16_t* weight, std::size_t weight_stride, int cols, const PairRows& x,
                       int first, int count, float* out, std::size_t stride, const PrefetchRange& next) {
  const Operands<PairProduct> from{weight, weight_stride, x.row(first), x.stride, cols};
  if (count <= kFewPairTokens)
    multiply_rows<PairProduct, 1>(from, count, out, stride, {});
  else
    multiply_rows<PairProduct, kPairRows>(from, count, out, stride, next);
}

void round_to_bfloat16(const float* x, int n, std::uint16_t* out) {
  for (int i = 0; i < n; i += Simd::kLanes) {
    const __mmask16 lanes = lanes_below(n - i);
    _mm256_mask_storeu_epi16(
        out + i, lanes, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, x + i))));
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
