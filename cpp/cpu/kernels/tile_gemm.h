// Products of weights and activations in 8 bits, in terms of the vectors of one instruction set (Simd,
// included before).
#pragma once

#include "../../base/processor.h"
#include "tile_blocks.h"
#include "tile_unpacked.h"

namespace metal_prefill::cpu {
namespace {

// Blocks of a group to prefetch: every `every`-th from `begin` on; none if `every` is 0.
struct Fetch {
  int begin = 0, every = 0;
};

// acc += the sums of a block, times its scales and those of tokens, and its minima.
template <class S, bool kHalfwords, class Block, class T, int kChains, int kRows, int kTokens>
inline ALWAYS_INLINE void add_scaled(const Block* block, int v, const ActivationTile* x, int token,
                                     T (&sum)[kChains][kRows][kTokens], F (&acc)[kRows][kTokens]) {
  constexpr bool kJoins = kJoinsHalves<S, Block>, kParts = kChains > kBlockSums<Block>;
  FOR_UNROLL (int r = 0; r < kRows; ++r) {
    const int row = (v + r) * Simd::kLanes;
    if constexpr (kAddsHalves<S, Block>) {
      const F unit = load_floats(block->scale_unit + row);
      FOR_UNROLL (int t = 0; t < kTokens; ++t) {
        const F total =
            scaled_sum(block->scale_code, row, Simd::to_float(sum[0][r][t]), Simd::to_float(sum[1][r][t]));
        acc[r][t] = Simd::fma(total, unit * x->terms[token + t].scale, acc[r][t]);
      }
      continue;
    }
    if constexpr (kJoins) {
      const F first = load_floats(block->half_scale[0] + row),
              second = load_floats(block->half_scale[1] + row);
      FOR_UNROLL (int t = 0; t < kTokens; ++t)
        acc[r][t] = Simd::fma(joined_sum(first, sum[0][r][t], second, sum[1][r][t]),
                              Simd::set(x->terms[token + t].scale), acc[r][t]);
    }
    FOR_UNROLL (int h = 0; h < kBlockSums<Block>; ++h) {
      F scale;
      if constexpr (kHasHalves<Block>)
        scale = load_floats(block->half_scale[h] + row);
      else
        scale = load_floats(block->scale + row);
      FOR_UNROLL (int t = 0; t < kTokens && !kJoins; ++t) {
        const F both = scale * x->terms[token + t].scale;
        F total;
        if constexpr (kHalfwords) {
          if constexpr (kParts) sum[0][r][t] = S::add_halfwords(sum[0][r][t], sum[1][r][t]);
          I start[2];
          first_sums<S, Block>(x->terms[token + t], start);
          total = Simd::to_float(S::sum_halfwords(start[h], sum[h][r][t]));
        } else {
          total = Simd::to_float(sum[h][r][t]);
          if constexpr (kParts) total += Simd::to_float(sum[1][r][t]);  // below 2^24: exact
        }
        acc[r][t] = Simd::fma(total, both, acc[r][t]);
      }
      if constexpr (kHasHalfMins<Block>) {
        const F min = Simd::load(block->half_min[h] + row);
        FOR_UNROLL (int t = 0; t < kTokens; ++t)
          acc[r][t] = Simd::fma(min, Simd::set(scaled_half_sum(*x, token + t, h)), acc[r][t]);
      }
    }
    if constexpr (kHasMin<Block>) {
      const F min = load_floats(block->min + row);
      FOR_UNROLL (int t = 0; t < kTokens; ++t)
        acc[r][t] = Simd::fma(min, Simd::set(x->terms[token + t].scaled_sum), acc[r][t]);
    }
  }
}

// Multiplies kRows vectors of weight rows (lanes are rows, from vector `v` of the group) by kTokens tokens of
// a tile. The integer sum of a block is exact in any order; the float sum over the blocks runs in the order
// of the columns. `fetch` is the part of the next group that is prefetched meanwhile.
template <class S, class Block, int kRows, int kTokens>
[[gnu::noinline]] void int8_tile(const Block* block, int n_blocks, int v, const ActivationTile* x, int token,
                                 float* out, std::size_t stride, Fetch fetch) {
  constexpr bool kHalves = kHasHalves<Block>;
  // A single token has too few sums to hide the latency of a product: each is taken in two parts.
  constexpr bool kParts = kTokens == 1 && !kHalves && kRows < 4;
  constexpr int kChains = kParts ? 2 : kBlockSums<Block>;
  constexpr bool kHalfwords = kWholeHalfwords<S, Block> && (Block::kBits == 4 || kTokens > 1);
  const int panel = v * Simd::kLanes / kPanelRows, lane = v * Simd::kLanes % kPanelRows;

  F acc[kRows][kTokens];
  FOR_UNROLL (int r = 0; r < kRows; ++r)
    FOR_UNROLL (int t = 0; t < kTokens; ++t) acc[r][t] = Simd::set(0);

  int next_fetch = fetch.every > 0 ? fetch.begin : n_blocks;
  for (int b = 0; b < n_blocks; ++b, ++block, ++x) {
    if (b == next_fetch) {
      next_fetch += fetch.every;
      prefetch<CacheLevel::kL2, sizeof(Block)>(block + n_blocks);
    }
    const auto row_codes = [&](int step, int r) ALWAYS_INLINE {
      const int row = lane + r * Simd::kLanes;
      return Simd::load_codes(block->codes[panel + row / kPanelRows][step][row % kPanelRows]);
    };
    typename Sum<S, kHalfwords>::Type sum[kChains][kRows][kTokens];
    FOR_UNROLL (int t = 0; t < kTokens; ++t) {
      I start[2];
      first_sums<S, Block>(x->terms[token + t], start);
      FOR_UNROLL (int h = 0; h < kChains; ++h)
        FOR_UNROLL (int r = 0; r < kRows; ++r) {
          if constexpr (kHalfwords)
            sum[h][r][t] = S::no_halfwords();
          else
            sum[h][r][t] = start[h];
        }
    }
    const auto multiply = [&](int chain, const I(&codes)[kRows], int column) ALWAYS_INLINE {
      FOR_UNROLL (int t = 0; t < kTokens; ++t) {
        const I value = Simd::broadcast4(x->q[token + t] + column);
        FOR_UNROLL (int r = 0; r < kRows; ++r) {
          if constexpr (kHalfwords) {
            sum[chain][r][t] = S::add_pairs(sum[chain][r][t], codes[r], value);
          } else {
            sum[chain][r][t] = S::template dot<Block::kZero>(sum[chain][r][t], codes[r], value);
          }
        }
      }
    };
    if constexpr (Block::kBits == 4) {
      FOR_UNROLL (int step = 0; step < 4; ++step) {
        I packed[kRows], codes[kRows];
        FOR_UNROLL (int r = 0; r < kRows; ++r) {
          packed[r] = row_codes(step, r);
          codes[r] = Simd::low_nibbles(packed[r]);
        }
        multiply(0, codes, 4 * step);
        FOR_UNROLL (int r = 0; r < kRows; ++r) codes[r] = Simd::high_nibbles(packed[r]);
        multiply(kParts, codes, 16 + 4 * step);
      }
    } else if constexpr (kTokens == 1) {
      // Bound by memory: a few load instructions, each with one stride, so that the processor's prefetcher
      // detects them. It cannot track seventeen that step from block to block.
      const auto add_step = [&](int chain, int r, int step) ALWAYS_INLINE {
        sum[chain][r][0] = Simd::template dot<Block::kZero>(sum[chain][r][0], row_codes(step, r),
                                                            Simd::broadcast4(x->q[token] + 4 * step));
      };
      FOR_UNROLL (int r = 0; r < kRows; ++r) {
        if constexpr (kParts) {
#pragma GCC unroll 1
          for (int step = 0; step < 8; step += 2) {
            add_step(0, r, step);
            add_step(1, r, step + 1);
          }
        } else {
          FOR_UNROLL (int half = 0; half < 2; ++half) {
#pragma GCC unroll 1
            for (int step = 4 * half; step < 4 * half + 4; ++step) add_step(kHalves ? half : 0, r, step);
          }
        }
      }
    } else {
      FOR_UNROLL (int step = 0; step < 8; ++step) {
        I codes[kRows];
        FOR_UNROLL (int r = 0; r < kRows; ++r) codes[r] = row_codes(step, r);
        multiply(kHalves ? step / 4 : 0, codes, 4 * step);
      }
    }
    add_scaled<S, kHalfwords>(block, v, x, token, sum, acc);
  }
  FOR_UNROLL (int t = 0; t < kTokens; ++t)
    FOR_UNROLL (int r = 0; r < kRows; ++r)
      Simd::store(out + std::size_t(t) * stride + (v + r) * Simd::kLanes, acc[r][t]);
}

template <class Block, int kTokens>
void int8_tokens(const Block* block, int n_blocks, const ActivationTile* x, int token, float* out,
                 std::size_t stride, Fetch fetch) {
  // A single token reads whole blocks: with passes over parts of a block, reads would wait for products.
  constexpr int kRows = kTokens == 1 ? Simd::kInt8RowsOfOne : Simd::kInt8Rows;
  for (int v = 0; v < kGroupRows / Simd::kLanes; v += kRows)
    int8_tile<Simd, Block, kRows, kTokens>(block, n_blocks, v, x, token, out, stride,
                                           v == 0 ? fetch : Fetch{});
}

template <class Block>
void int8_blocks(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
                 std::size_t stride) {
  const int n_blocks = weight.blocks_per_row();
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  // With short vectors, two tokens are multiplied separately: the first reads memory line by line, as a
  // single token does, and the second finds the lines in the cache. Multiplied together they take 1.1 times
  // as long, but half as long with vectors of sixteen.
  if (Block::kBits == 8 && Simd::kLanes < 16 && count == 2) {
    for (int t = first; t < first + count; ++t, out += stride)
      int8_tokens<Block, 1>(block, n_blocks, x.tile(t), t % kTileTokens, out, stride, Fetch{});
    return;
  }
  if constexpr (UnpacksBlocks<Simd>)
    if (count > kFewTokens<Simd>) return unpacked_blocks<Simd>(block, n_blocks, x, first, count, out, stride);
  // Prefetches the next group during the last few passes over this one: a single pass of few tokens would be
  // too short. Some processors' prefetchers do better for single passes, but cannot follow the streams of
  // several tokens with weights in bytes.
  constexpr int kFetchPasses = 4;
  const auto passes_of = [](int n) { return ceil_div(n, Simd::kInt8Tokens); };
  int passes = 0;  // remaining
  for (int at = first; at < first + count; at += kTileTokens - at % kTileTokens) {
    const int room = kTileTokens - at % kTileTokens, left = first + count - at;
    passes += passes_of(left < room ? left : room);
  }
  const bool wanted = prefetches_few_tokens() || (Block::kBits == 8 && count >= 2);
  const bool alone = wanted && group + 1 < weight.groups();
  const int fetch_passes = passes == 1 ? int(alone) : passes < kFetchPasses ? passes : kFetchPasses;
  while (count > 0) {
    const int token = first % kTileTokens;
    const int n = count < kTileTokens - token ? count : kTileTokens - token;
    for (int done = 0, left = passes_of(n); left > 0; --left, --passes) {
      const int share = ceil_div(n - done, left);  // as even as possible: few tokens use weights poorly
      const Fetch fetch = passes <= fetch_passes ? Fetch{fetch_passes - passes, fetch_passes} : Fetch{};
      with_count<Simd::kInt8Tokens>(share, [&](auto tokens) {
        int8_tokens<Block, tokens>(block, n_blocks, x.tile(first), token + done, out, stride, fetch);
      });
      done += share;
      out += std::size_t(share) * stride;
    }
    first += n;
    count -= n;
  }
}

void multiply_int8(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
                   std::size_t stride) {
  visit_wide(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    int8_blocks<Block>(weight, group, x, first, count, out, stride);
  });
}

}  // namespace
}  // namespace metal_prefill::cpu
