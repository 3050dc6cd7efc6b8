// Attention of many tokens, in terms of the vectors of one instruction set (Simd, included before).
//
// Each lane is a token, for one query head at a time: a step multiplies a vector of tokens by one element of
// a key or a value. So the softmax needs no sums across lanes, and only tokens that see different positions
// need a mask. Results are bit-identical to those of tile_attention_f32.h, which handles few tokens.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "tile_attention_f32.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kLaneVectors = 2;  // of a tile
constexpr int kLaneTokens = kLaneVectors * Simd::kLanes;
constexpr int kLaneSteps = Simd::kLaneSteps;  // keys, or columns of values, that are multiplied at a time

// A vector of tokens for each column.
using LaneRow = float[kLaneTokens];

struct LaneTile {
  alignas(64) LaneRow q[kMaxHeadDim];    // scaled so that scores are base-2 logarithms
  alignas(64) LaneRow acc[kMaxHeadDim];  // sum of p * v
  alignas(64) LaneRow all[kMaxHeadDim];  // acc of earlier splits
  alignas(64) LaneRow p[kKeySpan];       // scores, then weights of the current span
  alignas(64) LaneRow max, sum, rescale;
  alignas(64) LaneRow begin, end;  // positions that a token sees, if scores are masked
  SplitSums<kLaneTokens> splits;   // of earlier splits
  int head, first, count;          // query head of the group, and tokens of the item
  VisibleRange every, any;         // positions that every token sees, and that any token sees
};

// A float32 copy of keys and values in f16.
struct WidenedSpan {
  float elements[kKeySpan * kMaxHeadDim];

  const float* keys(const AttentionHead& head, int span, int n) {
    return widened(head.keys_of(span), round_up(n, kKeyBlock) * head.key_stride);
  }
  const float* values(const AttentionHead& head, int span, int n) {
    return widened(head.values_of(span), n * head.value_stride);
  }

 private:
  const float* widened(const void* from, int count) {
    const auto* halves = static_cast<const std::uint16_t*>(from);
    for (int i = 0; i < count; i += Simd::kLanes) Simd::store(elements + i, Simd::load_half(halves + i));
    return elements;
  }
};

// Transposes rows to lanes, and back, for a vector of tokens, four columns at a time.
inline void rows_to_lanes(const float* rows, std::size_t stride, int columns, float* lanes) {
  for (int column = 0; column < columns; column += 4) {
    F quads[4];
    unrolled<4>([&](auto i) { quads[i] = Simd::load_quads(rows + i * stride + column, 4 * stride); });
    Simd::transpose_quads(quads);
    unrolled<4>([&](auto i) { Simd::store(lanes + (column + i) * kLaneTokens, quads[i]); });
  }
}
inline void lanes_to_rows(const float* lanes, int columns, float* rows, std::size_t stride) {
  for (int column = 0; column < columns; column += 4) {
    F quads[4];
    unrolled<4>([&](auto i) { quads[i] = Simd::load(lanes + (column + i) * kLaneTokens); });
    Simd::transpose_quads(quads);
    unrolled<4>([&](auto i) { Simd::store_quads(rows + i * stride + column, 4 * stride, quads[i]); });
  }
}

// Loads the queries of a tile's tokens in whole vectors: lanes after the last token repeat it.
inline void load_queries(const AttentionHead& head, LaneTile& tile) {
  alignas(64) float copies[Simd::kLanes][kMaxHeadDim];
  const int dim = head.key_dim, columns = round_up(dim, 4);
  const float* q = head.q + std::size_t(tile.first) * head.q_stride + std::size_t(tile.head) * head.q_step;
  for (int t = 0; t < tile.count; t += Simd::kLanes) {
    const float* rows = q + std::size_t(t) * head.q_stride;
    std::size_t stride = head.q_stride;
    if (t + Simd::kLanes > tile.count || columns > dim) {
      for (int r = 0; r < Simd::kLanes; ++r) {
        const float* row = q + std::size_t(std::min(t + r, tile.count - 1)) * head.q_stride;
        for (int d = 0; d < columns; d += Simd::kLanes)
          Simd::store(copies[r] + d, load_part(row + d, dim - d));
      }
      rows = copies[0];
      stride = kMaxHeadDim;
    }
    rows_to_lanes(rows, stride, columns, tile.q[0] + t);
    for (int d = 0; d < dim; ++d)
      Simd::store(tile.q[d] + t, Simd::load(tile.q[d] + t) * (head.scale * kLog2E));
  }
}

