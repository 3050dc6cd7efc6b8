// Contribution of relative positions to the scores of attention (arXiv:2006.03654): the product of a query
// with the position's key, plus the product of the position's query with a key. Scores are base-2 logarithms.
#include <metal_stdlib>

#include "args.h"
#include "pages.h"
#include "variants.h"

using namespace metal;

// Grid: (keys, tiles, heads) in threads.
template <typename T>
kernel void relative_scores(device const float* key_rows [[buffer(0)]],    // [rows][n_heads * key_dim]
                            device const float* query_rows [[buffer(1)]],  // likewise
                            device const float* row_of [[buffer(2)]],  // by distance of a query from a key
                            device const float* q [[buffer(3)]],       // [tokens][q_stride]
                            device const AttentionTile* tiles [[buffer(4)]],
                            device const uint* pages [[buffer(5)]],  // block tables
                            device const T* k [[buffer(6)]],  // pages of [PAGE_POSITIONS][n_heads][key_dim]
                            device float* out [[buffer(7)]],  // [tokens][n_heads][keys]
                            constant RelativeScoresArgs& args [[buffer(8)]],
                            uint3 place [[thread_position_in_grid]]) {
  const uint key = place.x, head = place.z;
  const AttentionTile tile = tiles[place.y];
  if (key >= tile.end) return;
  const uint width = args.n_heads * args.key_dim, column = head * args.key_dim;
  device const vec<T, 4>* own_key =
      (device const vec<T, 4>*)(page_at(k, pages + tile.pages, key, args.page_stride) +
                                key % PAGE_POSITIONS * width + column);
  const uint end = min(tile.first + args.tile_rows, tile.tokens);
  for (uint token = tile.first; token < end; ++token) {
    const uint distance = args.context + tile.position + token - key, row = uint(row_of[distance]);
    device const float4* own_query = (device const float4*)(q + (tile.row + token) * args.q_stride + column);
    device const float4* key_row = (device const float4*)(key_rows + row * width + column);
    device const float4* query_row = (device const float4*)(query_rows + row * width + column);
    float sum = 0.0f;
    for (uint d = 0; d < args.key_dim / 4; ++d)
      sum += dot(own_query[d], key_row[d]) + dot(float4(own_key[d]), query_row[d]);
    out[((tile.row + token) * args.n_heads + head) * args.keys + key] = args.scale * M_LOG2E_F * sum;
  }
}

INSTANTIATE_FOR_FLOATS(relative_scores)
