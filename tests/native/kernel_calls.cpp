#include "kernel_calls.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/packing.h"
#include "cpu/kv_pages.h"
#include "cpu/ops.h"

namespace metal_prefill::cpu::calls {

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Memory of tiles with blocks of some columns for the rows of x, whose first row is token `first`.
template <class Tile>
struct TileMemory {
  Buffer memory;
  TileRows<Tile> rows;

  TileMemory(const Matrix& x, int first, int block_cols) {
    const int tokens = int(x.shape(0)), cols = int(x.shape(1));
    if (cols % block_cols != 0)
      throw std::invalid_argument("cols must be a multiple of " + std::to_string(block_cols));
    rows.blocks = cols / block_cols;
    const std::size_t n_tiles = std::size_t(ceil_div(first + tokens, kTileTokens));
    memory = Buffer(n_tiles * std::size_t(rows.blocks) * sizeof(Tile), "activations");
    rows.tiles = memory.as<Tile>();
  }
};

// Rows of x quantized into tiles.
struct Tiles : TileMemory<ActivationTile> {
  Tiles(const Kernels& kernels, const Matrix& x, int first) : TileMemory(x, first, kBlockCols) {
    const int tokens = int(x.shape(0)), cols = int(x.shape(1));
    for (int t = 0; t < tokens;) {
      const int lane = (first + t) % kTileTokens;
      const int n = std::min(tokens - t, kTileTokens - lane);
      kernels.quantize(x.data() + std::size_t(t) * std::size_t(cols), std::size_t(cols), lane, n, rows.blocks,
                       rows.tile(first + t));
      t += n;
    }
  }
};

// The same in super-blocks. Unused tokens of a tile are NaN.
struct SuperTiles : TileMemory<SuperTile> {
  SuperTiles(const Kernels& kernels, const Matrix& x, int first) : TileMemory(x, first, kSuperCols) {
    std::memset(memory.data(), 0xff, memory.bytes());
    const int tokens = int(x.shape(0)), cols = int(x.shape(1));
    for (int t = 0; t < tokens; ++t)
      kernels.quantize_super(x.data() + std::size_t(t) * std::size_t(cols), (first + t) % kTileTokens,
                             rows.blocks, rows.tile(first + t));
  }
};

// A matrix of a file, packed for products in a mode.
struct PackedWeight : Linear {
  Buffer blocks;

  PackedWeight(const Kernels& kernels, Compute compute, std::uint32_t type, const Bytes& weight, int rows,
               std::size_t cols)
      : Linear(linear_of({"weight", TensorType(type), rows, int(cols),
                          reinterpret_cast<const std::byte*>(weight.data()), weight.shape(0)},
                         compute, kernels)),
        blocks(packed.group_bytes() * std::size_t(packed.groups()), "weights") {
    require(tensor.bytes == row_bytes(tensor.type, cols) * std::size_t(rows), "weight has another size");
    require(packed.packing != Packing::kNone, "the type is not packed in this mode");
    packed.blocks = blocks.data();
    const Buffer memory(packing_bytes_of(*this), "memory to pack");
    for (int group = 0; group < packed.groups(); ++group) pack(*this, group, kernels, memory.data());
  }
};

void require_room(const OutMatrix& out, std::size_t rows, int groups) {
  require(out.shape(0) >= rows && int(out.shape(1)) >= groups * kGroupRows, "out is too small");
}

// Rows as a kernel takes them, padded with zeros.
FloatRows padded_rows(const Matrix& rows) {
  return {const_cast<float*>(rows.data()), rows.shape(1)};
}

void require_padded(const Matrix& weight, int cols, const Matrix& x, const OutMatrix& out) {
  const std::size_t padded = round_up(std::size_t(cols), kFloatPad);
  require(weight.shape(0) == kGroupRows && weight.shape(1) == padded && x.shape(1) == padded, "wrong shape");
  require_room(out, x.shape(0), 1);
}

}  // namespace

