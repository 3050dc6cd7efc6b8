// Definitions that all products of 8-bit integers share.
#pragma once

#include "row_ops.h"

namespace metal_prefill::cpu {
namespace {

// Sets without a product that sums four bytes in 32 bits may sum products in 16 first.
template <class S>
concept SumsHalfwords = requires { typename S::Halfwords; };

// Steps of four columns whose products, in pairs, fit in 16 bits; 0 if a set sums in 32 bits directly.
template <class S, class Block>
constexpr int kHalfwordSteps = SumsHalfwords<S> ? 32767 / (2 * 127 * Block::kMaxCode) : 0;

template <class S, bool kHalfwords>
struct Sum {
  using Type = typename S::I;
};
template <class S>
struct Sum<S, true> {
  using Type = typename S::Halfwords;
};

// Whether a set adds the two sums of a block, times the integers of their scales, as integers. They stay
// below 2^24, so that float32 is exact, too.
template <class S, class Block>
constexpr bool kAddsHalves = kHasIntegerHalves<Block> && requires { S::kScalesHalfwords; };

// Whether a set scales and adds the sums of both halves of a block before it applies the scale of the
// activations, which saves one multiplication per token.
template <class S, class Block>
constexpr bool kJoinsHalves = kHasHalves<Block> && !kAddsHalves<S, Block> && requires { S::kJoinsHalves; };

// The scaled sum of a block and of activations of scale 1, for kJoinsHalves.
inline F joined_sum(F first_scale, I first, F second_scale, I second) {
  return Simd::fma(Simd::to_float(second), second_scale, Simd::to_float(first) * first_scale);
}

// The sums of both halves of a block, each times the integers of its scales, for the rows from `row` on.
inline F scaled_sum(const std::int8_t (&scale_code)[2][kGroupRows], int row, F first, F second) {
  return Simd::fma(first, load_floats(scale_code[0] + row), second * load_floats(scale_code[1] + row));
}

// Number of integer sums of a block, each with a scale.
template <class Block>
constexpr int kBlockSums = kHasHalves<Block> ? 2 : 1;

// Whether 16 bits hold every sum of a block.
template <class S, class Block>
constexpr bool kWholeHalfwords = kHalfwordSteps<S, Block> >= 8 / kBlockSums<Block>;

// Initial values of the integer sums of a block.
template <class S, class Block>
inline void first_sums(const ActivationTile::Terms& terms, I (&start)[2]) {
  start[0] = start[1] = S::set_int(0);
  if constexpr (S::template kStartsFromSum<Block::kZero>) {
    start[0] = S::set_int(terms.start);
    if constexpr (kHasHalves<Block>) {
      const I first_half = S::set_int(terms.start_half);
      start[1] = S::sub_int(start[0], first_half);
      start[0] = first_half;
    }
    constexpr int kShift = std::countr_zero(unsigned(Block::kZero)) - 3;  // `start` is for a zero point of 8
    if constexpr (kShift > 0)
      for (int h = 0; h < kBlockSums<Block>; ++h) start[h] = S::template shift_left<kShift>(start[h]);
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
