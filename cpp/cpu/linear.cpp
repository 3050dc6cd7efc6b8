// Products of a step: matrices are cut into groups of 32 rows, chunks into blocks of tokens.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

// Tokens of an item at most: what it unpacks is used for all, its results fit the L1 cache.
constexpr int kTokenBlock = 192;
// The same where quantized weights become pairs, which takes as long as many tokens do.
constexpr int kWidenedTokenBlock = 512;

// What unpacking a group of weights costs, in tokens that are multiplied meanwhile.
int unpacking_tokens(const Linear& linear) {
  if (!linear.pairs) return 8;
  return linear.packed.packing == Packing::kPairs ? 0 : 64;
}

constexpr int kFewTokens = 3;  // for which expanding 16-bit weights to float32 first costs more than it saves

constexpr int kNarrowTokens = 2;  // for which widening a group first costs more than it saves

using Tile = float[kWidenedTokenBlock][kGroupRows];

// The rows of a pass in blocks of about equal length. A block begins with a tile of quantized activations.
struct TokenBlocks {
  int rows, count, length;

  RowRange range(int block) const {
    const int first = block * length;
    return {first, std::min(rows - first, length)};
  }
};

// An item is a group of weights and a block of tokens. Few blocks unpack weights seldom; more of them keep
// all threads at work until the end. Takes the number that is done first.
TokenBlocks blocks_of(int rows, int groups, int threads, int unpacking) {
  const int most = unpacking > kTileTokens ? kWidenedTokenBlock : kTokenBlock;
  TokenBlocks best = {rows, 0, 0};
  int best_cost = 0;
  for (int count = ceil_div(rows, most); count <= ceil_div(rows, kTileTokens); ++count) {
    const int length = round_up(ceil_div(rows, count), kTileTokens);
    const int blocks = ceil_div(rows, length);
    const int cost = ceil_div(groups * blocks, threads) * (length + unpacking);
    if (best.count == 0 || cost < best_cost) best = {rows, blocks, length}, best_cost = cost;
  }
  return best;
}

// Whether a group has all of its rows, and these need no padding.
bool is_whole(const Tensor& tensor, int group) {
  return std::size_t(tensor.cols) % kFloatPad == 0 && (group + 1) * kGroupRows <= tensor.rows;
}

// Rows of a group in float32: where they lie in the file, or a copy that is zero beyond the matrix and in the
// padding.
FloatRows expand_group(const Context& c, const Linear& linear, int group) {
  const Tensor& tensor = linear.tensor;
  if (tensor.type == TensorType::kF32 && is_whole(tensor, group))
    return {reinterpret_cast<float*>(const_cast<std::byte*>(tensor.row(group * kGroupRows))),
            std::size_t(tensor.cols)};
  FloatRows rows{c.scratch.weights.as<float>(), round_up(std::size_t(tensor.cols), kFloatPad)};
  for (int r = 0; r < kGroupRows; ++r) {
    float* out = rows.row(r);
    const int row = group * kGroupRows + r;
    int filled = 0;
    if (row < tensor.rows) {
      filled = tensor.cols;
      const auto* bits = reinterpret_cast<const std::uint16_t*>(tensor.row(row));
      if (tensor.type == TensorType::kF16) {
        c.kernels.half_to_float(bits, out, filled);
      } else if (tensor.type == TensorType::kBF16) {
        c.kernels.bfloat16_to_float(bits, out, filled);
      } else {
        dequantize_row(tensor.type, tensor.row(row), out, std::size_t(filled));
      }
    }
    std::fill(out + filled, out + rows.stride, 0.0f);
  }
  return rows;
}

// Whether a group of 16-bit floats can be multiplied where it lies.
bool lies_ready(const Tensor& tensor, int group) {
  return (tensor.type == TensorType::kF16 || tensor.type == TensorType::kBF16) && is_whole(tensor, group);
}

// Where the group after this one lies in packed memory, and where its rows lie in the file.
PrefetchRange next_group(const PackedMatrix& packed, int group) {
  if (packed.packing != Packing::kPairs || group + 1 >= packed.groups()) return {};
  return {packed.group(group + 1), packed.group_bytes()};
}
PrefetchRange next_group(const Tensor& tensor, int group) {
  const int begin = (group + 1) * kGroupRows, end = std::min(begin + kGroupRows, tensor.rows);
  if (begin >= end) return {};
  return {tensor.row(begin), tensor.bytes / std::size_t(tensor.rows) * std::size_t(end - begin)};
}

