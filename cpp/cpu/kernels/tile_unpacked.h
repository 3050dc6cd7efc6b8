// Products of many tokens for sets with sixteen registers.
//
// Blocks of 32 columns are the outer loop and tokens the inner one. Two vectors of rows of a block are
// unpacked once for all tokens, so that products read codes from the L1 cache, and a broadcast activation
// serves both. Eight integer sums hide the latency of a product. Float sums are in the output, a few KB in
// the L1 cache: a load and a store per vector, token and block.
//
// By instruction count, a vector of 8 rows takes 20 vector operations per block and token with sums in 16
// bits (8 products, 7 additions, and five for scales), 8.5 loads and a store. tile_gemm.h, with tokens as the
// outer loop and float sums in registers, takes 22.3 operations and 12.3 loads.
#pragma once

#include "tile_blocks.h"

namespace metal_prefill::cpu {
namespace {

template <class S>
concept UnpacksBlocks = requires {
  S::kUnpackedRows;
  S::kUnpackedTokens;
};

// Up to this many tokens, the loads and stores of unpacking cost more than they save.
template <class S>
constexpr int kFewTokens = 0;
template <UnpacksBlocks S>
constexpr int kFewTokens<S> = 2 * S::kUnpackedTokens;

// Vectors [v, v + kRows) of a block's rows: codes of four columns per step, scales and minima in float32.
template <class S, class Block>
struct UnpackedBlock {
  static constexpr bool kAdds = kAddsHalves<S, Block>;  // products are then multiplied by the scales
  static constexpr int kRows = S::kUnpackedRows, kSums = kAdds ? 1 : kBlockSums<Block>;
  I codes[8][kRows];
  // Pairs in 16 bits: the factors of a half, and those of Terms::start_half and Terms::start, which yield -32
  // times the scales times the sums of the activations of both halves.
  I factors[kAdds ? 2 : 1][kRows], start_factors[kRows];
  F scale[kSums][kRows], min[kSums][kRows];