void quantize(const std::string& set, const Matrix& x, int first, OutBytes codes, OutMatrix terms) {
  const Tiles tiles(kernels_named(set), x, first);
  const std::size_t tokens = x.shape(0), cols = x.shape(1), blocks = std::size_t(tiles.rows.blocks);
  require(codes.shape(0) == tokens && codes.shape(1) == cols && terms.shape(0) == tokens &&
              terms.shape(1) == 4 * blocks,
          "wrong shape");
  for (std::size_t t = 0; t < tokens; ++t) {
    const int token = first + int(t), lane = token % kTileTokens;
    for (std::size_t b = 0; b < blocks; ++b) {
      const ActivationTile& tile = tiles.rows.tile(token)[b];
      std::copy_n(tile.q[lane], kBlockCols, codes.data() + t * cols + b * kBlockCols);
      const auto& [scale, scaled_sum, start, start_half] = tile.terms[lane];
      const float values[] = {scale, scaled_sum, float(start), float(start_half)};
      std::copy_n(values, 4, terms.data() + 4 * (t * blocks + b));
    }
  }
}

void multiply_int8(const std::string& set, std::uint32_t type, const Bytes& weight, int rows, const Matrix& x,
                   int first, OutMatrix out) {
  const Kernels& kernels = kernels_named(set);
  const int tokens = int(x.shape(0));
  const PackedWeight linear(kernels, Compute::kInt8, type, weight, rows, x.shape(1));
  const PackedMatrix& packed = linear.packed;
  require_room(out, x.shape(0), packed.groups());
  // Kernels that compute whole tiles must leave the rows before the first one unchanged.
  constexpr float kGuard = -54321.0f;
  const std::size_t stride = out.shape(1), before = kTileTokens * stride, size = out.shape(0) * stride;
  std::vector<float> memory(before + size, kGuard);
  float* results = memory.data() + before;
  std::copy_n(out.data(), size, results);
  if (linear.super) {
    const SuperTiles tiles(kernels, x, first);
    for (int group = 0; group < packed.groups(); ++group)
      kernels.multiply_super(packed, group, tiles.rows, first, tokens, results + group * kGroupRows, stride);
  } else {
    const Tiles tiles(kernels, x, first);
    const Buffer scratch(scratch_bytes_of(linear), "scratch");
    for (int group = 0; group < packed.groups(); ++group)
      multiply_packed(kernels, packed, group, tiles.rows, first, tokens, results + group * kGroupRows, stride,
                      scratch.data());
  }
  if (kernels.end_phase) kernels.end_phase();
  require(
      std::count(memory.begin(), memory.begin() + std::ptrdiff_t(before), kGuard) == std::ptrdiff_t(before),
      "wrote before the first row");
  std::copy_n(results, size, out.data());
}

void multiply_float(const std::string& set, const Matrix& weight, int cols, const Matrix& x, OutMatrix out) {
  require_padded(weight, cols, x, out);
  kernels_named(set).multiply_float(padded_rows(weight), cols, padded_rows(x), 0, int(x.shape(0)), out.data(),
                                    out.shape(1), {});
}

void multiply_float_panels(const std::string& set, const Matrix& weight, int cols, const Matrix& x,
                           OutMatrix out) {
  require_padded(weight, cols, x, out);
  const Kernels& kernels = kernels_named(set);
  const int n_blocks = int(x.shape(1)) / kFloatPad;
  const Buffer blocks(std::size_t(n_blocks) * sizeof(FloatBlock), "weights");
  kernels.to_blocks(padded_rows(weight), n_blocks, blocks.as<FloatBlock>());
  kernels.multiply_float_panels(blocks.as<FloatBlock>(), n_blocks, padded_rows(x), 0, int(x.shape(0)),
                                {out.data(), out.shape(1)}, {});
}

void multiply_half(const std::string& set, const Halves& weight, bool bfloat16, const Matrix& x,
                   OutMatrix out) {
  const std::size_t cols = x.shape(1);
  require(cols % kFloatPad == 0 && weight.shape(0) == kGroupRows * cols, "wrong shape");
  require_room(out, x.shape(0), 1);
  kernels_named(set).multiply_half(weight.data(), bfloat16, int(cols), padded_rows(x), 0, int(x.shape(0)),
                                   out.data(), out.shape(1));
}

