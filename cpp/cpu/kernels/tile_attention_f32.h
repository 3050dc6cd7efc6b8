// Attention with online softmax, in terms of the vectors of one instruction set (Simd, included
// before).
//
// A tile holds a few query rows: tokens times the heads of a group, which all read the same keys and values.
// Keys come in spans of 64 positions aligned to multiples of 64, so that the softmax of a row proceeds in the
// same steps in any tile; a span in which a row sees nothing leaves it unchanged.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "row_ops.h"
#include "tile_splits.h"

namespace metal_prefill::cpu {
namespace {

template <int kRows>
struct AttentionTile {
  float q[kRows][kMaxHeadDim];    // scaled so that scores are base-2 logarithms
  float acc[kRows][kMaxHeadDim];  // sum of p * v
  float p[kRows][kKeySpan];       // scores, then weights of the current span
  float max[SplitSums<kRows>::kPadded], sum[SplitSums<kRows>::kPadded], rescale[kRows];
  SplitSums<kRows> splits;       // of earlier splits
  int begin[kRows], end[kRows];  // positions that the row sees
};

// Calls body(v, count) for runs of `count` vectors from v on: of kAttentionVectors, then of two, then of one.
template <typename Body>
inline void each_run(int vectors, Body&& body) {
  constexpr std::integral_constant<int, Simd::kAttentionVectors> kLong;
  int v = 0;
  for (; v + kLong <= vectors; v += kLong) body(v, kLong);
  for (; v + 2 <= vectors; v += 2) body(v, std::integral_constant<int, 2>());
  if (v < vectors) body(v, std::integral_constant<int, 1>());
}
constexpr int runs_of(int vectors) {
  const int rest = vectors % Simd::kAttentionVectors;
  return vectors / Simd::kAttentionVectors + rest / 2 + rest % 2;
}

// p[r][first + i] = q[r] . k[first + i] for kVectors vectors of positions of a span.
template <int kRows, int kVectors, typename Element>
void score_vectors(const AttentionHead& head, const Element* keys, int first, AttentionTile<kRows>& tile,
                   NextLines& next) {
  const std::size_t block_size = std::size_t(head.key_stride) * kKeyBlock;
  F acc[kRows][kVectors];
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::set(0);
  const Element* column[kVectors];
  FOR_UNROLL (int v = 0; v < kVectors; ++v) {
    const int position = first + v * Simd::kLanes;
    column[v] = keys + std::size_t(position / kKeyBlock) * block_size + position % kKeyBlock;
  }
  NextLines lines = next;  // copy in registers
  for (int d = 0; d < head.key_dim; ++d) {
    lines.step();
    each_product<kRows, kVectors>(
        [&](int r) ALWAYS_INLINE { return Simd::set(tile.q[r][d]); },
        [&](int v) ALWAYS_INLINE { return load_floats(column[v] + std::size_t(d) * kKeyBlock); },
        [&](int r, int v, F q, F key) ALWAYS_INLINE { acc[r][v] = Simd::fma(q, key, acc[r][v]); });
  }
  next = lines;
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v) Simd::store(tile.p[r] + first + v * Simd::kLanes, acc[r][v]);
}

// Computes scores of the first `n` positions of a span, in whole vectors: a short text does not fill a span.
// Prefetches `next` meanwhile.
template <int kRows, typename Element>
void score_span(const AttentionHead& head, const Element* keys, int n, AttentionTile<kRows>& tile,
                NextLines next) {
  const int vectors = n / Simd::kLanes;
  next.begin_tile(runs_of(vectors) * head.key_dim);
  each_run(vectors, [&](int v, auto count) {
    score_vectors<kRows, count()>(head, keys, v * Simd::kLanes, tile, next);
  });
}

// Converts scores to weights; updates the running maximum and sum. `rescale` is the factor for earlier
// results. `n` positions, in whole vectors, have scores; later ones are not seen.
template <int kRows>
void softmax_span(const AttentionHead& head, int row, int span, AttentionTile<kRows>& tile, int n) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float change[round_up(kRows, Simd::kLanes)] = {};  // of the maxima
  const auto begin = [&](int r) { return tile.begin[r] - span * kKeySpan; };
  const auto end = [&](int r) { return tile.end[r] - span * kKeySpan; };
  const auto sees = [&](int r) { return begin(r) < kKeySpan && end(r) > 0 && begin(r) < end(r); };
  const bool has_terms = has_score_terms(head);
  for (int r = 0; r < kRows; ++r) {
    if (!sees(r)) continue;
    float* p = tile.p[r];
    if (has_terms) add_score_terms(head, row + r, span, n, p);
    for (int i = 0; i < begin(r); ++i) p[i] = -kInfinity;
    for (int i = end(r); i < n; ++i) p[i] = -kInfinity;
    F largest = Simd::set(-kInfinity);
    for (int i = 0; i < n; i += Simd::kLanes) largest = Simd::max(largest, Simd::load(p + i));
    const float before = tile.max[r], span_max = Simd::reduce_max(largest);
    tile.max[r] = span_max > before ? span_max : before;
    change[r] = before - tile.max[r];
  }
  for (int r = 0; r < kRows; r += Simd::kLanes) Simd::store(change + r, exp2(Simd::load(change + r)));
  for (int r = 0; r < kRows; ++r) {
    float* p = tile.p[r];
    tile.rescale[r] = change[r];
    if (!sees(r)) {
      for (int i = 0; i < n; ++i) p[i] = 0;
      continue;
    }
    const F shift = Simd::set(tile.max[r]);
    F sum = Simd::set(0);
    for (int i = 0; i < n; i += Simd::kLanes) {
      const F weight = exp2(Simd::load(p + i) - shift);
      Simd::store(p + i, weight);
      sum += weight;
    }
    tile.sum[r] = tile.sum[r] * change[r] + Simd::reduce_add(sum);
  }
}

