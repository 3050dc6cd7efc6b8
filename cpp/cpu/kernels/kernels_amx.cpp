// AMX on top of AVX-512 with VNNI and BF16: products of 8 and more tokens use the matrix unit (Intel servers
// since 2023).
//
// A step multiplies a block of 32 columns: 16 tokens x 32 columns (A) by 32 columns x 16 weight rows (B) to
// 16 x 16 integers (C). Since every block has its own scales, C is stored after each step and accumulated in
// float32, with the same operations in the same order as on AVX-512, so that results are bit-identical.
//
// The float32 accumulators stay in sixteen registers over all columns: 48 operations on two vector pipes and
// 48 loads per product. Products alternate between two C, so that one is computed while the other is stored,
// and use six tiles: with eight, tiles alone take 1.7 times as long if two threads share a core. Weights are
// unpacked to signed bytes once for all tokens of a call. docs/cpu_kernels.md has the measurements.
//
// tile_super_amx.h is for weights with integer scales.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "amx_tiles.h"
#include "simd_avx512.h"
#include "tile_attention_amx.h"
#include "tile_gemm.h"
#include "tile_panels_amx.h"
#include "tile_super_amx.h"

namespace metal_prefill::cpu {

const Kernels& kernels_avx512bf16();  // which this set extends

namespace {

constexpr int kMinTokens = 16;  // in a call: for fewer, unpacking the weights costs more than it saves
constexpr int kMinTail = 8;     // in the last tile: fewer leave the matrix unit too empty

// Blocks of 16 weight rows that are unpacked at a time: they stay in the L1 cache for all tokens.
constexpr int kSlabBlocks = 18;

// The halves of a block are multiplied separately if each has its own scale.
template <class Block>
constexpr int kStepsOfBlock = kHasHalves<Block> ? 2 : 1;

// Weights of 16 rows and 32 columns as signed bytes, four columns of a row together.
struct alignas(64) SignedPanel {
  std::int8_t codes[kBlockCols / 4][kPanelRows][4];
  float scale[2][kPanelRows];  // one per half, or only the first
  float min[kPanelRows];
};

template <class Block>
void unpack(const Block& block, int panel, SignedPanel& out) {
  const __m512i zero = _mm512_set1_epi8(char(Block::kZero));
  for (int step = 0; step < Block::kBits; ++step) {
    const I packed = Simd::load_codes(block.codes[panel][step][0]);
    if constexpr (Block::kBits == 4) {
      _mm512_store_si512(out.codes[step], _mm512_sub_epi8(Simd::low_nibbles(packed), zero));
      _mm512_store_si512(out.codes[step + 4], _mm512_sub_epi8(Simd::high_nibbles(packed), zero));
    } else {
      _mm512_store_si512(out.codes[step], _mm512_sub_epi8(packed, zero));
    }
  }
  if constexpr (kHasHalves<Block>) {
    for (int half = 0; half < 2; ++half)
      Simd::store(out.scale[half], load_floats(block.half_scale[half] + panel * kPanelRows));
  } else {
    Simd::store(out.scale[0], load_floats(block.scale + panel * kPanelRows));
  }
  if constexpr (kHasMin<Block>) Simd::store(out.min, load_floats(block.min + panel * kPanelRows));
}

using Sums = std::int32_t[kTileTokens][kPanelRows];

// C = tokens * weights of one block, or of half a block.
template <int kSlot, int kDepth>
inline ALWAYS_INLINE void multiply_step(const std::int8_t* tokens, const std::int8_t* weights) {
  constexpr int kA = 4 + kSlot, kB = 6 + kSlot;
  zero_tile<kSlot>();
  load_tile<kA, kTileTokens, kDepth, kBlockCols>(tokens);
  load_tile<kB, kDepth / 4, kTileRowBytes>(weights);
  multiply_tiles<kSlot, kA, kB>();
}

// results[t] += sums[t] * (weight scale * token scale), and the minimum.
template <class Block>
inline ALWAYS_INLINE void add_sums(const Sums& sums, const SignedPanel& panel, const ActivationTile& x,
                                   F (&results)[kTileTokens]) {
  const F scale = Simd::load(panel.scale[0]);
  FOR_UNROLL (int t = 0; t < kTileTokens; ++t) {
    results[t] = Simd::fma(Simd::to_float(_mm512_load_si512(sums[t])), scale * x.terms[t].scale, results[t]);
    if constexpr (kHasMin<Block>)
      results[t] = Simd::fma(Simd::load(panel.min), Simd::set(x.terms[t].scaled_sum), results[t]);
  }
}

// The same with the sums of both halves of a block.
template <class Block>
inline ALWAYS_INLINE void add_halves(const Sums (&sums)[2], const SignedPanel& panel, const ActivationTile& x,
                                     F (&results)[kTileTokens]) {
  static_assert(kJoinsHalves<Simd, Block>);
  const F first = Simd::load(panel.scale[0]), second = Simd::load(panel.scale[1]);
  FOR_UNROLL (int t = 0; t < kTileTokens; ++t) {
    const F sum = joined_sum(first, _mm512_load_si512(sums[0][t]), second, _mm512_load_si512(sums[1][t]));
    results[t] = Simd::fma(sum, Simd::set(x.terms[t].scale), results[t]);
  }
}

// Multiplies 16 weight rows by 16 tokens, over a slab, whose first blocks are `x` and `panels`. `first`: it
// is the first slab.
template <class Block>
void multiply_slab(const SignedPanel* panels, const ActivationTile* x, int n_blocks, bool first, float* out,
                   std::size_t stride, NextLines& next) {
  constexpr int kHalves = kStepsOfBlock<Block>, kDepth = kBlockCols / kHalves;
  alignas(64) Sums sums[2];
  F results[kTileTokens];
  FOR_UNROLL (int t = 0; t < kTileTokens; ++t)
    results[t] = first ? Simd::set(0) : Simd::load(out + std::size_t(t) * stride);
  const auto start = [&]<int kSlot>(int step, std::integral_constant<int, kSlot>) ALWAYS_INLINE {
    const int block = step / kHalves, half = step % kHalves;
    multiply_step<kSlot, kDepth>(x[block].q[0] + half * kDepth, panels[block].codes[half * 4][0]);
  };
  constexpr std::integral_constant<int, 0> kEven;
  constexpr std::integral_constant<int, 1> kOdd;
  const int steps = n_blocks * kHalves;
  NextLines lines = next;  // copy in registers
  lines.begin_tile(ceil_div(steps, 2));
  start(0, kEven);
  if constexpr (kHalves == 2) {
    // The unit multiplies both halves of the next block while those of this one are added up.
    start(1, kOdd);
    for (int block = 0; block < n_blocks; ++block) {
      const bool more = block + 1 < n_blocks;
      lines.step();
      store_tile<0>(sums[0]);
      if (more) start(2 * block + 2, kEven);
      store_tile<1>(sums[1]);
      if (more) start(2 * block + 3, kOdd);
      add_halves<Block>(sums, panels[block], x[block], results);
    }
  } else {
    const auto finish = [&]<int kSlot>(int block, std::integral_constant<int, kSlot>) ALWAYS_INLINE {
      store_tile<kSlot>(sums[kSlot]);
      add_sums<Block>(sums[kSlot], panels[block], x[block], results);
    };
    for (int step = 0; step < steps; step += 2) {
      lines.step();
      if (step + 1 < steps) start(step + 1, kOdd);
      finish(step, kEven);
      if (step + 1 == steps) break;
      if (step + 2 < steps) start(step + 2, kEven);
      finish(step + 1, kOdd);
    }
  }
  next = lines;
  FOR_UNROLL (int t = 0; t < kTileTokens; ++t) Simd::store(out + std::size_t(t) * stride, results[t]);
}

template <class Block>
void amx_blocks(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
                std::size_t stride) {
  constexpr int kHalves = kStepsOfBlock<Block>;
  keep_tile_config<kBlockCols / kHalves>();
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  const int n_blocks = weight.blocks_per_row(), tiles = ceil_div(count, kTileTokens);
  const int rest = count % kTileTokens;  // tokens of the last tile, if it is not full
  SignedPanel panels[kSlabBlocks];
  alignas(64) float last[2][kTileTokens][kPanelRows];
  for (int slab = 0; slab < n_blocks; slab += kSlabBlocks) {
    const int n = std::min(n_blocks - slab, kSlabBlocks);
    const Block* same_columns = block + n_blocks + slab;  // of the next group
    NextLines next({reinterpret_cast<const std::byte*>(same_columns), n * sizeof(Block)}, 2 * tiles);
    for (int panel = 0; panel < 2; ++panel) {
      for (int b = 0; b < n; ++b) unpack(block[slab + b], panel, panels[b]);
      for (int tile = 0; tile < tiles; ++tile) {
        const bool full = rest == 0 || tile + 1 < tiles;
        multiply_slab<Block>(
            panels, x.tile(first + tile * kTileTokens) + slab, n, slab == 0,
            full ? out + std::size_t(tile * kTileTokens) * stride + panel * kPanelRows : last[panel][0],
            full ? stride : std::size_t(kPanelRows), next);
      }
    }
  }
  for (int t = 0; t < rest; ++t)
    for (int panel = 0; panel < 2; ++panel)
      std::copy_n(last[panel][t], kPanelRows,
                  out + std::size_t(count - rest + t) * stride + panel * kPanelRows);
}

// Multiplies a single token. Prefetches the next group; without that, reads reach 5/6 of the speed.
template <class Block>
void amx_token(const PackedMatrix& weight, int group, const Int8Rows& x, int token, float* out) {
  constexpr Fetch kEveryBlock = {.begin = 0, .every = 1};
  int8_tokens<Block, 1>(reinterpret_cast<const Block*>(weight.group(group)), weight.blocks_per_row(),
                        x.tile(token), token % kTileTokens, out, kGroupRows, kEveryBlock);
}

template <class Block>
void amx_tokens(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
                std::size_t stride) {
  if (count == 1) return amx_token<Block>(weight, group, x, first, out);
  if (count < kMinTokens || first % kTileTokens != 0)
    return kernels_avx512vnni().multiply_int8(weight, group, x, first, count, out, stride);
  const int tail = count % kTileTokens, by_vectors = tail < kMinTail ? tail : 0;
  const int by_tiles = count - by_vectors;
  amx_blocks<Block>(weight, group, x, first, by_tiles, out, stride);
  if (by_vectors > 0)
    kernels_avx512vnni().multiply_int8(weight, group, x, first + by_tiles, by_vectors,
                                       out + std::size_t(by_tiles) * stride, stride);
}

void multiply_int8_amx(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count,
                       float* out, std::size_t stride) {
  visit_wide(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    // These two are K-quants, which multiply_super() takes.
    if constexpr (!kHasIntegerHalves<Block> && !kHasHalfMins<Block>)
      amx_tokens<Block>(weight, group, x, first, count, out, stride);
  });
}

// Multiplies full tiles: 16 tokens by 16 rows, and 64 columns of bytes or 32 in pairs of bfloat16.
template <bool kPairs>
double run_tiles(int rounds) {
  constexpr int kDepth = kPairs ? kTileRowBytes / 2 : kTileRowBytes;
  alignas(64) static constexpr std::int8_t kOperands[kTileTokens * kTileRowBytes] = {};
  keep_tile_config<kTileRowBytes>();
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  load_tile<4, kTileTokens, kTileRowBytes>(kOperands);
  load_tile<5, kTileTokens, kTileRowBytes>(kOperands);
  load_tile<6, kTileTokens, kTileRowBytes>(kOperands);
  load_tile<7, kTileTokens, kTileRowBytes>(kOperands);
  const auto multiply = []<int kC, int kA, int kB>(std::integer_sequence<int, kC, kA, kB>) ALWAYS_INLINE {
    if constexpr (kPairs)
      multiply_pair_tiles<kC, kA, kB>();
    else
      multiply_tiles<kC, kA, kB>();
  };
  for (int round = 0; round < rounds; ++round) {
    multiply(std::integer_sequence<int, 0, 4, 6>());
    multiply(std::integer_sequence<int, 1, 5, 6>());
    multiply(std::integer_sequence<int, 2, 4, 7>());
    multiply(std::integer_sequence<int, 3, 5, 7>());
  }
  drop_tile_config();
  return double(rounds) * 4 * kTileTokens * kPanelRows * kDepth;
}

}  // namespace

const Kernels& kernels_amx() {
  static const Kernels set = [] {
    Kernels table = kernels_avx512bf16();
    table.name = "amx";
    table.key_multiple = kAmxDepth;
    table.multiply_int8 = multiply_int8_amx;
    table.multiply_super = multiply_super;
    table.quantize_super = quantize_super;
    table.multiply_pairs = multiply_pairs_amx;
    table.multiply_rotated = multiply_rotated_amx;
    table.end_phase = drop_tile_config;
    table.attention = attention_amx;
    table.run_dots = run_tiles<false>;
    table.run_bfloat16 = run_tiles<true>;
    return table;
  }();
  return set;
}

}  // namespace metal_prefill::cpu
