// What products of 8-bit integers share, whatever the order in which they take blocks and tokens.
#pragma once

#include "tile_rows.h"

namespace metal_prefill::cpu {
namespace {

// Sets without a product that sums four bytes in 32 bits may sum a whole block of 4-bit codes in 16.
template <class S>
concept SumsHalfwords = requires(typename S::I a) {
  S::add_pairs(a, a, a);
  S::sum_halfwords(a, a);
};

// Integer sums of a block, each with a scale.
template <class Block>
constexpr int kBlockSums = kHasHalves<Block> ? 2 : 1;

// Where the integer sums of a block begin.
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
    if constexpr (Block::kZero == 128)
      for (int h = 0; h < kBlockSums<Block>; ++h) start[h] = S::template shift_left<4>(start[h]);
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