// out[t] = the product of a group of rows with token range.first + t.
void multiply_group(const Context& c, const Linear& linear, int group, const Activations& x, RowRange range,
                    float* out, std::size_t stride) {
  const int n_rows = std::min(kGroupRows, linear.packed.rows - group * kGroupRows);
  c.scratch.multiply_adds += double(n_rows) * linear.packed.cols * range.count;
  if (linear.int8()) {
    multiply_packed(c.kernels, linear.packed, group, x.int8, range.first, range.count, out, stride,
                    c.scratch.weights.data());
  } else if (linear.pairs) {
    c.kernels.multiply_pairs(pairs_of_group(c.kernels, linear.packed, group, c.scratch.weights.data()),
                             ceil_div(linear.packed.cols, kBlockCols), x.bfloat16, range.first, range.count,
                             out, stride, next_group(linear.packed, group));
  } else if (range.count <= kFewTokens && lies_ready(linear.tensor, group)) {
    c.kernels.multiply_half(reinterpret_cast<const std::uint16_t*>(linear.tensor.row(group * kGroupRows)),
                            linear.tensor.type == TensorType::kBF16, linear.tensor.cols, x.f32, range.first,
                            range.count, out, stride);
  } else {
    const FloatRows rows = expand_group(c, linear, group);
    c.kernels.multiply_float(rows, linear.tensor.cols, x.f32, range.first, range.count, out, stride,
                             next_group(linear.tensor, group));
  }
}

// A phase of items that multiply rows of x.
template <typename F>
void for_each_of(const Context& c, int items, const NormedRows& x, F&& body) {
  bool prepared = false;
  c.for_each(items, [&](int item) {
    if (!prepared) x.prepare(c);
    prepared = true;
    body(item);
  });
}

void update(Best& best, const float* values, int n, int index) {
  unsigned candidates = 0;  // as wide as a float, so that compilers make vectors of the loop
  for (int i = 0; i < n; ++i) candidates |= unsigned(!(values[i] < best.value));
  if (candidates == 0 && best.index >= 0) return;
  for (int i = 0; i < n; ++i) {
    if (std::isnan(values[i])) continue;
    const bool better =
        best.index < 0 || values[i] > best.value || (values[i] == best.value && index + i < best.index);
    if (better) best = {values[i], index + i};
  }
}

}  // namespace

void multiply_packed(const Kernels& kernels, const PackedMatrix& weight, int group, const Int8Rows& x,
                     int first, int count, float* out, std::size_t stride, std::byte* scratch) {
  if (!is_narrow(weight.packing)) return kernels.multiply_int8(weight, group, x, first, count, out, stride);
  if (count <= kNarrowTokens) {
    for (int t = 0; t < count; ++t)
      kernels.multiply_narrow(weight, group, x, first + t, out + std::size_t(t) * stride);
    return;
  }
  kernels.widen(weight, group, scratch);
  kernels.multiply_int8(wide_group(weight, scratch), 0, x, first, count, out, stride);
}

const PairBlock* pairs_of_group(const Kernels& kernels, const PackedMatrix& weight, int group,
                                std::byte* scratch) {
  if (weight.packing == Packing::kPairs) return weight.pairs(group);
  auto* pairs = reinterpret_cast<PairBlock*>(scratch);
  if (is_narrow(weight.packing)) {
    std::byte* wide = scratch + std::size_t(weight.cols / kBlockCols) * sizeof(PairBlock);
    kernels.widen(weight, group, wide);
    kernels.widen_to_pairs(wide_group(weight, wide), 0, pairs);
  } else {
    kernels.widen_to_pairs(weight, group, pairs);
  }
  return pairs;
}

