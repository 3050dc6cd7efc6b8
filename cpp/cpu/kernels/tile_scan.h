// The recurrence of a state-space layer. Columns of a state are independent: a block of them processes
// several tokens while it is in the L1 cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "row_ops.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kScanTokens = 32;

// Factors of a token's input and of the state before it.
struct ScanFactors {
  float step[kScanTokens], decay[kScanTokens];
};

// Scans columns [column, column + kVectors * lanes) of all rows; with a single vector, only `n` of them.
template <int kVectors>
inline void scan_columns(const ScanHead& h, int first, int count, const ScanFactors& factors, int column,
                         int n) {
  const auto load = [&](const float* p)
                        ALWAYS_INLINE { return kVectors > 1 ? Simd::load(p) : load_part(p, n); };
  const auto store = [&](float* p, F value) ALWAYS_INLINE {
    return kVectors > 1 ? Simd::store(p, value) : store_part(p, value, n);
  };
  for (int i = 0; i < count; ++i) {
    const std::size_t token = std::size_t(first + i);
    const float* x = h.x + token * h.x_stride + column;
    const float *b = h.b + token * h.x_stride, *c = h.c + token * h.x_stride;
    const F decay = Simd::set(factors.decay[i]), step = Simd::set(factors.step[i]);
    F input[kVectors], y[kVectors];
    unrolled<kVectors>([&](auto v) ALWAYS_INLINE {
      input[v] = step * load(x + v * Simd::kLanes);
      y[v] = Simd::set(0.0f);
    });
    for (int row = 0; row < h.rows; ++row) {
      float* state = h.state + std::size_t(row) * std::size_t(h.dim) + column;
      const F from = Simd::set(b[row]), to = Simd::set(c[row]);
      unrolled<kVectors>([&](auto v) ALWAYS_INLINE {
        const F before = load(state + v * Simd::kLanes);
        const F after = Simd::fma(before, decay, from * input[v]);
        store(state + v * Simd::kLanes, after);
        y[v] = Simd::fma(after, to, y[v]);
      });
    }
    float* out = h.y + token * h.y_stride + column;
    const F skip = Simd::set(h.skip);
    unrolled<kVectors>([&](auto v) ALWAYS_INLINE {
      store(out + v * Simd::kLanes, Simd::fma(skip, load(x + v * Simd::kLanes), y[v]));
    });
  }
}

void scan(const ScanHead& h, int tokens) {
  ScanFactors factors;
  for (int first = 0; first < tokens; first += kScanTokens) {
    const int count = std::min(kScanTokens, tokens - first);
    for (int i = 0; i < count; ++i) {
      const float raw = h.dt[std::size_t(first + i) * h.dt_stride] + h.dt_bias;
      factors.step[i] = softplus(raw);
      factors.decay[i] = std::exp(factors.step[i] * h.a);
    }
    int column = 0;
    for (; column + 4 * Simd::kLanes <= h.dim; column += 4 * Simd::kLanes)
      scan_columns<4>(h, first, count, factors, column, 0);
    if (column + 2 * Simd::kLanes <= h.dim) {
      scan_columns<2>(h, first, count, factors, column, 0);
      column += 2 * Simd::kLanes;
    }
    for (; column < h.dim; column += Simd::kLanes)
      scan_columns<1>(h, first, count, factors, column, h.dim - column);
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
