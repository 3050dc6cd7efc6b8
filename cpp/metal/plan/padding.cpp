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
#include "../../model/tensors.h"

namespace metal_prefill::metal {

namespace {

constexpr std::size_t kTensorAlignment = 32;

// The rows or columns of a tensor: `count` groups of `size`, which are widened to `wide`.
struct Widening {
  int count, size, wide;
  bool unchanged() const { return size == wide; }
};

// Collects the padded tensors in one mapping.
class Arena {
 public:
  // Copies `t` with its rows and columns in wider groups, padded with zeros.
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

  // Adds a norm's weights, scaled: the mean over the padded dimensions is smaller by the factor size / wide.
  void add_norm(Tensor& t, const Widening& rows, const Widening& cols) {
    add(t, rows, cols);
    auto* weights = reinterpret_cast<float*>(bytes_.data() + placed_.back().second);
    for (int i = 0; i < cols.size; ++i) weights[i] *= std::sqrt(float(cols.size) / float(cols.wide));
  }

  // Points all tensors into one mapping.
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
  const int dimensions[] = {c.dim,        c.embedding_width(), c.key_dim,    c.value_dim,    c.ffn_dim,
                            c.expert_dim, c.shared_dim,        c.scan_dim(), c.per_layer_dim};
  const auto fits = [](int n) { return n % kItem == 0; };
  return std::all_of(std::begin(dimensions), std::end(dimensions), fits) &&
         std::all_of(c.layer_head_dim.begin(), c.layer_head_dim.end(), fits) &&
         std::all_of(c.layer_ffn_dim.begin(), c.layer_ffn_dim.end(), fits);
}

Model pad_model(const Model& original) {
  Model model = original;
  const Config& own = original.config;
  Config& c = model.config;
  for (int Config::* dimension : {&Config::dim, &Config::ffn_dim, &Config::expert_dim, &Config::shared_dim,
                                  &Config::key_dim, &Config::value_dim, &Config::per_layer_dim})
    c.*dimension = round_up(own.*dimension, kItem);
  for (int& dimension : c.layer_ffn_dim) dimension = round_up(dimension, kItem);
  if (own.layer_head_dim.empty()) c.attention_scale = own.score_scale();  // of the unpadded heads
  c.padding = c.dim - own.dim;

  const auto widening = [&](Extent extent, int layer) {
    const Groups from = groups_of(extent, layer < 0 ? own : own.of_layer(layer)),
                 to = groups_of(extent, layer < 0 ? c : c.of_layer(layer));
    return Widening{from.count, from.size, to.size};
  };
  Arena arena;
  const bool tied = original.output.data == original.token_embedding.data;
  for_each_tensor(model, [&](const TensorRow& row, Tensor& t, int layer) {
    if (!t || (tied && &t == &model.output) || &t == &model.per_layer_embedding) return;
    const Widening rows = widening(row.rows, layer), cols = widening(row.cols, layer);
    // LayerNorm and the norm of layers' inputs exclude the padding from means.
    const bool counts_padding = own.norm_kind == NormKind::kRms && row.cols != Extent::kLayerInput;
    if (row.kind == TensorKind::kNorm && counts_padding) return arena.add_norm(t, rows, cols);
    arena.add(t, rows, cols);
  });
  model.mapping = arena.finish();
  if (tied) model.output = model.token_embedding;
  return model;
}

}  // namespace metal_prefill::metal
