// NEON with matrix products of bytes (smmla): Apple M2 and later, Arm's cores since Neoverse V1 and
// Cortex-A710.
//
// An smmla multiplies 2 tokens x 8 columns by 8 columns x 2 weight rows: twice the work of an sdot. Four
// columns of a row are adjacent in a packed block, so two steps are zipped to eight. Two tokens are zipped in
// the same way, once for all rows of a group. The 2 x 2 results are reordered only at the end, as scales have
// the same layout.
//
// A tile of one quad keeps the 8 vectors of a block in registers and multiplies up to 8 pairs of tokens by
// them. For four rows, a pair costs 8 smmla, 2 conversions, 2 multiplications and 2 multiply-adds, and
// unpacking 16 operations for all pairs: 16 operations a pair, compared with 23.5 for sdot, so about 1.5
// times as fast if both issue at the same rate. 30 of the 32 registers are in use: 16 sums, 8 codes, 2
// scales, a vector of a pair's columns, its scales, and 2 integer sums.
#include "tile_neon.h"
#include "tile_rotated.h"

namespace metal_prefill::cpu {

const Kernels& kernels_neon_dotprod();  // which this set extends

namespace {

constexpr int kTilePairs = kTileTokens / 2;
// Blocks that are zipped at a time: with the weights of a group they fit an L1 cache of 64 KiB.
constexpr int kSlabBlocks = 32;

// 32 columns of a tile's tokens, in pairs of tokens.
struct alignas(64) PairTile {
  std::int8_t q[kTilePairs][4][2][8];  // [pair][8 columns][token]
  float scale[kTilePairs][4];          // of the first token twice, of the second twice
  float scaled_sum[kTilePairs][4];
  float half_sum[kTilePairs][2][4];  // scaled sums of the halves
};

// Zips `count` tokens from `token` on to pairs. An odd last token is paired with itself. Later pairs are left
// unchanged, as their products are not stored.
void zip_tokens(const ActivationTile& x, int token, int count, PairTile& out) {
  for (int pair = 0; 2 * pair < count; ++pair) {
    const int a = token + 2 * pair, b = 2 * pair + 1 < count ? a + 1 : a;
    for (int half = 0; half < 2; ++half) {
      const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(x.q[a] + 16 * half));
      const int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(x.q[b] + 16 * half));
      vst1q_s8(out.q[pair][2 * half][0], vreinterpretq_s8_s64(vzip1q_s64(first, second)));
      vst1q_s8(out.q[pair][2 * half + 1][0], vreinterpretq_s8_s64(vzip2q_s64(first, second)));
    }
    vst1q_f32(out.scale[pair], vcombine_f32(vdup_n_f32(x.terms[a].scale), vdup_n_f32(x.terms[b].scale)));
    for (int half = 0; half < 2; ++half) {
      vst1q_f32(out.half_sum[pair][half], vcombine_f32(vdup_n_f32(scaled_half_sum(x, a, half)),
                                                       vdup_n_f32(scaled_half_sum(x, b, half))));
    }
    vst1q_f32(out.scaled_sum[pair],
              vcombine_f32(vdup_n_f32(x.terms[a].scaled_sum), vdup_n_f32(x.terms[b].scaled_sum)));
  }
}

// codes[i][0]: columns 8i to 8i + 7 of the first two rows of a quad; codes[i][1]: of the other two.
template <class Block>
inline ALWAYS_INLINE void unpack_pairs(const Block& block, int quad, int8x16_t (&codes)[4][2]) {
  constexpr int kZips = Block::kBits / 2;
  unrolled<kZips>([&](auto i) ALWAYS_INLINE {
    const uint32x4_t a = vreinterpretq_u32_u8(quad_codes(block, quad, 2 * i));
    const uint32x4_t b = vreinterpretq_u32_u8(quad_codes(block, quad, 2 * i + 1));
    const uint8x16_t rows[2] = {vreinterpretq_u8_u32(vzip1q_u32(a, b)),
                                vreinterpretq_u8_u32(vzip2q_u32(a, b))};
    unrolled<2>([&](auto r) ALWAYS_INLINE {
      if constexpr (Block::kBits == 4) {
        unpack_nibbles<Block>(rows[r], codes[i][r], codes[i + 2][r]);
      } else {
        codes[i][r] = unpack_bytes<Block>(rows[r]);
      }
    });
  });
}

inline void widen_rows(float32x4_t rows, float32x4_t (&out)[2]) {
  out[0] = vcombine_f32(vget_low_f32(rows), vget_low_f32(rows));
  out[1] = vcombine_f32(vget_high_f32(rows), vget_high_f32(rows));
}

inline float32x4_t low_halves(float32x4_t a, float32x4_t b) {
  return vcombine_f32(vget_low_f32(a), vget_low_f32(b));
}
inline float32x4_t high_halves(float32x4_t a, float32x4_t b) {
  return vcombine_f32(vget_high_f32(a), vget_high_f32(b));
}

