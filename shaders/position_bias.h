// Buckets of the relative position bias of T5 and MPNet (arXiv:1910.10683), shared by host and shaders. Half
// of them are for keys after the query: 8 single distances, then steps of half an octave up to 128. The
// thresholds are 8 * 2^(i/2), rounded up.
#pragma once

#define BIAS_BUCKETS 32
#define BIAS_REACH 128  // all larger distances have the same bias

// Bucket of a key `distance` positions after the query, or before it if negative.
static inline int position_bucket(int distance) {
  const int n = distance < 0 ? -distance : distance;
  const int steps = (n >= 12) + (n >= 16) + (n >= 23) + (n >= 32) + (n >= 46) + (n >= 64) + (n >= 91);
  return (distance > 0 ? BIAS_BUCKETS / 2 : 0) + (n < 8 ? n : 8 + steps);
}
