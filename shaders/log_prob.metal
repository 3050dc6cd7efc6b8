// Log probability of one target per token: logits[target] - log(sum(exp(logits))). The logits are read twice:
// for their maximum, which is subtracted so that exp cannot overflow, and for the sum.
#include <metal_stdlib>

#include "args.h"
#include "reduce.h"

using namespace metal;

// One threadgroup per token. The result for a negative target is 0.
kernel void log_prob(device const float* logits [[buffer(0)]],  // [tokens][vocab_size]
                     device const int* targets [[buffer(1)]],   // [tokens]
                     device float* out [[buffer(2)]],           // [tokens]
                     constant LogProbArgs& args [[buffer(3)]], GROUP_ARGUMENTS) {
  threadgroup float partial[2][32];
  logits += token * args.vocab_size;
  float best = -INFINITY;
  for (uint i = thread_index; i < args.vocab_size; i += threads) best = max(best, logits[i]);
  best = threadgroup_reduce<Max>(best, partial[0], lane, simdgroup, simdgroups);
  float sum = 0.0f;
  for (uint i = thread_index; i < args.vocab_size; i += threads) sum += precise::exp(logits[i] - best);
  sum = threadgroup_reduce<Sum>(sum, partial[1], lane, simdgroup, simdgroups);
  const int target = targets[token];
  if (thread_index == 0) out[token] = target < 0 ? 0.0f : logits[target] - best - precise::log(sum);
}
