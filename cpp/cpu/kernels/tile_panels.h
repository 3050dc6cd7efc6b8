// Products of weights in panels: lanes are rows, and a step multiplies a lane of each row by the same four
// bytes of a token. Sums run over all columns, in an order that does not depend on the tile.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../../base/processor.h"
#include "prefetch.h"
#include "row_activations.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kPanelSteps = 16;       // of a block
constexpr std::size_t kRowBytes = 4;  // of a row in a step
constexpr std::size_t kStepBytes = kPanelRows * kRowBytes, kPanelBytes = kPanelSteps * kStepBytes;

// Up to this many tokens, products are bound by memory. They read weights in order, panel by panel, so that
// the processor prefetches them: with both panels at a time, Zen 4 read a token's weights at a third of the
// speed. Prefetch instructions make a token 1.1 to 1.3 times as fast on a Xeon.
constexpr int kFewPanelTokens = 6;
constexpr std::size_t kFewTokensAhead = 8192;  // bytes

// The weights of a group, and rows of tokens; strides in bytes.
struct PanelOperands {
  const void* blocks;
  int n_blocks;
  const void* x;
  std::size_t x_stride;
};

struct NoActivation {
  static F apply(F x) { return x; }
};
template <Activation kActivation>
struct Activated {
  static F apply(F x) { return activated<kActivation>(x); }
};
// Calls body with the type of an activation; null selects none.
template <typename Body>
inline void with_activation(const Activation* activation, Body&& body) {
  if (!activation) return body(NoActivation());
  with_activation(*activation, [&](auto kind) { body(Activated<kind()>()); });
}

// Stores the products of a vector of rows, from row `row` of the group on, and a token.
template <typename Activate>
inline void deliver(const ProductOutput& out, int token, int row, F products, Activate) {
  float* to = out.row(token) + row;
  if (out.bias) products += Simd::load(out.bias + row);
  products = Activate::apply(products);
  if (out.add) products = Simd::load(to) + products;
  Simd::store(to, products);
}
// Stores products without an activation, which activate_products() applies.
inline void deliver(const ProductOutput& out, int token, int row, F products) {
  deliver(out, token, row, products, NoActivation());
}
inline void activate_products(const ProductOutput& out, int count) {
  if (out.activation)
    activate(out.data, out.stride, *out.activation, count, kGroupRows, out.data, out.stride);
}

// Calls body(group, out, next) for each group, with the destination of its products and the next memory.
template <typename Body>
inline void each_group(const PackedMatrix& weight, GroupRange groups, const ProductOutput& out,
                       const PrefetchRange& next, Body&& body) {
  for (int i = 0; i < groups.count; ++i) {
    const int group = groups.first + i;
    body(group, out.group(i),
         i + 1 < groups.count ? PrefetchRange{weight.group(group + 1), weight.group_bytes()} : next);
  }
}

// Weights of a Product: four bytes of a row in each step.
struct FourBytes {
  static constexpr bool kFetches = false;             // whether blocks are prefetched into the L1 cache
  static constexpr int kTokens = Simd::kPanelTokens;  // maximum of a tile
  // The compiler unrolls four times as many, a whole block. With fewer, GCC 12 loads the offsets of tokens
  // from the stack and products take 1.1 to 1.7 times as long with AVX2 and AVX-VNNI.
  static constexpr int kSteps = kPanelSteps / 4;
  static I load(const std::uint8_t* p) { return Simd::load_codes(p); }
};

// Whether rests of the activations of some columns are multiplied separately.
template <class Product>
concept AddsRests = requires(const Product& product) { product.rests(0); };

// Whether sums are rounded, with an error that grows with their length.
template <class Product>
concept SumsFloats = requires { Product::kSumBlocks; };

// Sums over the first blocks, in memory.
template <int kTokens, int kVectors>
struct FloatTotals {
  int end = 0;  // end of those blocks
  alignas(64) float of[kTokens][kVectors * Simd::kLanes];

  ALWAYS_INLINE void add_to(F (&sums)[kTokens][kVectors]) const {
    if (end == 0) return;
    FOR_UNROLL (int t = 0; t < kTokens; ++t)
      FOR_UNROLL (int r = 0; r < kVectors; ++r)
        sums[t][r] = Simd::load(of[t] + r * Simd::kLanes) + sums[t][r];
  }
  // Takes over `sums`, which then restart at 0 from block `block` on.
  ALWAYS_INLINE void take(F (&sums)[kTokens][kVectors], int block) {
    add_to(sums);
    end = block;
    FOR_UNROLL (int t = 0; t < kTokens; ++t)
      FOR_UNROLL (int r = 0; r < kVectors; ++r) {
        Simd::store(of[t] + r * Simd::kLanes, sums[t][r]);
        sums[t][r] = Simd::set(0);
      }
  }
};

