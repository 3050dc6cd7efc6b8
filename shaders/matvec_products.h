// Products of weight rows with tokens in float32, shared by adjacent lanes.
#pragma once

#include <metal_stdlib>

#include "dequant.h"
#include "projection.h"

using namespace metal;

// Sum over the `lanes` adjacent lanes (a power of two) that share a row.
static inline float row_sum(float sum, ushort lanes) {
  for (ushort offset = lanes / 2; offset > 0; offset /= 2) sum += simd_shuffle_xor(sum, offset);
  return sum;
}

// The values of a token, read from device memory four at a time.
struct StoredToken {
  device const float* x;
  float4 values(uint column) const { return *(device const float4*)(x + column); }
};

// The values of a token, normalized when read: x * scale * weight.
struct NormedToken {
  device const float* x;
  device const float* weight;
  float scale;
  float4 values(uint column) const {
    return *(device const float4*)(x + column) * scale * *(device const float4*)(weight + column);
  }
};

// A lane's part of the products of kRows rows of weights with kTokens tokens. `lanes` lanes share a row, and
// each takes every lanes-th item of it. A sum has the same terms in the same order for any kRows and kTokens,
// so that the results of a token do not depend on the others.
template <typename W, ushort kRows, ushort kTokens, typename Token = StoredToken>
struct Products {
  // Items of a row that are loaded before the first is multiplied: as many as fit the registers.
  static constant constexpr ushort kRounds = kRows > 2 || kTokens > 4 ? 1 : kTokens > 2 ? 2 : kAhead;
  device const uchar* row[kRows];
  Token token[kTokens];
  float4 sum[kRows][kTokens];

  void multiply(uint in_dim, ushort lane, ushort lanes) {
    const uint items = in_dim / 8;
    FOR_UNROLL (ushort w = 0; w < kRows; ++w)
      FOR_UNROLL (ushort t = 0; t < kTokens; ++t) sum[w][t] = 0.0f;
    // No load depends on a branch: rounds beyond the end read the last item again and do not add it.
    for (uint first = lane % lanes; first < items; first += lanes * kRounds) {
      float4 a[kRounds][kRows], b[kRounds][kRows], x_a[kRounds][kTokens], x_b[kRounds][kTokens];
      FOR_UNROLL (ushort r = 0; r < kRounds; ++r) {
        const uint i = min(first + r * lanes, items - 1);
        FOR_UNROLL (ushort w = 0; w < kRows; ++w) W::load(row[w], i, a[r][w], b[r][w]);
        FOR_UNROLL (ushort t = 0; t < kTokens; ++t) {
          x_a[r][t] = token[t].values(W::first(i));
          x_b[r][t] = token[t].values(W::first(i) + W::kSecond);
        }
      }
      FOR_UNROLL (ushort r = 0; r < kRounds; ++r) {
        const bool inside = first + r * lanes < items;
        FOR_UNROLL (ushort w = 0; w < kRows; ++w) {
          FOR_UNROLL (ushort t = 0; t < kTokens; ++t) {
            const float4 with = fma(b[r][w], x_b[r][t], fma(a[r][w], x_a[r][t], sum[w][t]));
            sum[w][t] = inside ? with : sum[w][t];
          }
        }
      }
    }
  }

  // Sum of this lane's terms.
  float own_sum(ushort w, ushort t) const { return sum[w][t].x + sum[w][t].y + sum[w][t].z + sum[w][t].w; }
  // Sum of the row, in each of its lanes.
  float total(ushort w, ushort t, ushort lanes) const { return row_sum(own_sum(w, t), lanes); }

  // The totals of token lane % kTokens, bit-identical to `total`. A lane adds half as many tokens in each
  // step, and the shuffles of all sums are in flight together.
  void totals_of_own_token(thread float (&totals)[kRows], ushort lane, ushort lanes) const {
    float values[kRows][kTokens];
    FOR_UNROLL (ushort w = 0; w < kRows; ++w)
      FOR_UNROLL (ushort t = 0; t < kTokens; ++t) values[w][t] = own_sum(w, t);
    for (ushort offset = lanes / 2; offset >= kTokens; offset /= 2)
      FOR_UNROLL (ushort w = 0; w < kRows; ++w)
        FOR_UNROLL (ushort t = 0; t < kTokens; ++t) values[w][t] += simd_shuffle_xor(values[w][t], offset);
    FOR_UNROLL (ushort offset = kTokens / 2; offset > 0; offset /= 2) {
      const bool upper = lane & offset;
      FOR_UNROLL (ushort w = 0; w < kRows; ++w)
        FOR_UNROLL (ushort t = 0; t < offset; ++t) {
          const float lower_value = values[w][t], upper_value = values[w][t + offset];
          const float kept = upper ? upper_value : lower_value, sent = upper ? lower_value : upper_value;
          values[w][t] = kept + simd_shuffle_xor(sent, offset);
        }
    }
    FOR_UNROLL (ushort w = 0; w < kRows; ++w) totals[w] = values[w][0];
  }
};

// Built-in arguments of kernels whose simdgroups compute rows; `position` is uint, or uint2 for
// two-dimensional grids.
#define SIMDGROUP_ARGUMENTS(position)                                                         \
  position group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]], \
      ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort simdgroups [[simdgroups_per_threadgroup]]
