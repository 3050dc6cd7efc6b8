// AMX on top of AVX-512 with VNNI and BF16: products of 8 and more tokens go to the matrix unit (Intel
// servers since 2023).
//
// A step multiplies a block of 32 columns: 16 tokens x 32 columns (A) by 32 columns x 16 weight rows (B) to
// 16 x 16 integers (C). Since every block has its own scales, C goes to memory after each step and is added
// up in float32, with the same operations in the same order as on AVX-512, so that results are equal to the
// bit.
//
// Per step the matrix unit works for 16 cycles, though only half of a 64-byte row of A is used; storing C
// takes 16, and converting, scaling and adding 16 vectors 24 on the two vector pipes, with 56 loads next to
// them: these bound the speed. docs/cpu_kernels.md has what was measured. So the sums stay in 16 registers
// over all columns, and steps alternate between buffers so that the matrix unit runs ahead of the vector
// pipes. Codes are unpacked to signed bytes once for all tokens of a call.
#include <type_traits>

#include "amx_tiles.h"
#include "simd_avx512.h"
#include "table.h"
#include "tile_attention_amx.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kMinTokens = 16;  // in a call: for fewer, unpacking the weights costs more than it saves
constexpr int kMinTail = 8;     // in the last tile: fewer leave the matrix unit too empty

// Columns that are unpacked at a time: 16 rows of them and the tokens of a tile stay in the L1 cache.
constexpr int kSlabBlocks = 32;

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

// Neighbouring steps use different A and B.
template <int kSlot, int kDepth>
inline __attribute__((always_inline)) void multiply_step(const std::int8_t* tokens,
                                                         const std::int8_t* weights) {
  constexpr int kA = 4 + kSlot % 2, kB = 6 + kSlot % 2;
  zero_tile<kSlot>();
  load_tile<kA, kTileTokens, kDepth, kBlockCols>(tokens);
  load_tile<kB, kDepth / 4, kTileRowBytes>(weights);
  multiply_tiles<kSlot, kA, kB>();
}

// The instructions name their tiles, so each slot is written out.
template <int kDepth>
inline __attribute__((always_inline)) void start_step(int slot, const std::int8_t* tokens,
                                                      const std::int8_t* weights) {
  switch (slot) {
    case 0:
      return multiply_step<0, kDepth>(tokens, weights);
    case 1:
      return multiply_step<1, kDepth>(tokens, weights);
    case 2:
      return multiply_step<2, kDepth>(tokens, weights);
    default:
      return multiply_step<3, kDepth>(tokens, weights);
  }
}

inline __attribute__((always_inline)) void store_step(int slot, Sums& sums) {
  switch (slot) {
    case 0:
      return store_tile<0>(sums);
    case 1:
      return store_tile<1>(sums);
    case 2:
      return store_tile<2>(sums);
    default:
      return store_tile<3>(sums);
  }
}

// acc[t] += sums[t] * (weight scale * token scale), and the minimum with the last step of a block.
template <class Block>
inline void add_step(const Sums& sums, const SignedPanel& panel, int half, const ActivationTile& x,
                     F (&acc)[kTileTokens]) {
  const F scale = Simd::load(panel.scale[half]);
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t) {
    acc[t] = Simd::fma(Simd::to_float(_mm512_load_si512(sums[t])), Simd::mul(scale, Simd::set(x.scale[t])),
                       acc[t]);
  }
  if constexpr (kHasMin<Block> || kHasHalfMins<Block>) {
    const F min = Simd::load(panel.min[half]);
#pragma GCC unroll 16
    for (int t = 0; t < kTileTokens; ++t) {
      const float sum = kStepsOfBlock<Block> == 2 ? scaled_half_sum(x, t, half) : x.scaled_sum[t];
      acc[t] = Simd::fma(min, Simd::set(sum), acc[t]);
    }
  }
}