// Multiplies kVectors vectors of rows, from vector `v` of the group on, by kTokens tokens. In a Product,
// `first` is the initial sum of a token; `Weights` loads a vector of rows; `value` broadcasts four bytes;
// `add` adds a step; `finish` converts a sum to a result. Float sums are totalled every kSumBlocks blocks.
template <class Product, int kVectors, int kTokens>
[[gnu::noinline]] void panel_tile(const Product& product, const PanelOperands& from, int v, int token,
                                  const ProductOutput& out, NextLines& next) {
  constexpr int kOfPanel = kPanelRows / Simd::kLanes;
  constexpr int kTogether = kTokens > kFewPanelTokens ? kVectors : std::min(kVectors, kOfPanel);
  using Weights = typename Product::Weights;
  typename Product::Sum sums[kTokens][kVectors];
  FOR_UNROLL (int t = 0; t < kTokens; ++t)
    FOR_UNROLL (int r = 0; r < kVectors; ++r) sums[t][r] = product.first(token + t);
  const auto* block = static_cast<const std::uint8_t*>(from.blocks) +
                      std::size_t(v / kOfPanel) * kPanelBytes +
                      std::size_t(v % kOfPanel * Simd::kLanes) * kRowBytes;
  const auto* x = static_cast<const std::byte*>(from.x) + std::size_t(token) * from.x_stride;
  const auto offset_of = [](int r) ALWAYS_INLINE {
    return std::size_t(r / kOfPanel) * kPanelBytes + std::size_t(r % kOfPanel * Simd::kLanes) * kRowBytes;
  };
  if constexpr (AddsRests<Product>) {
    FOR_UNROLL (int t = 0; t < kTokens; ++t)
      for (const auto& rest : product.rests(token + t))
        FOR_UNROLL (int r = 0; r < kVectors; ++r)
          sums[t][r] = Product::add(sums[t][r], Weights::load(block + rest.offset + offset_of(r)),
                                    Simd::set_int(rest.codes));
  }
  NextLines lines = next;  // copy in registers
  lines.begin_tile(from.n_blocks);
  [[maybe_unused]] FloatTotals<kTokens, kVectors> totals;
  for (int b = 0; b < from.n_blocks; ++b, block += 2 * kPanelBytes, x += 4 * kPanelSteps) {
    lines.step();
    if constexpr (SumsFloats<Product>)
      if (b == totals.end + Product::kSumBlocks) totals.take(sums, b);
    FOR_UNROLL (int g = 0; g < kVectors; g += kTogether) {
#pragma GCC unroll 4
      for (int first = 0; first < kPanelSteps; first += Weights::kSteps)
        unrolled<Weights::kSteps>([&](auto i) ALWAYS_INLINE {
          const int step = first + i;
          decltype(Weights::load(block)) weights[kTogether];
          FOR_UNROLL (int r = 0; r < kTogether; ++r) {
            const auto* at = block + std::size_t(step) * kStepBytes + offset_of(g + r);
            weights[r] = Weights::load(at);
            if (Weights::kFetches && kTokens > kFewPanelTokens / 2 && (g + r) % kOfPanel == 0)
              __builtin_prefetch(at + 4 * kPanelBytes);
          }
          FOR_UNROLL (int t = 0; t < kTokens; ++t) {
            const auto value = Product::value(x + std::size_t(t) * from.x_stride + 4 * step);
            FOR_UNROLL (int r = 0; r < kTogether; ++r)
              sums[t][g + r] = Product::add(sums[t][g + r], weights[r], value);
          }
        });
    }
  }
  next = lines;
  if constexpr (SumsFloats<Product>) totals.add_to(sums);
  // Copies stay in registers: stores of floats may alias the object of a reference.
  const Product of = product;
  const ProductOutput to = out;
  FOR_UNROLL (int t = 0; t < kTokens; ++t)
    FOR_UNROLL (int r = 0; r < kVectors; ++r) {
      const int row = (v + r) * Simd::kLanes;
      deliver(to, token + t, row, of.finish(sums[t][r], token + t, row));
    }
}

constexpr int tile_vectors(int tokens) {
  return tokens == 1 ? kGroupRows / Simd::kLanes : Simd::kPanelVectors;
}

template <class Product>
void multiply_panels(const Product& product, const PanelOperands& from, int count, const ProductOutput& out,
                     const PrefetchRange& next) {
  int tiles = ceil_div(count, Product::Weights::kTokens);
  const auto* ahead = static_cast<const std::byte*>(from.blocks) + kFewTokensAhead;
  const std::size_t bytes = prefetches_few_tokens() ? std::size_t(from.n_blocks) * 2 * kPanelBytes : 0;
  NextLines lines(count <= kFewPanelTokens ? PrefetchRange{ahead, bytes} : next,
                  tiles * (kGroupRows / Simd::kLanes / tile_vectors(count)));
  for (int token = 0, share = 0; tiles > 0; --tiles, token += share) {
    share = ceil_div(count - token, tiles);  // as even as possible: few tokens make poor use of a weight
    with_count<Product::Weights::kTokens>(share, [&](auto tokens) {
      constexpr int kVectors = tile_vectors(tokens);
      for (int v = 0; v < kGroupRows / Simd::kLanes; v += kVectors)
        panel_tile<Product, kVectors, tokens>(product, from, v, token, out, lines);
    });
  }
  activate_products(out, count);
}

}  // namespace
}  // namespace metal_prefill::cpu
