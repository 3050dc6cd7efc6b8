// Causal attention with online softmax on products of bfloat16 pairs (AVX512_BF16), for a cache in f16.
//
// Queries, keys, weights of the softmax and values are rounded to 8 significant bits. The effect on logits is
// small compared with the rounding of activations to 8-bit integers (docs/cpu_kernels.md has the figures).
// Sums stay in float32. That halves the number of products. A strip of query rows (tokens times the heads of
// a group) goes through the keys together, so that each span of 64 positions is converted once for all of
// them. As in tile_attention.h, what a row computes does not depend on the rows next to it.
#pragma once

#include <algorithm>

#include "simd_bf16.h"
#include "tile_attention.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kStripRows = 96;  // 32 tokens of a group of three heads: converting a span costs 5% of its use
constexpr int kStripValues = 96 * 64;  // rows times dimensions: longer heads take fewer rows
constexpr int kMaxTileRows = 16;       // that a strip takes at least, whatever the head
constexpr int kPaddedDims = 32;        // queries and keys are filled up with zeros to a multiple of these
constexpr int kTileRows = 6;           // by 4 vectors: 24 sums, 4 of keys or values, one query
constexpr int kPairsOfSpan = kKeySpan / 2;
constexpr float kExp2Cubic[] = {0.69542432f, 0.22630768f, 0.07826797f};

static_assert(kStripValues <= kMaxTileRows * kMaxHeadDim);
struct alignas(64) AttentionStrip {
  std::uint16_t keys[kMaxHeadDim / 2][kKeySpan][2];  // pairs of dimensions
  // Pairs of positions, [pairs][value_stride][2]. Rows as far apart as the longest head needs would share few
  // sets of the L1 cache.
  std::uint16_t values[kPairsOfSpan * kMaxHeadDim * 2];
  std::uint16_t q[kMaxTileRows * kMaxHeadDim];  // [rows][q_stride], scaled: scores are base-2 logarithms
  float acc[kMaxTileRows * kMaxHeadDim];        // [rows][value_stride], sum of p * v
  float sum[kStripRows][16];                    // of p, in 16 parts
  float max[kStripRows + 16];                   // padded to whole vectors
  int begin[kStripRows], end[kStripRows];       // positions that the row sees
  int q_stride;                                 // key_dim, filled up with zeros
};

// Sixteen elements of two rows, interleaved. A row that is null is zero.
inline void interleave(const std::uint16_t* even, const std::uint16_t* odd, void* out) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both =
      round_to_pairs(even ? Simd::load_half(even) : Simd::set(0), odd ? Simd::load_half(odd) : Simd::set(0));
  _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
}

// The first `n` positions of a span, with values of zero up to a multiple of kPositions; later ones are not
// read.
template <int kPositions>
void convert_span(const AttentionHead& head, int span, int n, AttentionStrip& strip) {
  const auto* keys = static_cast<const std::uint16_t*>(head.keys_of(span));
  for (int lane = 0; lane < n; lane += kKeyBlock, keys += kKeyBlock * head.key_dim)
    for (int d = 0; d < head.key_dim; d += 2)
      interleave(keys + d * kKeyBlock, keys + (d + 1) * kKeyBlock, strip.keys[d / 2][lane]);
  const std::size_t stride = std::size_t(head.value_stride);
  const auto* values = static_cast<const std::uint16_t*>(head.values_of(span));
  for (int i = 0; i < round_up(n, kPositions); i += 2, values += 2 * stride)
    for (std::size_t column = 0; column < stride; column += Simd::kLanes)
      interleave(i < n ? values + column : nullptr, i + 1 < n ? values + stride + column : nullptr,
                 strip.values + (std::size_t(i / 2) * stride + column) * 2);
}

