// Vectors of eight: AVX2 with FMA and F16C, and 8-bit products with AVX-VNNI if the file is built for it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "packing.h"
#include "simd_ops.h"

namespace metal_prefill::cpu {
namespace {

struct Vectors {
  using F = __m256;
  using I = __m256i;
  static I set_int(std::int32_t x) { return _mm256_set1_epi32(x); }
};

struct Simd : SimdOps<Vectors> {
  static constexpr const char* kName = "avx2";
  // 16 registers. Products of bytes, few tokens: an integer and a float sum for each token, codes, a nibble
  // mask and temporaries. A second row vector would halve the tokens that share the unpacking of a nibble.
  static constexpr int kInt8Rows = 1, kInt8RowsOfOne = 4;
  // More tokens: 2 vectors of rows by 4 tokens are 8 integer sums; 2 of codes, an activation and temporaries.
  // With 12 sums GCC loads codes again for each product.
  static constexpr int kUnpackedRows = 2, kUnpackedTokens = 4;
#ifdef __AVXVNNI__
  static constexpr int kInt8Tokens = 4;
  static constexpr bool kOneDot = true;  // dot() is one instruction
#else
  static constexpr bool kOneDot = false;
  static constexpr int kInt8Tokens = 6;  // 8.0 cycles each instead of 8.5, by instruction count
#endif
  // Products of floats: 12 sums need 7 loads. 1.3 times as fast as 4 by 2, 1.2 times as 2 by 6. In panels, 2
  // by 6 sums need 8 loads.
  static constexpr int kFloatRows = 4, kFloatTokens = 3, kFloatPanelTokens = 6;
  static constexpr int kPanelVectors = 2, kPanelTokens = kOneDot ? 6 : 4, kRotatedZero = 128;
  static constexpr int kAttentionRows = 3, kAttentionVectors = 4, kLaneSteps = 4;
  static constexpr int kNarrowVectors = 4;

  static F set(float x) { return _mm256_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static float reduce_add(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float reduce_max(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static I round(F a) { return _mm256_cvtps_epi32(a); }  // to nearest even
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  // Exchanges lanes whose indices differ in exactly these bits: 1, 2, 3, or four times that.
  template <int kBits>
  static F swap(F a) {
    constexpr int kOrders[] = {0xe4, 0xb1, 0x4e, 0x1b}, kOrder = kOrders[kBits % 4];
    if constexpr (kBits == 4) return _mm256_permute2f128_ps(a, a, 1);
    return _mm256_permute_ps(a, kOrder);
  }
  static std::int32_t reduce_max(I a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 1)));
  }

  // Loads four floats of each of two rows, the first of which begins at p.
  static F load_quads(const float* p, std::size_t stride) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + stride), 1);
  }
  static void store_quads(float* p, std::size_t stride, F a) {
    _mm_storeu_ps(p, _mm256_castps256_ps128(a));
    _mm_storeu_ps(p + stride, _mm256_extractf128_ps(a, 1));
  }
  // Lane i of quad q of a[j] becomes lane j of quad q of a[i].
  static void transpose_quads(F (&a)[4]) {
    const __m256d low[2] = {_mm256_castps_pd(_mm256_unpacklo_ps(a[0], a[1])),
                            _mm256_castps_pd(_mm256_unpacklo_ps(a[2], a[3]))},
                  high[2] = {_mm256_castps_pd(_mm256_unpackhi_ps(a[0], a[1])),
                             _mm256_castps_pd(_mm256_unpackhi_ps(a[2], a[3]))};
    a[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low[0], low[1]));
    a[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low[0], low[1]));
    a[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high[0], high[1]));
    a[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high[0], high[1]));
  }

  static F load_half(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_half(std::uint16_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  // GCC widens the vectors of simd_ops.h in registers, with three times as many instructions.
  static F load_bfloat16(const std::uint16_t* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  static void store_int8(std::int8_t* p, I a) {  // values within -128..127
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  // Stores 32 values within -128..127, and computes the sums of the first and of the last 16.
  static void store_block(std::int8_t* p, const I (&a)[4], std::uint32_t (&sums)[2]) {
    // Packing alternates between halves of vectors: four bytes each of a[0] to a[3] in either half.
    const __m256i words[2] = {_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3])};
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]),
                                                      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    fours = _mm256_add_epi32(fours, _mm256_unpackhi_epi64(fours, fours));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 1));
    sums[0] = std::uint32_t(_mm_cvtsi128_si32(_mm256_castsi256_si128(fours)));
    sums[1] = std::uint32_t(_mm_cvtsi128_si32(_mm256_extracti128_si256(fours, 1)));
  }
  static void store_int16(std::int16_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }
  // acc + the products of two integers in 16 bits in each lane.
  static I dot_halfwords(I acc, I a, I b) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(acc, a, b);
