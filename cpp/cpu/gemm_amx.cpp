// AMX on top of AVX-512 with VNNI and BF16: products of 8 and more tokens go to the matrix unit (Intel
// servers since 2023).
//
// A step multiplies a block of 32 columns: 16 tokens x 32 columns (A) by 32 columns x 16 weight rows (B) to
// 16 x 16 integers (C). Since every block has its own scales, C goes to memory after each step and is added
// up in float32, with the same operations in the same order as on AVX-512, so that results are equal to the
// bit.
//
// Of these instructions a tile load takes longest (26 cycles, a product 16, a store 17; measured), so the
// weights of a block stay in tiles for all tokens of a call, and each load of A serves two panels. The sums
// in float32 stay in the L1 cache, 16 loads and 16 stores a product, next to 48 operations on the two vector
// pipes. Neighbouring places alternate between tiles and buffers, so that the matrix unit runs ahead of the
// vector pipes. Codes are unpacked to signed bytes once for all tokens of a call. docs/cpu_kernels.md has
// what was measured.
#include <algorithm>
#include <type_traits>

#include "amx_tiles.h"
#include "simd_avx512.h"
#include "table.h"
#include "tile_attention_amx.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kMinTokens = 16;  // in a call: for fewer, unpacking the weights costs more than it saves
constexpr int kMinTail = 8;     // in the last tile: fewer leave the matrix unit too empty

constexpr int kMostTokens = 192;  // whose results stay in the L1 cache

constexpr int kCacheLine = 64;

// Each half of a block with scales of its own is multiplied separately.
template <class Block>
constexpr int kStepsOfBlock = kHasHalves<Block> ? 2 : 1;

// Weights of 16 rows and 32 columns as signed bytes, four columns of a row together.
struct alignas(64) SignedPanel {
  std::int8_t codes[kBlockCols / 4][kPanelRows][4];
  float scale[2][kPanelRows];
  float min[2][kPanelRows];  // of halves, or the first
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
  if constexpr (requires { block.half_scale; }) {
    for (int half = 0; half < 2; ++half)
      Simd::store(out.scale[half], Simd::load(block.half_scale[half] + panel * kPanelRows));
  } else {
    Simd::store(out.scale[0], load_floats(block.scale + panel * kPanelRows));
  }
  if constexpr (requires { block.min; }) Simd::store(out.min[0], load_floats(block.min + panel * kPanelRows));
  if constexpr (requires { block.half_min; }) {
    for (int half = 0; half < 2; ++half)
      Simd::store(out.min[half], Simd::load(block.half_min[half] + panel * kPanelRows));
  }
}

using Sums = std::int32_t[kTileTokens][kPanelRows];
using Results = float[kMostTokens][kGroupRows];

// A block's half, or all of it, and a tile of tokens: what is multiplied at once, with both panels.
struct Place {
  int block = 0, half = 0, tile = 0;

  void advance(int halves, int tiles) {
    if (++tile < tiles) return;
    tile = 0;
    if (++half < halves) return;
    half = 0;
    ++block;
  }
};

// B stays in tiles 6 and 7, a panel each, for all tokens. Neighbouring places use different A and C.
template <int kSlot, int kDepth>
inline __attribute__((always_inline)) void multiply_place(const std::int8_t* tokens) {
  constexpr int kA = 4 + kSlot, kC = 2 * kSlot;
  load_tile<kA, kTileTokens, kDepth, kBlockCols>(tokens);
  zero_tile<kC>();
  multiply_tiles<kC, kA, 6>();
  zero_tile<kC + 1>();
  multiply_tiles<kC + 1, kA, 7>();
}

// to[t] += sums[t] * (weight scale * token scale), and the minimum with the last step of a block.
template <class Block>
inline __attribute__((always_inline)) void add_sums(const Sums& sums, const SignedPanel& panel, int half,
                                                    const ActivationTile& x, float* to) {
  const F scale = Simd::load(panel.scale[half]);
  [[maybe_unused]] F min;
  if constexpr (kHasMin<Block> || kHasHalfMins<Block>) min = Simd::load(panel.min[half]);
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t) {
    F sum = Simd::fma(Simd::to_float(_mm512_load_si512(sums[t])),
                      Simd::mul(scale, Simd::set(x.terms[t].scale)), Simd::load(to + t * kGroupRows));
    if constexpr (kHasMin<Block> || kHasHalfMins<Block>) {
      const float scaled = kStepsOfBlock<Block> == 2 ? scaled_half_sum(x, t, half) : x.terms[t].scaled_sum;
      sum = Simd::fma(min, Simd::set(scaled), sum);
    }
    Simd::store(to + t * kGroupRows, sum);
  }
}

