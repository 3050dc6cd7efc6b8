// Index and value of the largest logit of each row. NaN is skipped, and the lowest index wins ties.
//
// Stage 1 divides a row among many threadgroups, since a single one would take long to read all logits.
// Stage 2 reduces their candidates with one threadgroup per row.
#include <metal_stdlib>

#include "args.h"
#include "reduce.h"

using namespace metal;

static inline bool better(Candidate a, Candidate b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

static inline Candidate simd_best(Candidate best) {
  const float value = simd_max(best.value);
  return {value, simd_min(best.value == value ? best.index : ARGMAX_NONE)};
}

// Best of all threads, in every thread. `scratch` has one candidate per simdgroup.
static inline Candidate threadgroup_best(Candidate best, threadgroup Candidate* scratch, ushort lane,
                                         ushort simdgroup, ushort simdgroups) {
  best = simd_best(best);
  if (lane == 0) scratch[simdgroup] = best;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  best.value = -INFINITY;
  best.index = ARGMAX_NONE;
  if (lane < simdgroups) best = scratch[lane];
  return simd_best(best);
}

// Tests the bits, as comparisons may be compiled under the assumption that there is no NaN.
static inline bool is_number(float value) {
  return (as_type<uint>(value) & 0x7fffffffu) <= 0x7f800000u;
}

// Each threadgroup finds the best of its share of a row: partial[row][group]. Grid: (groups, rows).
kernel void argmax_stage1(device const float* logits [[buffer(0)]],  // [rows][n]
                          device Candidate* partial [[buffer(1)]],   // [rows][groups]
                          constant ArgmaxArgs& args [[buffer(2)]], uint2 position [[thread_position_in_grid]],
                          uint2 threads [[threads_per_grid]], uint2 group [[threadgroup_position_in_grid]],
                          uint2 groups [[threadgroups_per_grid]],
                          ushort thread_index [[thread_index_in_threadgroup]],
                          ushort lane [[thread_index_in_simdgroup]],
                          ushort simdgroup [[simdgroup_index_in_threadgroup]],
                          ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup Candidate scratch[32];
  Candidate best = {-INFINITY, ARGMAX_NONE};
  logits += ulong(group.y) * args.n;
  for (uint i = position.x; i < args.n; i += threads.x) {
    const Candidate candidate = {logits[i], i};
    if (is_number(candidate.value) && better(candidate, best)) best = candidate;
  }
  best = threadgroup_best(best, scratch, lane, simdgroup, simdgroups);
  if (thread_index == 0) partial[group.y * groups.x + group.x] = best;
}

// One threadgroup per row: the best of the candidates.
kernel void argmax_stage2(device const Candidate* partial [[buffer(0)]],  // [rows][n]
                          device Candidate* result [[buffer(1)]],         // [rows]
                          constant ArgmaxArgs& args [[buffer(2)]], GROUP_ARGUMENTS) {
  threadgroup Candidate scratch[32];
  Candidate best = {-INFINITY, ARGMAX_NONE};
  for (uint i = thread_index; i < args.n; i += threads) {
    const Candidate candidate = partial[token * args.n + i];
    if (better(candidate, best)) best = candidate;
  }
  best = threadgroup_best(best, scratch, lane, simdgroup, simdgroups);
  if (thread_index == 0) result[token] = best;
}
