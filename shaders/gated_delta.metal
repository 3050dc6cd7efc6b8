// The gated delta rule (arXiv:2412.06464) of layers whose state is a matrix S [key_dim][value_dim] per head.
// For each token, in order:
//
//   S = exp(decay * softplus(alpha + step)) S;   S += k sigmoid(beta) (v - k S);   out = q S / sqrt(key_dim)
//
// q and k are divided by their lengths.
#include <metal_stdlib>

#include "args.h"
#include "gated_delta.h"
#include "projection.h"
#include "softplus.h"
#include "state_rows.h"
#include "variants.h"

using namespace metal;

// A simdgroup computes GATED_DELTA_COLUMNS columns of S, for all tokens of a sequence: columns are
// independent, tokens are not. A lane has every 32nd row in registers, so that a sum over rows is a simd_sum.
// Grid: (columns, heads, sequences) in threadgroups.
kernel void gated_delta(
    device const float* decay [[buffer(0)]],  // [heads], negative
    device const float* step [[buffer(1)]],   // [heads]
    device const float* qkv [[buffer(2)]],    // [tokens][in_stride]
    device const float* rates [[buffer(3)]],  // [tokens][rate_stride]: alpha, then beta
    constant StateRow* rows [[buffer(4)]],    // [tokens], then the first one of each sequence
    device float* states [[buffer(5)]],       // slots, from the layer's matrices in the first one
    device float* out [[buffer(6)]],          // [tokens][heads][value_dim]
    constant GatedDeltaArgs& args [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint column = (group.x * simdgroups + simdgroup) * GATED_DELTA_COLUMNS, head = group.y;
  if (column >= args.value_dim) return;
  constant StateRow& first = rows[args.tokens + group.z];
  const uint key_group = head % args.groups;
  device const float* q = qkv + key_group * args.key_dim;
  device const float* k = q + args.groups * args.key_dim;
  device const float* v = qkv + 2 * args.groups * args.key_dim + head * args.value_dim + column;
  const ushort columns = ushort(min(args.value_dim - column, uint(GATED_DELTA_COLUMNS)));
  const ulong matrix = ulong(head) * args.key_dim * args.value_dim + column;

  float s[GATED_DELTA_ROWS][GATED_DELTA_COLUMNS];
  device const float* before = states + ulong(first.before) * args.slot_stride + matrix;
  for (ushort i = 0; i < GATED_DELTA_ROWS; ++i)
    for (ushort j = 0; j < GATED_DELTA_COLUMNS; ++j) {
      const uint row = i * 32 + lane;
      s[i][j] = first.before != STATE_NONE && row < args.key_dim && j < columns
                    ? before[ulong(row) * args.value_dim + j]
                    : 0.0f;
    }

  for (uint token = 0; token < first.tokens; ++token) {
    const uint at = row_of(first, token);
    device const float* q_row = q + ulong(at) * args.in_stride;
    device const float* k_row = k + ulong(at) * args.in_stride;
    device const float* v_row = v + ulong(at) * args.in_stride;
    device const float* rate = rates + ulong(at) * args.rate_stride + head;

    float query[GATED_DELTA_ROWS], key[GATED_DELTA_ROWS];
    float2 squares = 0.0f;
    for (ushort i = 0; i < GATED_DELTA_ROWS; ++i) {
      const uint row = i * 32 + lane;
      const bool inside = row < args.key_dim;
      query[i] = inside ? q_row[row] : 0.0f;
      key[i] = inside ? k_row[row] : 0.0f;
      squares += float2(query[i] * query[i], key[i] * key[i]);
    }
    const float q_scale =
        precise::rsqrt(simd_sum(squares.x) + GATED_DELTA_EPS) * precise::rsqrt(float(args.key_dim));
    const float k_scale = precise::rsqrt(simd_sum(squares.y) + GATED_DELTA_EPS);
    const float keep = precise::exp(decay[head] * softplus(rate[0] + step[head]));
    const float beta = 1.0f / (1.0f + precise::exp(-rate[args.heads]));

    for (ushort j = 0; j < GATED_DELTA_COLUMNS; ++j) {
      float known = 0.0f;
      for (ushort i = 0; i < GATED_DELTA_ROWS; ++i) {
        s[i][j] *= keep;
        known = fma(key[i], s[i][j], known);
      }
      known = k_scale * simd_sum(known);
      const float added = k_scale * beta * ((j < columns ? v_row[j] : 0.0f) - known);
      float sum = 0.0f;
      for (ushort i = 0; i < GATED_DELTA_ROWS; ++i) {
        s[i][j] = fma(key[i], added, s[i][j]);
        sum = fma(query[i], s[i][j], sum);
      }
      sum = q_scale * simd_sum(sum);
      if (lane == 0 && j < columns) out[(ulong(at) * args.heads + head) * args.value_dim + column + j] = sum;
    }

    const uint after = rows[at].after;
    if (after == STATE_NONE) continue;
    device float* to = states + ulong(after) * args.slot_stride + matrix;
    for (ushort i = 0; i < GATED_DELTA_ROWS; ++i)
      for (ushort j = 0; j < columns; ++j) {
        const uint row = i * 32 + lane;
        if (row < args.key_dim) to[ulong(row) * args.value_dim + j] = s[i][j];
      }
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight * silu(gate) for each head. Grid: (heads, tokens) in simdgroups, as
// threads (32 * heads, tokens). T is half if a matmul reads the result, otherwise float.
template <typename T>
kernel void gated_norm(device const float* weight [[buffer(0)]],  // [dim]
                       device const float* x [[buffer(1)]],       // [tokens][heads][dim]
                       device const float* gate [[buffer(2)]],    // [tokens][gate_stride]
                       device T* y [[buffer(3)]],                 // [tokens][heads][dim]
                       constant GatedNormArgs& args [[buffer(4)]], uint2 position [[thread_position_in_grid]],
                       ushort lane [[thread_index_in_simdgroup]]) {
  const uint head = position.x / 32, token = position.y;
  if (head >= args.heads) return;
  const ulong first = (ulong(token) * args.heads + head) * args.dim;
  gate += ulong(token) * args.gate_stride + head * args.dim;
  float sum = 0.0f;
  for (uint i = lane; i < args.dim; i += 32) sum = fma(x[first + i], x[first + i], sum);
  const float scale = precise::rsqrt(simd_sum(sum) / float(args.dim) + args.eps);
  for (uint i = lane; i < args.dim; i += 32) {
    const float value = x[first + i] * scale * weight[i] * activate(gate[i], ACTIVATION_SILU);
    y[first + i] = finite<T>(value);
  }
}

INSTANTIATE_FOR_FLOATS(gated_norm)

// y *= sigmoid(gate), for the output of attention. In a row of q, the gate of a head is after its query.
// Grid: (n_heads * value_dim, tokens) in threads. T is the type of the output of attention.
template <typename T>
kernel void gate_heads(device const float* q [[buffer(0)]],  // [tokens][q_stride]
                       device T* y [[buffer(1)]],            // [tokens][n_heads][value_dim]
                       constant GateHeadsArgs& args [[buffer(2)]],
                       uint2 position [[thread_position_in_grid]]) {
  const uint i = position.x, token = position.y, head = i / args.value_dim;
  if (head >= args.n_heads || token >= args.tokens) return;
  const float gate =
      q[ulong(token) * args.q_stride + head * args.query_step + args.query_step / 2 + i % args.value_dim];
  device T& value = y[ulong(token) * args.n_heads * args.value_dim + i];
  value = T(float(value) / (1.0f + precise::exp(-gate)));
}

INSTANTIATE_FOR_FLOATS(gate_heads)
