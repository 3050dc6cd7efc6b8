// A model for the engines: hyperparameters and views of weights that stay in the mapped file.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../base/token.h"
#include "quants.h"

namespace metal_prefill {

enum class RopeStyle { kInterleaved, kNeox };  // pairs (2i, 2i+1), or (i, i + rope_dim/2)
enum class RopeScaling { kNone, kLinear, kYarn };
// kGelu is the tanh approximation, kGeluErf the exact function. kClampedSilu also limits and shifts the
// factor of the gate (shaders/clamped_silu.h).
enum class Activation { kSilu, kGelu, kGeluErf, kRelu, kClampedSilu };
enum class NormKind { kRms, kLayer };  // RMSNorm, or LayerNorm, which subtracts the mean first
// Input of the norms of q and k: each head, before or after its rotation, or all heads of a token together,
// before the rotation.
enum class QkNormPlace { kHeads, kRotatedHeads, kRows };
// The step of a layer that mixes tokens.
enum class LayerKind : std::uint8_t {
  kAttention,   // keys and values of all positions, in pages
  kShortConv,   // gated convolution over the last conv_taps tokens; all but one of its inputs are its state
  kStateSpace,  // a convolution, then the scan of a state-space layer (Mamba-2): a matrix for each head
  kAttentionAndStateSpace,  // both, of the same input; their outputs are added
  kGatedDelta,              // a convolution, then the gated delta rule: a matrix for each head
};

// The step of a layer that treats each token independently.
enum class FeedForwardKind : std::uint8_t {
  kNone,
  kDense,
  kExperts,  // a router chooses some of many for each token
};
// How router outputs become scores: over all experts, or for each one alone.
enum class RouterScore { kSoftmax, kSigmoid };

constexpr bool has_attention(LayerKind kind) {
  return kind == LayerKind::kAttention || kind == LayerKind::kAttentionAndStateSpace;
}

constexpr bool has_state_space(LayerKind kind) {
  return kind == LayerKind::kStateSpace || kind == LayerKind::kAttentionAndStateSpace;
}

constexpr bool has_matrix_state(LayerKind kind) {
  return has_state_space(kind) || kind == LayerKind::kGatedDelta;
}

// Architectures differ only in this data; the forward passes know none by name.
struct Config {
#define CONFIG(type, name, value, text) type name = value;
#include "config.inc"
  int padding = 0;  // zeros at the end of `dim` values, which kernels include in means of squares

  bool operator==(const Config&) const = default;
  // This configuration with the dimensions of one layer in place of those of all.
  Config of_layer(int layer) const;
  // Whether a layer has keys and values of its own.
  bool caches(int layer) const {
    return has_attention(kind(layer)) && (layer_cache.empty() || layer_cache[std::size_t(layer)] == layer);
  }
  int embedding_width() const { return embedding_dim > 0 ? embedding_dim : dim; }
  // Distance between the queries of adjacent heads, in values.
  int query_step() const { return query_gate ? 2 * key_dim : key_dim; }
  bool uses_rope(int layer) const { return layer_uses_rope.empty() || layer_uses_rope[layer] != 0; }
  LayerKind kind(int layer) const {
    return layer_kinds.empty() ? LayerKind::kAttention : layer_kinds[std::size_t(layer)];
  }
  FeedForwardKind feed_forward(int layer) const {
    if (!layer_feed_forwards.empty()) return layer_feed_forwards[std::size_t(layer)];
    return ffn_dim > 0 ? FeedForwardKind::kDense : FeedForwardKind::kNone;
  }
  int scan_dim() const { return scan_heads * scan_value_dim; }
  // Channels of the convolution before a recurrence: keys, queries and values.
  int scan_channels() const { return 2 * scan_groups * scan_key_dim + scan_dim(); }
  // Channels of the convolution of layers of a kind; 0: they have none.
  int conv_channels(LayerKind kind) const {
    if (has_matrix_state(kind)) return scan_channels();
    return kind == LayerKind::kShortConv ? dim : 0;
  }
  // Output columns of the first projections of layers of a kind. A short convolution has two gates and its
  // input. A recurrence has gates of its output, the input of its convolution, and for each head the step of
  // a scan, or the two rates of a gated delta rule.
  int recurrent_in_dim(LayerKind kind) const {
    if (!has_matrix_state(kind)) return 3 * conv_channels(kind);
    return scan_dim() + scan_channels() + (kind == LayerKind::kGatedDelta ? 2 : 1) * scan_heads;
  }
  // The state that a layer keeps of the tokens before a position, in float32: the inputs of its convolution,
  // [conv_taps - 1][conv_channels], the oldest token first, then its matrices, [scan_heads][scan_key_dim]
  // [scan_value_dim].
  std::size_t conv_state_values(int layer) const {
    return std::size_t(conv_channels(kind(layer))) * std::size_t(conv_taps > 0 ? conv_taps - 1 : 0);
  }
  std::size_t matrix_state_values(int layer) const {
    return has_matrix_state(kind(layer)) ? std::size_t(scan_dim()) * std::size_t(scan_key_dim) : 0;
  }
  std::size_t state_values(int layer) const { return conv_state_values(layer) + matrix_state_values(layer); }
  int window(int layer) const { return layer_window.empty() ? 0 : layer_window[layer]; }

