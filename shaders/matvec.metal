// Products of weights with one token or a few, in float32.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"
#include "variants.h"

using namespace metal;

// Sum over the `lanes` adjacent lanes (a power of two) that share a row.
static inline float row_sum(float sum, ushort lanes) {
  for (ushort offset = lanes / 2; offset > 0; offset /= 2) sum += simd_shuffle_xor(sum, offset);
  return sum;
}

// A lane's share of the products of kRows rows of weights with kTokens tokens. `lanes` lanes share a row and
// take every lanes-th item of it. A sum has the same terms in the same order for any kRows and kTokens, so
// that a token gets the same bits alone and together with others.
template <typename W, ushort kRows, ushort kTokens>
struct Products {
  // Items that are loaded before the first is needed, as many as there are registers for.
  static constant constexpr ushort kRounds = kTokens <= 2 ? kAhead : kTokens <= 4 ? 2 : 1;
  device const uchar* row[kRows];
  device const float* token[kTokens];
  float4 sum[kRows][kTokens];

  void multiply(uint in_dim, ushort lane, ushort lanes) {
    const uint items = in_dim / 8;
#pragma unroll
    for (ushort w = 0; w < kRows; ++w)
#pragma unroll
      for (ushort t = 0; t < kTokens; ++t) sum[w][t] = 0.0f;
    // No load depends on a branch: rounds beyond the end read the last item again and do not add it.
    for (uint first = lane % lanes; first < items; first += lanes * kRounds) {
      float4 a[kRounds][kRows], b[kRounds][kRows], x_a[kRounds][kTokens], x_b[kRounds][kTokens];
#pragma unroll
      for (ushort r = 0; r < kRounds; ++r) {
        const uint i = min(first + r * lanes, items - 1);
#pragma unroll
        for (ushort w = 0; w < kRows; ++w) W::load(row[w], i, a[r][w], b[r][w]);
#pragma unroll
        for (ushort t = 0; t < kTokens; ++t) {
          device const float4* values = (device const float4*)(token[t] + W::first(i));
          x_a[r][t] = values[0];
          x_b[r][t] = values[W::kSecond / 4];
        }
      }
#pragma unroll
      for (ushort r = 0; r < kRounds; ++r) {
        const bool inside = first + r * lanes < items;
#pragma unroll
        for (ushort w = 0; w < kRows; ++w) {
#pragma unroll
          for (ushort t = 0; t < kTokens; ++t) {
            const float4 with = fma(b[r][w], x_b[r][t], fma(a[r][w], x_a[r][t], sum[w][t]));
            sum[w][t] = inside ? with : sum[w][t];
          }
        }
      }
    }
  }

  // In every lane of the row.
  float total(ushort w, ushort t, ushort lanes) const {
    return row_sum(sum[w][t].x + sum[w][t].y + sum[w][t].z + sum[w][t].w, lanes);
  }
};

