#include "padding.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "../../base/rounding.h"
#include "../../engine/engine.h"
#include "../../model/tensors.h"

namespace metal_prefill::metal {

namespace {

constexpr int kItem = 8;
constexpr std::size_t kTensorAlignment = 32;

// The rows or the columns of a tensor: `count` groups of `size`, which become groups of `wide`.
struct Widening {
  int count, size, wide;
  bool unchanged() const { return size == wide; }
};

// Collects the padded tensors one after another and makes one mapping of them.
class Arena {
 public:
  // Rows and columns of `t` spread over wider groups, zeros between them.
  void add(Tensor& t, const Widening& rows, const Widening& cols) {
    const TypeInfo& info = type_info(t.type);
    const bool dequantized = info.block_values > 1 && !cols.unchanged();
    const TensorType type = dequantized ? TensorType::kF32 : t.type;
    const int n_rows = rows.count * rows.wide, n_cols = cols.count * cols.wide;
    const std::size_t stride = row_bytes(type, std::size_t(n_cols));
    const std::size_t begin = round_up(bytes_.size(), kTensorAlignment);
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

  // A norm's weights. The mean over more dimensions is smaller by the factor size / wide; scaling the weights
  // makes up for that.
  void add_norm(Tensor& t, const Widening& rows, const Widening& cols) {
    add(t, rows, cols);
    auto* weights = reinterpret_cast<float*>(bytes_.data() + placed_.back().second);
    for (int i = 0; i < cols.size; ++i) weights[i] *= std::sqrt(float(cols.size) / float(cols.wide));
  }

  // Points the tensors at their place in one mapping.
  Mapping finish() {
    const auto page = std::size_t(getpagesize());
    const std::size_t size = round_up(bytes_.size(), page);
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
  const int dimensions[] = {c.dim,     c.embedding_width(), c.key_dim,    c.value_dim,
                            c.ffn_dim, c.expert_dim,        c.shared_dim, c.scan_dim()};
  return std::all_of(std::begin(dimensions), std::end(dimensions), [](int n) { return n % kItem == 0; });
}

void refuse_differing_layers(const Config& c) {
  const auto refuse = [](const std::string& what) {
    throw UnsupportedModelError("the Metal engine does not support " + what + ": use device='cpu'");
  };
  if (c.per_layer_dim > 0) refuse("inputs of layers, of " + std::to_string(c.per_layer_dim) + " values");
  if (!c.layer_cache.empty()) refuse("layers that share keys and values");
  if (!(c.layer_head_dim.empty() && c.layer_kv_heads.empty() && c.layer_rope_dim.empty()))
    refuse("layers with different heads, of up to " + std::to_string(c.key_dim) + " dimensions");
  if (!c.layer_ffn_dim.empty())
    refuse("feed-forwards of different widths, of up to " + std::to_string(c.ffn_dim));
  if (c.value_norm) refuse("a norm of values");
}

Model pad_model(const Model& original) {
  Model model = original;
  const Config& own = original.config;
  refuse_differing_layers(own);
  if (own.norm_kind == NormKind::kLayer)
    throw UnsupportedModelError("LayerNorm over " + std::to_string(own.dim) +
                                " values, or heads and a feed-forward that are not multiples of 8: the Metal "
                                "engine pads dimensions with zeros, which would change means");
  if (own.scan_dim() % kItem != 0)
    throw UnsupportedModelError("a recurrence of " + std::to_string(own.scan_dim()) +
                                " values: the Metal engine needs a multiple of 8");
  Config& c = model.config;
  for (int Config::* dimension : {&Config::dim, &Config::ffn_dim, &Config::expert_dim, &Config::shared_dim,
                                  &Config::key_dim, &Config::value_dim})
    c.*dimension = round_up(own.*dimension, kItem);
  c.attention_scale = own.score_scale();  // by the heads as they were
  c.dim_filled = float(own.dim) / float(c.dim);

  const auto widening = [&](Extent extent) {
    const Groups from = groups_of(extent, own), to = groups_of(extent, c);
    return Widening{from.count, from.size, to.size};
  };
  Arena arena;
  const bool tied = original.output.data == original.token_embedding.data;
  for_each_tensor(model, [&](const TensorRow& row, Tensor& t) {
    if (!t || (tied && &t == &model.output)) return;
    const Widening rows = widening(row.rows), cols = widening(row.cols);
    if (row.kind != TensorKind::kNorm) return arena.add(t, rows, cols);
    if (row.cols != Extent::kDim && !cols.unchanged())
      throw UnsupportedModelError("normalized heads of " + std::to_string(own.key_dim) +
                                  " dimensions: the Metal engine needs a multiple of 8");
    arena.add_norm(t, rows, cols);
  });
  model.mapping = arena.finish();
  if (tied) model.output = model.token_embedding;
  return model;
}

}  // namespace metal_prefill::metal