void multiply(const Context& c, std::initializer_list<Product> products, const NormedRows& x, int rows,
              const AttentionItems* fetch, const CacheWriter* cache) {
  int groups = 0, unpacking = 0;
  for (const Product& p : products) {
    groups += p.weight.packed.groups();
    unpacking = std::max(unpacking, unpacking_tokens(p.weight));
  }
  const TokenBlocks blocks = blocks_of(rows, groups, c.worker.count(), unpacking);
  const auto items_of = [&](const Product& p) { return p.weight.packed.groups() * blocks.count; };
  for_each_of(c, groups * blocks.count, x, [&](int item) {
    if (fetch) fetch->fetch_share(item, groups * blocks.count);
    const Product* p = products.begin();
    for (; item >= items_of(*p); ++p) item -= items_of(*p);
    const int group = item / blocks.count;
    const RowRange range = blocks.range(item % blocks.count);
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, p->weight.packed.rows - row);
    const auto* bias = p->bias && *p->bias ? floats(*p->bias) + row : nullptr;
    float* first_out = p->out.row(range.first) + row;
    if (!p->add && !bias && n_rows == kGroupRows) {
      multiply_group(c, p->weight, group, x.rows(), range, first_out, p->out.stride);
    } else {
      alignas(64) Tile tile;
      multiply_group(c, p->weight, group, x.rows(), range, tile[0], kGroupRows);
      for (int t = 0; t < range.count; ++t) {
        float* out = first_out + std::size_t(t) * p->out.stride;
        if (bias)
          for (int r = 0; r < n_rows; ++r) tile[t][r] += bias[r];
        if (p->add) {
          for (int r = 0; r < n_rows; ++r) out[r] += tile[t][r];
        } else {
          std::copy_n(tile[t], n_rows, out);
        }
      }
    }
    if (cache) cache->computed(c, p->part, row, n_rows);
  });
}

void multiply_gated(const Context& c, const GateAndUp& w, const NormedRows& x, int rows,
                    const Activations& h) {
  const TokenBlocks blocks = blocks_of(rows, w.up.packed.groups(), c.worker.count(), unpacking_tokens(w.up));
  for_each_of(c, w.up.packed.groups() * blocks.count, x, [&](int item) {
    const int group = item / blocks.count;
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, w.up.packed.rows - row);
    const RowRange range = blocks.range(item % blocks.count);
    alignas(64) Tile gates, ups;
    const auto multiply_half = [&](const Linear& half, const Tensor& bias, Tile& out) {
      multiply_group(c, half, group, x.rows(), range, out[0], kGroupRows);
      if (!bias) return;
      for (int t = 0; t < range.count; ++t)
        for (int r = 0; r < n_rows; ++r) out[t][r] += floats(bias)[row + r];
    };
    if (w.gate.tensor) {
      multiply_half(w.gate, w.gate_bias, gates);
      multiply_half(w.up, w.up_bias, ups);
      c.kernels.gated(gates[0], ups[0], w.activation, range.count * kGroupRows, gates[0]);
    } else {
      multiply_half(w.up, w.up_bias, gates);
      c.kernels.activate(gates[0], w.activation, range.count * kGroupRows, gates[0]);
    }
    if (h.forms.f32) {
      for (int t = 0; t < range.count; ++t) std::copy_n(gates[t], n_rows, h.f32.row(range.first + t) + row);
    }
    if (h.forms.int8) {
      for (int t = 0; t < range.count; t += kTileTokens)
        c.kernels.quantize(gates[t], kGroupRows, 0, std::min(range.count - t, kTileTokens), 1,
                           h.int8.tile(range.first + t) + group);
    }
    if (h.forms.bfloat16) {
      for (int t = 0; t < range.count; ++t)
        c.kernels.round_to_bfloat16(gates[t], n_rows, h.bfloat16.row(range.first + t) + row);
    }
  });
}

void multiply_head(const Context& c, const Linear& head, const NormedRows& x, int rows, float* const* logits,
                   int first_best) {
  for_each_of(c, head.packed.groups(), x, [&](int group) {
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, head.packed.rows - row);
    alignas(64) Tile tile;
    multiply_group(c, head, group, x.rows(), {0, rows}, tile[0], kGroupRows);
    for (int t = 0; t < rows; ++t) {
      if (logits[t])
        std::copy_n(tile[t], n_rows, logits[t] + row);
      else
        update(c.scratch.best[std::size_t(first_best + t)], tile[t], n_rows, row);
    }
  });
}

Best best_of(std::span<const Scratch> scratch, int row) {
  Best best;
  for (const Scratch& s : scratch) {
    const Best& other = s.best[std::size_t(row)];
    if (other.index >= 0) update(best, &other.value, 1, other.index);
  }
  return best;
}

}  // namespace metal_prefill::cpu
