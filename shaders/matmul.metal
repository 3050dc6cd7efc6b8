// Products of weights with many tokens on simdgroup_matrix: half operands, float32 sums.
//
// A threadgroup of four simdgroups computes a tile of kTokens x kRows results; each simdgroup has a quarter
// of it in registers, as 8x8 blocks. For each step of MATMUL_K columns, all threads dequantize the weights of
// the tile and copy the values of its tokens to threadgroup memory (matmul_tiles.h). A weight is thus
// dequantized once for all tokens of the tile. There are two stages: the loads of a step are in flight while
// the simdgroups multiply the previous step.
//
// For each step of 8 columns, a simdgroup with a wide tile multiplies 16 pairs of blocks and loads 8 blocks
// from threadgroup memory; with a narrow tile it multiplies 4 and loads 4, but there are more tiles to fill
// the GPU. matmul_split is for even fewer tiles.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "matmul_blocks.h"
#include "matmul_tiles.h"
#include "projection.h"
#include "variants.h"

using namespace metal;

// y[t][row] (+)= w[row] . x[t]. Threadgroup: MATMUL_THREADS. Grid: (rows / kRows, tokens / kTokens), rounded
// up.
template <typename W, ushort kTokens, ushort kRows>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul(
    device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device float* y [[buffer(2)]],        // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr ushort kTokenBlocks = kTokens / 16, kRowBlocks = kRows / 16;
  threadgroup half staged[2 * (kTokens + kRows) * kStagedRow];
  const Place<kTokens, kRows> place(simdgroup);
  const uint token = group.y * kTokens + place.token, row = group.x * kRows + place.row;

  Stage<W, kTokens, kRows, kStagedRow> stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index;
  stage.weights.begin(w, args, group.x * kRows, thread_index);
  stage.tokens.begin(x, args, group.y * kTokens, thread_index);

  const bool whole = token + kTokens / 2 <= args.tokens && row + kRows / 2 <= args.out_dim;
  y += token * args.out_stride + row;
  simdgroup_float8x8 sum[kTokenBlocks][kRowBlocks];
  FOR_UNROLL (ushort i = 0; i < kTokenBlocks; ++i)
    FOR_UNROLL (ushort j = 0; j < kRowBlocks; ++j) {
      sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      if (whole && args.accumulate)
        simdgroup_load(sum[i][j], y + i * 8 * args.out_stride + j * 8, args.out_stride);
    }

  const bool active = token < args.tokens && row < args.out_dim;
  multiply<W, kTokens, kRows>(stage, sum, staged, place, active);
  if (!active) return;
  if (whole) {
    FOR_UNROLL (ushort i = 0; i < kTokenBlocks; ++i)
      FOR_UNROLL (ushort j = 0; j < kRowBlocks; ++j)
        simdgroup_store(sum[i][j], y + i * 8 * args.out_stride + j * 8, args.out_stride);
    return;
  }
  // Stores strips of 8 tokens at an edge through threadgroup memory, and copies the part inside y.
  const Products out = {
      y, args.out_stride, args.tokens - token, args.out_dim - row, bool(args.accumulate), nullptr};
  store(sum, out, (threadgroup float*)stage.next, simdgroup, lane);
}

