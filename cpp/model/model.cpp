#include "model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "tensors.h"

namespace metal_prefill {

namespace {

std::string shape_text(std::int64_t rows, std::int64_t cols) {
  return rows == 1 ? "[" + std::to_string(cols) + "]"
                   : "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// `config` has the dimensions of the tensor's layer.
void check_tensor(const Model& model, const Config& config, const TensorRow& row, const Tensor& t) {
  if (!t) {
    if (row.needed()) throw std::invalid_argument("a tensor '" + std::string(row.name) + "' is missing");
    return;
  }
  const std::int64_t rows = groups_of(row.rows, config).length();
  const std::int64_t cols = groups_of(row.cols, config).length();
  if (t.rows != rows || t.cols != cols)
    throw std::invalid_argument("tensor '" + t.name + "' has shape " + shape_text(t.rows, t.cols) +
                                ", expected " + shape_text(rows, cols));
  const std::size_t expected = row_bytes(t.type, std::size_t(cols)) * std::size_t(rows);
  const std::byte* end = model.mapping.data + model.mapping.bytes;
  if (t.bytes != expected || t.data < model.mapping.data || t.data > end ||
      std::size_t(end - t.data) < t.bytes)
    throw std::invalid_argument("tensor '" + t.name + "' of " + std::to_string(expected) +
                                " bytes does not lie within the file");
  if (row.kind != TensorKind::kMatrix && row.kind != TensorKind::kExperts && t.type != TensorType::kF32)
    throw std::invalid_argument("tensor '" + t.name + "' is " + std::string(type_info(t.type).name) +
                                ", expected F32");
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("invalid configuration: ") + what);
}

}  // namespace

std::vector<int> attention_places(const Config& config) {
  std::vector<int> places;
  int next = 0;
  for (int layer = 0; layer < config.n_layers; ++layer) {
    if (config.caches(layer)) next = config.causal ? next + 1 : 1;
    const bool shares = has_attention(config.kind(layer)) && !config.caches(layer);
    places.push_back(shares ? places[std::size_t(config.layer_cache[std::size_t(layer)])] : next - 1);
  }
  return places;
}

Config Config::of_layer(int layer) const {
  Config own = *this;
  const auto set = [&](const std::vector<int>& values, std::initializer_list<int Config::*> dimensions) {
    if (values.empty()) return;
    for (int Config::* dimension : dimensions) own.*dimension = values.at(std::size_t(layer));
  };
  set(layer_kv_heads, {&Config::n_kv_heads});
  set(layer_head_dim, {&Config::key_dim, &Config::value_dim});
  set(layer_rope_dim, {&Config::rope_dim});
  set(layer_ffn_dim, {&Config::ffn_dim});
  return own;
}

LayerConfigs::LayerConfigs(const Config& config) {
  const auto dimensions = [](const Config& c) {
    return std::array{c.n_kv_heads, c.key_dim, c.value_dim, c.rope_dim, c.ffn_dim};
  };
  for (int layer = 0; layer < config.n_layers; ++layer) {
    const bool all_same = layer > 0 && config.layer_kv_heads.empty() && config.layer_head_dim.empty() &&
                          config.layer_rope_dim.empty() && config.layer_ffn_dim.empty();
    if (all_same) {
      of_layer_.push_back(0);
      continue;
    }
    Config own = config.of_layer(layer);
    const auto same = std::find_if(distinct_.begin(), distinct_.end(),
                                   [&](const Config& other) { return dimensions(own) == dimensions(other); });
    of_layer_.push_back(std::size_t(same - distinct_.begin()));
    if (same == distinct_.end()) distinct_.push_back(std::move(own));
  }
}

namespace {

// Throws unless each dimension of a layer is at most that of all, and layers that share keys and values have
// equal heads.
void check_layers(const Config& c) {
  const auto within = [&](const std::vector<int>& values, std::initializer_list<int> largest) {
    for (const int most : largest)
      require(std::all_of(values.begin(), values.end(), [&](int n) { return n >= 0 && n <= most; }),
              "the dimensions of a layer must be at most those of the model");
  };
  within(c.layer_kv_heads, {c.n_kv_heads});
  within(c.layer_head_dim, {c.key_dim, c.value_dim});
  within(c.layer_rope_dim, {c.rope_dim});
  within(c.layer_ffn_dim, {c.ffn_dim});
  const bool differ = !(c.layer_kv_heads.empty() && c.layer_head_dim.empty() && c.layer_cache.empty());
  require(!differ || c.causal, "layers with heads of their own need a causal model");
  const auto of = [](const std::vector<int>& values, int layer) {
    return values.empty() ? 0 : values[std::size_t(layer)];
  };
  for (int layer = 0; layer < c.n_layers; ++layer) {
    if (!c.layer_kv_heads.empty() && has_attention(c.kind(layer)))
      require(of(c.layer_kv_heads, layer) > 0 && c.n_heads % of(c.layer_kv_heads, layer) == 0,
              "the number of heads must be a multiple of the key-value heads of each layer");
    if (!c.layer_head_dim.empty()) {
      const int rotated = c.layer_rope_dim.empty() ? c.rope_dim : of(c.layer_rope_dim, layer);
      require(of(c.layer_head_dim, layer) > 0 && rotated % 2 == 0 && rotated <= of(c.layer_head_dim, layer),
              "the rotated dimensions must be an even part of the head of each layer");
    }
    if (c.layer_cache.empty()) continue;
    const int other = of(c.layer_cache, layer);
    require(other >= 0 && other <= layer && c.layer_cache[std::size_t(other)] == other &&
                has_attention(c.kind(other)) && has_attention(c.kind(layer)),
            "a layer must attend to its own keys and values or to those of an earlier layer");
    require(of(c.layer_kv_heads, layer) == of(c.layer_kv_heads, other) &&
                of(c.layer_head_dim, layer) == of(c.layer_head_dim, other),
            "layers that share keys and values must have equal heads");
  }
}

}  // namespace

void validate(const Model& model) {
  const Config& c = model.config;
  const auto any_layer = [&](const auto& holds) {
    for (int layer = 0; layer < c.n_layers; ++layer)
      if (holds(c.kind(layer))) return true;
    return false;
  };
  require(c.n_layers >= 0 && c.dim > 0 && c.ffn_dim >= 0 && c.vocab_size > 0 && c.context_length > 0,
          "dimensions, vocabulary and context length must be positive");
  const auto complete = [&](const auto&... lists) {
    return ((lists.empty() || lists.size() == std::size_t(c.n_layers)) && ...);
  };
  require(complete(c.layer_uses_rope, c.layer_window, c.layer_rope_base, c.layer_rope_factor,
                   c.layer_rope_freqs, c.layer_kinds, c.layer_cache, c.layer_kv_heads, c.layer_head_dim,
                   c.layer_rope_dim, c.layer_ffn_dim, c.layer_feed_forwards),
          "per-layer lists must name every layer");
  if (any_layer(has_attention)) {
    require(c.n_heads > 0 && c.n_kv_heads > 0 && c.n_heads % c.n_kv_heads == 0,
            "the number of heads must be a multiple of the number of key-value heads");
    require(c.key_dim > 0 && c.value_dim > 0, "head dimensions must be positive");
  } else {
    require(c.n_heads == 0 && c.n_kv_heads == 0 && c.key_dim == 0 && c.value_dim == 0,
            "heads must have dimensions where a layer has attention, and only there");
  }
  require(c.rope_dim >= 0 && c.rope_dim <= c.key_dim && c.rope_dim % 2 == 0,
          "the rotated dimensions must be an even part of the head");
  require(c.rope_base > 0 && c.rope_factor > 0 && c.norm_eps >= 0,
          "rope and norm parameters must be positive");
  const float scales[] = {c.residual_scale, c.logit_scale, c.stream_embedding_scale(), c.stream_eps()};
  require(
      std::all_of(std::begin(scales), std::end(scales), [](float s) { return s > 0 && std::isfinite(s); }),
      "scales of the embedding, of the residual stream and of the logits must be positive and finite, also "
      "one divided by the other");
  require(c.rope_scaling != RopeScaling::kYarn || c.rope_original_context > 0,
          "YaRN scaling needs the original context length");
  check_layers(c);
  require(c.per_layer_dim >= 0 &&
              (c.per_layer_dim == 0 || c.n_layers <= std::numeric_limits<int>::max() / c.per_layer_dim),
          "the inputs of layers must be countable");
  require((c.per_layer_dim > 0) == bool(model.per_layer_embedding) &&
              (c.per_layer_dim > 0) == bool(model.per_layer_projection) &&
              (c.per_layer_dim > 0) == bool(model.per_layer_norm),
          "inputs of layers need their embedding, its projection and a norm");
  require(c.score_cap >= 0 && std::isfinite(c.score_cap) && c.logit_cap >= 0 && std::isfinite(c.logit_cap),
          "soft limits of scores and logits must not be negative");
  require(c.max_alibi_bias >= 0 && std::isfinite(c.max_alibi_bias), "the bias of ALiBi must be positive");
  require(c.token_types >= 0 && c.separator_id >= -1, "token types and the separator must not be negative");
  require(bool(model.output) == c.has_head, "the output projection must be there where the model has logits");
  require(bool(model.output_norm) || !c.has_head, "logits need the output norm");
  require(!model.position_bias || !c.causal, "a position bias needs a text that enters as a whole");
  require(c.embedding_dim >= 0 && (c.embedding_dim == 0 || (model.embedding_projection && !c.causal)),
          "an embedding of its own width needs its projection, and a text that enters as a whole");
  require(c.distinct_layers >= 0 && c.distinct_layers <= c.n_layers,
          "layers with weights of their own must be some of all");
  require(c.relative_rows >= 0, "rows of relative positions must not be negative");
  require(c.relative_rows == 0 || c.context_length <= std::numeric_limits<int>::max() / 2,
          "distances of relative positions must be countable");
  require(c.relative_rows == 0 || (model.relative_row_of && !c.causal && c.n_heads == c.n_kv_heads),
          "relative positions need their rows, keys for each head, and a text that enters as a whole");
  require(c.token_types == 0 || (model.token_types && !c.causal),
          "token types need their embedding, and a text that enters as a whole");
  const bool convolves = any_layer([](LayerKind kind) { return kind == LayerKind::kShortConv; });
  const bool recurs = any_layer(has_matrix_state);
  require(!(convolves || recurs) || c.causal, "layers with a state need a causal model");
  require(!(convolves || recurs) || c.conv_taps >= 2, "a convolution must cover two tokens or more");
  require(!c.parallel || (c.layer_kinds.empty() && c.n_experts == 0),
          "only layers with attention and a dense feed-forward can compute both in parallel");
  require(!convolves || c.dim <= std::numeric_limits<int>::max() / 3,
          "the channels of a convolution must be countable");
  require(!recurs || (c.scan_heads > 0 && c.scan_groups > 0 && c.scan_key_dim > 0 && c.scan_value_dim > 0 &&
                      c.scan_heads % c.scan_groups == 0),
          "layers with a matrix as state must have heads in whole groups, with dimensions");
  const auto projected = [&] {  // at least recurrent_in_dim(), without overflow
    return (2.0 * c.scan_value_dim + 2.0) * c.scan_heads + 2.0 * c.scan_groups * c.scan_key_dim;
  };
  require(!recurs || projected() <= std::numeric_limits<int>::max(),
          "the rows of the projections of a recurrence must be countable");
  require(!c.query_gate || c.key_dim == c.value_dim, "a gate of heads must be as wide as their values");
  require(model.layers.size() == std::size_t(c.n_layers), "weights of every layer are needed");
  const LayerConfigs configs(c);
  for (int layer = 0; layer < c.n_layers; ++layer) {
    const LayerWeights& w = model.layers[std::size_t(layer)];
    require(
        bool(w.relative_keys) == (c.relative_rows > 0) && bool(w.relative_queries) == (c.relative_rows > 0),
        "relative positions need keys and queries in every layer");
    require((c.per_layer_dim > 0) == bool(w.per_layer_gate) &&
                (c.per_layer_dim > 0) == bool(w.per_layer_out) &&
                (c.per_layer_dim > 0) == bool(w.per_layer_post_norm),
            "the input of a layer needs a gate, a projection and a norm");
    require(c.feed_forward(layer) != FeedForwardKind::kDense || configs[layer].ffn_dim > 0,
            "the width of a dense feed-forward must be positive");
    require(c.activation != Activation::kClampedSilu || c.feed_forward(layer) != FeedForwardKind::kDense ||
                w.w_gate,
            "the limits of an activation need a gate");
    if (c.feed_forward(layer) != FeedForwardKind::kExperts) continue;
    require(c.experts_used > 0 && c.experts_used <= c.n_experts && c.expert_dim > 0 && c.shared_dim >= 0,
            "a token must use some of the experts, whose width must be positive");
    require(c.route_scale > 0 && std::isfinite(c.route_scale), "the scale of experts must be positive");
    require(bool(w.gate_experts_bias) == bool(w.up_experts_bias),
            "gate and up of experts must both have biases");
    require(!w.post_ffn_norm, "experts add to the residual stream without a norm of their sum");
  }

  for (const auto& [row, member] : kModelTensors) check_tensor(model, c, row, model.*member);
  for (int layer = 0; layer < c.n_layers; ++layer)
    for (const auto& [row, layers, member] : kLayerTensors)
      if (has_rows_of(layers, c, layer))
        check_tensor(model, configs[layer], row, model.layers[std::size_t(layer)].*member);
}

}  // namespace metal_prefill