void multiply_pairs(const std::string& set, std::uint32_t type, const Bytes& weight, int rows,
                    const Matrix& x, int first, OutMatrix out) {
  const Kernels& kernels = kernels_named(set);
  require(kernels.multiply_pairs, "the set has no products of bfloat16 pairs");
  const std::size_t cols = x.shape(1), tokens = x.shape(0), padded = round_up(cols, kPairPad);
  const PackedWeight linear(kernels, Compute::kBf16, type, weight, rows, cols);
  const PackedMatrix& packed = linear.packed;
  require_room(out, tokens, packed.groups());
  // Unused rows of the last tile are NaN.
  const std::size_t stride = padded + kPairPad, n_rows = round_up(std::size_t(first) + tokens, kTileTokens);
  const Buffer memory((n_rows + kTileTokens) * stride * sizeof(std::uint16_t), "activations");
  std::memset(memory.data(), 0xff, memory.bytes());
  const PairRows activations{memory.as<std::uint16_t>(), stride};
  for (std::size_t t = 0; t < tokens; ++t) {
    std::uint16_t* row = activations.row(first + int(t));
    std::fill_n(row, padded, std::uint16_t(0));
    kernels.round_to_bfloat16(x.data() + t * cols, cols, 1, int(cols), row, stride);
  }
  const Buffer scratch(scratch_bytes_of(linear), "scratch");
  for (int group = 0; group < packed.groups(); ++group)
    kernels.multiply_pairs(pairs_of_group(kernels, packed, group, scratch.data()), int(padded) / kBlockCols,
                           activations, first, int(tokens), {out.data() + group * kGroupRows, out.shape(1)},
                           {});
  if (kernels.end_phase) kernels.end_phase();
}

void multiply_rotated(const std::string& set, std::uint32_t type, const Bytes& weight, int rows,
                      const Matrix& x, int first, bool wide, int activation, OutMatrix out) {
  const Kernels& kernels = kernels_named(set);
  const std::size_t cols = x.shape(1), tokens = x.shape(0);
  const PackedWeight linear(kernels, wide ? Compute::kInt16 : Compute::kW8A8, type, weight, rows, cols);
  require(linear.wide() == wide, "the set has no products in 16 bits");
  const PackedMatrix& packed = linear.packed;
  require_room(out, tokens, packed.groups());
  // Unused rows of the last tile hold any codes.
  const std::size_t stride = RotatedRows::stride_of(cols, wide, kernels.limit_pairs);
  const std::size_t n_rows = round_up(std::size_t(first) + tokens, kTileTokens);
  const Buffer codes((n_rows + kTileTokens) * stride, "activations"),
      terms(n_rows * sizeof(RotatedRows::Terms), "terms");
  std::memset(codes.data(), 0x55, codes.bytes());
  const RotatedRows activations{codes.data(), stride, terms.as<RotatedRows::Terms>()};
  const Buffer row(scratch_bytes_of(linear), "a row");
  for (std::size_t t = 0; t < tokens; ++t)
    kernels.rotate_activations(x.data() + t * cols, int(cols), wide, row.as<float>(), activations,
                               first + int(t));
  require(activation >= -1 && activation <= int(Activation::kClampedSilu), "no such activation");
  const auto kind = Activation(activation);
  kernels.multiply_rotated(packed, {0, packed.groups()}, activations, first, int(tokens),
                           {out.data(), out.shape(1), nullptr, false, activation < 0 ? nullptr : &kind}, {});
  if (kernels.end_phase) kernels.end_phase();
}

void rotate(const std::string& set, const Matrix& x, bool wide, OutBytes codes, OutVector scales) {
  const Kernels& kernels = kernels_named(set);
  const std::size_t cols = x.shape(1), padded = round_up(cols, kRotatedCols), bytes = padded * (wide ? 2 : 1);
  require(codes.shape(0) == x.shape(0) && codes.shape(1) == bytes && scales.shape(0) == x.shape(0),
          "wrong shape");
  const Buffer memory(padded * sizeof(float), "a row");
  for (std::size_t t = 0; t < x.shape(0); ++t) {
    RotatedRows::Terms terms;
    std::fill_n(memory.as<float>(), padded, std::numeric_limits<float>::quiet_NaN());
    (wide ? kernels.rotate_wide : kernels.rotate)(x.data() + t * cols, int(cols), memory.as<float>(),
                                                  reinterpret_cast<std::byte*>(codes.data() + t * bytes),
                                                  terms);
    scales.data()[t] = terms.scale;
  }
}

