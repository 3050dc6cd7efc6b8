// Causal attention with online softmax on products of bfloat16 pairs (AVX512_BF16), for a cache of such
// pairs.
//
// Queries, keys, weights of the softmax and values are rounded to 8 significant bits. The effect on logits is
// small compared with the rounding of activations to 8-bit integers (docs/cpu_kernels.md has the figures).
// Sums stay in float32. Pairs halve the number of product instructions. Keys and values are rounded when they
// are stored: converting them at each use took longer than the products of a single token. The query rows of
// a strip (tokens times the heads of a group) share each load of keys. As in tile_attention.h, the result of
// a row does not depend on other rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "simd_bf16.h"
#include "tile_splits.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kStripRows = 96;         // 32 tokens of a group of three heads
constexpr int kStripValues = 96 * 64;  // rows times dimensions: longer heads take fewer rows
constexpr int kMaxTileRows = 16;       // rows of a strip of the longest heads
constexpr int kTileRows = 6;           // by 4 vectors: 24 sums, 4 of keys or values, one query
constexpr float kSlack = 8;            // weights are up to 2^8
constexpr float kNoScore = -std::numeric_limits<float>::infinity();
constexpr float kExp2Cubic[] = {0.69542432f, 0.22630768f, 0.07826797f};

static_assert(kStripValues <= kMaxTileRows * kMaxHeadDim);
struct alignas(64) AttentionStrip {
  std::uint16_t q[kMaxTileRows * kMaxHeadDim];  // [rows][key_stride], scaled: scores are base-2 logarithms
  float acc[kMaxTileRows * kMaxHeadDim];        // [rows][value_stride], sum of p * v
  float sum[kStripRows][16];                    // of p, in 16 parts
  float shift[kStripRows] = {};                 // subtracted from scores
  float limit[kStripRows];                      // score above which the shift changes
  SplitSums<kStripRows> splits;                 // of earlier splits
  int begin[kStripRows], end[kStripRows];       // positions that the row sees
  int first;                                    // row of the item
  const std::uint16_t *keys, *values;           // of the span
};

// scores[r][key] = q[r] . k[key] for kVectors * 16 positions.
template <int kRows, int kVectors>
void bf16_scores(const AttentionStrip& strip, const std::uint16_t* q, int key_stride,
                 float (*scores)[kKeySpan]) {
  F acc[kRows][kVectors];
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::set(0);
  for (int d = 0; d < key_stride; d += 2) {
    __m512i k[kVectors];
    FOR_UNROLL (int v = 0; v < kVectors; ++v)
      k[v] = _mm512_load_si512(strip.keys + d / 2 * kKeyPairStep + v * 2 * Simd::kLanes);
    FOR_UNROLL (int r = 0; r < kRows; ++r) {
      const __m512i value = broadcast_pair(q + r * key_stride + d);
      FOR_UNROLL (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_pairs(acc[r][v], value, k[v]);
    }
  }
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v) Simd::store(scores[r] + v * Simd::kLanes, acc[r][v]);
}

// 2^x; 0 for -infinity, NaN for NaN. Relative error below 2e-4: the result is rounded to bfloat16, with an
// error up to 2e-3.
inline F weight_exp2(F x) {
  const F f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // within [0, 1)
  F p = Simd::set(kExp2Cubic[2]);  // exact at both ends, so that powers join without a step
  p = Simd::fma(p, f, Simd::set(kExp2Cubic[1]));
  p = Simd::fma(p, f, Simd::set(kExp2Cubic[0]));
  p = Simd::fma(p, f, Simd::set(1.0f));
  return _mm512_scalef_ps(p, x);  // by 2^floor(x)
}

// Reduces vector(i) of up to four rows together; with fewer `rows`, repeats the last one.
template <typename Vector, typename Reduce>
inline ALWAYS_INLINE void reduce4(int rows, Vector&& vector, Reduce&& reduce, float* out) {
  const auto of_row = [&](int i) { return vector(std::min(i, rows - 1)); };
  const F vectors[4] = {of_row(0), of_row(1), of_row(2), of_row(3)};
  reduce(vectors, out);
}

