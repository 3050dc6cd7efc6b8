// Attention over a cache in Q8_0 (KvLayout::kQ8), by the tiles of tile_attention_f32.h.
//
// If dot() is one instruction, products are of bytes. The other factor, queries and weights of the softmax,
// is split into two signed digits of a byte, so that it keeps 15 bits and its sign: the cache has the larger
// error. For each position of 64 dimensions, a query row needs 4 dots of 512 bits, as with products of
// bfloat16 pairs; float32 needs 8. Half of the bytes are read. Sums of integers are exact in any order.
//
// Otherwise codes are converted to float32 and scaled, which is exact: for many tokens a span at a time, for
// few between their products.
#pragma once

#include <bit>
#include <type_traits>

#include "tile_attention_lanes.h"

namespace metal_prefill::cpu {
namespace {

constexpr float kMostDigits = 127 * 256;  // magnitude of the numbers that are split

// Loads the scales of a block for the first `n` positions of a span, and zeros after them: memory that was
// not stored may hold NaN.
inline void load_scales(const std::byte* scales, int n, float (&out)[kKeySpan]) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(scales);
  for (int i = 0; i < kKeySpan; i += Simd::kLanes) {
    if (i < n) Simd::store(out + i, Simd::load_half(halves + i));
  }
  for (int i = n; i < kKeySpan; ++i) out[i] = 0;
}

// Codes of a span as they are stored, for tiles of a kind.
struct Q8Keys {
  const std::byte* codes;
};
struct Q8Values {
  const std::byte* codes;
  float scales[kMaxHeadDim / kBlockCols][kKeySpan];  // 0 after the last stored one
};
template <template <int> class KindOfTile>
struct Q8Codes {
  static constexpr bool kWhole = true;  // products of four positions at a time
  template <int kRows>
  using Tile = KindOfTile<kRows>;
  Q8Values stored;

  Q8Keys keys(const AttentionHead& head, int span, int) {
    return {static_cast<const std::byte*>(head.keys_of(span))};
  }
  const Q8Values* values(const AttentionHead& head, int span, int n) {
    stored.codes = static_cast<const std::byte*>(head.values_of(span));
    for (int block = 0; block < head.value_dim / kBlockCols; ++block)
      load_scales(stored.codes + q8_scale(head.value_dim, block, 0), n, stored.scales[block]);
    return &stored;
  }
};

inline I load_codes(const std::byte* codes) {
  return Simd::load_codes(reinterpret_cast<const std::uint8_t*>(codes));
}
// (code - 128) * scale for the i-th code of each lane, with zero = -128 * scale. Exact.
template <int i>
inline F widened(I lanes, F scale, F zero) {
  return Simd::fma(Simd::to_float(Simd::template byte_of<i>(lanes)), scale, zero);
}
inline F zero_of(F scale) {
  return scale * -128.0f;
}

// Codes of Q8_0 as float32: keys [kKeySpan / 16][key_dim][16] and values [kKeySpan][value_dim].
struct WidenedQ8Span {
  float elements[kKeySpan * kMaxHeadDim];

