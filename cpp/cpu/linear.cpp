// Products of a step: matrices are divided into groups of 32 rows, chunks into blocks of tokens.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

// Maximum tokens of an item: they share unpacked weights, and their results fit the L1 cache.
constexpr int kTokenBlock = 192;
// Maximum if quantized weights are widened to pairs, which takes as long as many tokens, or if panels of
// bytes or pairs come from memory.
constexpr int kLongTokenBlock = 512;
// Tokens of a part in products of panels: with their results they stay in the L1 cache. A multiple of the
// tiles of all sets.
constexpr int kPartTokens = 96;

// Cost of unpacking a group of weights, in tokens that could be multiplied in that time.
int unpacking_tokens(const Linear& linear) {
  return linear.ready_panels() ? 0 : linear.in_panels() ? 64 : 8;
}

constexpr int kFewTokens =
    3;  // maximum tokens for which expanding 16-bit weights first costs more than it saves

constexpr int kNarrowTokens = 2;  // maximum tokens for which widening a group first costs more than it saves

constexpr int kItemsOfThread = 4;  // minimum, so that threads finish together
// Maximum groups of an expert in an item. They are contiguous in memory: a group is prefetched during the
// products of the previous one.
constexpr int kGroupsOfItem = 16;

using Tile = float[kLongTokenBlock][kGroupRows];

// The rows of a pass in blocks of about equal length. A block begins with a tile of quantized activations.
struct TokenBlocks {
  int rows, count, length;

  RowRange range(int block) const {
    const int first = block * length;
    return {first, std::min(rows - first, length)};
  }
};

// Divides rows into at most `count` blocks.
TokenBlocks divided(int rows, int count) {
  const int length = round_up(ceil_div(rows, count), kTileTokens);
  return {rows, ceil_div(rows, length), length};
}

// First item of share `share`.
int share_of(int items, int share, int shares) {
  return int(std::int64_t(items) * share / shares);
}

// Calls body(group) for the groups of range `range`, one of `ranges` of about equal length.
template <typename Body>
void for_each_group(int range, int ranges, int groups, Body&& body) {
  const int end = share_of(groups, range + 1, ranges);
  for (int group = share_of(groups, range, ranges); group < end; ++group) body(group);
}

int most_tokens(const Linear& linear) {
  const bool ready = linear.ready_panels() && !linear.floats();
  return ready || unpacking_tokens(linear) > kTileTokens ? kLongTokenBlock : kTokenBlock;
}

// Divides rows into blocks; an item is a group of weights and a block of tokens. Fewer blocks unpack weights
// less often; more blocks keep all threads busy until the end. Chooses the number that finishes first.
TokenBlocks blocks_of(int rows, int groups, int threads, int most, int unpacking) {
  TokenBlocks best = {rows, 0, 0};
  int best_cost = 0;
  for (int count = ceil_div(rows, most); count <= ceil_div(rows, kTileTokens); ++count) {
    const TokenBlocks blocks = divided(rows, count);
    const int cost = ceil_div(groups * blocks.count, threads) * (blocks.length + unpacking);
    if (best.count == 0 || cost < best_cost) best = blocks, best_cost = cost;
  }
  return best;
}

// Whether a group has all of its rows, without padding.
bool is_whole(const Tensor& tensor, int group) {
  return std::size_t(tensor.cols) % kFloatPad == 0 && (group + 1) * kGroupRows <= tensor.rows;
}

// Rows of a group in float32: in the file, or a copy that is zero beyond the matrix and in the padding.
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

// Memory of the next group: packed, or its rows in the file.
PrefetchRange next_group(const PackedMatrix& packed, int group) {
  if (!in_panels(packed.packing) || group + 1 >= packed.groups()) return {};
  return {packed.group(group + 1), packed.group_bytes()};
}
// A share of the range in whole cache lines.
PrefetchRange lines_of(const PrefetchRange& range, int share, int shares) {
  constexpr std::size_t kLine = 64;
  const std::size_t lines = range.bytes / kLine, n = std::size_t(shares);
  const std::size_t begin = lines * std::size_t(share) / n, end = lines * std::size_t(share + 1) / n;
  return {range.begin + begin * kLine, (end - begin) * kLine};
}
PrefetchRange next_group(const Tensor& tensor, int group) {
  const int begin = (group + 1) * kGroupRows, end = std::min(begin + kGroupRows, tensor.rows);
  if (begin >= end) return {};
  return {tensor.row(begin), tensor.bytes / std::size_t(tensor.rows) * std::size_t(end - begin)};
}

