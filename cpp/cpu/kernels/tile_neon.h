// Shared by the NEON kernels for 8-bit products: codes as signed bytes, and the product by 4-way dot
// products (sdot).
//
// A quad is four weight rows; a vector of codes holds four columns of each. A tile of one quad keeps the 8
// vectors of a block of 32 columns in registers and multiplies up to 16 tokens by them, so that unpacking,
// which shares the pipes with the products, is spread over 16. A token costs 8 sdot, a conversion, a
// multiplication and a multiply-add for four rows, and unpacking 12 operations for all tokens of the tile: at
// most 8 / (11 + 12 / 16) = 68% of the rate of sdot. Loads and the scalar operands of scales use other
// ports. 16 sums, 8 codes, a scale or two, 2 of activations and a few integer sums fill the 32 registers.
#pragma once

#include "simd_neon.h"
#include "tile_blocks.h"
#include "tile_peak.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kQuadRows = 4;
constexpr int kGroupQuads = kGroupRows / kQuadRows;

// Q4_0's nibbles become the upper halves of signed bytes with one operation each: codes are 16 times the
// weight, and the conversion of their sum to float32 divides by 2^kFraction at no cost.
template <class Block>
constexpr int kFraction = Block::kBits == 4 && Block::kZero == 8 ? 4 : 0;

template <class Block>
inline float32x4_t convert(int32x4_t sum) {
  if constexpr (kFraction<Block> > 0) {
    return vcvtq_n_f32_s32(sum, kFraction<Block>);
  } else {
    return vcvtq_f32_s32(sum);
  }
}

// Nibbles of one vector as signed bytes: `low` and `high` are 16 columns apart.
template <class Block>
inline void unpack_nibbles(uint8x16_t packed, int8x16_t& low, int8x16_t& high) {
  if constexpr (Block::kZero == 8) {
    packed = veorq_u8(packed, vdupq_n_u8(0x88));
    low = vreinterpretq_s8_u8(vshlq_n_u8(packed, 4));
    high = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(0xf0)));
  } else {
    low = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(0x0f)));
    high = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
  }
}

template <class Block>
inline int8x16_t unpack_bytes(uint8x16_t packed) {
  if constexpr (Block::kZero > 0) packed = vsubq_u8(packed, vdupq_n_u8(Block::kZero));
  return vreinterpretq_s8_u8(packed);
}

// Packed codes of a step of a quad.
template <class Block>
inline uint8x16_t quad_codes(const Block& block, int quad, int step) {
  const int row = quad * kQuadRows;
  return vld1q_u8(block.codes[row / kPanelRows][step][row % kPanelRows]);
}

template <class Block>
inline float32x4_t quad_scale(const Block& block, int quad, int half) {
  if constexpr (kHasHalves<Block>) {
    return load_floats(block.half_scale[half] + quad * kQuadRows);
  } else {
    return load_floats(block.scale + quad * kQuadRows);
  }
}

// codes[i]: columns 4i to 4i + 3.
template <class Block>
inline ALWAYS_INLINE void unpack_quad(const Block& block, int quad, int8x16_t (&codes)[8]) {
  if constexpr (Block::kBits == 4) {
    unrolled<4>([&](auto i) ALWAYS_INLINE {
      unpack_nibbles<Block>(quad_codes(block, quad, i), codes[i], codes[i + 4]);
    });
  } else {
    unrolled<8>([&](auto i) ALWAYS_INLINE { codes[i] = unpack_bytes<Block>(quad_codes(block, quad, i)); });
  }
}

// `count` tokens from `token` on, in a tile of kTokens. As not every size has a tile, a tile may compute more
// than requested; it starts earlier if it would exceed the activations' tile.
struct TileTokens {
  int begin;  // first computed token
  int skip;   // tokens computed before the first requested one
  int count;

  constexpr TileTokens(int token, int n, int computed)
      : begin(token + computed <= kTileTokens ? token : kTileTokens - computed),
        skip(token - begin),
        count(n) {}
  constexpr bool wanted(int t) const { return t >= skip && t < skip + count; }
};

// Completes a sum before later loads. Compilers would load for many tokens first, and spill sums.
inline ALWAYS_INLINE void finish(float32x4_t& sum) {
  asm volatile("" : "+w"(sum) : : "memory");
}

