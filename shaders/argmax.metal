// Index and value of the largest logit, in two stages. NaN is skipped, the lowest index wins ties.
#include <metal_stdlib>

#include "args.h"

using namespace metal;

static inline bool better(Candidate a, Candidate b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

static inline Candidate simd_best(Candidate best) {
  for (ushort offset = 16; offset > 0; offset /= 2) {
    const Candidate other = {simd_shuffle_xor(best.value, offset), simd_shuffle_xor(best.index, offset)};
    if (better(other, best)) best = other;
  }
  return best;
}

// Best of all threads, in every thread. `scratch` holds one candidate for each simdgroup.
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

// By its bits: comparisons may be compiled under the assumption that there is no NaN.
static inline bool is_number(float value) {
  return (as_type<uint>(value) & 0x7fffffffu) <= 0x7f800000u;
}

// Each threadgroup finds the best of its share: partial[group].
kernel void argmax_stage1(device const float* logits [[buffer(0)]], device Candidate* partial [[buffer(1)]],
                          constant ArgmaxArgs& args [[buffer(2)]], uint position [[thread_position_in_grid]],
                          uint threads [[threads_per_grid]], uint group [[threadgroup_position_in_grid]],
                          ushort thread_index [[thread_index_in_threadgroup]],
                          ushort lane [[thread_index_in_simdgroup]],
                          ushort simdgroup [[simdgroup_index_in_threadgroup]],
                          ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup Candidate scratch[32];
  Candidate best = {-INFINITY, ARGMAX_NONE};
  for (uint i = position; i < args.n; i += threads) {
    const Candidate candidate = {logits[i], i};
    if (is_number(candidate.value) && better(candidate, best)) best = candidate;
  }
  best = threadgroup_best(best, scratch, lane, simdgroup, simdgroups);
  if (thread_index == 0) partial[group] = best;
}

// One threadgroup: the best of the candidates.
kernel void argmax_stage2(device const Candidate* partial [[buffer(0)]],
                          device Candidate* result [[buffer(1)]], constant ArgmaxArgs& args [[buffer(2)]],
                          ushort thread_index [[thread_index_in_threadgroup]],
                          ushort threads [[threads_per_threadgroup]],
                          ushort lane [[thread_index_in_simdgroup]],
                          ushort simdgroup [[simdgroup_index_in_threadgroup]],
                          ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup Candidate scratch[32];
  Candidate best = {-INFINITY, ARGMAX_NONE};
  for (uint i = thread_index; i < args.n; i += threads) {
    const Candidate candidate = partial[i];
    if (better(candidate, best)) best = candidate;
  }
  best = threadgroup_best(best, scratch, lane, simdgroup, simdgroups);
  if (thread_index == 0) *result = best;
}