// Bit mask of the positions of a span that a row sees.
inline std::uint64_t visible(const AttentionStrip& strip, int row, int span) {
  const auto below = [&](int position) {
    const int n = position - span * kKeySpan;
    return n <= 0 ? 0 : n >= kKeySpan ? ~std::uint64_t(0) : (std::uint64_t(1) << n) - 1;
  };
  return below(strip.end[row]) & ~below(strip.begin[row]);
}

// Positions of a span up to the last one that rows [row, row + rows) see; 0 if they see none of it.
inline int seen_positions(const AttentionStrip& strip, int row, int rows, int span) {
  const int first = span * kKeySpan, end = strip.end[row + rows - 1];
  return end <= first || strip.begin[row] >= first + kKeySpan ? 0 : std::min(kKeySpan, end - first);
}

// Changes the shift of a row, and rescales its earlier results.
inline void raise_shift(AttentionStrip& strip, int row, float shift, int stride) {
  const bool first = strip.limit[row] == kNoScore;
  const float before = strip.shift[row];
  strip.shift[row] = shift;
  strip.limit[row] = shift + kSlack;
  if (first) return;  // no results yet
  const F change = weight_exp2(Simd::set(before - shift));
  Simd::store(strip.sum[row], Simd::load(strip.sum[row]) * change);
  float* acc = strip.acc + row * stride;
  for (int d = 0; d < stride; d += Simd::kLanes) Simd::store(acc + d, Simd::load(acc + d) * change);
}

// Converts scores of a span to bfloat16 weights 2^(score - shift), and adds them to the sums. The shift is
// the largest score of the first span. It changes only if a later score is far above it, so that weights
// rarely depend on a new maximum and sums are rarely rescaled. No row sees more than the first `n` positions;
// weights of others are zero, and stored up to a multiple of 32.
template <bool kWhole>
inline ALWAYS_INLINE void bf16_softmax(AttentionStrip& strip, int row, int rows, int span, int n, int stride,
                                       const float (*scores)[kKeySpan], std::uint16_t (*p)[kKeySpan]) {
  const F nothing = Simd::set(kNoScore);
  const auto score = [&](int r, std::uint64_t seen, int i) ALWAYS_INLINE {
    const F all = Simd::load(scores[r] + i);
    return kWhole ? all : _mm512_mask_mov_ps(nothing, __mmask16(seen >> i), all);
  };
  const auto largest = [&](int r) ALWAYS_INLINE {
    const std::uint64_t seen = kWhole ? 0 : visible(strip, row + r, span);
    const F first = Simd::max(score(r, seen, 0), score(r, seen, 16));
    return n <= 32 ? first : Simd::max(first, Simd::max(score(r, seen, 32), score(r, seen, 48)));
  };
  static_assert(kKeySpan == 4 * Simd::kLanes);
  unsigned above = 0;
  for (int r = 0; r < rows; ++r)
    above |= _mm512_cmp_ps_mask(largest(r), Simd::set(strip.limit[row + r]), _CMP_GT_OQ);
  for (int r = 0; above && r < rows; r += 4) {
    float most[4];
    reduce4(
        rows - r, [&](int i) { return largest(r + i); },
        [](const F(&of_rows)[4], float* out) { Simd::reduce_max4(of_rows, out); }, most);
    for (int i = 0; i < std::min(4, rows - r); ++i)
      if (most[i] > strip.limit[row + r + i]) raise_shift(strip, row + r + i, most[i], stride);
  }
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (int r = 0; r < rows; ++r) {
    const std::uint64_t seen = kWhole ? 0 : visible(strip, row + r, span);
    const F shift = Simd::set(strip.shift[row + r]);
    F sum = Simd::load(strip.sum[row + r]);
#pragma GCC unroll 2
    for (int i = 0; i < n; i += 2 * Simd::kLanes) {
      const __m512i weights = round_to_pairs(weight_exp2(score(r, seen, i) - shift),
                                             weight_exp2(score(r, seen, i + Simd::kLanes) - shift));
      _mm512_store_si512(p[r] + i, weights);
      sum = multiply_pairs(sum, weights, ones);
    }
    Simd::store(strip.sum[row + r], sum);
  }
}

