// Products of weights in panels on the matrix unit (AMX): 16 tokens x 64 bytes (A) by 64 bytes x 16 weight
// rows (B), summed in C over all columns. The bytes are 32 columns of bfloat16, or 64 of rotated rows.
//
// A product of full tiles takes the unit 16 cycles and reads two tiles, so tokens and rows are taken two
// tiles at a time: four C, one A and one B, five loads for four products. With two A and two B there would be
// four loads, but eight tiles in use halve the rate of the unit if two threads share a core. A single token
// of pairs uses a tile with a single row: a sum depends on its own row of A only, and the weights come from
// memory more slowly than the unit multiplies them. For bytes, vectors read weights faster and have the same
// sums. Every step adds its own sum to C, so that sums have one order for any tiles of tokens.
//
// Scale, bias and residual of the sums take the vector units about as long as the matrix unit takes for 384
// columns, an activation longer. So the sums of one pair of tiles are finished while the unit multiplies the
// next, of the same or of the following group.
#pragma once

#include "amx_tiles.h"
#include "prefetch.h"
#include "simd_avx512.h"
#include "tile_rotated.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kTokenTiles = 2;              // multiplied together
constexpr std::size_t kTokenAhead = 16384;  // prefetch distance in bytes of the weights of a single tile

struct PairTiles {
  static constexpr bool kFinal = true;  // sums are products
  template <int kC, int kA, int kB>
  static void multiply() {
    multiply_pair_tiles<kC, kA, kB>();
  }
  static F finish(const float* sums, int, int) { return Simd::load(sums); }
};
struct RotatedTiles {
  static constexpr bool kFinal = false;
  RotatedProduct<> product;

  template <int kC, int kA, int kB>
  static void multiply() {
    multiply_unsigned_tiles<kC, kA, kB>();
  }
  F finish(const float* sums, int token, int row) const {
    return product.finish(Simd::add_int(_mm512_loadu_si512(sums), product.first(token)), token, row);
  }
};

// Finishes the sums of tokens [first, end); `sums` begins at the first one. Not inlined, since loops over
// tiles have no registers left.
template <class Product, typename Activate>
__attribute__((noinline)) void finish_rows(const Product& product, const ProductOutput& out,
                                           const float (*sums)[kGroupRows], int first, int end) {
  const Product of =
      product;  // copies stay in registers: stores of floats may alias the object of a reference
  const ProductOutput to = out;
  for (int token = first; token < end; ++token, ++sums)
    for (int row = 0; row < kGroupRows; row += Simd::kLanes)
      deliver(to, token, row, of.finish(*sums + row, token, row), Activate());
}

// Sums of some tokens that are finished and stored row by row during the steps of the next tiles.
template <class Product>
struct PendingRows {
  Product product;
  ProductOutput out;
  const float (*sums)[kGroupRows] = nullptr;
  int token = 0, end = 0;
  int of_step = 0;

  void begin_tile(int steps) { of_step = ceil_div(end - token, steps); }
  void step() { finish(std::min(token + of_step, end)); }
  void finish(int until) {
    if (token == until) return;
    with_activation(out.activation, [&]<typename Activate>(Activate) {
      finish_rows<Product, Activate>(product, out, sums, token, until);
    });
    sums += until - token;
    token = until;
  }
};

// Multiplies the two panels of a group by kTiles tiles of tokens.
template <class Product, int kTiles>
void multiply_panel_tiles(const PairBlock* block, int n_blocks, const std::byte* x, std::size_t x_bytes,
                          float* out, std::size_t stride, NextLines& next, PendingRows<Product>& pending) {
  const std::size_t row_bytes = stride * sizeof *out;
  const std::byte* second_x = x + std::size_t(kTileTokens) * x_bytes;
  float* second_out = out + std::size_t(kTileTokens) * stride;
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (kTiles == 2) {
    zero_tile<2>();
    zero_tile<3>();
  }
  NextLines lines = next;  // copy in registers
  lines.begin_tile(n_blocks);
  PendingRows<Product> rows = pending;
  rows.begin_tile(n_blocks);
  for (int b = 0; b < n_blocks; ++b, ++block) {
    load_tile<6, 16, kTileRowBytes>(block->pairs[0]);
    load_tile_rows<4>(x + b * kTileRowBytes, x_bytes);
    Product::template multiply<0, 4, 6>();
    lines.step();
    if constexpr (kTiles == 2) {
      load_tile_rows<4>(second_x + b * kTileRowBytes, x_bytes);
      Product::template multiply<2, 4, 6>();
      load_tile<6, 16, kTileRowBytes>(block->pairs[1]);
      Product::template multiply<3, 4, 6>();
      load_tile_rows<4>(x + b * kTileRowBytes, x_bytes);
      Product::template multiply<1, 4, 6>();
    } else {
      load_tile<7, 16, kTileRowBytes>(block->pairs[1]);
      Product::template multiply<1, 4, 7>();
    }
    rows.step();
  }
  next = lines;
  store_tile_rows<0>(out, row_bytes);
  store_tile_rows<1>(out + kPanelRows, row_bytes);
  if constexpr (kTiles == 2) {
    store_tile_rows<2>(second_out, row_bytes);
    store_tile_rows<3>(second_out + kPanelRows, row_bytes);
  }
}