inline void begin_tile(const AttentionHead& head, int h, int first, int count, LaneTile& tile) {
  tile.head = h;
  tile.first = first;
  tile.count = count;
  load_queries(head, tile);
  const auto range = [&](int t) {
    return visible_range(head.position + first + std::min(t, count - 1), head.window, head.length);
  };
  const VisibleRange earliest = range(0), latest = range(count - 1);
  tile.every = {latest.begin, earliest.end};
  tile.any = {earliest.begin, latest.end};
  // The last tile may have one token, whose window begins anywhere in a span.
  const bool masked = tile.every != tile.any || tile.every.begin % kKeySpan != 0;
  for (int t = 0; t < kLaneTokens && masked; ++t) {
    tile.begin[t] = float(range(t).begin);
    tile.end[t] = float(range(t).end);
  }
  const SoftmaxSum before = first_sum(head, std::size_t(h));
  std::fill_n(tile.splits.shift, kLaneTokens, before.shift);
  std::fill_n(tile.splits.sum, kLaneTokens, before.sum);
}

inline void begin_split(const AttentionHead& head, LaneTile& tile) {
  std::fill_n(tile.acc[0], head.value_stride * kLaneTokens, 0.0f);
  std::fill_n(tile.max, kLaneTokens, -std::numeric_limits<float>::max());
  std::fill_n(tile.sum, kLaneTokens, 0.0f);
}

// p[i] = q . keys[i] for the first `n` positions of a span, for kVectors vectors of tokens.
template <int kVectors>
void lane_scores(const AttentionHead& head, const float* keys, int n, LaneTile& tile) {
  for (int first = 0; first < n; first += kLaneSteps) {
    const float* key = keys + first / kKeyBlock * kKeyBlock * head.key_stride + first % kKeyBlock;
    F acc[kLaneSteps][kVectors];
    unrolled<kLaneSteps * kVectors>([&](auto i) { acc[i / kVectors][i % kVectors] = Simd::set(0); });
    for (int d = 0; d < head.key_dim; ++d, key += kKeyBlock)
      each_product<kLaneSteps, kVectors>(
          [&](int i) ALWAYS_INLINE { return Simd::set(key[i]); },
          [&](int v) ALWAYS_INLINE { return Simd::load(tile.q[d] + v * Simd::kLanes); },
          [&](int i, int v, F k, F q) ALWAYS_INLINE { acc[i][v] = Simd::fma(q, k, acc[i][v]); });
    unrolled<kLaneSteps * kVectors>([&](auto i) {
      constexpr int v = i % kVectors;
      Simd::store(tile.p[first + i / kVectors] + v * Simd::kLanes, acc[i / kVectors][v]);
    });
  }
}

// acc = acc * rescale + p . values over the first `n` positions of a span, likewise.
template <int kVectors>
void lane_values(const AttentionHead& head, const float* values, int n, LaneTile& tile) {
  for (int column = 0; column < head.value_stride; column += kLaneSteps) {
    const float* value = values + column;
    F acc[kLaneSteps][kVectors];
    const auto place = [&](int i) { return tile.acc[column + i / kVectors] + i % kVectors * Simd::kLanes; };
    unrolled<kLaneSteps * kVectors>([&](auto i) {
      constexpr int v = i % kVectors;
      acc[i / kVectors][v] = Simd::load(place(i)) * Simd::load(tile.rescale + v * Simd::kLanes);
    });
    for (int position = 0; position < n; ++position, value += head.value_stride)
      each_product<kLaneSteps, kVectors>(
          [&](int i) ALWAYS_INLINE { return Simd::set(value[i]); },
          [&](int v) ALWAYS_INLINE { return Simd::load(tile.p[position] + v * Simd::kLanes); },
          [&](int i, int v, F x, F weight) ALWAYS_INLINE { acc[i][v] = Simd::fma(weight, x, acc[i][v]); });
    unrolled<kLaneSteps * kVectors>([&](auto i) { Simd::store(place(i), acc[i / kVectors][i % kVectors]); });
  }
}