void count_products(const Context& c, const Linear& linear, GroupRange groups, int tokens) {
  const int row = groups.first * kGroupRows,
            n_rows = std::min(groups.count * kGroupRows, linear.packed.rows - row);
  c.scratch.multiply_adds += double(n_rows) * linear.packed.cols * tokens;
}

// The pairs of a group that is multiplied in parts; null if it is multiplied as packed.
const PairBlock* panels_of(const Context& c, const Linear& linear, int group) {
  if (!linear.pairs) return nullptr;
  return pairs_of_group(c.kernels, linear.packed, group, c.scratch.weights.data());
}
// Multiplies groups by a range of tokens. Several groups are allowed only if rows are rotated.
void multiply_panels(const Context& c, const Linear& linear, GroupRange groups, const PairBlock* pairs,
                     const Activations& x, RowRange range, const ProductOutput& out,
                     const PrefetchRange& next) {
  if (pairs)
    c.kernels.multiply_pairs(pairs, ceil_div(linear.packed.cols, kBlockCols), x.bfloat16, range.first,
                             range.count, out, next);
  else if (linear.floats())
    c.kernels.multiply_float_panels(linear.packed.floats(groups.first), linear.packed.blocks_per_row(), x.f32,
                                    range.first, range.count, out, next);
  else
    c.kernels.multiply_rotated(linear.packed, groups, x.rotated, range.first, range.count, out, next);
}

// Multiplies a group of rows, of which the matrix has `columns`, by tokens of a range, from out.row(0) on.
void multiply_group(const Context& c, const Linear& linear, int group, const Activations& x, RowRange range,
                    const ProductOutput& out, int columns = kGroupRows) {
  const bool whole = columns == kGroupRows;
  count_products(c, linear, {group, 1}, range.count);
  if (linear.in_panels() && whole)
    return multiply_panels(c, linear, {group, 1}, panels_of(c, linear, group), x, range, out,
                           next_group(linear.packed, group));
  alignas(64) Tile tile;
  const bool in_place = whole && !out.add && (!out.bias || out.stride == kGroupRows);
  const bool halves = linear.tensor.type == TensorType::kF16 || linear.tensor.type == TensorType::kBF16;
  float* to = in_place ? out.data : tile[0];
  const std::size_t stride = in_place ? out.stride : kGroupRows;
  if (linear.int8()) {
    multiply_packed(c.kernels, linear.packed, group, x.int8, range.first, range.count, to, stride,
                    c.scratch.weights.data());
  } else if (linear.super) {
    c.kernels.multiply_super(linear.packed, group, x.super, range.first, range.count, to, stride);
  } else if (linear.in_panels()) {
    multiply_panels(c, linear, {group, 1}, panels_of(c, linear, group), x, range, {to, stride},
                    next_group(linear.packed, group));
  } else if (range.count <= kFewTokens && halves && is_whole(linear.tensor, group)) {  // needs no copy
    c.kernels.multiply_half(reinterpret_cast<const std::uint16_t*>(linear.tensor.row(group * kGroupRows)),
                            linear.tensor.type == TensorType::kBF16, linear.tensor.cols, x.f32, range.first,
                            range.count, to, stride);
  } else {
    const FloatRows rows = expand_group(c, linear, group);
    c.kernels.multiply_float(rows, linear.tensor.cols, x.f32, range.first, range.count, to, stride,
                             next_group(linear.tensor, group));
  }
  if (!in_place || out.bias)
    c.kernels.add_products(to, out.bias, range.count, columns, out.add, out.data, out.stride);
}

// Calls body(part, products) for parts of `range`, with their products plus a bias, rows of kGroupRows in
// `tile`. Panels are multiplied part by part; other weights are unpacked for all tokens of a call, and
// require a null activation.
template <typename Body>
void multiply_parts(const Context& c, const Linear& linear, int group, const Activations& x, RowRange range,
                    const float* bias, const Activation* activation, Tile& tile, Body&& body) {
  const ProductOutput out = {tile[0], kGroupRows, bias, false, activation};
  if (!linear.in_panels()) {
    multiply_group(c, linear, group, x, range, out);
    return body(range, tile[0]);
  }
  count_products(c, linear, {group, 1}, range.count);
  const PairBlock* pairs = panels_of(c, linear, group);
  const PrefetchRange next = next_group(linear.packed, group);
  const TokenBlocks parts = divided(range.count, ceil_div(range.count, kPartTokens));
  for (int i = 0; i < parts.count; ++i) {
    RowRange part = parts.range(i);
    part.first += range.first;
    multiply_panels(c, linear, {group, 1}, pairs, x, part, out, lines_of(next, i, parts.count));
    body(part, tile[0]);
  }
}