// One panel by the 16 tokens of a tile, over the blocks of a slab. Sums of earlier slabs are in `out`.
template <class Block>
void panel_tile(const SignedPanel* panel, int n_blocks, const ActivationTile* x, bool first_slab, int count,
                float* out, std::size_t stride) {
  constexpr int kSteps = kStepsOfBlock<Block>, kDepth = kBlockCols / kSteps;
  // A step is multiplied, stored two steps later and added one step after that: the latency of each is
  // hidden.
  constexpr int kStoreLag = 2, kAddLag = 3;
  alignas(64) Sums sums[4];
  F acc[kTileTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t)
    acc[t] = first_slab || t >= count ? Simd::set(0) : Simd::load(out + std::size_t(t) * stride);

  const int n_steps = n_blocks * kSteps;
  const auto four_steps = [&](int first, auto check) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int slot = 0; slot < 4; ++slot) {
      const int step = first + slot, to_store = step - kStoreLag, to_add = step - kAddLag;
      const auto exists = [&](int i)
                              __attribute__((always_inline)) { return !check || (i >= 0 && i < n_steps); };
      if (exists(step)) {
        start_step<kDepth>(slot, x[step / kSteps].q[0] + step % kSteps * kDepth,
                           panel[step / kSteps].codes[step % kSteps * 4][0]);
      }
      if (exists(to_store)) store_step((slot + 2) % 4, sums[(slot + 2) % 4]);
      if (exists(to_add))
        add_step<Block>(sums[(slot + 1) % 4], panel[to_add / kSteps], to_add % kSteps, x[to_add / kSteps],
                        acc);
    }
  };
  four_steps(0, std::true_type());
  int first = 4;
  for (; first + 4 <= n_steps; first += 4) four_steps(first, std::false_type());
  for (; first < n_steps + kAddLag; first += 4) four_steps(first, std::true_type());
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t)
    if (t < count) Simd::store(out + std::size_t(t) * stride, acc[t]);
}

template <class Block>
void amx_group(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
               std::size_t stride) {
  const int n_blocks = weight.blocks_per_row();
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  // The next group is fetched meanwhile, a part with each tile of tokens.
  const std::byte* next = weight.group(group + 1);
  const std::byte* const end = next + std::size_t(n_blocks) * sizeof(Block);
  const int n_tiles = ceil_div(count, kTileTokens) * 2 * ceil_div(n_blocks, kSlabBlocks);
  const std::ptrdiff_t part = round_up(ceil_div(end - next, n_tiles), kCacheLine);
  SignedPanel panels[kSlabBlocks];
  for (int slab = 0; slab < n_blocks; slab += kSlabBlocks) {
    const int n = n_blocks - slab < kSlabBlocks ? n_blocks - slab : kSlabBlocks;
    for (int panel = 0; panel < 2; ++panel) {
      for (int b = 0; b < n; ++b) unpack(block[slab + b], panel, panels[b]);
      for (int t = 0; t < count; t += kTileTokens) {
        for (const std::byte* stop = next + part; next < end && next < stop; next += kCacheLine)
          _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
        const int tokens = count - t < kTileTokens ? count - t : kTileTokens;
        panel_tile<Block>(panels, n, x.tile(first + t) + slab, slab == 0, tokens,
                          out + std::size_t(t) * stride + panel * kPanelRows, stride);
      }
    }
  }
}

template <class Block>
void amx_blocks(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count, float* out,
                std::size_t stride) {
  keep_tile_config<kBlockCols / kStepsOfBlock<Block>>();
  amx_group<Block>(weight, group, x, first, count, out, stride);
}

void multiply_int8_amx(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count,
                       float* out, std::size_t stride) {
  if (count < kMinTokens || first % kTileTokens != 0)
    return multiply_int8(weight, group, x, first, count, out, stride);
  if (const int tail = count % kTileTokens; tail < kMinTail) {
    count -= tail;
    multiply_int8(weight, group, x, first + count, tail, out + std::size_t(count) * stride, stride);
  }
  visit_wide(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    amx_blocks<Block>(weight, group, x, first, count, out, stride);
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
