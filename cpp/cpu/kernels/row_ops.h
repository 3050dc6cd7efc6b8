// Operations on single rows, in terms of the vectors of one instruction set (Simd, included before).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "prefetch.h"
#include "transpose_halves.h"
#include "unroll.h"

namespace metal_prefill::cpu {
namespace {

using F = Simd::F;
using I = Simd::I;

// Calls body with `count`, 1 to kMost, as a constant.
template <int kMost, typename Body>
inline ALWAYS_INLINE void with_count(int count, Body&& body) {
  if constexpr (kMost > 1)
    if (count < kMost) return with_count<kMost - 1>(count, body);
  body(std::integral_constant<int, kMost>());
}

// Calls add(i, j, row(i), column(j)) for each pair. The shorter side is loaded once and kept: 3 by 4 sums and
// their factors take 16 registers. With one more, GCC keeps a sum in memory, and each addition waits for the
// previous store.
template <int kRows, int kColumns, typename Row, typename Column, typename Add>
inline ALWAYS_INLINE void each_product(Row&& row, Column&& column, Add&& add) {
  if constexpr (kRows < kColumns) {
    decltype(row(0)) kept[kRows];
    unrolled<kRows>([&](auto i) ALWAYS_INLINE { kept[i] = row(i); });
    unrolled<kColumns>([&](auto j) ALWAYS_INLINE {
      const auto passing = column(j);
      unrolled<kRows>([&](auto i) ALWAYS_INLINE { add(i, j, kept[i], passing); });
    });
  } else {
    decltype(column(0)) kept[kColumns];
    unrolled<kColumns>([&](auto j) ALWAYS_INLINE { kept[j] = column(j); });
    unrolled<kRows>([&](auto i) ALWAYS_INLINE {
      const auto passing = row(i);
      unrolled<kColumns>([&](auto j) ALWAYS_INLINE { add(i, j, passing, kept[j]); });
    });
  }
}

inline F load_floats(const float* p) {
  return Simd::load(p);
}
inline F load_floats(const std::uint16_t* p) {
  return Simd::load_half(p);
}
inline F load_floats(const std::int8_t* p) {
  return Simd::to_float(Simd::load_int8(p));
}
inline F load_floats(const Bfloat16* p) {
  return Simd::load_bfloat16(reinterpret_cast<const std::uint16_t*>(p));
}

// Loads a vector; pads the last one of a row with zeros.
inline F load_part(const float* p, int n) {
  if (n >= Simd::kLanes) return Simd::load(p);
  float lanes[Simd::kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return Simd::load(lanes);
}

inline void store_part(float* p, F a, int n) {
  if (n >= Simd::kLanes) return Simd::store(p, a);
  float lanes[Simd::kLanes];
  Simd::store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// 2^x, at most 2^127, 0 if the result would be subnormal, NaN for NaN. Relative error below 3e-7.
inline F exp2(F x) {
  const F clamped = Simd::min(Simd::set(127.0f), x);
  const I n = Simd::round(clamped);
  const F f = clamped - Simd::to_float(n);  // within [-0.5, 0.5]
  F p = Simd::set(1.32647273e-3f);          // minimax, exact at 0
  p = Simd::fma(p, f, Simd::set(9.67151299e-3f));
  p = Simd::fma(p, f, Simd::set(5.55073358e-2f));
  p = Simd::fma(p, f, Simd::set(2.40222424e-1f));
  p = Simd::fma(p, f, Simd::set(6.93147004e-1f));
  p = Simd::fma(p, f, Simd::set(1.0f));
  return Simd::zero_below(Simd::scale_by_power(p, n), x, Simd::set(-126.0f));
}

constexpr float kLog2E = 1.44269504f;

template <F (*kLoad)(const std::uint16_t*), float (*kToFloat)(std::uint16_t)>
void to_float_row(const std::uint16_t* in, float* out, int n) {
  int i = 0;
  for (; i + Simd::kLanes <= n; i += Simd::kLanes) Simd::store(out + i, kLoad(in + i));
  for (; i < n; ++i) out[i] = kToFloat(in[i]);
}

// Sums are unsigned since they may wrap: if a block has NaN or infinity, some sets round to the smallest
// integer. Its scale is then NaN or infinite, so the codes do not matter.
inline void put_scale(float scale, std::uint32_t first_half, std::uint32_t second_half, int token,
                      ActivationTile& out) {
  const std::uint32_t sum = first_half + second_half;
  out.terms[token] = {
      .scale = scale,
      .scaled_sum = scale * float(std::int32_t(sum)),
      .start = std::int32_t(0u - 8u * sum),
      .start_half = std::int32_t(0u - 8u * first_half),
  };
}

// Sets with vectors of eight store a block at once, and sum its halves as bytes.
template <class S>
concept StoresBlocks = requires(std::int8_t* p, const typename S::I (&a)[4], std::uint32_t (&sums)[2]) {
  S::store_block(p, a, sums);
};

// Quantizes one block of one token. The largest magnitude becomes 127, rounding is to nearest even. NaN or
// infinity in a block makes its scale NaN or infinite, so that it is not lost.
template <class S>
inline void quantize_block(const float* x, int token, ActivationTile& out) {
  constexpr int kVectors = kBlockCols / S::kLanes;
  F v[kVectors];
  I largest = S::set_int(0);
  for (int i = 0; i < kVectors; ++i) {
    v[i] = S::load(x + i * S::kLanes);
    largest = S::max_int(largest, S::magnitude_bits(v[i]));
  }
  const float magnitude = std::bit_cast<float>(S::reduce_max(largest));
  const F inverse = S::set(magnitude > 0 ? 127.0f / magnitude : 0.0f);
  I rounded[kVectors];
  for (int i = 0; i < kVectors; ++i) rounded[i] = S::round(v[i] * inverse);
  std::uint32_t half_sum[2] = {0, 0};
  if constexpr (StoresBlocks<S>) {
    S::store_block(out.q[token], rounded, half_sum);
  } else {
    for (int i = 0; i < kVectors; ++i) {
      S::store_int8(out.q[token] + i * S::kLanes, rounded[i]);
      half_sum[i * 2 / kVectors] += std::uint32_t(S::reduce_add(rounded[i]));
    }
  }
  put_scale(magnitude / 127.0f, half_sum[0], half_sum[1], token, out);
}

// Sets with vectors of sixteen can reduce four of them together.
template <class S>
concept ReducesFour = requires(const typename S::I (&a)[4], std::int32_t (&sums)[4]) {
  S::reduce_max4(a);
  S::reduce_add4(a, sums);
};

// Quantizes four blocks to the same values as one by one. Block i begins `step` floats after block i - 1 and
// goes to out[i * tile_step], token + i * token_step.
template <ReducesFour S>
inline void quantize_four(const float* x, std::size_t step, int token, int token_step, ActivationTile* out,
                          int tile_step) {
  F v[4][2];
  I largest[4], rounded[2][4];
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) v[i][half] = S::load(x + std::size_t(i) * step + half * S::kLanes);
    largest[i] = S::max_int(S::magnitude_bits(v[i][0]), S::magnitude_bits(v[i][1]));
  }
  const F magnitude = S::reduce_max4(largest);
  float inverse[S::kLanes], scale[S::kLanes];
  S::store(inverse, S::positive_quotient(S::set(127.0f), magnitude));
  S::store(scale, magnitude / 127.0f);
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i) {
      rounded[half][i] = S::round(v[i][half] * inverse[i]);
      S::store_int8(out[i * tile_step].q[token + i * token_step] + half * S::kLanes, rounded[half][i]);
    }
  std::int32_t half_sum[2][4];
  for (int half = 0; half < 2; ++half) S::reduce_add4(rounded[half], half_sum[half]);
  for (int i = 0; i < 4; ++i) {
    put_scale(scale[i], std::uint32_t(half_sum[0][i]), std::uint32_t(half_sum[1][i]), token + i * token_step,
              out[i * tile_step]);
  }
}

template <class S>
inline void quantize_rows(const float* x, std::size_t stride, int first, int count, int n_blocks,
                          ActivationTile* out) {
  int i = 0;
  if constexpr (ReducesFour<S>) {
    if (n_blocks == 1)
      for (; i + 4 <= count; i += 4)
        quantize_four<S>(x + std::size_t(i) * stride, stride, first + i, 1, out, 0);
  }
  for (; i < count; ++i) {
    const float* row = x + std::size_t(i) * stride;
    int b = 0;
    if constexpr (ReducesFour<S>) {
      for (; b + 4 <= n_blocks; b += 4)
        quantize_four<S>(row + std::size_t(b) * kBlockCols, kBlockCols, first + i, 0, out + b, 1);
    }
    for (; b < n_blocks; ++b) quantize_block<S>(row + std::size_t(b) * kBlockCols, first + i, out[b]);
  }
}

void quantize(const float* x, std::size_t stride, int first, int count, int n_blocks, ActivationTile* out) {
  quantize_rows<Simd>(x, stride, first, count, n_blocks, out);
}

// Accumulates the vectors of a row by add(sum, vector), in four sums to hide the latency of an addition.
template <typename Add>
inline float sum_of_vectors(const float* x, int n, Add&& add) {
  constexpr int kSums = 4;
  F sums[kSums] = {Simd::set(0), Simd::set(0), Simd::set(0), Simd::set(0)};
  int i = 0;
  for (; i + kSums * Simd::kLanes <= n; i += kSums * Simd::kLanes)
    unrolled<kSums>([&](auto s)
                        ALWAYS_INLINE { sums[s] = add(sums[s], Simd::load(x + i + s * Simd::kLanes)); });
  for (; i < n; i += Simd::kLanes) sums[0] = add(sums[0], load_part(x + i, n - i));
  return Simd::reduce_add(sums[0] + sums[1] + (sums[2] + sums[3]));
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  const float squares = sum_of_vectors(x, n, [](F sum, F v) { return Simd::fma(v, v, sum); });
  const F scale = Simd::set(1.0f / std::sqrt(squares / float(n) + eps));
  for (int i = 0; i < n; i += Simd::kLanes) {
    const F v = load_part(x + i, n - i) * scale;
    store_part(out + i, v * load_part(weight + i, n - i), n - i);
  }
}

// Computes the deviation around the mean, not from the sum of squares, which would cancel for a large mean.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  const float mean = sum_of_vectors(x, n, [](F sum, F v) { return sum + v; }) / float(n);
  const int whole = n / Simd::kLanes * Simd::kLanes;
  float squares = sum_of_vectors(x, whole, [&](F sum, F v) {
    const F d = v - mean;
    return Simd::fma(d, d, sum);
  });
  for (int i = whole; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const F scale = Simd::set(1.0f / std::sqrt(squares / float(n) + eps));
  for (int i = 0; i < n; i += Simd::kLanes) {
    const F v = (load_part(x + i, n - i) - mean) * scale;
    const F offset = bias ? load_part(bias + i, n - i) : Simd::set(0);
    store_part(out + i, Simd::fma(v, load_part(weight + i, n - i), offset), n - i);
  }
}

// Rotates pairs of one style, so that the compiler knows the strides and vectorizes the loop.
template <int kStep>
inline void rotate(float* __restrict a, float* __restrict b, const float* __restrict cosines,
                   const float* __restrict sines, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    const float x = a[i * kStep], y = b[i * kStep];
    a[i * kStep] = x * cosines[i] - y * sines[i];
    b[i * kStep] = x * sines[i] + y * cosines[i];
  }
}