void rms_norm(const std::string& set, const Vector& x, const Vector& weight, float eps, OutVector out) {
  require(weight.shape(0) == x.shape(0) && out.shape(0) >= x.shape(0), "wrong shape");
  kernels_named(set).rms_norm(x.data(), weight.data(), eps, int(x.shape(0)), out.data());
}

void layer_norm(const std::string& set, const Vector& x, const Vector& weight, const Vector& bias, float eps,
                OutVector out) {
  const std::size_t n = x.shape(0);
  require(weight.shape(0) == n && (bias.shape(0) == 0 || bias.shape(0) == n) && out.shape(0) >= n,
          "wrong shape");
  kernels_named(set).layer_norm(x.data(), weight.data(), bias.shape(0) == 0 ? nullptr : bias.data(), eps,
                                int(n), out.data());
}

void rope(const std::string& set, OutVector head, const Vector& cos_sin, bool neox) {
  const int pairs = int(cos_sin.shape(0) / 2);
  require(head.shape(0) >= std::size_t(2 * pairs), "wrong shape");
  kernels_named(set).rope(head.data(), cos_sin.data(), pairs,
                          neox ? RopeStyle::kNeox : RopeStyle::kInterleaved);
}

void gated(const std::string& set, const Vector& gate, const Vector& up, int activation, OutVector out) {
  require(gate.shape(0) == up.shape(0) && out.shape(0) >= gate.shape(0), "wrong shape");
  require(activation >= 0 && activation <= int(Activation::kClampedSilu), "no such activation");
  kernels_named(set).gated(gate.data(), up.data(), Activation(activation), int(gate.shape(0)), out.data());
}

void add_products(const std::string& set, const Matrix& products, const Vector& bias, int columns, bool add,
                  OutMatrix out) {
  require(products.shape(1) == kGroupRows && (bias.shape(0) == 0 || bias.shape(0) == kGroupRows) &&
              columns >= 1 && columns <= kGroupRows && out.shape(0) >= products.shape(0) &&
              int(out.shape(1)) >= columns,
          "wrong shape");
  kernels_named(set).add_products(products.data(), bias.shape(0) > 0 ? bias.data() : nullptr,
                                  int(products.shape(0)), columns, add, out.data(), out.shape(1));
}

void scan(const std::string& set, const Matrix& x, const Matrix& b, const Matrix& c, const Vector& dt,
          const Vector& factors, int piece, OutMatrix state, OutMatrix out) {
  const std::size_t tokens = x.shape(0), dim = x.shape(1), rows = b.shape(1);
  require(b.shape(0) == tokens && c.shape(0) == tokens && c.shape(1) == rows && dt.shape(0) == tokens &&
              factors.shape(0) == 3 && piece > 0,
          "wrong shape");
  require(state.shape(0) >= rows && state.shape(1) == dim && out.shape(0) >= tokens && out.shape(1) >= dim,
          "out is too small");
  // As in the engine, where a row has all three.
  const std::size_t stride = dim + 2 * rows;
  std::vector<float> joined(tokens * stride);
  for (std::size_t t = 0; t < tokens; ++t) {
    float* row = joined.data() + t * stride;
    std::copy_n(x.data() + t * dim, dim, row);
    std::copy_n(b.data() + t * rows, rows, row + dim);
    std::copy_n(c.data() + t * rows, rows, row + dim + rows);
  }
  for (std::size_t first = 0; first < tokens; first += std::size_t(piece)) {
    const float* row = joined.data() + first * stride;
    kernels_named(set).scan({.x = row,
                             .b = row + dim,
                             .c = row + dim + rows,
                             .dt = dt.data() + first,
                             .y = out.data() + first * out.shape(1),
                             .x_stride = stride,
                             .dt_stride = 1,
                             .y_stride = out.shape(1),
                             .dim = int(dim),
                             .rows = int(rows),
                             .a = factors.data()[0],
                             .dt_bias = factors.data()[1],
                             .skip = factors.data()[2],
                             .state = state.data()},
                            int(std::min(std::size_t(piece), tokens - first)));
  }
}

