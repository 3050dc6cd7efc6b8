// Products of rows of floats: lanes are columns, summed at the end. Weights are as in the file, or expanded
// to float32.
//
// The sum of each lane runs in the order of the columns and the lanes are added in a fixed order: results are
// bit-identical for tiles of any shape.
#pragma once

#include "tile_blocks.h"

namespace metal_prefill::cpu {
namespace {

// Sums the lanes of each vector.
template <class S, int kRows>
inline void add_up(const typename S::F (&sums)[kRows], float* out) {
  if constexpr (ReducesFour<S> && kRows == 1) {  // in the same order as four rows
    float four[4];
    S::reduce_add4({sums[0], sums[0], sums[0], sums[0]}, four);
    out[0] = four[0];
  } else if constexpr (ReducesFour<S>) {
    static_assert(kRows % 4 == 0);
    for (int r = 0; r < kRows; r += 4)
      S::reduce_add4({sums[r], sums[r + 1], sums[r + 2], sums[r + 3]}, out + r);
  } else {
    for (int r = 0; r < kRows; ++r) out[r] = S::reduce_add(sums[r]);
  }
}

// Weights of any width, multiplied in float32.
template <typename Element>
struct FloatProduct {
  using Weight = Element;
  using Value = float;
  static constexpr int kColumns = Simd::kLanes;       // per step
  static constexpr int kTokens = Simd::kFloatTokens;  // maximum of a tile

  static F weight(const Weight* p) { return load_floats(p); }
  static F value(const Value* p) { return Simd::load(p); }
  static F add(F acc, F weight, F value) { return Simd::fma(weight, value, acc); }
};

// The operands of a product: `cols` columns of rows of weights and of activations, strides in elements.
template <class Product>
struct Operands {
  const typename Product::Weight* weight;
  std::size_t weight_stride;
  const typename Product::Value* x;
  std::size_t x_stride;
  int cols;
};

// Multiplies kRows weight rows from `row` on by kTokens tokens from `token` on.
template <class Product, int kRows, int kTokens>
[[gnu::noinline]] void row_tile(const Operands<Product>& from, int row, int token, float* out,
                                std::size_t stride, NextLines& next) {
  F acc[kTokens][kRows];
  FOR_UNROLL (int t = 0; t < kTokens; ++t)
    FOR_UNROLL (int r = 0; r < kRows; ++r) acc[t][r] = Simd::set(0);
  const auto* weight = from.weight + std::size_t(row) * from.weight_stride;
  const auto* x = from.x + std::size_t(token) * from.x_stride;
  NextLines lines = next;  // copy in registers
  if constexpr (kRows > 1) lines.begin_tile(ceil_div(from.cols, Product::kColumns));
  for (int k = 0; k < from.cols; k += Product::kColumns) {
    if constexpr (kRows > 1) lines.step();
    decltype(Product::weight(weight)) w[kRows];
    FOR_UNROLL (int r = 0; r < kRows; ++r)
      w[r] = Product::weight(weight + std::size_t(r) * from.weight_stride + k);
    FOR_UNROLL (int t = 0; t < kTokens; ++t) {
      const auto value = Product::value(x + std::size_t(t) * from.x_stride + k);
      FOR_UNROLL (int r = 0; r < kRows; ++r) acc[t][r] = Product::add(acc[t][r], w[r], value);
    }
  }
  next = lines;
  FOR_UNROLL (int t = 0; t < kTokens; ++t) add_up<Simd>(acc[t], out + std::size_t(t) * stride + row);
}

// Multiplies a group by kTokens tokens, in tiles of kRows rows.
template <class Product, int kRows, int kTokens>
void row_tiles(const Operands<Product>& from, int token, float* out, std::size_t stride, NextLines& next) {
  // Eight rows of a single token are enough independent sums to hide the latency of a multiply-add.
  constexpr int kTileRows = kTokens == 1 && kRows > 1 ? 8 : kRows;
  for (int row = 0; row < kGroupRows; row += kTileRows)
    row_tile<Product, kTileRows, kTokens>(from, row, token, out, stride, next);
}

// Multiplies a group by tokens [0, count). With few of them kRows is 1: enough rows to hide the latency of a
// multiply-add would be too many streams for the processor to prefetch.
template <class Product, int kRows>
void multiply_rows(const Operands<Product>& from, int count, float* out, std::size_t stride,
                   const PrefetchRange& next) {
  int passes = ceil_div(count, Product::kTokens);
  NextLines lines(next, passes * (kGroupRows / kRows));
  for (int token = 0, share = 0; passes > 0; --passes, token += share) {
    share = ceil_div(count - token, passes);  // as even as possible: few tokens make poor use of a weight
    with_count<Product::kTokens>(share, [&](auto tokens) {
      row_tiles<Product, kRows, tokens>(from, token, out + std::size_t(token) * stride, stride, lines);
    });
  }
}

void multiply_float(const FloatRows& weight, int cols, const FloatRows& x, int first, int count, float* out,
                    std::size_t stride, const PrefetchRange& next) {
  multiply_rows<FloatProduct<float>, Simd::kFloatRows>(
      {weight.data, weight.stride, x.row(first), x.stride, round_up(cols, kFloatPad)}, count, out, stride,
      next);
}

void multiply_half(const std::uint16_t* weight, bool bfloat16, int cols, const FloatRows& x, int first,
                   int count, float* out, std::size_t stride) {
  const auto multiply = [&]<typename Element>(const Element* from) {
    multiply_rows<FloatProduct<Element>, 1>({from, std::size_t(cols), x.row(first), x.stride, cols}, count,
                                            out, stride, {});
  };
  if (bfloat16)
    multiply(reinterpret_cast<const Bfloat16*>(weight));
  else
    multiply(weight);
}

}  // namespace
}  // namespace metal_prefill::cpu