  // A pass keeps the residual stream divided by residual_scale, so that a block adds its output without a
  // factor. RMSNorm of that stream with stream_eps() equals RMSNorm of the undivided one with norm_eps.
  float stream_embedding_scale() const { return embedding_scale / residual_scale; }
  float stream_eps() const { return block_eps() / (residual_scale * residual_scale); }
  float block_eps() const {  // of norms of a block's output
    return norm_kind == NormKind::kLayer ? norm_eps : norm_eps * float(dim - padding) / float(dim);
  }

  float score_scale() const {  // multiplies q.k
    return attention_scale != 0.0f ? attention_scale : 1.0f / std::sqrt(float(key_dim));
  }
};

// Config::of_layer of each layer; layers with equal dimensions share one.
class LayerConfigs {
 public:
  explicit LayerConfigs(const Config& config);
  const Config& operator[](int layer) const { return distinct_[of_layer_[std::size_t(layer)]]; }
  std::span<const Config> distinct() const { return distinct_; }

 private:
  std::vector<Config> distinct_;
  std::vector<std::size_t> of_layer_;
};

// ALiBi (arXiv:2108.12409): each head subtracts its slope from a score for each position of distance. Empty
// without ALiBi. Slopes are powers of one factor; those of heads beyond a power of two are between the
// others.
inline std::vector<float> alibi_slopes(const Config& config) {
  std::vector<float> slopes;
  if (config.max_alibi_bias == 0.0f) return slopes;
  const int whole = int(std::bit_floor(unsigned(config.n_heads)));
  for (int head = 0; head < config.n_heads; ++head) {
    const float steps = head < whole ? float(head + 1) : float(head - whole) + 0.5f;
    slopes.push_back(std::exp2(-config.max_alibi_bias * steps / float(whole)));
  }
  return slopes;
}

// Number of first tokens of a sequence that have type 0; later ones have type 1. If it is not stated (-1), a
// sequence of two texts is assumed, of which the first ends with the first separator.
inline int first_segment(const Config& config, std::span<const TokenId> tokens, int stated) {
  if (config.token_types < 2) return int(tokens.size());
  if (stated >= 0) return stated;
  const auto separator = std::find(tokens.begin(), tokens.end(), config.separator_id);
  return int(separator - tokens.begin()) + 1;
}

// A tensor in the mapped file. Rows are contiguous; a matrix is [rows][cols] with `cols` the inner (input)
// dimension.
struct Tensor {
  std::string name;
  TensorType type = TensorType::kF32;
  int rows = 0;  // 1 for a vector
  int cols = 0;
  const std::byte* data = nullptr;  // null: the tensor is absent (optional ones only)
  std::size_t bytes = 0;

  explicit operator bool() const { return data != nullptr; }
  const std::byte* row(int r) const { return data + std::size_t(r) * (bytes / std::size_t(rows)); }
};

// Weights of a layer. tensors.inc defines their shapes and which ones are optional.
struct LayerWeights {
#define LAYER_TENSOR(member, ...) Tensor member;
#include "tensors.inc"
};

// The mapped file. Engines keep it alive while they hold views into it.
struct Mapping {
  const std::byte* data = nullptr;  // page-aligned start of the mapping
  std::size_t bytes = 0;
  std::shared_ptr<void> owner;  // releases the mapping
};

struct Model {
  Config config;
  Mapping mapping;
  Mapping packed;  // Engine::packed_weights() of an equal engine; empty: pack anew
  std::vector<LayerWeights> layers;
#define MODEL_TENSOR(member, ...) Tensor member;
#include "tensors.inc"
};

// Checks every shape and extent against the configuration and the mapping. Throws std::invalid_argument
// naming the tensor, its value and the expected one.
void validate(const Model& model);

// Place of each layer's K and V in a page: its index among the layers with their own K and V, or the place of
// the layer that it shares them with. A layer without attention has the place of the previous layer, or -1.
// If tokens attend to later ones, all layers share one place: a pass computes whole texts, and reads K and V
// of a layer only in that layer.
std::vector<int> attention_places(const Config& config);

}  // namespace metal_prefill