void soft_cap(const std::string& set, float cap, OutVector x) {
  kernels_named(set).soft_cap(x.data(), cap, int(x.shape(0)));
}

void relative_scores(const std::string& set, const Vector& q, const Matrix& k, const Matrix& keys,
                     const Matrix& queries, const Vector& row_of, float scale, OutVector out) {
  const std::size_t n = k.shape(0), dim = q.shape(0);
  require(k.shape(1) == dim && keys.shape(1) >= dim && queries.shape(0) == keys.shape(0) &&
              queries.shape(1) == keys.shape(1) && row_of.shape(0) == n && out.shape(0) >= n,
          "wrong shape");
  for (std::size_t i = 0; i < n; ++i)
    require(row_of.data()[i] >= 0 && row_of.data()[i] < float(keys.shape(0)), "no such row");
  if (n == 0) return;
  kernels_named(set).relative_scores({.q = q.data(),
                                      .k = k.data(),
                                      .k_stride = dim,
                                      .keys = keys.data(),
                                      .queries = queries.data(),
                                      .stride = keys.shape(1),
                                      .row_of = row_of.data() + n - 1,
                                      .positions = int(n),
                                      .dim = int(dim),
                                      .scale = scale},
                                     out.data());
}

void apply_gate(const std::string& set, const Vector& gate, OutVector x) {
  require(x.shape(0) >= gate.shape(0), "wrong shape");
  kernels_named(set).apply_gate(gate.data(), int(gate.shape(0)), x.data());
}

void gated_delta(const std::string& set, const Vector& q, const Vector& k, const Vector& v, float decay,
                 float beta, OutMatrix state, OutVector out) {
  require(q.shape(0) == k.shape(0) && state.shape(0) == k.shape(0) && state.shape(1) == kGatedDeltaColumns &&
              v.shape(0) <= kGatedDeltaColumns && out.shape(0) >= v.shape(0),
          "wrong shape");
  const GatedDeltaToken token = {.q = q.data(),
                                 .k = k.data(),
                                 .v = v.data(),
                                 .decay = decay,
                                 .beta = beta,
                                 .key_dim = int(k.shape(0)),
                                 .columns = int(v.shape(0))};
  kernels_named(set).gated_delta(token, state.data(), out.data());
}

double sum_exp(const std::string& set, const Vector& x, float shift) {
  return kernels_named(set).sum_exp(x.data(), shift, int(x.shape(0)));
}

void half_to_float(const std::string& set, const Halves& in, bool bfloat16, OutVector out) {
  require(out.shape(0) >= in.shape(0), "out is too small");
  const Kernels& kernels = kernels_named(set);
  (bfloat16 ? kernels.bfloat16_to_float : kernels.half_to_float)(in.data(), out.data(), int(in.shape(0)));
}

void round_to_bfloat16(const std::string& set, const Vector& x, OutHalves out) {
  const Kernels& kernels = kernels_named(set);
  require(kernels.round_to_bfloat16, "the set has no products of bfloat16 pairs");
  require(out.shape(0) >= x.shape(0), "out is too small");
  kernels.round_to_bfloat16(x.data(), x.shape(0), 1, int(x.shape(0)), out.data(), x.shape(0));
}

