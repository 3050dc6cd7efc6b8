// Products of float32 weights in panels: lanes are rows.
#pragma once

#include "tile_panels.h"

namespace metal_prefill::cpu {
namespace {

struct FloatPanels {
  struct Weights {
    static constexpr bool kFetches = true;
    static constexpr int kTokens = Simd::kFloatPanelTokens;
    static constexpr int kSteps = 1;  // unrolling a whole block: 0.95 times as fast
    static F load(const std::uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); }
  };
  using Sum = F;
  static constexpr int kSumBlocks = 16;
  static Sum first(int) { return Simd::set(0); }
  static F value(const std::byte* x) { return Simd::set(*reinterpret_cast<const float*>(x)); }
  static Sum add(Sum sum, F weights, F x) { return Simd::fma(weights, x, sum); }
  static F finish(Sum sum, int, int) { return sum; }
};

void multiply_float_panels(const FloatBlock* blocks, int n_blocks, const FloatRows& x, int first, int count,
                           const ProductOutput& out, const PrefetchRange& next) {
  multiply_panels(FloatPanels(), {blocks, n_blocks, x.row(first), x.stride * sizeof(float)}, count, out,
                  next);
}

void to_blocks(const FloatRows& rows, int n_blocks, FloatBlock* out) {
  constexpr int kOfPanel = kPanelRows / Simd::kLanes;
  for (int b = 0; b < n_blocks; ++b, ++out)
    for (int v = 0; v < kGroupRows / Simd::kLanes; ++v)
      for (int col = 0; col < kFloatPad; col += 4) {
        F quads[4];
        for (int i = 0; i < 4; ++i)
          quads[i] = Simd::load_quads(rows.row(v * Simd::kLanes + i) + b * kFloatPad + col, 4 * rows.stride);
        Simd::transpose_quads(quads);
        for (int i = 0; i < 4; ++i)
          Simd::store(out->values[v / kOfPanel][col + i] + v % kOfPanel * Simd::kLanes, quads[i]);
      }
}

}  // namespace
}  // namespace metal_prefill::cpu