void rope(float* head, const float* cos_sin, int pairs, RopeStyle style) {
  const float* sines = cos_sin + pairs;
  if (style == RopeStyle::kNeox) {
    rotate<1>(head, head + pairs, cos_sin, sines, pairs);
  } else {
    rotate<2>(head, head + 1, cos_sin, sines, pairs);
  }
}

template <bool kBias, bool kAdd>
inline void add_rows(const float* products, const float* bias, int rows, int columns, float* out,
                     std::size_t stride) {
  for (int row = 0; row < rows; ++row, products += kGroupRows, out += stride)
    for (int r = 0; r < columns; r += Simd::kLanes) {
      F value = Simd::load(products + r);
      if constexpr (kBias) value += Simd::load(bias + r);
      if constexpr (kAdd) value = load_part(out + r, columns - r) + value;
      store_part(out + r, value, columns - r);
    }
}

void add_products(const float* products, const float* bias, int rows, int columns, bool add, float* out,
                  std::size_t stride) {
  if (bias && add) return add_rows<true, true>(products, bias, rows, columns, out, stride);
  if (bias) return add_rows<true, false>(products, bias, rows, columns, out, stride);
  if (add) return add_rows<false, true>(products, bias, rows, columns, out, stride);
  add_rows<false, false>(products, bias, rows, columns, out, stride);
}