// matmul for fewer tiles than the GPU has cores: MATMUL_PARTS groups of four simdgroups each multiply a part
// of the columns of a tile, and their sums are added in threadgroup memory. Threadgroup: MATMUL_PARTS *
// MATMUL_THREADS. Grid: (rows / kTile, tokens / kTile), rounded up.
template <typename W>
[[max_total_threads_per_threadgroup(MATMUL_PARTS * MATMUL_THREADS)]] kernel void matmul_split(
    device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device float* y [[buffer(2)]],        // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr ushort kTile = MATMUL_NARROW_TILE, kBlocks = kTile / 16;
  typedef Stage<W, kTile, kTile, kStagedRow, MATMUL_PARTS> PartStage;
  threadgroup half staged[MATMUL_PARTS * PartStage::kHalves];  // a step of each part, then their sums
  static_assert(PartStage::kHalves * sizeof(half) >= kTile * kTile * sizeof(float), "sums do not fit");
  const Place<kTile, kTile> place(simdgroup % 4);
  const uint token = group.y * kTile, row = group.x * kTile;

  PartStage stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index % MATMUL_THREADS;
  stage.part = thread_index / MATMUL_THREADS;
  stage.weights.begin(w, args, row, stage.thread_index);
  stage.tokens.begin(x, args, token, stage.thread_index);
  simdgroup_float8x8 sum[kBlocks][kBlocks];
  clear(sum);

  const bool active = token + place.token < args.tokens && row + place.row < args.out_dim;
  multiply<W, kTile, kTile>(stage, sum, staged + stage.part * PartStage::kHalves, place, active);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* sums = (threadgroup float*)staged;  // [MATMUL_PARTS][kTile][kTile]
  threadgroup float* mine = sums + (stage.part * kTile + place.token) * kTile + place.row;
  FOR_UNROLL (ushort i = 0; i < kBlocks; ++i)
    FOR_UNROLL (ushort j = 0; j < kBlocks; ++j)
      simdgroup_store(sum[i][j], mine + i * 8 * kTile + j * 8, kTile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (ushort e = thread_index; e < kTile * kTile; e += MATMUL_PARTS * MATMUL_THREADS) {
    const uint t = token + e / kTile, r = row + e % kTile;
    if (t >= args.tokens || r >= args.out_dim) continue;
    float value = sums[e];
    FOR_UNROLL (ushort part = 1; part < MATMUL_PARTS; ++part) value += sums[part * kTile * kTile + e];
    device float& out = y[t * args.out_stride + r];
    out = args.accumulate ? out + value : value;
  }
}

// y[t][row] = activation(gate[row] . x[t]) * (up[row] . x[t]); the stacked matrices are gate and up. The tile
// holds kRows / 2 rows of each in alternating blocks of 8, so that a simdgroup has both sums of a result.
// Grid: (rows / (kRows / 2), tokens / kTokens), rounded up.
template <typename W, ushort kTokens, ushort kRows>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_swiglu(
    device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
    device const half* x [[buffer(1)]],   // [tokens][in_dim]
    device half* y [[buffer(2)]],         // [tokens][out_stride]
    constant MatmulArgs& args [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half staged[2 * (kTokens + kRows) * kStagedRow];
  const Place<kTokens, kRows> place(simdgroup);
  const uint token = group.y * kTokens + place.token, row = (group.x * kRows + place.row) / 2;

  Stage<W, kTokens, kRows, kStagedRow> stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index;
  stage.weights.begin_gated(w, args, group.x * (kRows / 2), thread_index);
  stage.tokens.begin(x, args, group.y * kTokens, thread_index);
  simdgroup_float8x8 sum[kTokens / 16][kRows / 16];
  clear(sum);

  const bool active = token < args.tokens && row < args.out_dim;
  multiply<W, kTokens, kRows>(stage, sum, staged, place, active);
  if (!active) return;
  const GatedProducts out = {y + token * args.out_stride + row,
                             args.out_stride,
                             args.tokens - token,
                             args.out_dim - row,
                             args.activation,
                             nullptr,
                             0};
  store(sum, out, (threadgroup float*)stage.next, simdgroup, lane);
}

#define INSTANTIATE_SIZE(name, W, size, tile)                \
  INSTANCE("matmul_" #name "_" #size, matmul<W, tile, tile>) \
  INSTANCE("matmul_swiglu_" #name "_" #size, matmul_swiglu<W, tile, tile>)
#define INSTANCES(name, W)                              \
  INSTANTIATE_SIZE(name, W, narrow, MATMUL_NARROW_TILE) \
  INSTANTIATE_SIZE(name, W, wide, MATMUL_WIDE_TILE)     \
  INSTANCE("matmul_" #name "_split", matmul_split<W>)
#define INSTANTIATE(name, W, number) IF_WANTED(name)(INSTANCES(name, W))
EACH_TENSOR_TYPE(INSTANTIATE)
