// Products of weights with one token or a few, in float32: matvec and multi_token_matvec, and their variants
// with SwiGLU after the products or RMSNorm before them.
//
// 8, 16 or 32 adjacent lanes (args.lanes_per_row) share a row of weights: each dequantizes items in turn,
// multiplies them by the token's values, and keeps its part of the sum in a register. Shuffles add the parts.
// Threadgroup memory and barriers are not needed, so simdgroups never wait for each other.
//
// These kernels are bound by reads of the weights, which need many loads in flight. A lane therefore loads
// several items before it multiplies the first, and no load depends on a branch. With several tokens, an item
// is dequantized once per tile of tokens.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "matvec_products.h"
#include "norm.h"
#include "projection.h"
#include "token_tiles.h"
#include "variants.h"

using namespace metal;

// y[row] (+)= w[row] . x, for kRows rows per group of lanes, which reads x once. One lane of the group writes
// each row.
template <typename W, ushort kRows, typename Token>
static inline void rows_times_token(device const uchar* w, Token token, device float* y,
                                    constant MatvecArgs& args, uint first_row, ushort lane) {
  const ushort lanes = args.lanes_per_row;
  Products<W, kRows, 1, Token> products;
  uint row[kRows];
  bool writes[kRows];
  float before[kRows];  // loads in flight during the sum
  FOR_UNROLL (ushort r = 0; r < kRows; ++r) {
    row[r] = first_row + r * (32 / lanes) + lane / lanes;
    writes[r] = lane % lanes == r && row[r] < args.out_dim;
    before[r] = writes[r] && args.accumulate ? y[row[r]] : 0.0f;
    // Lanes beyond the last row repeat it, as every lane must take part in the sums.
    products.row[r] = stacked_row(w, args.weights, min(row[r], args.out_dim - 1));
  }
  products.token[0] = token;
  products.multiply(args.in_dim, lane, lanes);
  FOR_UNROLL (ushort r = 0; r < kRows; ++r) {
    const float total = products.total(r, 0, lanes);
    if (writes[r]) y[row[r]] = args.accumulate ? before[r] + total : total;
  }
}

// y[row] (+)= w[row] . x. A simdgroup computes kRows * 32 / lanes_per_row rows.
template <typename W, ushort kRows>
kernel void matvec(device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                   device const float* x [[buffer(1)]],  // [in_dim]
                   device float* y [[buffer(2)]],        // [out_dim]
                   constant MatvecArgs& args [[buffer(3)]], SIMDGROUP_ARGUMENTS(uint)) {
  const uint row = (group * simdgroups + simdgroup) * (kRows * 32 / args.lanes_per_row);
  rows_times_token<W, kRows>(w, StoredToken{x}, y, args, row, lane);
}

// Returns the normalized token. Each simdgroup computes the factor, bit-identical to that of rmsnorm.
static inline NormedToken normed_token(device const float* x, device const float* norm,
                                       constant MatvecArgs& args, ushort lane) {
  device const float4* row = (device const float4*)x;
  return {x, norm, norm_scale_of(row, args.in_dim, args.eps, args.norm_threads, lane)};
}

// y[row] = w[row] . rmsnorm(x). A simdgroup computes NORMED_MATVEC_ROWS * 32 / lanes_per_row rows.
template <typename W>
kernel void rmsnorm_matvec(device const uchar* w [[buffer(0)]],     // stacked matrices [out_dim][in_dim]
                           device const float* norm [[buffer(1)]],  // [in_dim]
                           device const float* x [[buffer(2)]],     // [in_dim]
                           device float* y [[buffer(3)]],           // [out_dim]
                           constant MatvecArgs& args [[buffer(4)]], SIMDGROUP_ARGUMENTS(uint)) {
  const uint row = (group * simdgroups + simdgroup) * (NORMED_MATVEC_ROWS * 32 / args.lanes_per_row);
  rows_times_token<W, NORMED_MATVEC_ROWS>(w, normed_token(x, norm, args, lane), y, args, row, lane);
}