  const float* keys(const AttentionHead& head, int span, int) {
    const auto* codes = static_cast<const std::byte*>(head.keys_of(span));
    const int dim = head.key_dim;
    for (int block = 0; block < dim / kBlockCols; ++block) {
      float scales[kKeySpan];
      load_scales(codes + q8_scale(dim, block, 0), kKeySpan, scales);
      for (int d = block * kBlockCols; d < (block + 1) * kBlockCols; d += 4)
        for (int position = 0; position < kKeySpan; position += Simd::kLanes) {
          const F scale = Simd::load(scales + position), zero = zero_of(scale);
          float* out = elements + (position / kKeyBlock * dim + d) * kKeyBlock + position % kKeyBlock;
          const I lanes = load_codes(codes + std::size_t(position) * kKeyLane + d / 4 * kKeyLaneStep);
          unrolled<4>([&](auto i) { Simd::store(out + i * kKeyBlock, widened<i>(lanes, scale, zero)); });
        }
    }
    return elements;
  }
  // Converts the first `n` positions.
  const float* values(const AttentionHead& head, int span, int n) {
    const auto* codes = static_cast<const std::byte*>(head.values_of(span));
    const int dim = head.value_dim;
    for (int block = 0; block < dim / kBlockCols; ++block) {
      float scales[kKeySpan];
      load_scales(codes + q8_scale(dim, block, 0), n, scales);
      for (int position = 0; position < n; position += 4)
        for (int d = block * kBlockCols; d < (block + 1) * kBlockCols; d += Simd::kLanes) {
          float* out = elements + position * dim + d;
          const I lanes = load_codes(codes + q8_value(dim, position) + 4 * d);
          unrolled<4>([&](auto i) {
            const F scale = Simd::set(scales[position + i]);
            Simd::store(out + i * dim, widened<i>(lanes, scale, zero_of(scale)));
          });
        }
    }
    return elements;
  }
};

// Vectors of sums for kRows rows of few tokens, which convert codes to float32 between products: enough to
// hide the latency of a product, with registers left for codes, scales and factors on AVX2.
template <int kRows>
constexpr int kWidenedVectors = kRows >= Simd::kAttentionRows ? 2 : 4;

// p[r][key] = q[r] . k[key] for the first `n` positions of a span, with the sums of the float tiles.
template <int kRows>
void score_span(const AttentionHead& head, Q8Keys keys, int n, AttentionTile<kRows>& tile, NextLines next) {
  constexpr int kVectors = kWidenedVectors<kRows>;
  const int dim = head.key_dim;
  next.begin_tile(ceil_div(n, kVectors * Simd::kLanes) * (dim / 4));
  for (int first = 0; first < n; first += kVectors * Simd::kLanes) {
    F acc[kRows][kVectors];
    unrolled<kRows * kVectors>([&](auto i) { acc[i / kVectors][i % kVectors] = Simd::set(0); });
    for (int block = 0; block < dim / kBlockCols; ++block) {
      F scale[kVectors], zero[kVectors];
      unrolled<kVectors>([&](auto v) {
        const std::byte* at = keys.codes + q8_scale(dim, block, first + v * Simd::kLanes);
        scale[v] = Simd::load_half(reinterpret_cast<const std::uint16_t*>(at));
        zero[v] = zero_of(scale[v]);
      });
      for (int d = block * kBlockCols; d < (block + 1) * kBlockCols; d += 4) {
        next.step();
        const std::byte* codes =
            keys.codes + std::size_t(first) * kKeyLane + std::size_t(d / 4) * kKeyLaneStep;
        I lanes[kVectors];
        unrolled<kVectors>([&](auto v) { lanes[v] = load_codes(codes + v * Simd::kLanes * kKeyLane); });
        unrolled<4>([&](auto i) ALWAYS_INLINE {
          each_product<kRows, kVectors>(
              [&](int r) ALWAYS_INLINE { return Simd::set(tile.q[r][d + i]); },
              [&](int v) ALWAYS_INLINE { return widened<i>(lanes[v], scale[v], zero[v]); },
              [&](int r, int v, F q, F key) ALWAYS_INLINE { acc[r][v] = Simd::fma(q, key, acc[r][v]); });
        });
      }
    }
    unrolled<kRows * kVectors>([&](auto i) {
      Simd::store(tile.p[i / kVectors] + first + i % kVectors * Simd::kLanes,
                  acc[i / kVectors][i % kVectors]);
    });
  }
}

// acc = acc * rescale + p * v over the first `n` positions. Weights and scales of positions after them are 0.
template <int kRows>
void value_span(const AttentionHead& head, const Q8Values* values, int n, AttentionTile<kRows>& tile,
                NextLines next) {
  constexpr int kVectors = kWidenedVectors<kRows>;
  const int dim = head.value_dim;
  next.begin_tile(dim / (kVectors * Simd::kLanes) * ceil_div(n, 4));
  for (int column = 0; column < dim; column += kVectors * Simd::kLanes) {
    const float* scales = values->scales[column / kBlockCols];
    F acc[kRows][kVectors];
    unrolled<kRows * kVectors>([&](auto i) {
      constexpr int r = i / kVectors, v = i % kVectors;
      acc[r][v] = Simd::load(tile.acc[r] + column + v * Simd::kLanes) * tile.rescale[r];
    });
    for (int position = 0; position < n; position += 4) {
      next.step();
      const std::byte* codes = values->codes + q8_value(dim, position) + 4 * std::size_t(column);
      I lanes[kVectors];
      unrolled<kVectors>([&](auto v) { lanes[v] = load_codes(codes + v * Simd::kLanes * 4); });
      unrolled<4>([&](auto i) ALWAYS_INLINE {
        const F scale = Simd::set(scales[position + i]), zero = zero_of(scale);
        each_product<kRows, kVectors>([&](int r) ALWAYS_INLINE { return Simd::set(tile.p[r][position + i]); },
                                      [&](int v) ALWAYS_INLINE { return widened<i>(lanes[v], scale, zero); },
                                      [&](int r, int v, F weight, F value)
                                          ALWAYS_INLINE { acc[r][v] = Simd::fma(weight, value, acc[r][v]); });
      });
    }
    unrolled<kRows * kVectors>([&](auto i) {
      constexpr int r = i / kVectors, v = i % kVectors;
      Simd::store(tile.acc[r] + column + v * Simd::kLanes, acc[r][v]);
    });
  }
}

// Numbers n = 256 * high + low of two signed digits. `start` is the initial value of their products with
// codes of zero point 128, for each kBlock places: -128 * sum(n) if dot() counts codes from 0.
template <int kPlaces, int kBlock>
struct Digits {
  std::int8_t high[kPlaces], low[kPlaces];
  std::int32_t start[kPlaces / kBlock];