void attention(const std::string& set, const Matrix& q, const Matrix& keys, const Matrix& values,
               const std::string& kv_dtype, int window, float scale, int first, int count, OutMatrix out,
               const Vector& sinks, bool exact, bool both_ways, int key_multiple, bool by_splits) {
  const Kernels& kernels = kernels_named(set);
  const int positions = int(keys.shape(0)), key_dim = int(keys.shape(1)), value_dim = int(values.shape(1));
  const int tokens = int(q.shape(0)), heads = int(q.shape(1)) / key_dim;
  require(tokens <= positions && int(values.shape(0)) == positions && int(q.shape(1)) == heads * key_dim &&
              first >= 0 && first + count <= tokens && out.shape(0) >= q.shape(0) &&
              int(out.shape(1)) == heads * value_dim && (sinks.shape(0) == 0 || int(sinks.shape(0)) == heads),
          "wrong shape");
  Config config;
  config.n_layers = config.n_kv_heads = 1;
  config.key_dim = key_dim, config.value_dim = value_dim;
  const KvLayout layout = kv_dtype == "f32"    ? KvLayout::kFloat
                          : kv_dtype == "q8_0" ? KvLayout::kQ8
                          : exact              ? KvLayout::kHalf
                                               : kernels.half_layout;
  KvPages cache(config, layout, key_multiple > 0 ? key_multiple : kernels.key_multiple, 8192, true);
  // Pages in random order, with NaN at all positions that were not stored.
  const int n_pages = (positions + kKeySpan - 1) / kKeySpan;
  std::vector<PageId> ids;
  for (int i = 0; i < n_pages; ++i) ids.push_back(PageId(i % 2 == 0 ? i / 2 : n_pages - 1 - i / 2));
  cache.grow(ids.size());
  for (const PageId id : ids) cache.taken(id);
  std::vector<std::byte*> pages(ids.size());
  cache.addresses(ids, pages.data());
  // Blocks of keys are stored in pieces of all lengths, and so from all positions on.
  for (int p = 0, piece = 1; p < positions; piece = piece % kKeyBlock + 1) {
    std::byte* page = pages[std::size_t(p / kKeySpan)];
    const int in_page = p % kKeySpan, count = std::min({piece, kKeyBlock - p % kKeyBlock, positions - p});
    kernels.store_keys(keys.data() + std::size_t(p) * std::size_t(key_dim), std::size_t(key_dim), count,
                       key_dim, cache.key_stride(0), layout, page + cache.keys(0, 0), in_page);
    kernels.store_values(values.data() + std::size_t(p) * std::size_t(value_dim), std::size_t(value_dim),
                         count, value_dim, cache.value_stride(0), layout, page + cache.values(0, 0), in_page);
    p += count;
  }
  AttentionHead head = {.q = q.data(),
                        .q_stride = q.shape(1),
                        .q_step = std::size_t(keys.shape(1)),
                        .out = out.data(),
                        .out_stride = out.shape(1),
                        .pages = pages.data(),
                        .keys = cache.keys(0, 0),
                        .values = cache.values(0, 0),
                        .layout = layout,
                        .key_dim = key_dim,
                        .value_dim = value_dim,
                        .key_stride = cache.key_stride(0),
                        .value_stride = cache.value_stride(0),
                        .heads = heads,
                        .position = positions - tokens,
                        .window = window,
                        .length = both_ways ? positions : 0,
                        .scale = scale,
                        .sinks = sinks.shape(0) > 0 ? sinks.data() : nullptr};
  if (by_splits) {
    // The last split first; values that no row writes stay NaN.
    const int n = ceil_div(positions, kSplitPositions);
    const std::size_t size = out.shape(0) * out.shape(1), row_sums = std::size_t(heads);
    std::vector<float> results(std::size_t(n) * size, std::numeric_limits<float>::quiet_NaN());
    std::vector<SoftmaxSum> sums(std::size_t(n) * out.shape(0) * row_sums);
    head.sums_stride = row_sums;
    for (head.split = n - 1; head.split >= 0; --head.split) {
      head.out = results.data() + std::size_t(head.split) * size;
      head.sums = sums.data() + std::size_t(head.split) * out.shape(0) * row_sums;
      kernels.attention(head, first, count);
    }
    for (int token = first; token < first + count; ++token)
      for (int h = 0; h < heads; ++h) {
        const std::size_t at = std::size_t(token) * out.shape(1) + std::size_t(h * value_dim);
        kernels.combine_splits(results.data() + at, size, sums.data() + std::size_t(token * heads + h),
                               out.shape(0) * row_sums, n, value_dim, head.sinks ? head.sinks + h : nullptr,
                               out.data() + at);
      }
  } else {
    kernels.attention(head, first, count);
  }
  if (kernels.end_phase) kernels.end_phase();
}

}  // namespace metal_prefill::cpu::calls