// acc = acc * rescale + p * v over `n` positions, for kVectors vectors of columns.
template <int kRows, int kVectors, typename Element>
void value_columns(const Element* values, std::size_t stride, int n, int column, AttentionTile<kRows>& tile,
                   NextLines& next) {
  F acc[kRows][kVectors];
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v)
      acc[r][v] = Simd::load(tile.acc[r] + column + v * Simd::kLanes) * tile.rescale[r];
  const Element* row = values + column;
  NextLines lines = next;  // copy in registers
  for (int i = 0; i < n; ++i, row += stride) {
    lines.step();
    each_product<kRows, kVectors>([&](int r) ALWAYS_INLINE { return Simd::set(tile.p[r][i]); },
                                  [&](int v) ALWAYS_INLINE { return load_floats(row + v * Simd::kLanes); },
                                  [&](int r, int v, F weight, F value)
                                      ALWAYS_INLINE { acc[r][v] = Simd::fma(weight, value, acc[r][v]); });
  }
  next = lines;
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int v = 0; v < kVectors; ++v) Simd::store(tile.acc[r] + column + v * Simd::kLanes, acc[r][v]);
}

template <int kRows, typename Element>
void value_span(const AttentionHead& head, const Element* values, int n, AttentionTile<kRows>& tile,
                NextLines next) {
  const int vectors = head.value_stride / Simd::kLanes;
  next.begin_tile(runs_of(vectors) * n);
  each_run(vectors, [&](int v, auto count) {
    value_columns<kRows, count()>(values, std::size_t(head.value_stride), n, v * Simd::kLanes, tile, next);
  });
}

