// Embedding lookup: one row of the table for each token, dequantized.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"

using namespace metal;

// Grid: (items of a row, tokens) in threads.
template <typename W>
kernel void embed(device const uchar* table [[buffer(0)]],  // [vocab_size][dim]
                  device const int* ids [[buffer(1)]],      // [tokens]
                  device float* x [[buffer(2)]],            // [tokens][dim]
                  constant EmbedArgs& args [[buffer(3)]], uint2 position [[thread_position_in_grid]]) {
  const uint item = position.x, token = position.y;
  if (item * 8 >= args.dim || token >= args.tokens) return;
  float4 a, b;
  W::load(table + ulong(ids[token]) * args.row_bytes, item, a, b);
  device float4* out = (device float4*)(x + token * args.dim + W::first(item));
  out[0] = args.scale * a;
  out[W::kSecond / 4] = args.scale * b;
}

typedef decltype(embed<F32>) embed_t;
#define INSTANTIATE(name, W, number) template [[host_name("embed_" #name)]] kernel embed_t embed<W>;
EACH_TENSOR_TYPE(INSTANTIATE)
