// Products of weights in pairs of bfloat16 with activations rounded to it (AVX512_BF16): lanes are rows, and
// an instruction adds the products of two columns. Sums are float32. Also makes such weights from wide blocks
// of quantized ones.
#pragma once

#include <array>
#include <cstddef>

#include "prefetch.h"
#include "simd_bf16.h"
#include "tile_blocks.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kPairTokens = 12;  // by 2 panels: 24 sums, one of weights, one of activations

// So few tokens wait for memory, which the processor reads ahead by itself.
constexpr int kFewPairTokens = 6;

// Panel after panel of a block: memory is read in its order, which the processor then reads ahead. With both
// panels at a time, Zen 4 read a token's weights at a third of the speed.
template <int kTokens>
void pair_tile(const PairBlock* block, int n_blocks, const std::uint16_t* x, std::size_t x_stride, float* out,
               std::size_t stride, NextLines& next) {
  F sums[kTokens][2];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) sums[t][0] = sums[t][1] = Simd::set(0);
  NextLines lines = next;  // in registers
  lines.begin_tile(n_blocks);
  for (int b = 0; b < n_blocks; ++b, ++block, x += kBlockCols) {
    lines.step();
#pragma GCC unroll 2
    for (int panel = 0; panel < 2; ++panel) {
#pragma GCC unroll 4
      for (int pair = 0; pair < kBlockCols / 2; ++pair) {
        const __m512i weights = _mm512_load_si512(block->pairs[panel][pair]);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t)
          sums[t][panel] = multiply_pairs(sums[t][panel], weights,
                                          broadcast_pair(x + std::size_t(t) * x_stride + 2 * pair));
      }
    }
  }
  next = lines;
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
    for (int panel = 0; panel < 2; ++panel)
      Simd::store(out + std::size_t(t) * stride + panel * kPanelRows, sums[t][panel]);
}

// pair_tile for `count` tokens, 1 to kTokens.
template <int kTokens>
void pair_tile_of(int count, const PairBlock* block, int n_blocks, const std::uint16_t* x,
                  std::size_t x_stride, float* out, std::size_t stride, NextLines& next) {
  if (count == kTokens) return pair_tile<kTokens>(block, n_blocks, x, x_stride, out, stride, next);
  if constexpr (kTokens > 1)
    pair_tile_of<kTokens - 1>(count, block, n_blocks, x, x_stride, out, stride, next);
}

void multiply_pair_blocks(const PairBlock* blocks, int n_blocks, const PairRows& x, int first, int count,
                          float* out, std::size_t stride, const PrefetchRange& next) {
  int tiles = ceil_div(count, kPairTokens);
  NextLines lines(count <= kFewPairTokens ? PrefetchRange{} : next, tiles);
  for (int token = 0, share = 0; tiles > 0; --tiles, token += share) {
    share = ceil_div(count - token, tiles);  // as even as can be: few tokens make poor use of a weight
    pair_tile_of<kPairTokens>(share, blocks, n_blocks, x.row(first + token), x.stride,
                              out + std::size_t(token) * stride, stride, lines);
  }
}

// Column 4 * kStep + kColumn of a panel: codes less their zero.
template <class Block, int kStep, int kColumn>
inline F column_of(const Block& block, int panel) {
  const I codes = Simd::load_codes(block.codes[panel][Block::kBits == 4 ? kStep % 4 : kStep][0]);
  if constexpr (Block::kBits == 4) {  // the lowest four bits of a lane select one of 16 floats
    alignas(64) static constexpr std::array<float, 16> kValues = [] {
      std::array<float, 16> values{};
      for (int code = 0; code < 16; ++code) values[std::size_t(code)] = float(code - Block::kZero);
      return values;
    }();
    constexpr int kShift = 8 * kColumn + (kStep < 4 ? 0 : 4);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, kShift), _mm512_load_ps(kValues.data()));
  } else {
    const __m512i less_zero = _mm512_sub_epi8(codes, _mm512_set1_epi8(char(Block::kZero)));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(less_zero, 24 - 8 * kColumn), 24));
  }
}

// Weights are scale * (code - zero) + min in float32, rounded to the nearest bfloat16.
template <class Block>
void widen_block(const Block& block, PairBlock& out) {
  constexpr bool kMin = kHasMin<Block> || kHasHalfMins<Block>;
  const __m512i order = _mm512_load_si512(kPairOrder);
  for (int panel = 0; panel < 2; ++panel) {
    const int row = panel * kPanelRows;
    F scale[2], min[2] = {};
    for (int half = 0; half < 2; ++half) {
      if constexpr (kHasHalves<Block>)
        scale[half] = load_floats(block.half_scale[half] + row);
      else
        scale[half] = load_floats(block.scale + row);
      if constexpr (kHasHalfMins<Block>)
        min[half] = load_floats(block.half_min[half] + row);
      else if constexpr (kHasMin<Block>)
        min[half] = load_floats(block.min + row);
    }
    unrolled<16>([&](auto pair) __attribute__((always_inline)) {
      constexpr int kStep = pair / 2, kHalf = kStep / 4;
      const auto scaled = [&](F value) {
        return kMin ? Simd::fma(value, scale[kHalf], min[kHalf]) : Simd::mul(value, scale[kHalf]);
      };
      const F even = scaled(column_of<Block, kStep, pair % 2 * 2>(block, panel)),
              odd = scaled(column_of<Block, kStep, pair % 2 * 2 + 1>(block, panel));
      _mm512_store_si512(out.pairs[panel][pair], _mm512_permutexvar_epi16(order, round_to_pairs(even, odd)));
    });
  }
}

void widen_to_pairs(const PackedMatrix& weight, int group, PairBlock* out) {
  visit_wide(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    const auto* block = reinterpret_cast<const Block*>(weight.group(group));
    const int n_blocks = weight.blocks_per_row();
    for (int b = 0; b < n_blocks; ++b) {
      prefetch<CacheLevel::kL2, round_up(sizeof(Block), std::size_t(64))>(block + b + n_blocks);
      widen_block(block[b], out[b]);
    }
  });
}

void round_to_bfloat16(const float* x, std::size_t x_stride, int rows, int n, std::uint16_t* out,
                       std::size_t out_stride) {
  for (int row = 0; row < rows; ++row, x += x_stride, out += out_stride) {
    int i = 0;
    for (; i + 2 * Simd::kLanes <= n; i += 2 * Simd::kLanes)
      _mm512_storeu_si512(out + i, round_to_pairs(Simd::load(x + i), Simd::load(x + i + Simd::kLanes)));
    for (; i < n; i += Simd::kLanes) {
      const __mmask16 lanes = lanes_below(n - i);
      _mm256_mask_storeu_epi16(
          out + i, lanes, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, x + i))));
    }
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
