// Rows in 8 bits with one scale each (w8a8).
//
// A product does not change if weights and activations are multiplied by the same orthogonal matrix. This one
// consists of Hadamard matrices, in blocks of 64 columns, which spread a large value over its block. One
// scale then suffices for all columns of a row, so that they are summed as integers, with one conversion per
// output. The columns after the last block are in blocks of the powers of two that they add up to.
//
// All sets add in the same order, so that results are bit-identical.
#pragma once

#include <bit>
#include <cmath>
#include <span>

#include "tile_panels.h"

namespace metal_prefill::cpu {
namespace {

// Norm of the rows of the matrices, a power of two. A row's scale compensates for it.
constexpr float kRotationLength = 8;

// Replaces each of four vectors, kQuarter apart, by their sum minus twice itself: twice a reflection.
template <int kQuarter, int kVectors>
inline void mix_quarters(F (&v)[kVectors]) {
  unrolled<kQuarter>([&](auto i) ALWAYS_INLINE {
    const F sum = v[i] + v[i + kQuarter] + (v[i + 2 * kQuarter] + v[i + 3 * kQuarter]);
    unrolled<4>([&](auto q) ALWAYS_INLINE {
      v[i + q * kQuarter] = Simd::fma(v[i + q * kQuarter], Simd::set(-2), sum);
    });
  });
}

// Moves column c ^ (kStep * q) of quarter q to column c.
template <int kStep, int kQuarter, int kVectors>
inline void move_columns(F (&v)[kVectors]) {
  constexpr int kLanes = Simd::kLanes;
  F from[kVectors];
  std::copy_n(v, kVectors, from);
  unrolled<kVectors>([&](auto i) ALWAYS_INLINE {
    constexpr int kMoved = kStep * (i / kQuarter), kInVector = kMoved % kLanes;
    const F& other = from[i ^ (kMoved / kLanes)];
    if constexpr (kInVector == 0)
      v[i] = other;
    else
      v[i] = Simd::template swap<kInVector>(other);
  });
}

// Rotates 64 columns, in four quarters. Sums across quarters need no shuffle; columns move in between, so
// that after three rounds each result depends on all 64. Returns the largest magnitudes, at least `largest`.
inline I rotate_block(const float* x, float* out, I largest) {
  constexpr int kVectors = kRotatedCols / Simd::kLanes, kQuarter = kVectors / 4;
  F v[kVectors];
  unrolled<kVectors>([&](auto i) ALWAYS_INLINE { v[i] = Simd::load(x + i * Simd::kLanes); });
  mix_quarters<kQuarter>(v);
  move_columns<1, kQuarter>(v);
  mix_quarters<kQuarter>(v);
  move_columns<4, kQuarter>(v);
  mix_quarters<kQuarter>(v);
  unrolled<kVectors>([&](auto i) ALWAYS_INLINE {
    Simd::store(out + i * Simd::kLanes, v[i]);
    largest = Simd::max_int(largest, Simd::magnitude_bits(v[i]));
  });
  return largest;
}

// Rotates fewer than 64 columns, padded with zeros.
inline void rotate_rest(const float* x, int n, float* out) {
  std::copy_n(x, n, out);
  std::fill(out + n, out + kRotatedCols, 0.0f);
  for (int size = 0; n > 0; out += size, n -= size) {
    size = int(std::bit_floor(unsigned(n)));
    for (int step = 1; step < size; step *= 2)
      for (int i = 0; i < size; ++i)
        if ((i & step) == 0) {
          const float a = out[i], b = out[i + step];
          out[i] = a + b;
          out[i + step] = a - b;
        }
    for (int i = 0; i < size; ++i) out[i] *= std::sqrt(float(kRotatedCols) / float(size));
  }
}

// Sets that multiply two pairs of 16-bit integers per lane in one instruction, twice the rate of float32.
template <class S>
concept MultipliesHalfwords = requires(typename S::I a) { S::dot_halfwords(a, a, a); };

// Sets whose products of unsigned and signed bytes are added in pairs in 16 bits: exact if adjacent signed
// bytes add up to at most 128 (255 * 128 < 2^15), with one vector operation fewer than products of signed
// bytes.
template <class S>
concept LimitsPairs =
    requires(std::byte* p, std::int32_t (&halves)[S::kLanes]) { S::halve_pairs(p, halves); };

// Sets that pack four vectors of codes into one of bytes.
template <class S>
concept PacksCodes = requires(const typename S::I (&a)[4]) { S::pack_codes(a); };

// Rounds `count` rotated values, a multiple of kRotatedCols. Returns the sum of their codes.
template <class S>
inline std::uint32_t round_rotated(const float* x, int count, F inverse, std::byte* out) {
  auto* q = reinterpret_cast<std::int8_t*>(out);
  const auto rounded = [&](int i) { return S::round(S::load(x + i) * inverse); };
  if constexpr (PacksCodes<S>) {
    I sum = S::set_int(0);
    for (int i = 0; i < count; i += 4 * S::kLanes) {
      const I codes[] = {rounded(i), rounded(i + S::kLanes), rounded(i + 2 * S::kLanes),
                         rounded(i + 3 * S::kLanes)};
      const I bytes = S::pack_codes(codes);
      S::store_bytes(q + i, bytes);
      sum = S::template dot<0>(sum, S::set_int(0x01010101), bytes);
    }
    return std::uint32_t(S::reduce_add(sum));
  } else if constexpr (StoresBlocks<S>) {
    std::uint32_t sum = 0, halves[2];
    for (int i = 0; i < count; i += kBlockCols) {
      const I codes[] = {rounded(i), rounded(i + 8), rounded(i + 16), rounded(i + 24)};
      S::store_block(q + i, codes, halves);
      sum += halves[0] + halves[1];
    }
    return sum;
  } else {
    I sum = S::set_int(0);
    for (int i = 0; i < count; i += S::kLanes) {
      const I codes = rounded(i);
      S::store_int8(q + i, codes);
      sum = S::add_int(sum, codes);
    }
    return std::uint32_t(S::reduce_add(sum));
  }
}
// The same in 16 bits. Needs no sum, as weights are signed.
template <MultipliesHalfwords S>
inline std::uint32_t round_rotated_wide(const float* x, int count, F inverse, std::byte* out) {
  auto* q = reinterpret_cast<std::int16_t*>(out);
  for (int i = 0; i < count; i += S::kLanes) S::store_int16(q + i, S::round(S::load(x + i) * inverse));
  return 0;
}

// The largest magnitude becomes `most`; rounds to nearest even. NaN or infinity in a row makes its scale NaN.
template <typename Round>
inline void rotate_row(const float* x, int n, int most, float* memory, RotatedRows::Terms& terms,
                       Round&& round) {
  const int whole = n / kRotatedCols * kRotatedCols, padded = round_up(n, kRotatedCols);
  I largest = Simd::set_int(0);
  for (int i = 0; i < whole; i += kRotatedCols) largest = rotate_block(x + i, memory + i, largest);
  if (whole < n) rotate_rest(x + whole, n - whole, memory + whole);
  for (int i = whole; i < padded; i += Simd::kLanes)
    largest = Simd::max_int(largest, Simd::magnitude_bits(Simd::load(memory + i)));
  const float magnitude = std::bit_cast<float>(Simd::reduce_max(largest)), code = float(most);
  const bool vanishes = magnitude < code * std::numeric_limits<float>::min();
  const std::uint32_t sum = round(memory, padded, Simd::set(vanishes ? 0.0f : code / magnitude));
  terms.scale = vanishes ? 0.0f : magnitude / (code * kRotationLength);
  constexpr bool kFromSum = LimitsPairs<Simd> || Simd::kStartsFromSum<Simd::kRotatedZero>;
  terms.start = kFromSum ? std::int32_t(0u - unsigned(Simd::kRotatedZero) * sum) : 0;
  terms.rests = 0;
}

void rotate(const float* x, int n, float* memory, std::byte* q, RotatedRows::Terms& terms) {
  rotate_row(x, n, 127, memory, terms, [&](const float* rotated, int count, F inverse) {
    return round_rotated<Simd>(rotated, count, inverse, q);
  });
}

template <class S>
void rotate_wide(const float* x, int n, float* memory, std::byte* q, RotatedRows::Terms& terms) {
  rotate_row(x, n, widest_code(n), memory, terms, [&](const float* rotated, int count, F inverse) {
    return round_rotated_wide<S>(rotated, count, inverse, q);
  });
}
// rotate_wide(), if a set has it.
template <class S>
constexpr auto wide_rotation() {
  if constexpr (MultipliesHalfwords<S>)
    return rotate_wide<S>;
  else
    return nullptr;
}

// Halves pairs whose sum is too large, and stores the other halves after the row: 3% of the pairs of random
// rows of 384 columns, 1% with 3072.
template <LimitsPairs S>
void limit_pairs(std::byte* q, int padded, RotatedRows::Terms& terms) {
  auto* rest = reinterpret_cast<RotatedRows::Rest*>(q + padded);
  constexpr int kFours = S::kLanes;
  for (int four = 0; four < padded / 4; four += kFours) {
    alignas(64) std::int32_t halves[kFours];
    for (unsigned found = S::halve_pairs(q + 4 * four, halves); found; found &= found - 1) {
      const int lane = std::countr_zero(found), at = four + lane;
      *rest++ = {at / kPanelSteps * int(2 * kPanelBytes) + at % kPanelSteps * int(kStepBytes), halves[lane]};
    }
  }
  terms.rests = std::int32_t(rest - reinterpret_cast<RotatedRows::Rest*>(q + padded));
}
// limit_pairs(), if a set needs it.
template <class S>
constexpr auto pair_limiter() -> decltype(Kernels::limit_pairs) {
  if constexpr (LimitsPairs<S>)
    return limit_pairs<S>;
  else
    return nullptr;
}

template <class S = Simd, bool kWide = false>
struct RotatedProduct {
  using Weights = FourBytes;
  using Sum = I;
  const float* scales;              // per row
  const RotatedRows::Terms* terms;  // per token
  const std::byte* after_row = nullptr;
  std::size_t stride = 0;