// x = cap * tanh(x / cap), with tanh(u) = 1 - 2 / (1 + exp(2 u)). Preserves NaN.
void soft_cap(float* x, float cap, int n) {
  const F rate = Simd::set(2 * kLog2E / cap), one = Simd::set(1), limit = Simd::set(cap),
          twice = Simd::set(2 * cap);
  for (int i = 0; i < n; i += Simd::kLanes) {
    const F power = exp2(load_part(x + i, n - i) * rate);
    store_part(x + i, limit - twice / (one + power), n - i);
  }
}

void relative_scores(const RelativeQuery& query, float* out) {
  for (int j = 0; j < query.positions; ++j) {
    const std::size_t row = std::size_t(query.row_of[-j]) * query.stride;
    const float *key = query.keys + row, *own = query.queries + row,
                *k = query.k + std::size_t(j) * query.k_stride;
    F by_query = Simd::set(0), by_key = Simd::set(0);
    for (int d = 0; d < query.dim; d += Simd::kLanes) {
      const int n = query.dim - d;
      by_query = Simd::fma(load_part(query.q + d, n), load_part(key + d, n), by_query);
      by_key = Simd::fma(load_part(k + d, n), load_part(own + d, n), by_key);
    }
    out[j] = query.scale * Simd::reduce_add(by_query + by_key);
  }
}

