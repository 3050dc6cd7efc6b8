// The multiplication of staged tiles in 8x8 blocks of simdgroup_matrix.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "matmul_tiles.h"

using namespace metal;

// Staged rows are MATMUL_K halves and 16 bytes of padding: eight rows of an 8x8 block then fall in distinct
// banks.
constant constexpr ushort kStagedRow = MATMUL_K + 8;

// The part of the tile that a thread's simdgroup computes: 2 x 2 simdgroups, (tokens, rows).
template <ushort kTokens, ushort kRows>
struct Place {
  static constant constexpr ushort kTokenBlocks = kTokens / 16;  // 8x8 blocks of a simdgroup
  static constant constexpr ushort kRowBlocks = kRows / 16;
  ushort token, row;  // first of the simdgroup in the tile

  Place(ushort simdgroup) : token(simdgroup / 2 * (kTokens / 2)), row(simdgroup % 2 * (kRows / 2)) {}
};

// sum += x w^T over all columns of the stage.
template <typename W, ushort kTokens, ushort kRows, ushort kParts>
static inline void multiply(thread Stage<W, kTokens, kRows, kStagedRow, kParts>& stage,
                            thread simdgroup_float8x8 (&sum)[kTokens / 16][kRows / 16],
                            threadgroup half* staged, thread const Place<kTokens, kRows>& place,
                            bool active) {
  constexpr ushort kTokenBlocks = kTokens / 16, kRowBlocks = kRows / 16;
  stage.begin(staged);
  for (uint k = 0; k < stage.in_dim; k += stage.kStep) {
    const bool more = stage.load_after(k);
    if (active) {
      threadgroup const half* x = stage.tokens_staged() + place.token * kStagedRow;
      threadgroup const half* w = stage.weights_staged() + place.row * kStagedRow;
#pragma unroll
      for (ushort kk = 0; kk < MATMUL_K; kk += 8) {
        simdgroup_half8x8 a[kTokenBlocks], b[kRowBlocks];
#pragma unroll
        for (ushort i = 0; i < kTokenBlocks; ++i)
          simdgroup_load(a[i], x + i * 8 * kStagedRow + kk, kStagedRow);
#pragma unroll
        for (ushort j = 0; j < kRowBlocks; ++j)
          simdgroup_load(b[j], w + j * 8 * kStagedRow + kk, kStagedRow, ulong2(0), true);
#pragma unroll
        for (ushort i = 0; i < kTokenBlocks; ++i)
#pragma unroll
          for (ushort j = 0; j < kRowBlocks; ++j)
            simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
      }
    }
    if (more) stage.store_next();
  }
}
