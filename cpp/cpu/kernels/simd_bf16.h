// Products of bfloat16 pairs (AVX512_BF16). Pairs are integers until they are multiplied: clang 16 supports
// few operations on vectors of bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "simd_avx512.h"

namespace metal_prefill::cpu {

const Kernels& kernels_avx512vnni();  // which sets with pairs extend

namespace {

inline __m512 multiply_pairs(__m512 acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline __m512i broadcast_pair(const std::uint16_t* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  __m512i pairs = _mm512_set1_epi32(pair);
#if defined(__clang__) && (__clang_major__ == 16 || __clang_major__ == 17)
  asm("" : "+v"(pairs));  // clang 16 crashes on products with a broadcast operand
#endif
  return pairs;
}
inline __m512i round_to_pairs(__m512 low, __m512 high) {  // lanes of `low`, then of `high`
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Order in which the elements of round_to_pairs(even, odd) become adjacent pairs.
alignas(64) constexpr std::uint16_t kPairOrder[] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                    21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Mask of the first `n` of 16 lanes.
inline __mmask16 lanes_below(int n) {
  return n >= Simd::kLanes ? __mmask16(-1) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1);
}

}  // namespace
}  // namespace metal_prefill::cpu