double sum_exp(const float* x, float shift, int n) {
  constexpr int kStretch = 4096;  // values summed in float32; stretches are summed in float64
  double total = 0;
  for (int start = 0; start < n; start += kStretch) {
    const int end = start + kStretch < n ? start + kStretch : n;
    F sum = Simd::set(0);
    int i = start;
    for (; i + Simd::kLanes <= end; i += Simd::kLanes) {
      const F shifted = Simd::load(x + i) - shift;
      sum += exp2(shifted * kLog2E);
    }
    total += double(Simd::reduce_add(sum));
    for (; i < end; ++i) total += std::exp(double(x[i]) - double(shift));
  }
  return total;
}

// Quantizes a block to Q8_0: the largest magnitude becomes 127, halves are rounded away from zero. Codes are
// 128 higher than there. Returns the scale, which is NaN if the block has NaN or infinity.
inline std::uint16_t round_to_q8(const float* x, std::uint8_t (&codes)[kBlockCols]) {
  std::uint32_t largest = 0;
  for (int i = 0; i < kBlockCols; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const float magnitude = std::bit_cast<float>(largest), scale = magnitude / 127.0f;
  const bool finite = magnitude <= std::numeric_limits<float>::max();
  const std::uint16_t half = float_to_half(finite ? scale : std::numeric_limits<float>::quiet_NaN());
  const float inverse = finite && half != 0 ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kBlockCols; ++i) {
    const float value = finite ? x[i] * inverse : 0.0f, size = std::fabs(value);
    const int whole = int(size), code = whole + int(2.0f * (size - float(whole)));
    codes[i] = std::uint8_t(128 + (value < 0 ? -code : code));
  }
  return half;
}

// Quantizes `row`. put(d, codes) stores the codes of dimensions [d, d + 32). Scales are kKeySpan apart.
template <typename Put>
inline void store_q8(const float* row, int dim, std::byte* scales, Put&& put) {
  for (int d = 0; d < dim; d += kBlockCols, scales += kKeySpan * sizeof(std::uint16_t)) {
    std::uint8_t codes[kBlockCols];
    const std::uint16_t scale = round_to_q8(row + d, codes);
    std::memcpy(scales, &scale, sizeof scale);
    put(d, codes);
  }
}