  UnpackedBlock(const Block& block, int v) {
    for (int r = 0; r < kRows; ++r) {
      const int row = (v + r) * S::kLanes;
      const auto stored = [&](int step) {
        return S::load_codes(block.codes[row / kPanelRows][step][row % kPanelRows]);
      };
      for (int step = 0; step < 8; ++step) {
        if constexpr (Block::kBits == 4)
          codes[step][r] = step < 4 ? S::low_nibbles(stored(step)) : S::high_nibbles(stored(step - 4));
        else
          codes[step][r] = stored(step);
      }
      if constexpr (kAdds) {
        const I first = S::load_int8(block.scale_code[0] + row),
                second = S::load_int8(block.scale_code[1] + row);
        factors[0][r] = S::halfwords(first, first);
        factors[1][r] = S::halfwords(second, second);
        start_factors[r] = S::halfwords(S::template shift_left<2>(S::sub_int(first, second)),
                                        S::template shift_left<2>(second));
        scale[0][r] = load_floats(block.scale_unit + row);
      } else if constexpr (kHasHalves<Block>)
        for (int h = 0; h < kSums; ++h) scale[h][r] = load_floats(block.half_scale[h] + row);
      else
        scale[0][r] = load_floats(block.scale + row);
      if constexpr (kHasHalfMins<Block>)
        for (int h = 0; h < kSums; ++h) min[h][r] = load_floats(block.half_min[h] + row);
      if constexpr (kHasMin<Block>) min[0][r] = load_floats(block.min + row);
    }
  }
};

// Adds the products of a block and of tokens [token, token + kTokens) of a tile to `out`, in float32.
template <class S, class Block, int kTokens>
inline ALWAYS_INLINE void multiply_unpacked(const UnpackedBlock<S, Block>& block, const ActivationTile& x,
                                            int token, float* out, std::size_t stride) {
  constexpr bool kAdds = kAddsHalves<S, Block>;
  static_assert(!kAdds || Block::kZero == 32);
  constexpr int kRows = S::kUnpackedRows, kSums = UnpackedBlock<S, Block>::kSums, kSteps = 8 / kSums;
  constexpr bool kHalfwords = kWholeHalfwords<S, Block>;
  constexpr int kTogether = kAdds ? 2 : 1;
  static_assert(!kAdds || kHalfwordSteps<S, Block> >= 2);
  // Adds four steps in 16 bits before widening their sum: 6 additions and 2 widenings per block, not 8 and 4.
  constexpr bool kFours = !kAdds && !kHalfwords && kHalfwordSteps<S, Block> >= 4 && kSteps % 4 == 0;
  const ActivationTile::Terms* terms = x.terms + token;
  FOR_UNROLL (int h = 0; h < kSums; ++h) {
    I sum[kTokens][kRows];
    FOR_UNROLL (int t = 0; t < kTokens; ++t) {
      I start[2];
      first_sums<S, Block>(terms[t], start);
      FOR_UNROLL (int r = 0; r < kRows; ++r) {
        if constexpr (kAdds)
          sum[t][r] = S::sum_halfwords(
              S::set_int(0), S::halfwords(S::set_int(terms[t].start_half), S::set_int(terms[t].start)),
              block.start_factors[r]);
        else
          sum[t][r] = kHalfwords ? S::set_int(0) : start[h];
      }
    }
    if constexpr (kFours) {
      FOR_UNROLL (int first = h * kSteps; first < (h + 1) * kSteps; first += 4) {
        I pairs[kTokens][kRows];
        FOR_UNROLL (int step = first; step < first + 4; ++step) {
          I codes[kRows];
          FOR_UNROLL (int r = 0; r < kRows; ++r) codes[r] = S::in_register(block.codes[step][r]);
          FOR_UNROLL (int t = 0; t < kTokens; ++t) {
            const I value = S::broadcast4(x.q[token + t] + 4 * step);
            FOR_UNROLL (int r = 0; r < kRows; ++r)
              pairs[t][r] = S::add_pairs(step == first ? S::no_halfwords() : pairs[t][r], codes[r], value);
          }
        }
        FOR_UNROLL (int t = 0; t < kTokens; ++t)
          FOR_UNROLL (int r = 0; r < kRows; ++r)
            sum[t][r] = S::in_register(S::sum_halfwords(sum[t][r], pairs[t][r]));
      }
    }
    FOR_UNROLL (int step = h * kSteps; step < (h + 1) * kSteps && !kFours; step += kTogether) {
      I codes[kTogether][kRows];
      FOR_UNROLL (int i = 0; i < kTogether; ++i)
        FOR_UNROLL (int r = 0; r < kRows; ++r) codes[i][r] = S::in_register(block.codes[step + i][r]);
      FOR_UNROLL (int t = 0; t < kTokens; ++t) {
        I values[kTogether];
        FOR_UNROLL (int i = 0; i < kTogether; ++i) values[i] = S::broadcast4(x.q[token + t] + 4 * (step + i));
        FOR_UNROLL (int r = 0; r < kRows; ++r) {
          if constexpr (kHalfwords)
            sum[t][r] = S::add_pairs(sum[t][r], codes[0][r], values[0]);
          else if constexpr (kAdds)
            sum[t][r] = S::add_two_pairs(sum[t][r], codes[0][r], values[0], codes[1][r], values[1],
                                         block.factors[step / 4][r]);
          else
            sum[t][r] = S::template dot<Block::kZero>(sum[t][r], codes[0][r], values[0]);
        }
      }
    }
    FOR_UNROLL (int t = 0; t < kTokens; ++t) {
      const F scale = S::set(terms[t].scale);
      I start[2];
      first_sums<S, Block>(terms[t], start);
      FOR_UNROLL (int r = 0; r < kRows; ++r) {
        if constexpr (kHalfwords) sum[t][r] = S::sum_halfwords(start[h], sum[t][r]);
        float* total = out + std::size_t(t) * stride + r * S::kLanes;
        F next = S::fma(S::to_float(sum[t][r]), block.scale[h][r] * scale, S::load(total));
        if constexpr (kHasHalfMins<Block>)
          next = S::fma(block.min[h][r], S::set(scaled_half_sum(x, token + t, h)), next);
        if constexpr (kHasMin<Block>) next = S::fma(block.min[0][r], S::set(terms[t].scaled_sum), next);
        S::store(total, next);
      }
    }
  }
}

// Computes out[t][r] for the 32 rows of a group and tokens [first, first + count), and prefetches the next
// group.
template <UnpacksBlocks S, class Block>
void unpacked_blocks(const Block* blocks, int n_blocks, const Int8Rows& x, int first, int count, float* out,
                     std::size_t stride) {
  constexpr int kRows = S::kUnpackedRows, kTokens = S::kUnpackedTokens,
                kPasses = kGroupRows / S::kLanes / kRows;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int v = pass * kRows;
    float* first_out = out + v * S::kLanes;
    for (int t = 0; t < count; ++t)
      for (int r = 0; r < kRows; ++r)
        S::store(first_out + std::size_t(t) * stride + r * S::kLanes, S::set(0));
    for (int b = 0; b < n_blocks; ++b) {
      if (b % kPasses == pass) prefetch<CacheLevel::kL1>(blocks + b + n_blocks, sizeof(Block));
      const UnpackedBlock<S, Block> block(blocks[b], v);
      for (int t = 0; t < count;) {
        const ActivationTile& tile = x.tile(first + t)[b];
        const int token = (first + t) % kTileTokens;
        const int n = count - t < kTileTokens - token ? count - t : kTileTokens - token;
        for (int done = 0; done < n;) {
          // As even as possible: few tokens make poor use of a weight.
          const int left = n - done, share = left >= 2 * kTokens ? kTokens
                                             : left > kTokens    ? (left + 1) / 2
                                                                 : left;
          // Variables of the loops, captured by reference, would be reloaded from memory.
          const int at = token + done;
          float* rows = first_out + std::size_t(t + done) * stride;
          with_count<kTokens>(share, [=, &block, &tile](auto tokens) ALWAYS_INLINE {
            multiply_unpacked<S, Block, tokens>(block, tile, at, rows, stride);
          });
          done += share;
        }
        t += n;
      }
    }
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