// A group by `tiles` tiles of tokens, added to `out`. `x` is the first tile, `next` what is fetched
// meanwhile.
template <class Block>
void amx_tokens(const Block* block, int n_blocks, const ActivationTile* x, int tiles, Results& out) {
  constexpr int kHalves = kStepsOfBlock<Block>, kDepth = kBlockCols / kHalves;
  SignedPanel panels[2][2];  // of every other block
  alignas(64) Sums sums[2][2];
  Place to_multiply, to_add;
  const int places = n_blocks * kHalves * tiles;
  const std::ptrdiff_t line_step = ceil_div(std::ptrdiff_t(sizeof(Block)), kHalves * tiles * kCacheLine);
  const auto tile_at = [&](const Place& at) -> const ActivationTile& {
    return x[std::size_t(at.tile) * std::size_t(n_blocks) + std::size_t(at.block)];
  };
  // Products of a place are stored while those of the next are computed, and added one place after that.
  const auto visit = [&]<int kSlot>(int i,
                                    std::integral_constant<int, kSlot>) __attribute__((always_inline)) {
    if (i >= 2) {
      for (int panel = 0; panel < 2; ++panel)
        add_sums<Block>(sums[kSlot][panel], panels[to_add.block % 2][panel], to_add.half, tile_at(to_add),
                        out[to_add.tile * kTileTokens] + panel * kPanelRows);
      to_add.advance(kHalves, tiles);
    }
    if (i < places) {
      SignedPanel(&pair)[2] = panels[to_multiply.block % 2];
      if (to_multiply.tile == 0) {
        if (to_multiply.half == 0)
          for (int panel = 0; panel < 2; ++panel) unpack(block[to_multiply.block], panel, pair[panel]);
        load_tile<6, kDepth / 4, kTileRowBytes>(pair[0].codes[to_multiply.half * 4]);
        load_tile<7, kDepth / 4, kTileRowBytes>(pair[1].codes[to_multiply.half * 4]);
      }
      // The same block of the next group, a part with each place.
      const auto* next = reinterpret_cast<const char*>(block + n_blocks + to_multiply.block);
      for (std::ptrdiff_t line = 0; line < line_step; ++line)
        _mm_prefetch(next + ((to_multiply.half * tiles + to_multiply.tile) * line_step + line) * kCacheLine,
                     _MM_HINT_T1);
      multiply_place<kSlot, kDepth>(tile_at(to_multiply).q[0] + to_multiply.half * kDepth);
      to_multiply.advance(kHalves, tiles);
    }
    if (i >= 1 && i <= places) {
      store_tile<2 * (1 - kSlot)>(sums[1 - kSlot][0]);
      store_tile<2 * (1 - kSlot) + 1>(sums[1 - kSlot][1]);
    }
  };
  for (int i = 0; i < places + 2; i += 2) {
    visit(i, std::integral_constant<int, 0>());
    if (i + 1 < places + 2) visit(i + 1, std::integral_constant<int, 1>());
  }
}

template <class Block>
void amx_blocks(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
                std::size_t stride) {
  keep_tile_config<kBlockCols / kStepsOfBlock<Block>>();
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  for (int done = 0; done < count; done += kMostTokens) {
    const int n = std::min(count - done, kMostTokens), tiles = ceil_div(n, kTileTokens);
    alignas(64) Results results;
    std::fill_n(results[0], tiles * kTileTokens * kGroupRows, 0.0f);
    amx_tokens<Block>(block, weight.blocks_per_row(), x.tile(first + done), tiles, results);
    for (int t = 0; t < n; ++t) std::copy_n(results[t], kGroupRows, out + std::size_t(done + t) * stride);
  }
}

// A single token, with the next group fetched meanwhile: left to itself, this processor reads memory at 5/6
// of the speed.
template <class Block>
void amx_token(const PackedMatrix& weight, int group, const Int8Rows& x, int token, float* out) {
  constexpr Fetch kEveryBlock = {.begin = 0, .every = 1};
  int8_tokens<Block, 1>(reinterpret_cast<const Block*>(weight.group(group)), weight.blocks_per_row(),
                        x.tile(token), token % kTileTokens, out, kGroupRows, kEveryBlock);
}

void multiply_int8_amx(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count,
                       float* out, std::size_t stride) {
  visit_wide(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    if (count == 1) return amx_token<Block>(weight, group, x, first, out);
    if (count < kMinTokens || first % kTileTokens != 0)
      return int8_blocks<Block>(weight, group, x, first, count, out, stride);
    const int tail = count % kTileTokens, by_vectors = tail < kMinTail ? tail : 0;
    const int by_tiles = count - by_vectors;
    amx_blocks<Block>(weight, group, x, first, by_tiles, out, stride);
    if (by_vectors > 0)
      int8_blocks<Block>(weight, group, x, first + by_tiles, by_vectors, out + std::size_t(by_tiles) * stride,
                         stride);
  });
}

// Full tiles: 16 tokens x 64 columns by 64 columns x 16 rows.
double run_dots_amx(int rounds) {
  constexpr int kDepth = 64;
  alignas(64) static constexpr std::int8_t kOperands[kTileTokens * kDepth] = {};
  keep_tile_config<kDepth>();
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  load_tile<4, kTileTokens, kDepth>(kOperands);
  load_tile<5, kTileTokens, kDepth>(kOperands);
  load_tile<6, kDepth / 4, kTileRowBytes>(kOperands);
  load_tile<7, kDepth / 4, kTileRowBytes>(kOperands);
  for (int round = 0; round < rounds; ++round) {
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 5, 6>();
    multiply_tiles<2, 4, 7>();
    multiply_tiles<3, 5, 7>();
  }
  drop_tile_config();
  return double(rounds) * 4 * kTileTokens * kPanelRows * kDepth;
}

constexpr Kernels amx_table() {
  Kernels table = with_pairs(kTable, kAmxDepth);
  table.name = "amx";
  table.multiply_int8 = multiply_int8_amx;
  table.end_phase = drop_tile_config;
  table.attention = attention_amx;
  table.run_dots = run_dots_amx;
  return table;
}

}  // namespace

extern const Kernels kKernels_amx;
const Kernels kKernels_amx = amx_table();

}  // namespace metal_prefill::cpu
