// Products of weights in pairs of bfloat16 with activations rounded to it (AVX512_BF16): lanes are rows, and
// an instruction adds the products of two columns. Sums are float32. Also converts wide blocks of quantized
// weights to pairs.
#pragma once

#include <array>
#include <cstddef>

#include "prefetch.h"
#include "simd_bf16.h"
#include "tile_blocks.h"
#include "tile_panels.h"

namespace metal_prefill::cpu {
namespace {

struct PairProduct {
  using Weights = FourBytes;
  using Sum = F;
  static Sum first(int) { return Simd::set(0); }
  static I value(const std::byte* x) { return broadcast_pair(reinterpret_cast<const std::uint16_t*>(x)); }
  static Sum add(Sum sum, I weights, I x) { return multiply_pairs(sum, weights, x); }
  static F finish(Sum sum, int, int) { return sum; }
};

void multiply_pair_blocks(const PairBlock* blocks, int n_blocks, const PairRows& x, int first, int count,
                          const ProductOutput& out, const PrefetchRange& next) {
  multiply_panels(PairProduct(), {blocks, n_blocks, x.row(first), x.stride * sizeof *x.data}, count, out,
                  next);
}

// Column 4 * kStep + kColumn of a panel: codes minus their zero point.
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

// Rounds weights scale * (code - zero) + min in float32 to the nearest bfloat16.
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
    unrolled<16>([&](auto pair) ALWAYS_INLINE {
      constexpr int kStep = pair / 2, kHalf = kStep / 4;
      const auto scaled = [&](F value) {
        return kMin ? Simd::fma(value, scale[kHalf], min[kHalf]) : value * scale[kHalf];
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