// The bias of a group, zero beyond the matrix; null if there is none.
class GroupBias {
 public:
  GroupBias(const float* bias, int row, int n_rows) : exists_(bias != nullptr) {
    if (exists_) std::copy_n(bias + row, n_rows, values_);
  }
  const float* values() const { return exists_ ? values_ : nullptr; }

 private:
  const bool exists_;
  alignas(64) float values_[kGroupRows] = {};
};

// Number of groups that an item multiplies. With several, the matrix unit does not pause between them.
int groups_at_once(const Linear& linear, int blocks, int threads) {
  if (!linear.rotated()) return 1;
  const int groups = linear.packed.groups(), items = threads == 1 ? 1 : kItemsOfThread * threads;
  return std::clamp(groups * blocks / items, 1, groups);
}

// Multiplies the groups of an item; the products of the first one start at `out`.
void multiply_groups(const Context& c, const Linear& linear, GroupRange groups, const Activations& x,
                     RowRange range, const ProductOutput& out) {
  const int whole =
      linear.rotated() ? std::min(groups.count, linear.packed.rows / kGroupRows - groups.first) : 0;
  if (whole > 0) {
    const GroupRange together = {groups.first, whole};
    count_products(c, linear, together, range.count);
    multiply_panels(c, linear, together, nullptr, x, range, out,
                    next_group(linear.packed, groups.first + whole - 1));
  }
  for (int i = whole; i < groups.count; ++i) {
    const int group = groups.first + i, row = i * kGroupRows,
              n_rows = std::min(kGroupRows, linear.packed.rows - group * kGroupRows);
    const GroupBias bias(out.bias, row, n_rows);
    multiply_group(c, linear, group, x, range, {out.data + row, out.stride, bias.values(), out.add}, n_rows);
    if (out.activation)
      c.kernels.activate(out.data + row, out.stride, *out.activation, range.count, n_rows, out.data + row,
                         out.stride);
  }
}

// Whether results are rounded group by group, as no block of h has columns of several groups.
bool rounds_groups(const Activations& h) {
  return kGroupRows % h.forms.block_cols() == 0;
}

// Computes columns of h for a block of tokens: of one group, or of several if they share blocks of h.
void gate_groups(const Context& c, const GateAndUp& w, GroupRange groups, const Activations& x,
                 RowRange range, const Activations& h) {
  const bool whole_blocks = rounds_groups(h), in_f32 = h.forms.f32 || !whole_blocks;
  const int group = groups.first, row = group * kGroupRows;
  if (!w.gate.tensor && !whole_blocks)
    return multiply_groups(c, w.up, groups, x, range,
                           {h.f32.row(range.first) + row, h.f32.stride, w.up_bias ? w.up_bias + row : nullptr,
                            false, &w.activation});
  const int n_rows = std::min(kGroupRows, w.up.packed.rows - row);
  const GroupBias gate_bias(w.gate_bias, row, n_rows), up_bias(w.up_bias, row, n_rows);
  alignas(64) Tile gates, ups;
  // Stores results of some tokens in the other formats of h.
  const auto store = [&](RowRange part, const float* from, std::size_t stride) {
    if (!whole_blocks) return;
    if (h.forms.int8) {
      for (int t = 0; t < part.count; t += kTileTokens)
        c.kernels.quantize(from + std::size_t(t) * stride, stride, 0, std::min(part.count - t, kTileTokens),
                           1, h.int8.tile(part.first + t) + group);
    }
    if (h.forms.bfloat16)
      c.kernels.round_to_bfloat16(from, stride, part.count, n_rows, h.bfloat16.row(part.first) + row,
                                  h.bfloat16.stride);
  };
  const auto copy = [&](RowRange part, const float* from) {
    c.kernels.add_products(from, nullptr, part.count, n_rows, false, h.f32.row(part.first) + row,
                           h.f32.stride);
  };
  if (w.gate.tensor) {
    multiply_group(c, w.gate, group, x, range, {gates[0], kGroupRows, gate_bias.values()});
    multiply_group(c, w.up, group, x, range, {ups[0], kGroupRows, up_bias.values()});
    c.kernels.gated(gates[0], ups[0], w.activation, range.count * kGroupRows, gates[0]);
    if (in_f32) copy(range, gates[0]);
    store(range, gates[0], kGroupRows);
  } else {
    const bool activates = w.up.in_panels();
    multiply_parts(c, w.up, group, x, range, up_bias.values(), activates ? &w.activation : nullptr, ups,
                   [&](RowRange part, float* products) {
                     if (!activates)
                       c.kernels.activate(products, kGroupRows, w.activation, part.count, n_rows, products,
                                          kGroupRows);
                     if (in_f32) copy(part, products);
                     store(part, products, kGroupRows);
                   });
  }
}