// Multiplies kQuads quads from `quad` on by the first kPairs pairs, over the blocks of a slab. Sums of
// earlier slabs are in `out`.
template <class Block, int kQuads, int kPairs>
__attribute__((noinline)) void matrix_tile(const Block* block, int n_blocks, int quad, const PairTile* x,
                                           bool first_slab, int count, float* out, std::size_t stride) {
  constexpr int kHalves = kHasHalves<Block> ? 2 : 1;
  float32x4_t acc[kQuads][kPairs][2];  // [first or second two rows]: tokens of the pair x 2 rows
  const auto at = [&](int q, int t) { return out + std::size_t(t) * stride + (quad + q) * kQuadRows; };
  unrolled<kQuads * kPairs>([&](auto i) ALWAYS_INLINE {
    constexpr int q = i / kPairs, p = i % kPairs;
    acc[q][p][0] = acc[q][p][1] = vdupq_n_f32(0);
    if (!first_slab && 2 * p < count) {
      const float32x4_t a = vld1q_f32(at(q, 2 * p)), b = 2 * p + 1 < count ? vld1q_f32(at(q, 2 * p + 1)) : a;
      acc[q][p][0] = low_halves(a, b);
      acc[q][p][1] = high_halves(a, b);
    }
  });
  for (int n = 0; n < n_blocks; ++n, ++block, ++x) {
    unrolled<kQuads>([&](auto q) ALWAYS_INLINE {
      int8x16_t codes[4][2];
      unpack_pairs(*block, quad + q, codes);
      float32x4_t scale[kHalves][2];
      unrolled<kHalves>([&](auto half)
                            ALWAYS_INLINE { widen_rows(quad_scale(*block, quad + q, half), scale[half]); });
      [[maybe_unused]] float32x4_t min[2];
      if constexpr (kHasMin<Block>) widen_rows(load_floats(block->min + (quad + q) * kQuadRows), min);
      [[maybe_unused]] float32x4_t half_min[2][2];
      if constexpr (kHasHalfMins<Block>) {
        unrolled<2>([&](auto half) ALWAYS_INLINE {
          widen_rows(vld1q_f32(block->half_min[half] + (quad + q) * kQuadRows), half_min[half]);
        });
      }
      unrolled<kPairs>([&](auto p) ALWAYS_INLINE {
        int32x4_t sum[kHalves][2];
        unrolled<kHalves>([&](auto half) ALWAYS_INLINE { sum[half][0] = sum[half][1] = vdupq_n_s32(0); });
        unrolled<4>([&](auto i) ALWAYS_INLINE {
          const int8x16_t tokens = vld1q_s8(x->q[p][i][0]);
          int32x4_t(&to)[2] = sum[i / 2 * (kHalves - 1)];
          to[0] = vmmlaq_s32(to[0], tokens, codes[i][0]);
          to[1] = vmmlaq_s32(to[1], tokens, codes[i][1]);
        });
        const float32x4_t token_scale = vld1q_f32(x->scale[p]);
        unrolled<2>([&](auto r) ALWAYS_INLINE {
          unrolled<kHalves>([&](auto half) ALWAYS_INLINE {
            acc[q][p][r] =
                vfmaq_f32(acc[q][p][r], convert<Block>(sum[half][r]), vmulq_f32(scale[half][r], token_scale));
            if constexpr (kHasHalfMins<Block>)
              acc[q][p][r] = vfmaq_f32(acc[q][p][r], half_min[half][r], vld1q_f32(x->half_sum[p][half]));
          });
        });
        if constexpr (kHasMin<Block>) {
          const float32x4_t scaled_sum = vld1q_f32(x->scaled_sum[p]);
          unrolled<2>([&](auto r)
                          ALWAYS_INLINE { acc[q][p][r] = vfmaq_f32(acc[q][p][r], min[r], scaled_sum); });
        }
        finish(acc[q][p][0]);
        finish(acc[q][p][1]);
      });
    });
  }
  unrolled<kQuads * kPairs>([&](auto i) ALWAYS_INLINE {
    constexpr int q = i / kPairs, p = i % kPairs;
    if (2 * p < count) vst1q_f32(at(q, 2 * p), low_halves(acc[q][p][0], acc[q][p][1]));
    if (2 * p + 1 < count) vst1q_f32(at(q, 2 * p + 1), high_halves(acc[q][p][0], acc[q][p][1]));
  });
}

// matrix_tile over all quads, for up to kPairs pairs.
template <class Block, int kPairs>
void matrix_quads(const Block* block, int n_blocks, const PairTile* x, bool first_slab, int count, float* out,
                  std::size_t stride) {
  constexpr int kQuads = kTileQuads<2 * kPairs>;
  for (int quad = 0; quad < kGroupQuads; quad += kQuads)
    matrix_tile<Block, kQuads, kPairs>(block, n_blocks, quad, x, first_slab, count, out, stride);
}

template <class Block>
struct MatrixProduct {
  static constexpr int kMultiplyAdds = 32;
  static int32x4_t step(int32x4_t acc, int8x16_t x) { return vmmlaq_s32(acc, x, x); }