// Loads query rows [row, row + kRows) of the item; row = token * heads + head.
template <int kRows>
void begin_tile(const AttentionHead& head, int row, AttentionTile<kRows>& tile) {
  for (int r = 0; r < kRows; ++r) {
    const auto [token, h] = token_and_head(head, row + r);
    const float* q = head.q + token * head.q_stride + h * head.q_step;
    for (int d = 0; d < head.key_dim; ++d) tile.q[r][d] = q[d] * (head.scale * kLog2E);
    const VisibleRange visible = visible_range(head.position + int(token), head.window, head.length);
    tile.begin[r] = visible.begin;
    tile.end[r] = visible.end;
  }
  begin_rows(head, row, kRows, tile.splits);
}

template <int kRows>
void begin_split(const AttentionHead& head, AttentionTile<kRows>& tile) {
  for (int r = 0; r < kRows; ++r)
    for (int d = 0; d < head.value_stride; ++d) tile.acc[r][d] = 0;
  std::fill(std::begin(tile.max), std::end(tile.max), -std::numeric_limits<float>::infinity());
  std::fill(std::begin(tile.sum), std::end(tile.sum), 0.0f);
}

// Keys and values of the first positions of a span in the cache.
template <typename Element>
struct StoredSpan {
  static constexpr bool kWhole = false;  // whether weights of positions that are not seen are read as zeros
  template <int kRows>
  using Tile = AttentionTile<kRows>;

  const Element* keys(const AttentionHead& head, int span, int) {
    return static_cast<const Element*>(head.keys_of(span));
  }
  const Element* values(const AttentionHead& head, int span, int) {
    return static_cast<const Element*>(head.values_of(span));
  }
};

// Computes scores, weights and values of a span. With `more`, prefetches the next span, which would otherwise
// arrive too late: bytes all at once, floats line by line between products, since requesting all of them at
// once gained nothing.
template <int kRows, typename Span, typename Tile>
void attention_span(const AttentionHead& head, int row, int span, bool more, Span& elements, Tile& tile) {
  const auto next = [&](const void* at, int stride) {
    return NextLines({static_cast<const std::byte*>(at), span_bytes(head.layout, stride)}, 1);
  };
  const NextLines next_keys = more ? next(head.keys_of(span + 1), head.key_stride) : NextLines({}, 1);
  const NextLines next_values = more ? next(head.values_of(span + 1), head.value_stride) : NextLines({}, 1);
  const int seen = std::min(tile.end[kRows - 1] - span * kKeySpan, kKeySpan);  // positions
  const int n = Span::kWhole ? kKeySpan : round_up(seen, Simd::kLanes);
  score_span(head, elements.keys(head, span, seen), n, tile, next_keys);
  softmax_span<kRows>(head, row, span, tile, n);
  value_span(head, elements.values(head, span, seen), seen, tile, next_values);
}

template <int kRows, typename Span>
void attention_tile(const AttentionHead& head, int row) {
  typename Span::template Tile<kRows> tile;
  Span elements;
  begin_tile(head, row, tile);
  const VisibleRange visible = {tile.begin[0], tile.end[kRows - 1]};
  each_split(head, visible, [&](VisibleRange split, bool last) {
    begin_split<kRows>(head, tile);
    for (int span = split.begin / kKeySpan; span * kKeySpan < split.end; ++span)
      attention_span<kRows>(head, row, span, (span + 1) * kKeySpan < visible.end, elements, tile);
    add_split(head, row, kRows, tile.max, tile.sum, tile.acc[0], kMaxHeadDim, last, tile.splits);
  });
}

template <typename Span>
void attention_rows(const AttentionHead& head, int row, int end) {
  constexpr int kRows = Simd::kAttentionRows, kHalf = (kRows + 1) / 2;
  for (; row + kRows <= end; row += kRows) attention_tile<kRows, Span>(head, row);
  for (; row + kHalf <= end; row += kHalf) attention_tile<kHalf, Span>(head, row);
  for (; row + 2 <= end; row += 2) attention_tile<2, Span>(head, row);
  if (row < end) attention_tile<1, Span>(head, row);
}

}  // namespace
}  // namespace metal_prefill::cpu