void update(Best& best, const float* values, int n, int index) {
  unsigned candidates = 0;  // as wide as a float, so that compilers vectorize the loop
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

void multiply(const Context& c, std::initializer_list<Product> products, const NormedRows& x, int rows,
              const AttentionItems* fetch, const CacheWriter* cache) {
  int groups = 0, most = 0, unpacking = 0;
  bool in_panels = true;
  for (const Product& p : products) {
    groups += p.weight.packed.groups();
    most = std::max(most, most_tokens(p.weight));
    unpacking = std::max(unpacking, unpacking_tokens(p.weight));
    in_panels = in_panels && p.weight.in_panels();
  }
  const TokenBlocks blocks = blocks_of(rows, groups, c.worker.count(), most, unpacking);
  // Items are runs of groups of a product; K and V are stored by single groups.
  const auto length_of_runs = [&](const Product& p) {
    return p.part == CachePart::kNone && in_panels ? groups_at_once(p.weight, blocks.count, c.worker.count())
                                                   : 1;
  };
  const auto runs_of = [&](const Product& p) {
    return ceil_div(p.weight.packed.groups(), length_of_runs(p));
  };
  int runs = 0;
  for (const Product& p : products) runs += runs_of(p);
  for_each_of(c, runs * blocks.count, x, [&](int item) {
    if (fetch) fetch->fetch_share(item, runs * blocks.count);
    // Consecutive items share a block of tokens with panels, which are bound by activations: the block stays
    // in the L2 cache. Otherwise they share a group, which is unpacked again from the cache.
    const int block = in_panels ? item / runs : item % blocks.count;
    int run = in_panels ? item % runs : item / blocks.count;
    const Product* p = products.begin();
    for (; run >= runs_of(*p); ++p) run -= runs_of(*p);
    const int length = length_of_runs(*p), group = run * length;
    const GroupRange of_run = {group, std::min(length, p->weight.packed.groups() - group)};
    const RowRange range = blocks.range(block);
    const int row = group * kGroupRows,
              n_rows = std::min(of_run.count * kGroupRows, p->weight.packed.rows - row);
    const float* bias = p->bias && *p->bias ? floats(*p->bias) + row : nullptr;
    if (cache && cache->takes_columns(p->part)) {
      const GroupBias padded(bias, 0, n_rows);
      alignas(64) Tile tile;
      multiply_parts(c, p->weight, group, x.rows(), range, padded.values(), nullptr, tile,
                     [&](RowRange part, const float* products) {
                       cache->store_columns(c, p->part, row, n_rows, part, products);
                     });
    } else {
      multiply_groups(c, p->weight, of_run, x.rows(), range,
                      {p->out.row(range.first) + row, p->out.stride, bias, p->add});
    }
    if (cache) cache->computed(c, p->part, row, n_rows);
  });
}

void multiply_gated(const Context& c, const GateAndUp& w, const NormedRows& x, int rows,
                    const Activations& h) {
  const int groups = w.up.packed.groups();
  const TokenBlocks blocks =
      blocks_of(rows, groups, c.worker.count(), most_tokens(w.up), unpacking_tokens(w.up));
  const bool in_panels = w.up.in_panels();
  const int length =
      w.gate.tensor || rounds_groups(h) ? 1 : groups_at_once(w.up, blocks.count, c.worker.count());
  const int runs = ceil_div(groups, length);
  for_each_of(c, runs * blocks.count, x, [&](int item) {
    const int run = in_panels ? item % runs : item / blocks.count, first = run * length;
    gate_groups(c, w, {first, std::min(length, groups - first)}, x.rows(),
                blocks.range(in_panels ? item / runs : item % blocks.count), h);
  });
  // A block with columns of several groups is rounded once all of them are computed.
  if (!rounds_groups(h)) c.worker.for_each(rows, [&](int row) { round_row(c, h, row, w.up.packed.rows); });
}

void multiply_gated_experts(const Context& c, const GatedExperts& w, const Routes& routes,
                            const Activations& x, const Activations& h) {
  const int groups = w.up[0].packed.groups(), columns = w.up[0].packed.rows;
  const int most = most_tokens(w.up[0]);
  const Linear no_gate;
  // Divides the tiles of all experts among the threads, and groups if there are too few tiles.
  const int items = kItemsOfThread * c.worker.count(), most_tiles = std::max(routes.most_tiles(), 1);
  const int ranges = std::min(groups, std::max(ceil_div(groups, kGroupsOfItem), ceil_div(items, most_tiles)));
  const int shares = std::min(ceil_div(items, ranges), most_tiles);
  c.for_each(ranges * shares, [&](int item) {
    const int tiles = routes.tiles(), share = item / ranges;
    const int begin = share_of(tiles, share, shares), end = share_of(tiles, share + 1, shares);
    routes.for_each_block(begin, end, most, [&](int expert, RowRange range) {
      const std::size_t i = std::size_t(expert);
      const GateAndUp of_expert = {w.gate.empty() ? no_gate : w.gate[i], w.up[i], row_of(w.gate_bias, expert),
                                   row_of(w.up_bias, expert), w.activation};
      for_each_group(item % ranges, ranges, groups,
                     [&](int group) { gate_groups(c, of_expert, {group, 1}, x, range, h); });
    });
  });
  if (!rounds_groups(h))
    c.worker.for_each(routes.pairs(), [&](int pair) { round_row(c, h, routes.places[pair], columns); });
}

void add_experts(const Context& c, const DownOfExperts& w, const Routes& routes, const Activations& h,
                 const FloatRows& x) {
  const Linear& first = w.down[0];
  const int groups = first.packed.groups(), most = most_tokens(first);
  const int ranges = std::clamp(kItemsOfThread * c.worker.count(), ceil_div(groups, kGroupsOfItem), groups);
  c.for_each(ranges, [&](int item) {
    const auto columns_of = [&](int group) {
      return RowRange{group * kGroupRows, std::min(kGroupRows, first.packed.rows - group * kGroupRows)};
    };
    if (w.bias)
      for_each_group(item, ranges, groups, [&](int group) {
        const RowRange columns = columns_of(group);
        for (int t = 0; t < routes.rows; ++t)
          for (int i = columns.first; i < columns.first + columns.count; ++i) x.row(t)[i] += w.bias[i];
      });
    alignas(64) Tile tile;
    routes.for_each_block(0, routes.tiles(), most, [&](int expert, RowRange range) {
      for_each_group(item, ranges, groups, [&](int group) {
        const RowRange columns = columns_of(group);
        const auto add = [&](RowRange part, const float* sums) {
          for (int t = 0; t < part.count; ++t) {
            const Routes::Pair& pair = routes.at_place[part.first + t];
            float* out = x.row(pair.row) + columns.first;
            for (int i = 0; i < columns.count; ++i) out[i] += pair.factor * sums[t * kGroupRows + i];
          }
        };
        const GroupBias own(row_of(w.biases, expert), columns.first, columns.count);
        multiply_parts(c, w.down[std::size_t(expert)], group, h, range, own.values(), nullptr, tile, add);
      });
    });
  });
}

void multiply_head(const Context& c, const Linear& head, const Tensor& bias, const NormedRows& x, int rows,
                   float cap, float* const* logits, int first_best) {
  for_each_of(c, head.packed.groups(), x, [&](int group) {
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, head.packed.rows - row);
    const GroupBias group_bias(floats(bias), row, n_rows);
    alignas(64) Tile tile;
    multiply_group(c, head, group, x.rows(), {0, rows}, {tile[0], kGroupRows, group_bias.values()});
    for (int t = 0; t < rows; ++t) {
      if (cap != 0) c.kernels.soft_cap(tile[t], cap, n_rows);
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
