// State-space layers (Mamba-2, arXiv:2405.21060). Each head has a state [rows][dim]. With step = softplus(dt
// + bias) of a token, state = exp(step * a) * state + b (step * x)^T and y = state^T c + skip * x. If no norm
// follows, the result is gated here: y * silu(gate).
#include <metal_stdlib>

#include "args.h"
#include "projection.h"
#include "reduce.h"
#include "softplus.h"
#include "state_rows.h"
#include "variants.h"

using namespace metal;

template <typename T>
static inline T result_of(float y, device const float* gate, uint gated) {
  if (gated) y *= activate(gate[0], ACTIVATION_SILU);
  return finite<T>(y);
}

// A simdgroup has SCAN_COLUMNS columns of the state of a head in registers, and processes the tokens of a
// sequence. Eight lanes share two columns: each has every eighth row.
//
// Grid: simdgroups of all heads, and sequences. A slot that is read is not written. States have at most kRows
// * 8 rows. T is half if a matmul reads the result, otherwise float.
template <typename T, ushort kRows>
kernel void scan(device const float* a [[buffer(0)]],          // [heads]
                 device const float* bias [[buffer(1)]],       // [heads], of dt
                 device const float* skip [[buffer(2)]],       // [heads]
                 device const float* projected [[buffer(3)]],  // [tokens][gate | ... | dt at dt_column | ...]
                 device const float* convolved [[buffer(4)]],  // [tokens][x | b | c]
                 constant StateRow* rows [[buffer(5)]],  // [tokens], then the first one of each sequence
                 device float* states [[buffer(6)]],     // slots, from the layer's matrices in the first one
                 device T* out [[buffer(7)]],            // [tokens - first_out][heads * dim]
                 constant ScanArgs& args [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
                 ushort lane [[thread_index_in_simdgroup]],
                 ushort simdgroup [[simdgroup_index_in_threadgroup]],
                 ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint blocks = (args.dim + SCAN_COLUMNS - 1) / SCAN_COLUMNS;
  const uint item = group.x * simdgroups + simdgroup, head = item / blocks;
  if (head >= args.heads) return;
  const ushort part = lane % 8;
  const uint column = (item % blocks) * SCAN_COLUMNS + lane / 8 * 2, inner = args.heads * args.dim;
  const bool has_first = column < args.dim, has_second = column + 1 < args.dim;
  const uint shared_rows = args.heads / args.heads_per_group * args.rows;  // of b in all groups, before c
  const uint of_group = head / args.heads_per_group * args.rows;
  const ulong of_head = ulong(head) * args.rows * args.dim;

  constant StateRow& first = rows[args.tokens + group.y];
  float2 state[kRows];
  for (ushort i = 0; i < kRows; ++i) {
    const uint row = part + 8 * i;
    state[i] = 0.0f;
    if (first.before == STATE_NONE || row >= args.rows) continue;
    device const float* from =
        states + ulong(first.before) * args.slot_stride + of_head + row * args.dim + column;
    if (has_first) state[i].x = from[0];
    if (has_second) state[i].y = from[1];
  }
  for (uint token = 0; token < first.tokens; ++token) {
    const uint at = row_of(first, token);
    device const float* x = convolved + ulong(at) * (inner + 2 * shared_rows);
    device const float* b = x + inner + of_group;
    device const float* c = b + shared_rows;
    device const float* gate = projected + ulong(at) * args.row_stride;
    const float step = softplus(gate[args.dt_column + head] + bias[head]);
    const float decay = precise::exp(step * a[head]);
    x += head * args.dim + column;
    const float2 value = float2(has_first ? x[0] : 0.0f, has_second ? x[1] : 0.0f), input = step * value;
    float2 y = 0.0f;
    for (ushort i = 0; i < kRows; ++i) {
      const uint row = part + 8 * i;
      if (row >= args.rows) break;
      state[i] = fma(state[i], float2(decay), b[row] * input);
      y = fma(state[i], float2(c[row]), y);
    }
    for (ushort offset = 1; offset < 8; offset *= 2) y += simd_shuffle_xor(y, offset);
    if (part == 0 && at >= args.first_out) {
      const uint to = head * args.dim + column;
      device T* row = out + ulong(at - args.first_out) * inner;
      y = fma(float2(skip[head]), value, y);
      if (has_first) row[to] = result_of<T>(y.x, gate + to, args.gated);
      if (has_second) row[to + 1] = result_of<T>(y.y, gate + to + 1, args.gated);
    }
    const uint after = rows[at].after;
    if (after == STATE_NONE) continue;
    device float* slot = states + ulong(after) * args.slot_stride + of_head + column;
    for (ushort i = 0; i < kRows; ++i) {
      const uint row = part + 8 * i;
      if (row >= args.rows) break;
      if (has_first) slot[row * args.dim] = state[i].x;
      if (has_second) slot[row * args.dim + 1] = state[i].y;
    }
  }
}

INSTANCE("scan_f32_128", scan<float, 16>)
INSTANCE("scan_f32_256", scan<float, 32>)
INSTANCE("scan_f16_128", scan<half, 16>)
INSTANCE("scan_f16_256", scan<half, 32>)

// RMSNorm of y * silu(gate) over each of `groups` parts of a row. Grid: rows from first_out on, and groups. T
// is half if a matmul reads the result, float if a matvec does.
template <typename T>
kernel void scan_norm(device const float* weight [[buffer(0)]],  // [inner]
                      device const float* gates [[buffer(1)]],   // [tokens][row_stride]
                      device const float* y [[buffer(2)]],       // [tokens - first_out][inner]
                      device T* out [[buffer(3)]],               // [tokens - first_out][inner]
                      constant ScanNormArgs& args [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
                      ushort thread_index [[thread_index_in_threadgroup]],
                      ushort2 threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                      ushort simdgroup [[simdgroup_index_in_threadgroup]],
                      ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  const uint columns = args.inner / args.groups, first = group.y * columns;
  gates += ulong(group.x + args.first_out) * args.row_stride + first;
  y += ulong(group.x) * args.inner + first;
  out += ulong(group.x) * args.inner + first;
  float sum = 0.0f;
  for (uint i = thread_index; i < columns; i += threads.x) {
    const float value = y[i] * activate(gates[i], ACTIVATION_SILU);
    sum = fma(value, value, sum);
  }
  sum = threadgroup_reduce<Sum>(sum, partial, lane, simdgroup, simdgroups);
  const float scale = precise::rsqrt(sum / float(columns) + args.eps);
  for (uint i = thread_index; i < columns; i += threads.x) {
    const float result = y[i] * activate(gates[i], ACTIVATION_SILU) * scale * weight[first + i];
    out[i] = finite<T>(result);
  }
}

INSTANTIATE_FOR_FLOATS(scan_norm)