  static void multiply(const Block* block, int n_blocks, const ActivationTile* x, int token, int count,
                       float* out, std::size_t stride) {
    if (count == 1) return dot_quads<Block, 1>(block, n_blocks, x, token, count, out, stride);
    const auto run = count <= 2    ? matrix_quads<Block, 1>
                     : count <= 4  ? matrix_quads<Block, 2>
                     : count <= 8  ? matrix_quads<Block, 4>
                     : count <= 12 ? matrix_quads<Block, 6>
                                   : matrix_quads<Block, 8>;
    PairTile pairs[kSlabBlocks];
    for (int slab = 0; slab < n_blocks; slab += kSlabBlocks) {
      const int n = n_blocks - slab < kSlabBlocks ? n_blocks - slab : kSlabBlocks;
      for (int b = 0; b < n; ++b) zip_tokens(x[slab + b], token, count, pairs[b]);
      run(block + slab, n, pairs, slab == 0, count, out, stride);
    }
  }
};

// Multiplies rotated rows: two quads by kPairs pairs of tokens, 16 sums over all columns. An odd token
// is paired with itself.
template <int kPairs>
void multiply_rotated_pairs(const RotatedProduct<>& product, const PanelOperands& from, int quad, int token,
                            int count, const ProductOutput& out) {
  constexpr int kQuads = 2;
  const auto* block = static_cast<const RotatedBlock*>(from.blocks);
  const std::int8_t* x[kPairs][2];
  int32x4_t sums[kPairs][kQuads][2];  // [first or second two rows]: tokens of the pair x 2 rows
  for (int p = 0; p < kPairs; ++p) {
    x[p][0] = static_cast<const std::int8_t*>(from.x) + std::size_t(token + 2 * p) * from.x_stride;
    x[p][1] = x[p][0] + (2 * p + 1 < count ? from.x_stride : 0);
    for (auto& of_quad : sums[p]) of_quad[0] = of_quad[1] = vdupq_n_s32(0);
  }
  for (int b = 0; b < from.n_blocks; ++b, ++block) {
    for (int step = 0; step < kPanelSteps; step += 2) {
      int8x16_t codes[kQuads][2];  // eight columns of two rows
      unrolled<kQuads>([&](auto q) ALWAYS_INLINE {
        const uint32x4_t first = vreinterpretq_u32_u8(quad_codes(*block, quad + q, step)),
                         second = vreinterpretq_u32_u8(quad_codes(*block, quad + q, step + 1));
        codes[q][0] = vreinterpretq_s8_u32(vzip1q_u32(first, second));
        codes[q][1] = vreinterpretq_s8_u32(vzip2q_u32(first, second));
      });
      unrolled<kPairs>([&](auto p) ALWAYS_INLINE {
        const int column = b * kRotatedCols + 4 * step;
        const int8x16_t tokens = vcombine_s8(vld1_s8(x[p][0] + column), vld1_s8(x[p][1] + column));
        unrolled<2 * kQuads>([&](auto i) ALWAYS_INLINE {
          int32x4_t& sum = sums[p][i / 2][i % 2];
          sum = vmmlaq_s32(sum, tokens, codes[i / 2][i % 2]);
        });
      });
    }
  }
  for (int t = 0; t < count; ++t)
    for (int q = 0; q < kQuads; ++q) {
      const int64x2_t first = vreinterpretq_s64_s32(sums[t / 2][q][0]),
                      second = vreinterpretq_s64_s32(sums[t / 2][q][1]);
      const int64x2_t rows = t % 2 == 0 ? vzip1q_s64(first, second) : vzip2q_s64(first, second);
      const int row = (quad + q) * kQuadRows;
      deliver(out, token + t, row, product.finish(vreinterpretq_s32_s64(rows), token + t, row));
    }
}

void multiply_rotated_matrix(const PackedMatrix& weight, GroupRange groups, const RotatedRows& x, int first,
                             int count, const ProductOutput& out, const PrefetchRange& next) {
  constexpr int kPairs = 4;
  if (count == 1) return kernels_neon_dotprod().multiply_rotated(weight, groups, x, first, count, out, next);
  each_group(weight, groups, out, next, [&](int group, const ProductOutput& own, const PrefetchRange&) {
    const RotatedProduct<> product = {weight.scales(group), x.terms + first};
    const PanelOperands from = {weight.group(group), weight.blocks_per_row(), x.row(first), x.stride};
    for (int token = 0; token < count; token += 2 * kPairs) {
      const int tokens = std::min(count - token, 2 * kPairs);
      for (int quad = 0; quad < kGroupQuads; quad += 2)
        with_count<kPairs>(ceil_div(tokens, 2), [&](auto pairs) {
          multiply_rotated_pairs<pairs>(product, from, quad, token, tokens, own);
        });
    }
    activate_products(own, count);
  });
}

}  // namespace

const Kernels& kernels_neon_i8mm() {
  static const Kernels set = [] {
    Kernels table = neon_table<MatrixProduct>("neon_i8mm", kernels_neon_dotprod());
    table.multiply_rotated = multiply_rotated_matrix;
    return table;
  }();
  return set;
}

}  // namespace metal_prefill::cpu