// add_score_terms() for a vector of tokens, row by row.
inline void add_score_terms(const AttentionHead& head, int span, int n, int t, LaneTile& tile) {
  alignas(64) float rows[Simd::kLanes][kKeySpan];
  const int columns = round_up(n, 4);
  lanes_to_rows(tile.p[0] + t, columns, rows[0], kKeySpan);
  for (int r = 0; r < std::min(Simd::kLanes, tile.count - t); ++r)
    add_score_terms(head, (tile.first + t + r) * head.heads + tile.head, span, n, rows[r]);
  rows_to_lanes(rows[0], kKeySpan, columns, tile.p[0] + t);
}

// Sets the scores of positions that a token does not see to -infinity, even if they are NaN.
inline void mask_scores(int span, int n, int t, LaneTile& tile) {
  const F infinity = Simd::set(std::numeric_limits<float>::infinity());
  const F begin = Simd::load(tile.begin + t), end = Simd::load(tile.end + t);
  for (int i = 0; i < n; ++i) {
    const F middle = Simd::set(float(span * kKeySpan + i) + 0.5f), zero = Simd::set(0);
    const F inside = Simd::min(middle - begin, end - middle);  // positive if seen
    const F seen = Simd::zero_below(Simd::load(tile.p[i] + t), inside, zero);
    Simd::store(tile.p[i] + t, seen + Simd::min(inside * infinity, zero));
  }
}

