#include "padding.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "../engine.h"

namespace metal_prefill::metal {

namespace {

constexpr int kItem = 8;
constexpr std::size_t kTensorAlignment = 32;

int padded(int n) {
  return (n + kItem - 1) / kItem * kItem;
}

// `count` groups of `size` rows or columns, which become groups of `wide`: the heads of a projection, say.
struct Groups {
  int count, size, wide;
  Groups(int n_groups, int group_size) : count(n_groups), size(group_size), wide(padded(group_size)) {}
  explicit Groups(int n) : Groups(1, n) {}
  static Groups unpadded(int n) {
    Groups groups(n);
    groups.wide = n;
    return groups;
  }
  bool unchanged() const { return size == wide; }
};

// Collects the padded tensors one behind the other, and lays them out as a mapping.
class Arena {
 public:
  // Rows and columns of `t` spread over wider groups, zeros between them.
  void add(Tensor& t, const Groups& rows, const Groups& cols) {
    if (!t) return;
    const TypeInfo& info = type_info(t.type);
    const bool dequantized = info.block_values > 1 && !cols.unchanged();
    const TensorType type = dequantized ? TensorType::kF32 : t.type;
    const int n_rows = rows.count * rows.wide, n_cols = cols.count * cols.wide;
    const std::size_t stride = row_bytes(type, std::size_t(n_cols));
    const std::size_t begin = (bytes_.size() + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    bytes_.resize(begin + stride * std::size_t(n_rows));

    std::vector<float> values(dequantized ? std::size_t(t.cols) : 0);
    for (int r = 0; r < t.rows; ++r) {
      const std::byte* from = t.row(r);
      if (dequantized) {
        dequantize_row(t.type, from, values.data(), values.size());
        from = reinterpret_cast<const std::byte*>(values.data());
      }
      std::byte* to = bytes_.data() + begin + std::size_t(r / rows.size * rows.wide + r % rows.size) * stride;
      if (cols.unchanged()) {
        std::memcpy(to, from, stride);
        continue;
      }
      const std::size_t element = row_bytes(type, 1);
      for (int group = 0; group < cols.count; ++group)
        std::memcpy(to + std::size_t(group * cols.wide) * element,
                    from + std::size_t(group * cols.size) * element, std::size_t(cols.size) * element);
    }
    placed_.push_back({&t, begin});
    t.type = type;
    t.rows = n_rows;
    t.cols = n_cols;
    t.bytes = stride * std::size_t(n_rows);
  }

  // A norm's weights. Its mean over more dimensions is smaller by size / wide, which the weights make up for.
  void add_norm(Tensor& t, int size) {
    if (!t) return;
    add(t, Groups::unpadded(1), Groups(size));
    auto* weights = reinterpret_cast<float*>(bytes_.data() + placed_.back().second);
    for (int i = 0; i < size; ++i) weights[i] *= std::sqrt(float(size) / float(padded(size)));
  }

  // Points the tensors at their place in one mapping.
  Mapping finish() {
    const auto page = std::size_t(getpagesize());
    const std::size_t size = (bytes_.size() + page - 1) / page * page;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(page, size));
    if (!memory) throw std::bad_alloc();
    std::shared_ptr<void> owner(memory, std::free);
    std::memcpy(memory, bytes_.data(), bytes_.size());
    for (const auto& [tensor, begin] : placed_) tensor->data = memory + begin;
    return {memory, bytes_.size(), std::move(owner)};
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::pair<Tensor*, std::size_t>> placed_;
};

}  // namespace

bool fits_kernels(const Config& c) {
  return c.dim % kItem == 0 && c.key_dim % kItem == 0 && c.value_dim % kItem == 0 && c.ffn_dim % kItem == 0;
}

Model pad_model(const Model& original) {
  Model model = original;
  Config& c = model.config;
  const Groups dim(c.dim), ffn(c.ffn_dim), vocab = Groups::unpadded(c.vocab_size);
  const Groups q(c.n_heads, c.key_dim), k(c.n_kv_heads, c.key_dim), v(c.n_kv_heads, c.value_dim);
  const Groups att(c.n_heads, c.value_dim), one = Groups::unpadded(1);

  Arena arena;
  const bool tied = original.output.data == original.token_embedding.data;
  arena.add(model.token_embedding, vocab, dim);
  if (!tied) arena.add(model.output, vocab, dim);
  arena.add_norm(model.output_norm, c.dim);
  for (LayerWeights& w : model.layers) {
    if ((w.q_norm || w.k_norm) && !k.unchanged())
      throw UnsupportedModelError("normalized heads of " + std::to_string(c.key_dim) +
                                  " dimensions: the Metal engine needs a multiple of 8");
    for (Tensor* norm : {&w.attn_norm, &w.ffn_norm, &w.post_attn_norm, &w.post_ffn_norm})
      arena.add_norm(*norm, c.dim);
    for (Tensor* norm : {&w.q_norm, &w.k_norm}) arena.add(*norm, one, Groups(c.key_dim));
    arena.add(w.wq, q, dim);
    arena.add(w.wk, k, dim);
    arena.add(w.wv, v, dim);
    arena.add(w.bq, one, q);
    arena.add(w.bk, one, k);
    arena.add(w.bv, one, v);
    arena.add(w.wo, dim, att);
    arena.add(w.w_gate, ffn, dim);
    arena.add(w.w_up, ffn, dim);
    arena.add(w.w_down, dim, ffn);
  }
  arena.add(model.rope_freqs, one, Groups::unpadded(c.rope_dim / 2));
  model.mapping = arena.finish();
  if (tied) model.output = model.token_embedding;

  if (c.attention_scale == 0.0f) c.attention_scale = 1.0f / std::sqrt(float(c.key_dim));
  c.norm_eps *= float(c.dim) / float(dim.wide);
  c.dim = dim.wide;
  c.ffn_dim = ffn.wide;
  c.key_dim = k.wide;
  c.value_dim = v.wide;
  return model;
}

}  // namespace metal_prefill::metal