// Multiplies kQuads quads from `quad` on by kTokens tokens. Sums in float32 run over the blocks in the order
// of the columns.
template <class Block, int kQuads, int kTokens>
__attribute__((noinline)) void dot_tile(const Block* block, int n_blocks, int quad, const ActivationTile* x,
                                        TileTokens tokens, float* out, std::size_t stride) {
  const int token = tokens.begin;
  float32x4_t acc[kQuads][kTokens];
  unrolled<kQuads * kTokens>([&](auto i) ALWAYS_INLINE { acc[i / kTokens][i % kTokens] = vdupq_n_f32(0); });
  for (int b = 0; b < n_blocks; ++b, ++block, ++x) {
    unrolled<kQuads>([&](auto q) ALWAYS_INLINE {
      int8x16_t codes[8];
      unpack_quad(*block, quad + q, codes);
      const float32x4_t scale = quad_scale(*block, quad + q, 0);
      [[maybe_unused]] float32x4_t scale_second, min;
      if constexpr (kHasHalves<Block>) scale_second = quad_scale(*block, quad + q, 1);
      [[maybe_unused]] float32x4_t half_min[2];
      if constexpr (kHasMin<Block>) min = load_floats(block->min + (quad + q) * kQuadRows);
      if constexpr (kHasHalfMins<Block>)
        unrolled<2>([&](auto h) { half_min[h] = vld1q_f32(block->half_min[h] + (quad + q) * kQuadRows); });
      unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
        const int8x16_t first = vld1q_s8(x->q[token + t]), second = vld1q_s8(x->q[token + t] + 16);
        const float token_scale = x->terms[token + t].scale;
        int32x4_t sum = vdupq_n_s32(0), sum_second = sum;
        unrolled<4>([&](auto i) ALWAYS_INLINE { sum = vdotq_laneq_s32(sum, codes[i], first, i); });
        unrolled<4>([&](auto i) ALWAYS_INLINE {
          int32x4_t& to = kHasHalves<Block> ? sum_second : sum;
          to = vdotq_laneq_s32(to, codes[i + 4], second, i);
        });
        float32x4_t& to = acc[q][t];
        to = vfmaq_f32(to, convert<Block>(sum), vmulq_n_f32(scale, token_scale));
        if constexpr (kHasHalfMins<Block>)
          to = vfmaq_n_f32(to, half_min[0], scaled_half_sum(*x, token + t, 0));
        if constexpr (kHasHalves<Block>) {
          to = vfmaq_f32(to, convert<Block>(sum_second), vmulq_n_f32(scale_second, token_scale));
        }
        if constexpr (kHasMin<Block>) to = vfmaq_n_f32(to, min, x->terms[token + t].scaled_sum);
        if constexpr (kHasHalfMins<Block>)
          to = vfmaq_n_f32(to, half_min[1], scaled_half_sum(*x, token + t, 1));
        finish(to);
      });
    });
  }
  unrolled<kQuads * kTokens>([&](auto i) ALWAYS_INLINE {
    constexpr int q = i / kTokens, t = i % kTokens;
    if (tokens.wanted(t))
      vst1q_f32(out + std::size_t(t - tokens.skip) * stride + (quad + q) * kQuadRows, acc[q][t]);
  });
}

// 16 sums: few tokens multiply several quads at a time, so that weights are read in one stream.
template <int kTokens>
constexpr int kTileQuads = kTokens <= 2   ? 8
                           : kTokens <= 4 ? 4
                           : kTokens <= 8 ? 2
                                          : 1;

// dot_tile over all quads, for up to kTokens tokens.
template <class Block, int kTokens>
void dot_quads(const Block* block, int n_blocks, const ActivationTile* x, int token, int count, float* out,
               std::size_t stride) {
  for (int quad = 0; quad < kGroupQuads; quad += kTileQuads<kTokens>)
    dot_tile<Block, kTileQuads<kTokens>, kTokens>(block, n_blocks, quad, x, {token, count, kTokens}, out,
                                                  stride);
}

template <class Block>
struct DotProduct {
  static constexpr int kMultiplyAdds = 16;
  static int32x4_t step(int32x4_t acc, int8x16_t x) { return vdotq_s32(acc, x, x); }

  static void multiply(const Block* block, int n_blocks, const ActivationTile* x, int token, int count,
                       float* out, std::size_t stride) {
    const auto run = count <= 1    ? dot_quads<Block, 1>
                     : count <= 2  ? dot_quads<Block, 2>
                     : count <= 4  ? dot_quads<Block, 4>
                     : count <= 8  ? dot_quads<Block, 8>
                     : count <= 12 ? dot_quads<Block, 12>
                                   : dot_quads<Block, 16>;
    run(block, n_blocks, x, token, count, out, stride);
  }
};

// Product::multiply multiplies the tokens of one tile of activations by a group.
template <template <class> class Product, class Block>
void multiply_blocks(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count,
                     float* out, std::size_t stride) {
  const int n_blocks = weight.blocks_per_row();
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  while (count > 0) {
    const int token = first % kTileTokens;
    const int n = count < kTileTokens - token ? count : kTileTokens - token;
    Product<Block>::multiply(block, n_blocks, x.tile(first), token, n, out, stride);
    first += n;
    count -= n;
    out += std::size_t(n) * stride;
  }
}

template <template <class> class Product>
void multiply_int8_neon(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count,
                        float* out, std::size_t stride) {
  visit_wide(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    multiply_blocks<Product, Block>(weight, group, x, first, count, out, stride);
  });
}

template <class Instruction>
double run_dots_neon(int rounds) {
  const auto start = [](const std::uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); };
  const auto load = [](const std::uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); };
  run_chains(rounds, start, load,
             [](int32x4_t acc, int8x16_t x) ALWAYS_INLINE { return Instruction::step(acc, x); });
  return double(rounds) * kPeakChains * Instruction::kMultiplyAdds;
}

// Adds these products to a table.
template <template <class> class Product>
constexpr Kernels neon_table(const char* name, Kernels table) {
  table.name = name;
  table.multiply_int8 = multiply_int8_neon<Product>;
  table.run_dots = run_dots_neon<Product<NibbleBlock>>;
  return table;
}

}  // namespace
}  // namespace metal_prefill::cpu