#else
    return in_register(_mm256_add_epi32(acc, _mm256_madd_epi16(a, b)));
#endif
  }
  static void store_low_bytes(std::int8_t* p, I a) {  // the lowest byte of each lane
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(255));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  static std::int32_t reduce_add(I a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 1)));
  }

  // Products of 8-bit integers: four bytes to a lane.
  // Keeps a vector in a register. GCC would add sums of a block in a tree, and reload codes for each product.
  static I in_register(I a) {
    asm("" : "+x"(a));
    return a;
  }
  static I load_codes(const std::uint8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_codes(std::uint8_t* p, I a) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), a); }
  template <int kBits>
  static I shift_left(I a) {  // GCC would shift integers before they are broadcast
    return _mm256_slli_epi32(a, kBits);
  }
  static I load_table(const std::uint8_t* p) {  // of 16 bytes
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I look_up(I table, I codes) { return _mm256_shuffle_epi8(table, codes); }
  static I load_int8(const std::int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_uint8(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }

#ifdef __AVXVNNI__
  template <int kZero>
  static constexpr bool kStartsFromSum = kZero != 0;
  template <int kZero>
  static I dot(I acc, I codes, I x) {
    return _mm256_dpbusd_avx_epi32(acc, codes, x);
  }
#else
  // Sixteen bits hold the products of a block of 4-bit codes: 32 * 15 * 127 / 2 in each half of a lane.
  using Halfwords = I;
  static Halfwords no_halfwords() { return set_int(0); }
  static I add_pairs(I acc, I codes, I x) {
    return in_register(_mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, x)));
  }
  static I add_halfwords(I a, I b) { return _mm256_add_epi16(a, b); }
  static I sum_halfwords(I acc, I pairs, I factors = _mm256_set1_epi16(1)) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, factors));
  }
  // As above for two steps of codes up to 63, times factors in 16 bits.
  static constexpr bool kScalesHalfwords = true;
  static I add_two_pairs(I acc, I codes, I x, I next_codes, I next_x, I factors) {
    return in_register(
        sum_halfwords(acc, add_pairs(_mm256_maddubs_epi16(codes, x), next_codes, next_x), factors));
  }
  // Joins the low halves of two vectors' lanes.
  static I halfwords(I low, I high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa); }
  // maddubs adds pairs of products in 16 bits: codes up to 63 fit (2 * 63 * 127), bytes do not. Bytes are
  // centred, and the sign of the weight moves to the activation: |w| <= 128 as unsigned, 2 * 128 * 127 <
  // 2^15.
  template <int kZero>
  static constexpr bool kStartsFromSum = kZero > 0 && kZero != 128;
  template <int kZero>
  static I dot(I acc, I codes, I x) {
    __m256i pairs;
    if constexpr (kZero == 128) {
      const __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    } else {
      pairs = _mm256_maddubs_epi16(codes, x);
    }
    return in_register(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
  // For dot<0> with codes up to 255: halves the pairs of 32 bytes whose sum exceeds 128 in magnitude, and
  // stores the differences. Returns the lanes of such pairs as bits.
  static unsigned halve_pairs(std::byte* p, std::int32_t (&halves)[kLanes]) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), x);
    const __m256i over = _mm256_cmpgt_epi16(_mm256_abs_epi16(sums), _mm256_set1_epi16(128));
    if (_mm256_testz_si256(over, over)) return 0;
    const __m256i low = _mm256_and_si256(_mm256_srli_epi16(x, 1), _mm256_set1_epi8(0x7f)),  // of each byte
        sign = _mm256_set1_epi8(0x40), half = _mm256_sub_epi8(_mm256_xor_si256(low, sign), sign),
                  rest = _mm256_and_si256(half, over);
    _mm256_store_si256(reinterpret_cast<__m256i*>(halves), rest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_sub_epi8(x, rest));
    return ~unsigned(
               _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(over, _mm256_setzero_si256())))) &
           255;
  }
#endif
};

}  // namespace
}  // namespace metal_prefill::cpu
