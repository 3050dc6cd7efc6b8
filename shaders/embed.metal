// Embedding lookup: one row of the table per token, dequantized, and stored or added.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "variants.h"

using namespace metal;

// Grid: (items of a row, tokens) in threads.
template <typename W>
kernel void embed(device const uchar* table [[buffer(0)]],  // [vocab_size][dim]
                  device const uint* ids [[buffer(1)]],     // [tokens][id_stride]
                  device float* x [[buffer(2)]],            // [tokens][dim]
                  constant EmbedArgs& args [[buffer(3)]], uint2 position [[thread_position_in_grid]]) {
  const uint item = position.x, token = position.y;
  if (item * 8 >= args.dim || token >= args.tokens) return;
  float4 a, b;
  // If all logits are NaN, argmax returns an index beyond the table.
  const uint id = min(ids[token * args.id_stride], args.vocab_size - 1);
  W::load(table + ulong(id) * args.row_bytes, item, a, b);
  device float4* out = (device float4*)(x + token * args.dim + W::first(item));
  const float4 first = args.accumulate ? out[0] : float4(0.0f);
  const float4 second = args.accumulate ? out[W::kSecond / 4] : float4(0.0f);
  out[0] = first + args.scale * a;
  out[W::kSecond / 4] = second + args.scale * b;
}

#define INSTANTIATE(name, W, number) IF_WANTED(name)(INSTANCE("embed_" #name, embed<W>))
EACH_TENSOR_TYPE(INSTANTIATE)
