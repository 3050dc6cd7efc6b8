// Causal attention on the matrix unit (AMX), with the roundings of tile_attention_bf16.h: a step multiplies
// sixteen query rows by 32 dimensions or positions.
//
// For 16 rows and a span of 64 positions of a head of 64 dimensions, the matrix unit works for 256 cycles and
// the softmax takes about 450 on the vector pipes. A row's result depends on its own tile row only, and the
// steps of a sum have the same order for every number of rows.
#pragma once

#include "amx_tiles.h"
#include "tile_attention_bf16.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kAmxRows = 16;
constexpr int kAmxDepth = 32;  // dimensions or positions in a row of a tile

// out = A * B over `steps` of the depth, or += with kAdd, for `blocks` blocks of 16 columns, `b_block`
// elements apart. Strides are in elements: `a_stride` between rows of A, `b_stride` between rows of B, which
// hold pairs of the depth, and `out_stride` between rows of out. Two blocks at a time: with four, more tiles
// are in use than the processor keeps at full speed if two threads share a core.
template <bool kAdd>
inline void multiply_blocks(int steps, int blocks, const std::uint16_t* a, int a_stride,
                            const std::uint16_t* b, int b_stride, int b_block, float* out, int out_stride) {
  const std::size_t out_bytes = std::size_t(out_stride) * sizeof *out;
  const std::size_t a_bytes = std::size_t(a_stride) * sizeof *a, b_bytes = std::size_t(b_stride) * sizeof *b;
  const std::size_t b_step = std::size_t(b_stride) * (kAmxDepth / 2);
  for (int block = 0; block < blocks; block += 2) {
    const bool pair = block + 1 < blocks;
    const std::uint16_t* from = b + std::size_t(block) * std::size_t(b_block);
    float* first = out + block * 16;
    if constexpr (kAdd) {
      load_tile_rows<0>(first, out_bytes);
      if (pair) load_tile_rows<1>(first + 16, out_bytes);
    } else {
      zero_tile<0>();
      zero_tile<1>();
    }
    for (int step = 0; step < steps; ++step, from += b_step) {
      load_tile_rows<4>(a + step * kAmxDepth, a_bytes);
      load_tile_rows<6>(from, b_bytes);
      multiply_pair_tiles<0, 4, 6>();
      if (!pair) continue;
      load_tile_rows<7>(from + b_block, b_bytes);
      multiply_pair_tiles<1, 4, 7>();
    }
    store_tile_rows<0>(first, out_bytes);
    if (pair) store_tile_rows<1>(first + 16, out_bytes);
  }
}

// Computes rows [row, row + rows) of the strip, at most kAmxRows. Other rows of the tiles are discarded.
inline void amx_tile(const AttentionHead& head, int span, int row, int rows, const std::uint16_t* values,
                     AttentionStrip& strip) {
  const int n = seen_positions(strip, row, rows, span);
  if (n == 0) return;
  alignas(64) float scores[kAmxRows][kKeySpan];
  alignas(64) std::uint16_t p[kAmxRows][kKeySpan];
  const int key_blocks = ceil_div(n, kKeyBlock);
  multiply_blocks<false>(head.key_stride / kAmxDepth, key_blocks, strip.q + row * head.key_stride,
                         head.key_stride, strip.keys, kKeyPairStep, 2 * kKeyBlock, scores[0], kKeySpan);
  const int stride = head.value_stride;
  bf16_weights(head, strip, row, rows, span, n, scores, p);
  multiply_blocks<true>(ceil_div(n, kAmxDepth), stride / 16, p[0], kKeySpan, values, stride * 2, kAmxDepth,
                        strip.acc + row * stride, stride);
}

// Copies the first `n` positions of values, then zeros up to a whole step: memory that was not stored may
// hold NaN. Pairs of positions are `stride` elements apart.
inline const std::uint16_t* filled_up(const std::uint16_t* values, int stride, int n, std::uint16_t* out) {
  const __m512i even = _mm512_set1_epi32(0xffff), both = _mm512_set1_epi32(-1), none = _mm512_setzero_si512();
  for (int pair = 0; pair < round_up(n, kAmxDepth) / 2; ++pair) {
    const __m512i stored = pair < n / 2 ? both : pair == n / 2 && n % 2 == 1 ? even : none;
    for (int at = pair * stride; at < (pair + 1) * stride; at += 2 * Simd::kLanes)
      _mm512_store_si512(out + at, _mm512_and_si512(_mm512_load_si512(values + at), stored));
  }
  return out;
}

struct MatrixTiles {
  static constexpr int kRows = kAmxRows;

  static void span(const AttentionHead& head, int span, int stored, int rows, AttentionStrip& strip) {
    alignas(64) std::uint16_t values[kKeySpan * kMaxHeadDim];  // [pairs][value_stride][2]
    const std::uint16_t* whole = stored % kAmxDepth == 0
                                     ? strip.values
                                     : filled_up(strip.values, head.value_stride * 2, stored, values);
    for (int r = 0; r < rows; r += kAmxRows)
      amx_tile(head, span, r, std::min(kAmxRows, rows - r), whole, strip);
  }
};

void attention_amx(const AttentionHead& head, int first, int count) {
  keep_tile_config<kTileRowBytes>();
  attention_of_pairs<MatrixTiles>(head, first, count);
}

}  // namespace
}  // namespace metal_prefill::cpu