// Multiplies successive groups by the same tokens. The last sums of a group are finished during the first
// products of the next.
template <class Product>
class GroupProducts {
 public:
  GroupProducts(const void* x, std::size_t x_bytes, int count)
      : x_(static_cast<const std::byte*>(x)), x_bytes_(x_bytes), count_(count) {
    keep_tile_config<kTileRowBytes>();
  }
  ~GroupProducts() { pending_.finish(pending_.end); }

  void multiply(const Product& product, const PairBlock* blocks, int n_blocks, const ProductOutput& out,
                const PrefetchRange& next) {
    const int rest = count_ % kTileTokens,
              full = count_ - rest;  // tokens in the partial tile, and in full ones
    NextLines lines(next, ceil_div(full, kTokenTiles * kTileTokens));
    const auto multiply_tiles = [&](auto tiles, int token, int n, NextLines& meanwhile) {
      const std::byte* from = x_ + std::size_t(token) * x_bytes_;
      if (Product::kFinal && out.is_plain() && n == tiles * kTileTokens)
        return multiply_panel_tiles<Product, tiles>(blocks, n_blocks, from, x_bytes_, out.row(token),
                                                    out.stride, meanwhile, pending_);
      multiply_panel_tiles<Product, tiles>(blocks, n_blocks, from, x_bytes_, sums_[current_][0], kGroupRows,
                                           meanwhile, pending_);
      pending_ = {product, out, sums_[current_], token, token + n};
      current_ = 1 - current_;
    };
    constexpr std::integral_constant<int, kTokenTiles> kTwo;
    constexpr std::integral_constant<int, 1> kOne;
    int t = 0;
    for (; t + kTokenTiles * kTileTokens <= full; t += kTokenTiles * kTileTokens)
      multiply_tiles(kTwo, t, kTokenTiles * kTileTokens, lines);
    if (t < full) multiply_tiles(kOne, t, kTileTokens, lines);
    if (rest > 0) {
      // Few tokens wait for memory: prefetches their weights further ahead than the processor does.
      const auto* ahead = reinterpret_cast<const std::byte*>(blocks) + kTokenAhead;
      NextLines own({ahead, full > 0 ? 0 : std::size_t(n_blocks) * sizeof(PairBlock)}, 1);
      multiply_tiles(kOne, full, rest, own);
    }
  }

 private:
  alignas(64) float sums_[2][kTokenTiles * kTileTokens][kGroupRows];
  const std::byte* const x_;
  const std::size_t x_bytes_;
  const int count_;
  int current_ = 0;  // index of the sums that tiles are stored in; the other ones are pending
  PendingRows<Product> pending_{};
};

void multiply_pairs_amx(const PairBlock* blocks, int n_blocks, const PairRows& x, int first, int count,
                        const ProductOutput& out, const PrefetchRange& next) {
  GroupProducts<PairTiles>(x.row(first), x.stride * sizeof *x.data, count)
      .multiply(PairTiles(), blocks, n_blocks, out, next);
}

void multiply_rotated_amx(const PackedMatrix& weight, GroupRange groups, const RotatedRows& x, int first,
                          int count, const ProductOutput& out, const PrefetchRange& next) {
  if (weight.packing == Packing::kRotatedWide || count <= kFewPanelTokens)
    return kernels_avx512vnni().multiply_rotated(weight, groups, x, first, count, out, next);
  GroupProducts<RotatedTiles> products(x.row(first), x.stride, count);
  each_group(weight, groups, out, next,
             [&](int group, const ProductOutput& own, const PrefetchRange& following) {
               products.multiply(RotatedTiles{{weight.scales(group), x.terms + first}}, weight.pairs(group),
                                 weight.blocks_per_row(), own, following);
             });
}

}  // namespace
}  // namespace metal_prefill::cpu