// y[row] (+)= w[row] . x. A simdgroup takes 32 / lanes_per_row rows.
template <typename W>
kernel void matvec(device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                   device const float* x [[buffer(1)]],  // [in_dim]
                   device float* y [[buffer(2)]],        // [out_dim]
                   constant MatvecArgs& args [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
                   ushort lane [[thread_index_in_simdgroup]],
                   ushort simdgroup [[simdgroup_index_in_threadgroup]],
                   ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const ushort lanes = args.lanes_per_row;
  const uint row = (group * simdgroups + simdgroup) * (32 / lanes) + lane / lanes;
  const bool writes = lane % lanes == 0 && row < args.out_dim;
  const float before = writes && args.accumulate ? y[row] : 0.0f;  // in flight during the sum
  Products<W, 1, 1> products;
  // Lanes beyond the last row repeat it: every lane must take part in the sums.
  products.row[0] = stacked_row(w, args.weights, min(row, args.out_dim - 1));
  products.token[0] = x;
  products.multiply(args.in_dim, lane, lanes);
  const float total = products.total(0, 0, lanes);
  if (writes) y[row] = args.accumulate ? before + total : total;
}

// y[row] = activation(gate[row] . x) * (up[row] . x); the stacked matrices are gate and up.
template <typename W>
kernel void matvec_swiglu(device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
                          device const float* x [[buffer(1)]],  // [in_dim]
                          device float* y [[buffer(2)]],        // [out_dim]
                          constant MatvecArgs& args [[buffer(3)]],
                          uint group [[threadgroup_position_in_grid]],
                          ushort lane [[thread_index_in_simdgroup]],
                          ushort simdgroup [[simdgroup_index_in_threadgroup]],
                          ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const ushort lanes = args.lanes_per_row;
  const uint row = (group * simdgroups + simdgroup) * (32 / lanes) + lane / lanes;
  Products<W, 2, 1> products;
  products.row[0] = half_row(w, args.weights, 0, min(row, args.out_dim - 1));
  products.row[1] = half_row(w, args.weights, 1, min(row, args.out_dim - 1));
  products.token[0] = x;
  products.multiply(args.in_dim, lane, lanes);
  const float gate = products.total(0, 0, lanes), up = products.total(1, 0, lanes);
  if (lane % lanes == 0 && row < args.out_dim) y[row] = activate(gate, args.activation) * up;
}

// A tile of up to kTokens tokens, of which there are `tokens`; those beyond repeat the last. Each lane group
// has two rows, so that what is read of x serves both. One lane of a group writes for each token.
template <typename W, bool kAccumulate, ushort kTokens>
static inline void rows_times_tokens(device const uchar* w, device const float* x, device float* y,
                                     constant MatvecArgs& args, uint first_row, uint tokens, ushort lane) {
  const ushort lanes = args.lanes_per_row;
  const uint last = args.out_dim - 1;
  const uint row[2] = {first_row + lane / lanes, first_row + 32 / lanes + lane / lanes};
  Products<W, 2, kTokens> products;
#pragma unroll
  for (ushort r = 0; r < 2; ++r) products.row[r] = stacked_row(w, args.weights, min(row[r], last));
#pragma unroll
  for (ushort t = 0; t < kTokens; ++t) products.token[t] = x + min(uint(t), tokens - 1) * args.in_dim;
  products.multiply(args.in_dim, lane, lanes);
#pragma unroll
  for (ushort t = 0; t < kTokens; ++t) {
#pragma unroll
    for (ushort r = 0; r < 2; ++r) {
      const float total = products.total(r, t, lanes);
      if (lane % lanes != t || t >= tokens || row[r] > last) continue;
      device float& out = y[t * args.out_stride + row[r]];
      out = kAccumulate ? out + total : total;
    }
  }
}

template <typename W, ushort kTokens>
static inline void swiglu_of_tokens(device const uchar* w, device const float* x, device float* y,
                                    constant MatvecArgs& args, uint first_row, uint tokens, ushort lane) {
  const ushort lanes = args.lanes_per_row;
  const uint row = first_row + lane / lanes, last = args.out_dim - 1;
  Products<W, 2, kTokens> products;
  products.row[0] = half_row(w, args.weights, 0, min(row, last));
  products.row[1] = half_row(w, args.weights, 1, min(row, last));
#pragma unroll
  for (ushort t = 0; t < kTokens; ++t) products.token[t] = x + min(uint(t), tokens - 1) * args.in_dim;
  products.multiply(args.in_dim, lane, lanes);
#pragma unroll
  for (ushort t = 0; t < kTokens; ++t) {
    const float gate = products.total(0, t, lanes), up = products.total(1, t, lanes);
    if (lane % lanes == t && t < tokens && row <= last)
      y[t * args.out_stride + row] = activate(gate, args.activation) * up;
  }
}

// matvec of several tokens: y[t][row] (+)= w[row] . x[t]. A simdgroup takes 2 * 32 / lanes_per_row rows and a
// tile of tokens. Grid: (rows, tokens / MULTI_TOKEN_TILE), rounded up. The number of tokens is known to the
// compiler, so that no load depends on a branch, and those of all tokens are in flight together.
template <typename W, bool kAccumulate>
kernel void multi_token_matvec(device const uchar* w [[buffer(0)]],  // stacked matrices [out_dim][in_dim]
                               device const float* x [[buffer(1)]],  // [tokens][in_dim]
                               device float* y [[buffer(2)]],        // [tokens][out_stride]
                               constant MatvecArgs& args [[buffer(3)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               ushort lane [[thread_index_in_simdgroup]],
                               ushort simdgroup [[simdgroup_index_in_threadgroup]],
                               ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint first = group.y * MULTI_TOKEN_TILE, tokens = min(uint(MULTI_TOKEN_TILE), args.tokens - first);
  const uint row = (group.x * simdgroups + simdgroup) * (2 * 32 / args.lanes_per_row);
  x += first * args.in_dim;
  y += first * args.out_stride;
  if (tokens > 4)
    rows_times_tokens<W, kAccumulate, 8>(w, x, y, args, row, tokens, lane);
  else if (tokens > 2)
    rows_times_tokens<W, kAccumulate, 4>(w, x, y, args, row, tokens, lane);
  else
    rows_times_tokens<W, kAccumulate, 2>(w, x, y, args, row, tokens, lane);
}

// matvec_swiglu of several tokens. A simdgroup takes 32 / lanes_per_row rows of gate and of up.
template <typename W>
kernel void multi_token_matvec_swiglu(device const uchar* w [[buffer(0)]],  // [2][out_dim][in_dim]
                                      device const float* x [[buffer(1)]],  // [tokens][in_dim]
                                      device float* y [[buffer(2)]],        // [tokens][out_stride]
                                      constant MatvecArgs& args [[buffer(3)]],
                                      uint2 group [[threadgroup_position_in_grid]],
                                      ushort lane [[thread_index_in_simdgroup]],
                                      ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                      ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint first = group.y * MULTI_TOKEN_TILE, tokens = min(uint(MULTI_TOKEN_TILE), args.tokens - first);
  const uint row = (group.x * simdgroups + simdgroup) * (32 / args.lanes_per_row);
  x += first * args.in_dim;
  y += first * args.out_stride;
  if (tokens > 4)
    swiglu_of_tokens<W, 8>(w, x, y, args, row, tokens, lane);
  else if (tokens > 2)
    swiglu_of_tokens<W, 4>(w, x, y, args, row, tokens, lane);
  else
    swiglu_of_tokens<W, 2>(w, x, y, args, row, tokens, lane);
}

typedef decltype(matvec<F32>) matvec_t;
typedef decltype(multi_token_matvec<F32, false>) multi_token_t;
#define INSTANTIATE(name, W, number)                                                                         \
  IF_WANTED(name)(                                                                                           \
      template [[host_name("matvec_" #name)]] kernel matvec_t matvec<W>;                                     \
      template [[host_name("matvec_swiglu_" #name)]] kernel matvec_t matvec_swiglu<W>;                       \
      template [[host_name("multi_token_matvec_" #name)]] kernel multi_token_t multi_token_matvec<W, false>; \
      template [[host_name("multi_token_matvec_" #name                                                       \
                           "_accumulate")]] kernel multi_token_t multi_token_matvec<W, true>;                \
      template                                                                                               \
      [[host_name("multi_token_matvec_swiglu_" #name)]] kernel multi_token_t multi_token_matvec_swiglu<W>;)
EACH_TENSOR_TYPE(INSTANTIATE)
