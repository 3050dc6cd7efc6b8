// Products of experts with many rows on simdgroup_matrix. A threadgroup computes a tile as in matmul.metal,
// with rows of one expert.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "matmul_blocks.h"
#include "matmul_tiles.h"
#include "projection.h"
#include "variants.h"

using namespace metal;

constant constexpr ushort kTile = MATMUL_NARROW_TILE, kBlocks = kTile / 16;
typedef TokenTile<kTile, kStagedRow> ExpertTokens;

// Sets the rows of x at the places of a tile, or the rows that `rows` maps these places to.
static inline void begin_tokens(thread ExpertTokens& tokens, device const half* x, device const uint* rows,
                                ExpertTile tile, uint in_dim, ushort thread_index) {
  FOR_UNROLL (ushort i = 0; i < ExpertTokens::kItems; ++i) {
    const uint place = tile.first + min(uint(thread_index / 4 + i * (MATMUL_THREADS / 4)), tile.count - 1);
    tokens.row[i] = x + (rows ? rows[place] : place) * in_dim;
  }
}

// y[place][row] = w[expert][row] . x[place] + bias[expert][row]. Threadgroup: MATMUL_THREADS. Grid: (rows /
// kTile, tiles), rounded up.
template <typename W>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_experts(
    device const uchar* w [[buffer(0)]],           // [experts][out_dim][in_dim]
    device const float* bias [[buffer(1)]],        // [experts][out_dim]
    device const half* x [[buffer(2)]],            // [places][in_dim]
    device const ExpertTile* tiles [[buffer(3)]],  // [tiles]
    device float* y [[buffer(4)]],                 // [places][out_dim]
    constant ExpertsArgs& args [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half staged[2 * 2 * kTile * kStagedRow];
  const ExpertTile tile = tiles[group.y];
  if (tile.count == 0) return;
  const Place<kTile, kTile> place(simdgroup);
  const uint row = group.x * kTile + place.row;

  Stage<W, kTile, kTile, kStagedRow> stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index;
  stage.weights.begin(w, args, group.x * kTile, thread_index, tile.expert * args.out_dim);
  begin_tokens(stage.tokens, x, nullptr, tile, args.in_dim, thread_index);
  simdgroup_float8x8 sum[kBlocks][kBlocks];
  clear(sum);

  const bool active = place.token < tile.count && row < args.out_dim;
  multiply<W, kTile, kTile>(stage, sum, staged, place, active);
  if (!active) return;
  const Products out = {y + (tile.first + place.token) * args.out_dim + row,
                        args.out_dim,
                        tile.count - place.token,
                        args.out_dim - row,
                        false,
                        args.has_bias ? bias + tile.expert * args.out_dim + row : nullptr};
  store(sum, out, (threadgroup float*)stage.next, simdgroup, lane);
}

// y[place][row] = activation(gate[expert][row] . x) * (up[expert][row] . x), with x[rows[place]], and biases
// added to both products; without gates activation(up[expert][row] . x). Grid: (rows / (kTile / 2), tiles),
// or (rows / kTile, tiles) without gates, rounded up.
template <typename W>
[[max_total_threads_per_threadgroup(MATMUL_THREADS)]] kernel void matmul_experts_swiglu(
    device const uchar* w [[buffer(0)]],           // [2][experts][out_dim][in_dim]
    device const float* bias [[buffer(1)]],        // [2][experts][out_dim]
    device const half* x [[buffer(2)]],            // [tokens][in_dim]
    device const uint* rows [[buffer(3)]],         // [places]
    device const ExpertTile* tiles [[buffer(4)]],  // [tiles]
    device half* y [[buffer(5)]],                  // [places][out_dim]
    constant ExpertsArgs& args [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half staged[2 * 2 * kTile * kStagedRow];
  const ExpertTile tile = tiles[group.y];
  if (tile.count == 0) return;
  const Place<kTile, kTile> place(simdgroup);
  const bool gated = has_gates(args.weights);
  const uint first_row = group.x * kTile / (gated ? 2 : 1), row = first_row + place.row / (gated ? 2 : 1);

  Stage<W, kTile, kTile, kStagedRow> stage;
  stage.in_dim = args.in_dim;
  stage.thread_index = thread_index;
  if (gated)
    stage.weights.begin_gated(w, args, first_row, thread_index, tile.expert * args.out_dim);
  else
    stage.weights.begin(w, args, first_row, thread_index, tile.expert * args.out_dim);
  begin_tokens(stage.tokens, x, rows, tile, args.in_dim, thread_index);
  simdgroup_float8x8 sum[kBlocks][kBlocks];
  clear(sum);

  const bool active = place.token < tile.count && row < args.out_dim;
  multiply<W, kTile, kTile>(stage, sum, staged, place, active);
  if (!active) return;
  const GatedProducts out = {y + (tile.first + place.token) * args.out_dim + row,
                             args.out_dim,
                             tile.count - place.token,
                             args.out_dim - row,
                             args.activation,
                             args.has_bias ? bias + tile.expert * args.out_dim + row : nullptr,
                             args.weights.rows[0]};
  if (gated)
    store(sum, out, (threadgroup float*)stage.next, simdgroup, lane);
  else
    store(sum, ActivatedProducts{out}, (threadgroup float*)stage.next, simdgroup, lane);
}

#define INSTANCES(name, W)                             \
  INSTANCE("matmul_experts_" #name, matmul_experts<W>) \
  INSTANCE("matmul_experts_swiglu_" #name, matmul_experts_swiglu<W>)
#define INSTANTIATE(name, W, number) IF_WANTED(name)(INSTANCES(name, W))
EACH_TENSOR_TYPE(INSTANTIATE)