  Sum first(int token) const { return Simd::set_int(terms[token].start); }
  std::span<const RotatedRows::Rest> rests(int token) const
    requires(LimitsPairs<S> && !kWide)
  {
    return {reinterpret_cast<const RotatedRows::Rest*>(after_row + std::size_t(token) * stride),
            std::size_t(terms[token].rests)};
  }
  static I value(const std::byte* x) { return Simd::broadcast4(reinterpret_cast<const std::int8_t*>(x)); }
  static Sum add(Sum sum, I weights, I x) {
    if constexpr (kWide)
      return S::dot_halfwords(sum, weights, x);
    else
      return Simd::template dot<LimitsPairs<S> ? 0 : Simd::kRotatedZero>(sum, weights, x);
  }
  F finish(Sum sum, int token, int row) const {
    return Simd::to_float(sum) * (Simd::load(scales + row) * terms[token].scale);
  }
};

template <class S, bool kWide>
void multiply_rotated_as(const PackedMatrix& weight, GroupRange groups, const RotatedRows& x, int first,
                         int count, const ProductOutput& out, const PrefetchRange& next) {
  each_group(weight, groups, out, next,
             [&](int group, const ProductOutput& own, const PrefetchRange& following) {
               const int blocks = weight.blocks_per_row();
               const RotatedProduct<S, kWide> product{weight.scales(group), x.terms + first,
                                                      x.row(first) + blocks * kRotatedCols, x.stride};
               multiply_panels(product, {weight.group(group), blocks, x.row(first), x.stride}, count, own,
                               following);
             });
}

template <class S>
void multiply_rotated(const PackedMatrix& weight, GroupRange groups, const RotatedRows& x, int first,
                      int count, const ProductOutput& out, const PrefetchRange& next) {
  if constexpr (MultipliesHalfwords<S>)
    if (weight.packing == Packing::kRotatedWide)
      return multiply_rotated_as<S, true>(weight, groups, x, first, count, out, next);
  multiply_rotated_as<S, false>(weight, groups, x, first, count, out, next);
}

constexpr int kCodeZero = std::max(Simd::kRotatedZero, 0);  // signed codes have a zero point of 0

}  // namespace
}  // namespace metal_prefill::cpu
