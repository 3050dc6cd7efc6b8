// Vectors of sixteen: AVX-512 with VNNI. A panel of weights is one vector.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "packing.h"
#include "simd_ops.h"

namespace metal_prefill::cpu {
namespace {

struct Vectors {
  using F = __m512;
  using I = __m512i;
  static I set_int(std::int32_t x) { return _mm512_set1_epi32(x); }
};

struct Simd : SimdOps<Vectors> {
  static constexpr const char* kName = "avx512vnni";
  // 32 registers. 2 panels by 6 tokens: 12 integer and 12 float sums, 4 of codes, the nibble mask;
  // activations come as broadcast operands. Seven tokens spill.
  static constexpr int kInt8Rows = 2, kInt8RowsOfOne = 2, kInt8Tokens = 6;
  static constexpr bool kJoinsHalves = true;
  static constexpr int kPanelVectors = 2, kPanelTokens = 12, kRotatedZero = 128;  // 24 sums
  static constexpr int kFloatRows = 4, kFloatTokens = 6, kFloatPanelTokens = 12;
  static constexpr int kAttentionRows = 6, kAttentionVectors = 4, kLaneSteps = 8;
  static constexpr int kNarrowVectors = 2;
  static constexpr bool kOneDot = true;  // dot() is one instruction

  static F set(float x) { return _mm512_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // a / b if b > 0, else 0.
  static F positive_quotient(F a, F b) {
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(b, _mm512_setzero_ps(), _CMP_GT_OQ), a, b);
  }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b if either is NaN
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  // Reduces four vectors at once.
  template <typename Op>
  static __m128i reduce4(const I (&a)[4], Op op) {
    const I ab = op(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    const I cd = op(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    const I abcd = op(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const I half = op(abcd, _mm512_shuffle_i64x2(abcd, abcd, 0x4e));
    return _mm512_castsi512_si128(op(half, _mm512_shuffle_i64x2(half, half, 0xb1)));
  }
  static F reduce_max4(const I (&a)[4]) {  // bits of floats, in the first lanes
    const __m128i largest = reduce4(a, [](I x, I y) { return _mm512_max_epi32(x, y); });
    return _mm512_zextps128_ps512(_mm_castsi128_ps(largest));
  }
  template <typename Op>
  static void reduce_floats4(const F (&a)[4], float* out, Op op) {
    const I bits[4] = {_mm512_castps_si512(a[0]), _mm512_castps_si512(a[1]), _mm512_castps_si512(a[2]),
                       _mm512_castps_si512(a[3])};
    const __m128i result = reduce4(bits, [&](I x, I y) {
      return _mm512_castps_si512(op(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y)));
    });
    _mm_storeu_ps(out, _mm_castsi128_ps(result));
  }
  static void reduce_add4(const F (&a)[4], float* out) {
    reduce_floats4(a, out, [](F x, F y) { return x + y; });
  }
  static void reduce_max4(const F (&a)[4], float* out) {
    reduce_floats4(a, out, [](F x, F y) { return max(x, y); });
  }
  static void reduce_add4(const I (&a)[4], std::int32_t (&out)[4]) {
    const __m128i sum = reduce4(a, [](I x, I y) { return _mm512_add_epi32(x, y); });
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sum);
  }
  static I round(F a) { return _mm512_cvtps_epi32(a); }  // to nearest even
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  // Exchanges lanes whose indices differ in exactly these bits: 1, 2, 3, or four times that.
  template <int kBits>
  static F swap(F a) {
    constexpr int kOrders[] = {0xe4, 0xb1, 0x4e, 0x1b}, kOrder = kOrders[kBits < 4 ? kBits : kBits / 4];
    if constexpr (kBits < 4) return _mm512_permute_ps(a, kOrder);
    return _mm512_shuffle_f32x4(a, a, kOrder);
  }
  // a if x >= limit or x is NaN, else 0.
  static F zero_below(F a, F x, F limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
  }
  static std::int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a); }
  static F magnitude(F a) { return _mm512_abs_ps(a); }
  // Selects one of 32 floats by the lowest five bits of each lane.
  static F look_up32(const float* table, F bits) {
    return _mm512_permutex2var_ps(_mm512_load_ps(table), _mm512_castps_si512(bits),
                                  _mm512_load_ps(table + 16));
  }

  // Loads four floats of each of four rows, the first of which begins at p.
  static F load_quads(const float* p, std::size_t stride) {
    __m512 a = _mm512_castps128_ps512(_mm_loadu_ps(p));
    a = _mm512_insertf32x4(a, _mm_loadu_ps(p + stride), 1);
    a = _mm512_insertf32x4(a, _mm_loadu_ps(p + 2 * stride), 2);
    return _mm512_insertf32x4(a, _mm_loadu_ps(p + 3 * stride), 3);
  }
  static void store_quads(float* p, std::size_t stride, F a) {
    _mm_storeu_ps(p, _mm512_castps512_ps128(a));
    _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(a, 1));
    _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(a, 2));
    _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(a, 3));
  }
  // Lane i of quad q of a[j] becomes lane j of quad q of a[i].
  static void transpose_quads(F (&a)[4]) {
    const __m512d low[2] = {_mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1])),
                            _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3]))},
                  high[2] = {_mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1])),
                             _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]))};
    a[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low[0], low[1]));
    a[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low[0], low[1]));
    a[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high[0], high[1]));
    a[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high[0], high[1]));
  }

  static F load_half(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_half(std::uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  // GCC widens the vectors of simd_ops.h in registers, with three times as many instructions.
  static F load_bfloat16(const std::uint16_t* p) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static void store_int8(std::int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  // Packs four vectors of codes into bytes, in order.
  static I pack_codes(const I (&a)[4]) {
    const I bytes = _mm512_packs_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    bytes);
  }
  static void store_bytes(std::int8_t* p, I a) { _mm512_storeu_si512(p, a); }
  static void store_int16(std::int16_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
  }
  // acc + the products of two integers in 16 bits in each lane.
  static I dot_halfwords(I acc, I a, I b) {
#ifdef __clang__
    return _mm512_dpwssd_epi32(acc, a, b);
#else
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));  // as in dot()
    return acc;
#endif
  }
  static void store_low_bytes(std::int8_t* p, I a) { store_int8(p, a); }  // the lowest byte of each lane
  static std::int32_t reduce_add(I a) {  // modulo 2^32, which _mm512_reduce_add_epi32 of GCC does not define
    const __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    x = _mm_add_epi32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 1)));
  }

  // Products of 8-bit integers: four bytes to a lane.
  static I load_codes(const std::uint8_t* p) { return _mm512_load_si512(p); }
  static void store_codes(std::uint8_t* p, I a) { _mm512_store_si512(p, a); }
  template <int kBits>
  static I shift_left(I a) {  // GCC would shift integers before they are broadcast
    return _mm512_slli_epi32(a, kBits);
  }
  static I load_table(const std::uint8_t* p) {  // of 16 bytes
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I look_up(I table, I codes) { return _mm512_shuffle_epi8(table, codes); }
  static I load_int8(const std::int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_uint8(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <int kZero>
  static constexpr bool kStartsFromSum = kZero != 0;
  template <int kZero>
  static I dot(I acc, I codes, I x) {
#ifdef __clang__
    return _mm512_dpbusd_epi32(acc, codes, x);
#else  // GCC 12 copies each sum before the intrinsic adds to it, and spills half of 24 sums
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
    return acc;
#endif
  }
};

}  // namespace
}  // namespace metal_prefill::cpu