// Adds other terms to the scores, then calls bf16_softmax, without masks if all rows see the whole span.
inline ALWAYS_INLINE void bf16_weights(const AttentionHead& head, AttentionStrip& strip, int row, int rows,
                                       int span, int n, float (*scores)[kKeySpan],
                                       std::uint16_t (*p)[kKeySpan]) {
  const int first = span * kKeySpan, stride = head.value_stride;
  for (int r = 0; has_score_terms(head) && r < rows; ++r)
    add_score_terms(head, strip.first + row + r, span, kKeySpan, scores[r]);
  if (strip.begin[row + rows - 1] <= first && first + kKeySpan <= strip.end[row])
    bf16_softmax<true>(strip, row, rows, span, kKeySpan, stride, scores, p);
  else
    bf16_softmax<false>(strip, row, rows, span, n, stride, scores, p);
}

// acc += p * v over the first `n` positions of a span, for kVectors vectors of columns. With an odd `n`, only
// the first half of the last pair counts: the other may hold NaN.
template <int kRows, int kVectors>
void bf16_values(const AttentionStrip& strip, const std::uint16_t (*p)[kKeySpan], int n, int column,
                 int stride, float* out) {
  F acc[kRows][kVectors];
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v)
      acc[r][v] = Simd::load(out + r * stride + column + v * Simd::kLanes);
  const auto add_pair = [&](int i, auto half) ALWAYS_INLINE {
    __m512i value[kVectors];
    FOR_UNROLL (int v = 0; v < kVectors; ++v) {
      value[v] = _mm512_load_si512(strip.values + (i * stride + column + v * Simd::kLanes) * 2);
      if constexpr (half) value[v] = _mm512_and_si512(value[v], _mm512_set1_epi32(0xffff));
    }
    FOR_UNROLL (int r = 0; r < kRows; ++r) {
      const __m512i weight = broadcast_pair(p[r] + 2 * i);
      FOR_UNROLL (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_pairs(acc[r][v], weight, value[v]);
    }
  };
  for (int i = 0; i < n / 2; ++i) add_pair(i, std::false_type());
  if (n % 2 == 1) add_pair(n / 2, std::true_type());
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v)
      Simd::store(out + r * stride + column + v * Simd::kLanes, acc[r][v]);
}

template <int kRows>
void bf16_tile(const AttentionHead& head, int span, int row, AttentionStrip& strip) {
  const int n = seen_positions(strip, row, kRows, span);
  if (n == 0) return;
  alignas(64) float scores[kRows][kKeySpan];
  alignas(64) std::uint16_t p[kRows][kKeySpan];
  const std::uint16_t* q = strip.q + row * head.key_stride;
  if (n > 48) {
    bf16_scores<kRows, 4>(strip, q, head.key_stride, scores);
  } else if (n > 32) {
    bf16_scores<kRows, 3>(strip, q, head.key_stride, scores);
  } else if (n > 16) {
    bf16_scores<kRows, 2>(strip, q, head.key_stride, scores);
  } else {
    bf16_scores<kRows, 1>(strip, q, head.key_stride, scores);
  }
  const int stride = head.value_stride;
  bf16_weights(head, strip, row, kRows, span, n, scores, p);
  float* out = strip.acc + row * stride;
  int column = 0;
  for (; column + 64 <= stride; column += 64) bf16_values<kRows, 4>(strip, p, n, column, stride, out);
  for (; column + 32 <= stride; column += 32) bf16_values<kRows, 2>(strip, p, n, column, stride, out);
  for (; column < stride; column += 16) bf16_values<kRows, 1>(strip, p, n, column, stride, out);
}