void store_key(const float* key, int dim, int stride, KvLayout layout, void* keys, int position) {
  const int first = position / kKeyBlock * kKeyBlock * stride + position % kKeyBlock;
  if (layout == KvLayout::kFloat) {
    for (int d = 0; d < dim; ++d) static_cast<float*>(keys)[first + d * kKeyBlock] = key[d];
    return;
  }
  if (layout == KvLayout::kHalf) {
    std::uint16_t lanes[Simd::kLanes];
    for (int d = 0; d < dim; d += Simd::kLanes) {
      Simd::store_half(lanes, load_part(key + d, dim - d));
      for (int i = 0; i < Simd::kLanes && d + i < dim; ++i)
        static_cast<std::uint16_t*>(keys)[first + (d + i) * kKeyBlock] = lanes[i];
    }
    return;
  }
  auto* head = static_cast<std::byte*>(keys);
  std::byte* out = head + std::size_t(position) * kKeyLane;
  store_q8(key, dim, head + q8_scale(dim, 0, position), [&](int d, const std::uint8_t* codes) {
    for (int i = 0; i < kBlockCols; i += 4) std::memcpy(out + (d + i) / 4 * kKeyLaneStep, codes + i, 4);
  });
}

// Pads whole vectors of the row with zeros after the last dimension.
void store_value(const float* value, int dim, int stride, KvLayout layout, void* values, int position) {
  const int first = position * stride;
  if (layout == KvLayout::kQ8) {
    auto* head = static_cast<std::byte*>(values);
    std::byte* out = head + q8_value(dim, position);
    return store_q8(value, dim, head + q8_scale(dim, 0, position), [&](int d, const std::uint8_t* codes) {
      for (int i = 0; i < kBlockCols; ++i) out[(d + i) * 4] = std::byte(codes[i]);
    });
  }
  for (int d = 0; d < dim; d += Simd::kLanes) {
    const F part = load_part(value + d, dim - d);
    if (layout == KvLayout::kFloat)
      Simd::store(static_cast<float*>(values) + first + d, part);
    else
      Simd::store_half(static_cast<std::uint16_t*>(values) + first + d, part);
  }
}

// Stores a tile of positions in one block of keys; `dim` is a multiple of the tile.
inline void store_key_tile(const float* key, std::size_t step, int dim, int stride, std::uint16_t* keys,
                           int position) {
  alignas(64) std::uint16_t halves[kHalvesTile][kMaxHeadDim];
  for (int i = 0; i < kHalvesTile; ++i, key += step)
    for (int d = 0; d < dim; d += Simd::kLanes) Simd::store_half(halves[i] + d, load_part(key + d, dim - d));
  keys += position / kKeyBlock * kKeyBlock * stride + position % kKeyBlock;
  for (int d = 0; d < dim; d += kHalvesTile)
    transpose_halves(halves[0] + d, sizeof *halves, keys + d * kKeyBlock, kKeyBlock * sizeof *keys);
}

void store_keys(const float* key, std::size_t step, int count, int dim, int stride, KvLayout layout,
                void* keys, int position) {
  const int tiled =
      layout == KvLayout::kHalf && dim % kHalvesTile == 0 ? count / kHalvesTile * kHalvesTile : 0;
  for (int i = 0; i < tiled; i += kHalvesTile)
    store_key_tile(key + std::size_t(i) * step, step, dim, stride, static_cast<std::uint16_t*>(keys),
                   position + i);
  for (int i = tiled; i < count; ++i)
    store_key(key + std::size_t(i) * step, dim, stride, layout, keys, position + i);
}

void store_values(const float* value, std::size_t step, int count, int dim, int stride, KvLayout layout,
                  void* values, int position) {
  for (int i = 0; i < count; ++i, value += step)
    store_value(value, dim, stride, layout, values, position + i);
}

}  // namespace
}  // namespace metal_prefill::cpu
