// The gated delta rule, in terms of the vectors of one instruction set.
#pragma once

#include "row_ops.h"

namespace metal_prefill::cpu {
namespace {

// A token reads the columns of the matrix twice: first to predict its value, then to update them. Eight sums
// hide the latency of an FMA; those of one column are added in a fixed order.
void gated_delta(const GatedDeltaToken& token, float* state, float* out) {
  constexpr int kVectors = kGatedDeltaColumns / Simd::kLanes, kSums = kVectors < 8 ? 8 / kVectors : 1;
  static_assert(kVectors * Simd::kLanes == kGatedDeltaColumns);
  F sums[kSums][kVectors], added[kVectors];
  const auto clear = [&] {
    unrolled<kSums>([&](auto s) { unrolled<kVectors>([&](auto v) { sums[s][v] = Simd::set(0.0f); }); });
  };
  // Calls row(i, s) for each row with the index s of its sum.
  const auto each_row = [&](auto&& row) {
    int i = 0;
    for (; i + kSums <= token.key_dim; i += kSums) unrolled<kSums>([&](auto s) { row(i + s, s); });
    for (; i < token.key_dim; ++i) row(i, std::integral_constant<int, 0>());
  };
  const auto total = [&](int v) {
    F sum = sums[0][v];
    for (int s = 1; s < kSums; ++s) sum += sums[s][v];
    return sum;
  };

  clear();
  each_row([&](int i, auto s) {
    const F k = Simd::set(token.k[i]);
    const float* row = state + i * kGatedDeltaColumns;
    unrolled<kVectors>(
        [&](auto v) { sums[s][v] = Simd::fma(k, Simd::load(row + v * Simd::kLanes), sums[s][v]); });
  });
  const F decay = Simd::set(token.decay), beta = Simd::set(token.beta);
  unrolled<kVectors>([&](auto v) {
    const F value = load_part(token.v + v * Simd::kLanes, token.columns - v * Simd::kLanes);
    added[v] = beta * (value - decay * total(v));
  });

  clear();
  each_row([&](int i, auto s) {
    const F k = Simd::set(token.k[i]), q = Simd::set(token.q[i]);
    float* row = state + i * kGatedDeltaColumns;
    unrolled<kVectors>([&](auto v) {
      const F kept = decay * Simd::load(row + v * Simd::kLanes);
      const F changed = Simd::fma(k, added[v], kept);
      Simd::store(row + v * Simd::kLanes, changed);
      sums[s][v] = Simd::fma(q, changed, sums[s][v]);
    });
  });
  unrolled<kVectors>(
      [&](auto v) { store_part(out + v * Simd::kLanes, total(v), token.columns - v * Simd::kLanes); });
}

}  // namespace
}  // namespace metal_prefill::cpu