// Computes a span for all rows of a strip by vectors. Only the first `stored` positions were stored; no row
// sees the scores of the others.
struct VectorTiles {
  static constexpr int kRows = kTileRows;

  static void span(const AttentionHead& head, int span, int /*stored*/, int rows, AttentionStrip& strip) {
    int r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) bf16_tile<kTileRows>(head, span, r, strip);
    for (; r + 3 <= rows; r += 3) bf16_tile<3>(head, span, r, strip);
    for (; r < rows; ++r) bf16_tile<1>(head, span, r, strip);
  }
};

// Computes query rows [row, row + rows) of the item; row = token * heads + head.
template <class Tiles>
void bf16_strip(const AttentionHead& head, int row, int rows, AttentionStrip& strip) {
  strip.first = row;
  for (int r = 0; r < rows; ++r) {
    const auto [token, h] = token_and_head(head, row + r);
    const float* q = head.q + token * head.q_stride + h * head.q_step;
    std::uint16_t* out = strip.q + r * head.key_stride;
    const F scale = Simd::set(head.scale * kLog2E);
    for (int d = 0; d < head.key_stride; d += Simd::kLanes) {
      const F values = _mm512_maskz_loadu_ps(lanes_below(head.key_dim - d), q + d) * scale;
      _mm256_mask_storeu_epi16(out + d, lanes_below(head.key_stride - d),
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
    }
    const VisibleRange visible = visible_range(head.position + int(token), head.window, head.length);
    strip.begin[r] = visible.begin;
    strip.end[r] = visible.end;
  }
  const VisibleRange all = {strip.begin[0], strip.end[rows - 1]};
  const bool one = !head.sums && !head.sinks && all.begin < all.end &&
                   all.begin / kSplitPositions == (all.end - 1) / kSplitPositions;
  if (!one) begin_rows(head, row, rows, strip.splits);
  each_split(head, all, [&](VisibleRange split, bool last) {
    std::fill_n(strip.acc, rows * head.value_stride, 0.0f);
    for (int r = 0; r < rows; ++r) {
      std::fill_n(strip.sum[r], 16, 0.0f);
      strip.shift[r] = 0;
      strip.limit[r] = kNoScore;
    }
    for (int span = split.begin / kKeySpan; span * kKeySpan < split.end; ++span) {
      strip.keys = static_cast<const std::uint16_t*>(head.keys_of(span));
      strip.values = static_cast<const std::uint16_t*>(head.values_of(span));
      Tiles::span(head, span, std::min(kKeySpan, split.end - span * kKeySpan), rows, strip);
    }
    float sums[kStripRows] = {};
    for (int r = 0; r < rows; r += 4)
      reduce4(
          rows - r, [&](int i) { return Simd::load(strip.sum[r + i]); },
          [](const F(&of_rows)[4], float* out) { Simd::reduce_add4(of_rows, out); }, sums + r);
    for (int r = 0; r < rows; ++r)
      if (strip.limit[r] == kNoScore) strip.shift[r] = kNoScore;
    if (one)
      divide_split(head, row, rows, sums, strip.acc, head.value_stride);
    else
      add_split(head, row, rows, strip.shift, sums, strip.acc, head.value_stride, last, strip.splits);
  });
}

template <class Tiles>
void attention_of_pairs(const AttentionHead& head, int first, int count) {
  if (head.layout != KvLayout::kPairs) return kernels_avx512vnni().attention(head, first, count);
  AttentionStrip strip;
  const int dim = std::max(head.key_stride, head.value_stride);
  const int fitting = std::min(kStripRows, kStripValues / dim) / Tiles::kRows * Tiles::kRows;
  const int most = std::max(fitting, Tiles::kRows), end = (first + count) * head.heads;
  for (int row = first * head.heads; row < end; row += most)
    bf16_strip<Tiles>(head, row, std::min(most, end - row), strip);
}

}  // namespace
}  // namespace metal_prefill::cpu