// Converts scores of `n` positions to weights, for a vector of tokens.
inline void lane_softmax(int n, int t, LaneTile& tile) {
  constexpr int kLanes = Simd::kLanes;
  const F before = Simd::load(tile.max + t);
  F largest[4] = {before, before, before, before};  // several, to hide the latency of a comparison
  for (int i = 0; i < n; i += 4)
    unrolled<4>(
        [&](auto j) { largest[j] = Simd::max(largest[j], Simd::load(tile.p[std::min(i + j, n - 1)] + t)); });
  const F max = Simd::max(Simd::max(largest[0], largest[1]), Simd::max(largest[2], largest[3]));
  F sums[kLanes];  // of every kLanes-th position, added up in the order of Simd::reduce_add()
  unrolled<kLanes>([&](auto lane) { sums[lane] = Simd::set(0); });
  const auto weigh = [&](int i, F& sum) ALWAYS_INLINE {
    const F weight = exp2(Simd::load(tile.p[i] + t) - max);
    Simd::store(tile.p[i] + t, weight);
    sum += weight;
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    unrolled<kLanes>([&](auto lane) ALWAYS_INLINE { weigh(i + lane, sums[lane]); });
  for (int lane = 0; i + lane < n; ++lane) weigh(i + lane, sums[lane]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  const F change = exp2(before - max);
  Simd::store(tile.max + t, max);
  Simd::store(tile.rescale + t, change);
  Simd::store(tile.sum + t, Simd::load(tile.sum + t) * change + sums[0]);
}

// Calls body(n) with the number of positions of a span up to the last one that the tile sees, if any.
template <typename Body>
inline void with_positions(const LaneTile& tile, int span, Body&& body) {
  const int begin = span * kKeySpan, n = std::min(kKeySpan, tile.any.end - begin);
  if (n > 0 && tile.any.begin < begin + kKeySpan) body(n);
}

inline void weigh_span(const AttentionHead& head, const float* keys, int span, int n, LaneTile& tile) {
  if (tile.count > Simd::kLanes)
    lane_scores<kLaneVectors>(head, keys, n, tile);
  else
    lane_scores<1>(head, keys, n, tile);
  const int begin = span * kKeySpan;
  for (int t = 0; t < tile.count; t += Simd::kLanes) {
    if (has_score_terms(head)) add_score_terms(head, span, n, t, tile);
    if (begin < tile.every.begin || begin + n > tile.every.end) mask_scores(span, n, t, tile);
    lane_softmax(n, t, tile);
  }
}

inline void add_values(const AttentionHead& head, const float* values, int n, LaneTile& tile) {
  if (tile.count > Simd::kLanes)
    lane_values<kLaneVectors>(head, values, n, tile);
  else
    lane_values<1>(head, values, n, tile);
}

// Adds a split to the sums of earlier ones.
inline void end_split(const AttentionHead& head, bool first, bool last, LaneTile& tile) {
  SplitSums<kLaneTokens>& splits = tile.splits;
  splits.add(tile.max, tile.sum, tile.count, last);
  for (int t = 0; t < tile.count; t += Simd::kLanes) {
    const auto of = [&](const LaneRow& row) { return Simd::load(row + t); };
    for (int d = 0; d < head.value_dim; ++d) {
      const F old = first ? Simd::set(0) : of(tile.all[d]);
      const F sum = Simd::fma(old, of(splits.before), of(tile.acc[d]) * of(splits.now));
      Simd::store(tile.all[d] + t, sum * of(splits.scale));
    }
  }
}

inline void store_results(const AttentionHead& head, const LaneTile& tile) {
  alignas(64) float copies[Simd::kLanes][kMaxHeadDim];
  const int dim = head.value_dim, columns = round_up(dim, 4);
  const std::size_t stride = head.out_stride;
  float* out = head.out + std::size_t(tile.first) * stride + tile.head * dim;
  for (int t = 0; t < tile.count; t += Simd::kLanes, out += Simd::kLanes * stride) {
    if (t + Simd::kLanes <= tile.count && columns == dim) {
      lanes_to_rows(tile.all[0] + t, dim, out, stride);
      continue;
    }
    lanes_to_rows(tile.all[0] + t, columns, copies[0], kMaxHeadDim);
    for (int r = 0; r < std::min(Simd::kLanes, tile.count - t); ++r)
      for (int d = 0; d < dim; d += Simd::kLanes)
        store_part(out + r * stride + d, Simd::load(copies[r] + d), dim - d);
  }
  if (!head.sums) return;
  for (int t = 0; t < tile.count; ++t)
    head.sums[std::size_t(tile.first + t) * head.sums_stride + std::size_t(tile.head)] = {
        tile.splits.shift[t], tile.splits.sum[t]};
}

// Computes up to kQueryTile tokens of query head h.
template <typename Span>
void attend_lanes(const AttentionHead& head, int h, int first, int count, Span& elements,
                  std::span<LaneTile> memory) {
  const std::span<LaneTile> tiles = memory.first(std::size_t(ceil_div(count, kLaneTokens)));
  for (int t = 0; LaneTile & tile : tiles) {
    begin_tile(head, h, first + t, std::min(kLaneTokens, count - t), tile);
    t += kLaneTokens;
  }
  const VisibleRange all = {tiles.front().any.begin, tiles.back().any.end};
  bool first_split = true;
  each_split(head, all, [&](VisibleRange split, bool last) {
    for (LaneTile& tile : tiles) begin_split(head, tile);
    for (int span = split.begin / kKeySpan; span * kKeySpan < split.end; ++span) {
      const int stored = std::min(kKeySpan, split.end - span * kKeySpan);
      const float* keys = elements.keys(head, span, stored);
      for (LaneTile& tile : tiles)
        with_positions(tile, span, [&](int n) { weigh_span(head, keys, span, n, tile); });
      const float* values = elements.values(head, span, stored);
      for (LaneTile& tile : tiles)
        with_positions(tile, span, [&](int n) { add_values(head, values, n, tile); });
    }
    for (LaneTile& tile : tiles) end_split(head, first_split, last, tile);
    first_split = false;
  });
  for (const LaneTile& tile : tiles) store_results(head, tile);
}

// Computes tokens [first, first + count) of an item: few by rows, many by lanes.
template <typename SpanOfFew, typename SpanOfMany>
void attention_of(const AttentionHead& head, int first, int count) {
  const int end = first + count;
  if (count <= Simd::kLanes / 2) return attention_rows<SpanOfFew>(head, first * head.heads, end * head.heads);
  LaneTile tiles[ceil_div(kQueryTile, kLaneTokens)];
  SpanOfMany elements;
  for (; first < end; first += kQueryTile)
    for (int h = 0; h < head.heads; ++h)
      attend_lanes<SpanOfMany>(head, h, first, std::min(kQueryTile, end - first), elements, tiles);
}

}  // namespace
}  // namespace metal_prefill::cpu