// y[row] = activation(gate[row] . x) * (up[row] . x) for kRows rows per group of lanes; the stacked matrices
// are gate and up.
template <typename W, ushort kRows, typename Token>
static inline void swiglu_of_token(device const uchar* w, Token token, device float* y,
                                   constant MatvecArgs& args, uint first_row, ushort lane) {
  const ushort lanes = args.lanes_per_row;
  const uint row = first_row + lane / lanes, last = args.out_dim - 1;
  Products<W, 2 * kRows, 1, Token> products;
  FOR_UNROLL (ushort r = 0; r < kRows; ++r)
    FOR_UNROLL (ushort which = 0; which < 2; ++which)
      products.row[2 * r + which] = half_row(w, args.weights, which, min(row + r * (32 / lanes), last));
  products.token[0] = token;
  products.multiply(args.in_dim, lane, lanes);
  FOR_UNROLL (ushort r = 0; r < kRows; ++r) {
    const float gate = products.total(2 * r, 0, lanes), up = products.total(2 * r + 1, 0, lanes);
    const uint out = row + r * (32 / lanes);
    if (lane % lanes == r && out <= last) y[out] = activate_gated(gate, up, args.activation);
  }
}

template <typename W>
kernel void matvec_swiglu(device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
                          device const float* x [[buffer(1)]],  // [in_dim]
                          device float* y [[buffer(2)]],        // [out_dim]
                          constant MatvecArgs& args [[buffer(3)]], SIMDGROUP_ARGUMENTS(uint)) {
  const uint row = (group * simdgroups + simdgroup) * (32 / args.lanes_per_row);
  swiglu_of_token<W, 1>(w, StoredToken{x}, y, args, row, lane);
}

// matvec_swiglu of rmsnorm(x). A simdgroup computes NORMED_MATVEC_ROWS * 32 / lanes_per_row rows.
template <typename W>
kernel void rmsnorm_matvec_swiglu(device const uchar* w [[buffer(0)]],     // [2][out_dim][in_dim]
                                  device const float* norm [[buffer(1)]],  // [in_dim]
                                  device const float* x [[buffer(2)]],     // [in_dim]
                                  device float* y [[buffer(3)]],           // [out_dim]
                                  constant MatvecArgs& args [[buffer(4)]], SIMDGROUP_ARGUMENTS(uint)) {
  const uint row = (group * simdgroups + simdgroup) * (NORMED_MATVEC_ROWS * 32 / args.lanes_per_row);
  swiglu_of_token<W, NORMED_MATVEC_ROWS>(w, normed_token(x, norm, args, lane), y, args, row, lane);
}

// y[t][row] (+)= w[row] . x[t], for the first `tokens` of a tile of kTokens tokens; the others repeat the
// last one. With kGated the results are activation(gate[row] . x[t]) * (up[row] . x[t]), and the stacked
// matrices are gate and up. A group of lanes has kRows rows of weights, and reads x once. One lane of the
// group writes each token, all at the same time.
template <typename W, bool kGated, bool kAccumulate, ushort kRows, ushort kTokens>
static inline void rows_times_tokens(device const uchar* w, device const float* x, device float* y,
                                     constant MatvecArgs& args, uint first_row, uint tokens, ushort lane) {
  constexpr ushort kMatrices = kGated ? 2 : 1, kResults = kRows / kMatrices;
  const ushort lanes = args.lanes_per_row, token = lane % lanes;  // token: written by this lane
  const uint last = args.out_dim - 1;
  Products<W, kRows, kTokens> products;
  uint row[kResults];
  bool writes[kResults];
  float before[kResults], totals[kRows];  // `before`: loads in flight during the products
  y += token * args.out_stride;
  FOR_UNROLL (ushort r = 0; r < kResults; ++r) {
    row[r] = first_row + r * (32 / lanes) + lane / lanes;
    FOR_UNROLL (ushort which = 0; which < kMatrices; ++which)
      products.row[kMatrices * r + which] = kGated ? half_row(w, args.weights, which, min(row[r], last))
                                                   : stacked_row(w, args.weights, min(row[r], last));
    writes[r] = token < tokens && row[r] <= last;
    before[r] = kAccumulate && writes[r] ? y[row[r]] : 0.0f;
  }
  FOR_UNROLL (ushort t = 0; t < kTokens; ++t)
    products.token[t] = {x + min(uint(t), tokens - 1) * args.in_dim};
  products.multiply(args.in_dim, lane, lanes);
  products.totals_of_own_token(totals, lane, lanes);
  FOR_UNROLL (ushort r = 0; r < kResults; ++r) {
    if (!writes[r]) continue;
    const float first = totals[kMatrices * r], second = totals[kMatrices * r + kMatrices - 1];
    const float result = kGated ? activate_gated(first, second, args.activation) : first;
    y[row[r]] = kAccumulate ? before[r] + result : result;
  }
}

