// Products of a step: matrices are cut into groups of 32 rows, prompts into blocks of tokens.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

constexpr int kTokenBlock = 192;  // tokens of an item: their activations stay in the L2 cache for all groups
constexpr int kTile = 48;  // tokens of a tile: results wait in the L1 cache for what follows the product

struct Tile {
  alignas(64) float values[kTile][kGroupRows];
};

int blocks_of(int tokens) {
  return (tokens + kTokenBlock - 1) / kTokenBlock;
}

// Rows of a group in float32, zero beyond the matrix and in the padding.
FloatRows expand_group(const Context& c, const Linear& linear, int group) {
  const Tensor& tensor = linear.tensor;
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

// Calls use(token, values[32]) for each token of [first, end), with the product of a group of rows.
template <typename F>
void for_each_product(const Context& c, const Linear& linear, int group, const Activations& x, int first,
                      int end, F&& use) {
  FloatRows rows;
  if (!linear.int8()) rows = expand_group(c, linear, group);
  Tile tile;
  for (int t = first; t < end; t += kTile) {
    const int n = std::min(kTile, end - t);
    if (linear.int8()) {
      c.kernels.multiply_int8(linear.packed, group, x.int8, t, n, tile.values[0], kGroupRows);
    } else {
      c.kernels.multiply_float(rows, linear.tensor.cols, x.f32, t, n, tile.values[0], kGroupRows);
    }
    for (int i = 0; i < n; ++i) use(t + i, tile.values[i]);
  }
}

void update(Best& best, const float* values, int n, int index) {
  bool candidate = false;
  for (int i = 0; i < n; ++i) candidate |= !(values[i] < best.value);
  if (!candidate && best.index >= 0) return;
  for (int i = 0; i < n; ++i) {
    if (std::isnan(values[i])) continue;
    const bool better =
        best.index < 0 || values[i] > best.value || (values[i] == best.value && index + i < best.index);
    if (better) best = {values[i], index + i};
  }
}

}  // namespace

void multiply(const Context& c, std::initializer_list<Product> products, const Activations& x, int tokens) {
  int items = 0;
  for (const Product& p : products) items += p.weight.packed.groups() * blocks_of(tokens - p.first);
  c.worker.for_each(items, [&](int item) {
    const Product* p = products.begin();
    for (;; ++p) {
      const int n = p->weight.packed.groups() * blocks_of(tokens - p->first);
      if (item < n) break;
      item -= n;
    }
    const int n_blocks = blocks_of(tokens - p->first);
    const int group = item / n_blocks, first = p->first + item % n_blocks * kTokenBlock;
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, p->weight.packed.rows - row);
    const auto* bias = p->bias && *p->bias ? reinterpret_cast<const float*>(p->bias->data) + row : nullptr;
    const auto store = [&](int token, const float* values) {
      float* out = p->out + std::size_t(token) * p->stride + row;
      if (p->add) {
        for (int r = 0; r < n_rows; ++r) out[r] += values[r];
      } else if (bias) {
        for (int r = 0; r < n_rows; ++r) out[r] = values[r] + bias[r];
      } else {
        std::copy_n(values, n_rows, out);
      }
    };
    for_each_product(c, p->weight, group, x, first, std::min(tokens, first + kTokenBlock), store);
  });
}

void multiply_gated(const Context& c, const Linear& gate, const Linear& up, Activation activation,
                    const Activations& x, int first, int tokens, const Activations& h) {
  const int n_blocks = blocks_of(tokens - first);
  c.worker.for_each(gate.packed.groups() * n_blocks, [&](int item) {
    const int group = item / n_blocks;
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, gate.packed.rows - row);
    const int begin = first + item % n_blocks * kTokenBlock, end = std::min(tokens, begin + kTokenBlock);
    alignas(64) float gates[kTokenBlock][kGroupRows];
    for_each_product(c, gate, group, x, begin, end, [&](int token, const float* values) {
      std::copy_n(values, kGroupRows, gates[token - begin]);
    });
    for_each_product(c, up, group, x, begin, end, [&](int token, const float* values) {
      float* out = gates[token - begin];
      c.kernels.gated(out, values, activation, kGroupRows, out);
      if (h.forms.f32) std::copy_n(out, n_rows, h.f32.row(token) + row);
      if (h.forms.int8) {
        const std::size_t n = std::size_t(h.int8.cols), t = std::size_t(token);
        c.kernels.quantize(out, kBlockCols, h.int8.q + t * n + row,
                           h.int8.blocks + (t * n + std::size_t(row)) / kBlockCols);
      }
    });
  });
}

void multiply_head(const Context& c, const Linear& head, const Activations& x, int tokens, float* logits) {
  const int vocab_size = head.packed.rows;
  c.scratch.best = {};
  c.worker.for_each(head.packed.groups(), [&](int group) {
    const int row = group * kGroupRows, n_rows = std::min(kGroupRows, vocab_size - row);
    for_each_product(c, head, group, x, 0, tokens, [&](int token, const float* values) {
      std::copy_n(values, n_rows, logits + std::size_t(token) * std::size_t(vocab_size) + row);
      if (token == 0) update(c.scratch.best, values, n_rows, row);
    });
  });
}

Best best_of(std::span<const Scratch> scratch) {
  Best best;
  for (const Scratch& s : scratch) {
    if (s.best.index >= 0) update(best, &s.best.value, 1, s.best.index);
  }
  return best;
}

}  // namespace metal_prefill::cpu
