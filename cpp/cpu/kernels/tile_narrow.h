// Narrow blocks: products of a single token, which read them directly, and conversion to wide blocks.
#pragma once

#include <cstring>
#include <utility>

#include "tile_gemm.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kGroupVectors = kGroupRows / Simd::kLanes;

// Prefetch distance of the weights of a single token, in bytes.
constexpr std::size_t kFetchAhead = 8192;

// Prefetches a span's share of the block `ahead` bytes later into the L2 cache. A span's loads are more
// streams than the processor prefetches: without this, a token reads 8 GB/s instead of a single stream's 24
// GB/s.
template <int kParts = 1, class Block>
inline void prefetch_span(const Block* block, int part, std::size_t ahead) {
  constexpr std::size_t kBytes = ceil_div(sizeof(Block), std::size_t(64) * kParts * Block::kSpans) * 64;
  prefetch<CacheLevel::kL2, kBytes>(reinterpret_cast<const std::byte*>(block) + ahead + part * kBytes);
}

template <class Block>
constexpr bool kNarrowMin = requires(Block b) { b.min; } || requires(Block b) { b.min_unit; };

inline I load_table(const std::uint8_t* table) {
  return table ? Simd::load_table(table) : Simd::set_int(0);
}

// Codes of columns 4 * kStep to 4 * kStep + 3 of the rows from `lane` of a panel on, or their table values.
template <class Block, int kStep>
inline ALWAYS_INLINE I narrow_codes(const std::uint8_t (&panel)[Block::kBits][kPanelRows][4], int lane,
                                    I table) {
  constexpr int kLow = low_plane(Block::kBits), kHigh = Block::kBits - kLow;
  I codes = Simd::field<kLow, kStep / kLow * kLow, 0>(Simd::load_codes(panel[kStep % kLow][lane]));
  if constexpr (kHigh > 0) {
    const I high = Simd::load_codes(panel[kLow + kStep % kHigh][lane]);
    codes = Simd::or_int(codes, Simd::field<kHigh, kStep / kHigh * kHigh, kLow>(high));
  }
  if constexpr (Block::kIsTable) codes = Simd::look_up(table, codes);
  return codes;
}

// Integer scales of half a span of the rows from `row` on, one per lane.
template <class Block>
inline I scale_codes(const Block& block, int span, int half, int row) {
  if constexpr (requires { block.scale_and_min; }) {
    return Simd::field<4, 0, 0>(Simd::load_uint8(block.scale_and_min[span][half] + row));
  } else {
    constexpr int kHalves = int(sizeof(block.scale_code[0]) / kGroupRows);
    return Simd::load_int8(block.scale_code[span][kHalves == 2 ? half : 0] + row);
  }
}
template <class Block>
inline I min_codes(const Block& block, int span, int half, int row) {
  if constexpr (requires { block.scale_and_min; })
    return Simd::field<4, 4, 0>(Simd::load_uint8(block.scale_and_min[span][half] + row));
  else
    return Simd::load_int8(block.min_code[span] + row);
}

template <class Block>
inline F narrow_scale(const Block& block, int span, int half, int row) {
  if constexpr (requires { block.scale; })
    return load_floats(block.scale + row);
  else if constexpr (requires { block.half_scale; })
    return load_floats(block.half_scale[half] + row);
  else
    return load_floats(block.scale_unit + row) * Simd::to_float(scale_codes(block, span, half, row));
}

template <class Block>
inline F narrow_min(const Block& block, int span, int half, int row) {
  if constexpr (requires { block.min; }) {
    return load_floats(block.min + row);
  } else {
    const F code = Simd::to_float(min_codes(block, span, half, row));
    return 0.0f - load_floats(block.min_unit + row) * code;
  }
}

