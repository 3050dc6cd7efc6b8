// Stores keys and values in a cache of bfloat16 pairs (KvLayout::kPairs).
#pragma once

#include <algorithm>
#include <cstring>

#include "row_ops.h"
#include "simd_bf16.h"

namespace metal_prefill::cpu {
namespace {

// Sixteen values from `at` on, zeros from `dim` on, rounded to f16, the precision of a saved cache.
inline F half_values(const float* values, int at, int dim) {
  const F all = _mm512_maskz_loadu_ps(lanes_below(dim - at), values + at);
  return _mm512_cvtph_ps(_mm512_cvtps_ph(all, _MM_FROUND_TO_NEAREST_INT));
}

// Transposes 16 x 16 lanes.
inline void transpose(__m512i (&rows)[16]) {
  __m512i twos[16], fours[16];
  unrolled<8>([&](auto i) ALWAYS_INLINE {
    twos[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    twos[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  });
  unrolled<4>([&](auto g) ALWAYS_INLINE {
    unrolled<2>([&](auto i) ALWAYS_INLINE {
      fours[4 * g + 2 * i] = _mm512_unpacklo_epi64(twos[4 * g + i], twos[4 * g + 2 + i]);
      fours[4 * g + 2 * i + 1] = _mm512_unpackhi_epi64(twos[4 * g + i], twos[4 * g + 2 + i]);
    });
  });
  // Part p of fours[4 * g + k] has column 4 * p + k of rows 4 * g to 4 * g + 3.
  unrolled<4>([&](auto k) ALWAYS_INLINE {
    const __m512i even = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0x88),
                  odd = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0xdd),
                  next_even = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0x88),
                  next_odd = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0xdd);
    rows[k] = _mm512_shuffle_i32x4(even, next_even, 0x88);
    rows[4 + k] = _mm512_shuffle_i32x4(odd, next_odd, 0x88);
    rows[8 + k] = _mm512_shuffle_i32x4(even, next_even, 0xdd);
    rows[12 + k] = _mm512_shuffle_i32x4(odd, next_odd, 0xdd);
  });
}

// Rounded keys are rows with a pair of dimensions in each lane; a line of the cache holds sixteen positions
// of one pair.
void store_key_pairs(const float* key, std::size_t step, int count, int dim, int stride, KvLayout layout,
                     void* keys, int position) {
  constexpr int kFew = 4;  // rows for which transposing takes longer than storing lane by lane
  if (layout != KvLayout::kPairs)
    return kernels_avx512vnni().store_keys(key, step, count, dim, stride, layout, keys, position);
  const int first = position % kKeyBlock;
  auto* out = static_cast<std::uint16_t*>(keys) + (position - first) * 2;
  const auto positions = __mmask16(((1u << count) - 1) << first);
  for (int d = 0; d < dim; d += 2 * Simd::kLanes, out += Simd::kLanes * kKeyPairStep) {
    const int pairs = std::min(Simd::kLanes, ceil_div(dim - d, 2));
    alignas(64) __m512i rows[kKeyBlock] = {};
    for (int i = 0; i < count; ++i) {
      const float* values = key + std::size_t(i) * step;
      rows[first + i] =
          round_to_pairs(half_values(values, d, dim), half_values(values, d + Simd::kLanes, dim));
    }
    if (count < kFew) {
      for (int i = first; i < first + count; ++i)
        for (int pair = 0; pair < pairs; ++pair)
          std::memcpy(out + pair * kKeyPairStep + 2 * i,
                      reinterpret_cast<const std::uint32_t*>(rows + i) + pair, 2 * sizeof *out);
    } else {
      transpose(rows);
      for (int pair = 0; pair < pairs; ++pair)
        _mm512_mask_storeu_epi32(out + pair * kKeyPairStep, positions, rows[pair]);
    }
  }
}

// Interleaves the values of two positions.
void store_value_pairs(const float* value, std::size_t step, int count, int dim, int stride, KvLayout layout,
                       void* values, int position) {
  if (layout != KvLayout::kPairs)
    return kernels_avx512vnni().store_values(value, step, count, dim, stride, layout, values, position);
  const __m512i order = _mm512_load_si512(kPairOrder);
  for (int i = 0; i < count;) {
    const int at = position + i;
    const float* first = value + std::size_t(i) * step;
    auto* out = static_cast<std::uint16_t*>(values) + at / 2 * 2 * stride;
    const bool both = at % 2 == 0 && i + 1 < count;
    for (int d = 0; d < dim; d += Simd::kLanes) {
      const F own = half_values(first, d, dim), next = both ? half_values(first + step, d, dim) : own;
      const __m512i pairs = _mm512_permutexvar_epi16(order, round_to_pairs(own, next));
      const __mmask32 half = at % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
      const int left = dim - d;
      const __mmask32 lanes = left >= Simd::kLanes ? ~__mmask32(0) : (__mmask32(1) << 2 * left) - 1;
      _mm512_mask_storeu_epi16(out + 2 * d, both ? lanes : lanes & half, pairs);
    }
    i += both ? 2 : 1;
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