  // Splits `count` values, of which the largest becomes kMostDigits. Returns the unit, which is NaN if a
  // value is; sums may wrap then, but their values do not matter.
  float split(const float* x, int count) {
    I largest = Simd::set_int(0);
    for (int i = 0; i < count; i += Simd::kLanes)
      largest = Simd::max_int(largest, Simd::magnitude_bits(Simd::load(x + i)));
    const float magnitude = std::bit_cast<float>(Simd::reduce_max(largest));
    const F inverse = Simd::set(magnitude > 0 ? kMostDigits / magnitude : 0.0f);
    for (int block = 0; block < count; block += kBlock) {
      I sum = Simd::set_int(0);
      FOR_UNROLL (int i = block; i < block + kBlock; i += Simd::kLanes) {
        const I whole = Simd::round(Simd::load(x + i) * inverse);
        // The low byte is the low digit, with its sign; the rest is a multiple of 256.
        Simd::store_low_bytes(low + i, whole);
        Simd::store_low_bytes(high + i, Simd::template byte_of<1>(Simd::add_int(whole, Simd::set_int(128))));
        sum = Simd::add_int(sum, whole);
      }
      if constexpr (Simd::template kStartsFromSum<128>)
        start[block / kBlock] = std::int32_t(0u - 128u * std::uint32_t(Simd::reduce_add(sum)));
      else
        start[block / kBlock] = 0;
    }
    return magnitude / kMostDigits;
  }
};

// For each row of digits, calls take(r, v, sum) with the sums of products of codes and numbers [first, first
// + count), which are in one block. The codes of the next vector are `vector_step` bytes away, those of the
// next four places `step` bytes.
template <int kRows, int kVectors, int kPlaces, int kBlock, typename Take>
inline ALWAYS_INLINE void multiply_digits(const Digits<kPlaces, kBlock>* digits, int first, int count,
                                          const std::byte* codes, std::size_t vector_step, std::size_t step,
                                          Take&& take) {
  I high[kRows * kVectors], low[kRows * kVectors];
  unrolled<kRows * kVectors>([&](auto i) ALWAYS_INLINE {
    high[i] = Simd::set_int(0);
    low[i] = Simd::set_int(digits[i / kVectors].start[first / kBlock]);
  });
  for (int place = first; place < first + count; place += 4, codes += step) {
    I code[kVectors];
    unrolled<kVectors>([&](auto v)
                           ALWAYS_INLINE { code[v] = load_codes(codes + std::size_t(v) * vector_step); });
    unrolled<kRows * kVectors>([&](auto i) ALWAYS_INLINE {
      constexpr int r = i / kVectors, v = i % kVectors;
      high[i] = Simd::template dot<128>(high[i], code[v], Simd::broadcast4(digits[r].high + place));
      low[i] = Simd::template dot<128>(low[i], code[v], Simd::broadcast4(digits[r].low + place));
    });
  }
  unrolled<kRows * kVectors>([&](auto i) ALWAYS_INLINE {
    const I sum = Simd::add_int(Simd::template shift_left<8>(high[i]), low[i]);
    take(i / kVectors, i % kVectors, Simd::to_float(sum));
  });
}

template <int kRows>
struct Q8Tile : AttentionTile<kRows> {
  Digits<kMaxHeadDim, kBlockCols> q_digits[kRows];
  float q_unit[kRows];
};

template <int kRows>
void begin_tile(const AttentionHead& head, int row, Q8Tile<kRows>& tile) {
  begin_tile<kRows>(head, row, static_cast<AttentionTile<kRows>&>(tile));
  for (int r = 0; r < kRows; ++r) tile.q_unit[r] = tile.q_digits[r].split(tile.q[r], head.key_dim);
}

// Vectors of sums of each digit for kRows rows: enough to hide the latency of a product. GCC needs some
// registers to copy sums.
template <int kRows>
constexpr int kDigitVectors = kRows >= Simd::kAttentionRows ? 1 : 2;

// p[r][key] = q[r] . k[key] for the first `n` positions of a span.
template <int kRows>
void score_span(const AttentionHead& head, Q8Keys keys, int n, Q8Tile<kRows>& tile, NextLines next) {
  constexpr int kVectors = kDigitVectors<kRows>;
  const int dim = head.key_dim;
  next.all();
  for (int first = 0; first < n; first += kVectors * Simd::kLanes) {
    const std::size_t at = std::size_t(first) * kKeyLane;
    for (int block = 0; block < dim / kBlockCols; ++block) {
      F scale[kVectors];
      FOR_UNROLL (int v = 0; v < kVectors; ++v)
        scale[v] = Simd::load_half(reinterpret_cast<const std::uint16_t*>(
            keys.codes + q8_scale(dim, block, first + v * Simd::kLanes)));
      multiply_digits<kRows, kVectors>(
          tile.q_digits, block * kBlockCols, kBlockCols,
          keys.codes + at + std::size_t(block) * (kBlockCols / 4) * kKeyLaneStep, Simd::kLanes * kKeyLane,
          kKeyLaneStep, [&](int r, int v, F sum) ALWAYS_INLINE {
            float* score = tile.p[r] + first + v * Simd::kLanes;
            const F before = block == 0 ? Simd::set(0) : Simd::load(score);
            Simd::store(score, Simd::fma(sum * tile.q_unit[r], scale[v], before));
          });
    }
  }
}

// acc = acc * rescale + p * v over the first `n` positions.
template <int kRows>
void value_span(const AttentionHead& head, const Q8Values* values, int n, Q8Tile<kRows>& tile,
                NextLines next) {
  constexpr int kVectors = kDigitVectors<kRows>;
  const int dim = head.value_dim;
  next.all();
  for (int block = 0; block < dim / kBlockCols; ++block) {
    Digits<kKeySpan, kKeySpan> weights[kRows];
    float unit[kRows];
    for (int r = 0; r < kRows; ++r) {
      float scaled[kKeySpan];
      for (int i = 0; i < kKeySpan; i += Simd::kLanes)
        Simd::store(scaled + i, Simd::load(tile.p[r] + i) * Simd::load(values->scales[block] + i));
      unit[r] = weights[r].split(scaled, kKeySpan);
    }
    for (int column = block * kBlockCols; column < (block + 1) * kBlockCols;
         column += kVectors * Simd::kLanes)
      multiply_digits<kRows, kVectors>(weights, 0, n, values->codes + 4 * std::size_t(column),
                                       4 * Simd::kLanes, 4 * std::size_t(dim),
                                       [&](int r, int v, F sum) ALWAYS_INLINE {
                                         float* out = tile.acc[r] + column + v * Simd::kLanes;
                                         const F before = Simd::load(out) * tile.rescale[r];
                                         Simd::store(out, Simd::fma(sum, Simd::set(unit[r]), before));
                                       });
  }
}

inline void attention_q8(const AttentionHead& head, int first, int count) {
  if constexpr (Simd::kOneDot)
    attention_rows<Q8Codes<Q8Tile>>(head, first * head.heads, (first + count) * head.heads);
  else
    attention_of<Q8Codes<AttentionTile>, WidenedQ8Span>(head, first, count);
}

}  // namespace
}  // namespace metal_prefill::cpu