template <class Block>
void narrow_token(const Block* block, int n_blocks, const std::uint8_t* table, const ActivationTile* x,
                  int token, float* out) {
  constexpr int kSums = kBlockSums<typename Block::Wide>;
  const I values = load_table(table);
  F acc[kGroupVectors];
  FOR_UNROLL (F& sum : acc) sum = Simd::set(0);
  for (int b = 0; b < n_blocks; ++b, ++block) {
#pragma GCC unroll 1
    for (int span = 0; span < Block::kSpans; ++span, ++x) {
      prefetch_span(block, span, kFetchAhead);
      std::int32_t start[2] = {0, 0};  // of the sums over the first and the last 16 columns
      if constexpr (Simd::kStartsFromSum<Block::kZero>) {
        start[0] = x->terms[token].start_half / 8 * Block::kZero;
        start[1] = (x->terms[token].start - x->terms[token].start_half) / 8 * Block::kZero;
      }
      const F x_scale = Simd::set(x->terms[token].scale);
#pragma GCC unroll Simd::kNarrowVectors
      for (int v = 0; v < kGroupVectors; ++v) {
        const int row = v * Simd::kLanes, panel = row / kPanelRows, lane = row % kPanelRows;
        I sum[2] = {Simd::set_int(start[0]), Simd::set_int(start[1])};
        unrolled<8>([&](auto step) ALWAYS_INLINE {
          const I codes = narrow_codes<Block, step>(block->codes[span][panel], lane, values);
          sum[step / 4] = Simd::template dot<Block::kZero>(sum[step / 4], codes,
                                                           Simd::broadcast4(x->q[token] + 4 * step));
        });
        if constexpr (kAddsHalves<Simd, typename Block::Wide>) {
          const F total =
              scaled_sum(block->scale_code[span], row, Simd::to_float(sum[0]), Simd::to_float(sum[1]));
          acc[v] = Simd::fma(total, load_floats(block->scale_unit + row) * x_scale, acc[v]);
        } else if constexpr (kSums == 2) {
          if constexpr (kJoinsHalves<Simd, typename Block::Wide>)
            acc[v] = Simd::fma(joined_sum(narrow_scale(*block, span, 0, row), sum[0],
                                          narrow_scale(*block, span, 1, row), sum[1]),
                               x_scale, acc[v]);
          FOR_UNROLL (int half = 0; half < 2; ++half) {
            if constexpr (!kJoinsHalves<Simd, typename Block::Wide>)
              acc[v] = Simd::fma(Simd::to_float(sum[half]), narrow_scale(*block, span, half, row) * x_scale,
                                 acc[v]);
            if constexpr (kNarrowMin<Block>) {
              acc[v] = Simd::fma(narrow_min(*block, span, half, row),
                                 Simd::set(scaled_half_sum(*x, token, half)), acc[v]);
            }
          }
        } else {
          const F total = Simd::to_float(sum[0]) + Simd::to_float(sum[1]);  // below 2^24: exact
          acc[v] = Simd::fma(total, narrow_scale(*block, span, 0, row) * x_scale, acc[v]);
          if constexpr (kNarrowMin<Block>)
            acc[v] =
                Simd::fma(narrow_min(*block, span, 0, row), Simd::set(x->terms[token].scaled_sum), acc[v]);
        }
      }
    }
  }
  FOR_UNROLL (int v = 0; v < kGroupVectors; ++v) Simd::store(out + v * Simd::kLanes, acc[v]);
}

void multiply_narrow(const PackedMatrix& weight, int group, const Int8Rows& x, int token, float* out) {
  visit_narrow(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    narrow_token(reinterpret_cast<const Block*>(weight.group(group)), weight.blocks_per_row(), weight.table,
                 x.tile(token), token % kTileTokens, out);
  });
}

template <class Block>
void widen_span(const Block& block, int span, I table, typename Block::Wide& out) {
  using Wide = typename Block::Wide;
  // Products of some sets have no room for larger codes.
  static_assert((Block::kIsTable ? 255 : (1 << Block::kBits) - 1 - Block::kZero + Wide::kZero) <=
                Wide::kMaxCode);
  for (int row = 0; row < kGroupRows; row += Simd::kLanes) {
    const int panel = row / kPanelRows, lane = row % kPanelRows;
    if constexpr (Wide::kBits == 4) {
      static_assert(Block::kBits == 4 && Block::kZero == Wide::kZero && !Block::kIsTable);
      for (int step = 0; step < 4; ++step)
        Simd::store_codes(out.codes[panel][step][lane],
                          Simd::load_codes(block.codes[span][panel][step][lane]));
    } else {
      // Codes below 128 and their addends do not carry into other bytes.
      const I to_zero = Simd::set_int((Block::kZero - Wide::kZero) * 0x01010101);
      unrolled<8>([&](auto step) ALWAYS_INLINE {
        const I codes = narrow_codes<Block, step>(block.codes[span][panel], lane, table);
        Simd::store_codes(out.codes[panel][step][lane], Simd::sub_int(codes, to_zero));
      });
    }
    if constexpr (kAddsHalves<Simd, Wide>) {
      for (int half = 0; half < 2; ++half)
        std::memcpy(out.scale_code[half] + row, block.scale_code[span][half] + row, Simd::kLanes);
      Simd::store(out.scale_unit + row, load_floats(block.scale_unit + row));
    } else if constexpr (requires { out.half_scale; }) {
      for (int half = 0; half < 2; ++half)
        Simd::store(out.half_scale[half] + row, narrow_scale(block, span, half, row));
    } else if constexpr (std::is_same_v<decltype(out.scale[0]), float&>) {
      Simd::store(out.scale + row, narrow_scale(block, span, 0, row));
    } else {
      std::memcpy(out.scale + row, block.scale + row, Simd::kLanes * sizeof out.scale[0]);
    }
    if constexpr (requires { out.half_min; }) {
      for (int half = 0; half < 2; ++half)
        Simd::store(out.half_min[half] + row, narrow_min(block, span, half, row));
    } else if constexpr (requires { out.min; }) {
      Simd::store(out.min + row, narrow_min(block, span, 0, row));
    }
  }
}

void widen(const PackedMatrix& weight, int group, std::byte* out) {
  visit_narrow(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    const auto* block = reinterpret_cast<const Block*>(weight.group(group));
    auto* wide = reinterpret_cast<typename Block::Wide*>(out);
    const I table = load_table(weight.table);
    // Prefetches the next group, which is read after the products of this one.
    const std::size_t ahead = sizeof(Block) * weight.blocks_per_row();
    for (int b = 0; b < weight.blocks_per_row(); ++b) {
      for (int span = 0; span < Block::kSpans; ++span) {
        prefetch_span(block + b, span, ahead);
        widen_span(block[b], span, table, *wide++);
      }
    }
  });
}

}  // namespace
}  // namespace metal_prefill::cpu