// scores[r][key] = q[r] . k[key] for kVectors * 16 positions.
template <int kRows, int kVectors>
void bf16_scores(const AttentionStrip& strip, const std::uint16_t* q, int key_dim,
                 float (*scores)[kKeySpan]) {
  F acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::set(0);
  for (int d = 0; d < key_dim; d += 2) {
    __m512i k[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) k[v] = _mm512_load_si512(strip.keys[d / 2][v * Simd::kLanes]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i value = broadcast_pair(q + r * strip.q_stride + d);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_pairs(acc[r][v], value, k[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) Simd::store(scores[r] + v * Simd::kLanes, acc[r][v]);
}

// 2^x for x <= 0, 0 where that is below 2^-200; NaN stays. Relative error below 2e-4: the result is rounded
// to bfloat16, with an error up to 2e-3.
inline F weight_exp2(F x) {
  const F clamped = Simd::max(Simd::set(-200.0f), x);
  const F f = _mm512_reduce_ps(clamped, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // within [0, 1)
  F p = Simd::set(kExp2Cubic[2]);  // exact at both ends, so that powers join without a step
  p = Simd::fma(p, f, Simd::set(kExp2Cubic[1]));
  p = Simd::fma(p, f, Simd::set(kExp2Cubic[0]));
  p = Simd::fma(p, f, Simd::set(1.0f));
  return _mm512_scalef_ps(p, clamped);  // by 2^floor(x)
}

// The positions of a span that a row sees, a bit for each.
inline std::uint64_t visible(const AttentionStrip& strip, int row, int span) {
  const auto below = [&](int position) {
    const int n = position - span * kKeySpan;
    return n <= 0 ? 0 : n >= kKeySpan ? ~std::uint64_t(0) : (std::uint64_t(1) << n) - 1;
  };
  return below(strip.end[row]) & ~below(strip.begin[row]);
}

// Positions of a span up to the last one that rows [row, row + rows) see; 0 where they see none of it.
inline int seen_positions(const AttentionStrip& strip, int row, int rows, int span) {
  const int first = span * kKeySpan, end = strip.end[row + rows - 1];
  return end <= first || strip.begin[row] >= first + kKeySpan ? 0 : std::min(kKeySpan, end - first);
}

// Scores of a span to weights in bfloat16; updates the maximum and the sum. Earlier results of row r
// must be multiplied by rescale[r].
inline __attribute__((always_inline)) void bf16_softmax(AttentionStrip& strip, int row, int rows, int span,
                                                        const float (*scores)[kKeySpan],
                                                        std::uint16_t (*p)[kKeySpan], float* rescale) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const F before = Simd::load(strip.max + row), nothing = Simd::set(-kInfinity);
  for (int r = 0; r < rows; ++r) {
    const std::uint64_t seen = visible(strip, row + r, span);
    F largest = nothing;
    for (int i = 0; i < kKeySpan; i += Simd::kLanes)
      largest = _mm512_mask_max_ps(largest, __mmask16(seen >> i), largest, Simd::load(scores[r] + i));
    const float span_max = Simd::reduce_max(largest);
    if (span_max > strip.max[row + r]) strip.max[row + r] = span_max;
  }
  const F after = Simd::load(strip.max + row);
  const __mmask16 same = _mm512_cmp_ps_mask(before, after, _CMP_EQ_OQ);  // also while a row has seen nothing
  Simd::store(rescale, _mm512_mask_mov_ps(weight_exp2(Simd::sub(before, after)), same, Simd::set(1)));
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (int r = 0; r < rows; ++r) {
    const float max = strip.max[row + r];
    const F shift = Simd::set(max == -kInfinity ? 0 : max);
    F sum = Simd::mul(Simd::load(strip.sum[row + r]), Simd::set(rescale[r]));
    const std::uint64_t seen = visible(strip, row + r, span);
    const auto weight = [&](int i) {
      const F score = Simd::load(scores[r] + i);
      return weight_exp2(Simd::sub(_mm512_mask_mov_ps(nothing, __mmask16(seen >> i), score), shift));
    };
    for (int i = 0; i < kKeySpan; i += 2 * Simd::kLanes) {
      const __m512i weights = round_to_pairs(weight(i), weight(i + Simd::kLanes));
      _mm512_store_si512(p[r] + i, weights);
      sum = multiply_pairs(sum, weights, ones);
    }
    Simd::store(strip.sum[row + r], sum);
  }
}

// acc = acc * rescale + p * v over `pairs` pairs of positions, for kVectors vectors of columns.
template <int kRows, int kVectors>
void bf16_values(const AttentionStrip& strip, const std::uint16_t (*p)[kKeySpan], const float* rescale,
                 int pairs, int column, int stride, float* out) {
  F acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = Simd::mul(Simd::load(out + r * stride + column + v * Simd::kLanes), Simd::set(rescale[r]));
  for (int i = 0; i < pairs; ++i) {
    __m512i value[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      value[v] = _mm512_load_si512(strip.values + (i * stride + column + v * Simd::kLanes) * 2);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i weight = broadcast_pair(p[r] + 2 * i);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_pairs(acc[r][v], weight, value[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) Simd::store(out + r * stride + column + v * Simd::kLanes, acc[r][v]);
}

template <int kRows>
void bf16_tile(const AttentionHead& head, int span, int row, AttentionStrip& strip) {
  const int n = seen_positions(strip, row, kRows, span);
  if (n == 0) return;
  alignas(64) float scores[kRows][kKeySpan];
  alignas(64) std::uint16_t p[kRows][kKeySpan];
  alignas(64) float rescale[Simd::kLanes];
  const std::uint16_t* q = strip.q + row * strip.q_stride;
  if (n > 32) {
    bf16_scores<kRows, 4>(strip, q, head.key_dim, scores);
  } else if (n > 16) {
    bf16_scores<kRows, 2>(strip, q, head.key_dim, scores);
  } else {
    bf16_scores<kRows, 1>(strip, q, head.key_dim, scores);
  }
  bf16_softmax(strip, row, kRows, span, scores, p, rescale);
  const int stride = head.value_stride, pairs = (n + 1) / 2;
  float* out = strip.acc + row * stride;
  int column = 0;
  for (; column + 64 <= stride; column += 64)
    bf16_values<kRows, 4>(strip, p, rescale, pairs, column, stride, out);
  for (; column + 32 <= stride; column += 32)
    bf16_values<kRows, 2>(strip, p, rescale, pairs, column, stride, out);
  for (; column < stride; column += 16) bf16_values<kRows, 1>(strip, p, rescale, pairs, column, stride, out);
}

// A span for all rows of a strip, by vectors.
struct VectorTiles {
  static constexpr int kRows = kTileRows, kPositions = 2;

  static void span(const AttentionHead& head, int span, int rows, AttentionStrip& strip) {
    int r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) bf16_tile<kTileRows>(head, span, r, strip);
    for (; r + 3 <= rows; r += 3) bf16_tile<3>(head, span, r, strip);
    for (; r < rows; ++r) bf16_tile<1>(head, span, r, strip);
  }
};

// Query rows [row, row + rows) of the item; row = token * heads + head.
template <class Tiles>
void bf16_strip(const AttentionHead& head, int row, int rows, AttentionStrip& strip) {
  std::fill(std::begin(strip.max), std::end(strip.max), -std::numeric_limits<float>::infinity());
  for (int r = 0; r < rows; ++r) {
    const int token = (row + r) / head.heads, h = (row + r) % head.heads;
    const float* q = head.q + std::size_t(token) * head.q_stride + std::size_t(h) * std::size_t(head.key_dim);
    std::uint16_t* out = strip.q + r * strip.q_stride;
    const F scale = Simd::set(head.scale * kLog2E);
    for (int d = 0; d < strip.q_stride; d += Simd::kLanes) {
      const int n = std::clamp(head.key_dim - d, 0, Simd::kLanes);
      const F values = _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), q + d);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(Simd::mul(values, scale))));
    }
    std::fill_n(strip.acc + r * head.value_stride, head.value_stride, 0.0f);
    std::fill_n(strip.sum[r], 16, 0.0f);
    const Sight sight = sight_of(head, token);
    strip.begin[r] = sight.begin;
    strip.end[r] = sight.end;
  }
  const int end = strip.end[rows - 1];
  for (int span = strip.begin[0] / kKeySpan; span * kKeySpan < end; ++span) {
    convert_span<Tiles::kPositions>(head, span, std::min(kKeySpan, end - span * kKeySpan), strip);
    Tiles::span(head, span, rows, strip);
  }
  for (int r = 0; r < rows; ++r) {
    const int token = (row + r) / head.heads, h = (row + r) % head.heads;
    float* out =
        head.out + std::size_t(token) * head.out_stride + std::size_t(h) * std::size_t(head.value_dim);
    const float* acc = strip.acc + r * head.value_stride;
    const F inverse = Simd::set(1.0f / Simd::reduce_add(Simd::load(strip.sum[r])));
    for (int d = 0; d < head.value_dim; d += Simd::kLanes)
      store_part(out + d, Simd::mul(Simd::load(acc + d), inverse), head.value_dim - d);
  }
}

template <class Tiles>
void attention_of_pairs(const AttentionHead& head, int first, int count) {
  if (!head.half || head.exact || head.key_dim % 2 != 0) return attention(head, first, count);
  AttentionStrip strip;
  strip.q_stride = round_up(head.key_dim, kPaddedDims);
  for (int pair = head.key_dim / 2; pair < strip.q_stride / 2; ++pair)
    std::fill_n(strip.keys[pair][0], kKeySpan * 2, std::uint16_t(0));
  const int dim = std::max(strip.q_stride, head.value_stride);
  const int fitting = std::min(kStripRows, kStripValues / dim) / Tiles::kRows * Tiles::kRows;
  const int most = std::max(fitting, Tiles::kRows), end = (first + count) * head.heads;
  for (int row = first * head.heads; row < end; row += most)
    bf16_strip<Tiles>(head, row, std::min(most, end - row), strip);
}

void attention_bf16(const AttentionHead& head, int first, int count) {
  attention_of_pairs<VectorTiles>(head, first, count);
}

double run_bfloat16(int rounds) {
  const auto start = [](const std::uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); };
  const auto load = [](const std::uint8_t* p) { return _mm512_load_si512(p); };
  run_chains(rounds, start, load,
             [](F acc, __m512i x) __attribute__((always_inline)) { return multiply_pairs(acc, x, x); });
  return double(rounds) * kPeakChains * Simd::kLanes * 2;
}

}  // namespace
}  // namespace metal_prefill::cpu