// matvec, or with kGated matvec_swiglu, for several tokens. Grid: (tiles of tokens, rows), rounded up, so
// that consecutive threadgroups read the same weights. The number of tokens per tile is a constant, so that
// no load depends on a branch and the loads of all tokens are in flight together.
template <typename W, bool kGated, bool kAccumulate>
kernel void multi_token_matvec(device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                               device const float* x [[buffer(1)]],  // [tokens][in_dim]
                               device float* y [[buffer(2)]],        // [tokens][out_stride]
                               constant MatvecArgs& args [[buffer(3)]], SIMDGROUP_ARGUMENTS(uint2)) {
  const bool many = args.tokens > MULTI_TOKEN_TILE;
  const uint tile = many ? MANY_TOKEN_TILE : MULTI_TOKEN_TILE, rows = many ? MANY_TOKEN_ROWS : FEW_TOKEN_ROWS;
  const uint first = group.x * tile, tokens = min(tile, args.tokens - first);
  const uint row = (group.y * simdgroups + simdgroup) * (rows / (kGated ? 2 : 1) * 32 / args.lanes_per_row);
  x += first * args.in_dim;
  y += first * args.out_stride;
  if (many)
    rows_times_tokens<W, kGated, kAccumulate, MANY_TOKEN_ROWS, MANY_TOKEN_TILE>(w, x, y, args, row, tokens,
                                                                                lane);
  else if (tokens > 4)
    rows_times_tokens<W, kGated, kAccumulate, FEW_TOKEN_ROWS, 8>(w, x, y, args, row, tokens, lane);
  else if (tokens > 2)
    rows_times_tokens<W, kGated, kAccumulate, FEW_TOKEN_ROWS, 4>(w, x, y, args, row, tokens, lane);
  else
    rows_times_tokens<W, kGated, kAccumulate, FEW_TOKEN_ROWS, 2>(w, x, y, args, row, tokens, lane);
}

#define INSTANCES(name, W)                                                                \
  INSTANCE("matvec_" #name, matvec<W, 1>)                                                 \
  INSTANCE("matvec_" #name "_rows2", matvec<W, 2>)                                        \
  INSTANCE("matvec_" #name "_rows4", matvec<W, 4>)                                        \
  INSTANCE("matvec_swiglu_" #name, matvec_swiglu<W>)                                      \
  INSTANCE("rmsnorm_matvec_" #name, rmsnorm_matvec<W>)                                    \
  INSTANCE("rmsnorm_matvec_swiglu_" #name, rmsnorm_matvec_swiglu<W>)                      \
  INSTANCE("multi_token_matvec_" #name, multi_token_matvec<W, false, false>)              \
  INSTANCE("multi_token_matvec_" #name "_accumulate", multi_token_matvec<W, false, true>) \
  INSTANCE("multi_token_matvec_swiglu_" #name, multi_token_matvec<W, true, false>)
#define INSTANTIATE(name, W, number) IF_WANTED(name)(INSTANCES(name, W))
EACH_TENSOR_TYPE(INSTANTIATE)
