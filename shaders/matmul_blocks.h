// The multiplication of staged tiles in 8x8 blocks of simdgroup_matrix.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "matmul_tiles.h"

using namespace metal;

// Staged rows are MATMUL_K halves and 16 bytes of padding, so that eight rows of an 8x8 block are in distinct
// banks.
constant constexpr ushort kStagedRow = MATMUL_K + 8;

// The part of the tile that a thread's simdgroup computes; the simdgroups are 2 x 2 (tokens, rows).
template <ushort kTokens, ushort kRows>
struct Place {
  ushort token, row;  // first token and row of the simdgroup in the tile

  Place(ushort simdgroup) : token(simdgroup / 2 * (kTokens / 2)), row(simdgroup % 2 * (kRows / 2)) {}
};

// sum += x w^T over all columns of the stage.
template <typename W, ushort kTokens, ushort kRows, ushort kParts>
static inline void multiply(thread Stage<W, kTokens, kRows, kStagedRow, kParts>& stage,
                            thread simdgroup_float8x8 (&sum)[kTokens / 16][kRows / 16],
                            threadgroup half* staged, thread const Place<kTokens, kRows>& place,
                            bool active) {
  constexpr ushort kTokenBlocks = kTokens / 16, kRowBlocks = kRows / 16;  // 8x8 blocks of a simdgroup
  stage.begin(staged);
  for (uint k = 0; k < stage.in_dim; k += stage.kStep) {
    const bool more = stage.load_after(k);
    if (active) {
      threadgroup const half* x = stage.tokens_staged() + place.token * kStagedRow;
      threadgroup const half* w = stage.weights_staged() + place.row * kStagedRow;
      FOR_UNROLL (ushort kk = 0; kk < MATMUL_K; kk += 8) {
        simdgroup_half8x8 a[kTokenBlocks], b[kRowBlocks];
        FOR_UNROLL (ushort i = 0; i < kTokenBlocks; ++i)
          simdgroup_load(a[i], x + i * 8 * kStagedRow + kk, kStagedRow);
        FOR_UNROLL (ushort j = 0; j < kRowBlocks; ++j)
          simdgroup_load(b[j], w + j * 8 * kStagedRow + kk, kStagedRow, ulong2(0), true);
        FOR_UNROLL (ushort i = 0; i < kTokenBlocks; ++i)
          FOR_UNROLL (ushort j = 0; j < kRowBlocks; ++j)
            simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
      }
    }
    if (more) stage.store_next();
  }
}

template <ushort kTokenBlocks, ushort kRowBlocks>
static inline void clear(thread simdgroup_float8x8 (&sum)[kTokenBlocks][kRowBlocks]) {
  FOR_UNROLL (ushort i = 0; i < kTokenBlocks; ++i)
    FOR_UNROLL (ushort j = 0; j < kRowBlocks; ++j)
      sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// Stores up to `tokens` by `rows` outputs of a simdgroup, from strips of 8 tokens by kColumns sums.
struct Products {
  device float* y;
  uint stride, tokens, rows;
  bool accumulate;
  device const float* bias;  // [rows]; null if there is none

  template <ushort kColumns>
  void store(threadgroup const float* strip, ushort first, ushort lane) const {
    for (ushort e = lane; e < 8 * kColumns; e += 32) {
      const ushort t = first + e / kColumns, r = e % kColumns;
      if (t >= tokens || r >= rows) continue;
      device float& out = y[t * stride + r];
      const float sum = bias ? strip[e] + bias[r] : strip[e];
      out = accumulate ? out + sum : sum;
    }
  }
};

// Stores activation(gate) * up, from alternating blocks of 8 sums of each.
struct GatedProducts {
  device half* y;
  uint stride, tokens, rows, activation;
  device const float* bias;  // of gates, [rows]; null if there is none
  uint up_bias;              // offset from the bias of a gate to that of its up

  template <ushort kColumns>
  void store(threadgroup const float* strip, ushort first, ushort lane) const {
    for (ushort e = lane; e < 4 * kColumns; e += 32) {
      const ushort t = e / (kColumns / 2), r = e % (kColumns / 2);
      if (first + t >= tokens || r >= rows) continue;
      threadgroup const float* sums = strip + t * kColumns + r / 8 * 16 + r % 8;
      const float2 biases = bias ? float2(bias[r], bias[up_bias + r]) : float2(0.0f);
      y[(first + t) * stride + r] =
          finite<half>(activate_gated(sums[0] + biases[0], sums[8] + biases[1], activation));
    }
  }
};

// Stores activation(up), for models without gates.
struct ActivatedProducts {
  GatedProducts of;

  template <ushort kColumns>
  void store(threadgroup const float* strip, ushort first, ushort lane) const {
    for (ushort e = lane; e < 8 * kColumns; e += 32) {
      const ushort t = first + e / kColumns, r = e % kColumns;
      if (t >= of.tokens || r >= of.rows) continue;
      const float sum = of.bias ? strip[e] + of.bias[r] : strip[e];
      of.y[t * of.stride + r] = finite<half>(activate(sum, of.activation));
    }
  }
};

// Stores the sums through threadgroup memory; each simdgroup uses 8 * kRowBlocks * 8 floats.
template <ushort kTokenBlocks, ushort kRowBlocks, typename Output>
static inline void store(thread simdgroup_float8x8 (&sum)[kTokenBlocks][kRowBlocks], Output output,
                         threadgroup float* strip, ushort simdgroup, ushort lane) {
  constexpr ushort kColumns = kRowBlocks * 8;
  strip += simdgroup * 8 * kColumns;
  FOR_UNROLL (ushort i = 0; i < kTokenBlocks; ++i) {
    FOR_UNROLL (ushort j = 0; j < kRowBlocks; ++j) simdgroup_store(sum[i][j], strip + j * 8, kColumns);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    output.template store<kColumns>(strip, i * 8, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
